"""Networks and adapters: one process, four processes that share it, and four nodes on Flower train the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import polars
import pytest
import torch

from coterie import Federation, fit, models
from coterie._core import files
from coterie.algorithms import all_algorithms, make
from coterie.deploy import demo, demo_texts, federation_folder
from coterie.deploy.job import JobRequest
from coterie.deploy.policy import ROLES, Policy
from coterie.train.workers import crew_of
from tests.deploy.test_images_and_texts import pictures
from tests.engine.sharding import METHODS, gap, resnet

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
ROUNDS, PATIENCE = 2, 240.0
LETTERS = tuple(demo_texts.WORDS)
NETS = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from coterie import models
from tests.engine.sharding import resnet
MODELS = {{"resnet": lambda buffers="personal": models.network(resnet, buffers=buffers)}}
"""
FREE = {
    "guard": False,
    "min_rows": 2,
    "min_rows_per_statistic": 1,
    "runs_per_day": 1000,
    "splits": 1000,
    "metrics": None,
}
MODELS = ("cnn", "resnet", "lora")
# Workers add up in another order; the steep losses of random weights made 1.5e-6 of that (FedAvg, 2 rounds).
ROUNDING = {"lora": 5e-6}


def settings_of(model: str, method: str) -> dict[str, Any]:
    if model == "cnn":
        return {"channels": [4, 8], "hidden": 16}
    return (
        {"lora_rank": 2} if model == "lora" else {"buffers": "personal" if method == "cobo" else "averaged"}
    )


class Networks:
    """A server, four nodes with images and four with texts, in processes of their own."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path, self.images = path, pictures((24, 30, 26, 40))
        self.clients = {f"i{k}": [name] for k, name in enumerate(self.images.rows.names)}
        self.clients |= {f"t{k}": [name] for k, name in enumerate(LETTERS)}
        port = federation_folder.free_port()
        self.folder = federation_folder.init(path, self.clients, ROLES["images"], port=port, kind="images")
        self.base = path / "tiny"
        demo_texts.write_language_model(self.base)
        (path / "nets.py").write_text(NETS)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        words = federation_folder.command("federate", "server", path, "--host", "127.0.0.1")
        stack.enter_context(demo.process(words, path / "server.log", environment))
        for node, (client,) in self.clients.items():
            place = path / "nodes" / node
            data, own = place / "rows", path / "nets.py"
            bounds = {"buffers": ["personal", "averaged"], "lora_rank": [1, 8]}
            if node.startswith("i"):
                k = self.images.rows.names.index(client)
                labels = [self.images.classes[int(y)] for y in self.images.rows.ys[k]]
                demo.write_images(data, self.images.rows.xs[k][:, 0], labels)
                policy = Policy.for_images((1, 8, 8), settings=bounds, **FREE)
                allowed: tuple[str, ...] = ("cnn", "resnet")
            else:
                for number, text in enumerate(demo_texts.documents(client, 24)):
                    files.write_text(data / client / f"{number:03d}.txt", text)
                policy = Policy.for_texts(settings=bounds, **FREE)
                own, allowed = self.base, ("tiny",)
            policy = policy.allowing(list(all_algorithms()))
            Policy(**{**vars(policy), "models": allowed}).write(place / "policy.toml")
            words = federation_folder.command("federate", "node", place, "--data", data, "--models", own)
            words += ["--client", client, "--server", f"127.0.0.1:{port}"]
            stack.enter_context(demo.process(words, path / f"{node}.log", environment))
        federation_folder.wait_for_port("127.0.0.1", port, PATIENCE)

    def job(self, model: str, method: str) -> Path:
        kind, first = ("texts", "t") if model == "lora" else ("images", "i")
        algorithm, job = make(method, **METHODS[method]), self.path / "jobs" / f"{model}-{method}"
        JobRequest(
            out=str(self.path / "runs" / job.name),
            algorithm={"name": method, "settings": algorithm.settings()},
            plan={
                "rounds": ROUNDS,
                "select": "last",
                "aggregate": "mean",
                "checkpoint_every": 0,
                "evaluate_every": 0,
            },
            roles=ROLES[kind].to_json(),
            nodes={node: own for node, own in self.clients.items() if node.startswith(first)},
            data=kind,
            model="tiny" if model == "lora" else model,
            models=[str(self.base), str(self.path / "nets.py")],
            model_settings=settings_of(model, method),
            context=8,
            patience=PATIENCE,
        ).write(job)
        return job

    def local(self, model: str, method: str, cache: Path) -> Federation:
        settings = settings_of(model, method)
        if model == "lora":
            texts = {name: demo_texts.documents(name, 24) for name in LETTERS}
            return Federation.from_texts(
                texts, models.causal_lm(self.base, **settings), context=8, cache=cache
            )
        made = models.cnn(**settings, classes=3) if model == "cnn" else models.network(resnet, **settings)
        shown = self.images.rows
        seen = [(255 * x).round() / 255 for x in shown.xs]  # as a picture holds them
        order = [_by_class(y) for y in shown.ys]
        xs = [x[at] for x, at in zip(seen, order, strict=True)]
        ys = [y[at] for y, at in zip(shown.ys, order, strict=True)]
        return Federation.from_arrays(xs, ys, made, names=shown.names, split=(0.6, 0.2, 0.2))

    def models(self, job: Path) -> dict[str, torch.Tensor]:
        found = {}
        for node in JobRequest.read(job).nodes:
            place = self.path / "nodes" / node / "state" / JobRequest.read(job).run / "run" / "models"
            personal = files.read_tensors(place / "models.safetensors")[0]["personal"]
            found |= dict(zip(files.read_json(place / "model.json")["clients"], personal, strict=True))
        return found


def _by_class(y: torch.Tensor) -> torch.Tensor:
    """The order in which files of folders by class are read."""
    return torch.argsort(y, stable=True)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Networks, dict[tuple[str, str], Path]]]:
    pytest.importorskip("flwr", reason="a federation needs the extra 'flower'")
    pytest.importorskip("peft", reason="needs coterie[llm]")
    pytest.importorskip("PIL", reason="needs coterie[images]")
    with ExitStack() as stack:
        running = Networks(tmp_path_factory.mktemp("networks") / "federation", stack)
        jobs = {(model, method): running.job(model, method) for model in MODELS for method in METHODS}
        federation_folder.submit(running.folder, list(jobs.values()))
        for job in jobs.values():
            federation_folder.follow(job, lambda told: None, limit=PATIENCE)
        yield running, jobs


@pytest.fixture(scope="module")
def four() -> Iterator[Any]:
    with crew_of(4) as crew:
        yield crew


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", METHODS)
def test_one_process_four_processes_and_four_nodes(live, four, tmp_path, model, method) -> None:
    running, jobs = live
    job = jobs[model, method]
    fed, algorithm = running.local(model, method, tmp_path), make(method, **METHODS[method])
    one = fit(fed, algorithm, rounds=ROUNDS, evaluate_every=0)
    shared = fit(fed, algorithm, rounds=ROUNDS, evaluate_every=0, workers=four)
    there = running.models(job)
    assert gap(one.personal, torch.stack([there[name] for name in fed.names])) < 1e-6
    assert gap(one.personal, shared.personal) < ROUNDING.get(model, 1e-6)
    out = running.path / "runs" / job.name
    assert files.read_json(out / "result.json")["left_out"] == []
    assert polars.read_parquet(out / "ledger.parquet").equals(one.ledger)
    assert shared.fed.ledger.entries == one.fed.ledger.entries
