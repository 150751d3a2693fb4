"""How the gradient of a network is computed for a stack of clients, in pieces that fit in memory.

*Stacked* is the whole gradient of all clients at once (products of stacks of matrices for a chain of linear layers,
torch.func.vmap for other modules), best for many small models; *looped*
takes one client after the other; *captured*, on a GPU, is the loop as one CUDA graph over several streams. What is
not set is measured, once per shape.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from coterie import native
from coterie.errors import SettingError
from coterie.models.accelerate import Captured, compiled, fastest

CPU_BYTES = 2**30

Objective = Callable[..., Tensor]
"""(w [d], x [B, ...], y [B], weight [B], unrolled=) -> number."""


class Ways:
    """Gradients, Hessian products and functions of rows for one client (w [d]) or a stack of them (w [k, d]).

    `stacked` is True, False or "auto"; `exact`, the same at full precision, turns on compiling and is what compiled
    code is judged by; `decisions` remembers what was measured; `summed` is the sum of the objectives of a stack, where
    the module allows it without vmap, `written` its gradient where it can be had in C, and `alone` that of one client.
    """

    def __init__(
        self,
        objective: Objective,
        bytes_per_row: Callable[[], int],
        stacked: str | bool,
        exact: Ways | None,
        decisions: dict[str, str],
        summed: Objective | None = None,
        written: Callable[..., Tensor] | None = None,
        alone: Callable[..., Tensor] | None = None,
    ) -> None:
        self.written, self.alone = written, alone
        self.objective, self.bytes_per_row, self.summed = objective, bytes_per_row, summed
        self.stacked, self.decisions, self.compiles = stacked, decisions, exact is not None
        self.captured = Captured(self._whole_gradient)
        self._value, self._values = objective, self._together
        if exact is not None:
            self._value = compiled(objective, exact.objective)
            self._values = compiled(self._together, exact._together)

    def gradient(self, w: Tensor, *rows: Tensor) -> Tensor:
        if w.dim() == 1:
            return self._one_gradient(w, *rows)
        ways: dict[str, Callable[..., Tensor]] = {"looped": self.looped, "stacked": self._gradients_stacked}
        if w.is_cuda and rows[0].shape[1] <= self.row_limit(w) and self.captured.takes(w, *rows):
            ways["captured"] = self.captured
        return self._choose("grad", ways, w, *rows)

    def product(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, v: Tensor) -> Tensor:
        """Hessian times v, by differentiating (gradient)'v, which any module that trains allows."""
        if w.dim() == 1:
            return self._one_product(w, x, y, weight, v)
        ways = {"looped": self._products_looped, "stacked": self._products_stacked}
        return self._choose("hvp", ways, w, x, y, weight, v)

    def by_row(self, name: str, function: Callable[..., Tensor], w: Tensor, *rows: Tensor) -> Tensor:
        """A function of rows, [B, ...] for one client and [k, B, ...] for a stack."""
        if w.dim() == 1:
            with torch.no_grad():
                return torch.cat([function(w, *part) for part in self._pieces(w, rows)])
        if w.stride(0) == 0 or w.shape[0] == 1:
            flat = self.by_row(name, function, w[0], *(part.flatten(0, 1) for part in rows))
            return flat.unflatten(0, rows[0].shape[:2])

        def looped(w: Tensor, *rows: Tensor) -> Tensor:
            clients = zip(w, *rows, strict=True)
            return torch.stack([self.by_row(name, function, *client) for client in clients])

        def stacked(w: Tensor, *rows: Tensor) -> Tensor:
            unrolled = functools.partial(function, unrolled=True)
            return torch.cat([_mapped(unrolled, w, *part) for part in self._pieces(w, rows, axis=1)], 1)

        with torch.no_grad():
            return self._choose(name, {"looped": looped, "stacked": stacked}, w, *rows)

    def looped(self, w: Tensor, *rows: Tensor) -> Tensor:
        """Gradients of one client after the other."""
        return torch.stack([self._one_gradient(*client) for client in zip(w, *rows, strict=True)])

    def takes_turns(self, w: Tensor, shape: tuple[int, ...]) -> bool:
        """Whether gradients of this stack on rows [B, ...] of this shape are known to be taken one after the other."""
        if self.stacked == "auto":
            return self.decisions.get(_key("grad", w, shape)) == "looped" and shape[0] <= self.row_limit(w)
        return not self.stacked and shape[0] <= self.row_limit(w)

    def row_limit(self, w: Tensor) -> int:
        """Rows whose activations fit in memory together."""
        on_gpu = w.device.type == "cuda"
        room = torch.cuda.get_device_properties(w.device).total_memory // 4 if on_gpu else CPU_BYTES
        return max(1, 4 * room // (self.bytes_per_row() * w.element_size()))

    def _together(self, w: Tensor, *rows: Tensor) -> Tensor:
        """Sum over a stack of clients, whose gradient in `w` has every client's own in its row."""
        if self.summed is not None:
            return self.summed(w, *rows)
        return vmap(functools.partial(self.objective, unrolled=True))(w, *rows).sum()

    def _whole_gradient(self, w: Tensor, *rows: Tensor) -> Tensor:
        """One client, all rows at once."""
        if self.alone is not None and w.device.type == "cpu":
            return self.alone(w, *rows)
        with torch.enable_grad():
            leaf = w.detach().requires_grad_()
            value = self._value(leaf, *rows)
            return torch.autograd.grad(value, leaf, allow_unused=True, materialize_grads=True)[0]

    def _one_gradient(self, w: Tensor, *rows: Tensor) -> Tensor:
        return _sum(self._whole_gradient(w, *part) for part in self._pieces(w, rows))

    def _gradients_stacked(self, w: Tensor, *rows: Tensor) -> Tensor:
        return _sum(self._mapped_gradient(w, *part) for part in self._pieces(w, rows, axis=1))

    def _mapped_gradient(self, w: Tensor, *rows: Tensor) -> Tensor:
        if self.written is not None and native.takes(w):
            return self.written(w, *rows)
        if not self.compiles and self.summed is None:
            return _mapped(functools.partial(grad(self.objective), unrolled=True), w, *rows)
        with torch.enable_grad():
            leaf = w.detach().contiguous().requires_grad_()
            return torch.autograd.grad(self._values(leaf, *rows), leaf)[0]

    def _one_product(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, v: Tensor) -> Tensor:
        total = torch.zeros_like(w)
        with torch.enable_grad():
            leaf = w.detach().requires_grad_()
            for part in self._pieces(w, (x, y, weight)):
                value = self.objective(leaf, part[0], part[1], part[2], unrolled=True)
                slope = torch.autograd.grad(value, leaf, create_graph=True, materialize_grads=True)[0]
                if slope.requires_grad:
                    total += torch.autograd.grad(slope @ v, leaf, materialize_grads=True)[0]
        return total

    def _products_looped(self, w: Tensor, *rows: Tensor) -> Tensor:
        return torch.stack([self._one_product(*client) for client in zip(w, *rows, strict=True)])

    def _products_stacked(self, w: Tensor, *rows: Tensor) -> Tensor:
        def along(w: Tensor, x: Tensor, y: Tensor, weight: Tensor, v: Tensor) -> Tensor:
            return grad(self.objective)(w, x, y, weight, unrolled=True) @ v

        return _mapped(grad(along), w, *rows)

    def _choose(self, name: str, ways: dict[str, Callable[..., Tensor]], w: Tensor, *rows: Tensor) -> Tensor:
        """One of several ways to compute the same: the one that is set, or else the one measured as fastest.

        Clients and rows are told apart by powers of two.
        """
        ways = {**ways, "stacked": functools.partial(self._in_stacks, ways["stacked"])}
        if self.stacked != "auto":
            ways = {way: ways[way] for way in ways if (way == "stacked") == self.stacked}
        key = _key(name, w, rows[0].shape[1:], shared=w.stride(0) == 0)
        choice = next(iter(ways)) if len(ways) == 1 else self.decisions.get(key)
        if choice in ways:
            return ways[choice](w, *rows)
        prepares = w.is_cuda or self.compiles or self.written is not None
        self.decisions[key], result = fastest(ways, prepares, w, *rows)
        return result

    def _in_stacks(self, stacked: Callable[..., Tensor], w: Tensor, *rows: Tensor) -> Tensor:
        """The stacked way over as many clients at a time as fit in memory."""
        step = max(1, self.row_limit(w) // rows[0].shape[1])
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
    """What a choice depends on: `w` is a stack, `shape` that of the rows of one client."""
    scale = f"2^{w.shape[0].bit_length()} clients 2^{shape[0].bit_length()} rows"
    kind = "shared" if shared else "own"
    return f"{name} {kind} {scale} {tuple(shape[1:])} {w.dtype} {w.device.type}"


def _sum(parts: Iterator[Tensor]) -> Tensor:
    total = next(parts)
    for part in parts:
        total += part
    return total


def _mapped(function: Callable[..., Any], w: Tensor, *rows: Tensor) -> Tensor:
    """vmap over the clients; a `w` that is one vector for all of them is mapped as such."""
    shared = w.stride(0) == 0
    over = (None if shared else 0, *(0 for _ in rows))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        try:
            return vmap(function, in_dims=over)(w[0] if shared else w, *rows).contiguous()
        except RuntimeError as problem:
            raise SettingError(
                f"The module cannot be mapped over clients: {problem} Use network(..., stacked=False)."
            ) from problem
