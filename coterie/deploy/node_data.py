"""What a node's clients have: a table, images or texts, each read at the node and never sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from coterie.deploy.consent import Refusal
from coterie.deploy.node_masks import NodeMasks
from coterie.deploy.policy import Policy
from coterie.engine.local_runtime import LocalRuntime
from coterie.models.base import Model

Message = tuple[dict[str, Any], dict[str, Tensor]]


@dataclass(frozen=True)
class Opened:
    """The clients of a node in a run.

    Attributes
    ----------
    names : list of str
        Their names.
    runtime : LocalRuntime
        Computes with their rows.
    notes : dict
        What the file of a finished model says about its inputs.
    """

    names: list[str]
    runtime: LocalRuntime
    notes: dict[str, Any] = field(default_factory=dict)


class NodeData(Protocol):
    """The rows of a node: it reads them, says what the policy lets out, and opens runs on them."""

    kind: str

    def check(self) -> int:
        """Read the rows, to report problems early; return how many there are."""

    def told(self, header: dict[str, Any]) -> dict[str, Any]:
        """Return names and sizes of clients and what their rows are, as JSON values."""

    def statistics(
        self, header: dict[str, Any], tensors: dict[str, Tensor], folder: Path, masks: NodeMasks | None
    ) -> Message:
        """Return sums over the training rows, for an encoding that all nodes share; under masks if there are any."""

    def open(self, settings: dict[str, Any], tensors: dict[str, Tensor], model: Model) -> Opened:
        """Read the rows of a run with this model into memory."""


def fractions(split: list[float]) -> tuple[float, float, float]:
    """Return the shares of training, validation and test rows."""
    return float(split[0]), float(split[1]), float(split[2])


def require_clients(names: list[str], tensors: dict[str, Tensor]) -> None:
    """Raise `Refusal` unless a run numbers as many clients as this node has."""
    if len(names) != len(tensors["ids"]):
        raise Refusal(f"this node has {len(names)} clients; the run lists {len(tensors['ids'])}")


def enough(
    policy: Policy, names: list[str], sizes: list[int], what: str, log: Callable[[str], None]
) -> list[int]:
    """Return the places of clients that have enough rows for the policy."""
    kept = [place for place, size in enumerate(sizes) if size >= policy.min_rows]
    if len(kept) < len(names):
        log(f"{len(names) - len(kept)} client(s) with fewer than {policy.min_rows} {what} take no part")
    if not kept:
        raise Refusal(f"policy: no client of this node has {policy.min_rows} {what}")
    return kept
