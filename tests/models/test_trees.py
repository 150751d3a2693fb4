"""The parts of boosted trees against brute force: walks, bins, histograms, splits, leaves, derivatives."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from coterie import models
from coterie._core.errors import DataError, SettingError
from coterie.models import fast
from coterie.models.binning import GRIDS, LEAST, NO_EDGE, GridSearch, cell_counts, to_bins
from coterie.models.fast import tree_kernel
from coterie.models.histograms import assign, histograms
from coterie.models.objectives import OBJECTIVES
from coterie.models.personal_leaves import PULLS, SHARED, Step, boost, leaf_sums, nodes_of
from coterie.models.tree_growth import Growth, Rules, best_splits, bounds
from coterie.models.tree_walk import PARENT, children, depth, leaves, void

NAN = float("nan")
# three features, the last a category of four levels: x0 > 1 splits the root, then code in {1, 3}, then x1 > 0 again
TREE = torch.tensor(
    [[[0, 0, 1.0, 1, 0.5], [0, 2, 0b1010, 0, 0.5], [1, 1, 0.0, 0, 0.5], [-1, 0, 0, 0, 0]]],
    dtype=torch.float64,
)
KINDS = torch.tensor([False, False, True])


def by_hand(row: list[float]) -> int:
    x0, x1, x2 = row
    if x0 != x0 or x0 > 1:
        return 3 if x1 == x1 and x1 > 0 else 1
    return 2 if x2 in (1.0, 3.0) else 0


@pytest.fixture(params=["kernel", "plain"])
def way(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setenv(fast.VARIABLE, "none")
    return request.param


def test_a_row_finds_its_leaf(way):
    rows = list(itertools.product([0.0, 1.0, 2.0, NAN], [-1.0, 0.0, 1.0, NAN], [0.0, 1.0, 2.0, 3.0, NAN]))
    found = leaves(TREE, KINDS, torch.tensor(rows, dtype=torch.float64))
    assert found.squeeze(-1).tolist() == [by_hand(list(row)) for row in rows]
    assert depth(children(TREE)) == 2


def test_rows_of_bins_find_the_leaves_of_their_values(way):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(300, 3, generator=draw, dtype=torch.float64)
    x[:, 2] = torch.randint(0, 4, (300,), generator=draw).double()
    x[torch.rand(300, 3, generator=draw) < 0.2] = NAN
    edges = torch.tensor([[0.0, 1.0], [-1.0, 0.0], [NO_EDGE, NO_EDGE]], dtype=torch.float64)
    binned = TREE.clone()
    binned[0, 0, 2], binned[0, 2, 2] = 1, 1  # bins of x0 <= 1 and of x1 <= 0
    bins = to_bins(x, edges, torch.tensor([False, False, False]))
    bins[:, 2] = torch.where(x[:, 2].isnan(), 3, x[:, 2]).to(torch.uint8)
    known = ~(x[:, 2] == 3)  # with two cut points the last bin, 3, is for missing values
    found = assign(bins, binned, KINDS, 3)
    assert torch.equal(found[known, 0].long(), leaves(TREE, KINDS, x)[known, 0])


@pytest.mark.parametrize(("column", "wrong"), [(0, 3.0), (0, 1e300), (0, NAN), (1, 3.0), (1, NAN), (1, -1.0)])
def test_splits_of_a_lying_server_reach_no_memory_of_others(column, wrong):
    lie = TREE.clone()
    lie[0, 1, column] = wrong
    with pytest.raises(IndexError, match="a split names"):
        tree_kernel.leaves(torch.zeros(5, 3, dtype=torch.uint8), lie, KINDS, 3)


def test_histograms_are_sums_over_rows(way):
    draw = torch.Generator().manual_seed(2)
    bins = torch.randint(0, 5, (3, 40, 4), generator=draw).to(torch.uint8)
    pairs = torch.randn(3, 40, 2, 3, generator=draw, dtype=torch.float64)
    pairs[1, 30:] = 0  # padding
    leaf = torch.randint(0, 3, (3, 40, 2), generator=draw).to(torch.int32)
    nodes = torch.tensor([[2, 0], [1, -1]])
    found = histograms(bins, pairs, leaf, nodes, 5)
    for client, tree, place in itertools.product(range(3), range(2), range(2)):
        for feature, bin_ in itertools.product(range(4), range(5)):
            here = (leaf[client, :, tree] == nodes[tree, place]) & (bins[client, :, feature] == bin_)
            expected = pairs[client, here, tree].sum(0)
            assert (found[client, tree, place, feature, bin_] - expected).abs().max() <= 1e-10


def searched(parts, bins=64):
    """Return the cut points that the counts of some clients lead to, and the last grid of each feature."""
    search, grids = GridSearch(torch.arange(parts[0].shape[1]), bins, parts[0].dtype), {}
    for _ in range(GRIDS):
        if not len(search.asked):
            break
        asked, grid = search.asked, search.grid
        assert (grid.diff(dim=1) >= 0).all()
        grids |= dict(zip(asked.tolist(), grid, strict=True))
        counts = [cell_counts(part[:, asked], torch.ones(len(part)).to(part), grid) for part in parts]
        search.learn(torch.stack(counts).sum(0))
    return search.edges(parts[0].shape[1]), grids


def columns_of_all_kinds(seed, rows):
    draw = np.random.default_rng(seed)
    some = draw.uniform(size=rows)
    values = {
        "normal": draw.normal(size=rows),
        "heavy tails": draw.standard_cauchy(rows),
        "many magnitudes": np.exp(5 * draw.normal(size=rows)),
        "tiny": 1e-25 * draw.normal(size=rows),
        "years": 1900 + draw.integers(0, 120, rows),
        "integers": draw.integers(-3, 7, rows),
        "seconds": 1.6e9 + draw.integers(-100, 100, rows),
        "seconds and zeros": np.where(some < 0.5, 0, 1.6e9 + draw.uniform(-100, 100, rows)),
        "many zeros": np.where(some < 0.9, 0, draw.exponential(size=rows)),
        "many of another": np.where(some < 0.9, 7.7, draw.normal(size=rows)),
        "money": np.round(np.exp(draw.normal(8, 1, rows)), -2),
        "constant": np.full(rows, 7.3),
        "two": some < 0.3,
        "rare": np.arange(rows) < 3,
    }
    return {name: torch.tensor(column).double() for name, column in values.items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(3))
def test_cut_points_from_counts_are_close_to_quantiles(seed, dtype):
    """No bin holds more than a fair share and half of one, unless it holds one value; bins of few values hold one."""
    columns = columns_of_all_kinds(seed, 3000)
    x = torch.stack(list(columns.values()), 1).to(dtype)
    x[::9, 0] = NAN
    edges, _ = searched(x.split([1000, 1900, 100]))
    bins = to_bins(x, edges, torch.zeros(len(columns), dtype=torch.bool))
    assert (bins[::9, 0] == 63).all()
    for k, name in enumerate(columns):
        known = x[~x[:, k].isnan(), k]
        values, counts = known.unique(return_counts=True)
        held = [known[bins[~x[:, k].isnan(), k] == b].unique() for b in range(63)]
        if len(values) <= 63:
            assert max(len(one) for one in held) == 1, name
            continue
        fair = len(known) / 63
        assert sum(len(one) > 0 for one in held) >= 0.9 * float(counts[counts < fair].sum()) / fair, name
        for b, one in enumerate(held):
            rows = int((bins[:, k] == b).sum())
            assert len(one) <= 1 or rows <= 1.5 * fair + counts[counts <= fair].max(), (name, b)


def test_cut_points_lie_in_the_middle_between_discrete_values():
    x = torch.tensor([0.0, 1.0, 2.0, 5.0, -4.0] * 30, dtype=torch.float64).unsqueeze(-1)
    edges, _ = searched([x[:40], x[40:]])
    assert edges[0, :4].tolist() == pytest.approx([-2.0, 0.5, 1.5, 3.5], abs=1e-6)
    assert (edges[0, 4:] == NO_EDGE).all()


def test_grids_do_not_close_in_on_what_few_rows_have():
    """A cell that holds one row, next to many others, stays as wide as the cells that were asked for by the others."""
    x = torch.cat([torch.linspace(1, 2, 500), torch.tensor([1234.5678])]).double().unsqueeze(-1)
    _, grids = searched([x])
    near = grids[0][torch.searchsorted(grids[0], x[-1]) - 1 :][:2]
    assert near[0] < 1100 and near[1] > 1300
    few = torch.tensor([3.14159, 2.71828, 1.41421, 1.61803][: LEAST - 1]).double().unsqueeze(-1)
    _, grids = searched([few])
    assert torch.equal(grids[0], GridSearch(torch.arange(1), 64, torch.float64).grid[0])


def test_counts_of_a_stack_are_those_of_each_client():
    draw = torch.Generator().manual_seed(3)
    x, weight = torch.randn(2, 20, 3, generator=draw), torch.ones(2, 20)
    weight[1, 15:], x[0, 3, 1] = 0, NAN
    grid = torch.tensor([[-1.0, 0.0, 1.0]]).expand(3, -1).contiguous()
    both = cell_counts(x, weight, grid)
    for k, rows in enumerate((20, 15)):
        assert torch.equal(both[k], cell_counts(x[k, :rows], weight[k, :rows], grid))
        for feature in range(3):
            column = x[k, :rows, feature]
            ends = [-torch.inf, -1.0, 0.0, 1.0, torch.inf]
            expected = [int(((column > a) & (column <= b)).sum()) for a, b in itertools.pairwise(ends)]
            assert both[k, feature].tolist() == expected


def brute_force(x, g, h, rules, kind, codes):
    """Return the largest gain over all features, cut points, sets of codes and ways of missing values."""

    def score(rows):
        return float(g[rows].sum() ** 2 / (h[rows].sum() + rules.smoothing))

    best = 0.0
    for feature in range(x.shape[1]):
        column = x[:, feature]
        missing = column.isnan()
        if kind[feature]:
            sets = [s for k in range(1, codes) for s in itertools.combinations(range(codes), k)]
            ways = [torch.isin(column, torch.tensor(s).double()) for s in sets]
        else:
            ways = [column > cut for cut in column[~missing].unique().tolist()]
        for right in ways:
            for side in (right | missing, right & ~missing):
                enough = min(float(h[side].sum()), float(h[~side].sum())) >= rules.least
                if enough:
                    whole = torch.ones_like(side)
                    best = max(best, score(side) + score(~side) - score(whole))
    return best


def test_the_best_split_is_the_best_of_all():
    draw = torch.Generator().manual_seed(4)
    x = torch.randint(0, 5, (60, 3), generator=draw).double()
    x[torch.rand(60, 3, generator=draw) < 0.1] = NAN
    g = torch.randn(60, generator=draw, dtype=torch.float64) + x[:, 2].nan_to_num() % 2
    h = torch.full((60,), 100.0, dtype=torch.float64)  # so that levels are ordered by their means alone
    rules = Rules(1.0, 300.0, 0.0, KINDS, torch.zeros(3).double())
    edges = torch.arange(0.5, 4).double().expand(3, -1).contiguous()
    bins = to_bins(x, edges, KINDS)
    pairs = torch.stack([g, h], -1).view(1, 60, 1, 2)
    sums = histograms(
        bins.unsqueeze(0), pairs, torch.zeros(1, 60, 1, dtype=torch.int32), torch.zeros(1, 1).long(), 6
    )
    ends = torch.tensor([torch.inf]).double()
    best = best_splits(sums[0, 0], -ends, ends, rules)
    assert float(best.gain) == pytest.approx(brute_force(x, g, h, rules, KINDS, 5), rel=1e-3)


def test_a_split_that_clients_disagree_on_counts_through_their_signs():
    sums = torch.zeros(1, 2, 4, 3, dtype=torch.float64)
    sums[0, :, :2, 1] = 10.0
    sums[0, 0, 0, 0], sums[0, 0, 1, 0] = 1.0, -1.0  # what all clients agree on
    sums[0, 1, 0, 2], sums[0, 1, 1, 2] = 5.0, -5.0  # what they disagree on
    rules = Rules(1.0, 1.0, 0.0, torch.zeros(2, dtype=torch.bool), torch.zeros(2).double())
    ends = torch.tensor([torch.inf]).double()
    assert int(best_splits(sums[..., :2], -ends, ends, rules).feature) == 0
    assert int(best_splits(sums, -ends, ends, rules).feature) == 1


@pytest.mark.parametrize("seed", range(12))
def test_best_splits_in_c_are_those_of_torch_to_the_last_bit(seed, monkeypatch):
    draw = torch.Generator().manual_seed(seed)
    nodes, features, bins, width = 1 + seed % 4, 1 + 3 * (seed % 5), 4 + 9 * (seed % 7), 2 + seed % 2
    sums = 3 * torch.rand(nodes, features, bins, width, generator=draw, dtype=torch.float64)
    sums[..., [0, -1]] -= 1.5
    sums[..., 1] = sums[..., 1].abs()
    sums *= torch.rand(nodes, features, bins, 1, generator=draw) < 0.7
    if seed % 3 == 0:
        sums[..., -1, :] = 0  # nothing is missing
    if seed % 4 == 0:
        sums = sums.round()  # many ties
    kinds = torch.rand(features, generator=draw) < 0.5
    rules = Rules(1.0, 3.0 * (seed % 2), 0.0, kinds, torch.zeros(features).double())
    ends = torch.full((nodes,), torch.inf).double()
    found = best_splits(sums, -ends, ends, rules)
    monkeypatch.setenv(fast.VARIABLE, "none")
    plain = best_splits(sums, -ends, ends, rules)
    for name in ("gain", "feature", "threshold", "missing", "left"):
        assert torch.equal(getattr(found, name), getattr(plain, name)), name


def personal_by_hand(g, h, shared, root, deep):
    """Return the values of TREE's leaves, node by node: 0 and 2 lie left of the root, 1 and 3 right."""
    r = g + h * shared

    def below(away, at):
        return away - (r[at].sum() + h[at].sum() * away) / (h[at].sum() + deep)

    away = -r.sum() / (h.sum() + root)
    left, right = below(away, [0, 2]), below(away, [1, 3])
    moved = torch.stack([below(left, [0]), below(right, [1]), below(left, [2]), below(right, [3])])
    return shared[:4] + moved


def test_personal_leaves_go_down_the_tree():
    draw = torch.Generator().manual_seed(5)
    g, h = (
        torch.randn(5, generator=draw, dtype=torch.float64),
        torch.rand(5, generator=draw, dtype=torch.float64),
    )
    shared = torch.randn(5, generator=draw, dtype=torch.float64)
    g[4] = h[4] = 0
    ends = torch.full((1, 5), torch.inf, dtype=torch.float64)
    step = Step(OBJECTIVES["regression"], nodes_of(TREE), shared.unsqueeze(0), -ends, ends, 0.1, 1.0, 1.0)
    sums = torch.stack([g, h], -1).unsqueeze(0)
    root, deep = torch.tensor([0.5, SHARED, 0.0]), torch.tensor([2.0, SHARED, 0.0])
    found = step.personal(sums, root, deep)[:, 0, :4]
    assert torch.allclose(found[0], personal_by_hand(g, h, shared, 0.5, 2.0), rtol=1e-12)
    assert torch.allclose(found[1], shared[:4], rtol=1e-12)  # one model for all
    assert torch.allclose(found[2], (-g / h)[:4], rtol=1e-12)  # values of one's own


def test_pulls_are_judged_on_rows_that_were_left_out():
    draw = torch.Generator().manual_seed(6)
    leaf = torch.randint(0, 4, (30, 1), generator=draw)
    y, base = torch.randn(30, generator=draw, dtype=torch.float64), torch.zeros(4, 30, 1, dtype=torch.float64)
    shared, ends = torch.zeros(1, 5, dtype=torch.float64), torch.full((1, 5), torch.inf, dtype=torch.float64)
    step = Step(OBJECTIVES["regression"], nodes_of(TREE), shared, -ends, ends, 0.1, 3.0, 10.0)
    own, moved, judged = boost(step, base, y, torch.ones(30).double(), leaf)
    expected = torch.zeros(2 * len(PULLS), dtype=torch.float64)
    pulls = [(pull, SHARED) for pull in PULLS] + [(3.0, pull) for pull in PULLS]
    for fold in range(3):
        out = torch.arange(30) % 3 == fold
        pair = torch.stack([-y, torch.ones_like(y)], -1).unsqueeze(1)
        sums = leaf_sums(pair[~out], leaf[~out], 5)
        for k, (root, deep) in enumerate(pulls):
            v = step.personal(sums, torch.tensor([root]), torch.tensor([deep]))[0, 0][leaf[out, 0]]
            expected[k] += (0.5 * (v - y[out]).square() - 0.5 * y[out].square()).sum()
    assert torch.allclose(judged, expected, atol=1e-9)
    assert torch.allclose(moved[0, :, 0], 0.1 * own[0][leaf[:, 0]])


def test_bounds_keep_the_order_of_leaves():
    values = torch.tensor([[-1.0, 2.0, 0.5, 3.0, 0.0]], dtype=torch.float64)
    low, high = bounds(TREE, values, torch.tensor([1.0, 0.0, 0.0]))
    assert high[0, [0, 2]].tolist() == low[0, [1, 3]].tolist() == [1.25, 1.25]


def test_growth_ends_with_the_leaves_it_may_have():
    rules = Rules(1.0, 0.0, 0.0, torch.zeros(1, dtype=torch.bool), torch.zeros(1).double())
    growth = Growth(1, 3, 4, rules)
    sums = torch.zeros(1, 1, 1, 6, 2, dtype=torch.float64)
    sums[0, 0, 0, :5] = torch.tensor([[-4.0, 1.0], [-2.0, 1.0], [0.0, 1.0], [3.0, 1.0], [8.0, 1.0]])
    growth.learn(sums)
    assert growth.growing
    growth.learn(growth.siblings[0, int(growth.asked[0, 0])][1].view(1, 1, 1, 6, 2) * 0.3)
    assert growth.count == [3] and not growth.growing
    assert (growth.splits[0, 2] == void(like=growth.splits)).all()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_derivatives_are_those_of_the_loss(objective):
    outputs = 3 if objective == "multiclass" else 1
    scores = torch.randn(6, outputs, dtype=torch.float64, requires_grad=True)
    y = (
        torch.tensor([0, 1, 1, 0, 1, 0])
        if objective in ("binary", "multiclass")
        else torch.rand(6).double() * 3
    )
    chosen = OBJECTIVES[objective]
    first, second = chosen.derivatives(scores.detach(), y)
    (grad,) = torch.autograd.grad(chosen.loss(scores, y).sum(), scores, create_graph=True)
    assert torch.allclose(first, grad.detach(), atol=1e-12)
    curved = torch.stack(
        [torch.autograd.grad(grad[:, c].sum(), scores, retain_graph=True)[0][:, c] for c in range(outputs)],
        -1,
    )
    scale = outputs / (outputs - 1) if objective == "multiclass" else 1.0
    assert torch.allclose(second, scale * curved, atol=1e-12)


def a_model(objective="auto", y=None):
    x = torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    x[:, 2] = torch.arange(20) % 4
    x[3, 0] = NAN
    y = torch.arange(20) % 3 if y is None else y
    model = models.trees(4, 5, objective, levels=(0, 0, 4)).fit_to(x, y)
    w = model.initial(0, torch.float64)
    base, splits, values = model.parts(w)
    splits[:2] = TREE
    draw = torch.Generator().manual_seed(8)
    values[:2] = torch.randn(values[:2].shape, generator=draw, dtype=torch.float64)
    base += 0.1
    return model, w, x, y


def test_the_gradient_is_that_of_the_loss_and_zero_in_the_splits():
    model, w, x, y = a_model()
    weight, step = torch.full((20,), 0.05, dtype=torch.float64), 1e-6
    grad = model.grad(w, x, y, weight)
    used = torch.zeros_like(w)
    model.parts(used)[0][:] = model.parts(used)[2][:2] = 1  # a tree that is void has no gradient
    head = used.nonzero().squeeze(-1)
    for k in head[:: max(1, len(head) // 25)].tolist():
        moved = w.clone()
        moved[k] += step
        slope = (model.loss(moved, x, y, weight) - model.loss(w, x, y, weight)) / step
        assert float(grad[k]) == pytest.approx(float(slope), abs=1e-5)
    assert not grad[model.groups["body"]].any()
    v = torch.where(used > 0, torch.randn_like(w), 0.0)
    ahead = model.grad(w + step * v, x, y, weight)
    assert torch.allclose(model.hvp(w, v, x, y, weight), (ahead - grad) / step, atol=1e-5)


def test_a_stack_is_what_each_gives_alone():
    model, w, x, y = a_model()
    other = w.clone()
    model.parts(other)[1][1, 0] = void(4, like=w)  # a client that lacks a tree
    stack, rows, labels = torch.stack([w, other]), torch.stack([x, x.flip(0)]), torch.stack([y, y.flip(0)])
    weight = torch.full((2, 20), 0.05, dtype=torch.float64)
    both = model.grad(stack, rows, labels, weight)
    for k in range(2):
        assert torch.allclose(both[k], model.grad(stack[k], rows[k], labels[k], weight[k]), atol=1e-14)
        assert torch.allclose(model.scores(stack, rows)[k], model.scores(stack[k], rows[k]))


def test_scores_are_linear_in_the_leaves():
    model, w, x, _ = a_model()
    base, _, values = model.parts(w)
    used = values[:2].reshape(2, 3, 5)
    z = model.indicators(w, x).view(20, 2, 3, 5)
    assert torch.allclose(torch.einsum("btcl,tcl->bc", z, used) + base, model.scores(w, x))
    assert (z.sum(-1) == 1).all()


def test_the_module_and_the_description_are_the_model():
    model, w, x, _ = a_model()
    assert torch.allclose(model.module(w)(x), torch.softmax(model.scores(w, x), -1))
    again = models.from_description(model.describe())
    assert again == model and again.d == model.d
    assert (model.initial(0, torch.float64).view(-1)[3:][0::5][:4] == -1).all()
    assert int((model.parts(model.initial(0, torch.float64))[1][..., PARENT] == -1).all())


def test_counts_are_predicted_on_their_own_scale():
    y = torch.poisson(torch.full((20,), 2.0)).double()
    model, w, x, _ = a_model("poisson", y)
    assert model.task == "regression" and model.target_in_units
    assert torch.allclose(model.scores(w, x), model.margins(w, x).exp())
    assert torch.allclose(model.module(w)(x), model.scores(w, x).squeeze(-1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: models.trees(0), "at least one tree"),
        (lambda: models.trees(objective="gamma"), "unknown"),
        (lambda: models.trees(levels=(99,)), "48 levels"),
        (lambda: models.trees().d, "fit_to"),
    ],
)
def test_settings_that_cannot_be_are_named(make, message):
    with pytest.raises(SettingError, match=message):
        make()


def test_rows_that_do_not_fit_are_named():
    with pytest.raises(DataError, match="counts from 0"):
        models.trees(objective="poisson").fit_to(torch.zeros(2, 1), torch.tensor([1.0, -1.0]))
    with pytest.raises(DataError, match="label 2"):
        models.trees(objective="binary").fit_to(torch.zeros(3, 1), torch.arange(3))
    with pytest.raises(DataError, match="expects 1 features"):
        models.trees().fit_to(torch.zeros(2, 1), torch.zeros(2)).fit_to(torch.zeros(2, 3), torch.zeros(2))
