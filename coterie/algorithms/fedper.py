"""FedPer: a shared body, and a head at each client."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.algorithms.partly_shared import PartlyShared
from coterie.engine.client import Client


@dataclass(frozen=True)
class FedPer(PartlyShared):
    """Federated learning with personalisation layers (Arivazhagan et al. 2019, arXiv:1912.00818).

    (u_i, v_i) <- `steps` of SGD on client i from (u, v_i),   u <- mean of the u_i

    u is the body and v_i the head, the last layer; `personal` names other layers, such as "2+4", and with none this
    is FedAvg. Of a linear model the intercept is personal.

    Examples
    --------
    Two clients whose values differ by 4 share the slope 1 and have intercepts of their own:

    >>> import torch, coterie
    >>> x = torch.tensor([[-1.0], [1.0]])
    >>> fed = coterie.Federation.from_arrays([x, x], [x[:, 0], x[:, 0] + 4], coterie.models.linear(intercept=True))
    >>> run = coterie.fit(fed, coterie.algorithms.FedPer(lr=0.5), rounds=30)
    >>> run.personal.round(decimals=2).tolist()
    [[1.0, 0.0], [1.0, 4.0]]
    """

    def train(self, client: Client, shared: Tensor) -> Tensor:
        return self._parted(client, client.sgd(self._whole(client, shared), self.lr, self.steps))
