"""What a client can tell of its rows besides gradients: losses, features, curvature, its own optimum."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie.engine.client_rows import ClientRows
from coterie.models import fast
from coterie.models.base import norm
from coterie.models.fast.lazy_models import materialize
from coterie.models.metrics import LOSS, client_sums

MOST_KNOWN = 1 << 24  # numbers of all clients together that are kept because no round changes them


class ClientMeasures(ClientRows):
    """Functions of the model at x, on all training rows unless they say otherwise."""

    def class_counts(self) -> Tensor:
        """Return how many training rows there are of each class, [..., K]; numbers are one class."""

        def counts(x: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            return self.model.hits(targets, weight).sum(-2)

        self._require_free("functions of its rows")
        if self._runtime.loop or self.model.classes_known * len(self._runtime.ids) > MOST_KNOWN:
            return self.over_rows(counts, self.initial_model())
        return self._runtime.once(
            "class counts", lambda all: all.over_rows(counts, all.initial_model()), self._at
        )

    def class_sums(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what a client tells of its features, those of the last layer at x, by class; numbers are one class.

        Parameters
        ----------
        x : Tensor, [..., d]
            Parameters.

        Returns
        -------
        sums : Tensor, [..., K, f]
            Of the features of the training rows of each class.
        counts : Tensor, [..., K]
            Training rows of each class.
        square : Tensor, [..., 1]
            Mean squared length of the features.
        """

        def summed(w: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            features, hits = self.model.hidden_features(w, inputs), self.model.hits(targets, weight)
            square = (norm(features).squeeze(-1).square() * weight).sum(-1, keepdim=True)
            return torch.cat([(hits.mT @ features).flatten(-2), hits.sum(-2), square], -1)

        self._require_free("rows")
        classes = self.model.classes_known
        many = len(self._runtime.ids) * self.model.d > MOST_KNOWN
        if self.model.learns_features or self._runtime.loop or many:
            found = self.over_rows(summed, materialize(x), reduce=False)
        else:
            found = self._runtime.once(
                "class sums", lambda all: all.over_rows(summed, all.initial_model(), reduce=False), self._at
            )
        sums = found[..., : -classes - 1].unflatten(-1, (classes, -1))
        return sums, found[..., -classes - 1 : -1], found[..., -1:]

    def batch_loss(self, x: Tensor, again: bool = False) -> Tensor:
        """Return the loss at x on a fresh minibatch, or `again` on the last, [..., 1]; batches as in `grad`."""
        self._require_free("losses")
        if self._all_rows:
            return self.loss(x)
        return self._on_minibatch(self.model.loss, materialize(x), "", again)

    def loss(self, x: Tensor, split: str = "train") -> Tensor:
        """Return the loss at x on all rows of 'train' or 'validation', [..., 1]."""
        self._require_free("losses")
        x, rows = materialize(x), self._visible(split)
        statistics = self._statistics if split == "train" else None
        if statistics is not None:
            return self.model.loss_from(statistics, x)
        return self.over_rows(self.model.loss, x, rows)

    def error(self, x: Tensor, split: str = "train") -> Tensor:
        """Return the mean loss of the rows of 'train' or 'validation' at x, without the regulariser, [..., 1]."""
        self._require_free("losses")
        rows = self._visible(split)
        return client_sums(self.model, materialize(x), rows, self._at, [LOSS])[LOSS.name]

    def errors(self, models: Tensor, split: str = "train") -> Tensor:
        """Return `error` of several models [..., m, d], [..., m]; the rows are read once."""
        self._require_free("losses")
        models, rows = materialize(models), self._visible(split)
        if len(self.lead) == 1 and not self._runtime.loop:
            path = fast.find("errors", self.model, rows, models)
            if path is not None:
                self._runtime.used[path.name] += 1
                found: Tensor = path.run(self.model, rows, self._at, models, self.threads)
                return found

        def measured(w: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            return self.model.measure_each(w, inputs, targets, weight, [LOSS])[LOSS.name].squeeze(-1)

        return self.over_rows(measured, models, rows, reduce=False)

    def features(self, x: Tensor, split: str = "train") -> tuple[Tensor, Tensor, Tensor]:
        """Return what reaches the model's last layer at x, with targets and weights of the rows.

        Parameters
        ----------
        x : Tensor, [..., d]
            Parameters.
        split : str, optional
            'train' or 'validation'.

        Returns
        -------
        features : Tensor, [..., B, f]
        targets : Tensor, [..., B]
        weight : Tensor, [..., B]
            One over the number of the client's rows, zero on padding; B is the largest number of rows.
        """
        self._require_free("rows")
        x, rows = materialize(x), self._visible(split)
        width = max(1, rows.largest)

        def padded(part: Tensor) -> Tensor:
            missing = width - part.shape[len(self.lead)]
            return torch.nn.functional.pad(part, (0, 0) * (part.dim() - len(self.lead) - 1) + (0, missing))

        found = [
            self.over_rows(lambda w, inputs, *_: padded(self.model.hidden_features(w, inputs)), x, rows),
            self.over_rows(lambda w, inputs, targets, weight: padded(targets), x, rows),
            self.over_rows(lambda w, inputs, targets, weight: padded(weight), x, rows, reduce=False),
        ]
        return found[0], found[1], found[2]

    def solve(self, x: Tensor, tol: float = 1e-9, prox: float = 0.0) -> Tensor:
        """Return the minimiser of f + prox/2 |. - x|^2, started at x, to gradient norm tol."""
        self._require_free("exact solutions")
        x, statistics = materialize(x), self._statistics
        if statistics is not None:
            return self.model.solve_from(statistics, x, prox)

        def solve(w: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            return self.model.solve(w, inputs, targets, weight, tol, prox)

        return self.over_rows(solve, x)

    def hessian(self, x: Tensor) -> Tensor:
        """Return the second derivative at x on all training rows, [..., d, d]; generalised linear models have one."""
        self._require_free("second derivatives")
        statistics = self._statistics
        if statistics is not None:
            return statistics[0]
        return self.over_rows(self.model.hessian, materialize(x))

    def hvp(self, x: Tensor, v: Tensor) -> Tensor:
        """Return the Hessian at x times v on a fresh minibatch (all rows if the algorithm's `batch` is 0)."""
        self._require_free("products with the Hessian")

        return self.over_batch(self.model.hvp, (x, v))

    def smoothness(self) -> Tensor:
        """Return L, the largest curvature of this client's loss, [..., 1]."""
        return self.over_rows(self.model.smoothness, self.initial_model())

    def row_smoothness(self) -> Tensor:
        """Return the largest curvature of the loss as one row alone estimates it, [..., 1]."""
        if self.model.whole_clients:
            raise SettingError("a single row says nothing about survival data; take all rows: --set batch=0")

        def largest(x: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            alone = torch.ones_like(weight).unsqueeze(-1)
            spread = x.unsqueeze(-2).expand(*weight.shape, x.shape[-1])
            curvature = self.model.smoothness(
                spread, inputs.unsqueeze(len(weight.shape)), targets.unsqueeze(-1), alone
            )
            whole = curvature.squeeze(-1) * weight.sum(-1, keepdim=True)
            return torch.where(weight > 0, whole, 0.0).amax(-1, keepdim=True)

        return self.over_rows(largest, self.initial_model())

    def convexity(self) -> Tensor:
        """Return mu, the smallest curvature of this client's loss, [..., 1]."""
        return self.over_rows(self.model.convexity, self.initial_model())

    def calibrated(self, x: Tensor) -> Tensor:
        """Return x with statistics of batch normalisation measured on these clients' training rows."""
        if not self.model.calibrates:
            return x

        def calibrate(w: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            return self.model.calibrate(w, inputs, weight)

        return self.over_rows(calibrate, materialize(x))
