"""fluke: its centralised federated averaging and its Ditto."""

from __future__ import annotations

from typing import Any

from common import Clock, Problem, Run, serve, torchvision_without_cuda
from modules import Rows, build, flat

torchvision_without_cuda()

import torch  # noqa: E402
from fluke import FlukeENV  # noqa: E402
from fluke.algorithms import CentralizedFL, PersonalizedFL  # noqa: E402
from fluke.algorithms.ditto import DittoClient  # noqa: E402
from fluke.client import Client  # noqa: E402
from fluke.config import OptimizerConfigurator  # noqa: E402
from fluke.data import FastDataLoader  # noqa: E402
from fluke.server import Server  # noqa: E402
from fluke.utils import ServerObserver  # noqa: E402
from torch import nn  # noqa: E402


def prepare(problem: Problem) -> Run:
    rows = Rows(problem)
    ditto = hasattr(problem, "lam")
    FlukeENV().set_inmemory(True)

    class Loader(FastDataLoader):
        """Its own loader over the draws of the round; for Ditto those of the shared model, then the personal one's."""

        client = 0
        now = 0
        times = 0

        def __iter__(self) -> Any:
            every = (slice(1, None, 2), slice(0, None, 2))[self.times % 2] if ditto else slice(None)
            self.times += 1
            drawn = rows.draws[Loader.now, rows.place[Loader.now][self.client]][every].flatten()
            x, y = rows.of[self.client]
            self.tensors, self.size = (x[drawn], y[drawn]), len(drawn)
            return super().__iter__()

        def __next__(self) -> Any:
            try:
                return super().__next__()
            except StopIteration:
                self.size = len(rows.of[self.client][1])  # by which the server weighs
                raise

        def __len__(self) -> int:
            return problem.steps

    class Chosen(Server):
        def get_eligible_clients(self, eligible_perc: float) -> list[Client]:
            return [self.clients[k] for k in problem.cohorts[Loader.now]]

    class Ticks(ServerObserver):
        clock: Clock

        def end_round(self, round: int) -> None:
            self.clock.tick()
            Loader.now = min(Loader.now + 1, problem.rounds - 1)

    def client(k: int) -> Client:
        x, y = rows.of[k]
        loader = Loader(x, y, num_labels=10, batch_size=problem.batch, shuffle=False)
        loader.client = k
        optimizer = OptimizerConfigurator(
            {"name": torch.optim.SGD, "lr": problem.lr}, {"name": "StepLR", "step_size": 1, "gamma": 1.0}
        )
        if ditto:
            return DittoClient(
                index=k,
                model=build(problem),
                train_set=loader,
                test_set=None,
                optimizer_cfg=optimizer,
                loss_fn=nn.CrossEntropyLoss(),
                local_epochs=1,
                tau=1,
                lam=problem.lam,
            )
        return Client(k, loader, None, optimizer, nn.CrossEntropyLoss(), local_epochs=1)

    def run(clock: Clock) -> dict[str, Any]:
        Loader.now = 0
        clients = [client(k) for k in range(len(problem.size))]
        server = Chosen(build(problem), None, clients, weighted=ditto)
        federation = (PersonalizedFL if ditto else CentralizedFL)(
            len(clients), None, {}, clients=clients, server=server
        )
        ticks = Ticks()
        ticks.clock = clock
        federation.set_callbacks(ticks)
        federation.attach(ticks)
        federation.finalize = lambda: None  # the last evaluation is not part of a round
        clock.start()
        federation.run(problem.rounds, len(problem.cohorts[0]) / len(clients))
        result = {"x": flat(server.model).numpy()}
        if ditto:
            result["personal"] = torch.stack([flat(c.personalized_model) for c in clients]).numpy()
        return result

    return run


serve(prepare)
