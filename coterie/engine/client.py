"""What a phase sees of a client, or of a stack of clients: the code is the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coterie._core import randomness, threads
from coterie._core.errors import SettingError
from coterie.engine import optimizers
from coterie.engine.client_measures import ClientMeasures
from coterie.models import blocks, fast
from coterie.models.fast.lazy_models import materialize
from coterie.models.fast.span_models import SpanModels
from coterie.models.glm import Glm
from coterie.models.local_sgd import Centres, SgdJob


class Client(ClientMeasures):
    """A stack of k clients (`at` [k]), all clients (`at` None), or one client with no leading axis (`at` []).

    Vectors are [..., d], per-client numbers [..., 1]. Only training rows are reachable, and validation rows where
    asked for by name; test rows are not. Gradients and steps are here, what else a client measures is in
    `ClientMeasures`, who it is and functions of its rows are in `ClientRows`.
    """

    def _noisy_grad(self, x: Tensor) -> Tensor:
        """Return a gradient that may leave (`row_privacy`)."""
        assert self.private is not None
        self._noisy += 1
        return self.private.grad(self, materialize(x), f"{self.use} step {self._noisy}")

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

    def compress(self, value: Tensor) -> Tensor:
        """Return what the server will decode of `value` [..., length] under `map(..., compress=...)`, else `value`.

        A phase that must know what was sent (a control variate, say) returns this very tensor; it then
        travels in its encoded form. What a phase returns without this call is compressed on the way out.
        """
        return self.encoder.compress(self, materialize(value))

    def _tracked(self, x: Tensor, stream: str) -> Tensor:
        """Return x with running statistics moved by the minibatch of this step, where the model tracks them."""
        if not self.model.tracks:
            return x
        if self._all_rows:
            return self.over_rows(lambda w, inputs, _, weight: self.model.track(w, inputs, weight), x)
        batch = self.batches.next(stream, again=True)
        return self.model.track(x, batch.x, batch.weight)
