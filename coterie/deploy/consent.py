"""What the owner of a node has approved: which runs, and what of them the owner was shown."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie._core import files
from coterie._core.errors import CoterieError
from coterie.deploy.audit import AuditLog

APPROVED, PROPOSALS = "approved", "proposals"
AGAIN = "refit"  # ends the name of a run that trains the models of another one again


class Refusal(CoterieError):
    """A message that the policy forbids. Its text leaves the node, so it never quotes a row."""


class Pending(CoterieError):
    """A run that the node's owner has not approved yet."""


class Consent:
    """Runs that wait for the owner of a node, and those that the owner approved.

    Parameters
    ----------
    state
        The node's state folder; proposals and approvals are kept there.
    audit
        The node's log; None for tests.
    """

    def __init__(self, state: Path, audit: AuditLog | None = None) -> None:
        self.state, self.audit = state, audit

    def pending(self) -> dict[str, Any]:
        """Return the runs that wait for the owner's approval, by run."""
        folder = self.state / PROPOSALS
        found = {path.stem: files.read_json(path) for path in sorted(folder.glob("*.json"))}
        return {run: told for run, told in found.items() if self.approved(run) is None}

    def approve(self, run: str) -> None:
        """Approve a run that waits."""
        if run not in self.pending():
            raise CoterieError(f"no run {run!r} waits for approval")
        proposal = files.read_json(self.state / PROPOSALS / f"{run}.json")
        files.write_json(self.state / APPROVED / f"{run}.json", agreed(proposal))
        if self.audit is not None:
            self.audit.write(kind="approved", run=run)

    def propose(self, run: str, told: Mapping[str, Any]) -> None:
        """Keep what a run says that it will do, for the owner to see; the first proposal counts."""
        path = self.state / PROPOSALS / f"{run}.json"
        if not path.exists() and not run.endswith(AGAIN):
            files.write_json(path, dict(told))

    def require(self, run: str, algorithm: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return what the owner approved; raise `Pending` or `Refusal` unless it is a run with this method."""
        approved = self.approved(run)
        if approved is None:
            raise Pending("the owner of this node has not approved the run yet")
        if algorithm is not None and approved["algorithm"] != digest(algorithm):
            raise Refusal("policy: the owner approved another method or other settings for this run")
        return approved

    def approved(self, run: str) -> dict[str, Any] | None:
        """Return what the owner approved of a run, as `agreed` says it; None if the run was not approved."""
        path = self.state / APPROVED / f"{run.removesuffix(AGAIN)}.json"
        return dict(files.read_json(path)) if path.exists() else None

    def require_protected(self, run: str, setup: Mapping[str, Any]) -> None:
        """Refuse a run that is less protected than the one that the owner saw."""
        approved = self.require(run, setup["algorithm"])
        if approved["secure"] and (setup.get("sums") or {}).get("secure") is not True:
            raise Refusal("policy: the owner approved a run with secure sums")
        given = dict(setup.get("privacy") or {})
        if any(given.get(name) != value for name, value in (approved["privacy"] or {}).items()):
            raise Refusal("policy: the owner approved another privacy budget for this run")


def agreed(proposal: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an owner who approves a proposal agrees to."""
    rounds, privacy = proposal.get("rounds"), proposal.get("privacy")
    return {
        "algorithm": digest(proposal["algorithm"]),
        "refit": str(proposal.get("refit", "none")),
        "rounds": rounds if is_count(rounds) else 0,
        "secure": proposal.get("secure") is True,
        "privacy": dict(privacy) if isinstance(privacy, dict) else None,
    }


def digest(value: Any) -> str:
    """Return a short hash of JSON values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def is_count(value: Any) -> bool:
    """Return True for whole numbers that are not negative."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
