"""FLGo: its federated averaging and its Ditto, started by its own init on a task in memory; nothing is evaluated."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common import Clock, Problem, Run, serve, torchvision_without_cuda
from modules import Rows, build, flat

torchvision_without_cuda()

import flgo  # noqa: E402
import torch  # noqa: E402
from flgo.algorithm import ditto, fedavg  # noqa: E402
from flgo.benchmark.base import BasicTaskPipe  # noqa: E402
from flgo.benchmark.toolkits.cv.classification import GeneralCalculator  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402


class Owned(TensorDataset):
    """The rows of one client."""

    client: int


def prepare(problem: Problem) -> Run:
    rows = Rows(problem)
    names = [str(k) for k in range(len(problem.size))]
    personal = hasattr(problem, "lam")
    algorithm = ditto if personal else fedavg
    now = SimpleNamespace(round=0)
    data = {name: {"train": Owned(*part)} for name, part in zip(names, rows.of, strict=True)}
    for name in names:
        data[name]["train"].client = int(name)

    class Pipe(BasicTaskPipe):
        """The task: clients with their rows, a server without any."""

        def __init__(self, path: str) -> None:
            super().__init__(path)
            self.feddata = {"client_names": names}

        def load_data(self, option: dict[str, Any]) -> dict[str, Any]:
            return data

    class Calculator(GeneralCalculator):
        """Its own on the draws of the round; where its Ditto gives both models one minibatch, each gets its own."""

        def get_dataloader(self, dataset: Owned, *_: Any, **__: Any) -> Iterable[Any]:
            if not personal:
                return rows.batches(now.round, dataset.client)
            shared, own = (rows.batches(now.round, dataset.client, slice(first, None, 2)) for first in (1, 0))
            return (iter(pair) for pair in zip(shared, own, strict=True))

        def compute_loss(self, model: Any, batch: Any) -> dict[str, Any]:
            return super().compute_loss(model, next(batch) if personal else batch)

    sys.modules["problem.core"] = SimpleNamespace(TaskPipe=Pipe, TaskCalculator=Calculator)  # type: ignore[assignment]

    def run(clock: Clock) -> dict[str, Any]:
        class Server(algorithm.Server):
            def sample(self) -> list[int]:
                return problem.cohorts[now.round].tolist()

            def initialize(self) -> None:
                super().initialize()
                self.aggregation_option = "weighted" if personal else "uniform"

            def _if_exit(self) -> bool:
                now.round = self.current_round - 1
                if now.round:
                    clock.tick()
                else:
                    clock.start()
                return super()._if_exit()

        class Client(algorithm.Client):
            pass

        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "info").write_text(json.dumps({"benchmark": "problem"}))
            Path(folder, "record").mkdir()
            server = flgo.init(
                folder,
                SimpleNamespace(__name__=algorithm.__name__, Server=Server, Client=Client),
                {
                    "num_rounds": problem.rounds,
                    "num_steps": problem.steps,
                    "batch_size": problem.batch,
                    "learning_rate": problem.lr,
                    "algo_para": [problem.lam] if personal else [],
                    "eval_interval": -1,
                    "no_log_console": True,
                    "no_tqdm": True,
                    "torch_num_threads": torch.get_num_threads(),
                },
                flgo.convert_model(lambda: build(problem)),
            )
            server.run()
        result = {"x": flat(server.model).numpy()}
        if personal:
            result["personal"] = torch.stack([flat(client.model) for client in server.clients]).numpy()
        return result

    return run


serve(prepare)
