"""Any nn.Module as a model: its loss, gradient and scores as functions of one flat parameter vector."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.data.rows import Batch
from coterie.errors import DataError, SettingError
from coterie.federation import randomness
from coterie.models import chain
from coterie.models.accelerate import PRECISIONS, computing_in
from coterie.models.base import Model, dot
from coterie.models.checks import check_behaviour, check_module
from coterie.models.layered import Layered
from coterie.models.predictor import NetworkPredictor
from coterie.models.skeleton import Skeleton
from coterie.models.solve import largest_curvature, pulled_lbfgs
from coterie.models.targets import check_column, count_classes
from coterie.models.ways import Ways

Criterion = str | Callable[[Tensor, Tensor], Tensor]
Source = nn.Module | Callable[[], nn.Module]


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
        losses = self._ways.by_row("loss", self._row_losses, w, x, y)
        return dot(losses, weight.to(w.dtype)) + 0.5 * self.l2 * dot(w, w)

    def grad(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        gradient = self._ways.gradient(w, x, y, weight.to(w.dtype))
        return gradient.add_(w, alpha=self.l2) if self.l2 else gradient

    def takes_turns(self, w: Tensor, shape: tuple[int, ...]) -> bool:
        return w.device.type == "cpu" and not self.compiled and self._ways.takes_turns(w, shape)

    def descend(
        self, w: Tensor, batches: Iterable[Batch], lr: float, pull: float = 0.0, towards: Tensor | None = None
    ) -> Tensor:
        """Every parameter is moved in its place, so that a step reads and writes no more than it must."""
        if self._layered is not None:
            rows = ((batch.x, self._residuals(batch.y, batch.weight.to(w.dtype))) for batch in batches)
            return self._layered.descend(w, rows, lr, self.l2, pull, towards)
        w = w.clone()
        leaves = [part.detach().requires_grad_() for part in self.skeleton.parts(w)]
        middle = self.skeleton.parts(towards) if towards is not None and pull else None
        for batch in batches:
            with torch.enable_grad():
                with computing_in(self.precision, w.device):
                    output = self.skeleton.applied(leaves, batch.x)
                scores = _as_columns(output.to(w.dtype))
                value = (self._losses(scores, batch.y) * batch.weight.to(w.dtype)).sum()
            slopes = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
            with torch.no_grad():
                for k, (leaf, slope) in enumerate(zip(leaves, slopes, strict=True)):
                    if self.l2:
                        slope = slope + self.l2 * leaf
                    if middle is not None:
                        slope = slope + pull * (leaf - middle[k])
                    leaf.sub_(slope, alpha=lr)
        return w

    def hvp(self, w: Tensor, v: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return self._ways.product(w, x, y, weight.to(w.dtype), v) + self.l2 * v

    def scores(self, w: Tensor, x: Tensor) -> Tensor:
        return self._ways.by_row("scores", self._row_scores, w, x)

    def smoothness(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """|H|_2 at `w`, from below, by Lanczos; H v is a central difference of gradients in float64."""
        rows = (x.double() if x.is_floating_point() else x, y, weight.double())
        centre, exact = w.double(), self._exact()
        width = 1e-5 * centre.abs().amax(-1, keepdim=True).clamp_min(1.0)

        def curve(v: Tensor) -> Tensor:
            ahead, behind = (exact.grad(centre + side * width * v, *rows) for side in (1, -1))
            return (ahead - behind) / (2 * width)

        start = randomness.normal(randomness.slots(randomness.key("smoothness"), self.d)).to(w.device)
        return largest_curvature(curve, start.expand(centre.shape), min(self.d, 25)).to(w.dtype)

    def solve(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, tol: float, pull: float = 0.0) -> Tensor:
        """At most 300 steps of L-BFGS to gradient norm tol, which a minimiser at a kink never reaches."""
        exact = self._exact()
        rows = (x, y, weight.to(w.dtype))
        return pulled_lbfgs(exact.loss, exact.grad, w, rows, tol, pull, steps=300)

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
        with computing_in(self.precision, w.device):
            output = self.skeleton(w, x if self.tokens else x.to(w.dtype), unrolled)
        return _as_columns(output.to(w.dtype))

    def _row_losses(self, w: Tensor, x: Tensor, y: Tensor, unrolled: bool = False) -> Tensor:
        return self._losses(self._row_scores(w, x, unrolled), y)

    def _losses(self, scores: Tensor, y: Tensor) -> Tensor:
        """A loss for each row from its outputs."""
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

    def _chained(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """The sum over a stack of clients of `_objective`, for a chain of linear layers."""
        with computing_in(self.precision, w.device):
            scores = self.skeleton.chained(w, x)
        losses = self._losses(scores.to(w.dtype).flatten(0, 1), y.flatten())
        return (losses.view(weight.shape) * weight).sum()

    def _written_gradient(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """The gradient of `_chained` in C."""
        return chain.gradients(self.skeleton, w, x, y, weight, self.task)

    def _own_gradient(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """The gradient of `_objective` without a graph."""
        assert self._layered is not None
        return self._layered.gradient(w, x, self._residuals(y, weight))

    def _residuals(self, y: Tensor, weight: Tensor) -> Callable[[Tensor], Tensor]:
        """Outputs [B, outputs] -> derivatives of the weighted losses in them."""
        y, weight = y.unsqueeze(-1), weight.unsqueeze(-1)

        def slopes(scores: Tensor) -> Tensor:
            if self.task == "multiclass":
                gap = torch.softmax(scores, -1)
                gap.scatter_add_(-1, y.long(), gap.new_full((), -1.0).expand(y.shape))
            else:
                gap = (torch.sigmoid(scores) if self.task == "binary" else scores) - y
            return gap.mul_(weight)

        return slopes

    def _exact(self) -> Network:
        """The same network at full precision, for what would drown in rounding."""
        return self if self.precision == "full" else replace(self, precision="full", compiled=False)

    @functools.cached_property
    def _ways(self) -> Ways:
        exact = replace(self, precision="full", compiled=False)._ways if self.compiled else None
        chained = isinstance(self.criterion, str) and not self.tokens and self.skeleton.layers is not None
        written = chained and chain.known(self.skeleton) and self._layered is not None
        return Ways(
            self._objective,
            lambda: self._bytes_per_row,
            self.stacked,
            exact,
            self.decisions,
            self._chained if chained else None,
            self._written_gradient if written else None,
            self._own_gradient if self._layered is not None else None,
        )

    @functools.cached_property
    def _layered(self) -> Layered | None:
        """The gradient of one client without a graph, where it can be written out."""
        plain = isinstance(self.criterion, str) and self.precision == "full" and not self.compiled
        return Layered(self.skeleton, self.decisions) if plain and Layered.knows(self.skeleton) else None

    @functools.cached_property
    def _bytes_per_row(self) -> int:
        """What a backward pass keeps per row, in float32."""
        assert self.features is not None
        dtype = torch.int64 if self.tokens else torch.float32
        return self.skeleton.saved_bytes(torch.zeros(2, *self.features, dtype=dtype), torch.float32)


def _as_columns(output: Tensor) -> Tensor:
    """Outputs [B, outputs], also where a module gives one number per row."""
    return output.unsqueeze(-1) if output.dim() == 1 else output


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
