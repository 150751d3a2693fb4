"""The replies to a call that does not wait for everybody: those in time, and steps of earlier rounds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie._core.errors import CoterieError, SettingError
from coterie.engine.calls import payload
from coterie.engine.late import LateAnswers, Steps
from coterie.engine.ledger import INSIDE, Entry
from coterie.engine.protocol import Answer, Call, LateReply
from coterie.engine.replies import UNNAMED, Replies
from coterie.engine.sums import started_from
from coterie.models.fast.lazy_models import materialize

if TYPE_CHECKING:
    from coterie.engine.encoding import Encoded
    from coterie.engine.federation import Federation


def collected(
    fed: Federation,
    late: LateAnswers,
    call: Call,
    asked: Tensor,
    answer: Answer,
    due: Tensor | None,
    link: str,
) -> Replies:
    """Return what has arrived by the end of a call, hold the rest back, and count the bytes that travelled.

    Parameters
    ----------
    fed
        The federation, in whose ledger and list of answers left out this is noted.
    late
        The answers on their way.
    call
        The call; tensors in `each` have a row for each of `asked`.
    asked
        Clients that answered or will, [k].
    answer
        Their answers.
    due
        When they are there, [k]; None: now.
    link
        Link of the ledger.

    Returns
    -------
    Replies
        Those in time as they are. A late one is  x + (y - x') / sqrt(1 + age)  with y the reply, x' what the client was
        sent then and x what is sent now, if the algorithm declares x (`starts_from`), else  y / sqrt(1 + age).
    """
    if answer.held is not None:
        raise SettingError(
            "late answers cannot be added up under masks: leave out --secure, or buffer and delays"
        )
    named, floats, size = answer.named, *weight_of(answer.named, answer.encoded)
    entry = Entry(fed.round, "setup" if fed.round == 0 else "train", call.phase, link)
    if link != INSIDE:
        down_floats, down_size = _sent(call, len(asked))
        fed.ledger.add(entry, (len(asked) if down_floats else 0, down_floats, down_size), (0, 0, 0))
    in_time = torch.ones_like(asked, dtype=torch.bool)
    if due is not None:
        in_time = due <= late.clock
        good = torch.ones_like(in_time) if answer.good is None else answer.good
        away = ~in_time & good  # whoever sends no numbers is not waited for
        if bool(away.any()):
            held = steps_of(LateReply(_only(call, away), asked[away], _rows(named, away), answer.encoded))
            late.post(call.phase, Steps(**{**vars(held), "due": due[away]}))
        in_time = ~away
    came = [steps_of(reply) for reply in answer.late]
    due_now = late.arrived(call.phase)
    came += [] if due_now is None else [due_now]
    up = int(in_time.sum())
    weights = [(up, up * floats, up * size)] if floats else []
    weights += [(len(steps), int(steps.floats.sum()), int(steps.bytes.sum())) for steps in came]
    if link != INSIDE:
        for counts in weights:
            fed.ledger.add(entry, (0, 0, 0), counts)
    if answer.good is not None:
        fed.left_out += [(fed.round, int(k), f"{call.phase}: not finite") for k in asked[~answer.good]]
        in_time = in_time & answer.good
    here = asked
    if not bool(in_time.all()):
        here, named, call = asked[in_time], _rows(named, in_time), _only(call, in_time)
    origin = None if fed.aggregate.plain else started_from(call, len(here))
    fresh = _replies(fed, call, here, named, origin)
    return _joined(fed, late, call, fresh, came) if came else fresh


def steps_of(reply: LateReply) -> Steps:
    """Return late replies as steps from what the clients were sent."""
    if set(reply.named) != {UNNAMED}:
        raise CoterieError(
            f"{reply.call.algorithm.name}: phase {reply.call.phase!r} tolerates late answers, so it must return one "
            "tensor"
        )
    if reply.call.algorithm.starts_from.get(reply.call.phase) in reply.call.each:
        raise CoterieError(
            f"{reply.call.algorithm.name}: phase {reply.call.phase!r} tolerates late answers, so all its clients must "
            "start from the same model"
        )
    count, values = len(reply.ids), materialize(reply.named[UNNAMED])
    origin = started_from(reply.call, count)
    floats, size = weight_of(reply.named, reply.encoded)

    def same(number: int) -> Tensor:
        return torch.full((count,), number, dtype=torch.long, device=reply.ids.device)

    due = torch.zeros(count, dtype=torch.float64, device=reply.ids.device)
    steps = values.clone() if origin is None else values - origin
    return Steps(reply.ids, same(reply.call.round), due, steps, same(floats), same(size))


def weight_of(named: dict[str, Tensor], encoded: dict[str, Encoded]) -> tuple[int, int]:
    """Return the floats and bytes of one client's answer."""
    floats = sum(item.floats for item in encoded.values())
    size = sum(item.size for item in encoded.values())
    for name, value in named.items():
        if name not in encoded:
            count = value.shape[1:].numel()
            floats, size = floats + count, size + count * value.element_size()
    return floats, size


def _joined(fed: Federation, late: LateAnswers, call: Call, fresh: Replies, came: list[Steps]) -> Replies:
    """Return the replies in time and the late ones that are not too old, by client."""
    ids, rows = [fresh.ids], []
    if len(fresh):
        rows.append(materialize(fresh.values))
    for steps in came:
        age = fed.round - steps.asked
        young = age <= late.settings.staleness
        fed.left_out += [
            (fed.round, int(k), f"{call.phase}: {int(old)} rounds late")
            for k, old in zip(steps.ids[~young], age[~young], strict=True)
        ]
        values, origin = steps.values[young], started_from(call, int(young.sum()))
        weight = late.settings.weight(age[young]).to(values.dtype).view(-1, *[1] * (values.dim() - 1))
        rows.append(weight * values if origin is None else origin + weight * values)
        ids.append(steps.ids[young])
    every = torch.cat(ids)
    if len(every) == len(fresh):
        return fresh
    order = every.argsort(stable=True)
    origin = None if fed.aggregate.plain else started_from(call, len(every))
    return _replies(fed, call, every[order], {UNNAMED: torch.cat(rows)[order]}, origin)


def _replies(
    fed: Federation, call: Call, ids: Tensor, named: dict[str, Tensor], origin: Tensor | None
) -> Replies:
    sizes = fed.sizes if ids is fed.everyone else fed.sizes.index_select(0, ids)
    return Replies(ids, named, sizes, fed.aggregate, fed.noting(call.phase), origin)


def _rows(named: dict[str, Tensor], which: Tensor) -> dict[str, Tensor]:
    return {name: materialize(value)[which] for name, value in named.items()}


def _only(call: Call, which: Tensor) -> Call:
    return replace(call, each={name: value[which] for name, value in call.each.items()})


def _sent(call: Call, visited: int) -> tuple[int, int]:
    """Return the floats and bytes that so many clients were sent."""
    floats, size = payload(call.shared.values())
    own_floats, own_size = payload(call.each.values())
    return floats * visited + own_floats, size * visited + own_size
