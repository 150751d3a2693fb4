"""The collaboration map from recorded weights, clusters, mixtures and models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import coterie
from coterie._core import files
from coterie.algorithms import find
from coterie.report import collaboration, sparse_map
from coterie.report.facts import RunFacts, read_runs
from coterie.report.graph import _merged, graph
from coterie.report.tables import run_notes


def one(folder: Path) -> RunFacts:
    return read_runs([folder])[0]


def titles(run: RunFacts) -> list[str]:
    return [panel.title for panel in collaboration.collaboration(run, "0")]


def test_clusters_are_squares_on_the_diagonal(twelve: Path, tmp_path: Path) -> None:
    kind = np.arange(12) % 3
    weights = np.where(kind[:, None] == kind, 0.9, 0.1)
    np.fill_diagonal(weights, 0.0)
    run = replace(one(twelve / "local"), folder=tmp_path)
    files.write_tensors(
        tmp_path / "traces.safetensors",
        {
            "weights.5": torch.zeros(12, 12),
            "weights.10": torch.from_numpy(weights),
            "other.10": torch.ones(2),
        },
    )
    matrix = collaboration.collaboration(run, "0")[0]
    shown = [
        run.names.index(name.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
        for name in matrix.data[0]["x"]
    ]
    order = kind[shown]
    assert (np.diff(order) != 0).sum() == 2  # each cluster in one piece
    assert matrix.data[0]["z"][0][0] is None  # nobody learns from itself
    assert np.nanmax(np.array(matrix.data[0]["z"], dtype=float)) == 0.9
    for client, group, inside, others in matrix.rows:
        mates = {name for name, other, *_ in matrix.rows if other == group}
        assert {kind[run.names.index(name)] for name in mates} == {kind[run.names.index(client)]}
        assert (float(inside), float(others)) == (0.9, 0.1)  # oneself does not count


def test_neighbours_are_those_with_the_largest_weights(twelve: Path) -> None:
    run = one(twelve / "cobo")
    assert run.weights is not None and run.weights.shape == (12, 12)
    best = collaboration.neighbours(run, most=1)
    weights = run.weights.copy()
    np.fill_diagonal(weights, -1)
    for k, name in enumerate(best):
        chosen = weights[k, run.names.index(name)] if name != "nobody" else 0.0
        assert chosen == weights[k].max()
    assert len(set(best)) > 2


def test_what_each_method_shows(twelve: Path) -> None:
    assert titles(one(twelve / "ifca"))[-1] == "Groups over time"
    assert titles(one(twelve / "flix"))[-1] == "Mix of shared and own model"
    assert titles(one(twelve / "local")) == ["Matrix, clients ordered by group", "Graph"]
    assert "mixes the shared model" in collaboration.explain(one(twelve / "flix"))
    assert "decided who learns from whom" in collaboration.explain(one(twelve / "cobo"))


@pytest.mark.slow
def test_a_mixed_model_shows_shrinkage_and_who_fits_nobody(tmp_path: Path) -> None:
    """Shrinkage is that of the record, larger for clients with fewer rows; a client in other units is named."""
    draw = torch.Generator().manual_seed(0)
    sizes = [6, 60, *[20] * 9, 20]
    ys = [torch.randn(1, generator=draw) + torch.randn(size, generator=draw) for size in sizes]
    ys[-1] = 1000 * ys[-1]
    model = coterie.models.linear()
    fed = coterie.Federation.from_arrays(
        [torch.ones(size, 1) for size in sizes], ys, model, split=(1.0, 0.0, 0.0)
    )
    run = coterie.fit(fed, find("hierarchical")(grouping="one"), rounds=1, out=tmp_path / "run")
    spread, noise = float(run.state.within[0, 0]), run.state.noise
    expected = [noise / (noise + spread * size) for size in sizes]
    np.testing.assert_allclose(run.state.shrinkage.numpy(), expected, atol=1e-6)
    seen = one(tmp_path / "run")
    panel = next(p for p in collaboration.collaboration(seen, "0") if p.title == "Shrinkage of every client")
    assert panel.headers == ("client", "share of the group's centre", "weight with the others")
    assert (
        panel.rows[0] == [seen.names[0], f"{100 * expected[0]:.0f} %", "1.00"]
        and panel.rows[-1][-1] == "0.00"
    )
    said = f"too far from theirs (other units, or wrong values?): {seen.names[-1]!r}"
    assert said in collaboration.explain(seen) and any(said in note for note in run_notes(run))


def test_one_model_for_all_has_no_map(comparison: Path) -> None:
    run = one(comparison / "fedavg")
    assert collaboration.collaboration(run, "0") == []
    assert "one and the same model" in collaboration.explain(run)


def test_many_clients_are_merged(thousand: Path) -> None:
    run = one(thousand / "ifca")
    matrix, picture, over_time = collaboration.collaboration(run, "0")
    assert len(matrix.data[0]["z"]) == collaboration.CELLS
    assert sum(len(trace["x"]) for trace in picture.data if trace["mode"] != "lines") <= 60
    assert sum(trace["y"][-1] for trace in over_time.data) == 1000


def test_linked_clients_lie_near_each_other(twelve: Path) -> None:
    kind = np.arange(12) % 3
    weights = np.where(kind[:, None] == kind, 1.0, 0.0)
    places = np.zeros((12, 2))
    run = one(twelve / "local")
    names = [name.replace("<", "&lt;").replace(">", "&gt;") for name in run.names]
    for trace in graph(run, "0", weights, kind, similar=False).data:
        if trace["mode"] != "lines":
            for x, y, name in zip(trace["x"], trace["y"], trace["customdata"], strict=True):
                places[names.index(name.replace("&amp;", "&"))] = x, y
    distance = np.linalg.norm(places[:, None] - places, axis=-1)
    same = (kind[:, None] == kind) & ~np.eye(12, dtype=bool)
    assert distance[same].mean() < 0.5 * distance[kind[:, None] != kind].mean()


def test_links_of_merged_groups_are_means_over_their_members() -> None:
    weights, groups = np.random.default_rng(5).random((6, 6)), np.array([0, 0, 0, 1, 1, 2])
    merged, names, _, keep = _merged(weights, groups)
    expected = [[weights[np.ix_(groups == a, groups == b)].mean() for b in keep] for a in keep]
    assert keep.tolist() == [0, 1, 2] and names[0].endswith("3 clients")
    np.testing.assert_allclose(merged, expected, rtol=1e-12)


def linked(folder: Path, run: RunFacts, weights: np.ndarray) -> RunFacts:
    """Return the run with these weights as CoBo records those of many clients: pairs i < j and the weight of each."""
    i, j = np.triu(weights, 1).nonzero()
    trace = torch.from_numpy(np.stack([i, j, weights[i, j]], 1))
    files.write_tensors(folder / "traces.safetensors", {"links.1": trace[:1], "links.2": trace})
    return replace(run, folder=folder)


def test_a_map_of_links_is_that_of_the_matrix_of_all_pairs(thousand: Path, tmp_path: Path) -> None:
    """Above 300 clients CoBo records links; the map shows them, not how similar models became."""
    run, draw = one(thousand / "ifca"), np.random.default_rng(2)
    kind = np.arange(1000) % 3
    weights = np.triu(
        (draw.random((1000, 1000)) < 0.02) * draw.random((1000, 1000)) * (kind[:, None] == kind), 1
    )
    weights[0, 1] = 0.5  # one link that crosses groups
    weights += weights.T
    run = linked(tmp_path, run, weights)
    assert run.weights is None and "decided who learns from whom" in collaboration.explain(run)
    groups = collaboration._labels(run)
    assert groups is not None
    order = np.argsort(groups, kind="stable")
    matrix, picture = collaboration.collaboration(run, "0")[:2]
    whole = weights[np.ix_(order, order)]
    np.fill_diagonal(whole, np.nan)
    edges = np.linspace(0, 1000, collaboration.CELLS + 1).astype(int)
    np.testing.assert_allclose(
        np.array(matrix.data[0]["z"], dtype=float), collaboration._blocks(whole, edges), rtol=0.01
    )
    for mine, all_pairs in zip(
        sparse_map.within(run.links, groups), collaboration._within(weights, groups), strict=True
    ):
        np.testing.assert_allclose(mine, all_pairs, atol=1e-12)
    assert "weight" in matrix.caption + matrix.headers[2] and len(picture.rows) >= 1
    best = collaboration.neighbours(run, most=1)
    assert best[5] == run.names[int(weights[5].argmax())]


def test_so_many_models_that_pairs_do_not_fit_in_memory_have_no_map(
    thousand: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = one(thousand / "local")
    assert "Matrix, clients ordered by group" in titles(run)
    monkeypatch.setattr(collaboration, "MOST", 999)
    assert titles(run) == [] and "too many or too large" in collaboration.explain(run)
