"""What a phase sees of a client, or of a stack of clients: the code is the same."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie.errors import CoterieError, SettingError
from coterie.federation import local_sgd, randomness
from coterie.federation.parcels import Sealer
from coterie.models.metrics import metrics
from coterie.models.shared import picked
from coterie.models.unwritten import Unwritten, written_out

if TYPE_CHECKING:
    from coterie.data.rows import Batch, Rows
    from coterie.models.base import Model
    from coterie.runtime.shard import Shard


Reply = Tensor | Unwritten


class Apart(Exception):
    """A phase asks a stack for steps that are faster in smaller stacks side by side."""


AHEAD = 4  # steps whose minibatches are drawn at once: small tensors cost their calls, not their numbers


class Keep:
    """State that stays on the client: `client.keep.personal = v`, read back in a later round.

    Writes become visible at once to the phase and lasting only when the phase has succeeded.
    """

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        self.__dict__.update(_read=read, _written={})

    def __getattr__(self, name: str) -> Tensor:
        written: dict[str, Tensor] = self.__dict__["_written"]
        if name in written:
            return written[name]
        try:
            return self.__dict__["_read"](name)
        except KeyError:
            raise CoterieError(
                f"a client has kept nothing under {name!r} yet; set it in `begin`, which every client runs "
                "before anything else"
            ) from None

    def __setattr__(self, name: str, value: Tensor) -> None:
        self.__dict__["_written"][name] = value

    def __contains__(self, name: str) -> bool:
        try:
            self.__getattr__(name)
        except CoterieError:
            return False
        return True


class Client:
    """A stack of k clients (`at` [k]), all clients (`at` None), or one client with no leading axis (`at` []).

    Vectors are [..., d], per-client numbers [..., 1]. Only training rows are reachable, and validation
    rows where asked for by name; test rows are not.
    """

    def __init__(
        self,
        shard: Shard,
        at: Tensor | None,
        keys: Callable[[], Tensor],
        batch: int,
        sealer: Sealer | None = None,
        threads: int = 1,
    ) -> None:
        self._shard, self._at, self._make_keys, self._batch = shard, at, keys, batch
        self.sealer = sealer or Sealer()
        self.threads = threads  # that compute parts of this stack; `Apart` where they cannot
        self.whole = False  # whether nobody else is visited in this call
        self.minibatches: Callable[[Sequence[int], int], tuple[Tensor, Tensor, Tensor] | None] | None = None
        self._step = 0
        self._drawn: tuple[int, Batch] | None = None
        self._drawn_from = self._drawn_until = -1
        self._rows_ahead: tuple[Tensor, Tensor, Tensor] | None = None
        self.lead = shard.ids.shape if at is None else at.shape
        self.keep: Any = Keep(lambda name: shard.store.read(name, at))

    @functools.cached_property
    def keys(self) -> Tensor:
        """Coordinates of this visit, hashed when the first random number is asked for."""
        return self._make_keys()

    @functools.cached_property
    def _statistics(self) -> tuple[Tensor, ...] | None:
        """Sufficient statistics of these clients, gathered once for all steps of a phase."""
        return self._shard.statistics(self._at)

    @property
    def size(self) -> Tensor:
        """Number of training rows, [..., 1]."""
        return self._pick(self._shard.train.size).unsqueeze(-1).to(self._shard.dtype)

    @property
    def cluster(self) -> Tensor:
        """Known cluster, [..., 1]."""
        if self._shard.clusters is None:
            raise SettingError("this algorithm needs known clusters: pass `--cluster COLUMN` or `clusters=`")
        return self._pick(self._shard.clusters).unsqueeze(-1)

    def initial_model(self) -> Tensor:
        """The common starting point, which every client can compute by itself from the seed."""
        return self._shard.initial.expand(*self.lead, -1)

    def grad(self, x: Tensor, again: bool = False) -> Tensor:
        """Gradient at x on a fresh minibatch (all rows if the algorithm's `batch` is 0), or `again` on the last."""
        rows = self._shard.train
        if self._batch == 0 or rows.largest <= self._batch:
            return self.full_grad(x)
        batch = self._minibatch(again)
        return self._shard.model.grad(x, batch.x, batch.y, self._reduced(batch.weight, rows))

    def sgd(
        self,
        x: Tensor,
        lr: float,
        steps: int,
        *,
        pull: float = 0.0,
        towards: Tensor | None = None,
        turn: tuple[int, int] = (0, 1),
    ) -> Tensor:
        """x after `steps` steps x <- x - lr (grad(x) + pull (x - towards)), each on a minibatch of its own.

        Several descents of a phase may take turns: `turn=(k, m)` draws what the k-th of m would, counted from 0, and
        the last of them ends the draws.
        """
        return written_out(self.trained(x, lr, steps, pull=pull, towards=towards, turn=turn))

    def trained(
        self,
        x: Tensor,
        lr: float,
        steps: int,
        *,
        pull: float = 0.0,
        towards: Tensor | None = None,
        turn: tuple[int, int] = (0, 1),
    ) -> Reply:
        """What `sgd` gives, for a phase to return: models are written out only where more than their mean is used."""
        begun, (mine, every) = self._step, turn
        numbers = range(begun + 1 + mine, begun + 1 + every * steps, every)
        ends = local_sgd.descend(self, x, lr, numbers, pull if towards is not None else 0.0, towards)
        self._step = begun + (every * steps if mine == every - 1 else 0)
        return ends

    def batch_loss(self, x: Tensor, again: bool = False) -> Tensor:
        """Loss at x on a fresh minibatch, or `again` on the last, [..., 1]; batches as in `grad`."""
        rows = self._shard.train
        if self._batch == 0 or rows.largest <= self._batch:
            return self.loss(x)
        batch = self._minibatch(again)
        return self._shard.model.loss(x, batch.x, batch.y, self._reduced(batch.weight, rows))

    def full_grad(self, x: Tensor) -> Tensor:
        """Gradient at x on all training rows."""
        statistics = self._statistics
        if statistics is not None:
            return self._shard.model.grad_from(statistics, x)
        return self._over_rows(self._shard.model.grad, x)

    def descent(self, pace: Tensor) -> Callable[..., Tensor]:
        """A function of x and k that takes k steps x <- x - pace grad(x), pace [..., 1]; it may write to `out`."""
        every_row = self._batch == 0 or self._shard.train.largest <= self._batch
        closed = self._shard.descent(pace) if self._at is None and every_row else None

        def steps(x: Tensor, count: int, out: Tensor | None = None) -> Tensor:
            for _ in range(count):
                x = torch.addcmul(x, pace, self.grad(x), value=-1)
            return x

        return steps if closed is None else closed

    def hvp(self, x: Tensor, v: Tensor) -> Tensor:
        """Hessian at x times v on a fresh minibatch (all rows if the algorithm's `batch` is 0)."""
        rows, model = self._shard.train, self._shard.model
        if self._batch == 0 or rows.largest <= self._batch:

            def product(pair: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
                at, along = pair.chunk(2, -1)
                return model.hvp(at, along, inputs, targets, weight)

            return self._over_rows(product, torch.cat([x, v], -1))
        batch = self._minibatch()
        return model.hvp(x, v, batch.x, batch.y, self._reduced(batch.weight, rows))

    def loss(self, x: Tensor, split: str = "train") -> Tensor:
        """Loss at x on all rows of 'train' or 'validation', [..., 1]."""
        if split not in ("train", "validation"):
            raise SettingError(f"a phase may look at 'train' or 'validation' rows, not at {split!r}")
        statistics = self._statistics if split == "train" else None
        if statistics is not None:
            return self._shard.model.loss_from(statistics, x)
        return self._over_rows(self._shard.model.loss, x, rows=self._shard.splits[split])

    def error(self, x: Tensor, split: str = "train") -> Tensor:
        """Mean loss of the rows of 'train' or 'validation' at x, without the regulariser, [..., 1]."""
        if split not in ("train", "validation"):
            raise SettingError(f"a phase may look at 'train' or 'validation' rows, not at {split!r}")
        return metrics(self._shard.model, x, self._shard.splits[split], self._at)["loss"]

    def solve(self, x: Tensor, tol: float = 1e-9, pull: float = 0.0) -> Tensor:
        """Minimiser of f + pull/2 |. - x|^2, started at x, to gradient norm tol."""
        statistics = self._statistics
        if statistics is not None:
            return self._shard.model.solve_from(statistics, x, pull)

        def solve(w: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            return self._shard.model.solve(w, inputs, targets, weight, tol, pull)

        return self._over_rows(solve, x)

    def hessian(self, x: Tensor) -> Tensor:
        """Second derivative at x on all training rows, [..., d, d]; generalised linear models have one."""
        statistics = self._statistics
        if statistics is not None:
            return statistics[0]
        if not hasattr(self._shard.model, "hessian"):
            raise SettingError(
                "the Hessian of a network is not formed; use a method that needs gradients only"
            )
        return self._over_rows(self._shard.model.hessian, x)

    def smoothness(self) -> Tensor:
        """L, the largest curvature of this client's loss, [..., 1]."""
        return self._over_rows(self._shard.model.smoothness, self.initial_model())

    def row_smoothness(self) -> Tensor:
        """The largest curvature of the loss as one row alone estimates it, [..., 1]."""
        model = self._shard.model

        def largest(x: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            alone = torch.ones_like(weight).unsqueeze(-1)
            spread = x.unsqueeze(-2).expand(*weight.shape, x.shape[-1])
            curvature = model.smoothness(
                spread, inputs.unsqueeze(len(weight.shape)), targets.unsqueeze(-1), alone
            )
            whole = curvature.squeeze(-1) * weight.sum(-1, keepdim=True)
            return torch.where(weight > 0, whole, 0.0).amax(-1, keepdim=True)

        return self._over_rows(largest, self.initial_model())

    def convexity(self) -> Tensor:
        """mu, the smallest curvature of this client's loss, [..., 1]."""
        return self._over_rows(self._shard.model.convexity, self.initial_model())

    @property
    def model(self) -> Model:
        """The model that is trained, for phases that need more of it than losses and gradients."""
        return self._shard.model

    def over_rows(self, function: Callable[..., Tensor], x: Tensor) -> Tensor:
        """function(x, inputs, targets, weight) of all training rows, where rows of padding have weight 0.

        What it gives for a client must not depend on the padding.
        """
        return self._over_rows(function, x)

    def uniform(self, purpose: str, count: int = 1) -> Tensor:
        """Private draws from [0, 1), [..., count]: a function of seed, purpose, round, call and client."""
        keys = randomness.fold(self.keys, purpose)
        return randomness.uniform(randomness.slots(keys, count), self._shard.dtype)

    def compress(self, value: Tensor) -> Tensor:
        """What the server will decode of `value` [..., length] under `map(..., compress=...)`, else `value`.

        A phase that must know what was sent (a control variate, say) returns this very tensor; it then
        travels in its encoded form. What a phase returns without this call is compressed on the way out.
        """
        return self.sealer.compress(self, value)

    def kept_or_zero(self, name: str, like: Tensor) -> Tensor:
        """What was kept under `name`, zeros for clients that have kept nothing yet."""
        if name in self.written:
            return self.written[name]
        return self._shard.store.read_or_zero(name, self._at, like)

    @property
    def written(self) -> dict[str, Tensor]:
        """What the phase has put into `keep`, not yet lasting."""
        return self.keep.__dict__["_written"]

    def _pick(self, values: Tensor) -> Tensor:
        return values if self._at is None else values[self._at]

    def _minibatch(self, again: bool = False) -> Batch:
        """The next minibatch, or `again` the last, which is not drawn twice."""
        if self.threads > 1:
            raise Apart
        self._step += not again
        if self._drawn is None or self._drawn[0] != self._step:
            rows, weight, keys = self._ahead()
            self._drawn = self._step, self._shard.train.take(rows, weight, keys)
        return self._drawn[1]

    def _ahead(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, weights and keys of this step's minibatch; after the first step those of several are drawn at once."""
        if not self._drawn_from <= self._step < self._drawn_until:
            self._drawn_from, count = self._step, 1 if self._step <= 1 else AHEAD
            self._drawn_until = self._step + count
            steps = torch.arange(self._step, self._drawn_until, device=self.keys.device)
            keys = randomness.fold(self.keys.unsqueeze(-1), steps)
            self._rows_ahead = (*self._shard.train.draw(self._at, keys, self._batch), keys)
        assert self._rows_ahead is not None
        rows, weight, keys = self._rows_ahead
        at = self._step - self._drawn_from
        return rows[..., at, :], weight[..., at, :], keys[..., at]

    def _reduced(self, weight: Tensor, rows: Rows) -> Tensor:
        if self._shard.model.reduction == "mean":
            return weight
        return weight * self._pick(rows.size).unsqueeze(-1)

    def _over_rows(self, function: Callable[..., Tensor], x: Tensor, rows: Rows | None = None) -> Tensor:
        """Apply a model function to all rows, group after group, and put the results in their places."""
        rows = rows or self._shard.train
        result: Tensor | None = None
        for place, batch in rows.full(self._at):
            part = function(
                x if place is None else picked(x, place),
                batch.x,
                batch.y,
                self._group_weight(batch, place, rows),
            )
            if place is None:
                return part
            if result is None:
                result = part.new_empty((len(x), *part.shape[1:]))
            result[place] = part
        assert result is not None
        return result

    def _group_weight(self, batch: Batch, place: Tensor | None, rows: Rows) -> Tensor:
        if self._shard.model.reduction == "mean":
            return batch.weight
        size = self._pick(rows.size)
        return batch.weight * (size if place is None else size[place]).unsqueeze(-1)


def as_reply(value: Reply | dict[str, Reply] | None, phase: str, as_tensors: bool = True) -> dict[str, Reply]:
    """What a phase returned, by name, models that it has not written out as tensors or as they are."""
    if value is None:
        return {}
    named = value if isinstance(value, dict) else {"": value}
    if all(isinstance(v, Tensor | Unwritten) for v in named.values()):
        return {name: written_out(v) for name, v in named.items()} if as_tensors else named
    raise SettingError(
        f"phase {phase!r} returned a {type(value).__name__}; a phase returns a tensor, a dict of tensors, or nothing"
    )


def all_finite(values: Sequence[Reply]) -> bool:
    """One cheap pass: a sum is finite only if every term is (a sum that overflows is looked at again)."""
    return all(math.isfinite(total.item()) for total in sums(values))


def sums(values: Sequence[Reply]) -> list[Tensor]:
    """The sum of each floating tensor; one that is there twice is added up once."""
    return [
        value.sum() for value in {id(value): value for value in values if value.is_floating_point()}.values()
    ]
