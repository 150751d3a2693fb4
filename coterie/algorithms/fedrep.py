"""FedRep: heads learned on a shared representation, then the representation for these heads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.algorithms.base import setting
from coterie.algorithms.partly_shared import PartlyShared
from coterie.engine.client import Client


@dataclass(frozen=True)
class FedRep(PartlyShared):
    """A shared representation and personal heads, in turns (Collins et al., ICML 2021, arXiv:2102.07078).

    v_i <- `head_steps` of SGD on the head from v_i, with the body u fixed
    u_i <- `steps` of SGD on the body from u, with the head v_i fixed,   u <- mean of the u_i

    The paper takes many head steps for one of the body. Of a linear model the intercept is the head.
    """

    head_steps: int = setting(10, "steps of the head per round", low=1, tune=(5, 20))

    def train(self, client: Client, shared: Tensor) -> Tensor:
        own, body = self.own_part(client.model), self.shared_part(client.model)
        w = self._whole(client, shared)
        w = client.sgd(w, self.lr, self.head_steps, mask=own.mask, stream="head")
        w = client.sgd(w, self.lr, self.steps, mask=body.mask)
        return self._parted(client, w)
