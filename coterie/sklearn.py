"""scikit-learn estimators: a model per group of rows, learned together.

>>> from coterie.sklearn import PersonalizedClassifier
>>> X = [[0.0], [1.0], [2.0], [3.0]] * 10
>>> y = [0, 0, 1, 1] * 5 + [1, 1, 0, 0] * 5
>>> clinic = ["north"] * 20 + ["south"] * 20
>>> model = PersonalizedClassifier("local", rounds=50).fit(X, y, groups=clinic)
>>> model.predict([[3.0], [3.0]], groups=["north", "south"]).tolist()
[1, 0]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

import coterie
from coterie.algorithms import Algorithm, make
from coterie.models import Model, linear, logistic, softmax

ONE_GROUP = "all"
_USUAL: dict[str, Any] = {"regression": linear, "binary": logistic, "multiclass": softmax}


class _Personalized(BaseEstimator):
    """What classifier and regressor share: groups as clients, standardised columns, one fit."""

    def __init__(
        self,
        algorithm: str | Algorithm = "auto",
        *,
        settings: Mapping[str, Any] | None = None,
        rounds: int = 100,
        model: Model | None = None,
        l2: float = 1e-3,
        validation: float = 0.2,
        clusters: Mapping[Any, Any] | None = None,
        seed: int = 0,
    ) -> None:
        self.algorithm = algorithm
        self.settings = settings
        self.rounds = rounds
        self.model = model
        self.l2 = l2
        self.validation = validation
        self.clusters = clusters
        self.seed = seed

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Learn a model for each of the groups (one group if they are not given).

        Of every group the share `validation` of the rows is kept to choose the round whose models are deployed.
        """
        X, y = validate_data(self, X, y, dtype=np.float64)
        target, task = self._encode(y)
        names = _labels(groups, len(X))
        self.groups_, owner = np.unique(names, return_inverse=True)
        self.mean_ = X.mean(0)
        self.scale_ = np.where(X.std(0) > 0, X.std(0), 1.0)
        order = np.argsort(owner, kind="stable")
        cuts = np.cumsum(np.bincount(owner))[:-1]
        rows = self._standardised(X)[order]
        model = _USUAL[task](l2=self.l2, intercept=True) if self.model is None else self.model
        fed = coterie.Federation.from_arrays(
            [torch.from_numpy(part) for part in np.split(rows, cuts)],
            [torch.from_numpy(part) for part in np.split(target[order], cuts)],
            model,
            clusters=None
            if self.clusters is None
            else [self.clusters[name] for name in self.groups_.tolist()],
            names=[str(name) for name in self.groups_.tolist()],
            split=(1 - self.validation, self.validation, 0.0),
            seed=self.seed,
            dtype=torch.float64,
        )
        run = coterie.fit(
            fed,
            self._method(fed),
            self.rounds,
            select="best" if fed.has_rows("validation") else "last",
            score_test=False,
        )
        self.run_ = run
        self.model_ = run.fed.model
        self.coef_all_ = torch.cat([run.personal, run.common().unsqueeze(0)]).numpy()
        self.n_iter_ = run.rounds
        return self

    def _method(self, fed: coterie.Federation) -> str | Algorithm:
        """An algorithm as it is, or by name with its settings; one group alone leaves 'auto' nothing to choose."""
        if isinstance(self.algorithm, Algorithm):
            return self.algorithm.replace(**(self.settings or {}))
        if self.algorithm == "auto":
            if self.settings:
                raise ValueError("settings belong to a named algorithm; 'auto' chooses its own")
            return "auto" if fed.n > 1 else "local"
        return make(self.algorithm, **(self.settings or {}))

    def _encode(self, y: np.ndarray) -> tuple[np.ndarray, str]:
        raise NotImplementedError

    def _standardised(self, X: np.ndarray) -> np.ndarray:
        return (X - self.mean_) / self.scale_

    def _scores(self, X: Any, groups: Any) -> torch.Tensor:
        """Each row by its group's model; the common model for groups that were not in training."""
        check_is_fitted(self, "coef_all_")
        X = validate_data(self, X, dtype=np.float64, reset=False)
        known = {name: k for k, name in enumerate(self.groups_.tolist())}
        if groups is None and len(known) == 1:
            at = np.zeros(len(X), dtype=int)
        elif groups is None:
            at = np.full(len(X), len(known))
        else:
            at = np.array([known.get(name, len(known)) for name in _labels(groups, len(X)).tolist()])
        rows = self.model_.prepare(torch.from_numpy(self._standardised(X)))
        weights = torch.from_numpy(self.coef_all_)
        scores: torch.Tensor | None = None
        for place in np.unique(at):
            mine = torch.from_numpy(at == place)
            part = self.model_.scores(weights[place], rows[mine])
            scores = part.new_empty((len(X), part.shape[-1])) if scores is None else scores
            scores[mine] = part
        assert scores is not None
        return scores

    def __getstate__(self) -> dict[str, Any]:
        """A saved estimator predicts; the run behind it, with all rows, stays behind."""
        return {name: value for name, value in super().__getstate__().items() if name != "run_"}


class PersonalizedClassifier(ClassifierMixin, _Personalized):
    """A classifier for each group of rows, learned together by a federated method.

    `algorithm` is "auto" (a race on validation rows), a name as in `coterie algorithms` or an Algorithm, `settings` its
    hyperparameters, `model` one of `coterie.models` (by default logistic or softmax regression with ridge `l2` and an
    intercept), `clusters` the known cluster of every group. Columns are standardised; encode categories before, in a
    pipeline.

    After `fit`: `groups_`, `classes_`, `run_` (the Run, not pickled), `coef_all_` [groups + 1, d], the last row the
    common model.
    """

    def _encode(self, y: np.ndarray) -> tuple[np.ndarray, str]:
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"y has one class only, {self.classes_[0]!r}; a classifier needs two or more classes"
            )
        return codes.astype(np.int64), "binary" if len(self.classes_) == 2 else "multiclass"

    def predict_proba(self, X: Any, groups: Any = None) -> np.ndarray:
        """Probabilities [rows, classes] in the order of `classes_`."""
        scores = self._scores(X, groups)
        if self.model_.task == "binary":
            one = torch.sigmoid(scores.squeeze(-1))
            return torch.stack([1 - one, one], -1).numpy()
        return torch.softmax(scores, -1).numpy()

    def predict(self, X: Any, groups: Any = None) -> np.ndarray:
        """The likeliest class of every row."""
        likely = self.predict_proba(X, groups)
        return self.classes_[likely.argmax(1)]

    def score(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> float:
        """Accuracy over all rows."""
        return float(accuracy_score(y, self.predict(X, groups), sample_weight=sample_weight))


class PersonalizedRegressor(RegressorMixin, _Personalized):
    """A regression for each group of rows, learned together; see `PersonalizedClassifier`."""

    def _encode(self, y: np.ndarray) -> tuple[np.ndarray, str]:
        y = y.astype(np.float64)
        self.target_mean_ = float(y.mean())
        self.target_scale_ = float(y.std()) or 1.0
        return (y - self.target_mean_) / self.target_scale_, "regression"

    def predict(self, X: Any, groups: Any = None) -> np.ndarray:
        """The prediction for every row."""
        scores = self._scores(X, groups).squeeze(-1).numpy()
        return scores * self.target_scale_ + self.target_mean_

    def score(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> float:
        """R squared over all rows."""
        return float(r2_score(y, self.predict(X, groups), sample_weight=sample_weight))


def _labels(groups: Any, rows: int) -> np.ndarray:
    """One group per row, as an array."""
    if groups is None:
        return np.full(rows, ONE_GROUP)
    labels = column_or_1d(groups)
    if len(labels) != rows:
        raise ValueError(f"groups has {len(labels)} entries for {rows} rows; give the group of every row")
    return labels
