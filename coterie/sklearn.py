"""scikit-learn estimators that train one model per group of rows."""

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
from coterie.train.run import Run

ONE_GROUP = "all"
_DEFAULT_MODELS: dict[str, Any] = {"regression": linear, "binary": logistic, "multiclass": softmax}


class _Personalized(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Base of classifier and regressor: groups are clients, columns are standardised."""

    classes_: np.ndarray
    run_: Run
    model_: Model
    coef_all_: np.ndarray

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
        """Train a model for each group.

        Parameters
        ----------
        X : array-like of shape (rows, columns)
            Numeric features; encode categories before, in a pipeline.
        y : array-like of shape (rows,)
            Target.
        groups : array-like of shape (rows,), optional
            Group of every row; all rows form one group if not given.

        Returns
        -------
        self
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
        model = _DEFAULT_MODELS[task](l2=self.l2, intercept=True) if self.model is None else self.model
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
        """Return the algorithm to fit; a single group trains alone, since 'auto' has nothing to choose there."""
        if isinstance(self.algorithm, Algorithm):
            return self.algorithm.replace(**(self.settings or {}))
        if self.algorithm == "auto":
            if self.settings:
                raise ValueError("settings belong to a named algorithm; 'auto' chooses its own")
            return "auto" if fed.n > 1 else "local"
        return make(self.algorithm, **(self.settings or {}))

    def _encode(self, y: np.ndarray) -> tuple[np.ndarray, str]:
        """Return the target as the model takes it, and the task."""
        raise NotImplementedError

    def _standardised(self, X: np.ndarray) -> np.ndarray:
        """Return the columns of X with the mean and scale of the training rows removed."""
        rows: np.ndarray = (X - self.mean_) / self.scale_
        return rows

    def _scores(self, X: Any, groups: Any) -> torch.Tensor:
        """Return the scores of each row by its group's model, or the common model for a group not seen in `fit`."""
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
        """Return the state without the training run, which holds all rows."""
        return {name: value for name, value in super().__getstate__().items() if name != "run_"}


class PersonalizedClassifier(ClassifierMixin, _Personalized):  # type: ignore[misc]
    """Train one classifier per group of rows with a personalized federated method.

    Every group is a client. Columns are standardised. A group that was not seen in `fit` gets the common model.

    Parameters
    ----------
    algorithm : str or Algorithm, default "auto"
        "auto" (methods compete on validation rows), a name that `coterie algorithms` lists, or an algorithm.
    settings : dict, optional
        Hyperparameters of the named algorithm.
    rounds : int, default 100
        Communication rounds.
    model : Model, optional
        One of `coterie.models`; by default logistic or softmax regression with an intercept.
    l2 : float, default 1e-3
        Ridge penalty of the default model.
    validation : float, default 0.2
        Share of each group's rows by which the round to deploy is chosen.
    clusters : dict, optional
        Known cluster of every group, for methods that need one.
    seed : int, default 0
        Seed of the split and of every random draw.

    Attributes
    ----------
    groups_ : ndarray
        Groups seen in `fit`, sorted.
    classes_ : ndarray
        Classes, sorted.
    coef_all_ : ndarray of shape (groups + 1, d)
        Parameters of every group's model; the last row is the common model.
    run_ : Run
        The training run. It holds all rows, so it is not pickled.

    Examples
    --------
    The two clinics need opposite rules, so one model for both would be wrong for one of them.

    >>> from coterie.sklearn import PersonalizedClassifier
    >>> X = [[0.0], [1.0], [2.0], [3.0]] * 10
    >>> y = [0, 0, 1, 1] * 5 + [1, 1, 0, 0] * 5
    >>> clinic = ["north"] * 20 + ["south"] * 20
    >>> model = PersonalizedClassifier("local", rounds=50).fit(X, y, groups=clinic)
    >>> model.predict([[3.0], [3.0]], groups=["north", "south"]).tolist()
    [1, 0]
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
        """Return the probability of every class.

        Parameters
        ----------
        X : array-like of shape (rows, columns)
            Features.
        groups : array-like of shape (rows,), optional
            Group of every row; the common model predicts all rows if not given.

        Returns
        -------
        ndarray of shape (rows, classes)
            Columns are in the order of `classes_`.
        """
        scores = self._scores(X, groups)
        if self.model_.task == "binary":
            one = torch.sigmoid(scores.squeeze(-1))
            return torch.stack([1 - one, one], -1).numpy()
        return torch.softmax(scores, -1).numpy()

    def predict(self, X: Any, groups: Any = None) -> np.ndarray:
        """Return the most probable class of every row; parameters as in `predict_proba`."""
        likeliest = self.predict_proba(X, groups).argmax(1)
        predicted: np.ndarray = self.classes_[likeliest]
        return predicted

    def score(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> float:
        """Return the accuracy over all rows."""
        return float(accuracy_score(y, self.predict(X, groups), sample_weight=sample_weight))


class PersonalizedRegressor(RegressorMixin, _Personalized):  # type: ignore[misc]
    """Train one regression model per group of rows with a personalized federated method.

    Every group is a client. Columns and target are standardised. A group that was not seen in `fit` gets the common
    model.

    Parameters
    ----------
    algorithm : str or Algorithm, default "auto"
        "auto" (methods compete on validation rows), a name that `coterie algorithms` lists, or an algorithm.
    settings : dict, optional
        Hyperparameters of the named algorithm.
    rounds : int, default 100
        Communication rounds.
    model : Model, optional
        One of `coterie.models`; by default linear regression with an intercept.
    l2 : float, default 1e-3
        Ridge penalty of the default model.
    validation : float, default 0.2
        Share of each group's rows by which the round to deploy is chosen.
    clusters : dict, optional
        Known cluster of every group, for methods that need one.
    seed : int, default 0
        Seed of the split and of every random draw.

    Attributes
    ----------
    groups_ : ndarray
        Groups seen in `fit`, sorted.
    coef_all_ : ndarray of shape (groups + 1, d)
        Parameters of every group's model; the last row is the common model.
    run_ : Run
        The training run. It holds all rows, so it is not pickled.

    Examples
    --------
    >>> from coterie.sklearn import PersonalizedRegressor
    >>> X = [[0.0], [1.0], [2.0], [3.0]] * 10
    >>> y = [0.0, 1.0, 2.0, 3.0] * 5 + [3.0, 2.0, 1.0, 0.0] * 5
    >>> shop = ["north"] * 20 + ["south"] * 20
    >>> model = PersonalizedRegressor("local", settings={"lr": 0.3}).fit(X, y, groups=shop)
    >>> model.predict([[3.0], [3.0]], groups=["north", "south"]).round(1).tolist()
    [3.0, 0.0]
    """

    def _encode(self, y: np.ndarray) -> tuple[np.ndarray, str]:
        y = y.astype(np.float64)
        self.target_mean_ = float(y.mean())
        self.target_scale_ = float(y.std()) or 1.0
        return (y - self.target_mean_) / self.target_scale_, "regression"

    def predict(self, X: Any, groups: Any = None) -> np.ndarray:
        """Return the predicted target of every row.

        Parameters
        ----------
        X : array-like of shape (rows, columns)
            Features.
        groups : array-like of shape (rows,), optional
            Group of every row; the common model predicts all rows if not given.

        Returns
        -------
        ndarray of shape (rows,)
        """
        scores: np.ndarray = self._scores(X, groups).squeeze(-1).numpy()
        return scores * self.target_scale_ + self.target_mean_

    def score(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> float:
        """Return R squared over all rows."""
        return float(r2_score(y, self.predict(X, groups), sample_weight=sample_weight))


def _labels(groups: Any, rows: int) -> np.ndarray:
    """Return one group per row as an array."""
    if groups is None:
        return np.full(rows, ONE_GROUP)
    labels: np.ndarray = column_or_1d(groups)
    if len(labels) != rows:
        raise ValueError(f"groups has {len(labels)} entries for {rows} rows; give the group of every row")
    return labels
