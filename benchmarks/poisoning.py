"""How far one lying hospital of four moves the test accuracy of the others, on the server's and the nodes' real code.

    python -m benchmarks.poisoning [--method fedavg] [--seeds 5] [--kind listed]

`listed` are the lies by which an earlier version was broken, `subtle` those that stay within what honest nodes send.
Every hospital lies in turn, on several splits. A run with a liar is compared, hospital by hospital and on the same test
rows, with the run in which nobody lies and with the run in which the liar is away. Accuracy is that of the models
which hospitals deploy: with the guard of the strict policy (a hospital whose validation rows speak against the shared
model keeps one that it trained alone), and without.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie._core import files
from coterie.algorithms import make
from coterie.data.federated import Roles
from coterie.deploy import wire
from coterie.deploy.federation_plan import RunRequest, connect, survey
from coterie.deploy.node_service import NodeService
from coterie.deploy.policy import TRUSTING
from coterie.deploy.transport import NodeCaller
from coterie.models.metrics import find
from coterie.train.fit import fit
from tests.deploy.lies import ATTACKS, error, values

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
RUN, ROUNDS = "poisoning1", 20
LISTED = (
    *("1e6", "-1e6", "1e30", "1e150", "times 1e4", "one huge coordinate", "ten times the other way"),
    *("1e15 rows", "2^63 - 1 rows", "ten times the rows", "1e15 rows at first", "a billion rows at first"),
    *("huge mean", "huge spread", "a billion rows", "accuracy of 1e9", "perfect scores"),
    *("an error that forges a line", "200,000 tensors", "always forgets"),
)
Forge = Callable[[bytes, dict[str, Tensor]], bytes]


def reversed_step(times: float) -> Forge:
    """Send the step of an honest answer backwards."""

    def forge(answer: bytes, asked: dict[str, Tensor]) -> bytes:
        sent = next(value for name, value in asked.items() if name.startswith("shared."))
        return values(lambda v: sent - times * (v - sent))(answer)

    return forge


SUBTLE: dict[str, Forge] = {
    "three times the other way": lambda answer, asked: values(lambda v: -3 * v)(answer),
    "once the other way": lambda answer, asked: values(lambda v: -v)(answer),
    "step backwards": reversed_step(1.0),
    "step 1.9 times backwards": reversed_step(1.9),
    "zeros": lambda answer, asked: values(torch.zeros_like)(answer),
}
METHODS = ("fedavg", "ditto", "fine-tuned")


class Post:
    """Carries messages at once; one node lies."""

    def __init__(self, nodes: dict[str, NodeService], liar: str, lie: str) -> None:
        self.nodes, self.liar, self.lie, self.box = nodes, liar, lie, {}

    def send(self, envelopes: dict[str, bytes], lasts: float) -> dict[str, str]:
        for name, message in envelopes.items():
            answer = self.nodes[name].answer(message)
            self.box[name] = self._forged(message, answer) if name == self.liar and self.lie else answer
        return {name: name for name in envelopes}

    def _forged(self, message: bytes, answer: bytes) -> bytes:
        asked, tensors = wire.decode(message)
        if self.lie == "away":
            return answer if asked["kind"] == "hello" else error("away")(answer)
        kind, forge = ATTACKS.get(self.lie, ("call", None))
        training = asked["kind"] != "call" or not (asked["split"] or asked["phase"] in ("begin", "deploy"))
        if asked["kind"] != kind or not training:
            return answer
        if "error" in wire.decode(answer)[0]:
            return answer
        return SUBTLE[self.lie](answer, tensors) if forge is None else forge(answer)

    def fetch(self, tickets: list[str], wait: float) -> dict[str, bytes]:
        return {ticket: self.box.pop(ticket) for ticket in tickets}


def deployed(method: str, seed: int, names: tuple[str, ...], liar: str, lie: str) -> dict[str, Any]:
    """Return test accuracies by hospital, without and with the guard, and what was noted about the liar."""
    policy, notes = dataclasses.replace(TRUSTING, guard=True), []
    with tempfile.TemporaryDirectory() as folder:
        nodes = {
            name: NodeService("heart_disease", Path(folder) / name, name, policy=policy) for name in names
        }
        caller = NodeCaller(Post(nodes, liar, lie), 5.0, notes.append)
        request = RunRequest(Roles("hospital", "sick"), seed)
        plan = survey(caller, {name: [name] for name in names}, request, RUN)
        algorithm = make(method)
        run = fit(connect(caller, plan, algorithm), algorithm, ROUNDS, evaluate_every=0)
        t = run.deployed_round
        found: dict[str, Any] = {"plain": {}, "guard": {}}
        before = {
            name: node.runs[RUN].models(t).clone() for name, node in nodes.items() if name != liar or not lie
        }
        run.fed.runtime.finish(t, None)
        for name, models in before.items():
            opened = nodes[name].runs[RUN]
            stored = opened.folder / "run" / "models" / "models.safetensors"
            after = files.read_tensors(stored)[0]["personal"] if stored.exists() else models
            for kind, weights in (("plain", models), ("guard", after)):
                metric = find("accuracy")
                sums = opened.runtime.score(weights, "test", [metric])
                found[kind][name] = float(metric.finish(sums["accuracy"]))
        found["own"] = sum("trained alone" in note for note in notes)
        named = {name for _, name, _ in run.left_out + run.shortened}
        told = [note for note in notes if "trained alone" not in note]
        found["named"] = named | {name for name in HOSPITALS if any(note.startswith(name) for note in told)}
    return found


def summary(moves: dict[str, list[float]]) -> dict[str, float]:
    """Return the mean move, that of the hospital that moves most on average, and the largest single one, in points."""
    by_hospital = {name: 100 * sum(one) / len(one) for name, one in moves.items()}
    every = [100 * move for one in moves.values() for move in one]
    worst = max(by_hospital.values(), key=abs)
    rounded = {"mean": sum(every) / len(every), "worst hospital": worst, "largest": max(every, key=abs)}
    return {name: round(value, 2) for name, value in rounded.items()}


def measure(method: str, seeds: int, lies: tuple[str, ...], first: int) -> dict[str, Any]:
    """Return how far honest hospitals move under each lie."""
    found: dict[str, Any] = {}
    chosen = range(first, first + seeds)
    honest = {seed: deployed(method, seed, HOSPITALS, "", "") for seed in chosen}
    rest = {liar: tuple(name for name in HOSPITALS if name != liar) for liar in HOSPITALS}
    away = {
        (seed, liar): deployed(method, seed, HOSPITALS, liar, "away") for seed in chosen for liar in HOSPITALS
    }
    moves: dict[str, dict[str, list[float]]] = {}
    gains = {name: [one["guard"][name] - one["plain"][name] for one in honest.values()] for name in HOSPITALS}
    print("guard from plain, nobody lies", json.dumps(summary(gains)), flush=True)

    def note(kind: str, name: str, move: float) -> None:
        moves.setdefault(kind, {}).setdefault(name, []).append(move)

    for lie in ("away", *lies):
        moves, silent, own = {}, 0, 0
        for seed in chosen:
            for liar in HOSPITALS:
                without = away[seed, liar]
                one = without if lie == "away" else deployed(method, seed, HOSPITALS, liar, lie)
                silent += liar not in one["named"]
                own += one["own"]
                for name in rest[liar]:
                    for kind in ("plain", "guard"):
                        note(f"{kind} from honest", name, one[kind][name] - honest[seed][kind][name])
                        note(f"{kind} from away", name, one[kind][name] - without[kind][name])
        found[lie] = {kind: summary(one) for kind, one in moves.items()} | {
            "silent": silent,
            "own models": own,
        }
        print(lie, json.dumps(found[lie]), flush=True)
    return found


def main() -> None:
    """Measure what was asked for and print it as JSON lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", default="fedavg", choices=METHODS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--kind", choices=("listed", "subtle"), default="listed")
    asked = parser.parse_args()
    lies = LISTED if asked.kind == "listed" else tuple(SUBTLE)
    measure(asked.method, asked.seeds, lies, asked.first)


if __name__ == "__main__":
    main()
