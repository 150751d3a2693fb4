"""The experiments known-clusters/*: files that load, measures that give numbers, and MixedLM's predictions as ours."""

from types import SimpleNamespace

import pytest
import torch

from coterie import fit
from coterie._core.errors import DataError
from coterie.algorithms import make
from coterie.data.generate import hierarchical_linear
from coterie.experiments import donor_cells, known_clusters
from coterie.experiments.jobs import load
from coterie.experiments.mixed_model import independent_columns, mixed_model
from coterie.experiments.spec import shared_data
from coterie.theory.mixed_likelihood import maximum_likelihood
from coterie.theory.variance_components import Sums


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: a second thread costs more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def plan(rounds=100, **settings):
    return SimpleNamespace(plans=[SimpleNamespace(settings=settings, rounds=rounds)])


def needs(path):
    try:
        shared_data(path)
    except DataError:
        pytest.skip(f"../shared/data/{path} is not here")


@pytest.mark.parametrize(
    "name",
    ["table1", "figure", "communication", "insteval", "crossed", "math", "donors", "donors-grid", "grid"],
)
def test_the_files_load(name):
    assert load(f"known-clusters/{name}").rows


def test_table1_runs_the_algorithm():
    """A tenth of the rounds: the one-coin algorithm is on its way, the closed forms are there."""
    found = known_clusters.table1(plan(rows=100, rounds=5000), seed=3)
    assert 400 < found["rounds_global"] < 600
    assert abs(found["local"] - 0.496) < 0.02 and abs(found["exact"] - 0.493) < 0.02
    assert abs(found["ours"] - found["exact"]) < 0.2 and found["ours_max"] > found["ours"]


@pytest.mark.slow
def test_figure_and_communication_have_curves():
    found = known_clusters.over_rows(plan(method="ours", rows=(1, 5)), seed=0)
    assert found["curve"]["rounds"] == [1, 5] and found["rows_1"] > found["rows_5"]
    fast = known_clusters.communications(plan(algorithm="async-al2sgd+", rounds=300), seed=0)
    assert fast["error"] < 1e-2 and fast["needed"] < 100
    counts = fast["curve"]["rounds"]
    assert counts == sorted(counts) and len(counts) == known_clusters.POINTS


@pytest.mark.slow
def test_mixedlm_predicts_the_same():
    """Random intercepts of clients in clusters, common slopes, redundant columns: where the models coincide."""
    pytest.importorskip("statsmodels")
    data = hierarchical_linear(clusters=6, clients=8, features=2, rows=[5 + i % 9 for i in range(48)], seed=5)
    generator = torch.Generator().manual_seed(2)
    level = torch.randn(6, generator=generator, dtype=torch.float64)[data.clusters]
    level = level + 0.7 * torch.randn(48, generator=generator, dtype=torch.float64)
    xs = [torch.cat([x, x[:, :1] + 1, torch.ones(len(x), 1, dtype=torch.float64)], 1) for x in data.xs]
    ys = [
        x[:, 0] - x[:, 1] + level[i] + torch.randn(len(x), generator=generator, dtype=torch.float64)
        for i, x in enumerate(xs)
    ]
    owner = torch.repeat_interleave(torch.arange(48), data.sizes)
    mixed = mixed_model(torch.cat(xs), torch.cat(ys), owner, data.clusters)
    sums = Sums.of(xs, ys, data.clusters)
    ours = maximum_likelihood(sums, "intercept")
    assert abs(ours.noise / mixed.noise - 1) < 1e-3
    assert abs(float(ours.within[0, -1]) / mixed.within - 1) < 0.02
    apart = (torch.cat(xs) * (ours.models(sums) - mixed.models)[owner]).sum(-1).abs().max()
    assert apart < 0.02 * mixed.models[:, -1].std()
    assert independent_columns(torch.cat(xs)) == [1, 2, 3]


def test_real_tables_become_federations():
    needs("hierarchical/InstEval.csv")
    fed = known_clusters.insteval(0)
    assert fed.n == 1128 and len(fed.known_clusters().unique()) == 14 and fed.d == 4
    fed = known_clusters.math_achievement(0)
    assert fed.n == 160 and len(fed.known_clusters().unique()) == 2
    fed = donor_cells.donors(0)
    assert len(fed.known_clusters().unique()) == 6 and fed.n == 138


@pytest.mark.slow
@pytest.mark.parametrize("table", ["math", "insteval"])
def test_real_tables_beside_mixedlm(table):
    """The hierarchical method beats training alone and one model for all, and equals MixedLM."""
    pytest.importorskip("statsmodels")
    needs("hierarchical/InstEval.csv")
    found = known_clusters.regression(plan(table=table), seed=0)
    assert found["hierarchical"] < min(found["local"], found["single"])
    assert abs(found["ratio"] - 1) < 0.01 and found["blup_gap"] < 0.02


def test_the_best_pulls_are_the_inverse_variances():
    """All variances are one; at other pulls the minimiser is farther from the truth."""
    found = {
        lambda_: known_clusters.pulls(plan(lambda_=lambda_, gammas=[0.1, 1.0, 10.0], rows=10), seed=6)
        for lambda_ in (0.01, 1.0)
    }
    assert found[1.0]["best"] == 0 and found[1.0]["smallest"] < found[0.01]["smallest"]
    curve = found[1.0]["curve"]
    assert curve["rounds"] == [-1, 0, 1] and min(curve["values"]) == found[1.0]["smallest"]


@pytest.mark.slow
def test_donors():
    """Training alone has learnt (the zero model has log 2), and is behind; strong pulls give one model."""
    needs("donations/pva97nk.csv")
    found = {
        method: donor_cells.responses(plan(method=method), seed=0) for method in ("local", "hierarchical")
    }
    assert found["local"]["train_loss"] < 0.68 and found["local"]["ratio_median"] == 1
    assert found["hierarchical"]["loss_rows"] < found["local"]["loss_rows"] - 0.003
    ours = found["hierarchical"]
    assert ours["loss_q25"] < ours["loss_median"] < ours["loss_q75"] < ours["loss_worst"]
    assert sum(ours["curve"]["values"]) == pytest.approx(1)
    panels = ours["plots"]["ratios"]["panels"]
    assert all(panel["x"] and panel["y"] for panel in panels) and len(panels) == 2
    limit = donor_cells.grid(plan(lambda_=1e4, gammas=[1.0, 1e5]), seed=0)
    assert abs(limit["to_single"]) < 1e-3 and limit["weakest"] > limit["strongest"] + 0.03


@pytest.mark.slow
def test_scores_of_donor_cells_are_those_of_the_library():
    needs("donations/pva97nk.csv")
    fed = donor_cells.donors(0)
    run = fit(fed, make("hierarchical", choose="given", gamma=100.0), rounds=5, evaluate_every=0)
    for metric, values in donor_cells.cell_scores(fed, run.personal, "test").items():
        theirs = run.score("test", metric)
        assert torch.allclose(values, theirs[~theirs.isnan()].double(), atol=1e-6)


@pytest.mark.slow
def test_a_table_without_clusters_is_one_group(command, write_table, tmp_path):
    table = write_table(tmp_path / "table.csv", "regression")
    common = ("fit", table, "--client", "site", "--target", "y", "--rounds", 2)
    outcome = command(*common, "--algorithm", "hierarchical", "--out", tmp_path / "run")
    assert outcome.code == 0 and (tmp_path / "run").exists()
    outcome = command(
        *common, "--algorithm", "hierarchical", "--cluster", "region", "--out", tmp_path / "good"
    )
    assert outcome.code == 0, outcome.err
    outcome = command(
        *common,
        "--algorithm",
        "async-l2gd",
        "--set",
        "p0=1",
        "--cluster",
        "region",
        "--out",
        tmp_path / "bad",
    )
    assert outcome.code == 2 and "p0 = 1" in outcome.err
