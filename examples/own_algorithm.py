"""A complete algorithm: a shared model plus a personal offset that never leaves the client."""

from dataclasses import dataclass
from typing import Any, ClassVar

import coterie
from coterie import Algorithm, State, setting
from coterie.data import bundled


@dataclass(frozen=True)
class SharedPlusOffset(Algorithm):
    """Client i deploys x + o_i; x is averaged, o_i stays and is shrunk (example, 2026).

    o_i <- (1 - lr shrink) o_i - lr grad f_i(x + o_i),   x <- mean_i (x - lr grad f_i(x + o_i))
    """

    reveals: ClassVar[dict[str, Any]] = {"train": "model"}  # what each phase sends
    lr: float = setting(0.05, "step size", above=0, tune=(0.01, 0.03, 0.1, 0.3))
    shrink: float = setting(1.0, "pull of the offset to zero", low=0, tune=(0.1, 1.0))

    def start(self, fed):
        return State(x=fed.initial_model())

    def round(self, fed, s, t):
        return State(x=fed.map(self.train, x=s.x).mean())

    def begin(self, client):
        client.keep.offset = 0 * client.initial_model()

    def train(self, client, x):
        offset = client.keep.offset
        slope = client.grad(x + offset)
        client.keep.offset = (1 - self.lr * self.shrink) * offset - self.lr * slope
        return x - self.lr * slope

    def deploy(self, client, x):
        return x + client.keep.offset

    def traffic(self, d):
        return {"begin": (0, 0), "train": (d, d)}


if __name__ == "__main__":
    print(coterie.check_algorithm(SharedPlusOffset()))
    result = coterie.compare(
        bundled.path("heart_disease"), "hospital", "sick", algorithms=[SharedPlusOffset()], seeds=1, rounds=50
    )
    print(result.verdict())
