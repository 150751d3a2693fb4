"""The ready networks: sizes from the data, stacked = looped, descriptions, starting points."""

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from coterie import models
from coterie._core.errors import DataError, SettingError
from coterie.models.layers import GroupNorm
from coterie.models.zoo import Zoo

CLIENTS, ROWS = 3, 4
MAKE = {
    "mlp": lambda: models.mlp((6, 5), l2=0.1),
    "cnn": lambda: models.cnn((3, 4), hidden=5),
    "resnet9": lambda: models.resnet9(width=2),
    "charlstm": lambda: models.charlstm(7, embedding=3, hidden=4),
}


def inputs(name: str, classes: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(8)
    shape = {"mlp": (4,), "cnn": (8, 8), "resnet9": (3, 8, 8), "charlstm": (6,)}[name]
    if name == "charlstm":
        x = torch.randint(0, 7, (CLIENTS, ROWS, *shape), generator=draw)
    else:
        x = torch.randn(CLIENTS, ROWS, *shape, dtype=torch.float64, generator=draw)
    y = torch.arange(CLIENTS * ROWS).remainder(classes).view(CLIENTS, ROWS)
    weight = torch.full((CLIENTS, ROWS), 1 / (ROWS - 1), dtype=torch.float64)
    weight[:, -1] = 0
    return x, y, weight


def fitted(name: str, classes: int = 3) -> Zoo:
    x, y, _ = inputs(name, classes)
    return MAKE[name]().fit_to(x.flatten(0, 1), y.flatten())


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("shared", (True, False))
def test_stacked_is_looped(name: str, shared: bool) -> None:
    model, (x, y, weight) = fitted(name), inputs(name)
    w = torch.stack([model.initial(0 if shared else seed, torch.float64) for seed in range(CLIENTS)])
    w = w[0].expand(CLIENTS, -1) if shared else w
    stacked, looped = replace(model, stacked=True), replace(model, stacked=False)
    ours, theirs = stacked.grad(w, x, y, weight), looped.grad(w, x, y, weight)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12 * float(theirs.abs().max()))
    torch.testing.assert_close(
        stacked.loss(w, x, y, weight), looped.loss(w, x, y, weight), rtol=1e-12, atol=0
    )
    torch.testing.assert_close(stacked.scores(w, x), looped.scores(w, x), rtol=1e-10, atol=1e-12)
    assert float(ours.abs().max()) > 1e-3


@pytest.mark.parametrize("name", MAKE)
def test_gradient_is_the_central_difference_of_the_loss(name: str) -> None:
    model, (x, y, weight) = fitted(name), inputs(name)
    w = model.initial(1, torch.float64)
    one = (x[0], y[0], weight[0])
    direction = torch.randn(model.d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    width = 1e-7
    slope = (model.loss(w + width * direction, *one) - model.loss(w - width * direction, *one)) / (2 * width)
    expected = (model.grad(w, *one) * direction).sum(-1, keepdim=True)
    torch.testing.assert_close(slope, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MAKE)
def test_description_gives_the_same_model_back(name: str) -> None:
    model, (x, _, _) = fitted(name), inputs(name)
    described = json.loads(json.dumps(model.describe()))
    again = models.from_description(described)
    assert again.describe() == described
    w = model.initial(3, torch.float64)
    assert torch.equal(again.initial(3, torch.float64), w)
    assert torch.equal(again.scores(w, x[0]), model.scores(w, x[0]))
    assert models.from_description(MAKE[name]().describe()).describe() == MAKE[name]().describe()


@pytest.mark.parametrize("name", MAKE)
def test_start_leaves_torchs_generator_alone(name: str) -> None:
    state = torch.get_rng_state()
    first = fitted(name).initial(2, torch.float32)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(77)
    assert torch.equal(first, fitted(name).initial(2, torch.float32))
    assert not torch.equal(first, fitted(name).initial(3, torch.float32))


@pytest.mark.parametrize("name", MAKE)
def test_tasks_and_predictions(name: str) -> None:
    x, y, _ = inputs(name)
    numbers = y.flatten().double() / 7
    for targets, task, outputs, shape in (
        (y.flatten(), "multiclass", 3, (12, 3)),
        (y.flatten() % 2, "binary", 1, (12, 2)),
        (numbers, "regression", 1, (12,)),
    ):
        model = MAKE[name]().fit_to(x.flatten(0, 1), targets)
        w = model.initial(0, torch.float64)
        assert (model.task, model.outputs) == (task, outputs)
        assert model.scores(w, x[0]).shape == (ROWS, outputs)
        predicted = model.module(w)(x.flatten(0, 1)).detach()
        assert predicted.shape == shape
        if task != "regression":
            torch.testing.assert_close(predicted.sum(1), torch.ones(12, dtype=torch.float64))


def test_sizes_of_the_published_networks() -> None:
    images = torch.zeros(2, 28, 28)
    emnist = models.cnn().fit_to(images, torch.tensor([0, 61]))
    assert emnist.d == 320 + 18496 + (9216 * 128 + 128) + (128 * 62 + 62)
    colour = models.resnet9(classes=100).fit_to(torch.zeros(1, 3, 32, 32), torch.tensor([0]))
    convolutions = (
        (3, 64),
        (64, 128),
        (128, 128),
        (128, 128),
        (128, 256),
        (256, 512),
        (512, 512),
        (512, 512),
    )
    assert colour.d == sum(9 * a * b + 3 * b for a, b in convolutions) + 513 * 100
    shakespeare = models.charlstm(80).fit_to(torch.zeros(2, 80, dtype=torch.int64), torch.tensor([0, 79]))
    cells = 4 * 256 * (8 + 256 + 2) + 4 * 256 * (256 + 256 + 2)
    assert shakespeare.d == 80 * 8 + cells + 257 * 80


def test_charlstm_is_torchs_lstm_and_starts_with_open_forget_gates() -> None:
    model, (x, _, _) = fitted("charlstm"), inputs("charlstm")
    w = model.initial(0, torch.float64)
    module = model.module(w).network
    assert isinstance(module.lstm, nn.LSTM)
    assert bool((module.lstm.bias_ih_l1.detach()[4:8] == 1).all())
    torch.testing.assert_close(
        module(x[0]).detach(), module(x[0], unrolled=True).detach(), rtol=1e-12, atol=1e-13
    )


def test_loss_decides_the_task_where_given() -> None:
    x, y, _ = inputs("mlp")
    flat, whole = x.flatten(0, 1), y.flatten()
    assert models.mlp(loss="mse").fit_to(flat, whole).task == "regression"
    assert models.mlp(loss="cross-entropy").fit_to(flat, whole.double()).task == "multiclass"
    own = models.mlp(loss=lambda z, t: (z[:, 0] - t).abs())
    assert (
        own.fit_to(flat, whole.double()).task == "regression" and own.fit_to(flat, whole).task == "multiclass"
    )
    with pytest.raises(SettingError, match="loss function of your own"):
        own.describe()


def test_byte_images_are_cast_not_refused() -> None:
    x = torch.arange(2 * 64, dtype=torch.uint8).view(2, 8, 8)
    model = MAKE["cnn"]().fit_to(x, torch.tensor([0, 2]))
    w = model.initial(0, torch.float32)
    assert torch.equal(model.scores(w, x), model.scores(w, x.float()))


def test_misfits_are_named() -> None:
    y = torch.tensor([0, 1])
    with pytest.raises(DataError, match=r"images \[height, width\]"):
        models.cnn().fit_to(torch.zeros(2, 9), y)
    with pytest.raises(DataError, match="larger images"):
        models.cnn().fit_to(torch.zeros(2, 5, 5), y)
    with pytest.raises(DataError, match="at least 8 x 8"):
        models.resnet9().fit_to(torch.zeros(2, 3, 7, 9), y)
    with pytest.raises(DataError, match="integers"):
        models.charlstm(9).fit_to(torch.zeros(2, 5), y)
    with pytest.raises(DataError, match=r"charlstm\(vocabulary=10\)"):
        models.charlstm(9).fit_to(torch.full((2, 5), 9), y)
    with pytest.raises(DataError, match="expects rows of shape"):
        fitted("mlp").fit_to(torch.zeros(2, 9), y)
    with pytest.raises(DataError, match=r"outside 0\.\.1"):
        models.mlp(classes=2).fit_to(torch.zeros(2, 9), torch.tensor([0, 2]))
    with pytest.raises(SettingError, match="activation='sin'"):
        models.mlp(activation="sin")
    with pytest.raises(SettingError, match="whole numbers"):
        models.mlp(hidden=(0,))
    with pytest.raises(SettingError, match="fit_to"):
        _ = models.cnn().d


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
        ),
    ],
)
def test_group_norm_keeps_the_precision_it_is_given(device: str) -> None:
    torch.manual_seed(0)
    norm, x = GroupNorm(2, 6).to(device), (torch.randn(4, 6, 5, 5) * 3 + 1).to(device)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0)
        norm.bias.normal_()
    usual = torch.nn.functional.group_norm(x, 2, norm.weight, norm.bias)
    assert torch.equal(norm(x), usual)
    with torch.autocast(device, torch.bfloat16):
        rough = norm(x.bfloat16())
    assert rough.dtype == torch.bfloat16
    torch.testing.assert_close(rough.float(), usual, rtol=0.03, atol=0.03)
