"""FedBN: normalisation at each client, everything else shared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from coterie.algorithms.base import setting
from coterie.algorithms.fedper import FedPer
from coterie.models.base import Model
from coterie.models.zoo import mlp


@dataclass(frozen=True)
class FedBN(FedPer):
    """Local batch normalisation against shifts of features (Li et al., ICLR 2021, arXiv:2102.07623).

    (u_i, v_i) <- `steps` of SGD on client i from (u, v_i),   u <- mean of the u_i

    v_i are the parameters and running statistics of normalisation layers, u all others. The paper has batch
    normalisation; scales and shifts of layer and group normalisation stay at the clients alike.
    """

    remedy: ClassVar[str] = "use a network with normalisation, such as resnet9() or mlp(norm='batch')"

    personal: str = setting("norm+buffers", "parameter groups that stay at the clients, joined with +")

    def trial_model(self, rounds: int) -> Model:
        return mlp((4,), norm="layer", stacked=False)
