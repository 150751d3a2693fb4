"""Any nn.Module as a model, for a stack of clients in several ways.

*Stacked* maps the whole gradient over the clients at once (torch.func.vmap), best for many small
models; *looped* takes one client after the other; *captured*, on a GPU, is the loop as one CUDA graph over
several streams. "auto" measures them once per shape.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional

from coterie.errors import DataError, SettingError
from coterie.federation import randomness
from coterie.models.accelerate import PRECISIONS, Captured, compiled, fastest, mixed
from coterie.models.base import Model, dot
from coterie.models.checks import check_behaviour, check_module
from coterie.models.predictor import NetworkPredictor
from coterie.models.skeleton import Skeleton
from coterie.models.solve import largest_curvature, lbfgs
from coterie.models.targets import check_column, count_classes

Criterion = str | Callable[[Tensor, Tensor], Tensor]
Source = nn.Module | Callable[[], nn.Module]
_CPU_BYTES = 2**30
_CAPTURED_SHAPES = 8  # batches of more shapes than this are not worth a graph each


@dataclass(frozen=True, eq=False)
class Network(Model):
    """sum_b weight_b criterion(module(x_b), y_b) + l2/2 |w|^2 with all trainable parameters in `w`."""

    source: Source | None = None
    criterion: Criterion = "auto"
    l2: float = 0.0
    stacked: str | bool = "auto"
    features: tuple[int, ...] | None = None
    outputs: int | None = None
    kind: str | None = None
    tokens: bool = False
    precision: str = "full"
    compiled: bool = False
    decisions: dict[str, str] = field(default_factory=dict, repr=False)
    """The way chosen for each shape met so far."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.l2) and self.l2 >= 0):
            raise SettingError(f"l2={self.l2} is outside its range: give a finite number, 0 or more.")
        if isinstance(self.criterion, str) and self.criterion not in ("auto", "cross-entropy", "mse"):
            raise SettingError(
                f"loss={self.criterion!r} is unknown: choose 'auto', 'cross-entropy', 'mse', "
                "or a function (outputs, targets) -> one loss per row."
            )
        if self.stacked not in ("auto", True, False):
            raise SettingError(f"stacked={self.stacked!r} is unknown: choose 'auto', True or False.")
        if self.precision not in PRECISIONS:
            raise SettingError(
                f"precision={self.precision!r} is unknown: choose from {', '.join(PRECISIONS)}."
            )
        if self.features is not None:
            _ = self.skeleton  # sizes that do not fit show now, and nothing is built inside vmap

    @property
    def d(self) -> int:
        return self.skeleton.d

    @property
    def task(self) -> str:
        if self.kind is None:
            raise SettingError("The network does not know its task yet; call fit_to(x, y) first.")
        return self.kind

    @functools.cached_property
    def skeleton(self) -> Skeleton:
        """The module as a function of a flat vector."""
        module = self._build(0)
        check_module(module)
        return Skeleton(module)

    def measured(self) -> dict[str, str]:
        return self.decisions

    def fit_to(self, x: Tensor, y: Tensor) -> Self:
        check_rows(x, y)
        rows = x[:2] if len(x) > 1 else torch.cat([x, x])
        output = check_behaviour(self.skeleton, rows.clone())
        outputs = 1 if output.dim() == 1 else output.shape[1]
        fitted = replace(
            self,
            features=tuple(x.shape[1:]),
            outputs=outputs,
            kind=self._find_task(y, outputs),
            tokens=not x.is_floating_point(),
            decisions={},
        )
        targets = y[: len(rows)].expand(len(rows))
        losses = fitted._row_losses(
            fitted.skeleton.start.to(output.dtype),
            rows,
            targets if fitted.kind == "multiclass" else targets.to(output.dtype),
        )
        if losses.shape != (len(rows),):
            raise SettingError(
                f"The loss gives shape {tuple(losses.shape)} for {len(rows)} rows; give one number per row."
            )
        return fitted

    def initial(self, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """The factory's initialisation under `seed`; a module given as an instance starts as it is."""
        start = (
            self.skeleton.start if isinstance(self.source, nn.Module) else Skeleton(self._build(seed)).start
        )
        return start.to(device=device, dtype=dtype, copy=True)

    def loss(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        losses = self._by_row("loss", self._row_losses, w, x, y)
        return dot(losses, weight.to(w.dtype)) + 0.5 * self.l2 * dot(w, w)

    def grad(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        rows = (x, y, weight.to(w.dtype))
        if w.dim() == 1:
            gradient = self._one_gradient(w, *rows)
        else:
            ways = {"looped": self._gradients_looped, "stacked": self._gradients_stacked}
            if self._can_capture(w, x):
                ways["captured"] = self._captured
            gradient = self._choose("grad", ways, w, *rows)
        return gradient.add_(w, alpha=self.l2) if self.l2 else gradient

    def hvp(self, w: Tensor, v: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """By differentiating (gradient)'v, which any module that trains allows."""
        rows = (x, y, weight.to(w.dtype), v)
        if w.dim() == 1:
            product = self._one_product(w, *rows)
        else:
            ways = {"looped": self._products_looped, "stacked": self._products_stacked}
            product = self._choose("hvp", ways, w, *rows)
        return product + self.l2 * v

    def scores(self, w: Tensor, x: Tensor) -> Tensor:
        return self._by_row("scores", self._row_scores, w, x)

    def smoothness(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """|H|_2 at `w`, from below, by Lanczos; H v is a central difference of gradients in float64."""
        rows = (x.double() if x.is_floating_point() else x, y, weight.double())
        centre = w.double()
        width = 1e-5 * centre.abs().amax(-1, keepdim=True).clamp_min(1.0)

        def curve(v: Tensor) -> Tensor:
            return (self.grad(centre + width * v, *rows) - self.grad(centre - width * v, *rows)) / (2 * width)

        start = randomness.normal(randomness.slots(randomness.key("smoothness"), self.d)).to(w.device)
        return largest_curvature(curve, start.expand(centre.shape), min(self.d, 25)).to(w.dtype)

    def solve(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, tol: float, pull: float = 0.0) -> Tensor:
        """At most 300 steps of L-BFGS to gradient norm tol, which a minimiser at a kink never reaches."""

        def loss(w: Tensor, centre: Tensor, *rows: Tensor) -> Tensor:
            return self.loss(w, *rows) + 0.5 * pull * (w - centre).square().sum(-1, keepdim=True)

        def grad(w: Tensor, centre: Tensor, *rows: Tensor) -> Tensor:
            return self.grad(w, *rows) + pull * (w - centre)

        parts = (w, x, y, weight.to(w.dtype))
        start, *rows = parts if w.dim() > 1 else tuple(part.unsqueeze(0) for part in parts)
        limit = torch.full_like(start[:, :1], tol)
        return lbfgs(loss, grad, start, (start, *rows), limit, steps=300).w.view_as(w)

    def module(self, w: Tensor) -> nn.Module:
        return NetworkPredictor(self.skeleton.filled(w.detach()), self.task)

    def describe(self) -> dict[str, Any]:
        raise SettingError(
            "A module of your own cannot be saved as a description: its code is not Coterie's. "
            "The parameters are saved; when loading, give the model again with model=network(factory)."
        )

    def _build(self, seed: int) -> nn.Module:
        """The module with its initial parameters for `seed`, drawn without touching torch's generator."""
        if isinstance(self.source, nn.Module):
            return self.source
        if self.source is None:
            raise SettingError("network() needs an nn.Module or a function that returns one.")
        return seeded(self.source, seed)

    def _numeric(self, y: Tensor) -> bool:
        return self.criterion == "mse" or (self.criterion != "cross-entropy" and y.is_floating_point())

    def _find_task(self, y: Tensor, outputs: int) -> str:
        if self._numeric(y):
            check_column(y)
            if outputs != 1:
                raise SettingError(
                    f"Numeric targets need a module with one output; it has {outputs}. "
                    "For classes give integer labels, or loss='cross-entropy'."
                )
            return "regression"
        found = count_classes(y)
        if found > max(2, outputs):
            raise DataError(
                f"Label {found - 1} was found but the module has {outputs} outputs; give it {found}."
            )
        return "binary" if outputs == 1 else "multiclass"

    def _row_scores(self, w: Tensor, x: Tensor, unrolled: bool = False) -> Tensor:
        with mixed(self.precision, w.device):
            output = self.skeleton(w, x if self.tokens else x.to(w.dtype), unrolled)
        output = output.to(w.dtype)
        return output.unsqueeze(-1) if output.dim() == 1 else output

    def _row_losses(self, w: Tensor, x: Tensor, y: Tensor, unrolled: bool = False) -> Tensor:
        scores = self._row_scores(w, x, unrolled)
        if not isinstance(self.criterion, str):
            return self.criterion(scores, y)
        if self.task == "multiclass":
            return functional.cross_entropy(scores, y.long(), reduction="none")
        z, y = scores.squeeze(-1), y.to(scores.dtype)
        if self.task == "regression":
            return 0.5 * (z - y).square()
        return functional.softplus(z * (1 - 2 * y), threshold=50.0)

    def _objective(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, unrolled: bool = False) -> Tensor:
        return (self._row_losses(w, x, y, unrolled) * weight).sum()

    def _objectives(self, w: Tensor, *rows: Tensor) -> Tensor:
        """Sum over a stack of clients, whose gradient in `w` has every client's own in its row."""
        return vmap(functools.partial(self._objective, unrolled=True))(w, *rows).sum()

    @functools.cached_property
    def _value(self) -> Callable[..., Tensor]:
        return compiled(self._objective, self._tolerance) if self.compiled else self._objective

    @functools.cached_property
    def _values(self) -> Callable[..., Tensor]:
        return compiled(self._objectives, self._tolerance)

    @property
    def _tolerance(self) -> float:
        """How far apart two orders of rounding may lie, relative to the gradient."""
        return 1e-3 if self.precision == "full" else 0.2

    @functools.cached_property
    def _captured(self) -> Captured:
        return Captured(self._whole_gradient)

    def _can_capture(self, w: Tensor, x: Tensor) -> bool:
        if not w.is_cuda or self.stacked is True or x.shape[1] > self._row_limit(w):
            return False
        shapes = self._captured.shapes
        return len(shapes) < _CAPTURED_SHAPES or any(x.shape[2:] in key for key in shapes)

    def _whole_gradient(self, w: Tensor, *rows: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = w.detach().requires_grad_()
            value = self._value(leaf, *rows)
            return torch.autograd.grad(value, leaf, allow_unused=True, materialize_grads=True)[0]

    def _one_gradient(self, w: Tensor, *rows: Tensor) -> Tensor:
        """Gradient for one client, the rows taken in pieces that fit in memory."""
        parts = (self._whole_gradient(w, *part) for part in self._pieces(w, rows))
        total = next(parts)
        for part in parts:
            total += part
        return total

    def _gradients_looped(self, w: Tensor, *rows: Tensor) -> Tensor:
        return torch.stack([self._one_gradient(*client) for client in zip(w, *rows, strict=True)])

    def _gradients_stacked(self, w: Tensor, *rows: Tensor) -> Tensor:
        parts = (self._mapped_gradient(w, *part) for part in self._pieces(w, rows, axis=1))
        total = next(parts)
        for part in parts:
            total += part
        return total

    def _mapped_gradient(self, w: Tensor, *rows: Tensor) -> Tensor:
        if not self.compiled:
            return _mapped(functools.partial(grad(self._objective), unrolled=True), w, *rows)
        with torch.enable_grad():
            leaf = w.detach().contiguous().requires_grad_()
            return torch.autograd.grad(self._values(leaf, *rows), leaf)[0]

    def _one_product(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, v: Tensor) -> Tensor:
        """Hessian times v for one client, the rows taken in pieces that fit in memory."""
        total = torch.zeros_like(w)
        with torch.enable_grad():
            leaf = w.detach().requires_grad_()
            for part in self._pieces(w, (x, y, weight)):
                value = self._objective(leaf, part[0], part[1], part[2], unrolled=True)
                slope = torch.autograd.grad(value, leaf, create_graph=True, materialize_grads=True)[0]
                if slope.requires_grad:
                    total += torch.autograd.grad(slope @ v, leaf, materialize_grads=True)[0]
        return total

    def _products_looped(self, w: Tensor, *rows: Tensor) -> Tensor:
        return torch.stack([self._one_product(*client) for client in zip(w, *rows, strict=True)])

    def _products_stacked(self, w: Tensor, *rows: Tensor) -> Tensor:
        def along(w: Tensor, x: Tensor, y: Tensor, weight: Tensor, v: Tensor) -> Tensor:
            return grad(self._objective)(w, x, y, weight, unrolled=True) @ v

        return _mapped(grad(along), w, *rows)

    def _by_row(self, name: str, function: Callable[..., Tensor], w: Tensor, *rows: Tensor) -> Tensor:
        """A function of rows, [B, ...] for one client and [k, B, ...] for a stack, in pieces."""
        if w.dim() == 1:
            with torch.no_grad():
                return torch.cat([function(w, *part) for part in self._pieces(w, rows)])
        if w.stride(0) == 0 or w.shape[0] == 1:
            flat = self._by_row(name, function, w[0], *(part.flatten(0, 1) for part in rows))
            return flat.unflatten(0, rows[0].shape[:2])

        def looped(w: Tensor, *rows: Tensor) -> Tensor:
            clients = zip(w, *rows, strict=True)
            return torch.stack([self._by_row(name, function, *client) for client in clients])

        def stacked(w: Tensor, *rows: Tensor) -> Tensor:
            unrolled = functools.partial(function, unrolled=True)
            return torch.cat([_mapped(unrolled, w, *part) for part in self._pieces(w, rows, axis=1)], 1)

        with torch.no_grad():
            return self._choose(name, {"looped": looped, "stacked": stacked}, w, *rows)

    def _choose(self, name: str, ways: dict[str, Callable[..., Tensor]], w: Tensor, *rows: Tensor) -> Tensor:
        """One of several ways to compute the same: the one that is set, or else the one measured as fastest.

        Clients and rows are told apart by powers of two; a measurement of a moment is repeated.
        """
        scale = f"2^{w.shape[0].bit_length()} clients 2^{rows[0].shape[1].bit_length()} rows"
        kind = "shared" if w.stride(0) == 0 else "own"
        key = f"{name} {kind} {scale} {tuple(rows[0].shape[2:])} {w.dtype} {w.device.type}"
        ways = {**ways, "stacked": functools.partial(self._stacks, ways["stacked"])}
        if self.stacked != "auto":
            ways = {way: ways[way] for way in ways if (way == "stacked") == self.stacked}
        choice = next(iter(ways)) if len(ways) == 1 else self.decisions.get(key)
        if choice in ways:
            return ways[choice](w, *rows)
        self.decisions[key], result = fastest(ways, w.is_cuda or self.compiled, w, *rows)
        return result

    def _stacks(self, stacked: Callable[..., Tensor], w: Tensor, *rows: Tensor) -> Tensor:
        """The stacked way over as many clients at a time as fit in memory."""
        step = max(1, self._row_limit(w) // rows[0].shape[1])
        parts = [stacked(*(part[at : at + step] for part in (w, *rows))) for at in range(0, w.shape[0], step)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _pieces(self, w: Tensor, rows: tuple[Tensor, ...], axis: int = 0) -> Iterator[tuple[Tensor, ...]]:
        limit, count = self._row_limit(w), rows[0].shape[axis]
        for first in range(0, count, limit):
            yield tuple(part.narrow(axis, first, min(limit, count - first)) for part in rows)

    def _row_limit(self, w: Tensor) -> int:
        """Rows whose activations fit in memory together."""
        on_gpu = w.device.type == "cuda"
        room = torch.cuda.get_device_properties(w.device).total_memory // 4 if on_gpu else _CPU_BYTES
        return max(1, 4 * room // (self._bytes_per_row * w.element_size()))

    @functools.cached_property
    def _bytes_per_row(self) -> int:
        """What a backward pass keeps per row, in float32."""
        assert self.features is not None
        dtype = torch.int64 if self.tokens else torch.float32
        return self.skeleton.saved_bytes(torch.zeros(2, *self.features, dtype=dtype), torch.float32)


def network(
    module: Source,
    loss: Criterion = "auto",
    l2: float = 0.0,
    stacked: str | bool = "auto",
    precision: str = "full",
    compiled: bool = False,
) -> Network:
    """Any nn.Module, or a function that returns one, as a model.

    `loss`: "cross-entropy" (integer targets), "mse" (1/2 (z - y)^2, floating targets), "auto" (by the
    targets), or a function (outputs, targets) -> one loss per row. `precision="bf16"` multiplies in
    bfloat16; `compiled` takes a minute at the start and is worth it for long runs.
    """
    if not callable(module):
        raise SettingError(f"network() needs an nn.Module or a function that returns one, not {module!r}.")
    return Network(
        source=module, criterion=loss, l2=l2, stacked=stacked, precision=precision, compiled=compiled
    )


def seeded(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    """What the factory makes when torch's generator starts from `seed`; the generator is put back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(randomness.key(seed, "initial network")))
        module = factory()
    if not isinstance(module, nn.Module):
        raise SettingError(f"The factory returned {type(module).__name__}; it must return an nn.Module.")
    return module


def check_rows(x: Tensor, y: Tensor) -> None:
    """As many rows of inputs as targets, and at least one."""
    if x.dim() < 1 or y.dim() != 1 or x.shape[0] != y.shape[0] or not len(y):
        raise DataError(
            f"Inputs have shape {tuple(x.shape)} and targets {tuple(y.shape)}; give [rows, ...] and [rows]."
        )


def _mapped(function: Callable[..., Tensor], w: Tensor, *rows: Tensor) -> Tensor:
    """vmap over the clients; a `w` that is one vector for all of them is mapped as such."""
    shared = w.stride(0) == 0
    over = (None if shared else 0, *(0 for _ in rows))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        try:
            return vmap(function, in_dims=over)(w[0] if shared else w, *rows).contiguous()
        except RuntimeError as problem:
            raise SettingError(
                f"The module cannot be mapped over clients: {problem} Use network(..., stacked=False)."
            ) from problem
