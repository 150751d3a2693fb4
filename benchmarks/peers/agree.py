"""Methods of fluke on given rows and minibatches: `python agree.py PROBLEM.npz OUT.npz` writes the models."""

from __future__ import annotations

import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
from common import Problem, torchvision_without_cuda

torchvision_without_cuda()

import torch  # noqa: E402
from fluke import FlukeENV  # noqa: E402
from fluke.algorithms import CentralizedFL, PersonalizedFL  # noqa: E402
from fluke.algorithms.ditto import DittoClient  # noqa: E402
from fluke.algorithms.fedper import FedPerClient, FedPerServer  # noqa: E402
from fluke.algorithms.fedprox import FedProxClient  # noqa: E402
from fluke.algorithms.fedrep import FedRepClient, FedRepServer  # noqa: E402
from fluke.algorithms.scaffold import SCAFFOLDClient, SCAFFOLDServer  # noqa: E402
from fluke.client import Client  # noqa: E402
from fluke.config import OptimizerConfigurator  # noqa: E402
from fluke.data import FastDataLoader  # noqa: E402
from fluke.nets import EncoderHeadNet  # noqa: E402
from fluke.server import Server  # noqa: E402
from fluke.utils import ServerObserver  # noqa: E402
from torch import nn  # noqa: E402

METHODS: dict[str, tuple[type[Client], type[Server], type[CentralizedFL]]] = {
    "fedavg": (Client, Server, CentralizedFL),
    "fedprox": (FedProxClient, Server, CentralizedFL),
    "scaffold": (SCAFFOLDClient, SCAFFOLDServer, CentralizedFL),
    "ditto": (DittoClient, Server, PersonalizedFL),
    "fedper": (FedPerClient, FedPerServer, PersonalizedFL),
    "fedrep": (FedRepClient, FedRepServer, CentralizedFL),
}
HEADS = ("fedper", "fedrep")


def main(problem: Problem, out: Path) -> None:
    FlukeENV().set_inmemory(True)
    client_class, server_class, way = METHODS[problem.method]
    x, y = torch.from_numpy(problem.x), torch.from_numpy(problem.y)

    class Loader(FastDataLoader):
        """Its own loader over the rows of the round and of the pass through them."""

        now, client, passed = 0, 0, 0

        def __iter__(self) -> Any:
            drawn = problem.draws[Loader.now, self.passed % len(problem.draws[0]), self.client].flatten()
            self.passed += 1
            self.tensors, self.size = (x[drawn], y[drawn]), len(drawn)
            return super().__iter__()

        def __next__(self) -> Any:
            try:
                return super().__next__()
            except StopIteration:
                self.size = int(problem.size[self.client])  # by which the server weighs
                raise

        def __len__(self) -> int:
            return int(problem.draws.shape[3])

    class Rounds(ServerObserver):
        def end_round(self, round: int) -> None:
            Loader.now = min(round, len(problem.draws) - 1)

    def module() -> EncoderHeadNet:
        width = problem.width
        made = EncoderHeadNet(
            nn.Sequential(nn.Linear(x.shape[1], width), nn.Tanh()), nn.Linear(width, problem.classes)
        ).double()
        nn.utils.vector_to_parameters(torch.from_numpy(problem.initial).clone(), made.parameters())
        return made

    def client(k: int) -> Client:
        rows = problem.rows(k)
        loader = Loader(x[rows], y[rows], num_labels=problem.classes, batch_size=problem.batch, shuffle=False)
        loader.client = k
        options: dict[str, Any] = {"mu": problem.mu} if problem.method == "fedprox" else {}
        if problem.method == "ditto":
            options = {"model": module(), "tau": 1, "lam": problem.lam}
        elif problem.method in HEADS:
            options = {"model": module(), **({"tau": 1} if problem.method == "fedrep" else {})}
        step = {"name": "StepLR", "step_size": 1, "gamma": 1.0}
        return client_class(
            index=k,
            train_set=loader,
            test_set=None,
            optimizer_cfg=OptimizerConfigurator({"name": torch.optim.SGD, "lr": problem.lr}, step),
            loss_fn=nn.CrossEntropyLoss(),
            local_epochs=1,
            **options,
        )

    clients = [client(k) for k in range(len(problem.size))]
    shared = module().encoder if problem.method in HEADS else module()
    server = server_class(shared, None, clients, weighted=problem.weighted)
    federation = way(len(clients), None, {}, clients=clients, server=server)
    federation.set_callbacks(rounds := Rounds())
    federation.attach(rounds)
    federation.finalize = lambda: None
    federation.run(len(problem.draws), 1.0)

    def deployed(one: Client) -> nn.Module:
        if problem.method == "ditto":
            return one.personalized_model
        if problem.method in HEADS:
            return EncoderHeadNet(deepcopy(server.model), one.model.get_local())
        return server.model

    found = [nn.utils.parameters_to_vector(deployed(one).parameters()).detach() for one in clients]
    np.savez(out, personal=torch.stack(found).numpy())


main(Problem(sys.argv[1]), Path(sys.argv[2]))
