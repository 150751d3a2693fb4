"""Ten methods of FL-bench: `python ten_flbench.py PROBLEM.npz`, with its folder on the path."""

from __future__ import annotations

import importlib
import inspect
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

from common import torchvision_without_cuda
from ten import Tensors, time_all

torchvision_without_cuda()
for name in ("ray", "ray.actor", "pynvml"):  # for several processes and for GPUs, which are not used
    sys.modules[name] = types.ModuleType(name)
sys.modules["ray"].actor = sys.modules["ray.actor"]  # type: ignore[attr-defined]
sys.modules["ray.actor"].ActorHandle = object  # type: ignore[attr-defined]

import torch  # noqa: E402
from data.utils.datasets import DATASETS, BaseDataset  # noqa: E402
from omegaconf import DictConfig  # noqa: E402
from src.server import fedavg  # noqa: E402
from src.utils import constants  # noqa: E402
from src.utils.functional import parse_args  # noqa: E402
from src.utils.models import MODELS, DecoupledModel  # noqa: E402

NAMES = {"lg-fedavg": "lgfedavg"}


def train(problem: Tensors, method: str, rounds: int) -> float:
    known = problem.x.shape[1]
    both = [torch.cat(parts, 1) for parts in ((problem.x, problem.x_test), (problem.y, problem.y_test))]
    each = both[0].shape[1]
    clients = list(range(problem.clients))

    class Rows(BaseDataset):
        def __init__(self, root: Path, args: Any, **transforms: Any) -> None:
            super().__init__(
                both[0].flatten(0, 1), both[1].flatten(), list(range(problem.classes)), **transforms
            )

    class Layers(DecoupledModel):
        def __init__(self, **_: Any) -> None:
            super().__init__()
            self.base, self.classifier = problem.layers()

    DATASETS["rows"], MODELS["layers"] = Rows, Layers
    constants.NUM_CLASSES["rows"] = problem.classes
    partition = {
        "separation": {"train": clients, "test": clients, "val": clients, "total": len(clients)},
        "data_indices": [
            {
                "train": list(range(k * each, k * each + known)),
                "val": [],
                "test": list(range(k * each + known, (k + 1) * each)),
            }
            for k in clients
        ],
    }
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "data" / "rows"
        place.mkdir(parents=True)
        (place / "args.json").write_text('{"split": "sample"}')
        (place / "partition.pkl").write_bytes(b"")
        fedavg.FLBENCH_ROOT = Path(folder)
        fedavg.pickle = types.SimpleNamespace(load=lambda _: partition)  # what the file would hold
        runtime = types.SimpleNamespace(output_dir=folder)
        fedavg.HydraConfig = types.SimpleNamespace(get=lambda: types.SimpleNamespace(runtime=runtime))
        own = NAMES.get(method, method)
        module = importlib.import_module(f"src.server.{own}")
        kind = next(one for name, one in inspect.getmembers(module) if name.lower() == own + "server")
        config = parse_args(
            DictConfig(_settings(problem, own, rounds)), own, getattr(kind, "get_hyperparams", None)
        )
        server = kind(args=config)
        server.train()
    return _accuracy(server, rounds)


def _settings(problem: Tensors, method: str, rounds: int) -> dict[str, Any]:
    """Return its settings: everybody in every round, an epoch each, a test of all clients after the last."""
    test = {"interval": rounds, "finetune_epoch": 0, "train": False, "val": False, "test": True}
    extra: dict[str, dict[str, Any]] = {
        "fedprox": {"mu": problem.mu},
        "feddyn": {"alpha": problem.alpha},
        "ditto": {"pers_epoch": 1, "lamda": problem.lam},
        "apfl": {"alpha": 0.5},
        "fedrep": {"train_body_epoch": 1},
        "fedbabu": {},
    }
    if method == "fedbabu":
        test["finetune_epoch"] = 1
    return {
        "method": method,
        "dataset": {"name": "rows"},
        "model": {"name": "layers"},
        "optimizer": {"name": "sgd", "lr": problem.lr},
        "mode": "serial",
        "common": {
            **{"seed": 1, "join_ratio": 1.0, "global_epoch": rounds, "local_epoch": 1},
            **{"batch_size": problem.batch, "use_cuda": False, "client_side_evaluation": False},
            **{
                "verbose_gap": 10**6,
                "save_log": False,
                "save_learning_curve_plot": False,
                "save_metrics": False,
            },
            "test": {"client": test, "server": {"interval": -1, "train": False, "val": False, "test": False}},
        },
        method: extra.get(method, {}),
    }


def _accuracy(server: Any, rounds: int) -> float:
    found = server.test_results[rounds]["all_clients"]
    after = found["after"]["test"]
    return float((after if after.size else found["before"]["test"]).accuracy) / 100


time_all(train)
