"""Boosted trees with shared splits and personal leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from coterie._core.errors import SettingError
from coterie.algorithms.base import Algorithm, Reveals, setting
from coterie.algorithms.tree_rows import (
    for_all,
    keep_rows,
    leaves_of,
    moves,
    pairs_of,
    profile,
    random_sign,
    target_sums,
    trees_of,
    with_profile,
)
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.replies import Replies
from coterie.engine.state import State
from coterie.models.base import Model
from coterie.models.binning import GRIDS, NO_EDGE, GridSearch, cell_counts, grid_size, to_bins
from coterie.models.histograms import histograms
from coterie.models.personal_leaves import PULLS, SHARED, Step, boost, nodes_of
from coterie.models.tree_growth import Growth, Rules, bounds, monotone_signs
from coterie.models.tree_walk import COLUMNS, MOST_LEVELS
from coterie.models.trees import Trees

FIRST_PULL = 30.0  # lambda of the first tree, before any was judged
MEMORY = 0.8  # share of earlier trees in the judgement of lambda
NEVER = 1e300  # a validation loss that is not known


@dataclass(frozen=True)
class BoostedTrees(Algorithm):
    """Gradient boosting (Friedman 2001) with histograms of all clients and leaves of each (Coterie 2026).

    Per tree, level by level: clients send G, H, the sums of first and second derivatives by node, feature and bin,
    which add up; the server splits where G_l^2/(H_l + 1) + G_r^2/(H_r + 1) - G^2/(H + 1) is largest (Chen, Guestrin
    2016). Then client i gives leaf l the value

    v_il = (lambda v_l - G_il) / (lambda + H_il),    v_l = -G_l / (H_l + 1)

    and moves its scores by lr v_il, so that the next tree sees what is left for everybody. G_il stays with the client.
    lambda -> infinity gives one model for all, lambda = 0 shared splits with values of one's own. The pull is applied
    from the root down (`models/personal_leaves.py`), so that an effect on all rows is estimated from all rows. With
    lambda = auto each client cross-fits: values without a fold of its rows are judged on that fold, for every lambda
    of a grid, and the sum over clients decides for the next tree. With profile = true trees can also tell clients
    apart: -G_i/(H_i + 10), the client's residual before the first tree, is a further column that the client fills in
    itself. What leaves are its histograms; the client's own model has the way it goes in place of such a split.

    Examples
    --------
    >>> import coterie
    >>> data = coterie.Federation.from_table(
    ...     "heart_disease", client="hospital", target="sick", model=coterie.models.trees(trees=30, leaves=8)
    ... )
    >>> run = coterie.fit(data, "trees", rounds=30)
    >>> float(run.score("test", "accuracy").mean()) > 0.6
    True
    """

    lr: float = setting(
        0.1, "learning rate: share of each leaf's value", above=0, high=1, tune=(0.05, 0.1, 0.2)
    )
    leaves: int = setting(
        16, "most leaves of a tree, as far as the model has room", low=2, high=256, tune=(8, 16, 32)
    )
    lambda_: float | str = setting(
        "auto",
        "pull of leaves to the shared ones: auto (cross-fitted), shared, or a number",
        tune=("auto", "shared"),
    )
    depth: int = setting(6, "most splits on the way to a leaf", low=1)
    bins: int = setting(64, "bins of a feature", low=4, high=256)
    least: float = setting(
        3.0,
        "least sum of second derivatives (rows, for squared loss) in a leaf",
        low=0,
        tune=(1.0, 3.0, 10.0),
    )
    profile: bool = setting(
        False, "splits may tell clients apart by their residual before the first tree", tune=(False, True)
    )
    per_round: int = setting(1, "trees grown in a round (one for each class)", low=1)
    smoothing: float = setting(1.0, "added to the second derivatives of a shared leaf", low=0)
    gain: float = setting(0.0, "least gain of a split", low=0)
    folds: int = setting(5, "parts of a client's rows for cross-fitting lambda", low=2)
    patience: int = setting(
        20, "trees without a lower validation loss after which growth ends; 0: never, and all are used", low=0
    )
    monotone: str = setting(
        "", "columns that may only raise (+) or lower (-) predictions, such as 'age+, dose-'"
    )
    balance: bool = setting(False, "weigh classes inversely to their numbers of rows")

    varying: ClassVar[frozenset[str]] = frozenset({"survey", "histogram"})
    sentinels: ClassVar[frozenset[float]] = frozenset({float(NO_EDGE), SHARED})
    in_units: ClassVar[bool] = True
    row_by_row: ClassVar[bool] = True
    reveals: ClassVar[Reveals] = {
        "tally": "aggregate",
        "survey": "values",
        "histogram": "values",
        "plant": "aggregate",
        "join": "personal",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.lambda_, str) and self.lambda_ not in ("auto", "shared"):
            raise SettingError(f"trees: lambda_ = {self.lambda_!r} is not auto, shared or a number")
        if not isinstance(self.lambda_, str) and self.lambda_ < 0:
            raise SettingError(f"trees: lambda_ = {self.lambda_!r} is below 0")

    def own_model(self, rounds: int) -> Model:
        return Trees(trees=max(1, rounds * self.per_round), leaves=self.leaves)

    def without_stopping(self) -> BoostedTrees:
        return self.replace(patience=0)

    def start(self, fed: Federation) -> State:
        model = self.model_of(fed)
        x, classes = fed.initial_model(), model.classes or 1
        balance = torch.ones(classes, dtype=fed.dtype, device=fed.device)
        replies = fed.map(self.tally)
        if len(replies):
            total = replies.sum()
            share = total[:-1] / total[-1]
            if model.class_weights is not None:
                balance = balance.new_tensor(model.class_weights)
            elif self.balance and classes > 1:
                balance = 1 / (classes * share.clamp(min=1 / total[-1]))
            if classes > 1:
                share = share * balance / (share * balance).sum()
            share = share[1:] if model.task == "binary" else share
            model.parts(x)[0].copy_(model.loss_of.constant(share))
        return State(
            x=x,
            edges=self.edges(fed, model, model.parts(x)[0]).to(fed.device),
            signs=self.signs(fed, model).to(fed.device),
            balance=balance,
            pulls=torch.zeros(model.trees, 2, dtype=fed.dtype, device=fed.device),
            judged=torch.zeros(2 * len(PULLS), dtype=fed.dtype, device=fed.device),
            planted=0,
            best=0,
            lowest=NEVER,
            done=False,
        )

    def round(self, fed: Federation, s: State, t: int) -> State:
        for _ in range(self.per_round):
            s = s if s.done else self.add_trees(fed, s)
        return s

    def add_trees(self, fed: Federation, s: State) -> State:
        """Grow a tree for each score, and let clients give its leaves their values."""
        model = self.model_of(fed)
        grown = self.grow(fed, s, model)
        if grown is None:
            return s
        splits, values, pull = grown.splits.to(fed.device), grown.values().to(s.x), self.pull(s)
        sent = {"splits": splits, "values": values, "signs": s.signs, "root": pull[0], "deep": pull[1]}
        replies = fed.map(self.plant, **sent, place=s.planted)
        x, pulls, at = s.x.clone(), s.pulls.clone(), s.planted
        model.parts(x)[1][at] = model.in_units(splits, s.edges)
        model.parts(x)[2][at] = self.lr * values
        pulls[at] = pulls.new_tensor(pull)
        judged = MEMORY * s.judged + replies.sum("judged") if len(replies) else s.judged
        s = s.replace(x=x, pulls=pulls, judged=judged, planted=at + 1)
        return self.stopped(model, s, replies)

    def grow(self, fed: Federation, s: State, model: Trees) -> Growth | None:
        """Return the trees of this round, grown level by level; None if nobody answered."""
        rules = Rules(self.smoothing, self.least, self.gain, self.categorical(model), s.signs.cpu())
        growth, before = (
            Growth(model.outputs, min(self.leaves, model.leaves), model.leaves, rules),
            torch.zeros(0),
        )
        for level in range(self.depth):
            if not growth.growing:
                break
            splits = growth.splits.to(fed.device)
            replies = fed.map(self.histogram, splits=splits, nodes=growth.asked.to(fed.device))
            if not len(replies):
                return None if level == 0 else growth
            others = None
            if level and not torch.equal(replies.ids, before):  # a difference would be of other clients
                again = fed.map(self.histogram, splits=splits, nodes=growth.others().to(fed.device))
                if not len(again):
                    return growth
                others = again.sum().cpu()
            growth.learn(replies.sum().cpu(), others)
            before = replies.ids
        return growth

    def pull(self, s: State) -> tuple[float, float]:
        """Return lambda of the root and of the nodes below it for the next tree."""
        if self.lambda_ == "auto":
            root, deep = (PULLS[int(part.argmin())] for part in s.judged.chunk(2))
            return (root, deep) if s.planted else (FIRST_PULL, FIRST_PULL)
        given = SHARED if isinstance(self.lambda_, str) else float(self.lambda_)
        return given, given

    def stopped(self, model: Trees, s: State, replies: Replies) -> State:
        """Return the state with the number of trees to deploy, and whether growth ends."""
        full = s.planted >= model.trees
        held, rows = replies.sum("held").tolist() if len(replies) else (0.0, 0.0)
        if not rows or not self.patience:
            return s.replace(best=s.planted if s.lowest == NEVER else s.best, done=full)
        if held / rows < s.lowest:
            return s.replace(best=s.planted, lowest=held / rows, done=full)
        return s.replace(done=full or (self.patience > 0 and s.planted - s.best >= self.patience))

    def categorical(self, model: Trees) -> Tensor:
        """Return which columns of the binned rows are categories: those of the features, then of the profile."""
        return nn.functional.pad(model.categorical, (0, model.outputs * self.profile))

    def edges(self, fed: Federation, model: Trees, base: Tensor) -> Tensor:
        """Return the cut points of the features, from counts on grids that narrow."""
        kinds = self.categorical(model)
        search = GridSearch((~kinds).nonzero().squeeze(-1), self.bins, fed.dtype)
        sent: dict[str, Any] = {"base": base} if self.profile else {}
        for _ in range(GRIDS):
            if not len(search.asked):
                break
            sent |= {"features": search.asked.to(fed.device), "grid": search.grid.to(fed.device)}
            replies = fed.map(self.survey, **sent)
            if not len(replies):
                break
            search.learn(replies.sum())
        return search.edges(len(kinds))

    def tally(self, client: Client) -> Tensor:
        """Return the sums of the targets (of each class) and the number of rows."""
        return target_sums(client)

    def survey(self, client: Client, features: Tensor, grid: Tensor, base: Tensor | None = None) -> Tensor:
        """Return how many rows are in each cell of the grids of some features, [..., features, cells]."""
        features, grid = (for_all(value, client) for value in (features, grid))
        rows, _, weight = client.features(client.initial_model())
        if base is not None:
            rows = with_profile(rows, profile(client, for_all(base, client)))
        return cell_counts(rows[..., features], (weight > 0).to(weight.dtype), grid)

    def begin(
        self,
        client: Client,
        x: Tensor,
        edges: Tensor,
        signs: Tensor,
        balance: Tensor,
        pulls: Tensor,
        planted: int,
    ) -> None:
        """Bin the rows, and take the steps of all trees that are there."""
        model = trees_of(client)
        x, edges, signs, balance, pulls = (
            for_all(value, client) for value in (x, edges, signs, balance, pulls)
        )
        base, splits, shared = model.parts(x)
        everyone, own_way = x.expand(*client.lead, -1), x
        if self.profile:
            mine = profile(client, base)
            own_way = model.along(everyone, mine)
        values = torch.zeros_like(shared).expand(*client.lead, *shared.shape).clone()
        for split, paths in (("train", 1 + self.folds * (self.lambda_ == "auto")), ("validation", 1)):
            rows, target, weight = client.features(everyone, split)
            here = (weight > 0).to(x)
            if split == "train" and model.classes:
                here = here * balance[target.long().clamp(0, model.classes - 1)]
            at = rows if own_way.dim() > 1 else rows.flatten(0, -2)
            found = model.leaf_numbers(own_way, at).view(*target.shape, -1, model.outputs)
            rows = with_profile(rows, mine) if self.profile else rows
            scores = base.expand(*client.lead, paths, target.shape[-1], -1)
            for tree in range(planted):
                leaf = found[..., tree, :]
                if split == "train":
                    step = self.step(
                        model, splits[tree], shared[tree] / self.lr, signs, *pulls[tree].tolist()
                    )
                    own, scores, _ = boost(step, scores, target, here, leaf)
                    values[..., tree, :, :] = self.lr * own
                else:
                    scores = scores + moves(values[..., tree, :, :], leaf).unsqueeze(-3)
            keep_rows(client, split, to_bins(rows, edges, self.categorical(model)), target, here, scores)
        client.keep.values, client.keep.sign = values, random_sign(client)
        if self.profile:
            client.keep.profile = mine

    def histogram(self, client: Client, splits: Tensor, nodes: Tensor) -> Tensor:
        """Return the sums of derivatives by tree, node, feature and bin, [..., trees, nodes, features, bins, 2]."""
        lead, bins = len(client.lead), client.keep.bins
        leaf = self.leaf_of(trees_of(client), bins, for_all(splits, client))
        pairs = client.keep.pairs.double()
        if self.contrasts:
            pairs = torch.cat(
                [pairs, pairs[..., :1] * client.keep.sign.double().view(*client.lead, 1, 1, 1)], -1
            )
        bins, pairs, leaf = (part if lead else part.unsqueeze(0) for part in (bins, pairs, leaf))
        sums = histograms(bins, pairs, leaf, for_all(nodes, client), self.bins)
        return sums if lead else sums.squeeze(0)

    def plant(
        self,
        client: Client,
        splits: Tensor,
        values: Tensor,
        signs: Tensor,
        root: float,
        deep: float,
        place: int,
    ) -> dict[str, Tensor]:
        """Give the leaves of new trees their values and move the scores; return how every lambda would have done."""
        model, keep = trees_of(client), client.keep
        splits, values, signs = (for_all(value, client) for value in (splits, values, signs))
        leaf = self.leaf_of(model, keep.bins, splits).long()
        step = self.step(model, splits, values, signs, root, deep)
        own, scores, judged = boost(step, keep.scores, keep.target, keep.weight, leaf)
        keep.pairs = pairs_of(client, scores.select(-3, 0), keep.target, keep.weight)
        keep.scores, keep.sign = scores, random_sign(client)
        mine = keep.values.clone()
        mine[..., place, :, :] = self.lr * own
        keep.values = mine
        leaf = self.leaf_of(model, keep.held_bins, splits).long()
        held = keep.held_scores + moves(self.lr * own, leaf).unsqueeze(-3)
        keep.held_scores = held
        losses = model.loss_of.loss(held.squeeze(-3), keep.held_target) * keep.held_weight
        rows = torch.stack([losses.sum(-1), keep.held_weight.sum(-1)], -1)
        return {"judged": judged, "held": rows}

    def leaf_of(self, model: Trees, bins: Tensor, splits: Tensor) -> Tensor:
        """Return the leaf of each row in the trees of this round, int32 [..., B, trees]."""
        return leaves_of(bins, splits, self.categorical(model), self.bins - 1)

    def step(
        self, model: Trees, splits: Tensor, values: Tensor, signs: Tensor, root: float, deep: float
    ) -> Step:
        """Return what a client needs to give the leaves of these trees its values."""
        limits = bounds(splits, values, signs)
        return Step(model.loss_of, nodes_of(splits), values, *limits, self.lr, root, deep)

    def deploy(self, client: Client, x: Tensor, best: int) -> Tensor:
        """Return the shared splits with the client's own leaves, of the trees that are deployed."""
        model, mine = trees_of(client), client.keep.values.flatten(-3)
        own = torch.cat([x[..., : x.shape[-1] - mine.shape[-1]], mine], -1)
        return model.first_trees(model.along(own, client.keep.profile) if self.profile else own, best)

    def common(self, fed: Federation, s: State) -> Tensor:
        model = self.model_of(fed)
        return model.first_trees(model.along(s.x) if self.profile else s.x.clone(), s.best)

    def adapt(self, fed: Federation, s: State, personal: Tensor, rounds: int) -> Tensor:
        """Return models of new clients: their own leaves, tree by tree, pulled to the shared ones."""
        names = ("x", "edges", "signs", "balance", "pulls", "planted", "best")
        sent = {name: getattr(s, name) for name in names}
        return fed.fresh().map(self.join, **sent).put(self.common(fed, s).repeat(fed.n, 1))

    def join(
        self,
        client: Client,
        x: Tensor,
        edges: Tensor,
        signs: Tensor,
        balance: Tensor,
        pulls: Tensor,
        planted: int,
        best: int,
    ) -> Tensor:
        """Return the model of a client that comes after training."""
        self.begin(client, x, edges, signs, balance, pulls, planted)
        return self.deploy(client, x, best)

    def observe(self, fed: Federation, s: State) -> dict[str, Tensor]:
        return {"trees": torch.tensor(float(s.best)), "lambda": torch.tensor(self.pull(s))}

    def traffic_of(self, model: Model) -> dict[str, tuple[int, int]]:
        assert isinstance(model, Trees)
        c, features, classes = model.outputs, model.width, model.classes or 1
        tree, most = c * (model.leaves - 1) * COLUMNS, c * max(1, min(self.leaves, model.leaves) // 2)
        features += c * self.profile
        start = model.d + features * (self.bins - 2) + features + classes + 2 * model.trees + 1
        cells = features * (1 + grid_size(self.bins))
        return {
            "tally": (0, classes + 1),
            "survey": (cells + c * self.profile, cells),
            "begin": (start, 0),
            "histogram": (tree + most, most * features * self.bins * (3 if self.contrasts else 2)),
            "plant": (tree + c * model.leaves + features + 3, 2 * len(PULLS) + 2),
            "join": (start + 1, model.d),
        }

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        """Declare the communication for one feature and one tree; `traffic_of` knows the model."""
        return self.traffic_of(Trees(1, self.leaves, "regression", features=1))

    @property
    def contrasts(self) -> bool:
        """True if splits are also chosen for what they tell of differences between clients."""
        return self.lambda_ != "shared"

    def model_of(self, fed: Federation) -> Trees:
        """Return the model of a federation; raise `SettingError` if it is not for this method."""
        model = fed.model
        if not isinstance(model, Trees):
            raise SettingError(
                "the method trees trains trees: pass model=coterie.models.trees() to the federation"
            )
        most = min(MOST_LEVELS, self.bins - 1, 52 if fed.dtype == torch.float64 else 23)
        if max(model.levels or (0,)) > most:
            raise SettingError(
                f"trees: a category has {max(model.levels or ())} levels, and these settings allow {most}; "
                "use more bins, or float64"
            )
        return model

    def signs(self, fed: Federation, model: Trees) -> Tensor:
        """Return 1, -1 or 0 for each feature, as `monotone` says."""
        known = [f"x{k}" for k in range(model.width)]
        names = known if fed.table is None else fed.table.preprocessor.feature_names
        return nn.functional.pad(
            monotone_signs(self.monotone, names, model), (0, model.outputs * self.profile)
        )
