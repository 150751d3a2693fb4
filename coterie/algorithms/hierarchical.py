"""Hierarchical models for known clusters; the data decide how strongly clients are pulled together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie.algorithms.base import Reveals, setting
from coterie.algorithms.crossed_cells import layout
from coterie.algorithms.crossed_effects import CrossedEffects
from coterie.algorithms.effect_groups import effect_groups, standard_deviations
from coterie.algorithms.finding import Finder
from coterie.algorithms.marginal_effects import QUADRATIC_ROUNDS, MarginalEffects, of_all
from coterie.algorithms.mixture_effects import check_mixture, mixture_round
from coterie.algorithms.quadratics import downhill, log_volume, quadratic, rounded, shortened, weight_of
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.replies import Replies
from coterie.engine.state import State
from coterie.theory.cluster_penalty import Penalty
from coterie.theory.hierarchical import centres, certainty, lift, pseudo_solve, pulled_share, settle, times
from coterie.theory.mixed_likelihood import maximum_likelihood
from coterie.theory.robust import STRANGE, looks_heavy, on_another_scale, without_strangers
from coterie.theory.variance_components import EFFECTS, Components, Sums, moments

CHOICES = ("auto", "ml", "reml", "moments", "validation", "given")
LARGEST = 256  # parameters up to which clients send second derivatives
CHOSEN_ROUNDS = 2  # in which effects = "auto" is decided for such a loss; later sums differ little
ESTIMATED_ROUNDS = 5  # in which the variances of a loss that is not quadratic are estimated anew
LONGEST_STEP = 3.0  # of a centre in a round: a quadratic misleads far away
MOST_NEWTON_STEPS = 50  # of a newcomer; less than ten are usual
GAMMAS = (0.01, 0.1, 1.0, 10.0, 100.0)
LAMBDAS = (0.1, 1.0, 10.0, 100.0)
PAIRS = list(product(GAMMAS, LAMBDAS))


@dataclass(frozen=True)
class Hierarchical(MarginalEffects, CrossedEffects, Finder):
    """Client, cluster and common parameters of a hierarchical model (Lyu, Hanzely, Kolar 2022, section 5).

    min sum_i [n_i f_i(t_i)/sigma^2 + gamma/2 |t_i - w_j|^2] + sum_j lambda/2 |w_j - w|^2

    gamma = 1/s_j^2 and lambda = 1/s0^2 are inverse variances between clients and between clusters, estimated from
    sums over rows by maximum likelihood, or the pair with the lowest validation loss (`choose`). Least squares
    reaches the exact minimiser in one round. Logistic, softmax, Poisson, negative binomial and ordinal models are
    generalised linear mixed models: every client integrates over its effects by adaptive quadrature (Pinheiro and
    Bates 1995) and sends value, gradient and Hessian of its marginal log likelihood, whose sums give Newton steps. With
    more than 16 effects variances are those of the quadratic model (Breslow and Clayton 1993); networks, and models
    with more than 256 parameters, take gradient steps with gamma and lambda as given (tune them). With grouping =
    "one" all clients form one cluster: the random-coefficients model, for clients without known clusters. With
    grouping = "mixture" clusters are unknown, and clients belong to them with probabilities (a finite mixture).

    Examples
    --------
    >>> import torch, coterie
    >>> xs = [torch.ones(3, 1)] * 3
    >>> ys = [torch.tensor([-1.0, 0.0, 1.0]) + mean for mean in (0.0, 1.0, 5.0)]
    >>> fed = coterie.Federation.from_arrays(xs, ys, model=coterie.models.linear())
    >>> run = coterie.fit(fed, coterie.algorithms.Hierarchical(grouping="one"), rounds=1)
    >>> [round(value, 1) for value in run.personal.squeeze().tolist()]
    [0.1, 1.1, 4.8]
    """

    choose: str = setting("auto", "how gamma and lambda are chosen", options=CHOICES)
    effects: str = setting(
        "auto",
        "coefficients that differ, and their variances: one for all, for each, intercept only, intercept and the rest",
        options=("auto", *EFFECTS),
    )
    slopes: str = setting("", "further coefficients that differ with effects = intercept, such as age,2")
    covariance: str = setting(
        "diagonal", "effects of a client are independent, or correlated (full)", options=("diagonal", "full")
    )
    variances: str = setting(
        "shared", "variances of clients are the same in all clusters or not", options=("shared", "cluster")
    )
    noise: str = setting(
        "one",
        "noise variance of least squares: one, per cluster, or per client",
        options=("one", "cluster", "client"),
    )
    gamma: float = setting(
        1.0, "strength of the pull of a client to its cluster (choose = given)", above=0, tune=GAMMAS
    )
    lambda_: float = setting(
        1.0, "strength of the pull of a cluster to the common centre (choose = given)", low=0, tune=LAMBDAS
    )
    tails: str = setting(
        "auto",
        "of least squares: normal, t, or t where a client is too far off; auto leaves out clients in other units",
        options=("auto", "normal", "t"),
    )
    solver: str = setting(
        "auto", "use second derivatives (newton) or gradients", options=("auto", "newton", "gradient")
    )
    lr: float = setting(0.1, "step size of the gradient solver", above=0, tune=(0.03, 0.1, 0.3))
    steps: int = setting(5, "steps per round of the gradient solver", low=1)
    grouping: str = setting(
        "known",
        "known clusters, one of all clients, clusters that are found first, or a mixture of unknown ones",
        options=("known", "one", "found", "mixture"),
    )
    clusters_count: int = setting(
        0, "clusters of grouping = mixture; 0: as many as the evidence asks for", low=0
    )
    row_by_row: ClassVar[bool] = True
    pulls: ClassVar[bool] = True
    reveals: ClassVar[Reveals] = Finder.reveals | {
        "train": "model",
        "curve": "gradient",
        "place": "nothing",
        "judge": "aggregate",
        "contribute": "gradient",
        "follow": "nothing",
        "join": "personal",
        "cells": "values",
        "adjust": "nothing",
        "retreat": "nothing",
        "greet": "personal",
    }
    optional: ClassVar[frozenset[str]] = Finder.optional | {"join", "cells", "adjust", "retreat", "greet"}

    def start(self, fed: Federation) -> State:
        if layout(fed) is not None:
            return self.crossed_start(fed)
        if self.grouping == "mixture":
            check_mixture(self, fed)
        found = self.use_found(fed) if self.grouping == "found" else {}
        k, choice = self.count(fed), self.choice(fed)
        if choice == "validation" and not fed.has_rows("validation"):
            raise SettingError(
                "hierarchical: choose = 'validation' needs validation rows; give a split with some"
            )
        if choice != "given" and not self.newton(fed):
            raise SettingError(
                f"hierarchical: choose = {choice!r} needs second derivatives, which this model does not send; "
                "use choose = 'given' and tune gamma and lambda_"
            )
        x = fed.initial_model()
        spread = torch.zeros(k, fed.d, dtype=fed.dtype, device=fed.device)
        return State(
            x=x, centres=x.repeat(k, 1), within=spread, between=spread[0], noise=1.0, done=False, **found
        )

    def round(self, fed: Federation, s: State, t: int) -> State:
        if s.done:
            return s
        if layout(fed) is not None:
            return self.crossed_round(fed, s)
        if self.grouping == "mixture":
            return mixture_round(self, fed, s, t)
        if "psi" in s:
            return self.marginal_round(fed, s, self.clusters(fed), self.choice(fed) == "reml")
        return self.newton_round(fed, s, t) if self.newton(fed) else self.gradient_round(fed, s)

    def newton_round(self, fed: Federation, s: State, t: int) -> State:
        """Take a Newton step: clients send their quadratic models, block elimination gives the centres."""
        replies = fed.map(self.curve, link=self.link)
        if not len(replies):
            return s
        sums, closed = self.sums(fed, replies), fed.model.has_statistics
        found = Components(s.noise, s.within.double(), s.between.double())
        if t == 1 and not closed and self.tails == "auto":
            odd = on_another_scale(sums.xx.diagonal(dim1=-2, dim2=-1), replies.weights.double())
            if bool(odd.any()):
                s = s.replace(
                    trust=torch.ones_like(fed.sizes).index_copy(0, replies.ids, (~odd).to(fed.dtype))
                )
        if "trust" in s and not closed:
            sums = sums.kept(s.trust[replies.ids] > 0)
        if t == 1 or not s.within.any() or (t <= ESTIMATED_ROUNDS and not closed):
            near = found if s.within.any() else None
            groups = s.groups if t > CHOSEN_ROUNDS and near else effect_groups(self, fed, sums, near)
            rough = t < ESTIMATED_ROUNDS and not closed
            found = self.components(fed, sums, groups, replies.ids, near, rough)
            s = s.replace(groups=groups)
            if self.tails == "t" or (self.tails == "auto" and self.simple(fed) and looks_heavy(sums, found)):
                found, trust, groups = self.robust(fed, sums, groups, found)
                s = s.replace(
                    groups=groups, trust=torch.ones_like(fed.sizes).index_copy(0, replies.ids, trust)
                )
        if "trust" in s:
            sums = replace(sums, trust=s.trust[replies.ids].double())
        noise = found.noise_of()
        a = sums.xx / (noise.unsqueeze(-1) if isinstance(noise, Tensor) else noise)
        b = sums.xy / noise
        spread = found.between.expand(found.within.shape[:2])
        h, g = sums.trusted(*lift(a, b, found.within[sums.clusters]))
        middle, common = centres(h, g, sums.clusters, spread)
        middle, within = middle.to(fed.dtype), found.within.to(fed.dtype)
        if not closed:
            middle = s.centres + shortened(middle - s.centres, LONGEST_STEP)
            common = s.x + shortened(common.to(fed.dtype) - s.x, LONGEST_STEP)
        self.pass_on(fed, down=middle, up=torch.cat([a.flatten(1), b], 1))
        clusters = self.clusters(fed)
        each = {"centre": middle[clusters], "spread": within[clusters].flatten(1)}
        shared: dict[str, Any] = {"noise": found.noise}
        if isinstance(noise, Tensor):
            shared = {}
            each["noise"] = torch.full((fed.n, 1), found.noise).to(noise).index_copy(0, replies.ids, noise)
            s = s.replace(noises=each["noise"])
        placed = fed.map(self.place, each=each, **shared, link=self.link)
        digits = max(1e-9, 4 * torch.finfo(fed.dtype).eps)
        still = bool((middle - s.centres).abs().max() <= digits * (1 + middle.abs().max()))
        settled = closed or (still and t > ESTIMATED_ROUNDS)
        s = s.replace(
            x=common.to(fed.dtype),
            centres=middle,
            within=within,
            between=found.between.to(fed.dtype),
            noise=found.noise,
            shrinkage=of_all(fed, replies, pulled_share(a, found.within[sums.clusters])),
            certainty=certainty(h, sums.clusters, spread).to(fed.dtype),
            done=settled and len(replies) == len(placed) == fed.n,
        )
        likelihood = self.choice(fed) in ("ml", "reml")
        if t >= QUADRATIC_ROUNDS and likelihood and self.integrates(fed, s.groups):
            return s.replace(**self.first_point(fed, s, found, sums))
        return s

    def gradient_round(self, fed: Federation, s: State) -> State:
        """Take gradient steps: clients are pulled to their centres, and the centres minimise the penalty."""
        clusters = self.clusters(fed)
        each = {"centre": s.centres[clusters]}
        replies = fed.map(self.train, each=each, link=self.link)
        if not len(replies):
            return s
        present, place = clusters[replies.ids].unique(return_inverse=True)
        penalty = Penalty.of(place, self.gamma, lambda_=self.lambda_)
        inside, common = penalty.means(replies.values.double())
        middle = s.centres.clone()
        middle[present] = (penalty.alpha * common + (1 - penalty.alpha) * inside).to(fed.dtype)
        self.pass_on(fed, down=middle, up=middle)
        common = middle.mean(0) if self.lambda_ == 0 else common.to(fed.dtype)
        return s.replace(x=common, centres=middle)

    def components(
        self, fed: Federation, sums: Sums, groups: Tensor, ids: Tensor, near: Components | None, rough: bool
    ) -> Components:
        """Return the variances as `choose` says; for losses other than least squares the noise is one."""
        choice, noise = self.choice(fed), None if fed.model.has_statistics else 1.0
        if choice == "given":
            return self.isotropic(fed, self.gamma, self.lambda_)
        if choice == "validation":
            return self.validated(fed, sums)
        if choice == "moments":
            effects = self.effects if self.effects == "intercept" else "same"
            return rounded(moments(sums, effects, noise=noise))
        settings: Any = {"noise": noise, "restricted": choice == "reml", "near": near, "roughly": rough}
        settings |= {"per_cluster": self.variances == "cluster", "full": self.covariance == "full"}
        if self.noise != "one" and noise is None:
            settings["noise_groups"] = sums.clusters if self.noise == "cluster" else torch.arange(len(ids))
        return rounded(maximum_likelihood(sums, groups, **settings))

    def simple(self, fed: Federation) -> bool:
        """Return True if heavy tails can be fitted: least squares by likelihood, with one noise variance."""
        plain = (self.covariance, self.variances, self.noise) == ("diagonal", "shared", "one")
        return plain and fed.model.has_statistics and self.choice(fed) in ("ml", "reml")

    def robust(
        self, fed: Federation, sums: Sums, groups: Tensor, found: Components
    ) -> tuple[Components, Tensor, Tensor]:
        """Return variances under heavy tails, the clients' weights [n, 1], and which variance each coefficient has.

        Clients of weight near 0 have no say in that either.
        """
        if not self.simple(fed):
            raise SettingError(
                "hierarchical: tails = 't' is for least squares with variances by likelihood, and with covariance, "
                "variances and noise as they are by default"
            )
        restricted = self.choice(fed) == "reml"
        better = without_strangers(sums, groups, found, restricted=restricted)
        again = effect_groups(self, fed, sums.kept(better.trust >= STRANGE))
        if not torch.equal(again, groups):
            groups, better = again, without_strangers(sums, again, found, restricted=restricted)
        return rounded(better.components), better.trust.to(fed.dtype), groups

    def validated(self, fed: Federation, sums: Sums) -> Components:
        """Return the variances of the pair (gamma, lambda) with the lowest validation loss after one step."""
        pairs = [self.isotropic(fed, gamma, lambda_) for gamma, lambda_ in PAIRS]
        aims = []
        for pair in pairs:
            spread = pair.between.expand(pair.within.shape)
            aims.append(
                centres(*lift(sums.xx, sums.xy, pair.within[sums.clusters]), sums.clusters, spread)[0]
            )
        each = {"aims": torch.stack(aims, 1).to(fed.dtype)[self.clusters(fed)]}
        replies = fed.map(self.judge, each=each, link=self.link)
        rows = fed.rows["validation"][replies.ids].unsqueeze(-1) if fed.model.reduction == "mean" else 1.0
        losses = (replies.values * rows).sum(0)
        return pairs[int(losses.argmin())] if len(replies) else pairs[0]

    def begin(self, client: Client, x: Tensor) -> None:
        client.keep.model = x

    def curve(self, client: Client) -> Tensor:
        """Return A, b, c of 1/2 t'At - b't + c around the client's model, summed over rows, as one vector."""
        a, b, c = quadratic(client, client.keep.model, weight_of(client))
        return torch.cat([a.flatten(-2), b, c], -1)

    def place(self, client: Client, centre: Tensor, spread: Tensor, noise: Tensor | float) -> None:
        """Move the client's model, given its cluster's centre, by Newton steps that never raise its objective."""
        weight, d = weight_of(client) / noise, centre.shape[-1]
        covariance = spread.unflatten(-1, (d, d)) if spread.shape[-1] > d else spread
        spread = spread if covariance is spread else covariance.diagonal(dim1=-2, dim2=-1)
        x = torch.where(spread > 0, client.keep.model, centre)

        def objective(point: Tensor) -> Tensor:
            away = torch.where(spread > 0, (point - centre).square() / spread.where(spread > 0, 1.0), 0.0)
            return weight * client.loss(point) + 0.5 * away.sum(-1, keepdim=True)

        for _ in range(1 if client.model.has_statistics else 4):
            a, b, _ = quadratic(client, x, weight)
            aim = settle(a, b, centre.double(), covariance.double()).to(x.dtype)
            x = aim if client.model.has_statistics else downhill(objective, x, aim)
        client.keep.model = x

    def judge(self, client: Client, aims: Tensor) -> Tensor:
        """Return the validation loss after one step with each of the centres, [..., pairs]."""
        a, b, _ = quadratic(client, client.keep.model, weight_of(client))
        losses = []
        for aim, (gamma, _) in zip(aims.unbind(-2), PAIRS, strict=True):
            x = settle(a, b, aim.double(), torch.full_like(b[..., :1], 1 / gamma))
            losses.append(client.loss(x.to(aim.dtype), "validation"))
        return torch.cat(losses, -1)

    def train(self, client: Client, centre: Tensor) -> Tensor:
        """Take steps that are explicit in the mean loss and implicit in the pull, which cannot overshoot."""
        x, centre = client.along_rows(self.steps, client.keep.model, centre)
        scale = weight_of(client) / client.size
        pace = self.lr * self.gamma / client.size
        for _ in range(self.steps):
            x = (x - self.lr * scale * client.grad(x) + pace * centre) / (1 + pace)
        client.keep.model = x
        return x

    def deploy(self, client: Client) -> Tensor:
        return client.keep.model

    def adapt(self, fed: Federation, s: State, personal: Tensor, rounds: int) -> Tensor | None:
        """Return models of new clients: the posterior mean (mode, for classes) given variances and centres.

        A new client's t varies by s_j^2 around w_j, which is itself uncertain: its prior is normal around the estimated
        centre with precision Q = lift(certainty of w_j, s_j^2). It joins the cluster under which its rows are most
        likely. None with the gradient solver, which estimates no variances.
        """
        if "client_groups" in s:
            return self.crossed_adapt(fed, s)
        if "certainty" not in s or not self.newton(fed):
            return None
        fed, (k, d), found = fed.fresh(), s.centres.shape, []
        prior, _ = lift(s.certainty.double(), torch.zeros(k, d, dtype=torch.float64), s.within.double())
        nothing_known = torch.cat([s.x, s.x.new_full((1,), -torch.inf)]).expand(fed.n, -1)
        for centre, q in zip(s.centres, prior.flatten(-2).to(fed.dtype), strict=True):
            each = {"centre": centre.expand(fed.n, -1), "prior": q.expand(fed.n, -1)}
            found.append(fed.map(self.join, each=each, noise=s.noise).put(nothing_known))
        joined = torch.stack(found, 1)
        if "shares" in s:
            joined[..., -1] += s.shares.log().to(joined)
        return joined[torch.arange(fed.n), joined[..., -1].argmax(1), :-1]

    def join(self, client: Client, centre: Tensor, prior: Tensor, noise: float) -> Tensor:
        """Return the model under a normal prior, and the log-likelihood of the rows up to a constant.

        n f(t)/sigma^2 + (t - w)'Q(t - w)/2 at its minimum, and half the log-determinant of I + Q^-1 A (Laplace).
        """
        weight, x, closed = weight_of(client) / noise, centre, client.model.has_statistics
        q, middle = prior.unflatten(-1, (centre.shape[-1], -1)).double(), centre.double()

        def objective(point: Tensor) -> Tensor:
            away = point.double() - middle
            return weight * client.loss(point) + 0.5 * (away * times(q, away)).sum(-1, keepdim=True).to(
                x.dtype
            )

        for _ in range(1 if closed else MOST_NEWTON_STEPS):
            a, b, _ = quadratic(client, x, weight)
            aim = (middle + pseudo_solve(a + q, b - times(a, middle))).to(x.dtype)
            before, x = x, aim if closed else downhill(objective, x, aim)
            if torch.equal(x, before):
                break
        a, _, _ = quadratic(client, x, weight)
        volume = log_volume(a + q) - log_volume(q)
        return torch.cat([x, -objective(x) - 0.5 * volume.to(x.dtype)], -1)

    def observe(self, fed: Federation, s: State) -> dict[str, Tensor]:
        if layout(fed) is not None:
            return self.crossed_sds(fed, s)
        trust = {"weight": s.trust.squeeze(-1)} if "trust" in s else {}
        trust |= {"shrinkage": s.shrinkage} if "shrinkage" in s else {}
        if "membership" in s:
            surest = s.membership.max(-1)
            trust |= {"cluster": surest.indices.to(s.x), "membership": surest.values}
        if "groups" in s and self.choice(fed) != "given":
            trust |= standard_deviations(fed, s)
        return {"within": s.within, "between": s.between, **trust}

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        newton = {"curve": (0, d * d + d + 1), "place": (2 * d + 1, 0), "judge": (len(PAIRS) * d, len(PAIRS))}
        # of a random intercept; p numbers instead of one for p variances
        more = {"contribute": (3 * d + 1, (d + 2) * (d + 3) // 2), "follow": (3 * d + 1, 0)}
        return {"begin": (d, 0), "train": (d, d), **newton, **more, **self.finding_traffic(d)}

    def plain(self, fed: Federation) -> Hierarchical:
        """Return the method without settings of the other solver, and without penalties where data choose them."""
        crossed = layout(fed) is not None
        unused = ["lr", "steps"] if crossed or self.newton(fed) else []
        unused += ["gamma", "lambda_"] if crossed or self.choice(fed) != "given" else []
        usual = Hierarchical()
        return self.replace(**{name: getattr(usual, name) for name in unused})

    def newton(self, fed: Federation) -> bool:
        """Return True if clients send second derivatives."""
        able = fed.model.has_hessian
        if self.solver == "newton" and not able:
            raise SettingError("hierarchical: this model has no second derivatives; use solver = 'gradient'")
        return self.solver == "newton" or (self.solver == "auto" and able and fed.d <= LARGEST)

    def choice(self, fed: Federation) -> str:
        """Return how gamma and lambda are chosen on this federation.

        Plain likelihood fits the centre to a client whose rows say far more than those of the others (features in other
        units), and then finds no differences; the restricted one integrates over the centre.
        """
        if self.choose != "auto" or not self.newton(fed):
            return "given" if self.choose == "auto" else self.choose
        return "ml" if fed.model.has_statistics or self.grouping == "mixture" else "reml"

    def clusters(self, fed: Federation) -> Tensor:
        """Return the cluster of every client, [n]."""
        if self.grouping in ("one", "mixture"):
            return torch.zeros_like(fed.everyone)
        return fed.known_clusters(f"{self.name} with grouping = 'known'")

    def count(self, fed: Federation) -> int:
        return int(self.clusters(fed).max()) + 1

    @property
    def link(self) -> str:
        """Link of the clients: to the heads of their clusters, or to the server if there is one cluster."""
        return "client-server" if self.grouping in ("one", "mixture") else "client-cluster"

    def pass_on(self, fed: Federation, down: Tensor, up: Tensor) -> None:
        """Count what the heads of clusters exchange with the server."""
        if self.grouping != "one":
            fed.exchange("centres", "cluster-server", down=down, up=up)

    def isotropic(self, fed: Federation, gamma: float, lambda_: float) -> Components:
        """Return the variances 1/gamma and 1/lambda."""
        within = torch.full((self.count(fed), fed.d), 1 / gamma, dtype=torch.float64, device=fed.device)
        between = torch.full_like(within[0], 1 / lambda_ if lambda_ > 0 else torch.inf)
        return Components(1.0, within, between)

    def sums(self, fed: Federation, replies: Replies) -> Sums:
        """Return what clients sent as the sums of a linear model."""
        d, values = fed.d, replies.values.double()
        a, b, c = values[:, : d * d].unflatten(-1, (d, d)), values[:, d * d : -1], values[:, -1:]
        clusters, count = self.clusters(fed)[replies.ids], self.count(fed)
        if fed.model.has_statistics:
            return Sums(a, b, 2 * c, replies.weights.double(), clusters, count)
        return Sums(a, b, torch.zeros_like(c), torch.zeros_like(c), clusters, count)
