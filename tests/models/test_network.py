"""Any nn.Module: gradients one way and the other, evaluation in pieces, solving, starting points."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian

from coterie import models
from coterie._core.errors import DataError, SettingError
from coterie.models.base import norm
from coterie.models.gradient_backends import GradientBackends
from coterie.models.network import Network

CLIENTS, ROWS = 3, 5


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def stack(
    model: Network, x: Tensor, y: Tensor, dtype: torch.dtype = torch.float64
) -> tuple[Network, Tensor, Tensor]:
    """The model fitted to a stack of rows, a parameter vector per client, and weights with padding."""
    fitted = model.fit_to(x.flatten(0, 1), y.flatten())
    w = torch.stack([fitted.initial(seed, dtype) for seed in range(len(x))])
    weight = torch.rand(y.shape, dtype=dtype, generator=torch.Generator().manual_seed(9))
    weight[:, -1] = 0
    return fitted, w, weight / weight.sum(-1, keepdim=True)


def rows(classes: int | None = 3, shape: tuple[int, ...] = (4,)) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(CLIENTS, ROWS, *shape, dtype=torch.float64, generator=draw)
    if classes is None:
        return x, torch.randn(CLIENTS, ROWS, dtype=torch.float64, generator=draw)
    return x, torch.arange(CLIENTS * ROWS).remainder(classes).view(CLIENTS, ROWS)


def test_gradient_and_loss_are_those_of_plain_torch() -> None:
    x, y = rows()
    model, w, weight = stack(models.network(small, l2=0.3), x, y)
    loss, gradient = model.loss(w, x, y, weight), model.grad(w, x, y, weight)
    for i in range(CLIENTS):
        module = small().double()
        nn.utils.vector_to_parameters(w[i], module.parameters())
        value = (nn.functional.cross_entropy(module(x[i]), y[i], reduction="none") * weight[i]).sum()
        value = value + 0.15 * sum(p.square().sum() for p in module.parameters())
        value.backward()
        expected = torch.cat([p.grad.reshape(-1) for p in module.parameters()])
        torch.testing.assert_close(gradient[i], expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(loss[i, 0], value.detach(), rtol=1e-13, atol=0)
        torch.testing.assert_close(model.grad(w[i], x[i], y[i], weight[i]), expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(model.loss(w[i], x[i], y[i], weight[i]), loss[i], rtol=1e-13, atol=0)


@pytest.mark.parametrize("classes", (None, 2))
@pytest.mark.parametrize("stacked", (True, False))
def test_one_linear_layer_is_the_linear_model(classes: int | None, stacked: bool) -> None:
    x, y = rows(classes)
    model, w, weight = stack(
        models.network(lambda: nn.Linear(4, 1, bias=False), l2=0.1, stacked=stacked), x, y
    )
    closed = (models.linear if classes is None else models.logistic)(l2=0.1).fit_to(
        x.flatten(0, 1), y.flatten()
    )
    assert (model.task, model.d) == (closed.task, 4)
    for method in ("loss", "grad"):
        ours, theirs = getattr(model, method)(w, x, y, weight), getattr(closed, method)(w, x, y, weight)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(model.scores(w, x), closed.scores(w, x), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(model.module(w[0])(x[0]), closed.module(w[0])(x[0]), rtol=1e-12, atol=1e-13)


def test_gradient_is_the_central_difference_of_the_loss() -> None:
    x, y = rows()
    model, w, weight = stack(models.network(small, l2=0.2), x, y)
    gradient, width = model.grad(w, x, y, weight), 1e-5
    for j in range(0, model.d, 7):
        move = torch.zeros_like(w)
        move[:, j] = width
        slope = (model.loss(w + move, x, y, weight) - model.loss(w - move, x, y, weight)) / (2 * width)
        torch.testing.assert_close(slope, gradient[:, j : j + 1], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("shared", (True, False))
def test_stacked_is_looped_is_in_pieces(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = rows()
    model, w, weight = stack(models.network(small, l2=0.2), x, y)
    w = w[0].expand(CLIENTS, -1) if shared else w
    cases = (("grad", (x, y, weight)), ("loss", (x, y, weight)), ("scores", (x,)))
    expected = [getattr(replace(model, stacked=False), method)(w, *inputs) for method, inputs in cases]
    for stacked, limit in ((True, 1000), (True, 2), (False, 2)):
        monkeypatch.setattr(GradientBackends, "row_limit", lambda self, w, limit=limit: limit)
        for (method, inputs), value in zip(cases, expected, strict=True):
            ours = getattr(replace(model, stacked=stacked), method)(w, *inputs)
            assert ours.is_contiguous()
            torch.testing.assert_close(ours, value, rtol=1e-12, atol=1e-13)


def test_memory_per_row_is_what_a_backward_pass_keeps() -> None:
    x, y = rows()
    model, w, _ = stack(models.network(small), x, y)
    # kept: the row [4] in float32, tanh's output [6] (used by both tanh and the second layer)
    assert model.bytes_per_row == 4 * (4 + 6)
    assert model.backends.row_limit(w) == 2**30 // (8 * (4 + 6))


def test_auto_measures_once_per_scale_and_remembers() -> None:
    x, y = rows()
    model, w, weight = stack(models.network(small), x, y)
    first = model.grad(w, x, y, weight)
    assert len(model.decisions) == 1
    torch.testing.assert_close(model.grad(w[:2], x[:2], y[:2], weight[:2]), first[:2], rtol=1e-12, atol=1e-14)
    assert len(model.decisions) == 1
    model.loss(w, x, y, weight)
    assert len(model.decisions) == 2
    for choice in ("stacked", "looped"):
        told = replace(model, decisions=dict.fromkeys(model.decisions, choice))
        fixed = replace(model, stacked=choice == "stacked")
        assert torch.equal(told.grad(w, x, y, weight), fixed.grad(w, x, y, weight))
        assert set(told.decisions.values()) == {choice}


class Branches(nn.Module):
    """Control flow that depends on values, which cannot be mapped over clients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        return z if float(self.layer.bias.detach()[0]) > 0 else 2 * z


def test_a_module_that_cannot_be_mapped_is_looped() -> None:
    x, y = rows()
    model, w, weight = stack(models.network(Branches), x, y)
    expected = replace(model, stacked=False).grad(w, x, y, weight)
    assert torch.equal(model.grad(w, x, y, weight), expected)
    assert set(model.decisions.values()) == {"looped"}
    with pytest.raises(SettingError, match="stacked=False"):
        replace(model, stacked=True).grad(w, x, y, weight)


def test_torch_lstm_and_attention_run_without_warnings() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 5, batch_first=True)
            self.head = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0][:, -1])

    def attention() -> nn.Module:
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        return nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 3))

    x, y = rows(3, (3, 4))
    for factory in (Recurrent, attention):
        model, w, weight = stack(models.network(factory), x.float(), y, torch.float32)
        torch.testing.assert_close(
            model.grad(w, x, y, weight),
            replace(model, stacked=False).grad(w, x, y, weight),
            rtol=1e-4,
            atol=1e-6,
        )


def test_unused_parameters_have_zero_gradient_of_their_own() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Parameter(torch.ones(2))
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    x, y = rows()
    for stacked in (True, False):
        model, w, weight = stack(models.network(Spare, stacked=stacked), x, y)
        gradient = model.grad(w, x, y, weight)
        assert bool((gradient[:, :2] == 0).all()) and bool((gradient[:, 2:] != 0).any())
        gradient[0, 0] = 5.0
        assert float(gradient[1, 0]) == 0.0


def test_frozen_parameters_and_buffers_are_constants_in_the_dtype_of_w() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.layer = nn.Linear(4, 4), nn.Linear(4, 3)
            self.base.requires_grad_(False)
            self.register_buffer("scale", torch.full((4,), 3.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.tanh(self.base(x)) * self.scale)

    x, y = rows()
    instance = Frozen()
    model, w, weight = stack(models.network(instance, stacked=True), x, y)
    assert model.d == 15 and model.grad(w, x, y, weight).dtype == torch.float64
    expected = instance.double()(x[0]).detach()
    torch.testing.assert_close(model.scores(w, x)[0], expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model.module(w[0])(x[0]).detach(), torch.softmax(model.scores(w[0], x[0]), 1))


def test_start_is_a_function_of_the_seed_alone() -> None:
    x, y = rows()
    model = models.network(small).fit_to(x.flatten(0, 1), y.flatten())
    torch.manual_seed(1)
    state, first = torch.get_rng_state(), model.initial(5, torch.float64)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    again = models.network(small).fit_to(x.flatten(0, 1), y.flatten()).initial(5, torch.float64)
    assert torch.equal(first, again) and not torch.equal(first, model.initial(6, torch.float64))
    assert torch.equal(first.float(), model.initial(5, torch.float32))


def test_an_instance_starts_from_its_own_parameters_and_stays_untouched() -> None:
    x, y = rows()
    instance = small().eval()
    before = nn.utils.parameters_to_vector(instance.parameters()).detach().clone()
    model, w, weight = stack(models.network(instance), x, y)
    assert torch.equal(w[0], before.double()) and torch.equal(w[1], w[0])
    w.zero_()
    model.grad(w, x, y, weight)
    assert torch.equal(model.initial(0, torch.float32), before)
    assert torch.equal(nn.utils.parameters_to_vector(instance.parameters()), before)
    assert all(p.grad is None for p in instance.parameters()) and not instance.training


def test_inputs_are_never_written() -> None:
    x, y = rows()
    for stacked in (True, False):
        model, w, weight = stack(models.network(small, l2=0.1, stacked=stacked), x, y)
        before = [part.clone() for part in (w, x, y, weight)]
        model.grad(w, x, y, weight), model.loss(w, x, y, weight), model.scores(w, x)
        assert all(torch.equal(a, b) for a, b in zip(before, (w, x, y, weight), strict=True))
        assert not w.requires_grad


def test_gradients_work_inside_no_grad() -> None:
    x, y = rows()
    for stacked in (True, False):
        model, w, weight = stack(models.network(small, stacked=stacked), x, y)
        with torch.no_grad():
            inside = model.grad(w, x, y, weight)
        assert torch.equal(inside, model.grad(w, x, y, weight)) and not inside.requires_grad


def test_own_loss_function() -> None:
    def huber(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.huber_loss(outputs[:, 0], targets, reduction="none")

    x, y = rows(None)
    model, w, weight = stack(models.network(lambda: nn.Linear(4, 1), loss=huber), x, y)
    expected = (nn.functional.huber_loss(model.scores(w, x)[..., 0], y, reduction="none") * weight).sum(
        -1, keepdim=True
    )
    torch.testing.assert_close(model.loss(w, x, y, weight), expected, rtol=1e-12, atol=0)
    with pytest.raises(SettingError, match="one number per row"):
        models.network(lambda: nn.Linear(4, 1), loss=lambda z, t: z.mean()).fit_to(x[0], y[0])


def test_smoothness_is_the_norm_of_the_hessian() -> None:
    x, y = rows()
    model, w, weight = stack(models.network(small, l2=0.1), x, y)
    found = model.smoothness(w, x, y, weight)
    assert found.shape == (CLIENTS, 1)

    def value(i: int) -> Callable[[Tensor], Tensor]:
        return lambda v: model.objective(v, x[i], y[i], weight[i]) + 0.05 * v.square().sum()

    for i in range(CLIENTS):
        largest = torch.linalg.eigvalsh(hessian(value(i), w[i])).abs().max()
        torch.testing.assert_close(found[i, 0], largest, rtol=1e-6, atol=0)
    torch.testing.assert_close(model.smoothness(w[1], x[1], y[1], weight[1]), found[1], rtol=1e-7, atol=0)


@pytest.mark.parametrize("prox", (0.0, 0.5))
def test_solve_reaches_the_tolerance(prox: float) -> None:
    x, y = rows()
    model, w, weight = stack(models.network(small, l2=0.05, stacked=True), x, y)
    found = model.solve(w, x, y, weight, tol=1e-6, prox=prox)
    assert float(norm(model.grad(found, x, y, weight) + prox * (found - w)).max()) <= 1e-6
    alone = model.solve(w[2], x[2], y[2], weight[2], tol=1e-6, prox=prox)
    assert alone.shape == w[2].shape
    assert float(norm(model.grad(alone, x[2], y[2], weight[2]) + prox * (alone - w[2]))) <= 1e-6


def test_task_follows_targets_and_outputs() -> None:
    x, y = rows()
    flat = x.flatten(0, 1)
    assert models.network(lambda: nn.Linear(4, 3)).fit_to(flat, y.flatten()).task == "multiclass"
    assert models.network(lambda: nn.Linear(4, 1)).fit_to(flat, y.flatten() % 2).task == "binary"
    assert models.network(lambda: nn.Linear(4, 1)).fit_to(flat, flat[:, 0]).task == "regression"
    assert models.network(lambda: nn.Linear(4, 1), loss="mse").fit_to(flat, y.flatten()).task == "regression"
    whole = y.flatten().double()
    assert models.network(small, loss="cross-entropy").fit_to(flat, whole).task == "multiclass"
    with pytest.raises(DataError, match=r"Label 2 .* 1 outputs; give it 3"):
        models.network(lambda: nn.Linear(4, 1)).fit_to(flat, y.flatten())
    with pytest.raises(SettingError, match="one output"):
        models.network(small).fit_to(flat, whole)
    with pytest.raises(SettingError, match="fit_to"):
        _ = models.network(small).task


def test_description_and_settings_errors() -> None:
    with pytest.raises(SettingError, match=r"model=network\(factory\)"):
        models.network(small).describe()
    with pytest.raises(SettingError, match="loss='hinge'"):
        models.network(small, loss="hinge")
    with pytest.raises(SettingError, match="stacked='maybe'"):
        models.network(small, stacked="maybe")
    with pytest.raises(SettingError, match="must return an nn"):
        _ = models.network(lambda: 3).d
    with pytest.raises(SettingError, match=r"needs an nn\.Module"):
        models.network(7)  # type: ignore[arg-type]
