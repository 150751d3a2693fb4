"""Linear, logistic and softmax: losses, gradients, statistics, curvature, predictions, bad input."""

import json
import math

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import hessian

from coterie import models
from coterie._core.errors import DataError, SettingError
from coterie.models.glm import Glm

CLIENTS, ROWS, FEATURES = 3, 9, 4
KINDS = ("linear", "logistic", "softmax")
SETTINGS = [
    {},
    {"l2": 0.3},
    {"l2": 0.3, "intercept": True},
    {"intercept": True, "reduction": "sum"},
]


def problem(kind: str, seed: int = 0, **settings: object) -> tuple[Glm, Tensor, Tensor, Tensor, Tensor]:
    """A fitted model, and w, x, y, weight for a stack of clients whose last rows are padding."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(CLIENTS * ROWS, FEATURES, generator=draw, dtype=torch.float64)
    if kind == "linear":
        y = torch.randn(CLIENTS * ROWS, generator=draw, dtype=torch.float64)
    else:
        y = torch.arange(CLIENTS * ROWS) % (2 if kind == "logistic" else 3)
    model = getattr(models, kind)(**settings).fit_to(x, y)
    weight = torch.rand(CLIENTS, ROWS, generator=draw, dtype=torch.float64)
    weight[:, -2:] = 0
    weight /= weight.sum(-1, keepdim=True)
    if model.reduction == "sum":
        weight *= ROWS - 2
    w = torch.randn(CLIENTS, model.d, generator=draw, dtype=torch.float64)
    return model, w, model.prepare(x).view(CLIENTS, ROWS, -1), y.view(CLIENTS, ROWS), weight


def reference_loss(model: Glm, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """The loss of one client written from its definition, row by row."""
    table = w.view(model.outputs, -1)
    total = torch.zeros((), dtype=w.dtype)
    for row in range(len(y)):
        z = table @ x[row]
        if model.task == "regression":
            value = 0.5 * (z[0] - y[row]) ** 2
        elif model.task == "binary":
            value = -torch.log(torch.sigmoid(z[0] if y[row] == 1 else -z[0]))
        else:
            value = -torch.log(torch.exp(z[y[row]]) / torch.exp(z).sum())
        total = total + weight[row] * value
    penalised = table[:, :FEATURES]
    return total + 0.5 * model.l2 * (penalised * penalised).sum()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", SETTINGS)
def test_loss_and_gradient_are_those_of_the_definition(kind: str, settings: dict[str, object]) -> None:
    model, w, x, y, weight = problem(kind, **settings)
    loss, gradient = model.loss(w, x, y, weight), model.grad(w, x, y, weight)
    assert loss.shape == (CLIENTS, 1) and gradient.shape == w.shape
    for i in range(CLIENTS):
        leaf = w[i].clone().requires_grad_()
        value = reference_loss(model, leaf, x[i], y[i], weight[i])
        (expected,) = torch.autograd.grad(value, leaf)
        torch.testing.assert_close(loss[i, 0], value.detach(), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(gradient[i], expected, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(
            model.grad(w[i], x[i], y[i], weight[i]), gradient[i], rtol=1e-13, atol=1e-14
        )
        torch.testing.assert_close(model.loss(w[i], x[i], y[i], weight[i]), loss[i], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_the_central_difference_of_the_loss(kind: str) -> None:
    model, w, x, y, weight = problem(kind, l2=0.2, intercept=True)
    width = 1e-5
    for j in range(model.d):
        move = torch.zeros_like(w)
        move[:, j] = width
        slope = (model.loss(w + move, x, y, weight) - model.loss(w - move, x, y, weight)) / (2 * width)
        torch.testing.assert_close(slope, model.grad(w, x, y, weight)[:, j : j + 1], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_one_shared_vector_and_padding(kind: str) -> None:
    model, w, x, y, weight = problem(kind, l2=0.2)
    shared = w[0].expand(CLIENTS, -1)
    torch.testing.assert_close(
        model.grad(shared, x, y, weight), model.grad(shared.clone(), x, y, weight), rtol=1e-13, atol=1e-14
    )
    other = x.clone()
    other[:, -2:] = 1e6
    assert torch.equal(model.grad(w, other, y, weight), model.grad(w, x, y, weight))
    assert torch.equal(model.loss(w, other, y, weight), model.loss(w, x, y, weight))


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_never_written(kind: str) -> None:
    model, *inputs = problem(kind, l2=0.2, intercept=True)
    before = [part.clone() for part in inputs]
    model.loss(*inputs), model.grad(*inputs), model.smoothness(*inputs), model.convexity(*inputs)
    model.solve(*inputs, tol=1e-6, prox=0.1)
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_float32_stays_float32(kind: str) -> None:
    model, w, x, y, weight = problem(kind, l2=0.2)
    single = [part.float() if part.is_floating_point() else part for part in (w, x, y, weight)]
    for method in (model.loss, model.grad, model.smoothness, model.convexity):
        assert method(*single).dtype == torch.float32
    assert model.solve(*single, tol=1e-9).dtype == torch.float32
    torch.testing.assert_close(
        model.grad(*single).double(), model.grad(w, x, y, weight), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("kind", ("logistic", "softmax"))
def test_extreme_scores_stay_finite(kind: str) -> None:
    model, w, x, y, weight = problem(kind)
    huge = 1e4 * w
    loss = model.loss(huge, x, y, weight)
    assert torch.isfinite(loss).all() and torch.isfinite(model.grad(huge, x, y, weight)).all()
    wrong = (huge.view(CLIENTS, model.outputs, -1) @ x.mT).abs().amax()
    assert 1 < loss.max() <= 2 * wrong


@pytest.mark.parametrize("settings", SETTINGS)
def test_statistics_say_the_same_as_the_rows(settings: dict[str, object]) -> None:
    model, w, x, y, weight = problem("linear", **settings)
    stats = model.statistics(x, y, weight)
    assert [part.shape[1:] for part in stats] == [(model.d, model.d), (model.d,), (1,)]
    for point in (w, w[0].expand(CLIENTS, -1)):
        torch.testing.assert_close(
            model.loss_from(stats, point), model.loss(point, x, y, weight), rtol=1e-12, atol=1e-12
        )
        torch.testing.assert_close(
            model.grad_from(stats, point), model.grad(point, x, y, weight), rtol=1e-12, atol=1e-12
        )
    for prox in (0.0, 0.7):
        torch.testing.assert_close(
            model.solve_from(stats, w, prox), model.solve(w, x, y, weight, 1e-9, prox), rtol=1e-10, atol=1e-12
        )
    one = tuple(part[0] for part in stats)
    torch.testing.assert_close(
        model.grad_from(one, w[0]), model.grad_from(stats, w)[0], rtol=1e-13, atol=1e-13
    )


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("rows", (3, ROWS))
def test_linear_curvature_is_the_spectrum_of_the_hessian(settings: dict[str, object], rows: int) -> None:
    model, w, x, y, weight = problem("linear", **settings)
    part = (w, x[:, :rows], y[:, :rows], weight[:, :rows])
    for i in range(CLIENTS):
        dense = hessian(lambda v, i=i: reference_loss(model, v, *(p[i] for p in part[1:])), w[i])
        values = torch.linalg.eigvalsh(dense)
        torch.testing.assert_close(model.smoothness(*part)[i], values[-1:], rtol=1e-10, atol=0)
        torch.testing.assert_close(model.convexity(*part)[i], values[:1], rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("kind", ("logistic", "softmax"))
@pytest.mark.parametrize("settings", SETTINGS)
def test_curvature_bounds_hold_and_the_hessian_is_right(kind: str, settings: dict[str, object]) -> None:
    model, w, x, y, weight = problem(kind, **settings)
    highest, lowest = model.smoothness(w, x, y, weight), model.convexity(w, x, y, weight)
    tight = 0.0
    for scale in (0.0, 1.0):
        for i in range(CLIENTS):
            point = scale * w[i]
            dense = hessian(lambda v, i=i: reference_loss(model, v, x[i], y[i], weight[i]), point)
            torch.testing.assert_close(
                model.hessian(point, x[i], y[i], weight[i]), dense, rtol=1e-10, atol=1e-12
            )
            values = torch.linalg.eigvalsh(dense)
            assert values[-1] <= highest[i, 0] * (1 + 1e-12) and values[0] >= lowest[i, 0] - 1e-12
            tight = max(tight, float(values[-1] / highest[i, 0]))
    assert tight > (0.999 if kind == "logistic" and not model.intercept else 0.5)
    gram = x.mT @ (x * weight.unsqueeze(-1))
    expected = torch.linalg.eigvalsh(gram)[:, -1:] * {"logistic": 0.25, "softmax": 0.5}[kind] + model.l2
    torch.testing.assert_close(highest, expected, rtol=1e-10, atol=0)
    assert torch.equal(lowest, torch.full_like(lowest, 0.0 if model.intercept else model.l2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("intercept", (False, True))
def test_module_predicts_from_raw_rows(kind: str, intercept: bool) -> None:
    model, w, *_ = problem(kind, intercept=intercept)
    raw = torch.randn(5, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    scores = model.scores(w[0], model.prepare(raw))
    assert scores.shape == (5, model.outputs)
    predicted = model.module(w[0])(raw).detach()
    if kind == "linear":
        torch.testing.assert_close(predicted, scores[:, 0])
    else:
        z = torch.cat([torch.zeros_like(scores), scores], 1) if kind == "logistic" else scores
        torch.testing.assert_close(predicted, torch.softmax(z, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_module_does_not_share_memory_or_touch_the_generator(kind: str) -> None:
    model, w, *_ = problem(kind, intercept=True)
    state, point = torch.get_rng_state(), w[0].clone()
    module = model.module(point)
    assert torch.equal(state, torch.get_rng_state())
    point.zero_()
    kept = torch.cat([p.detach().abs().reshape(-1) for p in module.parameters()])
    torch.testing.assert_close(kept.sort().values, w[0].abs().sort().values)


@pytest.mark.parametrize("kind", KINDS)
def test_description_survives_json(kind: str) -> None:
    model, *_ = problem(kind, l2=0.25, intercept=True, reduction="sum")
    assert models.from_description(json.loads(json.dumps(model.describe()))) == model


def test_images_are_flattened_and_the_intercept_is_the_last_column() -> None:
    x = torch.randn(6, 2, 5)
    model = models.softmax(intercept=True).fit_to(x, torch.tensor([0, 1, 2, 0, 1, 2]))
    assert model.d == 3 * 11
    prepared = model.prepare(x)
    assert torch.equal(prepared[:, :10], x.flatten(1)) and bool((prepared[:, 10] == 1).all())


def test_classes_may_be_given_where_not_every_label_occurs() -> None:
    x, y = torch.randn(4, 2), torch.tensor([0, 1, 1, 0])
    assert models.softmax(classes=5).fit_to(x, y).d == 10
    assert models.softmax().fit_to(x, y.float()).d == 4
    with pytest.raises(DataError, match=r"Label 3 lies outside 0\.\.2"):
        models.softmax(classes=3).fit_to(x, torch.tensor([0, 1, 3, 0]))


@pytest.mark.parametrize(
    ("kind", "labels", "message"),
    [
        ("logistic", [-1.0, 1.0], "map -1 to 0"),
        ("logistic", [0.0, 2.0], "softmax"),
        ("logistic", [0.0, 0.5], "row 1 is 0.5"),
        ("softmax", [-2.0, 1.0], "Label -2 is negative"),
        ("softmax", [0.0, 1.5], "linear"),
        ("linear", [0.0, math.nan], "row 1 is nan"),
        ("softmax", [0.0, math.inf], "row 1 is inf"),
    ],
)
def test_wrong_labels_are_named(kind: str, labels: list[float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        getattr(models, kind)().fit_to(torch.randn(2, 3), torch.tensor(labels))


def test_wrong_shapes_and_settings_are_named() -> None:
    x, y = torch.randn(4, 3), torch.tensor([0.0, 1.0, 0.0, 1.0])
    with pytest.raises(DataError, match=r"\[rows, features\]"):
        models.linear().fit_to(x[:, 0], y)
    with pytest.raises(DataError, match="4 rows of inputs but 3 targets"):
        models.linear().fit_to(x, y[:3])
    with pytest.raises(DataError, match="one number per row"):
        models.linear().fit_to(x, x)
    with pytest.raises(DataError, match="expects 3 features"):
        models.logistic().fit_to(x, y).fit_to(x[:, :2], y)
    with pytest.raises(SettingError, match="fit_to"):
        _ = models.linear().d
    with pytest.raises(SettingError, match="l2=-1"):
        models.logistic(l2=-1)
    with pytest.raises(SettingError, match="'mean' or 'sum'"):
        models.softmax(reduction="median")
    with pytest.raises(SettingError, match="Did you mean 'logistic'"):
        models.from_description({"model": "logistics"})
    with pytest.raises(SettingError, match="does not fit"):
        models.from_description({"model": "linear", "colour": 1})


def test_derivatives_of_logistic_rows_are_those_of_autograd_and_keep_their_digits():
    model = models.logistic().fit_to(torch.zeros(2, 1), torch.tensor([0, 1]))
    scores = torch.tensor([[-3.0, 0.0, 1.5, -3.0, 0.0, 1.5]], dtype=torch.float64)
    y = torch.tensor([0, 0, 0, 1, 1, 1])
    loss, first, second = model.row_derivatives(scores, y)
    by_hand = torch.nn.functional.binary_cross_entropy_with_logits(scores[0], y.double(), reduction="none")
    assert torch.allclose(loss, by_hand, atol=1e-14)
    free = scores.clone().requires_grad_()
    total = torch.nn.functional.binary_cross_entropy_with_logits(free[0], y.double(), reduction="sum")
    (slope,) = torch.autograd.grad(total, free, create_graph=True)
    assert torch.allclose(first, slope, atol=1e-14)
    assert torch.allclose(second.squeeze(0), torch.autograd.grad(slope.sum(), free)[0], atol=1e-14)
    far = model.row_derivatives(torch.tensor([[60.0]], dtype=torch.float64), torch.tensor([1]))
    assert float(far[0]) == pytest.approx(math.exp(-60), rel=1e-12)
    assert float(far[1]) == pytest.approx(-math.exp(-60), rel=1e-12)
