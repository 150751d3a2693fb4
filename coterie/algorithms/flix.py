"""FLIX: each client deploys an explicit mixture of a shared model and its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie.algorithms.base import Algorithm, Reveals, setting
from coterie.algorithms.flix_certificate import curvature_near, worth_asking
from coterie.algorithms.mixing import Alpha, best_alpha, local_minimiser, read_alpha
from coterie.engine.client import Client
from coterie.engine.compressors import compressor
from coterie.engine.federation import Federation
from coterie.engine.replies import Replies
from coterie.engine.state import State
from coterie.models.base import norm
from coterie.theory import flix_rates, flix_rounds, flix_steps
from coterie.theory.flix import Mixture

FULL = ("dgd", "dcgd", "diana", "ef21", "scaffnew")  # all rows in a gradient, and a step size from theory
SHIFTED = ("diana", "ef21")  # solvers that send the compressed change of what the server knows
CHOICES = 64  # last visit at which alpha = "auto" chooses
UNKNOWN = -1.0  # curvature of a client that has not sent it
GROWTH = 1e6  # growth of the gradient since the first round that counts as divergence


@dataclass(frozen=True)
class FLIX(Algorithm):
    """Explicit mixtures of a shared and a local model (Gasanov, Khaled, Horvath, Richtarik, AISTATS 2022).

    x_i = argmin f_i, computed locally;   T_i(x) = alpha_i x + (1 - alpha_i) x_i;   minimise f~(x) = mean_i f_i(T_i(x))
    G_i = alpha_i grad f_i(T_i(x)), and x <- x - lr g with
    dgd: g = mean G_i;   dcgd: g = mean C(G_i);   diana: D_i = C(G_i - h_i), g = h + mean D_i, h_i += beta D_i
    ef21: as diana with beta = 1, for compressors that are biased (Richtarik, Sokolov, Fatkhullin, NeurIPS 2021)
    scaffnew: x_i <- x_i - lr (G_i(x_i) - h_i) until a coin ends the round, then x = mean x_i, h_i += chance/lr
    (x - x_i), x_i <- x (Mishchenko, Malinovsky, Stich, Richtarik, ICML 2022)
    one-shot: x = sum_i w_i x_i, w_i ~ alpha_i^2 L_i (networks: its square), in one round
    sgd, adam: G_i of a minibatch, sampled clients

    alpha = 0 is training alone and sends nothing, alpha = 1 is gradient descent on the average risk. `alpha` is a
    number, one per client, or "auto": each client takes the mixture with the lowest error on its validation rows,
    chooses again at its visits 1, 2, 4, ..., 64, and reports its choice. Local models never leave the clients, except
    for the average of `one-shot` and `start_at="average"`. lr = 0 takes the step size of theory from the clients'
    smoothness. Deviation: the means are over clients that answered.

    Examples
    --------
    >>> import torch, coterie
    >>> xs, ys = [torch.ones(1, 1), torch.ones(1, 1)], [torch.zeros(1), 4 * torch.ones(1)]
    >>> fed = coterie.Federation.from_arrays(xs, ys, model=coterie.models.linear())
    >>> run = coterie.fit(fed, coterie.algorithms.FLIX(alpha=0.5), rounds=20)
    >>> run.personal.squeeze().round(decimals=2).tolist()
    [1.0, 3.0]
    """

    alpha: float | str | tuple[float, ...] = setting(
        0.5,
        "weight of the shared model in the mixture: a number, one per client, or 'auto'",
        low=0,
        high=1,
        tune=(0.1, 0.3, 0.5, 0.7, 0.9),
    )
    solver: str = setting(
        "dgd",
        "solver of the shared model",
        options=("one-shot", "dgd", "dcgd", "diana", "ef21", "scaffnew", "sgd", "adam"),
    )
    compressor: str = setting(
        "identity",
        "compressor of the clients' messages: rand-K, natural, qsgd-S, ..., for ef21 top-K or sign (not for dgd)",
    )
    lr: float = setting(0.0, "step size; 0 takes it from theory (not for sgd and adam)", low=0)
    start_at: str = setting(
        "initial",
        "first x: the model's initial point, or the one-shot average",
        options=("initial", "average"),
    )
    shift: str = setting(
        "gradient", "first h_i of diana and ef21: G_i, sent once, or zero", options=("gradient", "zero")
    )
    chance: float = setting(
        0.0, "scaffnew: chance that a local step ends the round; 0 takes it from theory", low=0, high=1
    )
    average: bool = setting(False, "deploy the mean of all x instead of the last one")
    local: str = setting(
        "exact", "how local models are computed: by the model's solver, or SGD", options=("exact", "sgd")
    )
    local_tol: float = setting(1e-6, "gradient norm at which the local solver stops", above=0)
    local_lr: float = setting(0.1, "step size of local SGD", above=0)
    local_steps: int = setting(1000, "maximal steps of local SGD", low=1)
    participation: float = setting(1.0, "fraction of the clients sampled per round", above=0, high=1)

    theory_example: ClassVar[dict[str, Any]] = {"alpha": 0.6, "solver": "diana", "compressor": "rand-2"}
    reveals: ClassVar[Reveals] = {
        "constants": "aggregate",
        "local_model": "personal",
        "rest": "nothing",
        "slope": "gradient",
        "curvature": "aggregate",
        "shifts": "gradient",
        "shifted_slope": "gradient",
        "descend": "model",
        "settle": "nothing",
    }

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", read_alpha(self.alpha))
        super().__post_init__()
        one = compressor(self.compressor)
        if self.solver == "ef21" and one.remembers:
            one = compressor(f"{one}-plain")  # its shifts are the memory
        object.__setattr__(self, "compressor", str(one))
        if self.solver in ("dgd", "one-shot", "scaffnew") and self.compressor != "identity":
            raise SettingError(f"flix: {self.solver} sends whole vectors; use dcgd, diana or ef21 with {one}")
        if not one.unbiased and (self.solver == "diana" or (self.solver == "dcgd" and self.lr == 0)):
            raise SettingError(f"flix: {one} is biased; use ef21, dcgd with lr > 0, or rand-K")
        if self.solver == "ef21" and one.unbiased and self.compressor != "identity":
            raise SettingError(f"flix: ef21 needs a contraction, top-K or sign; use diana with {one}")
        if self.solver == "scaffnew" and (self.alpha == "auto" or self.participation < 1 or self.average):
            raise SettingError(
                "flix: scaffnew needs a given alpha, all clients in every round, and its last x"
            )
        if self.solver in ("sgd", "adam") and self.lr == 0:
            raise SettingError(f"flix: {self.solver} has no step size from theory; set lr")
        if self.solver == "one-shot" and self.alpha == "auto":
            raise SettingError("flix: one-shot weighs clients by alpha before it is chosen; give a number")

    @classmethod
    def from_theory(
        cls,
        fed: Federation,
        alpha: Alpha = 0.5,
        solver: str = "dgd",
        compressor: str = "identity",
        rounds: int | None = None,
        **settings: Any,
    ) -> FLIX:
        """Return FLIX with the step size of theory, for which each client is asked for L_i and mu_i.

        Without strong convexity DCGD and DIANA take a quarter of it and deploy the mean of the iterates. Networks get
        the steps for losses that are not convex, from an estimate of their smoothness.

        Parameters
        ----------
        fed
            The federation.
        alpha
            Weight of the shared model: a number, one per client, or "auto".
        solver
            Solver of the shared model.
        compressor
            Compressor of the clients' messages.
        rounds
            Rounds that will be taken, if they are known: DCGD takes shorter steps for more of them on networks.
        **settings
            Other hyperparameters.

        Returns
        -------
        FLIX
            The algorithm.

        Examples
        --------
        >>> import torch, coterie
        >>> xs, ys = [torch.ones(1, 1), torch.ones(1, 1)], [torch.zeros(1), 4 * torch.ones(1)]
        >>> fed = coterie.Federation.from_arrays(xs, ys, model=coterie.models.linear())
        >>> coterie.algorithms.FLIX.from_theory(fed, alpha=0.5).lr
        4.0
        """
        asked = cls(alpha=alpha, solver=solver, compressor=compressor, **settings)
        if solver not in FULL or asked.alpha == "auto":
            return asked
        mixture = asked.mixture(fed)
        lr = asked._theory_step(fed, mixture, rounds)
        if solver == "scaffnew":
            return asked.replace(lr=lr, chance=asked.chance or flix_steps.scaffnew_chance(mixture))
        if mixture.mu <= 0 and solver in ("dcgd", "diana") and fed.model.convex:
            return asked.replace(lr=lr / 4, average=True)
        return asked.replace(lr=lr)

    def mixture(self, fed: Federation) -> Mixture:
        """Ask all clients, outside of any run, for alpha_i, L_i and mu_i."""
        asked = fed.fresh(dropout=0.0).map(self.constants)
        return Mixture(self._alphas(fed), asked["smoothness"], asked["convexity"])

    def start(self, fed: Federation) -> State:
        x = fed.initial_model()
        s = State(
            x=x,
            alpha=self._alphas(fed),
            smoothness=torch.full_like(self._alphas(fed), UNKNOWN),
            convexity=torch.full_like(self._alphas(fed), UNKNOWN),
            gap=math.inf,
            radius=math.inf,
            first=0.0,
            ready=False,
            whole=False,
        )
        if self.alpha == "auto" and not fed.has_rows("validation"):
            raise SettingError("flix: alpha='auto' chooses on validation rows, and there are none; give some")
        if self.solver == "dgd":
            s = s.replace(g=torch.zeros_like(x))
        if self.solver in SHIFTED:
            s = s.replace(h=torch.zeros_like(x), shifted=self.shift == "zero")
        if self.solver == "adam":
            s = s.replace(m=torch.zeros_like(x), v=torch.zeros_like(x), steps=0)
        if self.average:
            s = s.replace(mean=x, count=0)
        compressor(self.compressor).check(fed.d)
        fed.map(self.begin)
        return s

    def round(self, fed: Federation, s: State, t: int) -> State:
        if not self._alphas(fed).any():
            fed.map(self.rest)
            return s
        if (self.solver == "one-shot" or self.start_at == "average") and not s.ready:
            return self._one_shot(fed, s)
        if self.solver == "one-shot":
            return s
        if self.asks and (s.convexity == UNKNOWN).all():
            s = self._with_curvature(s, fed.map(self.constants), "smoothness", "convexity")
        if self.solver == "scaffnew":
            return self._skip_rounds(fed, s, t)
        s, g = self._estimate(fed, s, t)
        return self._step(fed, s, g, t)

    def begin(self, client: Client) -> None:
        """Find the local model, from the common starting point, unless the client has one already."""
        first = client.initial_model()
        needless = self.alpha == 1.0 and self.solver != "one-shot" and self.start_at != "average"
        if "own" in client.keep:
            own = client.keep.own
        else:
            how = (self.local, self.local_tol, self.local_lr, self.local_steps)
            own = first if needless else local_minimiser(client, first, *how)
        client.keep.own = torch.where(torch.isfinite(own).all(-1, keepdim=True), own, first)
        if self.solver in (*SHIFTED, "scaffnew"):
            client.keep.h = torch.zeros_like(first)
        if self.solver == "scaffnew":
            client.keep.x = first
        if self.alpha == "auto":
            client.keep.alpha = torch.full_like(first[..., :1], 0.5)
            client.keep.visits = torch.zeros_like(first[..., :1])

    def constants(self, client: Client) -> dict[str, Tensor]:
        return {"smoothness": client.smoothness(), "convexity": client.convexity()}

    def rest(self, client: Client) -> None:
        """Do nothing: with alpha = 0 no message is needed."""

    def local_model(self, client: Client) -> dict[str, Tensor]:
        """Return the local model and its smoothness, for the one-shot average."""
        return {"x": client.keep.own, "smoothness": client.smoothness()}

    def slope(self, client: Client, x: Tensor, alpha: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        """Return G_i(x), on all rows or, for sgd and adam, on a minibatch."""
        share = self._own_alpha(client, x, alpha)
        mixed = self._mixed(client, x, share)
        g = share * (client.full_grad(mixed) if self.solver in FULL else client.grad(mixed))
        return {"g": g, "alpha": client.keep.alpha} if self.alpha == "auto" else g

    def curvature(
        self, client: Client, x: Tensor, g: Tensor, radius: float, alpha: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return two numbers on how little f_i(T_i) curves within a radius of x."""
        share = self._number(alpha)
        return curvature_near(client, self._mixed(client, x, share), g, radius, share)

    def shifts(self, client: Client, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        """Return the first h_i, uncompressed."""
        alpha = alpha if self.alpha != "auto" else client.keep.alpha
        client.keep.h = self._gradient(client, x, alpha)
        return client.keep.h

    def shifted_slope(
        self, client: Client, x: Tensor, alpha: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        """Return D_i = C(G_i(x) - h_i); client and server then move h_i by beta D_i."""
        sent = client.compress(self._gradient(client, x, self._own_alpha(client, x, alpha)) - client.keep.h)
        client.keep.h = client.keep.h + self._beta(x.shape[-1]) * sent
        return {"g": sent, "alpha": client.keep.alpha} if self.alpha == "auto" else sent

    def descend(self, client: Client, steps: int, lr: float, alpha: Tensor | None = None) -> Tensor:
        """Return x_i after steps x_i <- x_i - lr (G_i(x_i) - h_i)."""
        x = client.keep.x
        for _ in range(steps):
            x = x - lr * (self._gradient(client, x, alpha) - client.keep.h)
        client.keep.x = x
        return x

    def settle(self, client: Client, x: Tensor, pull: float) -> None:
        """Go on from the mean x, and let h_i remember how far it was."""
        client.keep.h = client.keep.h + pull * (x - client.keep.x)
        client.keep.x = x

    def deploy(self, client: Client, x: Tensor, alpha: Tensor | None = None) -> Tensor:
        return self._mixed(client, x, client.keep.alpha if self.alpha == "auto" else self._number(alpha))

    def deploy_inputs(self, fed: Federation, s: State) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {"x": s.mean if self.average else s.x}, self._each(s, None)

    def observe(self, fed: Federation, s: State) -> dict[str, Tensor]:
        chosen = {"alpha": s.alpha} if isinstance(self.alpha, str) else {}
        return chosen | ({"gap": torch.tensor(s.gap)} if math.isfinite(s.gap) else {})

    def require_certificate(self, fed: Federation) -> None:
        why = ""
        if not fed.model.convex:
            why = "networks have none: their losses are not convex"
        elif self.solver != "dgd" or self.lr > 0 or self.participation < 1 or self.alpha == "auto":
            why = "it needs solver = dgd, lr = 0, a given alpha and all clients in every round"
        elif self.mixture(fed).mu <= 0 < self._alphas(fed).max():
            why = flix_rounds.NOT_STRONGLY_CONVEX
        if why:
            raise SettingError(f"flix: no certificate, so no accuracy can be the target: {why}")

    def certificate(self, s: State) -> float:
        """Return a bound on f~(x) - min f~, from the gradient of gradient descent; inf for other solvers."""
        return float(s.gap) if s.alpha.any() else 0.0

    def sharpen(self, fed: Federation, s: State, target: float) -> State:
        if self.solver != "dgd" or "g" not in s or not worth_asking(fed, s.gap, target):
            return s
        mixture, size = self._known(s), float(norm(s.g))
        lr, radius = self.lr or self._theory_step(fed, mixture), min(s.radius, size / mixture.mu)
        r = fed.map(self.curvature, x=s.x + lr * s.g, g=s.g, radius=radius, each=self._each(s, None))
        if len(r) < fed.n:
            return s
        along, least = (float(r.mean(name, uniform=True)) for name in ("along", "least"))
        gap = flix_rates.curved_certificate(mixture, along, size**2, lr)
        return s.replace(gap=min(s.gap, gap), radius=min(radius, size / least))

    def rounds_left(self, s: State, target: float) -> int | None:
        if not 0 < self.certificate(s) < math.inf:
            return None
        mixture = self._known(
            s
        )  # the gradient is as small as the gap that it bounds once the gap is this small
        return flix_rounds.dgd_rounds(mixture, self.certificate(s), target * mixture.mu / mixture.L)

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        sent, own = compressor(self.compressor).floats(d), int(isinstance(self.alpha, tuple))
        report = int(self.alpha == "auto")
        return {
            "begin": (0, 0),
            "rest": (0, 0),
            "constants": (0, 2),
            "local_model": (0, d + 1),
            "slope": (d + own, sent + report),
            "curvature": (2 * d + 1 + own, 2),
            "shifts": (d + own, d),
            "shifted_slope": (d + own, sent + report),
            "descend": (2 + own, d),
            "settle": (d + 1, 0),
        }

    def _one_shot(self, fed: Federation, s: State) -> State:
        r = fed.map(self.local_model)
        s = self._with_curvature(s, r, "smoothness")
        if len(r) == 0:
            return s
        mixture = Mixture(s.alpha[r.ids], r["smoothness"], torch.zeros(len(r)))
        x = mixture.average(r["x"], stationary=not fed.model.convex)
        if self.solver == "scaffnew":
            fed.map(self.settle, x=x, pull=0.0)
        return s.replace(x=x, ready=True, **({"mean": x} if self.average else {}))

    def _estimate(self, fed: Federation, s: State, t: int) -> tuple[State, Tensor]:
        """Return the state with what clients reported, and the estimate g of the gradient at x."""
        ids = fed.sample(t, self.participation)
        sent: dict[str, Any] = {"x": s.x, "to": ids, "each": self._each(s, ids)}
        if self.solver not in SHIFTED:
            r = fed.map(self.slope, **sent, compress=self._compress)
            return self._with_alphas(s, r).replace(whole=len(r) == fed.n), r.mean(self._name, uniform=True)
        if not s.shifted:
            r = fed.map(self.shifts, x=s.x, each=self._each(s, None))
            s = s.replace(h=r.values.sum(0) / fed.n if len(r) else s.h, shifted=True)
        r = fed.map(self.shifted_slope, **sent, compress=self.compressor)
        mean = r.mean(self._name, uniform=True)
        h = s.h + self._beta(fed.d) * mean * (len(r) / fed.n)
        return self._with_alphas(s, r).replace(h=h), h if self.solver == "ef21" else s.h + mean

    def _skip_rounds(self, fed: Federation, s: State, t: int) -> State:
        """Take local steps until the coin, one for all clients, ends the round."""
        mixture = self._known(s)
        lr = self.lr or self._theory_step(fed, mixture)
        chance = self.chance or flix_steps.scaffnew_chance(mixture)
        draw = float(fed.uniform("coin", t, 1))
        steps = 1 if chance >= 1 else 1 + int(math.log(max(draw, 1e-300)) / math.log1p(-chance))
        r = fed.map(self.descend, steps=steps, lr=lr, each=self._each(s, None))
        x = r.mean(uniform=True)
        fed.map(self.settle, x=x, pull=chance / lr, to=r.ids)
        return s.replace(x=x)

    def _step(self, fed: Federation, s: State, g: Tensor, t: int) -> State:
        """Take a step along g, or raise an error if the steps diverge."""
        mixture = self._known(s)
        lr = self.lr or self._theory_step(fed, mixture)
        size = float(norm(g))
        first = s.first or size
        if self.solver in FULL and not size <= GROWTH * max(first, 1e-8):
            known = self._theory_step(fed, mixture) or self._theory_step(fed, self.mixture(fed))
            raise SettingError(
                f"flix: the step size lr = {lr:g} diverges: the gradient grew from {first:.2g} to {size:.2g} by "
                f"round {t}. Theory allows {known:.3g}; leave lr at 0 to take it."
            )
        if self.solver == "adam":
            steps = s.steps + 1
            m, v = 0.9 * s.m + 0.1 * g, 0.999 * s.v + 0.001 * g * g
            s = s.replace(m=m, v=v, steps=steps)
            g = (m / (1 - 0.9**steps)) / ((v / (1 - 0.999**steps)).sqrt() + 1e-8)
        x = s.x - lr * g
        if self.average:
            s = s.replace(mean=(s.count * s.mean + x) / (s.count + 1), count=s.count + 1)
        if self.solver == "dgd" and fed.model.convex:
            s = self._certified(fed, s, mixture, g, lr)
        return s.replace(x=x, first=first)

    def _certified(self, fed: Federation, s: State, mixture: Mixture, g: Tensor, lr: float) -> State:
        """Return the state with the certificate after a step of gradient descent; none if a client was away."""
        if not s.whole or mixture.n < fed.n:
            return s.replace(gap=math.inf, radius=math.inf)
        gap = flix_rates.running_certificate(mixture, float(norm(g)) ** 2, lr)
        before = math.inf if self.alpha == "auto" else s.gap  # f~ changes with alpha
        return s.replace(gap=min(gap, flix_rates.dgd_rate(mixture) * before), g=g)

    def _theory_step(self, fed: Federation, mixture: Mixture, rounds: int | None = None) -> float:
        """Return the step size of theory; 0 if nothing is known or nothing curves."""
        if self.solver not in FULL or mixture.n == 0:
            return 0.0
        delta = compressor(self.compressor).delta(fed.d) if self.solver == "ef21" else 1.0
        return flix_steps.step(self.solver, mixture, self._omega(fed.d), delta, fed.model.convex, rounds)

    def _known(self, s: State) -> Mixture:
        """Return the constants of the clients that sent theirs; what was not sent of mu_i counts as 0."""
        known = s.smoothness != UNKNOWN
        return Mixture(s.alpha[known], s.smoothness[known], s.convexity[known].clamp(min=0.0))

    def _with_curvature(self, s: State, r: Replies, *names: str) -> State:
        """Return the state with the constants that clients sent."""
        if len(r) == 0:
            return s
        return s.replace(**{name: r.put(getattr(s, name).unsqueeze(-1), name).squeeze(-1) for name in names})

    def _with_alphas(self, s: State, r: Replies) -> State:
        """Return the state with the alphas that clients chose."""
        if self.alpha != "auto" or len(r) == 0:
            return s
        return s.replace(alpha=r.put(s.alpha.to(r["alpha"]).unsqueeze(-1), "alpha").squeeze(-1))

    @property
    def asks(self) -> bool:
        """Whether theory has to choose, and needs the clients' constants for it."""
        return self.solver in FULL and (self.lr == 0 or (self.solver == "scaffnew" and self.chance == 0))

    @property
    def _name(self) -> str:
        return "g" if self.alpha == "auto" else ""

    @property
    def _compress(self) -> str | None:
        return None if self.compressor == "identity" else self.compressor

    def _omega(self, d: int) -> float:
        one = compressor(self.compressor)
        return one.omega(d) if one.unbiased else 0.0

    def _beta(self, d: int) -> float:
        return 1.0 if self.solver == "ef21" else flix_steps.diana_beta(self._omega(d))

    def _alphas(self, fed: Federation) -> Tensor:
        """Return alpha_i of every client, [n]; 1/2 if it is not chosen yet."""
        if isinstance(self.alpha, tuple):
            if len(self.alpha) != fed.n:
                raise SettingError(f"flix: {len(self.alpha)} values of alpha for {fed.n} clients")
            return torch.tensor(self.alpha, dtype=fed.dtype, device=fed.device)
        alpha = 0.5 if isinstance(self.alpha, str) else self.alpha
        return torch.full((fed.n,), alpha, dtype=fed.dtype, device=fed.device)

    def _each(self, s: State, ids: Tensor | None) -> dict[str, Tensor]:
        if not isinstance(self.alpha, tuple):
            return {}
        return {"alpha": (s.alpha if ids is None else s.alpha[ids]).unsqueeze(-1)}

    def _number(self, alpha: Tensor | None) -> Tensor | float:
        return cast(float, self.alpha) if alpha is None else alpha

    def _own_alpha(self, client: Client, x: Tensor, alpha: Tensor | None) -> Tensor | float:
        """Return the client's alpha; "auto" chooses it again at visits 1, 2, 4, ..., 64."""
        if self.alpha != "auto":
            return self._number(alpha)
        visit = client.keep.visits + 1
        client.keep.visits = visit
        due = (torch.log2(visit) % 1 == 0) & (visit <= CHOICES)
        if due.any():
            best = best_alpha(client, lambda a: self._mixed(client, x, a), x)
            client.keep.alpha = torch.where(due, best, client.keep.alpha)
        return client.keep.alpha

    def _mixed(self, client: Client, x: Tensor, alpha: Tensor | float) -> Tensor:
        """Return T_i(x)."""
        return alpha * x + (1 - alpha) * client.keep.own

    def _gradient(self, client: Client, x: Tensor, alpha: Tensor | float | None) -> Tensor:
        """Return G_i(x) on all rows."""
        share = self._number(alpha) if alpha is None else alpha
        return share * client.full_grad(self._mixed(client, x, share))
