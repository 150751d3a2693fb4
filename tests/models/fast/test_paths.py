"""Every fast path gives the models of the plain code, and can be switched off."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
import torch
from torch import nn

from coterie import Federation, fit, models
from coterie._core import native
from coterie._core.errors import SettingError
from coterie.algorithms import make
from coterie.models import fast
from coterie.models.base import Model
from coterie.models.fast import dual_sgd
from coterie.models.network import Network

NAMES = sorted({path.name for path in fast.PATHS})
ON_GPU = {"compiled-graphs", "cuda-graphs", "group-norm"}
HELPERS = {"group_norm_triton", "lazy_models", "operations", "ragged", "span_models", "winograd"}


def federation(model: Model, images: bool = False, single: bool = False) -> Federation:
    draw = torch.Generator().manual_seed(0)
    sizes = [12, 9, 15, 12, 4, 7]
    shape = (6, 6) if images else (30,)
    dtype = torch.float32 if single or isinstance(model, Network) else torch.float64
    xs = [torch.randn(n, *shape, generator=draw, dtype=dtype) for n in sizes]
    ys = [torch.randint(0, 3, (n,), generator=draw) for n in sizes]
    if not isinstance(model, Network) and model.task == "regression":
        ys = [x[:, 0] + y for x, y in zip(xs, ys, strict=True)]
    return Federation.from_arrays(xs, ys, model, clusters=[0, 1, 0, 1, 0, 1], seed=3)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "dual-sgd": (lambda: federation(models.softmax(classes=3)), {"name": "ditto", "batch": 4, "steps": 4}),
    "parallel-clients": (
        lambda: federation(models.cnn(channels=(2,), hidden=4, classes=3, stacked=False), images=True),
        {"name": "fedavg", "batch": 4, "steps": 3},
    ),
    "manual-backprop": (
        lambda: federation(models.cnn(channels=(2,), hidden=4, classes=3, stacked=False), images=True),
        {"name": "local", "batch": 0},
    ),
    "glm-kernel": (
        lambda: federation(models.softmax(classes=3), single=True),
        {"name": "fedala", "batch": 4, "mixing_steps": 3},
    ),
    "mlp-kernel": (
        lambda: federation(models.mlp((5,), classes=3, stacked=True)),
        {"name": "fedavg", "batch": 4},
    ),
    "batched-layers": (
        lambda: federation(models.mlp((5,), classes=3, stacked=True, activation="gelu")),
        {"name": "fedavg", "batch": 4},
    ),
    "vmap": (
        lambda: federation(models.network(Odd, stacked=True)),
        {"name": "fedavg", "batch": 4},
    ),
    "row-span": (
        lambda: federation(models.softmax(classes=3)),
        {"name": "apfl", "batch": 4, "steps": 3},
    ),
    "row-statistics": (lambda: federation(models.linear(l2=0.1)), {"name": "fedavg", "batch": 0, "lr": 0.01}),
    "quadratic-descent": (
        lambda: federation(models.linear(l2=0.1)),
        {"name": "async-l2gd", "batch": 0, "lr": 0.01, "lambda_": 0.1, "gamma": 0.1},
    ),
    "tree-kernel": (
        lambda: federation(models.trees(trees=4, leaves=3, objective="multiclass", classes=3)),
        {"name": "trees", "leaves": 3},
    ),
}


class Odd(nn.Module):
    """Not a chain: what is written out for chains does not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(30, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(hidden * hidden.detach().abs())


def trained(case: str) -> tuple[Any, torch.Tensor]:
    made, settings = CASES[case]
    method = make(settings["name"], **{name: value for name, value in settings.items() if name != "name"})
    run = fit(made(), method, 4, evaluate_every=0)
    return run.fed.runtime.paths_used(), run.personal


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("two_threads")
def test_a_path_that_is_switched_off_changes_no_model(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.endswith("-kernel") and native.library is None:
        pytest.skip("the package was built without a C compiler")
    monkeypatch.setattr(dual_sgd, "FEWEST_PRODUCTS", 1)
    used, models_ = trained(case)
    assert used[case], f"{case} was not taken, but {dict(used)}"
    for chosen in (",".join(set(NAMES) - {case}), "none"):
        monkeypatch.setenv(fast.VARIABLE, chosen)
        others, expected = trained(case)
        assert not others[case]
        torch.testing.assert_close(models_, expected, rtol=1e-4, atol=1e-5)


def test_every_path_is_in_a_case_and_every_file_is_a_path_or_helps_one() -> None:
    assert set(NAMES) - ON_GPU == set(CASES)
    files = {module.name for module in pkgutil.iter_modules(fast.__path__)}
    assert files == {name.replace("-", "_") for name in NAMES} | HELPERS
    for name in NAMES:
        importlib.import_module(f"coterie.models.fast.{name.replace('-', '_')}")


def test_an_unknown_path_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fast.VARIABLE, "dual-sdg")
    with pytest.raises(SettingError, match=r"no fast path 'dual-sdg'.*dual-sgd"):
        fast.enabled("sgd")


def test_a_path_that_is_taken_out_of_the_table_leaves_the_plain_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dual_sgd, "FEWEST_PRODUCTS", 1)
    _, expected = trained("dual-sgd")
    fast._enabled.cache_clear()
    monkeypatch.setattr(fast, "PATHS", ())
    used, found = trained("dual-sgd")
    fast._enabled.cache_clear()
    assert set(used) == {"plain steps"}
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_what_models_were_needed_for_before_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether models are written out or averaged is guessed from the last time; a wrong guess costs time alone."""
    monkeypatch.setattr(dual_sgd, "FEWEST_PRODUCTS", 1)
    fed = federation(models.softmax(classes=3))
    settings = {"batch": 4, "steps": 4}

    def average() -> torch.Tensor:
        state = fit(fed, make("fedavg", **settings), 3, evaluate_every=0).state
        return torch.as_tensor(state.x)

    first = average()
    assert dual_sgd.workspace(fed.runtime.rows("train")).usual == "by rows"
    alone = fit(fed, make("fedamp", **settings), 3, evaluate_every=0).personal
    assert dual_sgd.workspace(fed.runtime.rows("train")).usual == "written"
    assert torch.equal(average(), first)
    assert dual_sgd.workspace(fed.runtime.rows("train")).usual == "by rows"
    assert torch.equal(fit(fed, make("fedamp", **settings), 3, evaluate_every=0).personal, alone)
