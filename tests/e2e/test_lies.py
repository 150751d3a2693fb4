"""Every lie of `tests/deploy/lies.py`, told by a real node over TLS: no run ends, nobody is poisoned unnoticed."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars
import pytest

from coterie._core import files
from coterie.algorithms import make
from coterie.deploy import federation_folder
from coterie.deploy.audit import heads_seen, verify
from coterie.train.fit import fit
from tests.deploy.lies import ATTACKS, UNDETECTABLE
from tests.e2e.test_attacks import memory

if TYPE_CHECKING:
    from tests.e2e.conftest import Live

pytestmark = pytest.mark.e2e
HOSTILE = Path(__file__).with_name("hostile.py")
NODES, LIAR = ("n0", "n1", "n2", "n3"), "n3"
SLOW = ("always forgets", "always waits for approval", "80 MB")  # it is away for a while after each
IN_ROUNDS = [name for name, (kind, _) in ATTACKS.items() if kind == "call" and name not in SLOW]
IN_A_RUN = [  # those of evil_all.py, each in a run of its own; `test_malicious_node.py` tells all
    *(
        "1e15 rows",
        "nonsense about own models",
        "2^63 - 1 rows",
        "negative rows",
        "no rows",
        "NaN mean",
        "infinite spread",
        "negative spread",
    ),
    *("a billion rows", "a negative count", "a count of 400 digits", "texts for numbers", "90 junk levels"),
    *(
        "a level that is half a character",
        "another's client",
        "100,000 clients",
        "HTML for a name",
        "no columns",
    ),
    *(
        "a quantity",
        "no kind",
        "5000 classes",
        "an unknown kind",
        "all text",
        "accuracy of 1e9",
        "negative scores",
    ),
]


@contextmanager
def liar(live: Live, lies: dict[str, list[str]]) -> Iterator[None]:
    """The node n3 tells lies, by run; the server's memory stays within 100 MB of what it was."""
    place, before = live.folder.path / "nodes" / LIAR, memory(live)
    files.write_json(place / "lies.json", lies)
    live.kill(LIAR)
    log = live.folder.path / f"{LIAR}.log"
    log.unlink()
    address = f"127.0.0.1:{live.folder.port}"
    live.start(LIAR, [sys.executable, str(HOSTILE), str(place), live.folder.nodes[LIAR][0], address])
    try:
        yield
        told = {
            line.removeprefix("lie: ") for line in live.log(LIAR).splitlines() if line.startswith("lie: ")
        }
        assert told == {name for names in lies.values() for name in names}
        assert memory(live) - before < 100, f"the server grew from {before:.0f} to {memory(live):.0f} MB"
        assert live.processes["server"].poll() is None
    finally:
        live.kill(LIAR)
        live.start_node(LIAR)


def clean_notes(job: Path) -> list[str]:
    """Notes of a run, all of them about the liar and safe to print."""
    notes = federation_folder.notes(job)
    for line in notes:
        assert line.isprintable() and not any(line[9:].startswith(name) for name in NODES[:3]), line
    return notes


def test_a_node_that_lies_in_every_round_harms_nobody(live: Live, absent_in: Any) -> None:
    """The others get the models of a run in which the liar was away."""
    plain, algorithm = (
        [name for name in IN_ROUNDS if name not in UNDETECTABLE],
        make("ditto", lr=0.1, batch=4),
    )
    rounds, runs = len(plain), [secrets.token_hex(16) for _ in range(2)]
    job = live.job("liar", algorithm, rounds, NODES, run=runs[0])
    slow = live.job("slow-liar", algorithm, 12, NODES, deadline=10.0, run=runs[1])
    with liar(live, {runs[0]: plain, runs[1]: list(SLOW)}):
        live.run(job, slow)
    for one in (job, slow):
        assert {name for _, name in live.missed(one)} == set(live.folder.nodes[LIAR])
        assert live.result(one)["lost_rounds"] == 0
    result = live.result(job)
    assert {t for t, _ in live.missed(job)} == set(range(1, rounds + 1))
    # what is drawn for a call depends on how many calls a round has had, so the phases that were missed matter
    phases = {(t, name, why.partition(":")[0]) for t, name, why in result["left_out"]}
    here = fit(absent_in(live.local(NODES), phases), algorithm, rounds, evaluate_every=0)
    for name, model in live.models(job, NODES[:3]).items():
        assert float((model - here.personal[here.fed.names.index(name)]).abs().max()) <= 1e-12, name
    assert len(clean_notes(job)) >= rounds and len(clean_notes(slow)) >= len(SLOW)
    assert {entry["node"] for entry in verify(job / "audit.log")} == set(NODES)
    log = live.folder.path / "nodes" / "n0" / "state" / "audit.log"
    assert len(list(verify(log, heads_seen(job / "audit.log", "n0")))) > rounds  # both sides' logs agree


def accuracy(live: Live, job: Path) -> float:
    """Of the honest nodes' clients, over all rows that were scored."""
    metrics = polars.read_parquet(live.folder.path / "runs" / job.name / "metrics.parquet")
    honest = [name for node in NODES[:3] for name in live.folder.nodes[node]]
    last = metrics.filter(polars.col("client").is_in(honest) & (polars.col("metric") == "accuracy"))
    assert last.height, metrics
    return float(last["value"].mean())  # type: ignore[arg-type]


def run_all(live: Live, names: Sequence[str]) -> dict[str, Path]:
    """A run of one round for each lie, and one without, all in one job process."""
    algorithm = make("fedavg", lr=0.3, batch=4)
    runs = {name: secrets.token_hex(16) for name in ("", *names)}
    jobs = {
        name: live.job(f"lie-{k}", algorithm, 1, NODES, deadline=20.0, run=run)
        for k, (name, run) in enumerate(runs.items())
    }
    with liar(live, {run: [name] for name, run in runs.items() if name}):
        live.run(*jobs.values())
    return jobs


def test_a_node_that_lies_about_itself_ends_no_run_and_poisons_nobody_unnoticed(live: Live) -> None:
    jobs = run_all(live, IN_A_RUN)
    honest = accuracy(live, jobs.pop(""))
    for name, job in jobs.items():
        assert federation_folder.progress(job)["state"] == "finished", name
        assert live.result(job)["lost_rounds"] == 0
        notes = clean_notes(job)
        assert name in UNDETECTABLE or any(LIAR in line for line in notes), f"{name}: nothing was noted"
        assert abs(accuracy(live, job) - honest) <= 0.1, name
