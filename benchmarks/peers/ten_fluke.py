"""Ten methods of fluke: `python ten_fluke.py PROBLEM.npz`."""

from __future__ import annotations

import importlib
from typing import Any

from common import torchvision_without_cuda
from ten import Tensors, time_all

torchvision_without_cuda()

import torch  # noqa: E402
from fluke import DDict, FlukeENV  # noqa: E402
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader  # noqa: E402
from fluke.evaluation import ClassificationEval  # noqa: E402
from fluke.nets import EncoderHeadNet  # noqa: E402

CLASSES = {
    "fedavg": ("fedavg", "FedAVG"),
    "fedprox": ("fedprox", "FedProx"),
    "scaffold": ("scaffold", "SCAFFOLD"),
    "feddyn": ("feddyn", "FedDyn"),
    "ditto": ("ditto", "Ditto"),
    "apfl": ("apfl", "APFL"),
    "fedper": ("fedper", "FedPer"),
    "fedrep": ("fedrep", "FedRep"),
    "fedbabu": ("fedbabu", "FedBABU"),
    "lg-fedavg": ("lg_fedavg", "LGFedAVG"),
}
BODIES = ("fedper", "fedrep", "fedbabu")  # whose server has the body alone
OWN = ("ditto", "apfl", "fedper", "fedrep", "fedbabu", "lg-fedavg")  # whose clients are given a model


def train(problem: Tensors, method: str, rounds: int) -> float:
    env = FlukeENV()
    env.set_inmemory(True)
    env.set_evaluator(ClassificationEval(eval_every=rounds, n_classes=problem.classes))
    env.set_eval_cfg(pre_fit=False, post_fit=False, locals=True, server=False)
    torch.manual_seed(1)
    batch, classes = problem.batch, problem.classes

    def loaders(x: torch.Tensor, y: torch.Tensor) -> list[FastDataLoader]:
        return [FastDataLoader(a, b, num_labels=classes, batch_size=batch) for a, b in zip(x, y, strict=True)]

    data = DummyDataContainer(
        loaders(problem.x, problem.y), loaders(problem.x_test, problem.y_test), None, classes
    )
    client: dict[str, Any] = {
        "batch_size": batch,
        "local_epochs": 1,
        "loss": "CrossEntropyLoss",
        "optimizer": {"name": "SGD", "lr": problem.lr},
        "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1.0},
    }
    model = EncoderHeadNet(*problem.layers())
    extra: dict[str, dict[str, Any]] = {
        "fedprox": {"mu": problem.mu},
        "feddyn": {"alpha": problem.alpha},
        "ditto": {"tau": 1, "lam": problem.lam},
        "apfl": {"lam": 0.5},
        "fedrep": {"tau": 1},
        "fedbabu": {"mode": "full", "fine_tuning_epochs": 1},
    }
    client |= extra.get(method, {})
    if method in OWN:
        client["model"] = model
    server: dict[str, Any] = {"weighted": True}
    server |= {"apfl": {"tau": 1}, "feddyn": {"alpha": problem.alpha}}.get(method, {})
    module, name = CLASSES[method]
    way = getattr(importlib.import_module(f"fluke.algorithms.{module}"), name)
    shared = model.head if method == "lg-fedavg" else model.encoder if method in BODIES else model
    settings = DDict(client=client, server=server, model=shared)
    federation = way(problem.clients, DataSplitter(data), settings)
    federation.run(rounds, 1.0)
    found = [
        one.evaluate(env.get_evaluator(), one.test_set) if hasattr(one, "evaluate") else {}
        for one in federation.clients
    ]
    return sum(one["accuracy"] for one in found) / len(found)


time_all(train)
