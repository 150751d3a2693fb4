"""Ready networks; the sizes of their inputs and outputs come from the data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from coterie._core.errors import DataError, SettingError
from coterie.models.layers import Block, Blocks, ChannelAxis, CharLSTM, GlobalMax, Residual, Scaled
from coterie.models.low_rank import low_rank
from coterie.models.network import Network, check_rows, seeded
from coterie.models.targets import check_column, count_classes
from coterie.models.valve import with_valve

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}
_NORMS: dict[str, Callable[[int], nn.Module]] = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}


@dataclass(frozen=True, eq=False)
class Zoo(Network):
    """Ready network: a name and settings, from which the module is built once sizes are known."""

    name: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    classes: int | None = None

    def fit_to(self, x: Tensor, y: Tensor) -> Self:
        """Return a copy with one output for numbers and for two classes, C outputs for C > 2 classes."""
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


def mlp(
    hidden: tuple[int, ...] = (64,),
    activation: str = "relu",
    norm: str | None = None,
    adapters: int | None = None,
    valve: bool = False,
    **options: Any,
) -> Network:
    """Return a multilayer perceptron over the flattened inputs.

    Parameters
    ----------
    hidden
        Widths of the hidden layers.
    activation
        "relu", "tanh" or "gelu".
    norm
        "batch" or "layer" for a layer of normalisation before every activation.
    adapters
        Rank of adapters that are trained in place of the weights, which stay as they were drawn (`low_rank`).
    valve
        Put a valve before the last layer, as GPFL needs it (`with_valve`).
    **options
        `classes`, the number of classes if some may be missing from the data, and those of `network` except `buffers`.

    Returns
    -------
    Network
        A model with one output for numbers and for two classes, C outputs for C > 2 classes.

    Examples
    --------
    >>> import torch, coterie
    >>> model = coterie.models.mlp((8,)).fit_to(torch.randn(20, 3), torch.arange(20) % 4)
    >>> model.d, model.task
    (68, 'multiclass')
    """
    if activation not in _ACTIVATIONS:
        raise SettingError(f"activation={activation!r} is unknown: choose from {', '.join(_ACTIVATIONS)}.")
    if norm is not None and norm not in _NORMS:
        raise SettingError(f"norm={norm!r} is unknown: choose from {', '.join(_NORMS)}.")
    if valve and adapters is not None:
        raise SettingError(
            "mlp has a valve or adapters, not both: a valve beside frozen weights is not trained."
        )
    more = {
        name: value
        for name, value in (("norm", norm), ("adapters", adapters), ("valve", valve or None))
        if value is not None
    }
    return _make("mlp", {"hidden": tuple(hidden), "activation": activation, **more}, **options)


def cnn(channels: tuple[int, ...] = (32, 64), kernel: int = 3, hidden: int = 128, **options: Any) -> Network:
    """Return the EMNIST network of Reddi et al. (2021) without dropout: convolutions, max pool, dense layer.

    Parameters
    ----------
    channels
        Channels of the convolutions.
    kernel
        Width of their kernels.
    hidden
        Width of the dense layer.
    **options
        `classes`, the number of classes if some may be missing from the data, and those of `network` except `buffers`.

    Returns
    -------
    Network
        A model of images [height, width] or [channels, height, width].

    Examples
    --------
    >>> import torch, coterie
    >>> coterie.models.cnn().fit_to(torch.zeros(62, 28, 28), torch.arange(62)).d
    1206590
    """
    settings = {"channels": tuple(channels), "kernel": kernel, "hidden": hidden}
    return _make("cnn", settings, **options)


def resnet9(width: int = 64, **options: Any) -> Network:
    """Return a nine-layer residual network with group normalisation.

    Parameters
    ----------
    width
        Channels of the first layer; later layers have 2, 4 and 8 times as many.
    **options
        `classes`, the number of classes if some may be missing from the data, and those of `network` except `buffers`.

    Returns
    -------
    Network
        A model of images of at least 8 x 8 pixels.

    Examples
    --------
    >>> import torch, coterie
    >>> coterie.models.resnet9(width=4).fit_to(torch.zeros(10, 3, 32, 32), torch.arange(10)).d
    26490
    """
    return _make("resnet9", {"width": width}, **options)


def charlstm(
    vocabulary: int, embedding: int = 8, hidden: int = 256, layers: int = 2, **options: Any
) -> Network:
    """Return LEAF's network for the next character: embedding, stacked LSTM, dense layer over the last state.

    Parameters
    ----------
    vocabulary
        Number of different characters.
    embedding
        Length of their embeddings.
    hidden
        Width of the LSTM.
    layers
        Number of its layers.
    **options
        `classes`, the number of classes if some may be missing from the data, and those of `network` except `buffers`.

    Returns
    -------
    Network
        A model of rows of token ids [length], integers from 0 to vocabulary - 1.

    Examples
    --------
    >>> import torch, coterie
    >>> tokens = torch.randint(0, 80, (100, 20), generator=torch.Generator().manual_seed(0))
    >>> model = coterie.models.charlstm(80, classes=80).fit_to(tokens, tokens[:, 0])
    >>> model.d, model.task
    (819920, 'multiclass')
    """
    settings = {"vocabulary": vocabulary, "embedding": embedding, "hidden": hidden, "layers": layers}
    return _make("charlstm", settings, tokens=True, **options)


def restore(name: str, **description: Any) -> Network:
    """Return the model that a description, without its entry "model", describes."""
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
    features: tuple[int, ...],
    outputs: int,
    hidden: tuple[int, ...],
    activation: str,
    norm: str | None = None,
    adapters: int | None = None,
    valve: bool = False,
) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    width = torch.Size(features).numel()
    for size in hidden:
        between = [] if norm is None else [_NORMS[norm](size)]
        layers += [nn.Linear(width, size), *between, _ACTIVATIONS[activation]()]
        width = size
    module = nn.Sequential(*layers, nn.Linear(width, outputs))
    if valve:
        return with_valve(module)
    return module if adapters is None else low_rank(module, adapters)


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
