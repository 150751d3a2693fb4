"""Who a client, or a stack of clients, is, and functions of its rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie._core import broadcast, randomness, threads
from coterie._core.errors import SettingError
from coterie.engine.client_batches import ClientBatches
from coterie.engine.encoding import Encoder
from coterie.engine.keep import Keep
from coterie.engine.row_privacy import RowPrivacy, refuse
from coterie.models.fast.lazy_models import materialize
from coterie.models.groups import ParameterGroups

if TYPE_CHECKING:
    from coterie.data.rows import Batch, Rows
    from coterie.engine.local_runtime import LocalRuntime
    from coterie.models.base import Model


class ClientRows:
    """The clients `at` of a runtime, with the keys of their visit; shapes are those of `Client`."""

    def __init__(
        self,
        runtime: LocalRuntime,
        at: Tensor | None,
        keys: Callable[[], Tensor],
        batch: int,
        encoder: Encoder | None = None,
        threads: int = 1,
        optimizer: str = "sgd",
    ) -> None:
        self._runtime, self._at, self._batch = runtime, at, batch
        self.batches = ClientBatches(runtime, at, keys, batch)
        self.encoder = encoder or Encoder()
        self.optimizer = optimizer  # of `sgd`
        self.threads = threads  # that compute parts of this stack
        self.whole = False  # whether nobody else is visited in this call
        self.private: RowPrivacy | None = None  # what gradients go through before they can leave
        self.stays: frozenset[str] = frozenset()  # streams of minibatches whose results never leave
        self.use, self._noisy = "", 0
        self.lead = runtime.ids.shape if at is None else at.shape
        self.keep = Keep(lambda name: runtime.store.read(name, at))

    @property
    def keys(self) -> Tensor:
        """Coordinates of this visit, hashed when the first random number is asked for."""
        return self.batches.keys

    @functools.cached_property
    def _statistics(self) -> tuple[Tensor, ...] | None:
        """Sufficient statistics of these clients, gathered once for all steps of a phase."""
        return self._runtime.statistics(self._at)

    @property
    def model(self) -> Model:
        """The model that is trained, for phases that need more of it than losses and gradients."""
        return self._runtime.model

    @property
    def size(self) -> Tensor:
        """Number of training rows, [..., 1]."""
        return self._pick(self._runtime.train.size).unsqueeze(-1).to(self._runtime.dtype)

    def count(self, split: str) -> Tensor:
        """Return the number of rows of 'train' or 'validation', [..., 1]."""
        return self._pick(self._visible(split).size).unsqueeze(-1)

    @property
    def cluster(self) -> Tensor:
        """Known cluster, [..., 1]."""
        if self._runtime.clusters is None:
            raise SettingError("this algorithm needs known clusters: pass `--cluster COLUMN` or `clusters=`")
        return self._pick(self._runtime.clusters).unsqueeze(-1)

    @property
    def at(self) -> Tensor | None:
        """Positions of these clients in their runtime; None: all of them."""
        return self._at

    @property
    def number(self) -> Tensor:
        """Which client of the federation this is, counted from 0, [..., 1]."""
        return self._pick(self._runtime.ids).unsqueeze(-1)

    @property
    def seed(self) -> int:
        """The run's seed, which everybody knows."""
        return self._runtime.seed

    @property
    def groups(self) -> ParameterGroups:
        """Masks [d] over the parameters by name: "head", "body", "buffers", layers; see `ParameterGroups`."""
        return self.model.groups.to(self._runtime.device)

    def initial_model(self) -> Tensor:
        """Return the common starting point, which every client can compute by itself from the seed."""
        return self._runtime.initial.expand(*self.lead, -1)

    def uniform(self, purpose: str, count: int = 1) -> Tensor:
        """Return private draws from [0, 1), [..., count]: a function of seed, purpose, round, call and client."""
        keys = randomness.fold(self.keys, purpose)
        return randomness.uniform(randomness.slots(keys, count), self._runtime.dtype)

    def kept_or_zero(self, name: str, like: Tensor) -> Tensor:
        """Return what was kept under `name`, zeros for clients that have kept nothing yet."""
        if name in self.written:
            return self.written[name]
        return self._runtime.store.read_or_zero(name, self._at, like)

    @property
    def written(self) -> dict[str, Tensor]:
        """What the phase has put into `keep`, not yet lasting."""
        found: dict[str, Tensor] = self.keep.__dict__["_written"]
        return found

    def over_rows(
        self,
        function: Callable[..., Tensor],
        x: Tensor | tuple[Tensor, ...],
        rows: Rows | None = None,
        *,
        reduce: bool = True,
    ) -> Tensor:
        """Return function(x, inputs, targets, weight) of all training rows, where rows of padding have weight 0.

        What it gives for a client must not depend on the padding. Weights carry the model's reduction unless `reduce`
        is False; they then sum to one. Several tensors x are as many first arguments.
        """
        self._require_free("functions of its rows")
        rows, given = rows or self._runtime.train, x if isinstance(x, tuple) else (x,)
        result: Tensor | None = None
        for place, batch in rows.full(self._at):
            weight = self._group_weight(batch, place, rows) if reduce else batch.weight
            own = given if place is None else tuple(broadcast.index(one, place) for one in given)
            part = function(*own, batch.x, batch.y, weight)
            if place is None:
                return part
            if result is None:
                result = part.new_empty((len(given[0]), *part.shape[1:]))
            result[place] = part
        assert result is not None
        return result

    def over_batch(self, function: Callable[..., Tensor], x: Tensor | tuple[Tensor, ...]) -> Tensor:
        """Return function(x, inputs, targets, weight) of a fresh minibatch, which is drawn as in `grad`.

        Several tensors x are as many first arguments.
        """
        self._require_free("functions of its rows")
        x = tuple(map(materialize, x)) if isinstance(x, tuple) else materialize(x)
        return self.over_rows(function, x) if self._all_rows else self._on_minibatch(function, x, "")

    def values_of_rows(
        self, function: Callable[..., Tensor], x: Tensor | tuple[Tensor, ...], split: str = "train"
    ) -> Tensor:
        """Return function(x, inputs, targets, weight) [..., B], a number for each row, of all rows of a split.

        Clients with fewer rows than the largest have zeros at the end. Several tensors x are as many first arguments.
        """
        rows = self._visible(split)
        width = max(1, rows.largest)

        def padded(*given: Tensor) -> Tensor:
            weight = given[-1]
            found, there = function(*given), weight > 0
            there = there.view(*there.shape[:-1], *(1 for _ in range(found.dim() - there.dim())), -1)
            return torch.nn.functional.pad(found * there, (0, width - weight.shape[-1]))

        return self.over_rows(padded, x, rows, reduce=False)

    @contextmanager
    def _free(self) -> Iterator[None]:
        """Compute with the rows as they are inside the block: what comes of it stays here."""
        private, self.private = self.private, None
        try:
            yield
        finally:
            self.private = private

    def _require_free(self, what: str) -> None:
        """Refuse a look at the rows that differential privacy does not cover."""
        if self.private is not None:
            refuse(what)

    @property
    def _all_rows(self) -> bool:
        """Whether no client has more rows than a minibatch."""
        return self._batch == 0 or self._runtime.train.largest <= self._batch

    def _visible(self, split: str) -> Rows:
        if split not in ("train", "validation"):
            raise SettingError(f"a phase may look at 'train' or 'validation' rows, not at {split!r}")
        return self._runtime.splits[split]

    def _pick(self, values: Tensor) -> Tensor:
        return values if self._at is None else values[self._at]

    def _on_minibatch(
        self,
        function: Callable[..., Tensor],
        x: Tensor | tuple[Tensor, ...],
        stream: str,
        again: bool = False,
    ) -> Tensor:
        """Return a function of the model on the next minibatch of a stream; threads take parts of the stack."""
        batch, given = self.batches.next(stream, again), x if isinstance(x, tuple) else (x,)
        weight = self._reduced(batch.weight, self._runtime.train)
        if self.threads == 1:
            return function(*given, batch.x, batch.y, weight)

        def part(k: slice) -> Tensor:
            return function(*(one[k] for one in given), batch.x[k], batch.y[k], weight[k])

        return torch.cat(threads.shared_out(part, len(given[0]), weight.numel() * self.model.d))

    def _reduced(self, weight: Tensor, rows: Rows) -> Tensor:
        if self.model.reduction == "mean":
            return weight
        return weight * self._pick(rows.size).unsqueeze(-1)

    def _group_weight(self, batch: Batch, place: Tensor | None, rows: Rows) -> Tensor:
        if self.model.reduction == "mean":
            return batch.weight
        size = self._pick(rows.size)
        return batch.weight * (size if place is None else size[place]).unsqueeze(-1)
