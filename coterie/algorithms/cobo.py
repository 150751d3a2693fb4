"""CoBo: two clients collaborate if their gradients agree."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie._core.errors import NobodyAnswered
from coterie.algorithms.base import Reveals, setting
from coterie.algorithms.learned_links import LearnedLinks
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.optimizers import OPTIMIZERS
from coterie.engine.replies import Replies
from coterie.engine.state import State
from coterie.theory.cluster_quality import cluster_quality, linked_groups
from coterie.theory.collaboration import degrees, weight_quality
from coterie.theory.consensus import consensus_step, recent_links, start_newcomers
from coterie.theory.pooled_tree import FOREIGN
from coterie.theory.sparse_links import observed_links, sparse_consensus

PRINTED: dict[str, Any] = {"test": "midpoint", "scale": "raw", "sampling": "constant"}
USUAL_LR, USUAL_RHO, STIFF_RHO, COMMON_STEPS = 0.05, 1.0, 10.0, 5
HEAVIEST = 4.0  # times the median number of rows: nobody weighs more in a mean


@dataclass(frozen=True)
class CoBo(LearnedLinks):
    """Collaborative learning via bilevel optimization (Hashemi, He, Jaggi: CoBo, 2024).

    min_X sum_i f_i(x_i) + rho/2 sum_{i<j} w_ij |x_i - x_j|^2,   w_ij in argmax_w w <grad f_i(z), grad f_j(z)>

    test = "midpoint", as printed:  pairs {i, j}, with probability p_t:  z = (x_i + x_j)/2,
        w_ij = w_ji <- clip(w_ij + gamma <g_i(z), g_j(z)>/m, 0, 1),   m the running mean of |<g_i, g_j>|
    test = "common":  z = the median model of clients that are linked, directly or through others;  with v_i the noise
        of g_i(z) that i's choice of rows brings,   w_ij = w_ji <- clip(w_ij + gamma e_ij, 0, 1),
        e_ij = 1 or -1: whether i and j are on one side of the clearest cut through {g_i(z)}, or v explains them all;
        w_ij is at most what makes the pull best for clients that differ as much as those of its side do;
        links to begin with are those inside clusters that sums over rows tell apart
    every client:  x_i <- x_i - lr (g_i(x_i) + (rho/s_i) sum_k w_ik (x_i - x_k)),   s_i its rows divided by the mean
        (weighting = "size", the default of "common") or 1

    "auto" is "common" for weights in a box and "midpoint" on the simplex. p_t is rate/n for sampling = "constant",
    t^-power for "time", constant for `switch` rounds and then by time for "mixed", 1 for "all", and min(1, 100/n) for
    "auto". domain = "simplex" projects the rows of W, diagonal included, on the simplex instead of the box. With more
    than 300 clients W is sparse: `neighbours` candidates of each client, from sketches of its gradient. Printed are
    test = "midpoint", scale = "raw", sampling = "constant", guard = 0, and symmetric = False (ordered pairs).

    Examples
    --------
    >>> import torch, coterie
    >>> xs = [torch.ones(4, 1)] * 4
    >>> ys = [torch.tensor([-0.1, 0.1, -0.1, 0.1]) + target for target in (0.0, 0.0, 4.0, 4.0)]
    >>> fed = coterie.Federation.from_arrays(xs, ys, model=coterie.models.linear())
    >>> run = coterie.fit(fed, coterie.algorithms.CoBo(), rounds=10)
    >>> run.state.weights.round(decimals=2).tolist()
    [[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0]]
    """

    lr: float | None = setting(
        None,
        "step size; None: 0.05, or 0.5/L if the model knows its curvature L and that is less",
        above=0,
        tune=(0.01, 0.03, 0.1, 0.3),
    )
    rho: float | None = setting(
        None,
        "strength of the pull between collaborators; None: 10 if implicit, else 1, or less if that is unstable",
        low=0,
        tune=(0.1, 1.0, 10.0),
    )
    guard: float = setting(0.5, "bound on lr rho times the largest degree; 0: no bound", low=0, high=1)
    implicit: bool | None = setting(
        None, "backward Euler for the pull, which is stable for every rho; None: if test = common"
    )
    momentum: float = setting(0.0, "momentum of the gradients; 0.9 in the authors' code", low=0, high=0.999)
    participation: float = setting(1.0, "fraction of the clients sampled per round", above=0, high=1)
    patience: int = setting(10, "rounds for which the last model of an absent client pulls the others", low=0)
    steps: int | None = setting(None, "local steps per round; None: 5 if test = common, else 1", low=1)
    weighting: str = setting(
        "auto",
        "weight clients by their rows (size) or equally (uniform); auto: size if test = common",
        options=("auto", "size", "uniform"),
    )
    optimizer: str = setting("sgd", "optimiser of local steps", options=OPTIMIZERS)
    relays: ClassVar[bool] = True
    pulls: ClassVar[bool] = True
    reveals: ClassVar[Reveals] = LearnedLinks.reveals | {
        "curvature": "aggregate",
        "slope": "personal",
        "descend": "personal",
    }

    def start(self, fed: Federation) -> State:
        lr, rho, curvature = self._steps(fed)
        models = fed.initial_model().repeat(fed.n, 1)
        memory: dict[str, Any] = self.first_links(fed, rho, curvature)
        if self.momentum:
            memory["momentum"] = torch.zeros_like(models)
        if self.weighting == "size" or (self.weighting == "auto" and self.common_point):
            rows = fed.sizes.clamp(max=HEAVIEST * fed.sizes.median())
            if bool((rows != rows[0]).any()):
                memory["lightness"] = (rows.mean() / rows).to(fed.dtype)
        seen = torch.zeros(fed.n, dtype=torch.long, device=fed.device)
        steps = {"lr": lr, "rho": rho, "curvature": curvature}
        return State(models=models, seen=seen, joined=0, size=0.0, **steps, **memory)

    def round(self, fed: Federation, s: State, t: int) -> State:
        ids = self.present(fed, t)
        s = self.learn(fed, s, t, ids)
        r = self.gradients(fed, s, ids)
        return self.stepped(fed, s, t, r)

    def present(self, fed: Federation, t: int) -> Tensor | None:
        """Return the clients asked in round t; None means all."""
        return fed.sample(t, self.participation)

    def gradients(self, fed: Federation, s: State, ids: Tensor | None) -> Replies:
        """Ask the clients `ids` (None: all) for g_i(x_i), summed over their local steps."""
        each = {"x": s.models if ids is None else s.models[ids]}
        if self.length == 1 and self.optimizer == "sgd":
            r = fed.map(self.slope, each=each, to=ids)
        else:
            r = fed.map(self.descend, each=each, lr=s.lr, to=ids)
        if len(r) == 0:
            raise NobodyAnswered("no client answered, so no model moves")
        return r

    @property
    def stiff(self) -> bool:
        """Whether the pull is taken at the new models."""
        return self.common_point if self.implicit is None else self.implicit

    @property
    def length(self) -> int:
        """Return the number of local steps per round."""
        return self.steps or (COMMON_STEPS if self.common_point else 1)

    def slope(self, client: Client, x: Tensor) -> Tensor:
        return client.grad(x)

    def descend(self, client: Client, x: Tensor, lr: float) -> Tensor:
        """Return the sum of the gradients along several local steps from x."""
        return (x - client.sgd(x, lr, self.length)) / lr

    def stepped(self, fed: Federation, s: State, t: int, r: Replies) -> State:
        """Return the state after x_i <- x_i - lr (g_i(x_i) + rho_t sum_k w_ik (x_i - x_k)) of all who answered."""
        everyone = r.ids is fed.everyone
        seen = torch.full_like(s.seen, t) if everyone else s.seen.index_fill(0, r.ids, t)
        joined = fed.n if everyone or s.joined == fed.n else int((seen > 0).sum())
        grads, memory = r.values, {}
        if self.momentum:
            first = (s.seen[r.ids] == 0).unsqueeze(-1).to(grads.dtype)
            grads = torch.lerp(s.momentum[r.ids], grads, first.clamp(min=1 - self.momentum))
            memory = {"momentum": s.momentum.index_copy(0, r.ids, grads)}
        if not everyone:
            grads = torch.zeros_like(s.models).index_copy_(0, r.ids, grads)
        models = self.pulled(s, t, s.models, grads, None if everyone else seen)
        if joined < fed.n and not self.sparse(fed):
            models = start_newcomers(models, s.weights, seen > 0)
        return s.replace(models=models, seen=seen, joined=joined, **memory)

    def pulled(self, s: State, t: int, models: Tensor, grads: Tensor, seen: Tensor | None) -> Tensor:
        """Return models after the step and the pull; `seen` is when each client answered, None if all are here."""
        if "links" in s:
            after = sparse_consensus(models - s.lr * grads, s.links, s.weights, s.lr * self.length * s.rho)
            return after if seen is None else torch.where((seen == t).unsqueeze(-1), after, models)
        links = s.weights if seen is None else recent_links(s.weights, seen, t, self.patience)
        links = links * s.lightness if "lightness" in s else links
        degree = degrees(links)
        return consensus_step(models, grads, links, degree, s.lr, self.prox(s, degree), self.stiff)

    def prox(self, s: State, degree: Tensor) -> Tensor | float:
        """Return lr rho_t of all local steps, which the guard keeps at or below guard / max degree."""
        full: float = s.lr * self.length * s.rho
        if self.stiff or self.guard == 0:
            return full
        return (self.guard / degree.max()).clamp(max=full)

    def deploy(self, client: Client, x: Tensor) -> Tensor:
        return x

    def deploy_inputs(self, fed: Federation, s: State) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {}, {"x": s.models}

    def observe(self, fed: Federation, s: State) -> dict[str, Tensor]:
        if "links" in s:
            return observed_links(s.links, s.weights, fed.clusters, fed.n)
        simplex = self.domain == "simplex"
        level = 0.0 if self.common_point else 0.5 / max(1, fed.n - 1) if simplex else 0.5
        linked = s.weights > level
        return {
            "weights": s.weights,
            "degree": degrees(s.weights),
            **weight_quality(s.weights, fed.clusters, simplex),
            **cluster_quality(linked_groups(linked), fed.clusters),
        }

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"curvature": (0, 1), "slope": (d, d), "descend": (d + 1, d), **self.link_traffic(d)}

    def curvature(self, client: Client) -> Tensor:
        return client.smoothness()

    def _steps(self, fed: Federation) -> tuple[float, float, float]:
        """Return lr and rho, as given or by the rule lr (L + rho lambda_max(Lap W)) < 2, and the usual curvature."""
        guarded = self.stiff or self.guard > 0
        largest, usual_curvature = 0.0, 1.0
        if fed.model.has_hessian and (self.lr is None or self.common_point or not guarded):
            r = fed.map(self.curvature)
            if len(r):
                middle = r.values.median()
                largest = float(r.values[r.values <= FOREIGN * middle].max()) if middle > 0 else 0.0
                usual_curvature = float(middle) / 2
        lr = self.lr or (min(USUAL_LR, 0.5 / largest) if largest > 0 else USUAL_LR)
        spread = fed.n if self.domain == "box" else fed.n / max(1, fed.n - 1)
        safe = max(0.0, 1 / lr - largest) / spread
        usual = STIFF_RHO if self.stiff else USUAL_RHO
        rho = (usual if guarded else min(usual, safe)) if self.rho is None else self.rho
        if not guarded and lr * (largest + rho * spread) >= 2:
            warnings.warn(
                f"cobo: lr (L + rho {spread:.4g}) = {lr * (largest + rho * spread):.3g} with lr = {lr:.3g}, "
                f"rho = {rho:.3g}: from 2 on the step diverges while all clients are linked. Keep the guard "
                f"(guard = 0.5), use implicit = true, or a rho below {max(0.0, 2 / lr - largest) / spread:.3g}.",
                stacklevel=2,
            )
        return lr, rho, usual_curvature
