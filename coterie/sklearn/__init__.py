"""scikit-learn estimators that train one model per group of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets

from coterie.algorithms import Algorithm
from coterie.models import Model
from coterie.sklearn.base import Personalized
from coterie.sklearn.groups import GroupsWarning

__all__ = ["GroupsWarning", "PersonalizedClassifier", "PersonalizedRegressor"]


class PersonalizedClassifier(ClassifierMixin, Personalized):  # type: ignore[misc]
    """Train one classifier per group of rows with a personalized federated method.

    Every group is a client. Columns are standardised; missing values take the column's mean, and a column of its own
    marks them. A group that was not seen in `fit` gets the common model, and a warning.

    Parameters
    ----------
    algorithm : str or Algorithm, default "auto"
        "auto" (methods compete on validation rows), a name that `coterie algorithms` lists, or an algorithm.
    settings : dict, optional
        Hyperparameters of the named algorithm; searches reach each as `settings__lam` and so on.
    rounds : int, default 100
        Communication rounds.
    model : Model or nn.Module, optional
        One of `coterie.models`, or a module; by default logistic or softmax regression with an intercept.
    l2 : float, default 1e-3
        Ridge penalty of the default model.
    validation : float, default 0.2
        Share of each group's rows by which the round to deploy is chosen.
    clusters : dict, optional
        Known cluster of every group, for methods that need one.
    random_state : int, RandomState or None, default 0
        Seed of the split and of every random draw; None draws another one in every `fit`.
    class_weight : "balanced", dict or None
        Weights of the classes, as in scikit-learn: "balanced" gives all classes the same sum of weights.

    Attributes
    ----------
    groups_ : ndarray
        Groups seen in `fit`, sorted.
    missing_ : ndarray
        Positions of the columns that had missing values in `fit`.
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
        random_state: int | np.random.RandomState | None = 0,
        class_weight: str | Mapping[Any, float] | None = None,
    ) -> None:
        super().__init__(
            algorithm,
            settings=settings,
            rounds=rounds,
            model=model,
            l2=l2,
            validation=validation,
            clusters=clusters,
            random_state=random_state,
        )
        self.class_weight = class_weight

    def _class_weights(self, y: np.ndarray) -> np.ndarray | None:
        if self.class_weight is None:
            return None
        found: np.ndarray = compute_sample_weight(self.class_weight, y)
        return found

    def _encode(self, y: np.ndarray, weight: np.ndarray | None) -> tuple[np.ndarray, str]:
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


class PersonalizedRegressor(RegressorMixin, Personalized):  # type: ignore[misc]
    """Train one regression model per group of rows with a personalized federated method.

    Every group is a client. Columns and target are standardised; missing values take the column's mean, and a column of
    its own marks them. A group that was not seen in `fit` gets the common model, and a warning.

    Parameters
    ----------
    algorithm : str or Algorithm, default "auto"
        "auto" (methods compete on validation rows), a name that `coterie algorithms` lists, or an algorithm.
    settings : dict, optional
        Hyperparameters of the named algorithm; searches reach each as `settings__lam` and so on.
    rounds : int, default 100
        Communication rounds.
    model : Model or nn.Module, optional
        One of `coterie.models`, or a module; by default linear regression with an intercept.
    l2 : float, default 1e-3
        Ridge penalty of the default model.
    validation : float, default 0.2
        Share of each group's rows by which the round to deploy is chosen.
    clusters : dict, optional
        Known cluster of every group, for methods that need one.
    random_state : int, RandomState or None, default 0
        Seed of the split and of every random draw; None draws another one in every `fit`.

    Attributes
    ----------
    groups_ : ndarray
        Groups seen in `fit`, sorted.
    missing_ : ndarray
        Positions of the columns that had missing values in `fit`.
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

    def _encode(self, y: np.ndarray, weight: np.ndarray | None) -> tuple[np.ndarray, str]:
        y = y.astype(np.float64)
        self.target_mean_ = float(np.average(y, weights=weight))
        self.target_scale_ = float(np.sqrt(np.average((y - self.target_mean_) ** 2, weights=weight))) or 1.0
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
