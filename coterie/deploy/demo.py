"""A complete federation on one machine: a server and four nodes, each in its own process."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie._core import extras, files, systems
from coterie.algorithms import Algorithm
from coterie.data import bundled, small_images, tables
from coterie.data.federated import Roles
from coterie.deploy import demo_texts, federation_folder
from coterie.deploy import policy as policies
from coterie.deploy.federation_folder import FederationFolder, command
from coterie.deploy.policy import Policy

STOPS_WITHIN = 10.0
IMAGES = 800  # of the demonstration with images
MODEL = "tiny-language-model"


@contextmanager
def hospitals(folder: Path | None, log: Callable[[str], None], **policy: Any) -> Iterator[FederationFolder]:
    """Start a server and a node per hospital, each with the strict policy, and stop them when the block ends.

    Parameters
    ----------
    folder
        Where to put the federation; None uses a temporary folder.
    log
        Receives messages about what was started.
    **policy
        Changes to the strict policy.

    Yields
    ------
    FederationFolder
        The running federation.
    """
    import polars

    frame = polars.read_csv(bundled.path("heart_disease"), infer_schema=False)
    names = sorted(frame["hospital"].unique())
    roles = Roles("hospital", "sick")

    def prepare(place: Path, name: str) -> list[object]:
        table = place / f"{place.name}.csv"
        frame.filter(polars.col("hospital") == name).drop("hospital").write_csv(table)
        Policy.strict(tables.read(table), roles, **policy).write(place / policies.FILE)
        return ["--data", table]

    with _running(folder, "hearts", names, roles, "table", prepare, log) as opened:
        yield opened


@contextmanager
def digits(folder: Path | None, log: Callable[[str], None]) -> Iterator[FederationFolder]:
    """Start four nodes with handwritten digits of scikit-learn, which each node's camera turned another way."""
    pool = small_images.digits()
    turns = {"north": 0, "east": 1, "south": 2, "west": 3}

    def prepare(place: Path, name: str) -> list[object]:
        mine = torch.arange(turns[name], IMAGES, len(turns))
        turned = torch.rot90(pool.x[mine].view(-1, 8, 8), turns[name], (1, 2))
        write_images(place / "digits", turned, [str(int(label)) for label in pool.y[mine]])
        Policy.for_images((1, 8, 8)).write(place / policies.FILE)
        return ["--data", place / "digits"]

    with _running(folder, "digits", list(turns), policies.ROLES["images"], "images", prepare, log) as opened:
        yield opened


def write_images(folder: Path, x: Tensor, classes: Sequence[str]) -> None:
    """Write grey images [rows, height, width] in 0..1 as `class/number.png`."""
    extras.require("images", "writing pictures")
    from PIL import Image

    for name in set(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number, (pixels, name) in enumerate(zip(x, classes, strict=True)):
        values = (255 * pixels).round().to(torch.uint8).numpy()
        Image.fromarray(values).save(folder / name / f"{number:05d}.png")


@contextmanager
def letters(folder: Path | None, log: Callable[[str], None]) -> Iterator[FederationFolder]:
    """Start four nodes with made-up texts, and adapters of a tiny language model with random weights."""

    def prepare(place: Path, name: str) -> list[object]:
        for number, text in enumerate(demo_texts.documents(name)):
            files.write_text(place / "texts" / name / f"{number}.txt", text)
        base = place.parent.parent / MODEL
        if not base.exists():
            demo_texts.write_language_model(base)
        Policy.for_texts(models=(MODEL,)).write(place / policies.FILE)
        return ["--data", place / "texts", "--models", base]

    names = list(demo_texts.WORDS)
    with _running(folder, "letters", names, policies.ROLES["texts"], "texts", prepare, log) as opened:
        yield opened


@contextmanager
def _running(
    folder: Path | None,
    name: str,
    clients: Sequence[str],
    roles: Roles,
    kind: str,
    prepare: Callable[[Path, str], list[object]],
    log: Callable[[str], None],
) -> Iterator[FederationFolder]:
    """Start a server and a node per client; `prepare` writes data and policy and returns options of the node."""
    with ExitStack() as stack:
        if folder is None:
            brief = tempfile.TemporaryDirectory(prefix="coterie-", ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(brief)) / name
        nodes = {client.replace(" ", "-"): [client] for client in clients}
        opened = federation_folder.init(folder, nodes, roles, port=federation_folder.free_port(), kind=kind)
        server = command("federate", "server", folder, "--host", "127.0.0.1")
        stack.enter_context(process(server, folder / "server.log"))
        for node, (client,) in nodes.items():
            place = folder / "nodes" / node
            words = command("federate", "node", place, *prepare(place, client), "--client", client)
            words += ["--server", f"127.0.0.1:{opened.port}"]
            stack.enter_context(process(words, place / "node.log"))
        log(f"starting a server and {len(nodes)} nodes: {', '.join(clients)}")
        federation_folder.wait_for_port("127.0.0.1", opened.port, federation_folder.STARTS_WITHIN)
        yield opened


DEMOS: dict[str, Callable[..., AbstractContextManager[FederationFolder]]] = {
    "table": hospitals,
    "images": digits,
    "texts": letters,
}


def request(opened: FederationFolder) -> dict[str, Any]:
    """Return which model the run of a demonstration trains."""
    if opened.kind == "images":
        return {"model": "cnn", "model_settings": {"channels": [8, 16], "hidden": 32}}
    if opened.kind == "texts":
        base = str((opened.path / MODEL).absolute())
        return {"model": MODEL, "models": [base], "model_settings": {"lora_rank": 2}, "context": 16}
    return {}


def start(opened: FederationFolder, algorithm: Algorithm, rounds: int, **more: Any) -> Path:
    """Start a run with all nodes and return its job folder."""
    plan = {"rounds": rounds, "select": "last", "checkpoint_every": 0, "evaluate_every": None}
    return federation_folder.start(opened, algorithm, None, plan, **more)


@contextmanager
def process(
    words: list[str], log: Path, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that writes to a log file, and end it when the block or this process ends.

    Ctrl-C does not reach the process.
    """
    with open(log, "ab") as stream:
        running = subprocess.Popen(
            words,
            stdout=stream,
            stderr=stream,
            env=environment,
            **systems.apart(),
        )
    try:
        yield running
    finally:
        systems.end(running, STOPS_WITHIN)
