"""FedYogi: FedAvg whose server takes steps of Yogi."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.algorithms.fedadam import FedAdam


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """One shared model; the mean move is a gradient to the server's Yogi (Reddi et al., ICLR 2021, arXiv:2003.00295).

    As fedadam, but   v <- v - (1 - beta2) delta^2 sign(v - delta^2)

    v changes by no more than (1 - beta2) delta^2 in a round, so that one large move does not shrink later steps for
    long, and small moves do not blow them up at once.
    """

    def _second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * (v - square).sign()
