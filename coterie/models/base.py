"""The interface of a model: a loss over one flat parameter vector, for one client or a stack of clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from coterie._core.errors import SettingError
from coterie.models.groups import ParameterGroups
from coterie.models.metrics import Metric, ScoredRows


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product over the last axis, which stays as an axis of length one.

    Parameters
    ----------
    a
        Vectors, [..., d].
    b
        Vectors, [..., d].

    Returns
    -------
    Tensor
        [..., 1].

    Examples
    --------
    >>> import torch
    >>> from coterie.models import dot
    >>> dot(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    tensor([11.])
    """
    in_span = getattr(a, "span_product", None)  # of gradients that are not written out
    found: Tensor | None = None if in_span is None else in_span(b)
    return (a * b).sum(-1, keepdim=True) if found is None else found


def norm(a: Tensor) -> Tensor:
    """Return the Euclidean length over the last axis, which stays as an axis of length one.

    Parameters
    ----------
    a
        Vectors, [..., d].

    Returns
    -------
    Tensor
        [..., 1].

    Examples
    --------
    >>> import torch
    >>> from coterie.models import norm
    >>> norm(torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
    tensor([[5.],
            [2.]])
    """
    length: Tensor = torch.linalg.vector_norm(a, dim=-1, keepdim=True)
    return length


@dataclass(frozen=True, eq=False)
class Model:
    """Base class of all models: a loss over one flat parameter vector, and its derivatives.

    A model is a frozen dataclass of settings. `fit_to` returns a copy that knows its shapes. Methods work for one
    client and for a stack of clients alike: `...` below stands for any number of leading axes.

    Methods share these arguments: parameters `w` [..., d], inputs `x` [..., B, *features] as `prepare` returns them,
    targets `y` [..., B], and row weights `weight` [..., B], which are zero for padding. The weights carry the
    reduction: 1/B each for a mean, 1 each for a sum.

    Examples
    --------
    >>> import torch, coterie
    >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 3.0])
    >>> model = coterie.models.linear().fit_to(x, y)
    >>> w, weight = torch.tensor([1.0]), torch.full((2,), 0.5)
    >>> model.d, model.loss(w, x, y, weight), model.grad(w, x, y, weight)
    (1, tensor([0.2500]), tensor([-1.]))
    """

    @property
    def d(self) -> int:
        """Number of parameters."""
        raise NotImplementedError

    @property
    def task(self) -> str:
        """Task, for metrics and predictions: "regression", "binary", "multiclass", "language" or "survival"."""
        raise NotImplementedError

    @property
    def outputs(self) -> int | None:
        """Scores of a row: one for numbers and for two classes, else one per class; None if not known yet."""
        return 1

    @property
    def classes_known(self) -> int:
        """Number of classes of the targets: 1 for numbers."""
        if self.task not in ("regression", "binary", "multiclass"):
            raise SettingError(f"{type(self).__name__} has no classes: its task is {self.task}")
        return {"regression": 1, "binary": 2}.get(self.task) or int(self.outputs or 1)

    def labels(self, y: Tensor) -> Tensor:
        """Return the class of each row, int64 [..., B]; numbers are one class."""
        return torch.zeros_like(y, dtype=torch.long) if self.classes_known == 1 else y.long()

    def hits(self, y: Tensor, weight: Tensor) -> Tensor:
        """Return 1 where a row with weight has a class, [..., B, K], else 0."""
        found = self.labels(y).unsqueeze(-1) == torch.arange(self.classes_known, device=y.device)
        return (found & (weight > 0).unsqueeze(-1)).to(weight.dtype)

    @property
    def reduction(self) -> str:
        """How the losses of a client's rows are combined: "mean" or "sum"."""
        return "mean"

    whole_clients: ClassVar[bool] = False
    """True if the loss of a row depends on the client's other rows, so that every gradient takes all of them."""

    @property
    def encoding(self) -> str:
        """How a table is encoded: "standard" (numbers standardised, a column per level), "raw" (NaN, codes), "both"."""
        return "standard"

    @property
    def target_in_units(self) -> bool:
        """True if targets are numbers as they are in the table; else they are standardised."""
        return False

    def with_levels(self, levels: Sequence[int]) -> Self:
        """Return a copy that knows which inputs are categories, as the encoding "raw" has them.

        Parameters
        ----------
        levels
            Number of levels of each input; 0 for a number.

        Returns
        -------
        Self
            By default the model itself.
        """
        return self

    def with_class_weights(self, weights: Sequence[float]) -> Self:
        """Return a copy whose training weighs the rows of each class so; raise `SettingError` if it cannot.

        Parameters
        ----------
        weights
            A positive weight for each class.

        Returns
        -------
        Self
            Metrics of such a model count rows alike.
        """
        raise SettingError(
            f"{type(self).__name__} takes no class weights; linear models, splines and trees do"
        )

    def measured(self) -> dict[str, str]:
        """Return choices made by timing, which a checkpoint stores so that a resumed run repeats them."""
        return {}

    def fit_to(self, x: Tensor, y: Tensor) -> Self:
        """Return a copy that knows the shape of the inputs and the number of classes.

        Parameters
        ----------
        x
            Raw inputs of some rows, [rows, *features].
        y
            Their targets, [rows].

        Returns
        -------
        Self
            A model whose `d` is known.
        """
        raise NotImplementedError

    def prepare(self, x: Tensor) -> Tensor:
        """Return inputs as the engine stores them, for instance with a column of ones for the intercept.

        Parameters
        ----------
        x
            Raw inputs, [rows, *features].

        Returns
        -------
        Tensor
            [rows, ...].
        """
        return x

    def initial(self, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Return the starting point, a function of the seed only.

        Parameters
        ----------
        seed
            Seed of the run.
        dtype
            Floating-point type of the parameters.
        device
            Where they are placed.

        Returns
        -------
        Tensor
            [d].
        """
        return torch.zeros(self.d, dtype=dtype, device=device)

    def loss(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return the weighted sum of the row losses plus the regulariser.

        Parameters
        ----------
        w, x, y, weight
            Parameters and rows; see the class.

        Returns
        -------
        Tensor
            [..., 1].
        """
        raise NotImplementedError

    def grad(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of `loss` in `w`.

        Parameters
        ----------
        w, x, y, weight
            Parameters and rows; see the class.

        Returns
        -------
        Tensor
            [..., d].
        """
        raise NotImplementedError

    def hvp(self, w: Tensor, v: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return the Hessian of `loss` at `w` times `v`.

        Parameters
        ----------
        w
            Parameters, [..., d].
        v
            Direction, [..., d].
        x, y, weight
            Rows; see the class.

        Returns
        -------
        Tensor
            [..., d].
        """
        raise NotImplementedError

    def scores(self, w: Tensor, x: Tensor) -> Tensor:
        """Return the outputs before any link function: numbers, or logits.

        Parameters
        ----------
        w, x
            Parameters and inputs; see the class.

        Returns
        -------
        Tensor
            [..., B, outputs].
        """
        raise NotImplementedError

    def measure(
        self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, metrics: Sequence[Metric]
    ) -> dict[str, Tensor]:
        """Return the sums of metrics over rows.

        Parameters
        ----------
        w, x, y
            Parameters and rows; see the class.
        weight
            Row weights that sum to one, [..., B].
        metrics
            The metrics.

        Returns
        -------
        dict of Tensor
            Sums [..., k] by the name of the metric.
        """
        rows = ScoredRows(self.task, self.scores(w, x), y, weight)
        return {metric.name: metric.sums(rows) for metric in metrics}

    def measure_each(
        self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, metrics: Sequence[Metric]
    ) -> dict[str, Tensor]:
        """Return the sums of metrics over the same rows for several models.

        Parameters
        ----------
        w
            Parameters of m models, [..., m, d].
        x, y, weight, metrics
            Rows and metrics, as in `measure`.

        Returns
        -------
        dict of Tensor
            Sums [..., m, k] by the name of the metric.
        """
        found = [self.measure(one, x, y, weight, metrics) for one in w.unbind(-2)]
        return {metric.name: torch.stack([one[metric.name] for one in found], -2) for metric in metrics}

    @property
    def groups(self) -> ParameterGroups:
        """Names for parts of the parameter vector: "all", "head", "body", and layers by their names."""
        whole = [slice(0, self.d)]
        return ParameterGroups(self.d, {"all": whole, "head": whole, "body": [], "buffers": []})

    def hidden_features(self, w: Tensor, x: Tensor) -> Tensor:
        """Return the inputs of the last linear layer.

        Parameters
        ----------
        w, x
            Parameters and inputs; see the class.

        Returns
        -------
        Tensor
            [..., B, width of the layer].

        Raises
        ------
        SettingError
            If the model has no last linear layer.
        """
        raise SettingError(f"{type(self).__name__} has no last linear layer whose inputs could be shown")

    def feature_grad(self, w: Tensor, x: Tensor, slope: Tensor) -> Tensor:
        """Return the gradient in `w` of a function of `hidden_features`, from its derivative in them.

        Parameters
        ----------
        w, x
            Parameters and inputs; see the class.
        slope
            Derivative in the features of each row, [..., B, width].

        Returns
        -------
        Tensor
            [..., d]; zero by default, where the features are the inputs.
        """
        return torch.zeros_like(w, memory_format=torch.contiguous_format)

    def score_grad(self, w: Tensor, x: Tensor, slope: Tensor) -> Tensor:
        """Return the gradient in `w` of a function of `scores`, from its derivative in them.

        Parameters
        ----------
        w, x
            Parameters and inputs; see the class.
        slope
            Derivative in the scores of each row, [..., B, outputs].

        Returns
        -------
        Tensor
            [..., d].
        """
        raise SettingError(
            f"{type(self).__name__} has no gradient of its scores; use a network or a linear model"
        )

    calibrates: ClassVar[bool] = False
    """True if some entries of `w` are statistics that a client measures on its own rows."""

    def calibrate(self, w: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return `w` [..., d] with its statistics measured on these rows."""
        return w

    tracks: ClassVar[bool] = False
    """True if a training step moves such statistics."""

    def track(self, w: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return `w` [..., d] with its statistics moved towards those of these rows, as a training step does."""
        return w

    def require_gradients(self) -> None:
        """Raise an error if a gradient alone is not a complete training step for this model."""

    def prefers_loop(self, w: Tensor, shape: tuple[int, ...]) -> bool:
        """Return True if a stack `w` [k, d] with minibatches of this shape is trained faster client by client."""
        return False

    def sgd(
        self,
        w: Tensor,
        batches: Iterable[Any],
        lr: float,
        prox: float = 0.0,
        anchor: Tensor | None = None,
        linear: Tensor | None = None,
    ) -> Tensor:
        """Take a step w <- w - lr (grad(w) + prox (w - anchor) + linear) on each of these minibatches.

        Parameters
        ----------
        w
            Parameters of one client, [d].
        batches
            Minibatches with fields x, y and weight.
        lr
            Step size.
        prox
            Strength of the proximal term.
        anchor
            Point that it pulls to, [d].
        linear
            What is added to every gradient, [d].

        Returns
        -------
        Tensor
            [d].
        """
        raise NotImplementedError

    def paths_used(self) -> Counter[str]:
        """Return how often each way to compute gradients was taken."""
        return Counter()

    def smoothness(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return the largest curvature of `loss`: a bound for convex models, an estimate at `w` otherwise.

        Parameters
        ----------
        w, x, y, weight
            Parameters and rows; see the class.

        Returns
        -------
        Tensor
            [..., 1].
        """
        raise NotImplementedError

    def convexity(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return a lower bound on the curvature of `loss`; zero where no better one is known.

        Parameters
        ----------
        w, x, y, weight
            Parameters and rows; see the class.

        Returns
        -------
        Tensor
            [..., 1].
        """
        return torch.zeros_like(weight[..., :1])

    def solve(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, tol: float, prox: float = 0.0) -> Tensor:
        """Return the minimiser v of loss(v) + prox/2 |v - w|^2, searched from `w`.

        Parameters
        ----------
        w, x, y, weight
            Parameters and rows; see the class.
        tol
            Norm of the gradient at which the search stops.
        prox
            Strength of the proximal term.

        Returns
        -------
        Tensor
            [..., d].
        """
        raise NotImplementedError

    closed_form: ClassVar[bool] = False
    """True if a gradient is a few tensor operations, without autograd and without a cache."""

    learns_features: ClassVar[bool] = True
    """False if what reaches the last layer does not depend on the parameters, as in models without hidden layers."""

    has_statistics: ClassVar[bool] = False
    """True if loss, gradient and minimiser follow from sums over rows, as for least squares."""

    def statistics(self, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        """Return the sufficient statistics of these rows.

        Parameters
        ----------
        x, y, weight
            Rows; see the class.

        Returns
        -------
        tuple of Tensor
            What `loss_from`, `grad_from` and `solve_from` take.
        """
        raise NotImplementedError

    def loss_from(self, stats: tuple[Tensor, ...], w: Tensor) -> Tensor:
        """Return `loss` from sufficient statistics, [..., 1]."""
        raise NotImplementedError

    def grad_from(self, stats: tuple[Tensor, ...], w: Tensor) -> Tensor:
        """Return `grad` from sufficient statistics, [..., d]."""
        raise NotImplementedError

    def solve_from(self, stats: tuple[Tensor, ...], w: Tensor, prox: float = 0.0) -> Tensor:
        """Return `solve` from sufficient statistics, [..., d]."""
        raise NotImplementedError

    has_hessian: ClassVar[bool] = False
    """True if `hessian` is implemented, as for generalised linear models."""

    convex: ClassVar[bool] = False
    """True if `loss` is convex and `smoothness` bounds its curvature everywhere, which certificates rest on."""

    def hessian(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return the Hessian of `loss`.

        Parameters
        ----------
        w, x, y, weight
            Parameters and rows; see the class.

        Returns
        -------
        Tensor
            [..., d, d].
        """
        raise SettingError("the Hessian of a network is not formed; use a method that needs gradients only")

    def module(self, w: Tensor) -> nn.Module:
        """Return an nn.Module that maps raw inputs to predictions.

        Parameters
        ----------
        w
            Parameters of one client, [d].

        Returns
        -------
        nn.Module
            For regression it returns numbers, for classes probabilities.
        """
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return settings and shapes as JSON values, from which `from_description` makes the model again."""
        raise SettingError(f"{type(self).__name__} cannot be saved: it has no description")
