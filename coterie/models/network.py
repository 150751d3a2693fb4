"""Any nn.Module as a model: its loss, gradient and scores as functions of one flat parameter vector."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie._core import randomness
from coterie._core.errors import DataError, SettingError
from coterie.data.rows import Batch
from coterie.models import fast
from coterie.models.base import Model, dot
from coterie.models.batch_norm import POLICIES
from coterie.models.checks import check_behaviour, check_module
from coterie.models.compiling import PRECISIONS, computing_in
from coterie.models.flat_module import FlatModule
from coterie.models.gradient_backends import GradientBackends
from coterie.models.groups import ParameterGroups, of_adapters, of_layers
from coterie.models.predictor import NetworkPredictor
from coterie.models.solve import largest_curvature, prox_lbfgs
from coterie.models.targets import check_column, count_classes

Criterion = str | Callable[[Tensor, Tensor], Tensor]
Source = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True, eq=False)
class Network(Model):
    """Network as a model: sum_b weight_b criterion(module(x_b), y_b) + l2/2 |w|^2, all parameters in `w`."""

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
    buffers: str = "personal"
    decisions: dict[str, str] = field(default_factory=dict, repr=False)
    """Gradient backend chosen for each shape met so far."""

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
        if self.buffers not in POLICIES:
            raise SettingError(f"buffers={self.buffers!r} is unknown: choose from {', '.join(POLICIES)}.")
        if self.features is not None:
            _ = self.flat_module  # sizes that do not fit show now, and nothing is built inside vmap

    @property
    def d(self) -> int:
        return self.flat_module.d

    @property
    def task(self) -> str:
        if self.kind is None:
            raise SettingError("The network does not know its task yet; call fit_to(x, y) first.")
        return self.kind

    @functools.cached_property
    def flat_module(self) -> FlatModule:
        """Module as a function of a flat vector."""
        module = self._build(0)
        check_module(module)
        return FlatModule(module, self.buffers)

    def measured(self) -> dict[str, str]:
        return self.decisions

    def fit_to(self, x: Tensor, y: Tensor) -> Self:
        check_rows(x, y)
        rows = x[:2] if len(x) > 1 else torch.cat([x, x])
        output = check_behaviour(self.flat_module, rows.clone())
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
            fitted.flat_module.start.to(output.dtype),
            rows,
            targets if fitted.kind == "multiclass" else targets.to(output.dtype),
        )
        if losses.shape != (len(rows),):
            raise SettingError(
                f"The loss gives shape {tuple(losses.shape)} for {len(rows)} rows; give one number per row."
            )
        return fitted

    def initial(self, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Return the factory's initialisation for `seed`; a module given as an instance starts as it is."""
        start = (
            self.flat_module.start
            if isinstance(self.source, nn.Module)
            else FlatModule(self._build(seed), self.buffers).start
        )
        return start.to(device=device, dtype=dtype, copy=True)

    def loss(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        weight, penalised = weight.to(w.dtype), w[..., : self.flat_module.trainable]
        if self.calibrates:
            total = self._mapped(self.objective, w, x, y, weight).unsqueeze(-1)
        else:
            total = dot(self.backends.by_row("loss", self._row_losses, w, x, y), weight)
        return total + 0.5 * self.l2 * dot(penalised, penalised)

    def grad(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        weight = weight.to(w.dtype)
        gradient = self.backends.gradient(w, x, y, weight)(w, x, y, weight)
        if self.l2:
            trainable = self.flat_module.trainable
            gradient[..., :trainable].add_(w[..., :trainable], alpha=self.l2)
        return gradient

    def prefers_loop(self, w: Tensor, shape: tuple[int, ...]) -> bool:
        plain = w.device.type == "cpu" and not self.compiled and not self.flat_module.normalises_batches
        return plain and self.backends.prefers_loop(w, shape)

    def sgd(
        self,
        w: Tensor,
        batches: Iterable[Batch],
        lr: float,
        prox: float = 0.0,
        anchor: Tensor | None = None,
        linear: Tensor | None = None,
    ) -> Tensor:
        """Take a step on each minibatch; parameters are updated in place in a copy of `w` [d]."""
        path = fast.find("client sgd", self)
        if path is not None:
            ends: Tensor = path.run(self, w, batches, lr, prox, anchor, linear)
            return ends
        w = w.clone()
        leaves = [part.detach().requires_grad_() for part in self.flat_module.parts(w)]
        middle = self.flat_module.parts(anchor) if anchor is not None and prox else None
        added = self.flat_module.parts(linear) if linear is not None else None
        for batch in batches:
            with torch.enable_grad():
                with computing_in(self.precision, w.device):
                    output = self.flat_module.applied(leaves, batch.x)
                scores = _as_columns(output.to(w.dtype))
                value = (self.losses(scores, batch.y) * batch.weight.to(w.dtype)).sum()
            grads = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
            with torch.no_grad():
                for k, (leaf, grad) in enumerate(zip(leaves, grads, strict=True)):
                    if self.l2:
                        grad = grad + self.l2 * leaf
                    if middle is not None:
                        grad = grad + prox * (leaf - middle[k])
                    if added is not None:
                        grad = grad + added[k]
                    leaf.sub_(grad, alpha=lr)
        return w

    @functools.cached_property
    def groups(self) -> ParameterGroups:
        """Parameters and layers by their names, "head" (the last nn.Linear), "body", "norm" and "buffers"."""
        flat = self.flat_module
        layers = of_layers(flat.names, flat.sizes, flat.d, flat.head, flat.norm_layers)
        return ParameterGroups(flat.d, layers | of_adapters(flat.names, flat.shapes))

    def hidden_features(self, w: Tensor, x: Tensor) -> Tensor:
        """Return the inputs of the last nn.Linear for rows x [..., B, *], [..., B, features]."""
        if self.flat_module.head is None:
            raise SettingError("The module has no nn.Linear, so there are no features of a last layer.")
        path = fast.find("features", self, w) if w.dim() == 2 else None
        if path is not None:
            with torch.no_grad():
                found: Tensor = path.run(self, w, x)
                return found
        return self.backends.by_row("features", self.flat_module.hidden_features, w, x)

    def feature_grad(self, w: Tensor, x: Tensor, slope: Tensor) -> Tensor:
        path = fast.find("features", self, w) if w.dim() == 2 else None
        if path is not None:
            with torch.enable_grad():
                leaf = w.detach().contiguous().requires_grad_()
                return torch.autograd.grad((path.run(self, leaf, x) * slope).sum(), leaf)[0]
        return self.backends.pulled_back("feature grad", self.flat_module.hidden_features, w, x, slope)

    def score_grad(self, w: Tensor, x: Tensor, slope: Tensor) -> Tensor:
        return self.backends.pulled_back("score grad", self._row_scores, w, x, slope)

    @property
    def calibrates(self) -> bool:  # type: ignore[override]
        """True if running statistics of batch normalisation are measured on a client's own rows."""
        return self.flat_module.normalises_batches and self.buffers == "personal"

    def calibrate(self, w: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return `w` with the statistics of these rows; a client without rows keeps its old ones."""
        statistics = self._mapped(self.flat_module.measured, w, x, weight.to(w.dtype))
        kept = w[..., self.flat_module.trainable :]
        some = (weight > 0).any(-1, keepdim=True)
        return torch.cat([w[..., : self.flat_module.trainable], torch.where(some, statistics, kept)], -1)

    @property
    def tracks(self) -> bool:  # type: ignore[override]
        """True if `client.sgd` moves running statistics, which are then averaged with the parameters."""
        return self.flat_module.normalises_batches and self.buffers == "averaged"

    def track(self, w: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return `w` with its running statistics moved by the layers' momentum, where they are averaged."""
        if not self.tracks:
            return w
        trainable, momentum = self.flat_module.trainable, self.flat_module.momentum.to(w)
        measured = self._mapped(self.flat_module.measured, w, x, weight.to(w.dtype))
        return torch.cat([w[..., :trainable], torch.lerp(w[..., trainable:], measured, momentum)], -1)

    def require_gradients(self) -> None:
        """Raise an error for averaged statistics, which only `client.sgd` moves."""
        if self.tracks:
            raise SettingError(
                'buffers="averaged" needs a method that trains with client.sgd; this one takes gradients. '
                'Use buffers="personal", or replace_batchnorm(module).'
            )

    def paths_used(self) -> Counter[str]:
        return Counter(self.backends.used)

    def _mapped(self, function: Callable[..., Tensor], w: Tensor, *rows: Tensor) -> Tensor:
        """Apply a function of one client's rows to one client or to each of a stack."""
        with torch.no_grad():
            if w.dim() == 1:
                return function(w, *rows)
            return torch.stack([function(*client) for client in zip(w, *rows, strict=True)])

    def hvp(self, w: Tensor, v: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        product = self.backends.product(w, x, y, weight.to(w.dtype), v)
        if self.l2:
            trainable = self.flat_module.trainable
            product[..., :trainable].add_(v[..., :trainable], alpha=self.l2)
        return product

    def scores(self, w: Tensor, x: Tensor) -> Tensor:
        return self.backends.by_row("scores", self._row_scores, w, x)

    def smoothness(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Estimate |H|_2 at `w` from below by Lanczos; H v is a central difference of gradients in float64."""
        rows = (x.double() if x.is_floating_point() else x, y, weight.double())
        centre, exact = w.double(), self.exact
        width = 1e-5 * centre.abs().amax(-1, keepdim=True).clamp_min(1.0)

        def curve(v: Tensor) -> Tensor:
            ahead, behind = (exact.grad(centre + side * width * v, *rows) for side in (1, -1))
            return (ahead - behind) / (2 * width)

        start = randomness.normal(randomness.slots(randomness.key("smoothness"), self.d)).to(w.device)
        return largest_curvature(curve, start.expand(centre.shape), min(self.d, 25)).to(w.dtype)

    def solve(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, tol: float, prox: float = 0.0) -> Tensor:
        """Take at most 300 steps of L-BFGS to gradient norm `tol`, which a minimiser at a kink never reaches."""
        exact = self.exact
        rows = (x, y, weight.to(w.dtype))
        return prox_lbfgs(exact.loss, exact.grad, w, rows, tol, prox, steps=300)

    def module(self, w: Tensor) -> nn.Module:
        return NetworkPredictor(self.flat_module.filled(w.detach()), self.task).eval()

    def describe(self) -> dict[str, Any]:
        raise SettingError(
            "A module of your own cannot be saved as a description: its code is not Coterie's. "
            "The parameters are saved; when loading, give the model again with model=network(factory)."
        )

    def _build(self, seed: int) -> nn.Module:
        """Return the module with its initial parameters for `seed`; torch's generator is left as it was."""
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
            output = self.flat_module(w, x if self.tokens else x.to(w.dtype), unrolled)
        return _as_columns(output.to(w.dtype))

    def _row_losses(self, w: Tensor, x: Tensor, y: Tensor, unrolled: bool = False) -> Tensor:
        return self.losses(self._row_scores(w, x, unrolled), y)

    def losses(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return a loss for each row from its outputs [B, outputs]."""
        if not isinstance(self.criterion, str):
            return self.criterion(scores, y)
        if self.task == "multiclass":
            return functional.cross_entropy(scores, y.long(), reduction="none")
        z, y = scores.squeeze(-1), y.to(scores.dtype)
        if self.task == "regression":
            return 0.5 * (z - y).square()
        return functional.softplus(z * (1 - 2 * y), threshold=50.0)

    def objective(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, unrolled: bool = False) -> Tensor:
        """Return the weighted sum of the losses of one client's rows, as training computes it."""
        if not self.flat_module.normalises_batches:
            return (self._row_losses(w, x, y, unrolled) * weight).sum()
        with computing_in(self.precision, w.device):
            output = self.flat_module(w, x.to(w.dtype), unrolled, weight)
        return (self.losses(_as_columns(output.to(w.dtype)), y) * weight).sum()

    def residuals(self, y: Tensor, weight: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the function outputs [B, outputs] -> derivatives of the weighted losses in them."""
        y, weight = y.unsqueeze(-1), weight.unsqueeze(-1)

        def derivatives(scores: Tensor) -> Tensor:
            if self.task == "multiclass":
                gap = torch.softmax(scores, -1)
                gap.scatter_add_(-1, y.long(), gap.new_full((), -1.0).expand(y.shape))
            else:
                gap = (torch.sigmoid(scores) if self.task == "binary" else scores) - y
            return gap.mul_(weight)

        return derivatives

    @functools.cached_property
    def exact(self) -> Network:
        """Same network at full precision, for computations that rounding would spoil."""
        if self.precision == "full" and not self.compiled:
            return self
        return replace(self, precision="full", compiled=False)

    @functools.cached_property
    def backends(self) -> GradientBackends:
        """Ways to compute this network's gradients, with their measured speed."""
        return GradientBackends(self)

    @functools.cached_property
    def bytes_per_row(self) -> int:
        """Memory that a backward pass holds per row, in float32."""
        assert self.features is not None
        dtype = torch.int64 if self.tokens else torch.float32
        return self.flat_module.saved_bytes(torch.zeros(2, *self.features, dtype=dtype), torch.float32)


def _as_columns(output: Tensor) -> Tensor:
    """Return outputs as [B, outputs], also if a module gives one number per row."""
    return output.unsqueeze(-1) if output.dim() == 1 else output


def network(
    module: Source,
    loss: Criterion = "auto",
    l2: float = 0.0,
    stacked: str | bool = "auto",
    precision: str = "full",
    compiled: bool = False,
    buffers: str = "personal",
) -> Network:
    """Return a model from any nn.Module.

    Parameters
    ----------
    module
        An nn.Module, or a function without arguments that returns one. A function gives every seed its own start.
    loss
        "cross-entropy" for integer targets, "mse" for floating-point ones (1/2 (z - y)^2), "auto" to decide by the
        targets, or a function (outputs, targets) that returns one loss per row.
    l2
        Strength of the penalty l2/2 |w|^2.
    stacked
        Train clients as one stack (True), one by one (False), or whichever is measured to be faster ("auto").
    precision
        "full", or "bf16" to multiply in bfloat16.
    compiled
        Compile the gradient at once, which takes up to a minute. On a GPU that is done anyway once training has lasted
        half a minute, and kept if it is measured as faster.
    buffers
        Running statistics of batch normalisation: "personal" (measured on a client's own rows), "averaged" with the
        parameters, or "shared" (fixed as the module has them).

    Returns
    -------
    Network
        The model. Its shapes are known after `fit_to`, which a federation calls.

    Examples
    --------
    >>> import torch, coterie
    >>> from torch import nn
    >>> model = coterie.models.network(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    >>> model = model.fit_to(torch.randn(10, 3), torch.arange(10) % 2)
    >>> model.d, model.task, model.groups["head"].sum().item()
    (26, 'multiclass', 10)
    """
    if not callable(module):
        raise SettingError(f"network() needs an nn.Module or a function that returns one, not {module!r}.")
    return Network(
        source=module,
        criterion=loss,
        l2=l2,
        stacked=stacked,
        precision=precision,
        compiled=compiled,
        buffers=buffers,
    )


def seeded(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return a module made with torch's generator started from `seed`; its state is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(randomness.key(seed, "initial network")))
        module = factory()
    if not isinstance(module, nn.Module):
        raise SettingError(f"The factory returned {type(module).__name__}; it must return an nn.Module.")
    return module


def check_rows(x: Tensor, y: Tensor) -> None:
    """Raise an error unless there are as many rows of inputs as targets, and at least one."""
    if x.dim() < 1 or y.dim() != 1 or x.shape[0] != y.shape[0] or not len(y):
        raise DataError(
            f"Inputs have shape {tuple(x.shape)} and targets {tuple(y.shape)}; give [rows, ...] and [rows]."
        )
