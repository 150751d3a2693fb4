"""Simulated Byzantine clients: what they return from any phase is replaced before the server sees it.

`Federation.from_arrays(..., byzantine={3: "sign-flip", "north": "nan"})` or `fed.fresh(byzantine=...)`. What such a
client keeps for itself is not changed; its lies come from hashed draws, so they are the same in every run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie._core import randomness
from coterie._core.errors import SettingError, nearest

if TYPE_CHECKING:
    from coterie.engine.protocol import Answer

STRENGTH = {"sign-flip": 1.0, "random": 10.0, "nan": 0.0, "large": 1e6, "shift": 1.5}


@dataclass(frozen=True)
class Attack:
    """What a Byzantine client sends in place of its true reply x.

    With the mean and standard deviation sd of the honest replies, coordinate by coordinate, it sends
    sign-flip: -strength x; random: N(0, strength^2 rms^2); nan: NaN; large: strength x; shift: mean - strength sd, the
    same from all attackers, which stays among the honest replies (Baruch et al., NeurIPS 2019).

    Parameters
    ----------
    kind
        One of sign-flip, random, nan, large, shift.
    strength
        The factor above; each kind has its default.

    Examples
    --------
    >>> from coterie.engine.byzantine import Attack
    >>> Attack("sign-flip")
    Attack(kind='sign-flip', strength=1.0)
    """

    kind: str
    strength: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in STRENGTH:
            raise SettingError(f"no attack {self.kind!r}.{nearest(self.kind, STRENGTH)}")
        if self.strength is None:
            object.__setattr__(self, "strength", STRENGTH[self.kind])


Attacks = Mapping[int, Attack]


def as_attacks(given: Mapping[Any, Attack | str] | None, names: Sequence[str]) -> dict[int, Attack]:
    """Return attacks by client index.

    Parameters
    ----------
    given
        By client index or name: an `Attack`, its kind, or "kind:strength".
    names
        Names of the clients.

    Returns
    -------
    dict
        An `Attack` for each index.

    Raises
    ------
    SettingError
        If there is no such client or attack.
    """
    found = {}
    for client, attack in (given or {}).items():
        if isinstance(client, str) and client not in names:
            raise SettingError(f"byzantine: no client {client!r}.{nearest(client, names)}")
        number = names.index(client) if isinstance(client, str) else int(client)
        if not 0 <= number < len(names):
            raise SettingError(f"byzantine: no client {number}; there are {len(names)}, counted from 0")
        found[number] = _parsed(attack) if isinstance(attack, str) else attack
    return found


def lied(answer: Answer, asked: Tensor, attacks: Attacks, base: Tensor) -> Answer:
    """Return the answer of the clients `asked` as it arrives when some of them are Byzantine."""
    named = corrupt(answer.named, asked, attacks, base)
    good = answer.good if answer.good is not None else torch.ones_like(asked, dtype=torch.bool)
    for value in named.values():
        if value.is_floating_point():
            good = good & torch.isfinite(value).reshape(len(asked), -1).all(1)
    return replace(answer, named=named, good=None if good.all() else good)


def corrupt(named: dict[str, Tensor], ids: Tensor, attacks: Attacks, base: Tensor) -> dict[str, Tensor]:
    """Replace the rows of Byzantine clients in every floating-point reply, [visits, ...]; whole numbers stay."""
    liars = torch.tensor([int(k) in attacks for k in ids.tolist()], device=ids.device)
    if not liars.any():
        return named
    return {
        name: _lie(value, ids, liars, attacks, randomness.key(base, name))
        if value.is_floating_point()
        else value
        for name, value in named.items()
    }


def _lie(value: Tensor, ids: Tensor, liars: Tensor, attacks: Attacks, base: Tensor) -> Tensor:
    """Replace the rows of Byzantine clients in one reply."""
    flat = value.reshape(len(value), -1)
    told, honest = flat.clone(), flat[~liars & torch.isfinite(flat).all(1)]
    honest = honest if len(honest) else torch.zeros_like(flat[:1])
    mean, spread = honest.mean(0), honest.std(0, correction=0)
    rms = honest.square().mean().sqrt()
    for row in liars.nonzero().squeeze(1).tolist():
        attack = attacks[int(ids[row])]
        strength = attack.strength or 0.0
        if attack.kind == "nan":
            told[row] = torch.nan
        elif attack.kind == "shift":
            told[row] = mean - strength * spread
        elif attack.kind == "random":
            keys = randomness.slots(randomness.key(base, row, int(ids[row])), flat.shape[1])
            told[row] = strength * rms * randomness.normal(keys, flat.dtype)
        else:
            told[row] = flat[row] * (-strength if attack.kind == "sign-flip" else strength)
    return told.view(value.shape)


def _parsed(text: str) -> Attack:
    kind, _, strength = text.partition(":")
    try:
        return Attack(kind, float(strength) if strength else None)
    except ValueError:
        raise SettingError(f"attack {text!r}: {strength!r} is not a number") from None
