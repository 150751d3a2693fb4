"""What the classifier and the regressor share: groups are clients, columns are standardised."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

import coterie
from coterie.algorithms import Algorithm, all_algorithms, make
from coterie.models import Model, linear, logistic, softmax
from coterie.models.table_models import as_model
from coterie.models.weighted import Weighted
from coterie.sklearn.groups import GroupsWarning, as_labels, as_text, described, distinct, kinds
from coterie.train.run import Run

ONE_GROUP = "all"
SETTINGS = "settings__"
DEFAULT_MODELS: dict[str, Any] = {"regression": linear, "binary": logistic, "multiclass": softmax}


class Personalized(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
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
        random_state: int | np.random.RandomState | None = 0,
    ) -> None:
        self.algorithm = algorithm
        self.settings = settings
        self.rounds = rounds
        self.model = model
        self.l2 = l2
        self.validation = validation
        self.clusters = clusters
        self.random_state = random_state

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters; with `deep` also the algorithm's hyperparameters as `settings__lam` and so on."""
        found: dict[str, Any] = super().get_params(deep)
        if deep:
            method: object = self.algorithm
            if isinstance(method, str) and method in all_algorithms():
                method = make(method)
            own = dict(method.settings()) if isinstance(method, Algorithm) else {}
            own |= self.settings if isinstance(self.settings, Mapping) else {}
            found |= {f"{SETTINGS}{name}": value for name, value in own.items()}
        return found

    def set_params(self, **params: Any) -> Self:
        """Set parameters by name; `settings__lam=0.3` sets one hyperparameter of the algorithm."""
        own = {name: value for name, value in params.items() if name.startswith(SETTINGS)}
        super().set_params(**{name: value for name, value in params.items() if name not in own})
        if own:
            changed = {name.removeprefix(SETTINGS): value for name, value in own.items()}
            self.settings = {**(self.settings if isinstance(self.settings, Mapping) else {}), **changed}
        return self

    def fit(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> Self:
        """Train a model for each group.

        Parameters
        ----------
        X : array-like of shape (rows, columns)
            Numeric features, missing values as NaN; encode categories before, in a pipeline.
        y : array-like of shape (rows,)
            Target.
        groups : array-like of shape (rows,), optional
            Group of every row; all rows form one group if not given, with a warning.
        sample_weight : array-like of shape (rows,), optional
            Weight of every row; a row of weight two counts like two rows.

        Returns
        -------
        self
        """
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_all_finite="allow-nan")
        _require_no_infinity(X)
        weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        if sample_weight is None:
            weight = self._class_weights(y)
        groups = self._required_groups(groups, len(X))
        if weight is not None and not (weight > 0).all():
            counts = weight > 0
            if not counts.any():
                raise ValueError("all sample weights are zero; give some rows a positive weight")
            X, y, weight, groups = X[counts], y[counts], weight[counts], groups[counts]
        if sample_weight is not None:
            own = self._class_weights(y)
            weight = weight if own is None else weight * own
        target, task = self._encode(y, weight)
        self.groups_, owner = distinct(groups)
        self._learn_columns(X, weight)
        model = DEFAULT_MODELS[task](l2=self.l2, intercept=True) if self.model is None else self.model
        run = self._train(self._columns(X), target, owner, weight, as_model(model))
        self.run_ = run
        self.model_ = run.fed.model.base if isinstance(run.fed.model, Weighted) else run.fed.model
        self.coef_all_ = torch.cat([run.personal, run.common().unsqueeze(0)]).numpy()
        self.n_iter_ = run.rounds
        return self

    def _required_groups(self, groups: Any, rows: int) -> np.ndarray:
        """Return the group of every training row as an array of labels."""
        if groups is None:
            warnings.warn(
                "fit got no groups, so all rows form one group with one model. Pass groups=; cross_val_score and "
                "other tools pass it on only with metadata routing: sklearn.set_config(enable_metadata_routing=True), "
                ".set_fit_request(groups=True).set_score_request(groups=True) and params={'groups': ...}",
                GroupsWarning,
                stacklevel=3,
            )
            return np.full(rows, ONE_GROUP, dtype=object)
        labels = as_labels(groups, rows)
        missing = sum(as_text(label) is None for label in labels.tolist())
        if missing:
            raise ValueError(f"groups has {missing} missing values; give every training row its group")
        return labels

    def _train(
        self, x: np.ndarray, y: np.ndarray, owner: np.ndarray, weight: np.ndarray | None, model: Model
    ) -> Run:
        """Train on the rows of all groups; one group alone is solved exactly where `auto` may choose."""
        order, cuts = np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner))[:-1]
        if weight is not None:
            totals = np.bincount(owner, weight)
            x = np.c_[x, weight * (np.bincount(owner) / totals)[owner]]
            model = Weighted(model)
        alone = len(self.groups_) == 1 and self.algorithm == "auto"
        validation = 0.0 if alone else self.validation
        fed = coterie.Federation.from_arrays(
            [torch.from_numpy(part) for part in np.split(x[order], cuts)],
            [torch.from_numpy(part) for part in np.split(y[order], cuts)],
            model,
            clusters=self._known_clusters(),
            names=[str(as_text(name)) for name in self.groups_.tolist()],
            split=(1 - validation, validation, 0.0),
            seed=_seed(self.random_state),
            dtype=torch.float64,
        )
        if weight is not None:  # shared models weigh groups by the sum of their rows' weights
            share = torch.from_numpy(totals / np.bincount(owner))
            fed.rows["train"] = fed.rows["train"] * share
            fed = fed.fresh()
        method = self._method(fed)
        exact = isinstance(method, Algorithm) and bool(method.settings().get("exact"))
        run: Run = coterie.fit(
            fed,
            method,
            1 if exact and alone else self.rounds,
            select="best" if fed.has_rows("validation") else "last",
            score_test=False,
        )
        return run

    def _known_clusters(self) -> list[Any] | None:
        """Return the cluster of every group, or None."""
        if self.clusters is None:
            return None
        known = {as_text(name): cluster for name, cluster in self.clusters.items()}
        lacking = [name for name in self.groups_.tolist() if as_text(name) not in known]
        if lacking:
            raise ValueError(f"clusters has no entry for group {lacking[0]!r}; give every group its cluster")
        return [known[as_text(name)] for name in self.groups_.tolist()]

    def _method(self, fed: coterie.Federation) -> str | Algorithm:
        """Return the algorithm to fit; a single group trains alone, since 'auto' has nothing to choose there."""
        if isinstance(self.algorithm, Algorithm):
            return self.algorithm.replace(**(self.settings or {}))
        if self.algorithm == "auto":
            if self.settings:
                raise ValueError("settings belong to a named algorithm; 'auto' chooses its own")
            exact = self.model is None and self.l2 > 0
            return "auto" if fed.n > 1 else make("local", exact=exact)
        return make(self.algorithm, **(self.settings or {}))

    def _class_weights(self, y: np.ndarray) -> np.ndarray | None:
        """Return a weight for every row by its class; None where all classes count alike."""
        return None

    def _encode(self, y: np.ndarray, weight: np.ndarray | None) -> tuple[np.ndarray, str]:
        """Return the target as the model takes it, and the task."""
        raise NotImplementedError

    def _learn_columns(self, X: np.ndarray, weight: np.ndarray | None) -> None:
        """Remember the mean and scale of every column, and which columns have missing values."""
        known = ~np.isnan(X)
        share = known * (np.ones(len(X)) if weight is None else weight)[:, None]
        total = share.sum(0)
        total[total == 0] = 1.0
        filled = np.where(known, X, 0.0)
        self.mean_ = (filled * share).sum(0) / total
        self.scale_ = np.sqrt((np.where(known, X - self.mean_, 0.0) ** 2 * share).sum(0) / total)
        self.scale_[self.scale_ <= 1e-12 * np.abs(self.mean_)] = 1.0
        self.missing_ = np.flatnonzero(~known.all(0))

    def _columns(self, X: np.ndarray) -> np.ndarray:
        """Return standardised columns with means for missing values, then a 0/1 column for each that had any."""
        rows = (X - self.mean_) / self.scale_
        gaps = np.isnan(rows)
        encoded: np.ndarray = np.c_[np.where(gaps, 0.0, rows), gaps[:, self.missing_].astype(float)]
        return encoded

    def _places(self, groups: Any, rows: int) -> np.ndarray:
        """Return the position of every row's model in `coef_all_`; warn of rows that get the common model."""
        known = {as_text(name): k for k, name in enumerate(self.groups_.tolist())}
        if groups is None:
            if len(known) == 1:
                return np.zeros(rows, dtype=int)
            warnings.warn(
                f"no groups given: the common model predicts all {rows} rows. Pass groups=, in a pipeline or a search "
                "after .set_predict_request(groups=True) and .set_score_request(groups=True)",
                GroupsWarning,
                stacklevel=4,
            )
            return np.full(rows, len(known))
        labels = as_labels(groups, rows).tolist()
        texts = [as_text(label) for label in labels]
        if kinds(labels).isdisjoint(kinds(self.groups_.tolist())):
            warnings.warn(
                f"groups are {described(labels)} here and were {described(self.groups_.tolist())} in fit; they are "
                "compared as text",
                GroupsWarning,
                stacklevel=4,
            )
        strange = list(dict.fromkeys(str(text) for text in texts if text is not None and text not in known))
        missing = texts.count(None)
        if strange or missing:
            some = ", ".join(repr(name) for name in strange[:3]) + (", …" if len(strange) > 3 else "")
            parts = [f"{len(strange)} groups were not in training ({some})"] if strange else []
            parts += [f"{missing} rows have no group"] if missing else []
            warnings.warn(
                f"{' and '.join(parts)}: the common model predicts them", GroupsWarning, stacklevel=4
            )
        return np.array([known.get(text, len(known)) for text in texts])

    def _scores(self, X: Any, groups: Any) -> torch.Tensor:
        """Return the scores of each row by its group's model, or the common model for a group not seen in `fit`."""
        check_is_fitted(self, "coef_all_")
        X = validate_data(self, X, dtype=np.float64, reset=False, ensure_all_finite="allow-nan")
        _require_no_infinity(X)
        at = self._places(groups, len(X))
        rows = self.model_.prepare(torch.from_numpy(self._columns(X)))
        weights = torch.from_numpy(self.coef_all_)
        scores: torch.Tensor | None = None
        for place in np.unique(at):
            mine = torch.from_numpy(at == place)
            part = self.model_.scores(weights[place], rows[mine])
            scores = part.new_empty((len(X), part.shape[-1])) if scores is None else scores
            scores[mine] = part
        assert scores is not None
        return scores.detach()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the training run, which holds all rows."""
        return {name: value for name, value in super().__getstate__().items() if name != "run_"}


def _seed(random_state: Any) -> int:
    """Return the seed: a number itself, or one drawn from a generator."""
    if isinstance(random_state, numbers.Integral):
        return int(random_state)
    return int(check_random_state(random_state).randint(2**31 - 1))


def _require_no_infinity(X: np.ndarray) -> None:
    if np.isinf(X).any():
        raise ValueError("Input X contains infinity or a value too large for dtype('float64').")
