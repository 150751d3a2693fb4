"""LG-FedAvg: a representation at each client under a shared head."""

from __future__ import annotations

from dataclasses import dataclass

from coterie.algorithms.base import setting
from coterie.algorithms.fedper import FedPer


@dataclass(frozen=True)
class LGFedAvg(FedPer):
    """Local representations and a global head (Liang et al. 2020, arXiv:2001.01523).

    (u_i, v_i) <- `steps` of SGD on client i from (u, v_i),   u <- mean of the u_i

    The other way round than FedPer: u is the head and v_i the body, so that few numbers travel and inputs of
    different kinds can be encoded by each client for itself. Of a linear model the weights are personal and the
    intercept is shared.
    """

    personal: str = setting("body+buffers", "parameter groups that stay at the clients, joined with +")
