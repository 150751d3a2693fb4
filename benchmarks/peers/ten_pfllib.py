"""Ten methods of PFLlib: `python ten_pfllib.py PROBLEM.npz`, with its folder `system` on the path."""

from __future__ import annotations

import importlib
import random
import sys
import types
from typing import Any

import numpy as np
import torch
from ten import Tensors, time_all
from torch import nn

sys.modules["h5py"] = types.ModuleType("h5py")  # in which it saves results, which is left out

CLASSES = {
    "fedavg": ("serveravg", "FedAvg"),
    "fedprox": ("serverprox", "FedProx"),
    "scaffold": ("serverscaffold", "SCAFFOLD"),
    "feddyn": ("serverdyn", "FedDyn"),
    "ditto": ("serverditto", "Ditto"),
    "apfl": ("serverapfl", "APFL"),
    "fedper": ("serverper", "FedPer"),
    "fedrep": ("serverrep", "FedRep"),
    "fedbabu": ("serverbabu", "FedBABU"),
    "lg-fedavg": ("serverlg", "LG_FedAvg"),
}
SPLIT = ("fedper", "fedrep", "fedbabu", "lg-fedavg")
rows: dict[tuple[int, bool], list[Any]] = {}


def kept_in_memory(dataset: str, k: int, is_train: bool = True, few_shot: int = 0) -> list[Any]:
    """Its reader without the disk, from which it reads a client's file again in every round."""
    return rows[k, is_train]


class Whole(nn.Module):
    """A body and a head by the name that it looks for."""

    def __init__(self, body: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.body, self.fc = body, head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(x))


def train(problem: Tensors, method: str, rounds: int) -> float:
    data = importlib.import_module("utils.data_utils")
    data.read_client_data = kept_in_memory
    for k in range(problem.clients):
        rows[k, True] = list(zip(problem.x[k], problem.y[k], strict=True))
        rows[k, False] = list(zip(problem.x_test[k], problem.y_test[k], strict=True))
    random.seed(1)
    np.random.seed(1)
    module, name = CLASSES[method]
    kind = getattr(importlib.import_module(f"flcore.servers.{module}"), name)
    kind.save_results = kind.save_global_model = lambda *_: None
    split = importlib.import_module("flcore.trainmodel.models").BaseHeadSplit
    body, head = problem.layers()
    model = split(body, head) if method in SPLIT else Whole(body, head)
    settings = {
        **{
            "model": model,
            "head": head,
            "device": "cpu",
            "dataset": "digits",
            "num_classes": problem.classes,
        },
        **{"global_rounds": rounds - 1, "local_epochs": 1, "batch_size": problem.batch},
        **{"local_learning_rate": problem.lr, "learning_rate_decay": False, "learning_rate_decay_gamma": 1.0},
        **{"num_clients": problem.clients, "join_ratio": 1.0, "random_join_ratio": False, "few_shot": 0},
        **{"algorithm": name, "time_select": False, "goal": "test", "time_threthold": 1e4, "top_cnt": 100},
        **{"save_folder_name": "items", "auto_break": False, "eval_gap": rounds + 1, "client_drop_rate": 0.0},
        **{"train_slow_rate": 0.0, "send_slow_rate": 0.0, "dlg_eval": False, "dlg_gap": 100},
        **{"batch_num_per_client": 2, "num_new_clients": 0, "fine_tuning_epoch_new": 0},
        **{
            "mu": problem.lam if method == "ditto" else problem.mu,
            "alpha": problem.alpha,
            "plocal_epochs": 1,
        },
        **{
            "server_learning_rate": 1.0,
            "fine_tuning_epochs": 1,
            "lamda": problem.lam,
            "p_learning_rate": problem.lr,
        },
    }
    if method == "apfl":
        settings["alpha"] = 0.5
    server = kind(types.SimpleNamespace(**settings), 0)
    server.train()
    server.evaluate()
    return float(server.rs_test_acc[-1])


time_all(train)
