"""MAML-FL: a shared model that is good after one step on a client's own rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.algorithms.base import setting
from coterie.algorithms.ftfa import FTFA
from coterie.engine.client import Client


@dataclass(frozen=True)
class MamlFL(FTFA):
    """Model-agnostic meta-learning for federations (Fallah et al., NeurIPS 2020; Cheng et al. 2022, Algorithm 7).

    local step, on three batches:  u = grad f_i(w - alpha grad f_i(w; D); D'),   w <- w - lr (u - alpha H(w; D'') u)
    x <- mean of the w;   client i deploys x fine-tuned as in FTFA

    hessian="exact" multiplies by H; "free" takes the central difference (grad f(w + delta u) - grad f(w - delta u))
    / (2 delta); "first-order" leaves it out, which has another limit. The printed Algorithm 7 has no such step
    (it is FedAvg) and returns the shared model; this is the intended one. alpha = 0 is FedAvg.
    """

    alpha: float = setting(0.01, "step size of the inner step", low=0, tune=(0.001, 0.01, 0.1))
    hessian: str = setting(
        "free",
        "product with the Hessian: exact, by a difference of gradients (free), or left out",
        options=("free", "first-order", "exact"),
    )
    delta: float = setting(1e-3, "half-width of the difference for hessian = free", above=0)

    def train(self, client: Client, x: Tensor) -> Tensor:
        (x,) = client.along_rows(2 * self.steps, x)  # or more, if products with the Hessian are gradients
        for _ in range(self.steps):
            ahead = x - self.alpha * client.grad(x)
            u = client.grad(ahead)
            x = x - self.lr * (u - self.alpha * self._curved(client, x, u))
        return x

    def _curved(self, client: Client, x: Tensor, u: Tensor) -> Tensor | float:
        """Return H u on a third minibatch."""
        if self.hessian == "first-order":
            return 0.0
        if self.hessian == "exact":
            return client.hvp(x, u)
        after, before = client.grad(x + self.delta * u), client.grad(x - self.delta * u, again=True)
        return (after - before) / (2 * self.delta)
