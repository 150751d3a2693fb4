"""Async-AL2SGD+: the accelerated, variance-reduced method for personal models in known clusters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie.algorithms.async_l2gd import HEADS, AsyncL2GD, PerCluster, _rows
from coterie.algorithms.base import Reveals, setting
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.state import State
from coterie.models.glm import Glm
from coterie.theory.coins import Coins, renewal
from coterie.theory.groups import Groups

_LARGEST = 256  # parameters up to which second derivatives are taken
_OF_START = 0.3  # share of the curvature at the start that is taken where none holds everywhere


@dataclass(frozen=True)
class AsyncAL2SGD(AsyncL2GD):
    """Async-L2GD with momentum and an anchor that removes the noise (Lyu, Hanzely, Kolar 2022, Algorithm 2).

    t = a1 z + a2 x + (1 - a1 - a2) y;   D = grad F at the anchors x;   coins as in Async-L2GD
    g_i = D_i + gamma_i/p0 [alpha_j ((t-m) - (x-xm)) + tau_j (1-alpha_j) ((t-m_j) - (x-xm_j))]   all clusters
        = D_i + gamma_i (1-tau_j)(1-alpha_j)/((1-p0) p_j) ((t-m_j) - (x-xm_j))                  inside cluster j
        = D_i + [grad f_il(t) - grad f_il(x)]/((1-p0)(1-p_j))                                  local step, one row l
    y <- t - lr g;   z <- b1 z + (1-b1) t + b2/lr (y - t);   with probability rho: x <- y, D anew

    Deviations: the term with tau_j is missing in the paper, which makes its oracle biased; b2/n there is b2/lr.
    Converges linearly to the exact minimiser with minibatches; use `from_theory`. Clients deploy y.
    """

    name: ClassVar[str] = "async-al2sgd+"

    rho: float = setting(0.2, "probability that all clients renew their anchor", above=0, high=1)
    a1: float = setting(0.2, "weight of the momentum z", above=0, high=1)
    a2: float = setting(0.4, "weight of the anchor x", low=0, high=1)
    b1: float = setting(0.98, "fraction of z that is kept", low=0, high=1)
    b2: float = setting(0.06, "step size of z relative to lr", above=0)
    batch: int = setting(1, "rows per stochastic gradient; 0 means all rows", low=0, kw_only=True)
    reveals: ClassVar[Reveals] = AsyncL2GD.reveals | {"offer": "personal", "anchor": "nothing"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.a1 + self.a2 > 1:
            raise SettingError(
                f"{self.name}: a1 + a2 = {self.a1 + self.a2:g}; the weights of z and x exceed 1"
            )

    @classmethod
    def from_theory(
        cls,
        fed: Federation,
        *,
        gamma: PerCluster = 1.0,
        lambda_: PerCluster | None = None,
        alpha: PerCluster | None = None,
        rho: float | None = None,
        **settings: Any,
    ) -> Self:
        """Return the algorithm with all parameters from smoothness and convexity (Theorem 4.3).

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
        rho
            Probability that anchors are renewed; by default that of `coins.renewal`.
        **settings
            Other hyperparameters.

        Returns
        -------
        AsyncAL2SGD
            The algorithm.

        Notes
        -----
        The theorem asks for strongly convex losses. Classes with a free intercept have curvature everywhere, but no
        lower bound of it; a share of the smallest curvature at the initial model takes its place, without a proof.
        """
        draft = cls(gamma=gamma, alpha=alpha, lambda_=1.0 if lambda_ is None else lambda_, **settings)
        if not isinstance(fed.model, Glm):
            raise SettingError(
                f"{cls.name}: its theory is for convex losses, and this model is not a (generalised) linear one. "
                "Set lr, rho, a1, a2, b1 and b2 yourself, or take async-l2gd"
            )
        penalty, known = draft.penalty(fed), draft.constants(fed)
        smoothness = known["smoothness" if draft.batch == 0 else "row_smoothness"]
        mu = known["convexity"] if known["convexity"] > 0 else _OF_START * known["start_convexity"]
        if mu <= 0:
            raise SettingError(
                f"{cls.name}: some loss is not strongly convex; set l2 > 0 in the model, such as 1e-3"
            )
        coins = (Coins.best_one if draft.coins == "one" else Coins.best)(penalty, smoothness)
        rho = renewal(coins) if rho is None else rho
        expected = coins.smoothness(penalty, smoothness)
        most = max(smoothness + float(penalty.gamma.max()), expected)
        lr, a2 = 0.25 / most, 0.5 * expected / most
        a1 = min(0.5, math.sqrt(lr * mu * max(0.5, a2 / rho)))
        b2 = 1 / max(2 * mu, 4 * a1 / lr)
        chosen = {"p0": coins.p0, "p": float(coins.p[0]), "tau": None, "lr": lr, "rho": rho}
        return cls(**{**draft.settings(), **chosen, "a1": a1, "a2": a2, "b1": 1 - b2 * mu, "b2": b2})

    def start(self, fed: Federation) -> State:
        return super().start(fed).replace(renewed=0)

    def round(self, fed: Federation, s: State, t: int) -> State:
        s = super().round(fed, s, t)
        if fed.coin("renew", t) < self.rho:
            self.renew(fed, s)
            s = s.replace(renewed=s.renewed + 1)
        return s

    def fast_forward(self, fed: Federation, s: State, after: int, until: int) -> tuple[State, int]:
        return s, after

    def renew(self, fed: Federation, s: State) -> None:
        """Make every client's y its anchor, with the gradient of the whole objective there."""
        replies = fed.map(self.offer, each=self._pace(fed, s, None), link=HEADS)
        if not len(replies):
            return
        ids = None if len(replies) == fed.n else replies.ids
        clusters, weights = _rows(fed.known_clusters(), ids), _rows(s.weights, ids)
        common, inside = self.means(
            replies.values, Groups(clusters, len(s.steps)), self.weights(s, clusters, ids)
        )
        self.exchange(fed, inside)
        each = {"inside": inside[clusters], "weights": weights}
        fed.map(self.anchor, to=ids, each=each, common=common, link=HEADS)

    def begin(self, client: Client) -> None:
        x = client.initial_model()
        client.keep.x = client.keep.y = client.keep.z = x
        client.keep.slope = client.full_grad(x)
        client.keep.from_common = client.keep.from_inside = torch.zeros_like(x)
        client.keep.done = torch.zeros_like(client.size)

    def share(self, client: Client, steps: Tensor, rate: Tensor) -> Tensor:
        y, z = self._walk(client, steps, rate)
        client.keep.y, client.keep.z, client.keep.done = y, z, steps
        return self._point(client, y, z)

    def offer(self, client: Client, steps: Tensor, rate: Tensor) -> Tensor:
        self.share(client, steps, rate)
        return client.keep.y

    def _walk(self, client: Client, steps: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
        """Take the local steps due since the last call."""
        x, y, z, grad = client.keep.x, client.keep.y, client.keep.z, client.keep.slope
        owed = steps - client.keep.done
        for k in range(int(owed.max())):
            t = self._point(client, y, z)
            g = grad + rate * (client.grad(t) - client.grad(x, again=True))
            new_y, new_z = self.move(t, z, g)
            y, z = torch.where(k < owed, new_y, y), torch.where(k < owed, new_z, z)
            if not torch.where(k < owed, y.isfinite(), False).any():
                break
        return y, z

    def _point(self, client: Client, y: Tensor, z: Tensor) -> Tensor:
        """Return t, where the gradient is estimated."""
        return self.a1 * z + self.a2 * client.keep.x + (1 - self.a1 - self.a2) * y

    def move(self, t: Tensor, z: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return y and z after a step from t against g."""
        y = t - self.lr * g
        return y, self.b1 * z + (1 - self.b1) * t + self.b2 / self.lr * (y - t)

    def pull_all(self, client: Client, common: Tensor, inside: Tensor, pulls: Tensor) -> None:
        t, far, near = self._point(client, client.keep.y, client.keep.z), pulls[..., :1], pulls[..., 1:]
        change = far * (t - common - client.keep.from_common) + near * (t - inside - client.keep.from_inside)
        client.keep.y, client.keep.z = self.move(t, client.keep.z, client.keep.slope + change)

    def pull_inside(self, client: Client, inside: Tensor, pull: Tensor) -> None:
        t = self._point(client, client.keep.y, client.keep.z)
        change = pull * (t - inside - client.keep.from_inside)
        client.keep.y, client.keep.z = self.move(t, client.keep.z, client.keep.slope + change)

    def anchor(self, client: Client, common: Tensor, inside: Tensor, weights: Tensor) -> None:
        x, gamma, far = client.keep.y, weights[..., :1], weights[..., 1:]
        client.keep.x, client.keep.from_common, client.keep.from_inside = x, x - common, x - inside
        client.keep.slope = client.full_grad(x) + far * (x - common) + (gamma - far) * (x - inside)

    def deploy(self, client: Client, steps: Tensor, rate: Tensor) -> Tensor:
        return self._walk(client, steps, rate)[0]

    def observe(self, fed: Federation, s: State) -> dict[str, Tensor]:
        return {**super().observe(fed, s), "renewed": torch.tensor(float(s.renewed))}

    def measure(self, client: Client) -> dict[str, Tensor]:
        found = {**super().measure(client), "row_smoothness": client.row_smoothness()}
        return {**found, "start_convexity": self._start_convexity(client)}

    def _start_convexity(self, client: Client) -> Tensor:
        """Return the smallest curvature of the loss at the initial model, [..., 1]; a bound where that is not known."""
        model = client.model
        if not isinstance(model, Glm) or model.has_statistics or model.d > _LARGEST:
            return client.convexity()

        def lowest(w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            values: Tensor = torch.linalg.eigvalsh(model.hessian(w, x, y, weight))
            return values[..., :1].clamp(min=0.0)

        return client.over_rows(lowest, client.initial_model())

    def constants(self, fed: Federation) -> dict[str, float]:
        replies = fed.fresh(dropout=0.0).map(self.measure)
        largest = {name: float(replies[name].max()) for name in ("smoothness", "row_smoothness")}
        smallest = {name: float(replies[name].min()) for name in ("convexity", "start_convexity")}
        return largest | smallest

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {**super().traffic(d), "measure": (0, 4), "offer": (2, d), "anchor": (2 * d + 2, 0)}
