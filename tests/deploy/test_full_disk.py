"""The disk of a server that is full: the run ends with a reason and a remedy, and goes on to the same bytes."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from coterie._core import files
from coterie._core.errors import RunError
from coterie.algorithms import make
from coterie.data.federated import Roles
from coterie.deploy import audit, federation_folder
from coterie.deploy.in_process import InProcessTransport
from coterie.deploy.job import RESERVE, SUMMARY, JobRequest, work
from coterie.deploy.node_service import NodeService
from tests.deploy.test_malicious_node import tables

ROUNDS = 4


def request(path: Path) -> Path:
    job, algorithm = path / "federation" / "jobs" / "first", make("ditto", batch=8)
    JobRequest(
        str(path / "runs" / "first"),
        {"name": algorithm.name, "settings": algorithm.settings()},
        {"rounds": ROUNDS, "checkpoint_every": 1, "evaluate_every": 2},
        Roles("who", "y", cluster="group").to_json(),
        {name: [name] for name in tables()},
        run="a" * 32,
    ).write(job)
    return job


def nodes(path: Path) -> InProcessTransport:
    return InProcessTransport({name: NodeService(rows, path / name) for name, rows in tables().items()})


def bytes_of(path: Path) -> list[str]:
    return [files.sha256(path / "runs" / "first" / name) for name in ("metrics.parquet", "ledger.parquet")]


class Disk:
    """Refuses to write files whose names end with `ending`, from the nth time on."""

    def __init__(self, ending: str, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ending, self.left, self.patch = ending, nth, monkeypatch
        self.append, self.write_with = files.append, files.write_with
        monkeypatch.setattr(files, "append", self._append)
        monkeypatch.setattr(files, "write_with", self._write)

    def _require(self, path: Path) -> None:
        reserved = path.name in ("progress.json", "notes.txt") and not (path.parent / RESERVE).exists()
        self.left -= path.name.endswith(self.ending)
        if self.left <= 0 and not reserved:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    def _append(self, path: Path, content: bytes, sync: bool = True) -> None:
        self._require(path)
        self.append(path, content, sync)

    def _write(self, path: Path, write: Any) -> None:
        try:
            self._require(path)
        except OSError as problem:
            raise RunError(f"{path} cannot be written") from problem
        self.write_with(path, write)


@pytest.mark.quick("reserve-1")
@pytest.mark.parametrize(
    ("ending", "nth"),
    [
        ("audit.log", 12), ("progress.json", 4), ("checkpoint.json", 2), ("live.json", 1), ("plan.json", 1),
        ("metrics.parquet", 1), ("result.json", 1), ("summary.json", 1), ("reserve", 1),
    ],
)  # fmt: skip
def test_a_full_disk_is_said_and_the_run_goes_on_to_the_same_bytes(
    tmp_path: Path, ending: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    work(request(tmp_path / "whole"), nodes(tmp_path / "whole"))
    job, transport = request(tmp_path / "full"), nodes(tmp_path / "full")
    with monkeypatch.context() as patch:
        Disk(ending, nth, patch)
        work(job, transport)
    with pytest.raises(RunError, match=r"is full.*make room.*--resume first") as told:
        federation_folder.follow(job, lambda told: None)
    assert "\n" not in str(told.value) and not list(tmp_path.rglob("*.tmp"))
    assert not (job / RESERVE).exists()
    if (job / audit.FILE).exists():
        assert list(audit.verify(job / audit.FILE))
    work(job, transport)
    assert federation_folder.follow(job, lambda told: None)["state"] == "finished"
    assert bytes_of(tmp_path / "full") == bytes_of(tmp_path / "whole")
    assert (job / f"{SUMMARY}.json").exists() and not (job / RESERVE).exists()
