"""FedLab: its serial trainer and synchronous server in its standalone pipeline."""

from __future__ import annotations

from typing import Any

import torch
from common import Clock, Problem, Run, serve, torchvision_without_cuda
from modules import Rows, build, flat

torchvision_without_cuda()

from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler  # noqa: E402
from fedlab.core.standalone import StandalonePipeline  # noqa: E402


def prepare(problem: Problem) -> Run:
    rows = Rows(problem)

    class Handler(FedAvgServerHandler):
        def sample_clients(self) -> list[int]:
            return problem.cohorts[self.round].tolist()

        @property
        def num_clients_per_round(self) -> int:
            return problem.cohorts.shape[1]

    class Data:
        def __init__(self, handler: Handler) -> None:
            self.handler = handler

        def get_dataloader(self, client: int, batch_size: int) -> Any:
            return rows.batches(self.handler.round, client)

    class Pipeline(StandalonePipeline):
        clock: Clock

        def evaluate(self) -> None:
            self.clock.tick()

    def run(clock: Clock) -> dict[str, Any]:
        module = build(problem)
        handler = Handler(module, problem.rounds, 1.0)
        trainer = FedAvgSerialClientTrainer(build(problem), len(problem.size))
        trainer.setup_dataset(Data(handler))
        trainer.setup_optim(1, problem.batch, problem.lr)
        pipeline = Pipeline(handler, trainer)
        pipeline.clock = clock
        clock.start()
        pipeline.main()
        return {"x": flat(handler.model).numpy()}

    return run


torch.manual_seed(0)
serve(prepare)
