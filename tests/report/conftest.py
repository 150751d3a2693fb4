"""Small runs to report on: four hospitals, twelve clients in three clusters, a thousand clients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import coterie
from coterie._core import files
from coterie.algorithms import find

HOSTILE = "</script><b>7</b> & 'co'"


def clustered(clients: int, rows: int, seed: int = 0) -> coterie.Federation:
    """Two classes, four features, three kinds of clients."""
    draw = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(3, 4, generator=draw, dtype=torch.float64)
    xs, ys = [], []
    for k in range(clients):
        x = torch.randn(rows + k % 7, 4, generator=draw, dtype=torch.float64)
        xs.append(x)
        ys.append((torch.rand(len(x), generator=draw) < torch.sigmoid(x @ centres[k % 3])).long())
    names = [HOSTILE if k == 7 else f"clinic {k}" for k in range(clients)]
    model = coterie.models.logistic(l2=1e-3, intercept=True)
    return coterie.Federation.from_arrays(xs, ys, model, names=names, split=(0.6, 0.2, 0.2))


@pytest.fixture(scope="session")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("comparison") / "heart"
    coterie.compare("heart_disease", "hospital", "sick", seeds=2, rounds=8, budget=2, out=out)
    return out


@pytest.fixture(scope="session")
def twelve(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of local, cobo, ifca and flix."""
    folder, fed = tmp_path_factory.mktemp("twelve"), clustered(12, 60)
    methods = {
        "local": find("local")(lr=0.3),
        "cobo": find("cobo")(gamma=1.0, sampling="all"),
        "ifca": find("ifca")(clusters=3, lr=0.3),
        "flix": find("flix")(alpha="auto", solver="sgd", lr=0.3, local="sgd", local_steps=100),
    }
    for name, method in methods.items():
        coterie.fit(fed, method, rounds=12, out=folder / name)
    return folder


@pytest.fixture(scope="session")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of local and ifca with 1,000 clients, and ifca's with weights between all pairs, as CoBo records them."""
    folder, fed = tmp_path_factory.mktemp("thousand"), clustered(1000, 20)
    coterie.fit(fed, find("local")(lr=0.3), rounds=6, out=folder / "local")
    coterie.fit(fed, find("ifca")(clusters=3, lr=0.3), rounds=6, out=folder / "ifca")
    kind = torch.arange(1000) % 3
    weights = torch.where(kind.unsqueeze(1) == kind, 0.9, 0.05).double()
    files.write_tensors(folder / "ifca" / "traces.safetensors", {"weights.6": weights})
    return folder
