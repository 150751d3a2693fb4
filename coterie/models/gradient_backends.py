"""Gradients, Hessian products and scores of a network, for one client or a stack, within memory.

*Looped* takes one client after the other, *stacked* all clients at once, and *captured*, on a GPU, replays the loop
as CUDA graphs. The fast paths of each family are in `coterie.models.fast`. What `stacked` does not fix is measured
once for each shape and remembered in the model's `decisions`.
"""

from __future__ import annotations

import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import grad

from coterie.models import fast
from coterie.models.compiling import compiled
from coterie.models.mapping import mapped
from coterie.models.measuring import fastest, is_untimed

if TYPE_CHECKING:
    from coterie.models.network import Network

CPU_BYTES = 2**30
PATIENCE = 30.0  # seconds of training with a shape, after which paths that are `late` are measured

Compute = Callable[..., Tensor]
"""(w [k, d], *rows [k, B, ...]) -> Tensor."""


class GradientBackends:
    """Ways to compute one network's gradients; `used` counts how often each was taken."""

    def __init__(self, model: Network) -> None:
        self.model, self.decisions, self.used = model, model.decisions, Counter[str]()
        self._value: Compute = model.objective
        if model.compiled:
            self._value = compiled(model.objective, model.exact.objective)
        self._ready: dict[tuple[str | None, ...], tuple[str, Compute]] = {}
        self._late: dict[str, float] = {}  # when to measure paths that are late, by decision

    def gradient(self, w: Tensor, *rows: Tensor) -> Compute:
        """Return the function that computes gradients [d] of one client or [k, d] of a stack on rows like these."""
        if w.dim() == 1:
            return self.client_gradient
        key = _key("grad", w, rows[0].shape[1:], shared=w.stride(0) == 0)
        fits = w.shape[0] * rows[0].shape[1] <= self.row_limit(w)
        known = (key, self.decisions.get(key), "fits" if fits else None, fast.chosen())
        if known not in self._ready:
            families = self._families(fits, self.decisions.get(key), w, *rows)
            choice = self._decide(key, families, w, *rows)
            known = (key, self.decisions.get(key), "fits" if fits else None, fast.chosen())
            self._ready[known] = families[choice]
            path = self._late_path(w, *rows)
            if path is not None and path.family != choice:
                self._late.setdefault(key, time.monotonic() + PATIENCE)
        if self._late and time.monotonic() > self._late.get(key, math.inf):
            self._late[key] = math.inf  # once
            self._measure_late(key, known, w, *rows)
            known = (key, self.decisions.get(key), "fits" if fits else None, fast.chosen())
        name, compute = self._ready[known]
        self.used[name] += 1
        return compute

    def product(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, v: Tensor) -> Tensor:
        """Return the Hessian times v by differentiating (gradient)'v."""
        if w.dim() == 1:
            return self._one_product(w, x, y, weight, v)
        return self._choose("hvp", self._products_looped, self._products_stacked, w, x, y, weight, v)

    def pulled_back(self, name: str, function: Compute, w: Tensor, x: Tensor, slope: Tensor) -> Tensor:
        """Return the gradient in w of the sum of function(w, x) times `slope`, for one client or a stack."""

        def value(w: Tensor, x: Tensor, slope: Tensor, unrolled: bool = False) -> Tensor:
            return (function(w, x, unrolled=unrolled) * slope).sum()

        def one(w: Tensor, x: Tensor, slope: Tensor) -> Tensor:
            with torch.enable_grad():
                leaf = w.detach().requires_grad_()
                return torch.autograd.grad(value(leaf, x, slope), leaf)[0]

        def looped(w: Tensor, *rows: Tensor) -> Tensor:
            return torch.stack([one(*client) for client in zip(w, *rows, strict=True)])

        def stacked(w: Tensor, *rows: Tensor) -> Tensor:
            return mapped(grad(functools.partial(value, unrolled=True)), w, *rows)

        if w.dim() == 1:
            return one(w, x, slope)
        return self._choose(name, looped, stacked, w, x, slope)

    def by_row(self, name: str, function: Compute, w: Tensor, *rows: Tensor) -> Tensor:
        """Apply a function of rows: [B, ...] for one client, [k, B, ...] for a stack."""
        if w.dim() == 1:
            with torch.no_grad():
                return torch.cat([function(w, *part) for part in self._pieces(w, rows)])
        if w.stride(0) == 0 or w.shape[0] == 1:
            flat = self.by_row(name, function, w[0], *(part.flatten(0, 1) for part in rows))
            return flat.view(*rows[0].shape[:2], *flat.shape[1:])

        def looped(w: Tensor, *rows: Tensor) -> Tensor:
            clients = zip(w, *rows, strict=True)
            return torch.stack([self.by_row(name, function, *client) for client in clients])

        def stacked(w: Tensor, *rows: Tensor) -> Tensor:
            unrolled = functools.partial(function, unrolled=True)
            return torch.cat([mapped(unrolled, w, *part) for part in self._pieces(w, rows, axis=1)], 1)

        with torch.no_grad():
            return self._choose(name, looped, stacked, w, *rows)

    def looped(self, w: Tensor, *rows: Tensor) -> Tensor:
        """Return gradients [k, d], one client after the other."""
        fits = rows[0].shape[1] <= self.row_limit(w)
        compute = self.whole_gradient if fits else self.client_gradient
        return torch.stack([compute(*client) for client in zip(w, *rows, strict=True)])

    def client_gradient(self, w: Tensor, *rows: Tensor) -> Tensor:
        """Return the gradient [d] of one client, in pieces of rows that fit in memory."""
        if len(rows[0]) <= self.row_limit(w):
            return self.whole_gradient(w, *rows)
        return _sum(self.whole_gradient(w, *part) for part in self._pieces(w, rows))

    def whole_gradient(self, w: Tensor, *rows: Tensor) -> Tensor:
        """Return the gradient [d] of one client from all rows at once."""
        path = fast.find("client gradient", self.model, w)
        if path is not None:
            found: Tensor = path.run(self.model, w, *rows)
            return found
        with torch.enable_grad():
            leaf = w.detach().requires_grad_()
            value = self._value(leaf, *rows)
            return torch.autograd.grad(value, leaf, allow_unused=True, materialize_grads=True)[0]

    def prefers_loop(self, w: Tensor, shape: tuple[int, ...]) -> bool:
        """Return True if gradients of this stack on rows [B, ...] are known to be computed client by client."""
        if shape[0] > self.row_limit(w):
            return False
        if self.model.stacked == "auto":
            return is_untimed() or self.decisions.get(_key("grad", w, shape)) == "looped"
        return not self.model.stacked

    def row_limit(self, w: Tensor) -> int:
        """Return the number of rows whose activations fit in memory together."""
        if self.model.flat_module.normalises_batches:
            return 2**62  # statistics of a part of a minibatch would be others
        on_gpu = w.device.type == "cuda"
        room = torch.cuda.get_device_properties(w.device).total_memory // 4 if on_gpu else CPU_BYTES
        return max(1, 4 * room // (self.model.bytes_per_row * w.element_size()))

    def _late_path(self, w: Tensor, *rows: Tensor) -> fast.FastPath | None:
        """Return the path that is to be measured later, if there is one and nothing fixes the choice."""
        if self.model.stacked is True or is_untimed():
            return None
        paths = (path for path in fast.enabled("gradient") if path.late)
        return next((path for path in paths if path.supports(self.model, w, *rows)), None)

    def _measure_late(self, key: str, known: tuple[str | None, ...], w: Tensor, *rows: Tensor) -> None:
        """Measure the path that was left for later against the one in use, and take the faster one."""
        path = self._late_path(w, *rows)
        if path is None:
            return
        late = functools.partial(path.run, self.model)
        faster, _ = fastest({"looped": self._ready[known][1], path.family: late}, True, w, *rows)
        if faster == path.family:
            self.decisions[key] = path.family
            self._ready[(key, path.family, *known[2:])] = path.name, late

    def _families(
        self, fits: bool, remembered: str | None, w: Tensor, *rows: Tensor
    ) -> dict[str, tuple[str, Compute]]:
        """Return the first supported path of each family of gradients by name; "looped" is the plain code.

        A family of a path that is `late` is among them if it is the decision that is remembered.
        """
        client = fast.find("client gradient", self.model, w)
        found: dict[str, tuple[str, Compute]] = {
            "looped": ("loop" if client is None else client.name, self.looped)
        }
        for path in fast.enabled("gradient"):
            if path.late and path.family != remembered:
                continue
            if path.family not in found and path.supports(self.model, w, *rows):
                compute = functools.partial(path.run, self.model)
                if path.family == "stacked" and not fits:
                    compute = functools.partial(self._in_pieces, compute)
                found[path.family] = path.name, compute
        if self.model.stacked == "auto":
            return found
        wanted = {family for family in found if (family == "stacked") == self.model.stacked}
        return {family: found[family] for family in wanted or {"looped"}}

    def _decide(self, key: str, families: dict[str, tuple[str, Compute]], w: Tensor, *rows: Tensor) -> str:
        """Return the family to take: the only one, the one remembered, or the one measured as fastest."""
        if len(families) == 1:
            return next(iter(families))
        if self.decisions.get(key) not in families:
            computes = {family: compute for family, (_, compute) in families.items()}
            prepared = {path.name for path in fast.enabled("gradient") if path.prepares}
            prepares = (
                w.is_cuda or self.model.compiled or any(name in prepared for name, _ in families.values())
            )
            self.decisions[key], _ = fastest(computes, prepares, w, *rows)
        return self.decisions[key]

    def _choose(self, name: str, looped: Compute, stacked: Compute, w: Tensor, *rows: Tensor) -> Tensor:
        """Compute one client at a time or as a stack: as `stacked` says, or whichever was measured as faster."""
        stacked = functools.partial(self._in_stacks, stacked)
        if self.model.stacked != "auto" or not any(
            path.family == "stacked" for path in fast.enabled("gradient")
        ):
            return (stacked if self.model.stacked is True else looped)(w, *rows)
        computes: dict[str, Compute] = {"looped": looped, "stacked": stacked}
        key = _key(name, w, rows[0].shape[1:], w.stride(0) == 0)
        if key in self.decisions:
            return computes[self.decisions[key]](w, *rows)
        prepares = w.is_cuda or self.model.compiled
        self.decisions[key], result = fastest(computes, prepares, w, *rows)
        return result

    def _one_product(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, v: Tensor) -> Tensor:
        total = torch.zeros_like(w)
        with torch.enable_grad():
            leaf = w.detach().requires_grad_()
            for part in self._pieces(w, (x, y, weight)):
                value = self.model.objective(leaf, part[0], part[1], part[2], unrolled=True)
                first = torch.autograd.grad(value, leaf, create_graph=True, materialize_grads=True)[0]
                if first.requires_grad:
                    total += torch.autograd.grad(first @ v, leaf, materialize_grads=True)[0]
        return total

    def _products_looped(self, w: Tensor, *rows: Tensor) -> Tensor:
        return torch.stack([self._one_product(*client) for client in zip(w, *rows, strict=True)])

    def _products_stacked(self, w: Tensor, *rows: Tensor) -> Tensor:
        def along(w: Tensor, x: Tensor, y: Tensor, weight: Tensor, v: Tensor) -> Tensor:
            gradient: Tensor = grad(self.model.objective)(w, x, y, weight, unrolled=True)
            return gradient @ v

        return mapped(grad(along), w, *rows)

    def _in_pieces(self, compute: Compute, w: Tensor, *rows: Tensor) -> Tensor:
        """Return gradients of a stack, over as many clients and then rows at a time as fit in memory."""

        def of_rows(w: Tensor, *rows: Tensor) -> Tensor:
            return _sum(compute(w, *part) for part in self._pieces(w, rows, axis=1))

        return self._in_stacks(of_rows, w, *rows)

    def _in_stacks(self, stacked: Compute, w: Tensor, *rows: Tensor) -> Tensor:
        """Compute as a stack, over as many clients at a time as fit in memory."""
        step = max(1, self.row_limit(w) // max(1, rows[0].shape[1]))
        if step >= w.shape[0]:
            return stacked(w, *rows)
        parts = [stacked(*(part[at : at + step] for part in (w, *rows))) for at in range(0, w.shape[0], step)]
        return torch.cat(parts)

    def _pieces(self, w: Tensor, rows: tuple[Tensor, ...], axis: int = 0) -> Iterator[tuple[Tensor, ...]]:
        limit, count = self.row_limit(w), rows[0].shape[axis]
        if count <= limit:
            yield rows
            return
        for first in range(0, count, limit):
            yield tuple(part.narrow(axis, first, min(limit, count - first)) for part in rows)


def _key(name: str, w: Tensor, shape: Sequence[int], shared: bool = False) -> str:
    """Return the key of a decision; numbers of clients in `w` and of rows count to powers of two."""
    scale = f"2^{w.shape[0].bit_length()} clients 2^{shape[0].bit_length()} rows"
    kind = "shared" if shared else "own"
    return f"{name} {kind} {scale} {tuple(shape[1:])} {w.dtype} {w.device.type}"


def _sum(parts: Iterator[Tensor]) -> Tensor:
    total = next(parts)
    for part in parts:
        total += part
    return total
