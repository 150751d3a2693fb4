"""Peers in environments of their own under .bench/, with exact versions, made on request."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / ".bench"
PEERS = Path(__file__).resolve().parent / "peers"
BUILT = "built"  # folder of an earlier revision's sources in which it is installed


@dataclass(frozen=True)
class Peer:
    """A driver, the environment it needs (None: ours), the workloads it runs, and by workload why not the others."""

    name: str
    title: str
    runs: tuple[str, ...]
    environment: str | None = None
    why_not: dict[str, str] = field(default_factory=dict)
    kind: str = "torch"
    script: str = ""
    """The driver's file, where it is not that of the name."""
    ready: bool = False
    """Whether minibatches are handed over ready-made, one gather each, instead of by a DataLoader."""
    tree: Path = ROOT
    """The sources that it runs: ours as they are, or as they were at an earlier revision."""

    @property
    def path(self) -> tuple[Path, ...]:
        """Folders that its process imports from."""
        built = (self.tree / BUILT,) if self.tree != ROOT else ()
        return *built, self.tree, self.tree / "benchmarks" / "peers" / "shared"

    @property
    def python(self) -> Path:
        return (
            Path(sys.executable) if self.environment is None else BENCH / self.environment / "bin" / "python"
        )

    @property
    def driver(self) -> Path:
        return self.tree / "benchmarks" / "peers" / f"{self.script or self.name}.py"

    @property
    def pins(self) -> Path:
        return PEERS / f"{self.environment}.txt"

    @property
    def reasons(self) -> str:
        return "; ".join(f"{works}: {why}" for works, why in self.why_not.items())

    def installed(self) -> bool:
        """Whether the environment is there and has the versions that are written down."""
        if self.environment is None:
            return True
        note = BENCH / self.environment / "pins.txt"
        return self.python.exists() and note.exists() and note.read_text() == self.pins.read_text()

    def install(self) -> None:
        """Make the environment; uv where it is found, else pip. Nothing is resolved: all versions are written down."""
        if self.installed() or self.environment is None:
            return
        folder = BENCH / self.environment
        uv = os.environ.get("UV") or shutil.which("uv")
        if uv:
            _run(uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder))
            start = [uv, "pip", "install", "--quiet", "--python", str(self.python)]
        else:
            _run(sys.executable, "-m", "venv", "--clear", str(folder))
            start = [str(self.python), "-m", "pip", "install", "--quiet"]
        links = (
            ["--find-links", os.environ["PIP_FIND_LINKS"]] if os.environ.get("PIP_FIND_LINKS") and uv else []
        )
        _run(*start, "--no-deps", *links, "-r", str(self.pins))
        (folder / "pins.txt").write_text(self.pins.read_text())


def earlier(revision: str) -> Peer:
    """Return Coterie at an earlier revision, taken from git and built under .bench/ if it is not there yet."""
    tree = BENCH / f"coterie-{revision}"
    if not tree.exists():
        fresh = BENCH / f"coterie-{revision}.{os.getpid()}"
        fresh.mkdir(parents=True)
        archive = fresh / "sources.tar"
        _run("git", "archive", "--output", str(archive), revision)
        shutil.unpack_archive(archive, fresh)
        archive.unlink()
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        _run(*install, str(fresh / BUILT), str(fresh))
        shutil.rmtree(fresh / "coterie")  # that in BUILT has the C library
        fresh.replace(tree)
    return Peer("earlier", f"Coterie at {revision}", OURS.runs, script="ours", tree=tree)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, cwd=ROOT)


OURS = Peer("ours", "Coterie", ("W1", "W2", "W3", "W4", "W5", "W6"))
NEITHER = {"W5, W6": "it has neither L2GD nor CoBo"}
NO_DITTO = {"W4": "it has no Ditto", **NEITHER}
FEDLAB = {
    "W4": "its Ditto calls the module tqdm, and reads args, local_models and _train_alone, which nothing defines",
    **NEITHER,
}
ALL = (
    Peer("loop", "plain PyTorch loop, ready-made minibatches", OURS.runs, ready=True),
    Peer(
        "loader",
        "plain PyTorch loop with a DataLoader",
        ("W1", "W2", "W3", "W4"),
        why_not={"W5, W6": "every step takes all rows of a client, there are no minibatches to load"},
        script="loop",
    ),
    Peer("fedlab", "FedLab", ("W1", "W2", "W3"), "fedlab", FEDLAB),
    Peer(
        "fedlab-ready",
        "FedLab, ready-made minibatches",
        ("W1", "W2", "W3"),
        "fedlab",
        FEDLAB,
        script="fedlab",
        ready=True,
    ),
    Peer("pfl", "pfl", ("W1", "W2", "W3"), "pfl", NO_DITTO),
    Peer("fluke", "fluke", ("W1", "W2", "W3", "W4"), "fluke", NEITHER),
    Peer("flgo", "FLGo", ("W1", "W2", "W3", "W4"), "flgo", NEITHER),
    Peer("flower", "Flower + Ray", ("W1", "W2", "W3"), "flwr", NO_DITTO),
    Peer("fedjax", "FedJAX", ("W1", "W2", "W3"), "fedjax", NO_DITTO, "jax"),
    Peer(
        "scan",
        "JAX lax.scan",
        ("W5",),
        "jax",
        {"W1, W2, W3, W4, W6": "written for the convex workload, where nothing is drawn but a coin"},
        "jax",
    ),
)
BY_NAME = {peer.name: peer for peer in (OURS, *ALL)}
