"""Curves through linear models: the basis of splines is that of smoothing splines, waves approximate their kernel."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import coterie
from coterie import models
from coterie._core.errors import SettingError
from coterie.models import basis, from_description
from coterie.models.table_models import table_model


def test_the_ridge_penalty_is_the_integral_of_the_squared_second_derivative() -> None:
    """Of any curve of the basis as a function of u = Phi(x), by finite differences."""
    u = torch.linspace(0.0005, 0.9995, 4001, dtype=torch.float64)
    curves = basis.smooth(torch.special.ndtri(u).unsqueeze(-1))
    step = float(u[1] - u[0])
    for k in range(curves.shape[1]):
        c = torch.zeros(curves.shape[1], dtype=torch.float64)
        c[k], c[0] = 1.0, 0.5 if k else 1.0
        f = (curves @ c).numpy()
        bending = float((np.diff(f, 2) ** 2).sum() / step**3)
        assert basis.SMOOTHNESS * bending == pytest.approx(float(c @ c), rel=0.02)


def test_waves_approximate_the_gaussian_kernel() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=draw, dtype=torch.float64)
    found = basis.waves(x) @ basis.waves(x).mT
    exact = torch.exp(-torch.cdist(x, x).square() / (2 * 4))
    assert float((found - exact).abs().max()) < 5 / math.sqrt(basis.WAVES)
    assert float((found - exact).square().mean().sqrt()) < 1.2 / math.sqrt(basis.WAVES)


@pytest.mark.parametrize("kind", ["splines", "rff"])
@pytest.mark.parametrize("task", ["regression", "binary", "multiclass"])
def test_a_model_on_a_basis_is_the_plain_one_on_its_columns(kind: str, task: str) -> None:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(30, 3, generator=draw, dtype=torch.float64)
    y = {"regression": x[:, 0], "binary": (x[:, 0] > 0).long(), "multiclass": torch.arange(30) % 3}[task]
    model = table_model(kind, task).with_levels((0, 2, 0)).fit_to(x, y)
    assert from_description(model.describe()) == model
    columns = model.basis(x)
    assert columns.shape[1] == model.basis.width(3) == len(model.basis.names(["a", "b", "c"]))
    plain = table_model("linear", task).fit_to(columns, y)
    w = torch.randn(model.d, generator=draw, dtype=torch.float64)
    weight = torch.full((30,), 1 / 30, dtype=torch.float64)
    rows, target = model.prepare(x), y.double() if task != "multiclass" else y
    assert torch.equal(rows, plain.prepare(columns)) and model.d == plain.d
    assert torch.equal(model.grad(w, rows, target, weight), plain.grad(w, rows, target, weight))
    assert torch.allclose(model.module(w)(x), plain.module(w)(columns))


def test_indicators_have_no_curve_and_unknown_bases_are_named() -> None:
    assert basis.Basis("splines", (0, 2, 0)).width(3) == 3 + 2 * (basis.KNOTS - 1)
    assert basis.Basis("splines").names(["age"])[:2] == ["age", "age, curve 1"]
    with pytest.raises(SettingError, match="splines"):
        basis.Basis("wavelets")
    stored = {"model": "linear", "features": 3, "basis": {"kind": "splines", "levels": [0, 2]}}
    for wrong in (stored["basis"], {"levels": [0, 2, 0]}, {"kind": "splines", "levels": 3}):
        with pytest.raises(SettingError):
            from_description({**stored, "basis": wrong})


def test_personal_curves_are_found_from_few_rows(tmp_path) -> None:
    """Clients share a curve and have intercepts of their own: far below a straight line, and kept by a folder."""
    draw = torch.Generator().manual_seed(2)
    x, site = torch.randn(240, generator=draw), torch.arange(240) % 8
    y = torch.sin(2 * x) + 0.5 * site + 0.1 * torch.randn(240, generator=draw)
    table = {"site": [f"s{k}" for k in site.tolist()], "x": x.tolist(), "y": y.tolist()}
    error = {}
    for name in ("linear", "splines"):
        fed = coterie.Federation.from_table(table, "site", "y", model=name)
        method = coterie.algorithms.Hierarchical(grouping="one", choose="reml")
        run = coterie.fit(fed, method, rounds=3, out=tmp_path / name)
        error[name] = run.pooled("test", "rmse")
    assert error["splines"] < 0.3 * error["linear"]
    assert coterie.load(tmp_path / "splines").predict(table).equals(run.predict(table))
    assert "x, curve 1" in run.effects()["coefficient"].to_list()
    assert models.linear().fit_to(torch.zeros(2, 1), torch.zeros(2)).describe().get("basis") is None
