"""Generalised linear models with gradients in closed form.

One flat vector `w` holds the weights [outputs, columns] row by row, as nn.Linear does; columns are
the features and, with an intercept, a last column of ones. Scores are kept as [..., outputs, B]
inside: with that layout both products of a gradient run at full speed on a stack of clients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie._core.errors import CoterieError, DataError, SettingError
from coterie.models.base import Model, dot, norm
from coterie.models.basis import Basis
from coterie.models.class_weights import checked, of_rows, weigh
from coterie.models.groups import ParameterGroups
from coterie.models.metrics.metric import Metric, ScoredRows
from coterie.models.predictor import CurvePredictor, LinearPredictor
from coterie.models.solve import Solution, lbfgs, newton
from coterie.models.targets import count_classes

EACH = ("regression", "binary", "multiclass")  # tasks whose rows have losses of their own
_NEWTON_LIMIT = 512
_HESSIAN_NUMBERS = 2**25


@dataclass(frozen=True)
class Glm(Model):
    """Generalised linear model: sum_b weight_b loss(x_b'w, y_b) + l2/2 |w|^2, the intercept not penalised."""

    l2: float = 0.0
    intercept: bool = False
    reduction: str = "mean"
    features: int | None = None
    basis: Basis | None = field(default=None, kw_only=True)
    class_weights: tuple[float, ...] | None = field(default=None, kw_only=True)

    name: ClassVar[str]
    curvature: ClassVar[float]
    closed_form: ClassVar[bool] = True
    learns_features: ClassVar[bool] = False
    has_hessian: ClassVar[bool] = True
    takes_class_weights: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.l2) and self.l2 >= 0):
            raise SettingError(f"l2={self.l2} is outside its range: give a finite number, 0 or more.")
        if self.reduction not in ("mean", "sum"):
            raise SettingError(f"reduction={self.reduction!r} is unknown: choose 'mean' or 'sum'.")
        if isinstance(self.basis, dict):  # from a description
            stored = {**self.basis, "levels": tuple(self.basis.get("levels", ()))}
            object.__setattr__(self, "basis", Basis(**stored))
        if self.basis is not None and self.features is not None and self.basis.levels:
            if len(self.basis.levels) != self.features:
                raise SettingError(
                    f"the basis has levels of {len(self.basis.levels)} features, not {self.features}"
                )

        if self.class_weights is not None:
            self._require_classes()
            object.__setattr__(self, "class_weights", checked(self.class_weights))

    @property
    def outputs(self) -> int:
        """Scores per row."""
        return 1

    @property
    def columns(self) -> int:
        """Columns of the prepared inputs."""
        if self.features is None:
            raise SettingError(f"{self.name}() does not know its inputs yet; call fit_to(x, y) first.")
        return (self.features if self.basis is None else self.basis.width(self.features)) + self.intercept

    @property
    def d(self) -> int:
        return self.outputs * self.columns

    def fit_to(self, x: Tensor, y: Tensor) -> Self:
        if x.dim() < 2:
            raise DataError(f"The inputs have shape {tuple(x.shape)}; give [rows, features].")
        if x.shape[0] != y.shape[0]:
            raise DataError(f"There are {x.shape[0]} rows of inputs but {y.shape[0]} targets.")
        features = math.prod(x.shape[1:])
        if self.features not in (None, features):
            raise DataError(f"The model expects {self.features} features; these rows have {features}.")
        return replace(self, features=features)

    def with_levels(self, levels: Sequence[int]) -> Self:
        return self if self.basis is None else replace(self, basis=self.basis.with_levels(levels))

    def with_class_weights(self, weights: Sequence[float]) -> Self:
        self._require_classes()
        return replace(self, class_weights=tuple(weights))

    def prepare(self, x: Tensor) -> Tensor:
        """Return raw rows [n, *features] as [n, columns], with a column of ones for the intercept."""
        x = x.flatten(1) if self.basis is None else self.basis(x.flatten(1))
        return torch.cat([x, torch.ones_like(x[:, :1])], 1) if self.intercept else x

    def loss(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        value = dot(self._row_losses(self._table(w) @ x.mT, y), weigh(weight, y, self.class_weights))
        if self.l2:
            value += (0.5 * self.l2) * self._penalised(w).square().sum((-2, -1)).unsqueeze(-1)
        return value

    def grad(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        table, weight = self._table(w), weigh(weight, y, self.class_weights)
        gradient = self._residuals(table @ x.mT, y).mul_(weight.unsqueeze(-2)) @ x
        if self.l2:
            penalised = self.columns - self.intercept
            gradient[..., :penalised].add_(table[..., :penalised], alpha=self.l2)
        return gradient.flatten(-2)

    def hvp(self, w: Tensor, v: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        bent = self._bend(self._table(w) @ x.mT, y, self._table(v) @ x.mT)
        product = (bent * weigh(weight, y, self.class_weights).unsqueeze(-2) @ x).flatten(-2)
        if self.l2:
            self._penalised(product).add_(self._penalised(v), alpha=self.l2)
        return product

    @property
    def groups(self) -> ParameterGroups:
        """All parameters are the head; "weights" and "intercept" tell them apart."""
        rows = [slice(k * self.columns, (k + 1) * self.columns) for k in range(self.outputs)]
        last = [slice(row.stop - 1, row.stop) for row in rows] if self.intercept else []
        weights = [slice(row.start, row.start + self.columns - self.intercept) for row in rows]
        parts = {"all": rows, "head": rows, "body": [], "buffers": [], "weights": weights, "intercept": last}
        return ParameterGroups(self.d, parts)

    def hidden_features(self, w: Tensor, x: Tensor) -> Tensor:
        """Return the rows themselves, without the ones of the intercept: a linear model has no hidden layer."""
        return x[..., : self.columns - self.intercept]

    def score_grad(self, w: Tensor, x: Tensor, slope: Tensor) -> Tensor:
        return (slope.mT @ x).flatten(-2)

    def scores(self, w: Tensor, x: Tensor) -> Tensor:
        return (self._table(w) @ x.mT).mT

    def measure_each(
        self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, metrics: Sequence[Metric]
    ) -> dict[str, Tensor]:
        if type(self).measure is not Model.measure or self.task not in EACH:
            return super().measure_each(w, x, y, weight, metrics)
        y, weight = (part.unsqueeze(-2).expand(*w.shape[:-1], -1) for part in (y, weight))
        rows = ScoredRows(self.task, self.scores_each(w, x), y, weight)
        return {metric.name: metric.sums(rows) for metric in metrics}

    def scores_each(self, w: Tensor, x: Tensor) -> Tensor:
        """Return the scores [..., m, B, outputs] by several models [..., m, d]; rows are read once for all of them."""
        shape = (w.shape[-2], self.outputs)
        scores: Tensor = self._table(w).flatten(-3, -2) @ x.mT
        found: Tensor = scores.unflatten(-2, shape).mT
        return found

    def smoothness(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return the bound curvature * lambda_max(X' diag(weight) X) + l2."""
        weight = weigh(weight, y, self.class_weights)
        return (self.curvature * gram_eigenvalues(x, weight)[..., -1:] + self.l2).to(w.dtype)

    def convexity(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return torch.full_like(weight[..., :1], 0.0 if self.intercept else self.l2, dtype=w.dtype)

    def hessian(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return the Hessian of `loss`, [..., d, d]."""
        raise NotImplementedError

    def solve(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, tol: float, prox: float = 0.0) -> Tensor:
        """Return the minimiser by Newton's method, or L-BFGS beyond 512 parameters, in float64.

        A tolerance below the rounding error of the gradient is raised to it. Where no minimiser exists, a CoterieError
        says which clients have none, and why.
        """
        lead = w.shape[:-1]
        rows = (x.double(), y.double(), weight.double())
        start = w.double().reshape(-1, self.d)
        data = tuple(part.reshape(-1, *part.shape[len(lead) :]) for part in rows)
        if self.intercept and prox == 0:
            self._check_classes_present(data[1], data[2])
        size = max(1, _HESSIAN_NUMBERS // (self.d * max(self.d, x.shape[-2])))
        parts = []
        for at in range(0, start.shape[0], size):
            x, y, weight = (part[at : at + size] for part in data)
            parts.append(self._solve_part(start[at : at + size], x, y, weight, tol, prox, first=at))
        return torch.cat(parts).reshape(*lead, self.d).to(w.dtype)

    def design(self, x: Tensor) -> Tensor:
        """Return prepared rows [..., B, columns] as the matrices [..., B, outputs, d] that map w to a row's scores."""
        if self.outputs == 1:
            return x.unsqueeze(-2)
        own = torch.eye(self.outputs, dtype=x.dtype, device=x.device)
        return (own[:, :, None] * x[..., None, None, :]).flatten(-2)

    def row_derivatives(self, scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return losses [..., B], first [..., S, B] and second [..., S, S, B] derivatives in scores [..., S, B]."""
        outputs = scores.shape[-2]
        y = y.expand(*scores.shape[:-2], scores.shape[-1])
        columns = []
        for k in range(outputs):
            ones = torch.zeros_like(scores)  # anew each time: least squares returns it as it is
            ones[..., k, :] = 1.0
            columns.append(self._bend(scores, y, ones))
        found = self._row_losses(scores, y), self._residuals(scores.clone(), y), torch.stack(columns, -2)
        if self.class_weights is None:
            return found
        share = of_rows(self.class_weights, y, scores)
        return found[0] * share, found[1] * share.unsqueeze(-2), found[2] * share[..., None, None, :]

    def module(self, w: Tensor) -> nn.Module:
        table = self._table(w.detach())
        bias = table[:, -1] if self.intercept else None
        line = LinearPredictor(table[:, : self.columns - self.intercept], bias, self.task)
        return line if self.basis is None else CurvePredictor(self.basis, line)

    def describe(self) -> dict[str, Any]:
        described = {"model": self.name, **asdict(self)}
        for name in ("basis", "class_weights"):
            if getattr(self, name) is None:
                del described[name]  # as files before there was one
        return described

    def _require_classes(self) -> None:
        if not self.takes_class_weights:
            raise SettingError(f"{self.name}() takes no class weights; logistic() and softmax() do")

    def _table(self, w: Tensor) -> Tensor:
        """Return the weights as [..., outputs, columns]."""
        return w.view(*w.shape[:-1], self.outputs, self.columns)

    def _penalised(self, w: Tensor) -> Tensor:
        """Return the weights that l2 penalises, [..., outputs, features]."""
        return self._table(w)[..., : self.columns - self.intercept]

    def _penalty_diagonal(self, like: Tensor) -> Tensor:
        diagonal = torch.zeros(self.d, dtype=like.dtype, device=like.device)
        self._penalised(diagonal).fill_(self.l2)
        return diagonal

    def _row_losses(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return the losses [..., B] of scores [..., outputs, B]."""
        raise NotImplementedError

    @staticmethod
    def _residuals(scores: Tensor, y: Tensor) -> Tensor:
        """Return the derivatives of the row losses in the scores [..., outputs, B], which may be overwritten."""
        raise NotImplementedError

    def _bend(self, scores: Tensor, y: Tensor, change: Tensor) -> Tensor:
        """Return the first-order change of the residuals [..., outputs, B] for a change of the scores."""
        raise NotImplementedError

    def _margins(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return the margins of the label over each other class, [..., n, B]; the row loss falls in all of them."""
        raise NotImplementedError

    def _fill_gauge(self, matrix: Tensor) -> None:
        """Add curvature to the Hessian in directions along which the loss is constant for any data."""

    def _solve_part(
        self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, tol: float, prox: float, first: int
    ) -> Tensor:
        """Solve a stack [k, d] that fits in memory; `first` is the number of its first client."""

        def loss(w: Tensor, centre: Tensor, *rows: Tensor) -> Tensor:
            return self.loss(w, *rows) + 0.5 * prox * (w - centre).square().sum(-1, keepdim=True)

        def grad(w: Tensor, centre: Tensor, *rows: Tensor) -> Tensor:
            return self.grad(w, *rows) + prox * (w - centre)

        def hessian(w: Tensor, centre: Tensor, *rows: Tensor) -> Tensor:
            matrix = self.hessian(w, *rows)
            matrix.diagonal(dim1=-2, dim2=-1).add_(prox)
            if prox == 0:
                self._fill_gauge(matrix)
            return matrix

        def gains(step: Tensor, centre: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            change = self._margins(self._table(step) @ x.mT, y)
            return (change * (weight > 0).unsqueeze(-2)).flatten(-2)

        data = (w, x, y, weight)
        length = torch.linalg.vector_norm(x, dim=-1)
        rounding = 8 * torch.finfo(w.dtype).eps
        limit = (rounding * dot(weight, length)).clamp_min(tol)
        endless = self.l2 == 0 and prox == 0
        start = torch.where(loss(torch.zeros_like(w), *data) < loss(w, *data), 0.0, w)
        if self.d <= _NEWTON_LIMIT:
            solution = newton(loss, grad, hessian, start, data, limit, gains if endless else None)
        else:
            solution = lbfgs(loss, grad, start, data, limit)
        bad = ~solution.converged
        if endless:
            won = gains(solution.w, *data)
            bad |= (won.amin(-1) >= 0) & (won.amax(-1) > 0)
        else:
            blurred = rounding * dot(weight, length * (1 + length * norm(solution.w)))
            bad &= (solution.gradient > blurred).squeeze(-1)
        if bool(bad.any()):
            raise CoterieError(self._explain(solution, bad, first, endless, tol))
        return solution.w

    def _explain(self, solution: Solution, bad: Tensor, first: int, endless: bool, tol: float) -> str:
        clients = [first + int(i) for i in bad.nonzero().squeeze(-1)]
        who = ", ".join(map(str, clients[:5])) + (", ..." if len(clients) > 5 else "")
        if endless:
            return (
                f"{self.name}: the loss of client(s) {who} of the stack has no minimiser: a plane separates "
                f"their classes, so the weights grow without end. Set l2 > 0, for instance l2=1e-4."
            )
        worst = float(solution.gradient[bad].max())
        return (
            f"{self.name}: client(s) {who} of the stack stopped at gradient norm {worst:.1e}, "
            f"above tol={tol:g}. Allow a larger tol, set a larger l2, or standardise the inputs."
        )

    def _check_classes_present(self, y: Tensor, weight: Tensor) -> None:
        """Raise an error if a client lacks a class: its best intercept would be infinite."""
        seen = torch.stack([((y == c) & (weight > 0)).any(-1) for c in range(max(2, self.outputs))], -1)
        if not bool(seen.all()):
            client, label = (int(i) for i in (~seen).nonzero()[0])
            raise CoterieError(
                f"{self.name}: client {client} of the stack has no row of class {label}, so its best "
                "intercept is infinite. Use intercept=False together with l2 > 0, or leave that client out."
            )


@dataclass(frozen=True)
class Logistic(Glm):
    """Logistic regression: log(1 + exp(z)) - y z with z = x'w and labels 0 or 1."""

    name: ClassVar[str] = "logistic"
    curvature: ClassVar[float] = 0.25
    convex: ClassVar[bool] = True
    takes_class_weights: ClassVar[bool] = True

    @property
    def task(self) -> str:
        return "binary"

    def fit_to(self, x: Tensor, y: Tensor) -> Self:
        found = count_classes(y)
        if found > 2:
            raise DataError(
                f"logistic() tells two classes apart, labelled 0 and 1; label {found - 1} was found. "
                "Use models.softmax() for more classes."
            )
        return super().fit_to(x, y)

    def hessian(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        likely, weight = torch.sigmoid(self._table(w) @ x.mT), weigh(weight, y, self.class_weights)
        matrix = (x.mT * (likely * (1 - likely) * weight.unsqueeze(-2))) @ x
        matrix.diagonal(dim1=-2, dim2=-1).add_(self._penalty_diagonal(w))
        return matrix

    def _row_losses(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return log(1 + exp(-z)) for label 1 and log(1 + exp(z)) for label 0, so that no digits cancel."""
        z = scores.squeeze(-2)
        return functional.softplus(z * (1 - 2 * y.to(z.dtype)), threshold=50.0)

    def _margins(self, scores: Tensor, y: Tensor) -> Tensor:
        return scores * (2 * y - 1).unsqueeze(-2)

    @staticmethod
    def _residuals(scores: Tensor, y: Tensor) -> Tensor:
        return torch.sigmoid(scores).sub_(y.unsqueeze(-2))

    def _bend(self, scores: Tensor, y: Tensor, change: Tensor) -> Tensor:
        likely = torch.sigmoid(scores)
        return likely * (1 - likely) * change

    def row_derivatives(self, scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.class_weights is not None:
            return super().row_derivatives(scores, y)
        side = (1 - 2 * y.to(scores.dtype)).unsqueeze(-2)
        against = scores * side  # one exponential of it gives all three
        wrong = torch.sigmoid(against)
        loss = functional.softplus(against, threshold=50.0).squeeze(-2)
        return loss, wrong * side, (wrong * (1 - wrong)).unsqueeze(-3)


@dataclass(frozen=True)
class Softmax(Glm):
    """Multinomial regression: log sum_c exp(z_c) - z_y with z = W x and labels 0..C-1."""

    classes: int | None = None

    name: ClassVar[str] = "softmax"
    curvature: ClassVar[float] = 0.5
    convex: ClassVar[bool] = True
    takes_class_weights: ClassVar[bool] = True

    @property
    def outputs(self) -> int:
        if self.classes is None:
            raise SettingError("softmax() does not know its classes yet; call fit_to(x, y) first.")
        return self.classes

    @property
    def task(self) -> str:
        return "multiclass"

    def fit_to(self, x: Tensor, y: Tensor) -> Self:
        return replace(super().fit_to(x, y), classes=max(2, count_classes(y, self.classes)))

    def hessian(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        likely, weight = torch.softmax(self._table(w) @ x.mT, -2), weigh(weight, y, self.class_weights)
        weighted = likely * weight.unsqueeze(-2)
        mixed = (likely.mT.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)
        matrix = -(mixed * weight.unsqueeze(-1)).mT @ mixed
        blocks = self._blocks(matrix)
        for c in range(self.outputs):
            blocks[..., c, :, c, :] += (x.mT * weighted[..., c : c + 1, :]) @ x
        matrix.diagonal(dim1=-2, dim2=-1).add_(self._penalty_diagonal(w))
        return matrix

    def _row_losses(self, scores: Tensor, y: Tensor) -> Tensor:
        return torch.logsumexp(scores - scores.gather(-2, y.long().unsqueeze(-2)), -2)

    def _margins(self, scores: Tensor, y: Tensor) -> Tensor:
        hit = y.long().unsqueeze(-2)
        margins = scores.gather(-2, hit) - scores
        return margins.scatter(-2, hit, margins.amax(-2, keepdim=True))

    def _fill_gauge(self, matrix: Tensor) -> None:
        """Make the Hessian definite along shifts of all scores, which change no probability."""
        if self.l2 > 0 and not self.intercept:
            return
        free = slice(self.columns - self.intercept, None) if self.l2 > 0 else slice(None)
        size = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None, None]
        self._blocks(matrix).diagonal(dim1=-3, dim2=-1)[..., free] += size

    def _blocks(self, matrix: Tensor) -> Tensor:
        """Return a matrix [..., d, d] as [..., outputs, columns, outputs, columns]."""
        shape = (self.outputs, self.columns)
        blocks: Tensor = matrix.unflatten(-1, shape).unflatten(-3, shape)
        return blocks

    @staticmethod
    def _residuals(scores: Tensor, y: Tensor) -> Tensor:
        residuals = torch.softmax(scores, -2)
        hit = y.long().unsqueeze(-2)
        return residuals.scatter_add_(-2, hit, residuals.new_full((), -1.0).expand(hit.shape))

    def _bend(self, scores: Tensor, y: Tensor, change: Tensor) -> Tensor:
        likely = torch.softmax(scores, -2)
        return likely * (change - (likely * change).sum(-2, keepdim=True))


def logistic(
    l2: float = 0.0,
    intercept: bool = False,
    reduction: str = "mean",
    class_weights: Sequence[float] | None = None,
) -> Logistic:
    """Return logistic regression for labels 0 and 1.

    Parameters
    ----------
    l2
        Strength of the penalty l2/2 |w|^2; the intercept is not penalised.
    intercept
        Add an intercept.
    reduction
        Combine the losses of a client's rows by their "mean" or their "sum".
    class_weights
        Weight of the rows of each class in the loss.

    Returns
    -------
    Logistic
        A model with one score per row, the log-odds of label 1.

    Examples
    --------
    >>> import torch, coterie
    >>> x, y = torch.tensor([[1.0], [2.0], [2.0]]), torch.tensor([0, 1, 1])
    >>> model = coterie.models.logistic(l2=0.1, intercept=True).fit_to(x, y)
    >>> model.d, model.task
    (2, 'binary')
    """
    weights = None if class_weights is None else tuple(class_weights)
    return Logistic(l2, intercept, reduction, class_weights=weights)


def softmax(
    l2: float = 0.0,
    intercept: bool = False,
    reduction: str = "mean",
    classes: int | None = None,
    class_weights: Sequence[float] | None = None,
) -> Softmax:
    """Return multinomial logistic regression for labels 0..C-1.

    Parameters
    ----------
    l2
        Strength of the penalty l2/2 |w|^2; the intercept is not penalised.
    intercept
        Add an intercept.
    reduction
        Combine the losses of a client's rows by their "mean" or their "sum".
    classes
        Number of classes C; needed if the largest label may be missing from the data.
    class_weights
        Weight of the rows of each class in the loss.

    Returns
    -------
    Softmax
        A model with C scores per row.

    Examples
    --------
    >>> import torch, coterie
    >>> x, y = torch.tensor([[1.0, 0.0], [2.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 1, 2])
    >>> model = coterie.models.softmax(intercept=True).fit_to(x, y)
    >>> model.d, model.scores(torch.zeros(9), model.prepare(x)).shape
    (9, torch.Size([3, 3]))
    """
    weights = None if class_weights is None else tuple(class_weights)
    return Softmax(l2, intercept, reduction, classes=classes, class_weights=weights)


def gram_eigenvalues(x: Tensor, weight: Tensor) -> Tensor:
    """Return the eigenvalues, ascending, of the smaller of X'DX [..., d] and DXX'D [..., B], in float64.

    Those that float64 cannot hold are infinite.
    """
    rooted = x.double() * weight.double().sqrt().unsqueeze(-1)
    power = torch.frexp(
        rooted.abs().amax((-2, -1), keepdim=True)
    ).exponent  # products of numbers up to 1 are finite
    rooted = torch.ldexp(rooted, -power)
    small = rooted.mT @ rooted if x.shape[-1] <= x.shape[-2] else rooted @ rooted.mT
    return torch.ldexp(torch.ldexp(torch.linalg.eigvalsh(small), power.squeeze(-1)), power.squeeze(-1))
