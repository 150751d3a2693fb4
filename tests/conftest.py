"""The commands as a user gives them, and small tables of every kind."""

from __future__ import annotations

import functools
import gzip
import io
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch

if TYPE_CHECKING:
    from coterie.engine.federation import Federation

torch.set_num_threads(1)  # the tests run side by side, and a second thread beside other work only waits

# However slow the machine is; CI draws the same examples every time.
hypothesis.settings.register_profile("coterie", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("coterie")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the cases of a test that `@pytest.mark.quick` does not name as slow."""
    quick = item.get_closest_marker("quick")
    if quick is not None and isinstance(item, pytest.Function) and item.callspec.id not in quick.args:
        item.add_marker("slow")


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Bytes by their number: packed ones hold the time, and all processes must give a test one name."""
    return f"{len(val)} bytes" if isinstance(val, bytes) else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests in a browser where the driver that playwright brings cannot start."""
    if item.get_closest_marker("browser") and (problem := _driver_problem()):
        pytest.skip(f"playwright does not start: {problem} (on a bare Debian: apt-get install libatomic1)")


@functools.cache
def _driver_problem() -> str:
    """Return the last line of what playwright's driver says when it cannot start, "" if it can."""
    done = subprocess.run([sys.executable, "-m", "playwright", "--version"], capture_output=True, text=True)
    return (done.stderr.strip() or "no reason given").splitlines()[-1] if done.returncode else ""


@dataclass(frozen=True)
class Outcome:
    """What a command left: exit code, standard output, standard error."""

    code: int
    out: str
    err: str


Command = Callable[..., Outcome]
WriteTable = Callable[..., Path]


def _run(*arguments: object) -> Outcome:
    from coterie.cli import main

    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return Outcome(int(end.value.code or 0), out.getvalue(), err.getvalue())


@pytest.fixture(scope="session")
def command() -> Iterator[Command]:
    """`command("fit", table, "--out", folder, ...)` in this process, 80 columns wide."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        yield _run


def _rows(kind: str, count: int) -> Iterator[str]:
    """Lines of a table: site, age (some missing), colour (some missing), score, and the target `y`."""
    draw = random.Random(f"{kind} table")
    yield "site,region,age,colour,score,y"
    for k in range(count):
        site = ("[red]north", "south", "east", "west")[k % 4]
        age, score, colour = draw.gauss(50, 10), draw.gauss(0, 1), draw.choice(("red", "green", "blue", ""))
        value = age / 10 + 2 * score + 3 * (colour == "red") + 5 * (site == "south")
        target = {
            "binary": "yes" if value > 7 else "no",
            "multiclass": ("low", "middle", "high")[min(2, max(0, int(value // 4)))],
            "regression": f"{1e5 * value:.1f}",
        }[kind]
        region = "warm" if site == "south" else "cold"
        yield f"{site},{region},{'' if k % 11 == 0 else f'{age:.1f}'},{colour},{score:.4f},{target}"


def _write_table(path: Path, kind: str, count: int = 160) -> Path:
    text = "\n".join(_rows(kind, count)) + "\n"
    if path.suffix == ".parquet":
        import polars

        polars.read_csv(text.encode()).write_parquet(path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Torch has two threads, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def write_table() -> WriteTable:
    """`write_table(path, "binary" | "multiclass" | "regression")`: CSV, CSV.gz or Parquet by its name."""
    return _write_table


def _absent_in(fed: Federation, missed: set[tuple[Any, ...]]) -> Federation:
    """The federation in which these clients do not come in these rounds, or in these phases of them."""
    from coterie.engine.local_runtime import LocalRuntime
    from coterie.engine.protocol import Answer, Call, Visits

    class Gaps(LocalRuntime):
        def fresh(self, seed: int | None = None) -> Gaps:
            return gaps(super().fresh(seed))

        def run(self, call: Call, visits: Visits, *rest: Any, lasting: bool = True, **more: Any) -> Answer:
            asked = torch.arange(len(self.ids)) if visits.at is None else visits.at
            gone = [
                {(call.round, fed.names[k]), (call.round, fed.names[k], call.phase)} for k in asked.tolist()
            ]
            away = torch.tensor([lasting and bool(one & missed) for one in gone])
            if not away.any():
                return super().run(call, visits, *rest, lasting=lasting, **more)
            if away.all():
                return Answer({}, came=~away)
            call = replace(call, each={name: value[~away] for name, value in call.each.items()})
            nth = None if visits.nth is None else visits.nth[~away]
            answer = super().run(call, Visits(asked[~away], nth), *rest, lasting=lasting, **more)
            return Answer(answer.named, answer.good, answer.encoded, came=~away)

    def gaps(runtime: LocalRuntime) -> Gaps:
        return Gaps(
            runtime.splits,
            runtime.model,
            runtime.seed,
            runtime.dtype,
            runtime.clusters,
            runtime.ids,
            runtime.loop,
        )

    fed.runtime = gaps(fed.runtime)
    return fed


@pytest.fixture(scope="session")
def absent_in() -> Callable[[Federation, set[tuple[Any, ...]]], Federation]:
    """`absent_in(fed, {(3, "north")})`: a local federation with the gaps that one across a network had."""
    return _absent_in
