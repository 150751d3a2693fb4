"""Differential privacy of rows: gradients of single rows are clipped, and every client adds noise to their sum.

Each gradient takes every row of the client with the same probability (Poisson sampling), from randomness that nobody
else knows. Whatever a client computes of such gradients may leave it. Descents that a method declares to stay at the
client (`Algorithm.stays`) and everything in `deploy` use the rows as they are and cost nothing. Loss values, solutions
and other functions of the rows are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie.engine import accounting
from coterie.engine.noise import Noise, fingerprint
from coterie.engine.privacy import BudgetSpent, Privacy

if TYPE_CHECKING:
    from coterie.data.rows import Rows
    from coterie.engine.client import Client
    from coterie.models.base import Model

ELEMENTS = 1 << 24  # numbers in the gradients of single rows held at once


class RowPrivacy:
    """The noise and the budget of the rows of some clients.

    Parameters
    ----------
    settings
        What a run may cost.
    rows
        Training rows of the clients.
    ids
        Numbers of the clients in the federation, [k].
    batch
        Expected number of rows in a gradient; 0 takes all rows.
    steps
        Noisy gradients that each client may compute in the whole run.
    noise
        Secret noise of the place.
    """

    def __init__(
        self, settings: Privacy, rows: Rows, ids: Tensor, batch: int, steps: int, noise: Noise
    ) -> None:
        self.settings, self.rows, self.ids, self.steps, self.noise = (
            settings,
            rows,
            ids.tolist(),
            steps,
            noise,
        )
        size = rows.size.double().clamp(min=1)
        self.rate = torch.ones_like(size) if batch == 0 else _rounded_up((batch / size).clamp(max=1))
        self.scale = torch.tensor(
            [
                accounting.noise_for(settings.epsilon, settings.delta, steps, rate)
                for rate in self.rate.tolist()
            ]
        ).double()
        self.used = torch.zeros(len(size), dtype=torch.long)
        self.counts = True  # False for gradients that were paid before and come out the same again

    def grad(self, client: Client, x: Tensor, use: str) -> Tensor:
        """Return noisy mean gradients at x [..., d] of the clients of a stack."""
        at = self._paid(client, use)
        flat = x.reshape(len(at), -1)
        total = self._clipped_sums(client.model, flat, at, use)
        for k, i in enumerate(at.tolist()):
            drawn = self.noise.normal(f"{use} {fingerprint(flat[k])} noise of {self.ids[i]}", flat.shape[1])
            total[k] += (self.scale[i] * self.settings.clip * drawn).to(total)
        expected = (self.rate * self.rows.size.clamp(min=1))[at].unsqueeze(-1).to(total)
        return (total / expected + _penalty(client.model, flat, self.rows)).view(x.shape)

    def _clipped_sums(self, model: Model, x: Tensor, at: Tensor, use: str) -> Tensor:
        """Return the sums [k, d] of the clipped gradients of the rows that were drawn."""
        chosen, owner = [], []
        for k, i in enumerate(at.tolist()):
            first, size = int(self.rows.start[i]), int(self.rows.size[i])
            drawn = self.noise.uniform(f"{use} {fingerprint(x[k])} rows of {self.ids[i]}", size)
            mine = (drawn < self.rate[i]).nonzero().squeeze(-1) + first
            chosen.append(mine)
            owner.append(torch.full_like(mine, k))
        picked, owners = torch.cat(chosen), torch.cat(owner)
        total = torch.zeros_like(x)
        step = max(1, ELEMENTS // x.shape[1])
        for first in range(0, len(picked), step):
            part, whose = picked[first : first + step], owners[first : first + step]
            grads = row_gradients(model, x[whose], self.rows.x[part], self.rows.y[part])
            length = torch.linalg.vector_norm(grads, dim=1, keepdim=True)
            grads = grads * (self.settings.clip / length.clamp(min=1e-30)).clamp(max=1.0)
            total.index_add_(0, whose, grads)
        return total

    def gram(self, client: Client) -> tuple[Tensor, Tensor]:
        """Return noisy sums of zz' over rows z = (x, y) of a regression, and the variance of their noise.

        A row counts up to the length C = clip sqrt(2 (d + 1)), about 1.4 times that of a standardised row, so that the
        entries of zz', each pair off the diagonal once and times sqrt(2), are a vector of length C^2 at most. They get
        noise in proportion. What cannot be told from noise is then set to zero: directions of x in which the sum is
        below the noise's largest eigenvalue.

        Returns
        -------
        tuple of Tensor
            Sums [..., d + 1, d + 1], and the variance of the noise in a diagonal entry, [..., 1]; half of it elsewhere.
        """
        at = self._paid(client, "moments")
        x, y = self.rows.x, self.rows.y
        d = x.shape[1]
        bound = self.settings.clip * math.sqrt(2 * (d + 1))
        found = []
        for i in at.tolist():
            own = slice(int(self.rows.start[i]), int(self.rows.start[i]) + int(self.rows.size[i]))
            total = clipped_gram(torch.cat([x[own], y[own].unsqueeze(-1)], 1).double(), bound)
            deviation = float(self.scale[i]) * bound**2
            drawn = self.noise.normal(f"{client.use} moments of {self.ids[i]}", (d + 1, d + 1))
            upper = deviation * (drawn.triu(1) / math.sqrt(2) + torch.diag(drawn.diagonal()))
            found.append(_distinct(total + upper + upper.triu(1).mT, deviation))
        blur = (self.scale[at] * bound**2).square()
        lead = client.lead
        return torch.stack(found).view(*lead, d + 1, d + 1).to(x.device), blur.view(*lead, 1).to(x.device)

    def _paid(self, client: Client, use: str) -> Tensor:
        """Count one more look at the rows of a stack of clients, and return their places."""
        at = torch.arange(len(self.ids)) if client.at is None else client.at.view(-1)
        if self.counts:
            if bool((self.used[at] >= self.steps).any()):
                raise BudgetSpent(
                    f"{use} asks for more than the {self.steps} noisy answers that were planned"
                )
            self.used[at] += 1
        return at

    def spent(self) -> Tensor:
        """Return epsilon of the rows of every client so far, [k]."""
        each = zip(self.scale.tolist(), self.used.tolist(), self.rate.tolist(), strict=True)
        delta = self.settings.delta
        return torch.tensor([accounting.epsilon(scale, times, delta, rate) for scale, times, rate in each])

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs to hold."""
        return {"used": self.used.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.used = torch.tensor(state["used"], dtype=torch.long)


class Counting(RowPrivacy):
    """Counts the noisy gradients of a round without looking at a row; all gradients are zero."""

    def __init__(self, n: int) -> None:
        self.used = torch.zeros(n, dtype=torch.long)

    @property
    def most(self) -> int:
        """Gradients of the client that computed most of them."""
        return int(self.used.max())

    def grad(self, client: Client, x: Tensor, use: str) -> Tensor:
        """Return zeros."""
        self.used[slice(None) if client.at is None else client.at] += 1
        return torch.zeros_like(x)

    def gram(self, client: Client) -> tuple[Tensor, Tensor]:
        """Return zeros."""
        self.used[slice(None) if client.at is None else client.at] += 1
        size = client.model.d + 1
        return torch.zeros(*client.lead, size, size).double(), torch.zeros(*client.lead, 1).double()


def clipped_gram(z: Tensor, bound: float) -> Tensor:
    """Return the sum of zz' over rows z [R, m], each shortened to a bound.

    Examples
    --------
    >>> import torch
    >>> from coterie.engine.row_privacy import clipped_gram
    >>> clipped_gram(torch.tensor([[3.0, 4.0]]), 1.0)
    tensor([[0.3600, 0.4800],
            [0.4800, 0.6400]])
    """
    length = torch.linalg.vector_norm(z, dim=1, keepdim=True)
    z = z * (bound / length.clamp(min=1e-300)).clamp(max=1.0)
    return z.mT @ z


def _distinct(total: Tensor, deviation: float) -> Tensor:
    """Return noisy sums of zz' without the directions of x that may be nothing but noise."""
    d = len(total) - 1
    values, vectors = torch.linalg.eigh(total[:d, :d])
    keep = vectors[:, values > deviation * math.sqrt(2 * d)]
    onto = torch.block_diag(keep @ keep.mT, torch.ones(1, 1, dtype=total.dtype))
    cleaned: Tensor = onto @ total @ onto
    cleaned[d, d] = cleaned[d, d].clamp_min(0.0)
    return cleaned


def row_gradients(model: Model, x: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the gradient of the loss of every single row, [R, d], without the model's penalty.

    Parameters
    ----------
    model
        The model; a stack of R models with one row each is what it computes, in closed form for linear models.
    x
        Parameters for each row, [R, d].
    inputs, targets
        The rows, [R, ...] and [R].
    """
    one = torch.ones(len(x), 1, dtype=x.dtype)
    grads = model.grad(x, inputs.unsqueeze(1), targets.unsqueeze(1), one)
    return grads - model.grad(x, inputs.unsqueeze(1), targets.unsqueeze(1), torch.zeros_like(one))


def refuse(what: str) -> None:
    """Raise the error of a phase that looks at rows other than by gradients."""
    raise SettingError(
        f"differential privacy of rows protects gradients, and this method asks for {what}. Choose one that takes "
        "gradient steps, such as fedavg, fine-tuned, ditto, oracle or reptile, or protect clients: --unit client"
    )


def _penalty(model: Model, x: Tensor, rows: Rows) -> Tensor:
    """Return the gradient of the model's penalty, which no row enters."""
    inputs = torch.zeros_like(rows.x[:1]).expand(len(x), 1, *rows.x.shape[1:])
    targets = torch.zeros_like(rows.y[:1]).expand(len(x), 1)
    return model.grad(x, inputs, targets, torch.zeros(len(x), 1, dtype=x.dtype))


def _rounded_up(rate: Tensor) -> Tensor:
    """Return sampling rates rounded up to two digits, so that few of them need accounting."""
    digit = 10.0 ** (torch.log10(rate).floor() - 1)
    return ((rate / digit - 1e-9).ceil() * digit).clamp(max=1.0)


def planned_steps(count: int, rounds: int, first: int = 0) -> int:
    """Return the noisy answers of a run with `count` of them in a round and `first` before, at least one."""
    return max(1, math.ceil(count * rounds) + first)
