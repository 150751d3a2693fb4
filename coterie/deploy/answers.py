"""Check the replies of nodes, which may be broken or hostile: a run goes on without those that cannot be used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie._core.errors import CoterieError
from coterie._core.printable import printable
from coterie.data.split import split_sizes
from coterie.deploy import messages, wire
from coterie.deploy.transport import Envelope
from coterie.engine.protocol import Call
from coterie.models.base import Model

SPARE_BYTES = 1 << 20  # what an answer may weigh beyond twice what is expected of its phase

MOST_ROWS = 10**9  # of one client in one split
TOO_LARGE, LARGE = 100.0, 10.0  # times what is plausible: such an answer is not used; such an answer is noted

CallId = tuple[int, int]  # the round and call that left a state


@dataclass(frozen=True)
class Reply:
    """One node's reply to a call, checked on its own.

    Attributes
    ----------
    visits : int
        Number of visits that the reply answers.
    named : dict of str to Tensor
        Values with a row per visit.
    good : Tensor or None
        Which visits gave finite numbers [visits]; None means all.
    encoded : dict of str to list
        Ordinal, length and dtype of values that were sent compressed.
    stamp : tuple of int or None
        Round and call of the state that the node holds now.
    """

    visits: int
    named: dict[str, Tensor]
    good: Tensor | None
    encoded: dict[str, Any]
    stamp: CallId | None

    def shape(self) -> Any:
        """Return names, dtypes and shapes of the values, to compare replies of different nodes."""
        values = ((name, str(value.dtype), tuple(value.shape[1:])) for name, value in self.named.items())
        return tuple(sorted(values)), tuple(sorted((name, tuple(p)) for name, p in self.encoded.items()))

    def mask(self) -> Tensor:
        """Return which visits were good, [visits]."""
        return torch.ones(self.visits, dtype=torch.bool) if self.good is None else self.good


def usable(named: dict[str, Tensor], count: int) -> Tensor:
    """Return a mask [count] of the rows that are finite and small enough to be squared."""
    mask = torch.ones(count, dtype=torch.bool)
    for value in named.values():
        if value.is_floating_point():
            limit = math.sqrt(torch.finfo(value.dtype).max)
            low, high = torch.aminmax(value) if value.numel() else (torch.zeros(()), torch.zeros(()))
            if not -limit <= float(low) <= float(high) <= limit:  # NaN is not either
                mask &= (value.abs() <= limit).reshape(count, -1).all(1)
    return mask


def explain(problem: Exception) -> str:
    """Return why an answer is not used, in one line; of an unforeseen error only its kind."""
    if isinstance(problem, CoterieError):
        return printable(problem)
    return f"its answer cannot be used ({type(problem).__name__})"


def excess(named: dict[str, Tensor], owner: Tensor, sent: float) -> dict[int, float]:
    """Return by how much the largest number of each node exceeds what is plausible.

    Parameters
    ----------
    named
        Values with a row per visit.
    owner
        Which node answered each visit, [visits].
    sent
        The largest number that the nodes were sent.

    Returns
    -------
    dict of int to float
        By node, its largest number relative to 1, to what was sent, and to the median of the other nodes, whichever is
        largest. Nodes are compared if there are at least three.

    Examples
    --------
    >>> import torch
    >>> values = {"": torch.tensor([[1.0], [-3.0], [600.0]])}
    >>> excess(values, torch.tensor([0, 1, 2]), sent=0.0)
    {0: 0.33, 1: 3.0, 2: 600.0}
    """
    found: dict[int, float] = {}
    nodes = owner.unique().tolist()
    if len(nodes) < 3:
        return found
    for value in named.values():
        if not value.is_floating_point() or not value.numel():
            continue
        flat = value.reshape(len(owner), -1)
        rows = torch.maximum(flat.amax(-1), -flat.amin(-1)).double().nan_to_num(math.inf)
        largest = {node: float(rows[owner == node].max()) for node in nodes}
        for node in nodes:
            others = sorted(size for other, size in largest.items() if other != node)
            usual = max(1.0, sent, others[(len(others) - 1) // 2])
            found[node] = max(found.get(node, 0.0), largest[node] / usual)
    return {node: float(f"{ratio:.2g}") for node, ratio in found.items()}


def _is_stamp(at: Any) -> bool:
    return isinstance(at, list) and len(at) == 2 and all(type(part) is int for part in at)


def _are_encoded(encoded: Any, call: Call, tensors: dict[str, Tensor]) -> bool:
    """Whether what is said to be compressed is there and has the size it must have."""
    if not isinstance(encoded, dict) or (encoded and call.compress is None):
        return False
    for name, told in encoded.items():
        value = tensors.get(f"value.{name}")
        if value is None or value.dtype != torch.uint8 or not isinstance(told, list) or len(told) != 3:
            return False
        ordinal, length, dtype = told
        if not isinstance(ordinal, int) or not isinstance(length, int) or dtype not in wire.DTYPES:
            return False
        assert call.compress is not None
        if length < 1 or value.shape[-1] != call.compress.size(length, wire.DTYPES[dtype]):
            return False
    return True


def require_counts(
    rows: dict[str, Tensor],
    count: int,
    told: Tensor | None,
    split: tuple[float, float, float] | None,
    before: Mapping[str, Tensor] | None = None,
) -> None:
    """Raise `WireError` unless these are the numbers of rows of `count` clients that follow from what the node told.

    Parameters
    ----------
    rows
        Numbers of rows [count] by split.
    count
        Number of clients.
    told
        How many rows each client has in all, if the node told before.
    split
        Shares of training, validation and test rows; None where these are not shares of rows.
    before
        Numbers of rows before some of those held out joined the training rows; None if none did.
    """
    if rows.keys() != {"train", "validation", "test"}:
        raise wire.WireError("malformed row counts")
    for value in rows.values():
        if (
            value.dtype != torch.int64
            or value.shape != (count,)
            or not bool(((value >= 0) & (value <= MOST_ROWS)).all())
        ):
            raise wire.WireError("malformed row counts")
    whole = rows["train"] + rows["validation"] + rows["test"]
    if told is not None and not torch.equal(whole, told):
        raise wire.WireError("its row counts are not those that it told at the start")
    if split is not None and any(
        not torch.equal(rows[name], size) for name, size in split_sizes(whole, split).items()
    ):
        raise wire.WireError("its row counts are not those of the split")
    if before is not None and any(
        not bool(((rows[name] == size) | (rows[name] == 0)).all())
        or not torch.equal(whole, torch.stack(list(before.values())).sum(0))
        for name, size in before.items()
        if name != "train"
    ):
        raise wire.WireError("its row counts are not those that it had, with more of them in training")


def _floats(shape: Any) -> int:
    return sum(math.prod(part) for _, _, part in shape[0])


def check(
    envelope: Envelope,
    call: Call,
    visits: int,
    since: CallId | None,
    model: Model,
    sums: int = 0,
    held: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Reply:
    """Check a node's reply to a call.

    Parameters
    ----------
    envelope
        Header and tensors of the reply.
    call
        The call that was sent.
    visits
        Number of visits that the node was asked for.
    since
        The state that the node started from.
    model
        The model, which limits the size of a reply.
    sums
        Numbers that the asked metrics take for each client.
    held
        Whether the node keeps the values, to add them up later.
    dtype
        The type of parameters in this run; sums of metrics may be double precision always.

    Returns
    -------
    Reply
        The checked reply.

    Raises
    ------
    WireError
        Says why the reply cannot be used.
    """
    header, tensors = envelope
    encoded, at = header.get("encoded"), header.get("at")
    stamp = (int(at[0]), int(at[1])) if isinstance(at, list) and _is_stamp(at) else None
    if (at is not None and stamp is None) or stamp not in (since, (call.round, call.call)):
        raise wire.WireError("reply rejected: it belongs to another call")
    if not isinstance(encoded, dict) or not _are_encoded(encoded, call, tensors):
        raise wire.WireError("reply rejected: malformed compressed values")
    declared_up = call.algorithm.traffic_of(model).get(call.phase, (0, 0))[1]
    declared = max(declared_up, 4 * model.d + 64, sums)
    size = sum(value.numel() * value.element_size() for value in tensors.values())
    if size > SPARE_BYTES + 2 * visits * declared * 8:
        raise wire.WireError(f"reply rejected: {size} bytes, far more than {call.phase} declares")
    named, good = messages.under("value.", tensors), tensors.get("good")
    if held and (named or encoded):
        raise wire.WireError("reply rejected: values where only their sum may leave the node")
    if any(value.dim() == 0 or len(value) != visits for value in named.values()):
        raise wire.WireError(f"reply rejected: expected {visits} rows in every value")
    d = model.d
    if declared_up == d and any(
        value.numel() == visits * d and value.shape != (visits, d) for value in named.values()
    ):
        raise wire.WireError(f"reply rejected: a vector of {d} numbers has one axis")
    if any(value.dtype not in (dtype, torch.float64) for name, value in named.items() if name not in encoded):
        raise wire.WireError(f"reply rejected: values that are not {wire.NAMES[dtype]}")
    if good is not None and (good.dtype != torch.bool or good.shape != (visits,)):
        raise wire.WireError("reply rejected: malformed mask of good visits")
    return Reply(visits, named, good, encoded, stamp)


def usual_shape(replies: list[Reply], call: Call, model: Model, scores: bool, before: Any) -> Any:
    """Return the shape that replies to this call should have.

    That is the shape of earlier rounds (`before`), else the one that the algorithm declares, else the one that most
    clients sent; None if no reply has the declared size. Replies to a phase whose messages vary may be smaller.
    `scores` is True for metrics, about which the algorithm declares nothing.
    """
    votes: dict[Any, int] = {}
    for reply in replies:
        votes[reply.shape()] = votes.get(reply.shape(), 0) + reply.visits
    declared = call.algorithm.traffic_of(model).get(call.phase, (0, 0))[1]
    counts = declared > 0 and not scores and call.compress is None
    varies = call.phase in call.algorithm.varying

    def fits(shape: Any) -> bool:
        size = _floats(shape)
        return not counts or size == declared or (varies and 0 < size <= declared)

    def rank(shape: Any) -> tuple[bool, bool, int]:
        return shape == before and not varies, fits(shape), votes[shape]

    best = max(votes, key=rank)
    return best if fits(best) or (best == before and not varies) else None


def words(shape: Any) -> str:
    """Return a shape as text for a log."""
    return ", ".join(f"{name or 'value'} {list(part)} {kind}" for name, kind, part in shape[0]) or "nothing"
