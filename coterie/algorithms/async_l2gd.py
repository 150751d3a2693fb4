"""Async-L2GD: personal models in known clusters that communicate at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie.algorithms.base import Reveals, setting
from coterie.algorithms.finding import Finder
from coterie.engine import fast_forward
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.ledger import Traffic, weigh
from coterie.engine.phase_output import all_finite
from coterie.engine.state import State
from coterie.theory.cluster_penalty import Penalty
from coterie.theory.coins import Coins, count_rounds
from coterie.theory.groups import Groups, group_sum

PerCluster = float | tuple[float, ...]
HEADS = "client-cluster"  # the link between clients and the head of their cluster


@dataclass(frozen=True)
class AsyncL2GD(Finder):
    """Personal models pulled to their cluster's mean and to the common one (Lyu, Hanzely, Kolar 2022, Algorithm 1).

    min sum_i f_i(t_i) + gamma_i/2 [(1-alpha_j) |t_i - m_j|^2 + alpha_j |t_i - m|^2],   alpha_j = lambda/(lambda + G_j)

    with probability p0:       t_i <- t_i - lr gamma_i/p0 [alpha_j (t_i - m) + tau_j (1-alpha_j) (t_i - m_j)]
    else, in cluster j, p_j:   t_i <- t_i - lr gamma_i (1-tau_j)(1-alpha_j)/((1-p0) p_j) (t_i - m_j)
                  otherwise:   t_i <- t_i - lr/((1-p0)(1-p_j)) grad f_i(t_i)

    coins = "one" is the variant of the paper's experiments: p_j = 0, tau_j = 1. Local steps are taken when a client is
    next called, so that a round without communication calls no client. gamma, alpha, lambda_, p and tau may be one
    number or a list with one per cluster, gamma also one per client. lr times a pull above 2 diverges and is refused.
    """

    lr: float = setting(0.05, "step size", above=0, tune=(0.003, 0.01, 0.03, 0.1))
    gamma: float | tuple[float, ...] = setting(
        1.0,
        "strength of the pull of a client to the centres (one, per cluster, or per client)",
        above=0,
        tune=(0.1, 0.3, 1.0, 3.0),
    )
    lambda_: float | tuple[float, ...] = setting(
        1.0, "strength of the pull of a cluster's centre to the common one", low=0
    )
    alpha: float | tuple[float, ...] | None = setting(
        None, "weight of the common centre, instead of lambda_", low=0, high=1
    )
    p0: float = setting(0.2, "probability that all clusters communicate", low=0, high=1)
    p: float | tuple[float, ...] = setting(
        0.3, "probability that a cluster communicates if not all do", low=0, high=1
    )
    tau: float | tuple[float, ...] | None = setting(
        None, "share of the pull to the cluster when all communicate; None: from theory", low=0, high=1
    )
    coins: str = setting(
        "independent", "one coin for each cluster, or one for all", options=("independent", "one")
    )
    clusters: str = setting("known", "use the known clusters, or find them first", options=("known", "found"))
    batch: int = setting(0, "rows per stochastic gradient; 0 means all rows", low=0, kw_only=True)

    theory_example: ClassVar[dict[str, Any]] = {"lambda_": 1.0, "gamma": 1.0}
    pulls: ClassVar[bool] = True
    reveals: ClassVar[Reveals] = Finder.reveals | {
        "measure": "aggregate",
        "share": "personal",
        "pull_all": "nothing",
        "pull_inside": "nothing",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.p0 == 1:
            raise SettingError(
                f"{self.name}: p0 = 1; it must be below 1, or no client ever looks at its own data"
            )

    @classmethod
    def from_theory(
        cls,
        fed: Federation,
        *,
        gamma: PerCluster = 1.0,
        lambda_: PerCluster | None = None,
        alpha: PerCluster | None = None,
        **settings: Any,
    ) -> Self:
        """Return the algorithm with p0, p_j, tau_j and lr from the losses' smoothness (Corollary 3.6).

        Parameters
        ----------
        fed
            The federation.
        gamma
            Strength of the pull of a client to the centres, one number or one per cluster.
        lambda_
            Strength of the pull of a cluster's centre to the common one.
        alpha
            Weight of the common centre, instead of `lambda_`.
        **settings
            Other hyperparameters.

        Returns
        -------
        AsyncL2GD
            The algorithm.
        """
        draft = cls(gamma=gamma, alpha=alpha, lambda_=1.0 if lambda_ is None else lambda_, **settings)
        if draft.clusters == "found":
            fed = fed.fresh(dropout=0.0)
            draft.use_found(fed)
        penalty, smoothness = draft.penalty(fed), draft.constants(fed)["smoothness"]
        coins = (Coins.best_one if draft.coins == "one" else Coins.best)(penalty, smoothness)
        chosen = {"p0": coins.p0, "p": float(coins.p[0]), "lr": 0.5 / coins.smoothness(penalty, smoothness)}
        return cls(**{**draft.settings(), "tau": None, **chosen})

    def start(self, fed: Federation) -> State:
        found = self.use_found(fed) if self.clusters == "found" else {}
        penalty = self.penalty(fed)
        coins = self.chances(penalty)
        pulls = [coins.far(penalty), coins.near(penalty), coins.inside(penalty)]
        self.check_step(float(torch.maximum(pulls[0] + pulls[1], pulls[2]).max()))
        weight = penalty.gamma * penalty.alpha[penalty.clusters]
        return State(
            pulls=torch.cat(pulls, -1).to(fed.dtype),
            weights=torch.cat([penalty.gamma, weight], -1).to(fed.dtype),
            alpha=penalty.alpha.to(fed.dtype),
            rate=coins.alone.to(fed.dtype)[penalty.clusters],
            steps=torch.zeros(len(coins.p), 1, dtype=fed.dtype, device=fed.device),
            rounds_global=0,
            rounds_within=0,
            **found,
        )

    def check_step(self, pull: float) -> None:
        """Raise an error if a step to a centre would overshoot by more than the distance, and so diverge."""
        if self.lr * pull > 2:
            raise SettingError(
                f"{self.name}: lr = {self.lr:g} is too large for these pulls: a model would jump {self.lr * pull:.3g} "
                f"times its distance to the centre, and diverge. Take lr below {2 / pull:.2g}, a smaller gamma, larger "
                "p0 and p, or the numbers of the theory (--set theory=true, `from_theory`)"
            )

    def round(self, fed: Federation, s: State, t: int) -> State:
        everyone, inside = self.toss(fed, t, len(s.steps))
        if everyone:
            self.communicate(fed, s, None)
            return s.replace(rounds_global=s.rounds_global + 1)
        if not any(inside):
            return s.replace(steps=s.steps + 1)
        talking = torch.tensor(inside, device=fed.device)
        self.communicate(fed, s, talking[fed.known_clusters()].nonzero().squeeze(-1))
        alone = s.steps + (~talking).unsqueeze(-1).to(s.steps)
        return s.replace(steps=alone, rounds_within=s.rounds_within + sum(inside))

    def toss(self, fed: Federation, t: int, clusters: int) -> tuple[bool, list[bool]]:
        """Toss the coins of round t: return whether all clusters communicate, and otherwise which do."""
        if fed.coin("everyone", t) < self.p0:
            return True, []
        if self.coins == "one" or self.p == 0:
            return False, []
        chance = self.p if isinstance(self.p, tuple) else (self.p,) * clusters
        return False, [fed.coin("inside", t, j) < chance[j] for j in range(clusters)]

    def communicate(self, fed: Federation, s: State, to: Tensor | None) -> None:
        """Collect models, send back the means, and move models towards them; `to` None means all clusters."""
        replies = fed.map(self.share, to=to, each=self._pace(fed, s, to), link=HEADS)
        if not len(replies):
            return
        ids = None if len(replies) == fed.n else replies.ids
        clusters, pulls = _rows(fed.known_clusters(), ids), _rows(s.pulls, ids)
        common, inside = self.means(
            replies.values, Groups(clusters, len(s.steps)), self.weights(s, clusters, ids)
        )
        if to is None:
            self.exchange(fed, inside)
            each = {"inside": inside[clusters], "pulls": pulls[:, :2]}
            fed.map(self.pull_all, to=ids, each=each, common=common, link=HEADS)
        else:
            each = {"inside": inside[clusters], "pull": pulls[:, 2:]}
            fed.map(self.pull_inside, to=ids, each=each, link=HEADS)

    def fast_forward(self, fed: Federation, s: State, after: int, until: int) -> tuple[State, int]:
        """Run rounds of one coin with all clients as one stack; half as many if numbers overflow."""
        plain = self.coins == "one" and not self.per_client(len(s.steps))
        client = fast_forward.stack(fed, self) if plain and until > after + 1 else None
        if client is None:
            return s, after
        clusters, k, talks = fed.known_clusters(), len(s.steps), []
        owed = s.steps[clusters] - client.keep.done
        alone = int(owed.min())
        if alone < int(owed.max()):
            return s, after
        descend, weights = client.descent(self.lr * s.rate), self.weights(s, clusters, None)
        groups, pulls = Groups(clusters, k), s.pulls.new_zeros(k, 3).index_copy_(0, clusters, s.pulls)
        own, far, near = self.shares(pulls)
        tossed = fed.coins("everyone", after + 1, until).tolist()
        with torch.inference_mode(fed.model.closed_form):  # calls of torch take a sixth less time
            x, other = client.keep.model.clone(), torch.empty_like(client.keep.model)
            for t, coin in enumerate(tossed, after + 1):
                if coin >= self.p0:
                    alone += 1
                    continue
                if alone:
                    x, other, alone = descend(x, alone, out=other), x, 0
                common, inside = self.means(x, groups, weights)
                x, other = groups.blend(self.aim(common, inside, far, near), own, x, out=other), x
                talks.append(t)
        if not all_finite([x]):
            return self.fast_forward(fed, s, after, (after + until) // 2)
        steps = s.steps + (until - after - len(talks))
        if talks:
            client.keep.model, client.keep.done = x.clone(), (steps - alone)[clusters]
            heads = Traffic("means", "cluster-server", weigh(inside), weigh(inside))
            share, pull = (
                fast_forward.declared_traffic(fed, self, phase, HEADS) for phase in ("share", "pull_all")
            )
            fast_forward.commit(fed, client, talks, (share, heads, pull))
        return s.replace(steps=steps, rounds_global=s.rounds_global + len(talks)), until

    def weights(self, s: State, clusters: Tensor, ids: Tensor | None) -> tuple[Tensor, ...]:
        """Return the weights of a client in its cluster's mean, [k, 1], and of clusters in the common one, [k].

        Where gamma differs inside clusters, gamma_i [n, 1] follows: the weight of client i is the first times it.
        """
        gamma = _rows(s.weights, ids)[:, :1]
        count = group_sum(torch.ones_like(gamma), clusters, len(s.steps))
        sums = group_sum(gamma, clusters, len(s.steps))
        prox, tiny = s.alpha * sums, torch.finfo(gamma.dtype).tiny
        above = (prox / prox.sum().clamp_(min=tiny)).squeeze(-1)
        if self.per_client(len(s.steps)):
            return 1 / sums.clamp_(min=tiny), above, gamma
        return 1 / count.clamp_(min=1), above

    def per_client(self, clusters: int) -> bool:
        """Return True if gamma has a number for each client."""
        return isinstance(self.gamma, tuple) and len(self.gamma) != clusters

    def means(self, models: Tensor, groups: Groups, weights: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return the common mean [d] and those of the clusters [k, d]."""
        inside = groups.sum(models if len(weights) == 2 else weights[2] * models).mul_(weights[0])
        return weights[1] @ inside, inside

    def exchange(self, fed: Federation, inside: Tensor) -> None:
        """Count what cluster heads and server exchange: a mean up and the common one down for each head."""
        fed.exchange("means", "cluster-server", down=inside, up=inside)

    def begin(self, client: Client) -> None:
        client.keep.model = client.initial_model()
        client.keep.done = torch.zeros_like(client.size)

    def share(self, client: Client, steps: Tensor, rate: Tensor) -> Tensor:
        client.keep.model = self._catch_up(client, steps, rate)
        client.keep.done = steps
        return client.keep.model

    def _catch_up(self, client: Client, steps: Tensor, rate: Tensor) -> Tensor:
        """Take the local steps due since the last call."""
        x, owed, pace = client.keep.model, steps - client.keep.done, self.lr * rate
        common = int(owed.min())
        x = client.descent(pace)(x, common)
        for k in range(common, int(owed.max())):
            x = torch.where(k < owed, torch.addcmul(x, pace, client.grad(x), value=-1), x)
            if not torch.where(k < owed, x.isfinite(), False).any():
                break
        return x

    def pull_all(self, client: Client, common: Tensor, inside: Tensor, pulls: Tensor) -> None:
        own, far, near = self.shares(pulls)
        client.keep.model = torch.addcmul(self.aim(common, inside, far, near), own, client.keep.model)

    def shares(self, pulls: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the shares of the own model, the common mean and the cluster's mean, [..., 1]."""
        far, near = self.lr * pulls[..., :1], self.lr * pulls[..., 1:2]
        return 1 - far - near, far, near

    @staticmethod
    def aim(common: Tensor, inside: Tensor, far: Tensor, near: Tensor) -> Tensor:
        """Return what the means add to the model when all communicate."""
        return torch.addcmul(far * common, near, inside)

    def pull_inside(self, client: Client, inside: Tensor, pull: Tensor) -> None:
        x = client.keep.model
        client.keep.model = x - self.lr * pull * (x - inside)

    def deploy(self, client: Client, steps: Tensor, rate: Tensor) -> Tensor:
        return self._catch_up(client, steps, rate)

    def deploy_inputs(self, fed: Federation, s: State) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {}, self._pace(fed, s, None)

    def allowed_steps(self, fed: Federation, curvature: float) -> dict[str, float]:
        """Return the step size of Corollary 3.6, which falls with the pulls."""
        penalty = self.penalty(fed)
        return {"lr": 0.5 / self.chances(penalty).smoothness(penalty, curvature)}

    def observe(self, fed: Federation, s: State) -> dict[str, Tensor]:
        counts = {"rounds_global": s.rounds_global, "rounds_within": s.rounds_within}
        return {name: torch.tensor(float(value)) for name, value in counts.items()}

    def measure(self, client: Client) -> dict[str, Tensor]:
        return {"smoothness": client.smoothness(), "convexity": client.convexity()}

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        pulls = {"pull_all": (2 * d + 2, 0), "pull_inside": (d + 1, 0)}
        return {"begin": (0, 0), "measure": (0, 2), "share": (2, d), **pulls, **self.finding_traffic(d)}

    def penalty(self, fed: Federation) -> Penalty:
        """Return the objective's penalty on these clients."""
        clusters = fed.known_clusters()
        gamma: float | Tensor | tuple[float, ...] = self.gamma
        if isinstance(gamma, tuple):
            k = int(clusters.max()) + 1
            if len(gamma) not in (k, fed.n):
                raise SettingError(
                    f"{self.name}: gamma has {len(gamma)} numbers for {k} clusters and {fed.n} clients"
                )
            each = torch.tensor(gamma, dtype=torch.float64, device=clusters.device)
            gamma = each[clusters] if len(gamma) == k else each
        if self.alpha is not None:
            return Penalty.of(clusters, gamma, alpha=self.alpha)
        return Penalty.of(clusters, gamma, lambda_=self.lambda_)

    def chances(self, penalty: Penalty) -> Coins:
        """Return the coins' probabilities, checked."""
        if self.coins == "one":
            return Coins.of(penalty, self.p0, 0.0)
        return Coins.of(penalty, self.p0, self.p, self.tau)

    def constants(self, fed: Federation) -> dict[str, float]:
        """Return the largest smoothness and the smallest convexity of the clients' losses."""
        replies = fed.fresh(dropout=0.0).map(self.measure)
        return {
            "smoothness": float(replies["smoothness"].max()),
            "convexity": float(replies["convexity"].min()),
        }

    def counts(self, fed: Federation, rounds: int, cluster: int = 0) -> dict[str, int]:
        """Count the rounds of communication of a cluster among the first `rounds`, raw and as the paper does."""
        k = int(fed.known_clusters().max()) + 1
        tossed = [self.toss(fed, t, k) for t in range(1, rounds + 1)]
        everyone = torch.tensor([one for one, _ in tossed])
        inside = torch.tensor([bool(some) and some[cluster] for _, some in tossed])
        return count_rounds(everyone, inside)

    def _pace(self, fed: Federation, s: State, to: Tensor | None) -> dict[str, Tensor]:
        return {"steps": s.steps[_rows(fed.known_clusters(), to)], "rate": _rows(s.rate, to)}


def _rows(values: Tensor, ids: Tensor | None) -> Tensor:
    return values if ids is None else values[ids]
