"""A node with a valid key that answers nonsense: no run ends, and nobody is poisoned without a note that names it."""

from __future__ import annotations

import json
import struct

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


def values(change):
    """Change every value of an answer."""

    def forge(answer):
        header, tensors = wire.decode(answer)
        changed = {
            name: change(value) if name.startswith("value.") else value for name, value in tensors.items()
        }
        return wire.encode(header, changed)

    return forge


def head(change):
    """Change the header of an answer."""

    def forge(answer):
        header, tensors = wire.decode(answer)
        return wire.encode(change(header) or header, tensors)

    return forge


def raw(note) -> bytes:
    text = note if isinstance(note, bytes) else json.dumps(note).encode()
    return struct.pack("<Q", len(text)) + text


def schema(tensors):
    """Keep the header, claim these tensors, send no bytes."""
    return lambda answer: raw({"version": 1, "header": wire.decode(answer)[0], "tensors": tensors})


def told(change):
    return head(lambda header: change(header["told"]))


def sums(change):
    """Change [count, mean, squares, missing] of every numeric column."""

    def forge(header):
        numeric = header["statistics"]["numeric"]
        header["statistics"]["numeric"] = {name: change(list(four)) for name, four in numeric.items()}

    return head(forge)


def error(text, code="failed"):
    return lambda answer: raw(
        {
            "version": 1,
            "header": {"nonce": wire.decode(answer)[0]["nonce"], "error": text, "code": code},
            "tensors": [],
        }
    )


def counts(change):
    def forge(answer):
        header, tensors = wire.decode(answer)
        return wire.encode(header, {name: change(value) for name, value in tensors.items()})

    return forge


ATTACKS = {
    # in the numbers of a round
    "NaN": ("call", values(lambda v: torch.full_like(v, torch.nan))),
    "1e6": ("call", values(lambda v: torch.full_like(v, 1e6))),
    "-1e6": ("call", values(lambda v: torch.full_like(v, -1e6))),
    "1e30": ("call", values(lambda v: torch.full_like(v, 1e30))),
    "1e150": ("call", values(lambda v: torch.full_like(v, 1e150))),
    "times 1e4": ("call", values(lambda v: v * -1e4)),
    "one huge coordinate": ("call", values(lambda v: v.index_fill(-1, torch.tensor([0]), 1e9))),
    "another shape": ("call", values(lambda v: torch.zeros(1, 7, dtype=v.dtype))),
    "three axes": ("call", values(lambda v: torch.zeros(1, 3, 11, dtype=v.dtype))),
    "int32": ("call", values(lambda v: v.int())),
    "bool": ("call", values(lambda v: v > 0)),
    "an extra value": ("call", counts(lambda v: v) and (lambda a: _extra(a))),
    "no value": ("call", lambda a: wire.encode(wire.decode(a)[0], {})),
    # in the bytes
    "cut": ("call", lambda a: a[:-9]),
    "empty": ("call", lambda a: b""),
    "noise": ("call", lambda a: b"\xff" * 100),
    "deep JSON": ("call", lambda a: raw(b"[" * 200_000 + b"]" * 200_000)),
    "deep header": (
        "call",
        lambda a: raw(b'{"version":1,"tensors":[],"header":' + b'{"a":' * 400 + b"1" + b"}" * 401),
    ),
    "a number of 200,000 digits": (
        "call",
        lambda a: raw(b'{"version":1,"header":{"x":' + b"9" * 200_000 + b'},"tensors":[]}'),
    ),
    "a number of 400 digits": ("call", head(lambda h: h | {"at": [10**400, 0]})),
    "bool for a stamp": ("call", head(lambda h: h | {"at": [True, False]})),
    "list for a stamp": ("call", head(lambda h: h | {"at": [[1], [2]]})),
    "encoded nonsense": ("call", head(lambda h: h | {"encoded": {"": [0, 5, ["float64"]]}})),
    "200,000 tensors": ("call", schema([[f"z{k}", "float64", [0]] for k in range(200_000)])),
    "2^62 x 0": ("call", schema([["value.", "float64", [2**62, 0]]])),
    "1 x 2^62 x 0": ("call", schema([["value.", "float64", [1, 2**62, 0]]])),
    "1e30 x 0": ("call", schema([["value.", "float64", [1, 10**30, 0]]])),
    "60 axes": ("call", schema([["value.", "float64", [1] * 60]])),
    "a list for a name": ("call", schema([[["x"], "float64", [0]]])),
    "a name twice": ("call", schema([["value.", "float64", [0]], ["value.", "float64", [0]]])),
    "no list of tensors": ("call", schema(None)),
    "a lone surrogate": ("call", lambda a: raw(b'{"version":1,"header":{"error":"\\ud800"},"tensors":[]}')),
    "an error that is a list": ("call", error(["x"] * 1000, ["forgot"])),
    "an error of a megabyte": ("call", error("x" * 1_000_000)),
    "always forgets": ("call", error("x", "forgot")),
    "always waits for approval": ("call", error("x", "pending")),
    # about its rows
    "1e15 rows": ("open", counts(lambda v: torch.full_like(v, 10**15))),
    "2^63 - 1 rows": ("open", counts(lambda v: torch.full_like(v, 2**63 - 1))),
    "negative rows": ("open", counts(lambda v: -v)),
    "no rows": ("open", counts(lambda v: 0 * v)),
    "ten times the rows": ("open", counts(lambda v: 10 * v)),
    "all rows for training": ("open", lambda a: _all_train(a)),
    "NaN mean": ("statistics", lambda a: a.replace(b'"a": [24, ', b'"a": [24, NaN, ', 1)),
    "huge mean": ("statistics", sums(lambda s: [s[0], 1e30, s[2], s[3]])),
    "huge spread": ("statistics", sums(lambda s: [s[0], s[1], 1e60, s[3]])),
    "overflowing spread": ("statistics", sums(lambda s: [s[0], s[1], 1e308, s[3]])),
    "negative spread": ("statistics", sums(lambda s: [s[0], s[1], -1e9, s[3]])),
    "a billion rows": ("statistics", sums(lambda s: [10**9, 1e30, 1e60, s[3]])),
    "a negative count": ("statistics", sums(lambda s: [-s[0] - 10**6, *s[1:]])),
    "counts that cancel": ("statistics", sums(lambda s: [-72, *s[1:]])),
    "texts for numbers": ("statistics", sums(lambda s: ["1", "x", "3", "4"])),
    "a list for a number": ("statistics", sums(lambda s: [[1], 2, 3, 4])),
    "no statistics": ("statistics", head(lambda h: {"nonce": h["nonce"]})),
    "90 junk levels": (
        "statistics",
        head(lambda h: h["statistics"]["categories"]["c"][0].extend(f"j{k}" for k in range(90))),
    ),
    "a level with escapes": (
        "statistics",
        head(lambda h: h["statistics"]["categories"]["c"][0].append("\x1b[2J")),
    ),
    # about itself
    "another's client": ("hello", told(lambda t: t.update(clients=["north"]))),
    "100,000 clients": (
        "hello",
        told(lambda t: t.update(clients=[f"x{k}" for k in range(100_000)], rows=[1] * 100_000)),
    ),
    "1e15 rows at first": ("hello", told(lambda t: t.update(rows=[10**15]))),
    "a billion rows at first": ("hello", told(lambda t: t.update(rows=[10**9]))),
    "HTML for a name": ("hello", told(lambda t: t.update(clients=["west<script>alert(1)</script>"]))),
    "escapes in a name": (
        "hello",
        told(lambda t: t.update(clients=["va\x1b[2J\r\n12:00 north is left out"])),
    ),
    "a name that runs backwards": ("hello", told(lambda t: t.update(clients=["a\u202egnp.exe"]))),
    "no columns": ("hello", told(lambda t: t.update(columns=[]))),
    "all text": ("hello", told(lambda t: t.update(columns=[[name, "category"] for name, _ in t["columns"]]))),
    "one column of text": ("hello", told(lambda t: t["columns"][0].__setitem__(1, "category"))),
    "an unknown kind": (
        "hello",
        told(lambda t: t.update(columns=[[name, "weird"] for name, _ in t["columns"]])),
    ),
    "a quantity": ("hello", told(lambda t: t.update(target={"kind": "quantity"}))),
    "words": ("hello", told(lambda t: t.update(target={"kind": "words", "levels": ["no", "yes"]}))),
    "no kind": ("hello", told(lambda t: t.update(target={"levels": ["0", "1"]}))),
    "5000 classes": (
        "hello",
        told(lambda t: t.update(target={"kind": "words", "levels": [f"c{k}" for k in range(5000)]})),
    ),
    "30 more classes": ("hello", told(lambda t: t["target"]["levels"].extend(f"c{k}" for k in range(30)))),
    "a list for a description": ("hello", head(lambda h: {"nonce": h["nonce"], "told": [1]})),
    # about scores
    "accuracy of 1e9": ("score", values(lambda v: torch.full_like(v, 1e9))),
    "negative scores": ("score", values(lambda v: -v)),
    "scores of other rows": ("score", lambda a: _more_rows(a)),
    "perfect scores": ("score", lambda a: _perfect(a)),
}
UNDETECTABLE = {
    "perfect scores",
    "90 junk levels",
    "HTML for a name",
}  # within what an honest node could send


def _extra(answer):
    header, tensors = wire.decode(answer)
    return wire.encode(header, tensors | {"value.hack": torch.zeros(1, 3, dtype=torch.float64)})


def _all_train(answer):
    header, tensors = wire.decode(answer)
    whole = sum(tensors.values())
    return wire.encode(header, {name: whole if "train" in name else 0 * whole for name in tensors})


def _more_rows(answer):
    header, tensors = wire.decode(answer)
    return wire.encode(header, tensors | {"value.rows": tensors["value.rows"] * 1000})


def _perfect(answer):
    header, tensors = wire.decode(answer)
    return wire.encode(header, tensors | {"value.accuracy": torch.ones_like(tensors["value.accuracy"])})


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


@pytest.mark.parametrize("name", ATTACKS)
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
