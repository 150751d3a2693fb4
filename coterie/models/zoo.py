"""Ready networks; the sizes of their inputs and outputs come from the data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from coterie.errors import DataError, SettingError
from coterie.models import normalise
from coterie.models.checks import groups_for
from coterie.models.network import Network, check_rows, seeded
from coterie.models.targets import check_column, count_classes

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}


@dataclass(frozen=True, eq=False)
class Zoo(Network):
    """A network of the zoo: a name and settings, from which the module is built once sizes are known."""

    name: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    classes: int | None = None

    def fit_to(self, x: Tensor, y: Tensor) -> Self:
        """One output for numbers and for two classes, C outputs for C > 2 classes."""
        check_rows(x, y)
        features = tuple(x.shape[1:])
        if self.features not in (None, features):
            raise DataError(f"The model expects rows of shape {self.features}; these have {features}.")
        if self.name == "charlstm":
            self._check_tokens(x)
        if self._numeric(y) and self.classes is None:
            check_column(y)
            return replace(self, features=features, outputs=1, kind="regression", decisions={})
        classes = max(2, count_classes(y, self.classes))
        kind, outputs = ("binary", 1) if classes == 2 else ("multiclass", classes)
        return replace(self, features=features, outputs=outputs, kind=kind, classes=classes, decisions={})

    def describe(self) -> dict[str, Any]:
        if not isinstance(self.criterion, str):
            raise SettingError(
                f"{self.name}() with a loss function of your own cannot be described; give it again."
            )
        settings = {
            name: list(value) if isinstance(value, tuple) else value for name, value in self.settings.items()
        }
        return {
            "model": self.name,
            **settings,
            "loss": self.criterion,
            "l2": self.l2,
            "stacked": self.stacked,
            "precision": self.precision,
            "compiled": self.compiled,
            "classes": self.classes,
            "features": None if self.features is None else list(self.features),
            "outputs": self.outputs,
            "task": self.kind,
        }

    def _build(self, seed: int) -> nn.Module:
        if self.features is None or self.outputs is None:
            raise SettingError(f"{self.name}() does not know its inputs yet; call fit_to(x, y) first.")
        build = functools.partial(BUILDERS[self.name], self.features, self.outputs, **self.settings)
        return seeded(build, seed)

    def _check_tokens(self, x: Tensor) -> None:
        vocabulary = self.settings["vocabulary"]
        if x.is_floating_point() or x.dim() != 2:
            raise DataError(
                f"charlstm() reads rows of token numbers, integers [rows, length]; "
                f"these inputs are {x.dtype} of shape {tuple(x.shape)}."
            )
        if int(x.min()) < 0 or int(x.max()) >= vocabulary:
            raise DataError(
                f"Tokens must lie in 0..{vocabulary - 1}; found {int(x.min())} to {int(x.max())}. "
                f"Use charlstm(vocabulary={int(x.max()) + 1})."
            )


def mlp(hidden: tuple[int, ...] = (64,), activation: str = "relu", **options: Any) -> Network:
    """Fully connected layers over the flattened inputs. Options of all: those of `network`, classes."""
    if activation not in _ACTIVATIONS:
        raise SettingError(f"activation={activation!r} is unknown: choose from {', '.join(_ACTIVATIONS)}.")
    return _make("mlp", {"hidden": tuple(hidden), "activation": activation}, **options)


def cnn(channels: tuple[int, ...] = (32, 64), kernel: int = 3, hidden: int = 128, **options: Any) -> Network:
    """The EMNIST network of Reddi et al. (2021) without dropout: convolutions, max pool, dense layer."""
    settings = {"channels": tuple(channels), "kernel": kernel, "hidden": hidden}
    return _make("cnn", settings, **options)


def resnet9(width: int = 64, **options: Any) -> Network:
    """Nine-layer residual network with group normalisation, channels width, 2, 4 and 8 times width."""
    return _make("resnet9", {"width": width}, **options)


def charlstm(
    vocabulary: int, embedding: int = 8, hidden: int = 256, layers: int = 2, **options: Any
) -> Network:
    """Next-character network of LEAF: embedding, stacked LSTM, dense layer over the last state."""
    settings = {"vocabulary": vocabulary, "embedding": embedding, "hidden": hidden, "layers": layers}
    return _make("charlstm", settings, tokens=True, **options)


def restore(name: str, **description: Any) -> Network:
    """The zoo model of a description without its "model" entry."""
    rest = dict(description)
    features, outputs, task = (rest.pop(part, None) for part in ("features", "outputs", "task"))
    settings = {part: tuple(value) if isinstance(value, list) else value for part, value in rest.items()}
    model = FACTORIES[name](**settings)
    shape = None if features is None else tuple(features)
    return replace(model, features=shape, outputs=outputs, kind=task)


def _make(
    name: str,
    settings: dict[str, Any],
    loss: str | Callable[[Tensor, Tensor], Tensor] = "auto",
    l2: float = 0.0,
    stacked: str | bool = "auto",
    classes: int | None = None,
    tokens: bool = False,
    precision: str = "full",
    compiled: bool = False,
) -> Network:
    sizes = [
        size for value in settings.values() for size in (value if isinstance(value, tuple) else (value,))
    ]
    if any(not isinstance(size, str) and (int(size) != size or size < 1) for size in sizes):
        raise SettingError(f"{name}({settings}): sizes must be whole numbers, 1 or more.")
    return Zoo(
        criterion=loss,
        l2=l2,
        stacked=stacked,
        tokens=tokens,
        precision=precision,
        compiled=compiled,
        name=name,
        settings=settings,
        classes=classes,
    )


def _build_mlp(
    features: tuple[int, ...], outputs: int, hidden: tuple[int, ...], activation: str
) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    width = torch.Size(features).numel()
    for size in hidden:
        layers += [nn.Linear(width, size), _ACTIVATIONS[activation]()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def _build_cnn(
    features: tuple[int, ...], outputs: int, channels: tuple[int, ...], kernel: int, hidden: int
) -> nn.Module:
    before, height, width = _image(features, "cnn")
    layers: list[nn.Module] = [ChannelAxis()]
    for size in channels:
        layers += [nn.Conv2d(before, size, kernel), nn.ReLU()]
        before, height, width = size, height - kernel + 1, width - kernel + 1
    if min(height, width) < 2:
        raise DataError(f"cnn() needs larger images than {features}; choose a smaller kernel or use mlp().")
    flat = before * (height // 2) * (width // 2)
    dense = [nn.Linear(flat, hidden), nn.ReLU(), nn.Linear(hidden, outputs)]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), *dense)


def _build_resnet9(features: tuple[int, ...], outputs: int, width: int) -> nn.Module:
    channels, height, across = _image(features, "resnet9")
    if min(height, across) < 8:
        raise DataError(f"resnet9() needs images of at least 8 x 8, not {features}; use cnn() or mlp().")
    return Blocks(
        ChannelAxis(),
        Block(channels, width),
        Block(width, 2 * width, pool=True),
        Residual(2 * width),
        Block(2 * width, 4 * width, pool=True),
        Block(4 * width, 8 * width, pool=True),
        Residual(8 * width),
        GlobalMax(),
        nn.Linear(8 * width, outputs),
        Scaled(0.125),
    )


def _build_charlstm(
    features: tuple[int, ...], outputs: int, vocabulary: int, embedding: int, hidden: int, layers: int
) -> nn.Module:
    return CharLSTM(vocabulary, embedding, hidden, layers, outputs)


def _image(features: tuple[int, ...], name: str) -> tuple[int, int, int]:
    if len(features) not in (2, 3):
        raise DataError(
            f"{name}() reads images [height, width] or [channels, height, width]; these rows have "
            f"shape {features}. Reshape them, or use mlp()."
        )
    channels, height, width = features if len(features) == 3 else (1, *features)
    return channels, height, width


class ChannelAxis(nn.Module):
    """Gives images [B, height, width] a channel axis."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-1).movedim(-1, 1) if x.dim() == 3 else x  # with the strides of channels last


class GroupNorm(nn.GroupNorm):
    """Reads and writes what comes in: in mixed precision torch would write float32, twice as much for all that follows.

    Means and variances are float32 in any case.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.group_norm(x, self.num_groups, weight, bias, self.eps)


class GlobalMax(nn.Module):
    """Maximum over height and width.

    Not in bfloat16: torch.compile looks for the rounded maximum among values that it has not rounded, and finds none.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.promote_types(x.dtype, torch.float32)).amax((-2, -1))


class Scaled(nn.Module):
    """Outputs times a constant: after maxima over an image, scores are large and steps of usual size too long."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Block(nn.Sequential):
    """Convolution, group normalisation, rectifier and max pool; `unrolled` computes them one by one."""

    def __init__(self, before: int, after: int, pool: bool = False) -> None:
        layers = [nn.Conv2d(before, after, 3, padding=1), GroupNorm(groups_for(after), after), nn.ReLU()]
        super().__init__(*layers, *([nn.MaxPool2d(2)] if pool else []))
        self.pool = pool

    def forward(self, x: Tensor, unrolled: bool = False) -> Tensor:
        convolution, norm = cast(nn.Conv2d, self[0]), cast(GroupNorm, self[1])
        if unrolled or not normalise.takes(x, norm.num_channels, norm.num_groups, self.pool):
            return super().forward(x)
        images, kernel = (
            part.to(torch.bfloat16, memory_format=torch.channels_last) for part in (x, convolution.weight)
        )
        images, bias = nn.functional.conv2d(images, kernel, padding=1), cast(Tensor, convolution.bias)
        return normalise.normalised(
            images, bias, norm.weight, norm.bias, norm.num_groups, norm.eps, self.pool
        )


class Residual(nn.Module):
    """x + conv(conv(x))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = Blocks(Block(channels, channels), Block(channels, channels))

    def forward(self, x: Tensor, unrolled: bool = False) -> Tensor:
        return x + self.body(x, unrolled)


class Blocks(nn.Sequential):
    """Layers one after the other, of which blocks can be `unrolled`."""

    can_unroll = True

    def forward(self, x: Tensor, unrolled: bool = False) -> Tensor:
        for layer in self:
            x = layer(x, unrolled) if isinstance(layer, Block | Residual) else layer(x)
        return x


class CharLSTM(nn.Module):
    """Tokens [B, T] to scores of the last state; `unrolled` computes the LSTM step by step.

    The fused kernel is several times faster for one client but cannot be mapped over clients.
    """

    can_unroll = True

    def __init__(self, vocabulary: int, embedding: int, hidden: int, layers: int, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, outputs)
        with torch.no_grad():
            for layer in range(layers):
                getattr(self.lstm, f"bias_ih_l{layer}")[hidden : 2 * hidden] = 1.0

    def forward(self, x: Tensor, unrolled: bool = False) -> Tensor:
        states = self.embedding(x.long())
        if not unrolled:
            return self.head(self.lstm(states)[0][:, -1])
        for layer in range(self.lstm.num_layers):
            states = self._layer(states, layer)
        return self.head(states[:, -1])

    def _layer(self, inputs: Tensor, layer: int) -> Tensor:
        """c <- f c + i tanh(g), h <- o tanh(c), the gates i, f, o being sigmoids of inputs and h."""
        size = self.lstm.hidden_size
        into, again, bias, more = (
            getattr(self.lstm, f"{part}_l{layer}")
            for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        drive = nn.functional.linear(inputs, into, bias + more)
        back, hidden, cell = again.t(), None, None
        states = []
        for step in drive.unbind(1):
            gates = step if hidden is None else step + hidden @ back
            keep_in, forget = torch.sigmoid(gates[..., : 2 * size]).split(size, -1)
            fresh = keep_in * torch.tanh(gates[..., 2 * size : 3 * size])
            cell = fresh if cell is None else fresh + forget * cell
            hidden = torch.sigmoid(gates[..., 3 * size :]) * torch.tanh(cell)
            states.append(hidden)
        return torch.stack(states, 1)


BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "mlp": _build_mlp,
    "cnn": _build_cnn,
    "resnet9": _build_resnet9,
    "charlstm": _build_charlstm,
}
FACTORIES: dict[str, Callable[..., Network]] = {
    "mlp": mlp,
    "cnn": cnn,
    "resnet9": resnet9,
    "charlstm": charlstm,
}
