"""Flower: its simulation engine on Ray, FedAvg and a NumPyClient as in its quickstart."""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_DEDUP_LOGS="0", RAY_USAGE_STATS_ENABLED="0")

import numpy as np
import torch
from common import Clock, Problem, Run, serve
from flwr.client import ClientApp, NumPyClient
from flwr.common import Context, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation
from modules import Rows, build, flat
from torch.nn.functional import cross_entropy

held: dict[str, Any] = {}


def mine() -> dict[str, Any]:
    """Arrays and module, read once in each of Ray's processes."""
    if not held:
        torch.set_num_threads(1)
        problem = Problem(os.environ["BENCH_FILE"])
        held.update(problem=problem, rows=Rows(problem), module=build(problem))
    return held


class Trained(NumPyClient):
    def __init__(self, client: int) -> None:
        self.client = client

    def fit(
        self, parameters: list[np.ndarray], config: dict[str, Any]
    ) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        own = mine()
        module, problem = own["module"], own["problem"]
        with torch.no_grad():
            for target, value in zip(module.parameters(), parameters, strict=True):
                target.copy_(torch.from_numpy(value))
        optimizer = torch.optim.SGD(module.parameters(), lr=problem.lr)
        t = config["round"]
        for x, y in own["rows"].batches(t, int(problem.cohorts[t][self.client])):
            optimizer.zero_grad()
            cross_entropy(module(x), y).backward()
            optimizer.step()
        return [p.detach().numpy().copy() for p in module.parameters()], 1, {}


def prepare(problem: Problem) -> Run:
    """As many nodes as clients in a cohort: node k is the k-th client of the round.

    One round more comes first and changes nothing, in which Ray's processes start and read the arrays.
    """
    os.environ["BENCH_FILE"] = os.path.abspath(sys.argv[1])
    count = problem.cohorts.shape[1]

    def run(clock: Clock) -> dict[str, Any]:
        module = build(problem)
        final: dict[str, Any] = {}

        class Timed(FedAvg):
            def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
                if server_round == 1:
                    return start, {}
                parameters, metrics = super().aggregate_fit(server_round, results, failures)
                clock.tick()
                final["parameters"] = parameters
                return parameters, metrics

            def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
                if server_round == 2:
                    clock.start()
                return super().configure_fit(server_round, parameters, client_manager)

        start = ndarrays_to_parameters([p.detach().numpy().copy() for p in module.parameters()])
        strategy = Timed(
            fraction_evaluate=0.0,
            min_fit_clients=count,
            min_available_clients=count,
            initial_parameters=start,
            on_fit_config_fn=lambda t: {"round": max(t - 2, 0)},
        )

        def server(context: Context) -> ServerAppComponents:
            return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=problem.rounds + 1))

        def client(context: Context) -> Any:
            return Trained(int(context.node_config["partition-id"])).to_client()

        run_simulation(
            ServerApp(server_fn=server),
            ClientApp(client_fn=client),
            num_supernodes=count,
            backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
        )
        arrays = parameters_to_ndarrays(final["parameters"])
        for target, value in zip(module.parameters(), arrays, strict=True):
            target.data.copy_(torch.from_numpy(value))
        return {"x": flat(module).numpy()}

    return run


if __name__ == "__main__":
    from benchmarks.peers import flower  # by name, or else Ray's processes get `held` anew with every message

    serve(flower.prepare, choose_threads=False)
