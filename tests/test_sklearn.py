"""The estimators: scikit-learn's own checks, groups, pipelines and searches."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import polars
import pytest
import sklearn
import torch
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import coterie
from coterie.data import bundled
from coterie.sklearn import GroupsWarning, PersonalizedClassifier, PersonalizedRegressor

FAST = {"rounds": 20, "settings": {"lr": 0.5}}


@pytest.mark.filterwarnings("ignore::coterie.sklearn.GroupsWarning")
@parametrize_with_checks([PersonalizedClassifier(), PersonalizedRegressor()])
def test_contract_of_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.fixture
def flipped() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two groups that need opposite rules, so that no single model fits both."""
    draw = np.random.default_rng(0)
    X = draw.normal(size=(400, 3))
    groups = np.repeat(["north", "south"], 200)
    y = np.where((X[:, 0] > 0) == (groups == "north"), "sick", "well")
    return X, y, groups


@pytest.fixture
def routing() -> Iterator[None]:
    with sklearn.config_context(enable_metadata_routing=True):
        yield


def test_each_group_has_its_own_model(flipped: tuple[np.ndarray, ...]) -> None:
    X, y, groups = flipped
    pooled = LogisticRegression().fit(X, y).score(X, y)
    model = PersonalizedClassifier("ditto", settings={"lr": 0.3, "lam": 0.1}).fit(X, y, groups=groups)
    assert model.score(X, y, groups=groups) > 0.9 > pooled + 0.2
    assert model.groups_.tolist() == ["north", "south"] and model.classes_.tolist() == ["sick", "well"]
    likely = model.predict_proba(X[:5], groups=groups[:5])
    np.testing.assert_allclose(likely.sum(1), 1)
    assert (model.classes_[likely.argmax(1)] == model.predict(X[:5], groups[:5])).all()


def test_an_unknown_group_and_no_groups_get_the_common_model(flipped: tuple[np.ndarray, ...]) -> None:
    X, y, groups = flipped
    model = PersonalizedClassifier("ditto", settings={"lr": 0.3, "lam": 0.1}, rounds=30).fit(
        X, y, groups=groups
    )
    rows = X[np.abs(X[:, 0]) > 1][:3]
    margin = np.c_[(rows - X.mean(0)) / X.std(0), np.ones(3)] @ model.coef_all_[-1]
    common = 1 / (1 + np.exp(-margin))
    with pytest.warns(GroupsWarning, match="no groups given: the common model predicts all 3 rows"):
        np.testing.assert_allclose(model.predict_proba(rows)[:, 1], common)
    with pytest.warns(GroupsWarning, match="1 groups were not in training .'east'."):
        mixed = model.predict_proba(rows, groups=["south", "east", "north"])[:, 1]
    assert mixed[1] == pytest.approx(common[1])
    for row, name in ((0, "south"), (2, "north")):
        assert mixed[row] == pytest.approx(model.predict_proba(rows, groups=[name] * 3)[row, 1])
        assert abs(mixed[row] - common[row]) > 0.1


def test_the_same_as_the_library(flipped: tuple[np.ndarray, ...]) -> None:
    X, _, groups = flipped
    model = PersonalizedRegressor("local", settings={"exact": True}, rounds=1, l2=0.0, validation=0.0)
    target = 3 * X[:, 0] * np.where(groups == "north", 1, -1) + 5
    model.fit(X, target, groups=groups)
    for name in ("north", "south"):
        mine = groups == name
        A = np.c_[X[mine], np.ones(mine.sum())]
        direct = A @ np.linalg.lstsq(A, target[mine], rcond=None)[0]
        np.testing.assert_allclose(model.predict(X[mine], groups[mine]), direct, atol=1e-8)
    assert model.score(X, target, groups=groups) == pytest.approx(1.0)


@pytest.mark.slow
def test_auto_is_the_default(flipped: tuple[np.ndarray, ...]) -> None:
    X, y, groups = flipped
    model = PersonalizedClassifier(rounds=20).fit(X, y, groups=groups)
    assert model.algorithm == "auto" and model.score(X, y, groups=groups) > 0.9
    assert len(model.run_.choice.rows) > 6


def test_auto_has_no_settings_and_nothing_to_choose_for_one_group(flipped: tuple[np.ndarray, ...]) -> None:
    X, y, groups = flipped
    with pytest.warns(GroupsWarning, match="metadata routing"):
        assert PersonalizedClassifier(rounds=5).fit(X, y).run_.algorithm.name == "local"
    with pytest.raises(ValueError, match="settings belong"):
        PersonalizedClassifier(settings={"lr": 0.1}).fit(X, y, groups=groups)


def test_parameters_and_clones(flipped: tuple[np.ndarray, ...]) -> None:
    X, y, groups = flipped
    method = coterie.algorithms.find("ditto")(lam=0.2)
    model = PersonalizedClassifier(method, rounds=7, random_state=3)
    copy = clone(model)
    assert copy is not model and copy.get_params()["algorithm"] == method
    assert copy.set_params(rounds=9).rounds == 9 and model.rounds == 7
    first, second = (clone(model).fit(X, y, groups=groups).predict_proba(X, groups) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_a_pickle_predicts_without_the_rows(flipped: tuple[np.ndarray, ...]) -> None:
    X, y, groups = flipped
    model = PersonalizedClassifier("ditto", **FAST).fit(X, y, groups=groups)
    copy = pickle.loads(pickle.dumps(model))
    assert hasattr(model, "run_") and not hasattr(copy, "run_")
    np.testing.assert_array_equal(copy.predict(X, groups), model.predict(X, groups))


def test_wrong_groups_are_refused(flipped: tuple[np.ndarray, ...]) -> None:
    X, y, groups = flipped
    with pytest.raises(ValueError, match="400 rows"):
        PersonalizedClassifier("local", **FAST).fit(X, y, groups=groups[:10])
    with pytest.raises(coterie.CoterieError, match="Did you mean 'ditto'"):
        PersonalizedClassifier("dito").fit(X, y, groups=groups)
    with pytest.raises(ValueError, match="2 missing values"):
        PersonalizedClassifier("local", **FAST).fit(X, y, groups=[None, float("nan"), *groups[2:]])


def test_known_clusters(flipped: tuple[np.ndarray, ...]) -> None:
    X, y, groups = flipped
    model = PersonalizedClassifier("oracle", clusters={"north": "a", "south": "b"}, **FAST)
    assert model.fit(X, y, groups=groups).score(X, y, groups=groups) > 0.9


def test_groups_travel_through_a_search(flipped: tuple[np.ndarray, ...], routing: None) -> None:
    X, y, groups = flipped
    model = PersonalizedClassifier("ditto", rounds=20)
    model.set_fit_request(groups=True).set_score_request(groups=True)
    grid = {"settings__lr": [0.3], "settings__lam": [10.0, 0.01]}
    search = GridSearchCV(model, grid, cv=StratifiedKFold(3)).fit(X, y, groups=groups)
    assert search.best_params_["settings__lam"] == 0.01 and search.best_score_ > 0.9
    assert search.best_estimator_.run_.algorithm.lam == 0.01
    found = cross_validate(model, X, y, params={"groups": groups}, cv=3)
    assert found["test_score"].shape == (3,)


def test_hospitals_in_a_pipeline(routing: None) -> None:
    table = polars.read_csv(bundled.path("heart_disease"), null_values=["", "NA", "?"])
    names = [
        name for name in table.columns if name not in ("hospital", "sick") and table[name].dtype.is_numeric()
    ]
    X, y, groups = table.select(names).to_numpy(), table["sick"].to_numpy(), table["hospital"].to_numpy()
    model = PersonalizedClassifier("ditto", settings={"lr": 0.1})
    model.set_fit_request(groups=True).set_predict_request(groups=True).set_score_request(groups=True)
    columns = ColumnTransformer([("all", SimpleImputer(), slice(0, X.shape[1]))])
    pipeline = make_pipeline(columns, FunctionTransformer(), StandardScaler(), model)
    pipeline.fit(X, y, groups=groups)
    assert pipeline.predict(X, groups=groups).shape == y.shape
    assert pipeline.score(X, y, groups=groups) > 0.78


@pytest.mark.filterwarnings("ignore:The groups parameter is ignored:UserWarning")
def test_a_search_without_routing_is_told(flipped: tuple[np.ndarray, ...]) -> None:
    X, y, groups = flipped
    with pytest.warns(GroupsWarning, match="enable_metadata_routing=True"):
        cross_val_score(PersonalizedClassifier("local", **FAST), X, y, groups=groups, cv=2)


@pytest.mark.parametrize("labels", [[1, 2], [1.0, 2.0], ["1", "2"], np.array([1, 2])])
def test_numbers_and_text_name_the_same_group(flipped: tuple[np.ndarray, ...], labels: Any) -> None:
    X, y, groups = flipped
    numbered = np.where(groups == "north", 1, 2)
    model = PersonalizedClassifier("local", **FAST).fit(X, y, groups=numbered)
    expected = model.predict_proba(X[[0, -1]], groups=numbered[[0, -1]])
    if isinstance(labels, list) and isinstance(labels[0], str):
        with pytest.warns(GroupsWarning, match="groups are text here and were numbers in fit"):
            found = model.predict_proba(X[[0, -1]], groups=labels)
    else:
        found = model.predict_proba(X[[0, -1]], groups=labels)
    np.testing.assert_array_equal(found, expected)


def test_rows_without_a_group_get_the_common_model(flipped: tuple[np.ndarray, ...]) -> None:
    X, y, groups = flipped
    model = PersonalizedClassifier("ditto", **FAST).fit(X, y, groups=groups)
    with pytest.warns(GroupsWarning, match="1 groups were not in training .'east'. and 2 rows have no group"):
        found = model.predict_proba(X[:4], groups=["north", None, float("nan"), "east"])
    with pytest.warns(GroupsWarning):
        common = model.predict_proba(X[:4])
    np.testing.assert_array_equal(found[1:], common[1:])
    assert abs(found[0] - common[0]).max() > 0.01


@pytest.mark.parametrize("groups", [None, np.repeat(["a", "b"], 60)])
def test_a_weight_of_two_counts_like_two_rows(groups: np.ndarray | None) -> None:
    draw = np.random.default_rng(1)
    X, weight = draw.normal(size=(120, 3)), draw.integers(0, 3, 120)
    y = (X @ [1.0, -1.0, 0.5] + draw.normal(size=120) > 0).astype(int)
    groups = np.repeat("a", 120) if groups is None else groups
    options: dict[str, Any] = {"settings": {"exact": True}, "rounds": 1, "validation": 0.0}
    weighted = PersonalizedClassifier("local", **options).fit(X, y, groups, sample_weight=weight)
    at = np.repeat(np.arange(120), weight)
    repeated = PersonalizedClassifier("local", **options).fit(X[at], y[at], groups[at])
    expected = repeated.predict_proba(X, groups)
    np.testing.assert_allclose(weighted.predict_proba(X, groups), expected, atol=1e-6)
    plain = PersonalizedClassifier("local", **options).fit(X, y, groups).predict_proba(X, groups)
    assert abs(plain - expected).max() > 0.01
    shared = [
        PersonalizedClassifier("fedavg", rounds=5, validation=0.0, settings={"weighting": "size", "batch": 0})
        for _ in range(2)
    ]
    shared[0].fit(X, y, groups, sample_weight=weight)
    shared[1].fit(X[at], y[at], groups[at])
    np.testing.assert_allclose(shared[0].coef_all_, shared[1].coef_all_, atol=1e-8)


def test_balanced_classes_are_weights() -> None:
    draw = np.random.default_rng(2)
    X = draw.normal(size=(300, 2))
    y = (X[:, 0] + draw.normal(size=300) > 1.5).astype(int)
    groups = np.repeat(["a", "b", "c"], 100)
    balanced = PersonalizedClassifier("local", class_weight="balanced", **FAST).fit(X, y, groups)
    by_hand = PersonalizedClassifier("local", **FAST)
    by_hand.fit(X, y, groups, sample_weight=300 / (2 * np.bincount(y)[y]))
    np.testing.assert_allclose(balanced.predict_proba(X, groups), by_hand.predict_proba(X, groups))
    plain = PersonalizedClassifier("local", **FAST).fit(X, y, groups)
    assert balanced.predict(X, groups).mean() > plain.predict(X, groups).mean() + 0.05


def test_missing_values_take_the_mean_and_are_marked() -> None:
    draw = np.random.default_rng(3)
    X = draw.normal(5, 2, size=(300, 2))
    gone = draw.random(300) < 0.3
    y = X[:, 1] + 4 * gone
    X[gone, 0] = np.nan
    groups = np.repeat(["a", "b"], 150)
    model = PersonalizedRegressor("local", settings={"exact": True}, rounds=1, validation=0.0)
    assert model.fit(X, y, groups).score(X, y, groups=groups) > 0.999
    assert model.missing_.tolist() == [0]
    assert model.mean_[0] == pytest.approx(np.nanmean(X[:, 0]))


def test_random_state_is_the_seed(flipped: tuple[np.ndarray, ...]) -> None:
    X, y, groups = flipped

    def fitted(random_state: Any) -> np.ndarray:
        model = PersonalizedClassifier("ditto", random_state=random_state, **FAST)
        return model.fit(X, y, groups).predict_proba(X, groups)

    np.testing.assert_array_equal(fitted(3), fitted(3))
    np.testing.assert_array_equal(fitted(np.random.RandomState(3)), fitted(np.random.RandomState(3)))
    assert abs(fitted(3) - fitted(4)).max() > 1e-6


def test_a_module_is_a_model(flipped: tuple[np.ndarray, ...]) -> None:
    X, y, groups = flipped
    module = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).double()
    model = PersonalizedClassifier("local", model=module, rounds=60, settings={"lr": 0.3})
    assert model.fit(X, y, groups=groups).score(X, y, groups=groups) > 0.9
