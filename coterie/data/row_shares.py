"""Count and draw for the partitioners: whole-number shares, holders of classes, random proportions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie._core.randomness import key, normal, permutation, slots, uniform


def shares(rows: int, n: int) -> Tensor:
    """Owner of each row when n owners take equal shares in order."""
    edges = torch.arange(n + 1) * rows // n
    return torch.repeat_interleave(torch.arange(n), edges.diff())


def places(group: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the random rank of each row inside its group, and the size of every group."""
    shuffled = permutation(keys, len(group))
    order = shuffled[torch.argsort(group[shuffled], stable=True)]
    counts = torch.bincount(group)
    first = counts.cumsum(0) - counts
    place = torch.empty_like(order)
    place[order] = torch.arange(len(group)) - first[group[order]]
    return place, counts


def apportion(share: Tensor, total: int) -> Tensor:
    """Round shares of a total to whole numbers that sum to it, by largest remainder."""
    exact = share * total
    whole = exact.floor().long()
    spare = total - int(whole.sum())
    whole[torch.argsort(exact - whole, descending=True, stable=True)[:spare]] += 1
    return whole


def level(caps: Tensor, total: int) -> Tensor:
    """Return the most even whole numbers below their caps that sum to the total."""
    order = torch.argsort(caps, stable=True)
    ascending = caps[order]
    remaining = total - (ascending.cumsum(0) - ascending)
    open_count = torch.arange(len(caps), 0, -1)
    capped = ascending * open_count <= remaining
    count = int(capped.long().cumprod(0).sum())
    levelled = ascending.clone()
    if count < len(caps):
        level, spare = divmod(int(remaining[count]), len(caps) - count)
        levelled[count:] = level
        levelled[len(caps) - spare :] += 1
    result = torch.empty_like(caps)
    result[order] = levelled
    return result


def fill_small_clients(owner: Tensor, n: int, min_rows: int, keys: Tensor) -> Tensor:
    """Move random rows from the largest clients to those with fewer than min_rows."""
    sizes = torch.bincount(owner, minlength=n)
    lacking = (min_rows - sizes).clamp(min=0)
    if not lacking.any():
        return owner
    target = sizes.clone()
    donors = sizes >= min_rows
    target[donors] = level(sizes[donors], int((sizes * donors).sum() - lacking.sum()))
    target[~donors] = min_rows
    place, _ = places(owner, keys)
    moved = place >= target[owner]
    result = owner.clone()
    result[moved] = torch.repeat_interleave(torch.arange(n), lacking)
    return result


def assign_classes(quota: Tensor, n: int, k: int, keys: Tensor) -> Tensor:
    """Choose which client holds which class, bool [n, classes]: k per client, quota[c] per class.

    Taking the classes with the largest quota left never gets stuck (Gale 1957, Ryser 1957); ties and the order of the
    clients are random.
    """
    left = quota.clone()
    order_key, tie_key = slots(keys, 2)
    ties = uniform(slots(slots(tie_key, n), len(quota)))
    holds = torch.zeros(n, len(quota), dtype=torch.bool)
    for client in permutation(order_key, n).tolist():
        chosen = torch.argsort(left + ties[client], descending=True)[:k]
        holds[client, chosen] = True
        left[chosen] -= 1
    return holds


def different_permutations(count: int, classes: int, seed: int) -> Tensor:
    """Return `count` different orders of 0..classes-1, [count, classes]; repeated draws are drawn again."""
    if classes < 13 and count > math.factorial(classes):
        raise SettingError(f"{classes} classes have fewer than {count} permutations; use fewer clusters")
    found: dict[tuple[int, ...], None] = {}
    attempt = 0
    while len(found) < count:
        found.setdefault(tuple(permutation(key(seed, "permuted labels", attempt), classes).tolist()))
        attempt += 1
    return torch.tensor(list(found))


def log_gamma_draws(keys: Tensor, count: int, alpha: float) -> Tensor:
    """Return logarithms of Gamma(alpha) draws, [len(keys), count], by Marsaglia and Tsang (2000).

    Gamma(a) is Gamma(a + 1) U^(1/a); in logarithms this does not underflow for tiny alpha.
    """
    d = alpha + 1.0 - 1.0 / 3.0
    c = 1.0 / math.sqrt(9.0 * d)
    boost, base = slots(slots(keys, count), 2).unbind(-1)
    result = torch.full(boost.shape, math.nan, dtype=torch.float64)
    attempt = 0
    while (open_draws := result.isnan()).any():
        first, second = slots(key(base[open_draws], attempt), 2).unbind(-1)
        z = normal(first)
        v = (1.0 + c * z) ** 3
        log_u = torch.log1p(-uniform(second))
        accepted = (v > 0) & (log_u < 0.5 * z * z + d - d * v + d * torch.log(v.clamp(min=1e-300)))
        result[open_draws] = torch.where(accepted, math.log(d) + torch.log(v.clamp(min=1e-300)), math.nan)
        attempt += 1
    return result + torch.log1p(-uniform(boost)) / alpha
