"""A node with a valid key that answers nonsense: no run ends, and nobody is poisoned without a note that names it."""

from __future__ import annotations

import polars
import pytest
import torch

from coterie._core import files, randomness
from coterie.algorithms import all_algorithms, make
from coterie.data.federated import Roles
from coterie.deploy import federation_plan, wire
from coterie.deploy.answers import excess
from coterie.deploy.federation_plan import RunRequest, connect, survey
from coterie.deploy.in_process import InProcessTransport
from coterie.deploy.job import JobRequest, work
from coterie.deploy.node_service import NodeService
from coterie.deploy.transport import NodeCaller, Undelivered
from coterie.models.description import description
from coterie.models.glm import Glm
from coterie.train.fit import fit
from tests.deploy.lies import ATTACKS, UNDETECTABLE, error, values

NODES = ("east", "north", "south", "west")
LIAR = "west"
ROLES = Roles("who", "y", cluster="group")


def tables(rows: int = 40) -> dict[str, polars.DataFrame]:
    """Four places with the same clear signal, so that a poisoned model is seen in the scores."""
    total = rows * len(NODES)
    x = randomness.normal(randomness.slots(randomness.key(3, "x", torch.arange(total)), 2))
    noise = 0.3 * randomness.normal(randomness.key(4, "e", torch.arange(total)))
    frame = polars.DataFrame(
        {
            "who": [NODES[k // rows] for k in range(total)],
            "group": [f"g{k // rows % 2}" for k in range(total)],
            "a": (10 * x[:, 0] + 7).numpy(),
            "b": x[:, 1].numpy(),
            "c": [("red", "green", "blue")[k % 3] for k in range(total)],
            "y": (x[:, 0] - x[:, 1] + noise > 0).long().numpy(),
        }
    )
    return {name: frame.filter(polars.col("who") == name) for name in NODES}


class Liar(InProcessTransport):
    """Changes the answers of one node on their way; `kind` and `phase` say which."""

    def __init__(self, nodes, change, kind="call", phase=None):
        super().__init__(nodes)
        self.change, self.kind, self.phase, self.fired = change, kind, phase, 0

    def fetch(self, tickets, wait):
        asked = {ticket: self._posted[ticket] for ticket in tickets}
        answers = super().fetch(tickets, wait)
        for ticket, (name, message) in asked.items():
            header = wire.decode(message)[0]
            scoring = header["kind"] == "call" and header["split"] != ""
            if name == LIAR and header["kind"] == self.kind and not scoring and self.change is not None:
                if self.phase in (None, header.get("phase")):
                    self.fired += 1
                    answers[ticket] = self.change(answers[ticket])
        return answers


def trained(tmp_path, change=None, kind="call", algorithm=None, rounds=3, phase=None, rows=40):
    """Return run, notes, transport of a federation with a liar."""
    nodes = {name: NodeService(table, tmp_path / name) for name, table in tables(rows).items()}
    transport, notes = Liar(nodes, change, kind, phase), []
    caller = NodeCaller(transport, deadline=5.0, note=notes.append)
    algorithm = algorithm or make("fedavg", lr=0.3)
    own = algorithm.trial_model(rounds)
    own = None if isinstance(own, Glm) else own  # the table has classes: its usual model is one for them
    request = RunRequest(ROLES, model=None if own is None else description(own))
    plan = survey(caller, {name: [name] for name in nodes}, request, "a" * 8, patience=0.05)
    notes += plan.warnings
    run = fit(connect(caller, plan, algorithm), algorithm, rounds, evaluate_every=0)
    run.fed.runtime.finish(run.deployed_round, None)
    return run, notes, transport


def honest(run) -> torch.Tensor:
    """Test accuracy of the honest clients."""
    at = [run.fed.names.index(name) for name in NODES if name != LIAR]
    return run.score("test", "accuracy")[at]


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    run, notes, _ = trained(tmp_path_factory.mktemp("honest"))
    assert not notes and float(honest(run).mean()) > 0.8
    return honest(run)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if k % 3 else []) for k, name in enumerate(ATTACKS)]
)
def test_no_run_ends_and_no_poisoning_is_silent(tmp_path, name, baseline, monkeypatch):
    monkeypatch.setattr(federation_plan, "PATIENCE", 1.0)
    kind, change = ATTACKS[name]
    run, notes, transport = trained(tmp_path, change, kind)
    assert transport.fired, "the attack was not carried out"
    moved = float((honest(run) - baseline).abs().max())
    named = [note for note in notes if note.startswith(LIAR) or f" {LIAR} " in note]
    assert moved <= 0.15 and abs(float((honest(run) - baseline).mean())) <= 0.05, (name, honest(run), notes)
    assert named or name in UNDETECTABLE, f"{name}: nothing was noted"
    assert not any(note.startswith(other) for other in NODES if other != LIAR for note in notes), notes
    assert all(note.isprintable() and len(note) < 1000 for note in notes)
    mine = run.fed.names.index(LIAR) if LIAR in run.fed.names else None
    if kind == "score" and name not in UNDETECTABLE:
        assert run.score("test", "accuracy")[mine].isnan()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(all_algorithms()))
def test_strange_numbers_end_no_method(tmp_path, name):
    """Numbers too small to be implausible, in every value of every phase: negative, fractional, zero, equal."""
    for k, change in enumerate(
        (lambda v: v * 0, lambda v: -50 * v - 3.5, lambda v: torch.full_like(v, 77.0))
    ):
        algorithm = make(name)
        algorithm = algorithm.replace(batch=min(algorithm.batch, 8))
        rounds = 10 if name.startswith("async") else 2  # these speak up by chance
        run, _, transport = trained(
            tmp_path / str(k), values(change), algorithm=algorithm, rounds=rounds, rows=12
        )
        assert torch.isfinite(honest(run)).all() and (transport.fired or name == "local")


def test_error_texts_forge_no_line(tmp_path):
    """What a node says is one line of the notes and of the summary, with nothing that a terminal obeys."""
    nodes = {name: NodeService(table, tmp_path / name) for name, table in tables().items()}
    text = "x\x1b[2J\n12:00:00 north is left out: forged\u2028[bold]<script>alert(1)</script>"
    job, algorithm = tmp_path / "job", make("fedavg")
    JobRequest(
        str(tmp_path / "run"),
        {"name": algorithm.name, "settings": algorithm.settings()},
        {"rounds": 2, "evaluate_every": 0},
        ROLES.to_json(),
        {name: [name] for name in NODES},
        deadline=5.0,
        patience=1.0,
    ).write(job)
    work(job, Liar(nodes, error(text)))
    assert files.read_json(job / "progress.json")["state"] == "finished"
    lines = (job / "notes.txt").read_text(encoding="utf-8").splitlines()
    assert (
        lines
        and all(line[9:].startswith(LIAR) for line in lines)
        and all(line.isprintable() for line in lines)
    )
    assert "\x1b" not in (job / "summary.txt").read_text(encoding="utf-8")
    text = (tmp_path / "run" / "result.json").read_text(encoding="utf-8")
    assert "\x1b" not in text and "\\u001b" not in text


def test_numbers_are_compared_with_the_median_of_the_others():
    rows = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [1e3, 0.0], [4.0, 9e9]])
    owner = torch.tensor([0, 1, 2, 3, 3])
    assert excess({"": rows}, owner, 0.0)[3] == pytest.approx(9e9 / 2)
    assert excess({"": rows}, owner, 9e9)[3] == 1.0  # no larger than what was sent
    assert excess({"": rows[:2]}, owner[:2], 0.0) == {}  # two nodes cannot tell who is wrong


@pytest.mark.parametrize("change", [lambda v: v.int(), lambda v: v.repeat(1, 2), lambda v: v.unsqueeze(0)])
def test_a_liar_that_answers_alone_ends_nothing_and_fixes_no_shape(tmp_path, change):
    """The others are away in the first round; afterwards their answers are still those that count."""

    class Alone(Liar):
        def fetch(self, tickets, wait):
            asked = {ticket: self._posted[ticket] for ticket in tickets}
            answers = super().fetch(tickets, wait)
            for ticket, (name, message) in asked.items():
                header = wire.decode(message)[0]
                if name != LIAR and header["kind"] == "call" and header["round"] == 1:
                    answers[ticket] = Undelivered("away")
            return answers

    nodes = {name: NodeService(table, tmp_path / name) for name, table in tables().items()}
    caller = NodeCaller(Alone(nodes, values(change)), deadline=5.0)
    algorithm = make("fedavg", lr=0.3)
    plan = survey(caller, {name: [name] for name in nodes}, RunRequest(ROLES), "a" * 8, patience=0.05)
    run = fit(connect(caller, plan, algorithm), algorithm, 6, evaluate_every=0)
    assert 1 <= run.lost_rounds <= 3 and float(honest(run).mean()) > 0.7
