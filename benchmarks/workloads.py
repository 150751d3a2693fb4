"""The workloads, each as a federation for us and as plain arrays for the loop it is compared with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from coterie import Federation, models
from coterie.federation import randomness
from coterie.federation.build import from_rows


def images(
    clients: int = 100, low: int = 20, high: int = 100, features: int = 784, classes: int = 10
) -> tuple:
    """Ragged clients with `features` numbers per row and labels, float32."""
    sizes = low + randomness.integers(randomness.key(1, "size", torch.arange(clients)), high - low + 1)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(int(sizes.sum()), features, generator=generator)
    y = torch.randint(0, classes, (len(x),), generator=generator)
    return x, y, sizes


def logistic_federation(x: Tensor, y: Tensor, sizes: Tensor) -> Federation:
    names = [str(k) for k in range(len(sizes))]
    return from_rows(x, y, sizes, model=models.softmax(intercept=True), names=names, dtype=torch.float32)


def least_squares_federation(clients: int = 400, rows: int = 100, d: int = 20) -> Federation:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients * rows, d, generator=generator, dtype=torch.float64)
    y = torch.randn(clients * rows, generator=generator, dtype=torch.float64)
    names = [str(k) for k in range(clients)]
    return from_rows(
        x, y, torch.full((clients,), rows), model=models.linear(), names=names, dtype=torch.float64
    )


class PlainLoop:
    """What a careful user writes: one nn.Module per client, torch.optim.SGD, a loop over clients."""

    def __init__(self, fed: Federation, lr: float, steps: int, batch: int) -> None:
        self.fed, self.lr, self.steps, self.batch = fed, lr, steps, batch
        rows = fed.runtime.train
        self.data = [rows.of(k) for k in range(fed.n)]
        self.modules = [nn.Linear(fed.model.features, 10) for _ in range(fed.n)]
        self.weights = rows.size / rows.size.sum()
        self.x = fed.initial_model()

    def round(self, t: int) -> None:
        """One round of federated averaging, on the very rows that the engine draws."""
        average = torch.zeros_like(self.x)
        base = randomness.key(self.fed.seed, "train", t, 0)
        for k, (module, (x, y)) in enumerate(zip(self.modules, self.data, strict=True)):
            self._load(module)
            optimizer = torch.optim.SGD(module.parameters(), lr=self.lr)
            client = randomness.fold(base, torch.tensor(k))
            for step in range(1, self.steps + 1):
                chosen = randomness.integers(
                    randomness.slots(randomness.fold(client, step), self.batch), len(y)
                )
                inputs, labels = (x[chosen], y[chosen]) if len(y) > self.batch else (x, y)
                optimizer.zero_grad()
                nn.functional.cross_entropy(module(inputs[:, :-1]), labels).backward()
                optimizer.step()
            average += self.weights[k] * self._flat(module)
        self.x = average

    def _load(self, module: nn.Linear) -> None:
        table = self.x.view(10, -1)
        with torch.no_grad():
            module.weight.copy_(table[:, :-1])
            module.bias.copy_(table[:, -1])

    def _flat(self, module: nn.Linear) -> Tensor:
        with torch.no_grad():
            return torch.cat([module.weight, module.bias.unsqueeze(-1)], -1).flatten()
