"""pfl: its federated averaging on its simulated backend."""

from __future__ import annotations

from typing import Any

import torch
from common import Clock, Problem, Run, serve
from modules import Rows, build, flat
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn


class Trained(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def loss(self, x: Tensor, y: Tensor, **_: Any) -> Tensor:
        return nn.functional.cross_entropy(self.body(x), y)

    def metrics(self, x: Tensor, y: Tensor, **_: Any) -> dict[str, Any]:
        return {}


class Ticks(TrainingProcessCallback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
        self.clock.tick()
        return False, Metrics()


def prepare(problem: Problem) -> Run:
    rows = Rows(problem)
    order = [(t, int(k)) for t, cohort in enumerate(problem.cohorts) for k in cohort]

    def dataset(visit: int) -> PyTorchTensorDataset:
        t, k = order[visit]
        x, y = rows.of[k]
        drawn = rows.draws[t, rows.place[t][k]].flatten()
        return PyTorchTensorDataset((x[drawn], y[drawn]))

    def run(clock: Clock) -> dict[str, Any]:
        module = Trained(build(problem))
        visits = iter(range(len(order)))
        data = FederatedDataset(dataset, lambda: next(visits))
        model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
        settings = NNAlgorithmParams(
            central_num_iterations=problem.rounds,
            evaluation_frequency=problem.rounds + 1,
            train_cohort_size=problem.cohorts.shape[1],
            val_cohort_size=0,
        )
        training = NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=problem.lr, local_batch_size=problem.batch
        )
        clock.start()
        FederatedAveraging().run(
            settings,
            SimulatedBackend(data, data),
            model,
            training,
            NNEvalHyperParams(local_batch_size=problem.batch),
            [Ticks(clock)],
            send_metrics_to_platform=False,
        )
        return {"x": flat(module).numpy()}

    return run


serve(prepare)
