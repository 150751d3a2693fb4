"""What a phase sees of a client, or of a stack of clients: the code is the same."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie._core import broadcast, randomness, threads
from coterie._core.errors import SettingError
from coterie.engine import optimizers
from coterie.engine.client_batches import ClientBatches
from coterie.engine.encoding import Encoder
from coterie.engine.keep import Keep
from coterie.engine.row_privacy import RowPrivacy, refuse
from coterie.models import blocks, fast
from coterie.models.base import norm
from coterie.models.fast.lazy_models import materialize
from coterie.models.fast.span_models import SpanModels
from coterie.models.glm import Glm
from coterie.models.groups import ParameterGroups
from coterie.models.local_sgd import Centres, SgdJob
from coterie.models.metrics import LOSS, client_sums

if TYPE_CHECKING:
    from coterie.data.rows import Batch, Rows
    from coterie.engine.local_runtime import LocalRuntime
    from coterie.models.base import Model

MOST_KNOWN = 1 << 24  # numbers of all clients together that are kept because no round changes them


class Client:
    """A stack of k clients (`at` [k]), all clients (`at` None), or one client with no leading axis (`at` []).

    Vectors are [..., d], per-client numbers [..., 1]. Only training rows are reachable, and validation
    rows where asked for by name; test rows are not.
    """

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
    def groups(self) -> ParameterGroups:
        """Masks [d] over the parameters by name: "head", "body", "buffers", layers; see `ParameterGroups`."""
        return self.model.groups.to(self._runtime.device)

    def initial_model(self) -> Tensor:
        """Return the common starting point, which every client can compute by itself from the seed."""
        return self._runtime.initial.expand(*self.lead, -1)

    @property
    def at(self) -> Tensor | None:
        """Positions of these clients in their runtime; None: all of them."""
        return self._at

    def _noisy_grad(self, x: Tensor) -> Tensor:
        """Return a gradient that may leave (`row_privacy`)."""
        assert self.private is not None
        self._noisy += 1
        return self.private.grad(self, materialize(x), f"{self.use} step {self._noisy}")

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

    def grad(self, x: Tensor, again: bool = False, *, mask: Tensor | None = None) -> Tensor:
        """Return the gradient at x on a fresh minibatch, or `again` on the last.

        Parameters
        ----------
        x : Tensor, [..., d]
            Parameters.
        again : bool, optional
            Use the minibatch of the call before.
        mask : Tensor, [d], optional
            Parameters that are trained, such as `client.groups["head"]`; the gradient is zero elsewhere.

        Returns
        -------
        Tensor, [..., d]
            Of all rows if the algorithm's `batch` is 0 or no client has more rows than that.
        """
        self.model.require_gradients()
        if mask is not None and bool(mask.all()):
            mask = None
        if isinstance(x, SpanModels) and mask is None and self.private is None:
            self.batches.skip("", -again)
            draws = self.batches.draws("", 1)
            self.batches.skip("", 1)
            return x.gradient(draws)
        x = materialize(x)
        mask = None if mask is None else mask.to(x.device)
        if self.private is not None:
            grad = self._noisy_grad(x)
            return grad if mask is None else grad * mask
        grad = self.full_grad(x) if self._all_rows else self._minibatch_grad(x, "", again)
        return grad if mask is None else grad * mask

    def along_rows(self, gradients: int, *models: Tensor) -> tuple[Tensor, ...]:
        """Return models in a form in which gradients on minibatches, at them and where they lead to, cost less.

        Sums of such models and of their gradients, and multiples of them, are of that form too; any other operation
        makes tensors of them. Results are the same up to rounding. Where this saves nothing, models are returned as
        they are.

        Parameters
        ----------
        gradients : int
            How many gradients the phase will ask for.
        *models : Tensor, [..., d]
            All models that gradients will be taken at, or that will be added to them.

        Returns
        -------
        tuple of Tensor, [..., d]
        """
        if len(self.lead) != 1 or self._runtime.loop or self._all_rows or self.private is not None:
            return models
        rows, drawn = self._runtime.train, gradients * self._batch
        models = tuple(map(materialize, models))
        path = fast.find("span", self.model, rows, models, drawn)
        if path is None:
            return models
        self._runtime.used[path.name] += 1
        found: tuple[Tensor, ...] = path.run(self.model, rows, self._at, models, self.threads)
        return found

    def public_rows(self, count: int) -> Tensor:
        """Return inputs that everybody can draw from the seed, [..., count, *features]: standard normal numbers."""
        shape = getattr(self.model, "features", None)
        if shape is None or getattr(self.model, "tokens", False):
            raise SettingError(
                f"{type(self.model).__name__} does not read numbers, so no rows can be made up for it"
            )
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        keys = randomness.slots(randomness.key(self.seed, "public rows"), count * torch.Size(shape).numel())
        rows = self.model.prepare(randomness.normal(keys).to(self._runtime.initial).view(count, *shape))
        return rows.expand(*self.lead, *rows.shape)

    @property
    def seed(self) -> int:
        """The run's seed, which everybody knows."""
        return self._runtime.seed

    @property
    def number(self) -> Tensor:
        """Which client of the federation this is, counted from 0, [..., 1]."""
        return self._pick(self._runtime.ids).unsqueeze(-1)

    def class_counts(self) -> Tensor:
        """Return how many training rows there are of each class, [..., K]; numbers are one class."""

        def counts(x: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            return self.model.hits(targets, weight).sum(-2)

        self._require_free("functions of its rows")
        if self._runtime.loop or self.model.classes_known * len(self._runtime.ids) > MOST_KNOWN:
            return self.over_rows(counts, self.initial_model())
        return self._runtime.once(
            "class counts", lambda all: all.over_rows(counts, all.initial_model()), self._at
        )

    def class_sums(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what a client tells of its features, those of the last layer at x, by class; numbers are one class.

        Parameters
        ----------
        x : Tensor, [..., d]
            Parameters.

        Returns
        -------
        sums : Tensor, [..., K, f]
            Of the features of the training rows of each class.
        counts : Tensor, [..., K]
            Training rows of each class.
        square : Tensor, [..., 1]
            Mean squared length of the features.
        """

        def summed(w: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            features, hits = self.model.hidden_features(w, inputs), self.model.hits(targets, weight)
            square = (norm(features).squeeze(-1).square() * weight).sum(-1, keepdim=True)
            return torch.cat([(hits.mT @ features).flatten(-2), hits.sum(-2), square], -1)

        self._require_free("rows")
        classes = self.model.classes_known
        many = len(self._runtime.ids) * self.model.d > MOST_KNOWN
        if self.model.learns_features or self._runtime.loop or many:
            found = self.over_rows(summed, materialize(x), reduce=False)
        else:
            found = self._runtime.once(
                "class sums", lambda all: all.over_rows(summed, all.initial_model(), reduce=False), self._at
            )
        sums = found[..., : -classes - 1].unflatten(-1, (classes, -1))
        return sums, found[..., -classes - 1 : -1], found[..., -1:]

    def grad_with_noise(self, x: Tensor, most: int = 512) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradient at x on training rows, at most so many, and how far chance has moved it.

        Parameters
        ----------
        x : Tensor, [..., d]
            Parameters.
        most : int, optional
            Rows of a client that are used, drawn at random.

        Returns
        -------
        grad : Tensor, [..., d]
        noise : Tensor, [..., 1]
            Expected squared distance between this gradient and that of the distribution the rows come from, estimated
            from blocks of rows; for a client with one row, the squared length of the gradient.
        dimensions : Tensor, [..., 1]
            How many dimensions such differences fill, roughly.
        """

        def measured(w: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            few = blocks.drawn_rows(inputs, targets, weight, most)
            return torch.cat(blocks.mean_and_noise(self.model.grad, w, *few), -1)

        self.model.require_gradients()
        found, x, rows = None, materialize(x), self._runtime.train
        if len(self.lead) == 1 and not self._runtime.loop and self.private is None:
            path = fast.find("noisy gradient", self.model, rows, x, most)
            if path is not None:
                found = path.run(self.model, rows, self._at, x, self.threads)
                self._runtime.used[path.name] += found is not None
        if found is None:
            found = self.over_rows(measured, x)
        return found[..., :-2], found[..., -2:-1], found[..., -1:]

    def sgd(
        self,
        x: Tensor,
        lr: float,
        steps: int | Tensor,
        *,
        prox: float = 0.0,
        anchor: Tensor | None = None,
        linear: Tensor | None = None,
        stream: str = "",
        mask: Tensor | None = None,
        importance: Tensor | None = None,
        centres: Centres | None = None,
        again: bool = False,
    ) -> Tensor:
        """Return x after `steps` steps x <- x - lr (grad(x) + prox (x - anchor) + linear), each on a fresh minibatch.

        An algorithm with the setting `optimizer` takes steps of that optimiser instead, whose memory the client keeps,
        one for each stream.

        Parameters
        ----------
        x : Tensor, [..., d]
            Where the steps start.
        lr : float
            Step size.
        steps : int or Tensor, [..., 1]
            Number of steps, or one for each client; the stream is then not continued by later calls.
        prox : float, optional
            Strength of the pull to `anchor`.
        anchor : Tensor, [..., d], optional
            What x is pulled to.
        linear : Tensor, [..., d], optional
            What is added to every gradient, such as a difference of control variates.
        stream : str, optional
            Name of the sequence of minibatches. Descents of one phase with different names draw independent ones.
        mask : Tensor, [d], optional
            Parameters that move, such as `client.groups["head"]`; the others stay.
        importance : Tensor, [..., rows], optional
            By which the losses of the client's training rows are multiplied, as `values_of_rows` returns it.
        centres : Centres, optional
            Points that the features of the last layer are pulled to, class by class.
        again : bool, optional
            Take the minibatches of the descent before, which had as many steps.

        Returns
        -------
        Tensor, [..., d]
        """
        if isinstance(steps, Tensor):
            return self._sgd_by_count(
                x, lr, steps, prox=prox, anchor=anchor, linear=linear, stream=stream, mask=mask
            )
        if importance is not None or centres is not None:
            self._require_free("losses with weights or features")
        if again:
            self.batches.skip(stream, -steps)
        rows, x = self._runtime.train, materialize(x)
        mask = None if mask is None else mask.to(x.device)
        anchor, prox = (None, 0.0) if anchor is None or not prox else (materialize(anchor), prox)
        if linear is not None and anchor is not None:
            anchor, linear = (
                torch.sub(anchor, linear, alpha=1 / prox),
                None,
            )  # both together are a pull to another anchor
        if self.private is not None and stream in self.stays:
            with self._free():
                return self.sgd(
                    x, lr, steps, prox=prox, anchor=anchor, linear=linear, stream=stream, mask=mask
                )
        full = self._all_rows or self.private is not None
        stacked = len(self.lead) == 1 and not self._runtime.loop and x.device.type == "cpu"
        plain = self.optimizer == "sgd"
        if centres is not None and not self.model.learns_features:
            centres = None  # nothing that the steps could pull
        if plain and stacked and centres is None and steps and not full:
            draws = self.batches.draws(stream, steps)
            job = SgdJob(
                *(self.model, rows, self._at, x, lr, prox, anchor, draws, self.threads, linear),
                *(mask, importance),
            )
            path = fast.find("sgd", job)
            if path is not None:
                self.batches.skip(stream, steps)
                self._runtime.used[path.name] += 1
                ends: Tensor = path.run(job)
                return ends
        self._runtime.used["plain steps"] += 1
        if self.model.tracks:
            parameters = ~self.groups["buffers"]
            mask = parameters if mask is None else mask & parameters
        kept = f"{self.optimizer} {stream}".strip()
        memory = None if plain else self._kept_memory(kept, x)
        for k in range(steps):
            if importance is not None:
                grad = self._weighted_grad(x, stream, full, importance)
            else:
                grad = self.full_grad(x) if full else self._minibatch_grad(x, stream)
            if centres is not None:
                grad.add_(self._grad_to_centres(x, centres, stream), alpha=centres.strength)
            x = self._tracked(x, stream)
            if anchor is not None:
                grad.add_((x - anchor).mul_(prox))
            if linear is not None:
                grad.add_(linear)
            if mask is not None:
                grad.mul_(mask)
            if memory is not None:
                moved, memory = optimizers.step(self.optimizer, x, grad, lr, memory)
                x = moved if mask is None else torch.where(mask > 0, moved, x)
                continue
            grad.mul_(lr)
            x = x.sub_(grad) if k else x - grad
        if memory is not None:
            setattr(self.keep, kept, memory)
        return x

    def _weighted_grad(self, x: Tensor, stream: str, full: bool, importance: Tensor) -> Tensor:
        """Return the gradient of a step of `sgd` where `importance` [..., rows] weighs the losses of rows."""

        def grad(w: Tensor, part: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            return self._gradient(w, inputs, targets, weight * part[..., : weight.shape[-1]])

        if full:
            return self.over_rows(grad, (x, importance))
        drawn, _ = self.batches.next_rows(stream)
        place = drawn - self._pick(self._runtime.train.start).unsqueeze(-1)
        part = importance.gather(-1, place.clamp(0, importance.shape[-1] - 1))
        return self._on_minibatch(grad, (x, part), stream, again=True)

    def _grad_to_centres(self, x: Tensor, centres: Centres, stream: str) -> Tensor:
        """Return the gradient at x of the pull to the centres, on the minibatch that was drawn last."""
        width, model = centres.points.shape[-1], self.model

        def pull(
            w: Tensor, middles: Tensor, seen: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor
        ) -> Tensor:
            label = model.labels(targets)
            features = model.hidden_features(w, inputs)
            own = label.unsqueeze(-1).expand(*label.shape, width)
            apart = features - middles.gather(-2, own)
            return model.feature_grad(w, inputs, apart * (weight * seen.gather(-1, label)).unsqueeze(-1))

        given = (x, centres.points, centres.known)
        return (
            self.over_rows(pull, given) if self._all_rows else self._on_minibatch(pull, given, stream, True)
        )

    def _sgd_by_count(
        self,
        x: Tensor,
        lr: float,
        steps: Tensor,
        *,
        anchor: Tensor | None,
        linear: Tensor | None,
        **same: Any,
    ) -> Tensor:
        """Return x after numbers of steps that differ; clients with the same number make a stack."""
        if self.optimizer != "sgd":
            raise SettingError("clients with different numbers of local steps take plain SGD steps")
        x, counts = materialize(x), steps.detach().round().long().squeeze(-1)
        ends = x.clone()
        for count in counts.unique().tolist():
            where = (counts == count).nonzero().squeeze(-1) if self.lead else ...
            own_anchor = None if anchor is None else materialize(anchor)[where]
            own_linear = None if linear is None else materialize(linear)[where]
            part = self._part(where)
            ends[where] = materialize(
                part.sgd(x[where], lr, count, anchor=own_anchor, linear=own_linear, **same)
            )
        return ends

    def _part(self, where: Any) -> Client:
        """Return some of these clients, with the same draws."""
        at = where if self._at is None else self._at[where]
        part = Client(self._runtime, at, lambda: self.keys[where], self._batch, threads=self.threads)
        part.private, part.stays, part.use, part._noisy = self.private, self.stays, self.use, self._noisy
        return part

    def _kept_memory(self, name: str, x: Tensor) -> Tensor:
        """Return what the optimiser remembers of the steps before, nothing at first."""
        return self.kept_or_zero(name, optimizers.memory_like(self.optimizer, x))

    def batch_loss(self, x: Tensor, again: bool = False) -> Tensor:
        """Return the loss at x on a fresh minibatch, or `again` on the last, [..., 1]; batches as in `grad`."""
        self._require_free("losses")
        if self._all_rows:
            return self.loss(x)
        return self._on_minibatch(self.model.loss, materialize(x), "", again)

    def full_grad(self, x: Tensor) -> Tensor:
        """Return the gradient at x on all training rows."""
        if self.private is not None:
            return self._noisy_grad(x)
        x, statistics = materialize(x), self._statistics
        if statistics is not None:
            return self.model.grad_from(statistics, x)
        return self.over_rows(self._gradient, x)

    @property
    def _minibatch_grad(self) -> Callable[..., Tensor]:
        """Function of x, stream and `again`: gradients on a minibatch; networks have fast paths of their own."""
        if isinstance(self.model, Glm):
            return self._glm_grad
        return functools.partial(self._on_minibatch, self.model.grad)

    def _glm_grad(self, x: Tensor, stream: str, again: bool = False) -> Tensor:
        rows = self._runtime.train
        path = fast.find("minibatch gradient", self.model, x, rows)
        if path is None:
            return self._on_minibatch(self.grad_on, x, stream, again)
        self._runtime.used[path.name] += 1
        drawn, weight = self.batches.next_rows(stream, again)
        weight = self._reduced(weight, rows)

        def part(k: slice) -> Tensor:
            found: Tensor = path.run(self.model, x[k], rows, drawn[k], weight[k])
            return found

        if self.threads == 1:
            return part(slice(None))
        return torch.cat(threads.shared_out(part, len(x), weight.numel() * self.model.d))

    @property
    def _gradient(self) -> Callable[..., Tensor]:
        """Gradients on given rows; networks choose among fast paths of their own."""
        return self.grad_on if isinstance(self.model, Glm) else self.model.grad

    def grad_on(self, x: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient at x on the rows that `over_rows` or `over_batch` gives to a function."""
        path = fast.find("row gradient", self.model, x, inputs, targets, weight)
        if path is None:
            return self.model.grad(x, inputs, targets, weight)
        self._runtime.used[path.name] += 1
        found: Tensor = path.run(self.model, x, inputs, targets, weight)
        return found

    def descent(self, step: Tensor) -> Callable[..., Tensor]:
        """Return a function of x and k that takes k steps x <- x - step grad(x), step [..., 1], perhaps in `out`."""
        whole = self._at is None and self._all_rows and self.private is None
        closed = self._runtime.descent(step) if whole else None

        def steps(x: Tensor, count: int, out: Tensor | None = None) -> Tensor:
            for _ in range(count):
                x = torch.addcmul(x, step, self.grad(x), value=-1)
            return x

        return steps if closed is None else closed

    def hvp(self, x: Tensor, v: Tensor) -> Tensor:
        """Return the Hessian at x times v on a fresh minibatch (all rows if the algorithm's `batch` is 0)."""
        self._require_free("products with the Hessian")

        return self.over_batch(self.model.hvp, (x, v))

    def loss(self, x: Tensor, split: str = "train") -> Tensor:
        """Return the loss at x on all rows of 'train' or 'validation', [..., 1]."""
        self._require_free("losses")
        x, rows = materialize(x), self._visible(split)
        statistics = self._statistics if split == "train" else None
        if statistics is not None:
            return self.model.loss_from(statistics, x)
        return self.over_rows(self.model.loss, x, rows)

    def error(self, x: Tensor, split: str = "train") -> Tensor:
        """Return the mean loss of the rows of 'train' or 'validation' at x, without the regulariser, [..., 1]."""
        self._require_free("losses")
        rows = self._visible(split)
        return client_sums(self.model, materialize(x), rows, self._at, [LOSS])[LOSS.name]

    def errors(self, models: Tensor, split: str = "train") -> Tensor:
        """Return `error` of several models [..., m, d], [..., m]; the rows are read once."""
        self._require_free("losses")
        models, rows = materialize(models), self._visible(split)
        if len(self.lead) == 1 and not self._runtime.loop:
            path = fast.find("errors", self.model, rows, models)
            if path is not None:
                self._runtime.used[path.name] += 1
                found: Tensor = path.run(self.model, rows, self._at, models, self.threads)
                return found

        def measured(w: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            return self.model.measure_each(w, inputs, targets, weight, [LOSS])[LOSS.name].squeeze(-1)

        return self.over_rows(measured, models, rows, reduce=False)

    def features(self, x: Tensor, split: str = "train") -> tuple[Tensor, Tensor, Tensor]:
        """Return what reaches the model's last layer at x, with targets and weights of the rows.

        Parameters
        ----------
        x : Tensor, [..., d]
            Parameters.
        split : str, optional
            'train' or 'validation'.

        Returns
        -------
        features : Tensor, [..., B, f]
        targets : Tensor, [..., B]
        weight : Tensor, [..., B]
            One over the number of the client's rows, zero on padding; B is the largest number of rows.
        """
        self._require_free("rows")
        x, rows = materialize(x), self._visible(split)
        width = max(1, rows.largest)

        def padded(part: Tensor) -> Tensor:
            missing = width - part.shape[len(self.lead)]
            return torch.nn.functional.pad(part, (0, 0) * (part.dim() - len(self.lead) - 1) + (0, missing))

        found = [
            self.over_rows(lambda w, inputs, *_: padded(self.model.hidden_features(w, inputs)), x, rows),
            self.over_rows(lambda w, inputs, targets, weight: padded(targets), x, rows),
            self.over_rows(lambda w, inputs, targets, weight: padded(weight), x, rows, reduce=False),
        ]
        return found[0], found[1], found[2]

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

    def solve(self, x: Tensor, tol: float = 1e-9, prox: float = 0.0) -> Tensor:
        """Return the minimiser of f + prox/2 |. - x|^2, started at x, to gradient norm tol."""
        self._require_free("exact solutions")
        x, statistics = materialize(x), self._statistics
        if statistics is not None:
            return self.model.solve_from(statistics, x, prox)

        def solve(w: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            return self.model.solve(w, inputs, targets, weight, tol, prox)

        return self.over_rows(solve, x)

    def hessian(self, x: Tensor) -> Tensor:
        """Return the second derivative at x on all training rows, [..., d, d]; generalised linear models have one."""
        self._require_free("second derivatives")
        statistics = self._statistics
        if statistics is not None:
            return statistics[0]
        return self.over_rows(self.model.hessian, materialize(x))

    def smoothness(self) -> Tensor:
        """Return L, the largest curvature of this client's loss, [..., 1]."""
        return self.over_rows(self.model.smoothness, self.initial_model())

    def row_smoothness(self) -> Tensor:
        """Return the largest curvature of the loss as one row alone estimates it, [..., 1]."""
        if self.model.whole_clients:
            raise SettingError("a single row says nothing about survival data; take all rows: --set batch=0")

        def largest(x: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            alone = torch.ones_like(weight).unsqueeze(-1)
            spread = x.unsqueeze(-2).expand(*weight.shape, x.shape[-1])
            curvature = self.model.smoothness(
                spread, inputs.unsqueeze(len(weight.shape)), targets.unsqueeze(-1), alone
            )
            whole = curvature.squeeze(-1) * weight.sum(-1, keepdim=True)
            return torch.where(weight > 0, whole, 0.0).amax(-1, keepdim=True)

        return self.over_rows(largest, self.initial_model())

    def convexity(self) -> Tensor:
        """Return mu, the smallest curvature of this client's loss, [..., 1]."""
        return self.over_rows(self.model.convexity, self.initial_model())

    def calibrated(self, x: Tensor) -> Tensor:
        """Return x with statistics of batch normalisation measured on these clients' training rows."""
        if not self.model.calibrates:
            return x

        def calibrate(w: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            return self.model.calibrate(w, inputs, weight)

        return self.over_rows(calibrate, materialize(x))

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

    def uniform(self, purpose: str, count: int = 1) -> Tensor:
        """Return private draws from [0, 1), [..., count]: a function of seed, purpose, round, call and client."""
        keys = randomness.fold(self.keys, purpose)
        return randomness.uniform(randomness.slots(keys, count), self._runtime.dtype)

    def compress(self, value: Tensor) -> Tensor:
        """Return what the server will decode of `value` [..., length] under `map(..., compress=...)`, else `value`.

        A phase that must know what was sent (a control variate, say) returns this very tensor; it then
        travels in its encoded form. What a phase returns without this call is compressed on the way out.
        """
        return self.encoder.compress(self, materialize(value))

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

    def _tracked(self, x: Tensor, stream: str) -> Tensor:
        """Return x with running statistics moved by the minibatch of this step, where the model tracks them."""
        if not self.model.tracks:
            return x
        if self._all_rows:
            return self.over_rows(lambda w, inputs, _, weight: self.model.track(w, inputs, weight), x)
        batch = self.batches.next(stream, again=True)
        return self.model.track(x, batch.x, batch.weight)

    def _reduced(self, weight: Tensor, rows: Rows) -> Tensor:
        if self.model.reduction == "mean":
            return weight
        return weight * self._pick(rows.size).unsqueeze(-1)

    def _group_weight(self, batch: Batch, place: Tensor | None, rows: Rows) -> Tensor:
        if self.model.reduction == "mean":
            return batch.weight
        size = self._pick(rows.size)
        return batch.weight * (size if place is None else size[place]).unsqueeze(-1)
