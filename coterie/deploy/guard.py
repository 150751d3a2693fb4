"""The guard of a node: it compares every message with the node's policy before anything is computed.

What was asked before is read from the node's own audit log, so that a restart, a second server or a changed clock gives
nobody a fresh allowance.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie._core.errors import CoterieError
from coterie._core.printable import printable
from coterie.algorithms.base import Algorithm
from coterie.data.federated import Roles
from coterie.deploy.audit import AuditLog, verify
from coterie.deploy.consent import AGAIN, Consent, Refusal, digest, is_count
from coterie.deploy.policy import Policy
from coterie.deploy.runnable import runnable
from coterie.engine.privacy import Privacy
from coterie.models.zoo import FACTORIES

MOST_LEVELS = 10_000  # levels of one column in an encoding
MOST_CALLS = 1000  # in one round; round and call decide which rows are in a minibatch
RUN = re.compile(r"[a-z0-9]{8,64}")
SPLITS = ("train", "validation", "test")
REFIT = ("none", "validation", "all")  # each lets more rows train
FOUND = ("model", "features", "outputs", "classes")  # of a network; the node's own rows decide
MOST_SIZES = 64  # entries of one setting of a model, such as widths of layers
STEPS = ("histogram", "moments")  # of secure statistics
ROUNDING = 1e-9  # relative, of sums of privacy budgets


class Guard:
    """Admits messages that fit a policy, and counts them.

    Parameters
    ----------
    policy
        The node's policy.
    state
        The node's state folder; approvals are kept there.
    audit
        The node's log; None counts from zero and stores nothing, for tests.
    """

    def __init__(self, policy: Policy, state: Path, audit: AuditLog | None = None) -> None:
        self.policy, self.audit, self.consent = policy, audit, Consent(state, audit)
        self.day, self.today = "", 0
        self.started_today: set[str] = set()
        self.by_run: Counter[str] = Counter()
        self.numberings: set[str] = set()
        self.questions: dict[str, str] = {}
        self.budgets: dict[str, dict[str, Any]] = {}  # privacy of the rows that a run may cost
        if audit is not None and audit.path.exists():
            for entry in verify(audit.path):
                self._count(entry)

    def admit(
        self, header: dict[str, Any], tensors: Mapping[str, Tensor], at: str, entry: dict[str, Any]
    ) -> None:
        """Check a message that arrived `at` an ISO time, and put into `entry` what the log should say about it.

        A message beyond the allowance leaves `entry` empty: it is refused without a line, so that nobody can fill the
        disk.

        Raises
        ------
        Refusal
            The policy forbids the message.
        Pending
            The owner has to approve the run first.
        """
        policy, kind, run = self.policy, str(header.get("kind")), str(header.get("run", ""))
        if run and not RUN.fullmatch(run):
            raise Refusal(f"invalid run name {printable(repr(run), 80)}")
        counted = {"kind": kind, "run": run, "at": at, "cost": self._cost(tensors)}
        self._require_allowance(counted)
        entry |= counted
        try:
            if policy.roles is None:
                return
            self._require_bounded(header, tensors)
            if kind in ("hello", "statistics", "open"):
                self._require_roles(header["roles"])
            if kind == "hello" and policy.approve:
                self._require_proposal(run, header)
                entry["approved"] = True
            if kind == "statistics" and policy.kind != "table":
                raise Refusal(f"there are no statistics of {policy.kind}")
            if kind == "statistics":
                if policy.approve:
                    self.consent.require(run, None)
                entry["numbering"] = self._numbering(header, tensors)
                entry["question"] = self._question(run, header, tensors)
                entry |= self._budget(run, (header.get("about") or {}).get("privacy"))
            if kind == "open":
                entry["numbering"] = self._numbering(header, tensors)
                if policy.approve:
                    self.consent.require_protected(run, header["setup"])
                self._require_refit(run, header["setup"].get("refit", "none"))
                self._require_setup(header["setup"])
                entry |= self._budget(run, header["setup"].get("privacy"))
                entry["algorithm"] = header["setup"]["algorithm"]["name"]
            if kind in ("call", "deploy", "score", "finish", "relay"):
                self._require_round(run, header)
            if kind in ("call", "score"):
                self._require_scores(run, header, kind)
            if kind == "call":
                entry["phase"] = header["phase"]
        finally:
            self._count(entry)

    def require_phase(self, algorithm: Algorithm, phase: str, scored: bool) -> str:
        """Return what a phase reveals; raise `Refusal` if the policy forbids it, or if it would hand a model out."""
        if phase == "deploy":
            if not scored:
                raise Refusal("deployed models stay on the node; they can be scored only")
            return "aggregate"
        disclosure = "nothing" if phase == "begin" else algorithm.reveals.get(phase)
        if disclosure is None:
            raise Refusal(f"{algorithm.name} does not say what {printable(phase, 60)} reveals")
        if scored:
            raise Refusal(f"only deployed models are scored, not what {printable(phase, 60)} returns")
        if disclosure not in self.policy.reveal:
            raise Refusal(
                f"policy: {algorithm.name}'s {phase} reveals {disclosure}, which this node does not"
            )
        return disclosure

    def fit(self, proposal: Mapping[str, Any]) -> list[str]:
        """Return what of a proposed run does not fit the policy, in words; [] if all does."""
        problems = []
        try:
            self._require_algorithm(proposal["algorithm"])
            algorithm = runnable()[proposal["algorithm"]["name"]]
            relayed = proposal.get("relay") is True
            if relayed and "peers" not in self.policy.reveal:
                problems.append(
                    'answers of clients go to the other nodes, which is refused ("peers" in reveal)'
                )
            for phase, word in algorithm.reveals.items():
                if word not in self.policy.reveal and not relayed:
                    perhaps = ", if it is needed" if phase in algorithm.optional else ""
                    problems.append(f"its phase {phase} reveals {word} and will be refused{perhaps}")
        except (CoterieError, KeyError, TypeError) as problem:
            problems.append(printable(problem))
        refit = proposal.get("refit", "none")
        if refit not in REFIT or REFIT.index(refit) > REFIT.index(self.policy.refit):
            problems.append(f"{printable(refit, 30)} rows will not train (refit = {self.policy.refit!r})")
        rounds = proposal.get("rounds")
        if isinstance(rounds, int) and rounds > self.policy.rounds:
            problems.append(f"{rounds} rounds: at most {self.policy.rounds} are allowed")
        return problems

    def _cost(self, tensors: Mapping[str, Tensor]) -> int:
        """How many messages a call counts for: as many as the visits to its most visited client."""
        at = tensors.get("at")
        if at is None or at.dim() != 1 or not len(at) or at.dtype != torch.int64:
            return 1
        return int(at.unique(return_counts=True)[1].max())

    def _require_allowance(self, entry: Mapping[str, Any]) -> None:
        policy, run, day = self.policy, entry["run"], max(self.day, str(entry["at"])[:10])
        today = self.today if day == self.day else 0
        if today + entry["cost"] > policy.messages_per_day:
            raise Refusal(f"policy: at most {policy.messages_per_day} messages in a day")
        if self.by_run[run] + entry["cost"] > policy.messages_per_run:
            raise Refusal(f"policy: at most {policy.messages_per_run} messages in a run")
        started = len(self.started_today) if day == self.day else 0
        if run and run not in self.by_run and started >= policy.runs_per_day:
            raise Refusal(f"policy: at most {policy.runs_per_day} new runs in a day")

    def _count(self, entry: Mapping[str, Any]) -> None:
        """Remember what was asked; a clock that is set back does not bring a day again."""
        if "cost" not in entry:
            return
        day, run = max(self.day, str(entry["at"])[:10]), str(entry.get("run", ""))
        if day != self.day:
            self.day, self.today, self.started_today = day, 0, set()
        if run and run not in self.by_run:
            self.started_today.add(run)
        self.today += int(entry["cost"])
        self.by_run[run] += int(entry["cost"])
        if entry.get("numbering"):
            self.numberings.add(str(entry["numbering"]))
        if entry.get("privacy"):
            self.budgets[run] = json.loads(entry["privacy"])
        if entry.get("question"):
            self.questions[f"{run} {str(entry['question']).partition(' ')[0]}"] = str(entry["question"])

    def _require_bounded(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        known = runnable().get(str(header.get("algorithm", "")))  # `messages.run` takes its run's only
        stand_for = frozenset() if known is None else known.sentinels
        in_units = known is not None and known.in_units
        most = torch.finfo(torch.float64).max if in_units else self.policy.largest_number
        for value in tensors.values():
            if not value.is_floating_point() or not value.numel():
                continue
            low, high = torch.aminmax(value)
            if -most <= float(low) <= float(high) <= most:  # NaN is not
                continue
            fine = value.abs() <= most
            for number in stand_for:
                fine |= value == number
            if not bool(fine.all()):
                raise Refusal(f"policy: numbers in messages are finite and at most {most:g}")
        for name in ("numbers", "welcome_numbers"):
            for value in dict(header.get(name) or {}).values():
                if isinstance(value, int | float) and not abs(value) <= most and value not in stand_for:
                    raise Refusal(f"policy: numbers in messages are finite and at most {most:g}")

    def _require_roles(self, told: Any) -> None:
        asked, mine = Roles.from_json(told), self.policy.roles
        assert mine is not None
        for name in ("client", "target"):
            if getattr(asked, name) != getattr(mine, name):
                raise Refusal(f"policy: the {name} column is {getattr(mine, name)!r}")
        for name in ("cluster", "task"):
            if getattr(asked, name) not in (None, getattr(mine, name)):
                raise Refusal(f"policy: the {name} is not the one that this node's owner set")

    def _numbering(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
        """Return the digest of how clients are numbered, which decides the split; refuse other splits."""
        policy = self.policy
        if policy.split is not None and [float(part) for part in header["split"]] != list(policy.split):
            raise Refusal("policy: rows are split " + " / ".join(f"{part:g}" for part in policy.split))
        if policy.seed is not None and header["seed"] is not policy.seed and header["seed"] != policy.seed:
            raise Refusal(f"policy: the seed is {policy.seed}")
        numbering = digest(tensors["ids"].tolist())
        if numbering not in self.numberings and len(self.numberings) >= policy.splits:
            raise Refusal(
                "policy: the server numbered this node's clients differently before, which gives another split of the "
                f"rows; {policy.splits} numbering(s) are allowed ([limits] splits)"
            )
        return numbering

    def _question(self, run: str, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
        """Return the digest of a question for statistics; refuse a second, different one in the same run."""
        self._require_spec(header["spec"])
        if not run:
            raise Refusal("policy: statistics are answered for a run")
        about = header.get("about")
        step = "all" if about is None else str(about["step"])
        if step not in ("all", *STEPS):
            raise Refusal("there are no such statistics")
        if self.policy.secure and (about is None or about["secure"] is not True):
            raise Refusal("policy: statistics leave in secure sums only; start the run with --secure")
        question = f"{step} {digest([header['spec'], tensors['ids'].tolist(), about])}"
        if self.questions.get(f"{run} {step}", question) != question:
            raise Refusal("policy: statistics are answered once per run")
        return question

    def _require_spec(self, spec: Mapping[str, Any]) -> None:
        policy, columns = self.policy, self.policy.columns
        assert policy.roles is not None
        self._require_roles({name: spec[name] for name in ("client", "target", "cluster")})
        if columns is None:
            return
        for part, kind in (("numeric", "numeric"), ("categories", "category")):
            for name in spec[part]:
                if columns.get(name) not in (kind, "empty"):
                    raise Refusal(f"policy: there is no {kind} column {printable(repr(name), 80)}")

    def _require_setup(self, setup: Mapping[str, Any]) -> None:
        policy = self.policy
        self._require_algorithm(setup["algorithm"])
        if policy.kind == "table":
            self._require_encoding(json.loads(setup["preprocessor"]))
        elif policy.kind == "images":
            self._require_classes(setup["classes"])
        else:
            self._require_setting("context", setup["context"])
            if not is_count(setup["context"]) or setup["context"] < 1:
                raise Refusal("policy: a row has at least one token")
        sums = setup.get("sums") or {}
        if policy.secure and sums.get("secure") is not True:
            raise Refusal("policy: answers leave in secure sums only; start the run with --secure")
        if setup.get("relay") and "peers" not in policy.reveal:
            raise Refusal(
                'policy: answers do not go to other nodes; the owner can allow it: "peers" in reveal'
            )
        self._require_model(setup["model"])

    def _require_encoding(self, encoding: Mapping[str, Any]) -> None:
        policy = self.policy
        self._require_spec(encoding["spec"])
        for scale in encoding["scales"]:
            if not all(math.isfinite(float(scale[name])) for name in ("mean", "sd")) or scale["sd"] < 0:
                raise Refusal("policy: an encoding has finite means and spreads")
            fixed = policy.encoding.get(scale["name"])
            if fixed is not None and [scale["mean"], scale["sd"]] != [float(part) for part in fixed]:
                raise Refusal(f"policy: the encoding of {scale['name']!r} is fixed")
        for choice in encoding["choices"]:
            fixed = policy.encoding.get(choice["name"])
            if fixed is not None and sorted(choice["levels"]) != sorted(fixed):
                raise Refusal(f"policy: the encoding of {choice['name']!r} is fixed")
            if len(choice["levels"]) > MOST_LEVELS:
                raise Refusal(f"policy: at most {MOST_LEVELS} levels")

    def _require_classes(self, classes: Any) -> None:
        if (
            not isinstance(classes, list)
            or not 0 < len(classes) <= MOST_LEVELS
            or len(set(classes)) < len(classes)
        ):
            raise Refusal(f"policy: there are 1 to {MOST_LEVELS} different classes")

    def _require_model(self, model: Mapping[str, Any]) -> None:
        """Refuse models that the policy does not name, also inside others, and settings outside their range."""
        policy = self.policy
        if policy.models is not None and model.get("model") not in policy.models:
            raise Refusal(f"policy: models are {', '.join(policy.models)}")
        self._require_setting("l2", model.get("l2", 0.0))
        for inner in [*([model["base"]] if "base" in model else []), *model.get("bases", ())]:
            self._require_model(inner)
        own = dict(model.get("settings") or {})  # of a model that the owner installed
        sizes = {name: value for name, value in model.items() if name not in FOUND}
        for name, value in own.items() if own or model["model"] not in FACTORIES else sizes.items():
            values = value if isinstance(value, list) else [value]
            if len(values) > MOST_SIZES or any(isinstance(one, dict | list) for one in values):
                raise Refusal(f"policy: {printable(name, 60)} is a number, a text or a few of them")
            if name in own and name not in policy.settings and any(isinstance(one, str) for one in values):
                raise Refusal(f"policy: {printable(name, 60)} is a text that [settings] does not list")
            for one in values:
                if one is not None:
                    self._require_setting(name, one)

    def _require_algorithm(self, told: Mapping[str, Any]) -> None:
        name = told["name"]
        if self.policy.algorithms is not None and name not in self.policy.algorithms:
            raise Refusal(f"policy: {printable(name, 60)} is not one of {', '.join(self.policy.algorithms)}")
        for setting, value in told["settings"].items():
            self._require_setting(setting, value)

    def _require_setting(self, name: str, value: Any) -> None:
        bounds = self.policy.settings.get(name)
        if name == "batch" and value == 0:
            return
        if bounds is not None and all(isinstance(bound, int | float) for bound in bounds):
            fine = isinstance(value, int | float) and bounds[0] <= value <= bounds[-1]
        elif bounds is not None:
            fine = value in bounds
        elif isinstance(value, int | float) and not isinstance(value, bool):
            most = self.policy.largest_count if isinstance(value, int) else self.policy.largest_number
            fine = abs(value) <= most
        else:
            fine = True
        if not fine:
            raise Refusal(
                f"policy: {printable(name, 60)} = {printable(value, 60)} is outside what is allowed"
            )

    def _require_round(self, run: str, header: Mapping[str, Any]) -> None:
        t, call = header["round"], header.get("call", 0)
        approved = self.consent.approved(run) if self.policy.approve else None
        most = self.policy.rounds if approved is None else min(self.policy.rounds, approved["rounds"])
        if not is_count(t) or t > most:
            raise Refusal(f"policy: at most {most} rounds in a run")
        if not is_count(call) or call > MOST_CALLS:
            raise Refusal(f"policy: at most {MOST_CALLS} calls in a round")

    def _budget(self, run: str, given: Any) -> dict[str, Any]:
        """Return what the log says of the privacy that a run may cost; refuse one that costs too much, or another one.

        Budgets of runs add up. What a run may cost is fixed by its first message that says so.
        """
        policy, before = self.policy, self.budgets.get(run)
        told = None if given is None else {k: v for k, v in dict(given).items() if k != "clients"}
        if before is not None and told != before:
            raise Refusal("policy: a run keeps the privacy budget with which it began")
        asked = None if told is None else Privacy(**told)
        if math.isfinite(policy.epsilon):
            others = [one for name, one in self.budgets.items() if name != run and one["unit"] == "row"]
            if asked is None or asked.unit != "row":
                raise Refusal(
                    "policy: gradients leave with noise only; start the run with --epsilon --unit row"
                )
            for name in ("epsilon", "delta"):
                spent, most = sum(one[name] for one in others), getattr(policy, name)
                if spent + getattr(asked, name) > most * (1 + ROUNDING):
                    raise Refusal(
                        f"policy: all runs together may cost {name} {most:g}; {spent:g} is spent, and this run asks "
                        f"for {getattr(asked, name):g}"
                    )
        return {} if asked is None else {"privacy": json.dumps(asked.to_json())}

    def _require_scores(self, run: str, header: Mapping[str, Any], kind: str) -> None:
        split = header.get("split", "")
        if split == "train" and (run in self.budgets or math.isfinite(self.policy.epsilon)):
            raise Refusal("policy: training rows are not scored in a run that keeps them private")
        if split not in SPLITS if kind == "score" else split not in ("", *SPLITS):
            raise Refusal(f"there is no split {printable(split, 60)}")
        for name in header.get("metrics", ()):
            if self.policy.metrics is not None and name not in self.policy.metrics:
                raise Refusal(f"policy: the metric {printable(name, 60)} is not allowed")

    def _require_proposal(self, run: str, header: Mapping[str, Any]) -> None:
        """Show the owner what a run says that it will do; refuse it until the owner approves."""
        proposal = header.get("proposal")
        if not run or not isinstance(proposal, dict) or not isinstance(proposal.get("algorithm"), dict):
            raise Refusal("policy: the owner approves every run, so a run has to say what it will do")
        own = {"roles": header["roles"], "columns": self.policy.columns, "problems": self.fit(proposal)}
        self.consent.propose(run, {**proposal, **own})
        self.consent.require(run, proposal["algorithm"])

    def _require_refit(self, run: str, which: Any) -> None:
        """Refuse more rows in training than the policy allows and, where the owner approves runs, the owner."""
        if which not in REFIT or run.endswith(AGAIN) != (which != "none"):
            raise Refusal("a run trains on training rows, and a second time on 'validation' or 'all' rows")
        approved = self.consent.approved(run) if self.policy.approve else None
        allowed = [self.policy.refit, *([] if approved is None else [approved["refit"]])]
        if REFIT.index(which) > min(map(REFIT.index, allowed)):
            raise Refusal(
                f"policy: {which} rows do not train here ([data] refit = {min(allowed, key=REFIT.index)!r})"
            )
