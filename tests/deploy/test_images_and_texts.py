"""Images, texts, and models that owners installed, on nodes: the same as in one process."""

from __future__ import annotations

import shutil

import pytest
import torch

from coterie import fit, load, models
from coterie._core import files
from coterie.algorithms import make
from coterie.data.clients import Clients
from coterie.data.image_folders import Images
from coterie.data.texts import Texts
from coterie.deploy import demo_texts
from coterie.deploy.federation_plan import RunRequest, connect, survey
from coterie.deploy.in_process import InProcessTransport
from coterie.deploy.job import PROGRESS, JobRequest, work
from coterie.deploy.node_service import NodeService
from coterie.deploy.policy import ROLES, Policy
from coterie.deploy.transport import NodeCaller
from coterie.engine.aggregate import PLAIN
from coterie.engine.federation import Federation
from coterie.models import installed
from coterie.models.description import from_description
from tests.engine.sharding import METHODS, gap, resnet

SIZES = (10, 14, 9, 20, 12, 16)
CLASSES = ["cat", "cow", "dog"]
SPLIT = (0.6, 0.2, 0.2)


def pictures(sizes=SIZES) -> Images:
    draw = torch.Generator().manual_seed(3)
    xs = [torch.rand(size, 1, 8, 8, generator=draw) for size in sizes]
    ys = [torch.randint(3, (size,), generator=draw) for size in sizes]
    return Images(Clients(xs, ys, [f"client {k}" for k in range(len(sizes))]), CLASSES)


def part(images: Images, places) -> Images:
    rows = images.rows
    return Images(
        Clients(*([values[k] for k in places] for values in (rows.xs, rows.ys, rows.names))), images.classes
    )


def on_nodes(there, request, algorithm, rounds=3):
    """Train on these nodes and return the run, the models by client, and the notes."""
    notes: list[str] = []
    caller = NodeCaller(InProcessTransport(there), note=notes.append)
    plan = survey(caller, {name: [] for name in there}, request, "networks")
    fed = connect(caller, plan, algorithm)
    fed.aggregate = PLAIN
    run = fit(fed, algorithm, rounds=rounds)
    found = {}
    for name in plan.nodes:
        opened = there[name].runs["networks"]
        found |= dict(zip(opened.names, opened.models(run.deployed_round), strict=True))
    return run, torch.stack([found[name] for name in plan.names]), notes


@pytest.fixture
def registry(monkeypatch):
    """Models that are installed for one test."""
    monkeypatch.setattr(installed, "_from_files", {})
    return installed._from_files


@pytest.mark.quick("cnn-ditto")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["cnn", "own"])
def test_images_on_nodes_are_those_of_one_process(tmp_path, registry, method, kind):
    registry["own"] = lambda buffers="personal": models.network(resnet, buffers=buffers)
    buffers = "personal" if method == "cobo" else "averaged"
    settings = {"channels": (4, 8), "hidden": 16} if kind == "cnn" else {"buffers": buffers}
    model = models.cnn(**settings, classes=3) if kind == "cnn" else models.network(resnet, buffers=buffers)
    algorithm, images = make(method, **METHODS[method]), pictures()
    local = fit(Federation.from_clients(images.rows, model, split=SPLIT), algorithm, rounds=3)
    there = {f"node {k}": NodeService(part(images, range(k, 6, 4)), tmp_path / str(k)) for k in range(4)}
    request = RunRequest(ROLES["images"], split=SPLIT, kind=kind, data="images", settings=settings)
    run, found, notes = on_nodes(there, request, algorithm)
    assert not notes and gap(local.personal, found) < 1e-6
    assert run.fed.ledger.entries == local.fed.ledger.entries


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder of a tiny language model."""
    pytest.importorskip("peft", reason="needs coterie[llm]")
    folder = tmp_path_factory.mktemp("base") / "tiny"
    demo_texts.write_language_model(folder)
    return folder


def letters(folder, method, names=tuple(demo_texts.WORDS), **more):
    """A node per language."""
    return {
        f"node {name}": NodeService(
            Texts([name], [demo_texts.documents(name, 24)]), folder / method / name, **more
        )
        for name in names
    }


def about_texts(model="tiny", **settings) -> RunRequest:
    split = (0.8, 0.1, 0.1)
    return RunRequest(
        ROLES["texts"],
        split=split,
        kind=model,
        data="texts",
        context=8,
        settings={"lora_rank": 2, **settings},
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_adapters_on_nodes_are_those_of_one_process(tmp_path, registry, tiny, method):
    installed.install(tiny)
    algorithm = make(method, **METHODS[method])
    texts = {name: demo_texts.documents(name, 24) for name in demo_texts.WORDS}
    local = Federation.from_texts(texts, models.causal_lm(tiny, lora_rank=2), context=8, cache=tmp_path)
    one = fit(local, algorithm, rounds=2)
    run, found, notes = on_nodes(letters(tmp_path, method), about_texts(), algorithm, rounds=2)
    assert not notes and gap(one.personal, found) < 1e-6
    assert run.fed.ledger.entries == one.fed.ledger.entries
    assert run.fed.d == one.fed.d < 10_000  # adapters alone


@pytest.mark.slow
def test_a_node_with_another_base_is_left_out_by_name(tmp_path, registry, tiny):
    """Its weights differ in one number; nobody else is disturbed."""
    other = tmp_path / "other" / "tiny"
    shutil.copytree(tiny, other)
    tensors, _ = files.read_tensors(other / "model.safetensors")
    name = next(iter(tensors))
    tensors[name].view(-1)[0] += 1
    files.write_tensors(other / "model.safetensors", tensors)
    installed.install(tiny)
    there = letters(tmp_path, "fedavg")
    liar = there["node dutch"]
    answer = liar.answer

    def with_other_base(message):
        installed.install(other)
        try:
            return answer(message)
        finally:
            installed.install(tiny)

    liar.answer = with_other_base
    notes: list[str] = []
    caller = NodeCaller(InProcessTransport(there), note=notes.append)
    plan = survey(caller, {node: [] for node in there}, about_texts(), "networks")
    fed = connect(caller, plan, make("fedavg"))
    assert notes == [
        "node dutch is left out: the model tiny of this node is not the server's: its frozen weights are others"
    ]
    assert [place.here for place in fed.runtime.places] == [True, False, True, True]


def job_of(folder, kind, model, there, **more):
    """Do a whole job with nodes in this process; return its folder and the models of one node."""
    job, algorithm = folder / "federation" / "jobs" / kind, make("ditto", lr=0.05)
    plan = {"rounds": 2, "select": "last", "checkpoint_every": 0, "evaluate_every": None}
    JobRequest(
        out=str(folder / "runs" / kind),
        algorithm={"name": "ditto", "settings": algorithm.settings()},
        plan=plan,
        roles=ROLES[kind].to_json(),
        nodes={name: [] for name in there},
        data=kind,
        model=model,
        **more,
    ).write(job)
    work(job, InProcessTransport(there))
    assert files.read_json(job / PROGRESS)["state"] == "finished", (job / "notes.txt").read_text()
    return job, next(iter(there.values())).state / JobRequest.read(job).run / "run"


@pytest.mark.slow
def test_a_job_on_images_ends_with_models_at_the_nodes(tmp_path, registry):
    (tmp_path / "nets.py").write_text(
        "from torch import nn\nfrom coterie import models\n"
        "def net(width=4):\n"
        "    layers = nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.Flatten(), nn.Linear(36 * width, 3)\n"
        "    return nn.Sequential(*layers)\n"
        "MODELS = {'net': net}\n"
    )
    images, policy = pictures(), Policy.for_images((1, 8, 8), min_rows=2)
    installed.install(tmp_path / "nets.py")
    policy = policy.allowing((), ["net"])
    there = {
        f"n{k}": NodeService(part(images, range(k, 6, 3)), tmp_path / str(k), policy=policy) for k in range(3)
    }
    installed._from_files.clear()
    job, place = job_of(
        tmp_path, "images", "net", there, models=[str(tmp_path / "nets.py")], model_settings={"width": 3}
    )
    told = files.read_json(place / "models" / "model.json")
    assert told["clients"] == ["client 0", "client 3"] and told["classes"] == CLASSES
    assert told["model"]["model"] == "net" and told["model"]["settings"] == {"width": 3}
    model = from_description(told["model"])
    tensors, _ = files.read_tensors(place / "models" / "models.safetensors", told["sha256"])
    assert tensors["personal"].shape == (2, model.d) and tensors["personal"].dtype == torch.float32
    assert float(tensors["personal"][:, model.groups["buffers"]].std()) > 0  # measured at the client
    assert load(JobRequest.read(job).out).fed.names == images.rows.names


@pytest.mark.slow
def test_a_job_on_texts_ends_with_adapters_that_peft_reads(tmp_path, registry, tiny):
    installed.install(tiny)
    there = letters(tmp_path, "job", policy=Policy.for_texts().allowing((), ["tiny"]))
    _, place = job_of(
        tmp_path, "texts", "tiny", there, models=[str(tiny)], model_settings={"lora_rank": 2}, context=8
    )
    folder = place / "adapters" / "catalan"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {file.name for file in folder.iterdir()}
    assert not list(place.rglob("model.safetensors"))  # the base stays where it was
