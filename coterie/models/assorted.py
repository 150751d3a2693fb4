"""Networks of several architectures as one model: each client has one of them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie._core.errors import SettingError
from coterie.models.base import Model
from coterie.models.groups import ParameterGroups
from coterie.models.network import Network


@dataclass(frozen=True, eq=False)
class Assorted(Model):
    """One of several networks: parameters are those of the network, zeros up to the longest, and its number."""

    bases: tuple[Network, ...] = ()

    @functools.cached_property
    def d(self) -> int:
        return 1 + max(base.d for base in self.bases)

    @property
    def task(self) -> str:
        return self.bases[0].task

    @property
    def outputs(self) -> int | None:
        return self.bases[0].outputs

    @property
    def features(self) -> tuple[int, ...] | None:
        """Shape of a row."""
        return self.bases[0].features

    @property
    def tokens(self) -> bool:
        """True if rows are integers."""
        return self.bases[0].tokens

    def fit_to(self, x: Tensor, y: Tensor) -> Self:
        fitted = tuple(base.fit_to(x, y) for base in self.bases)
        if len({(base.task, base.outputs) for base in fitted}) > 1:
            raise SettingError("assorted networks must have the same number of outputs")
        return replace(self, bases=fitted)

    def initial(self, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Return the start of the first network; `start_of` has those of the others."""
        return self.start_of(0, seed, dtype, device)

    def start_of(
        self, kind: int, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Return the starting parameters [d] of one of the networks."""
        start = functional.pad(
            self.bases[kind].initial(seed, dtype, device), (0, self.d - self.bases[kind].d)
        )
        start[-1] = kind
        return start

    @property
    def groups(self) -> ParameterGroups:
        """Everything, and "kind": the number of the network, which is not trained."""
        whole, kind = [slice(0, self.d)], [slice(self.d - 1, self.d)]
        return ParameterGroups(self.d, {"all": whole, "head": whole, "body": [], "buffers": [], "kind": kind})

    def loss(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return self._each("loss", w, x, y, weight)

    def grad(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return self._each("grad", w, x, y, weight, padded=True)

    def score_grad(self, w: Tensor, x: Tensor, slope: Tensor) -> Tensor:
        return self._each("score_grad", w, x, slope, padded=True)

    def scores(self, w: Tensor, x: Tensor) -> Tensor:
        return self._each("scores", w, x)

    def smoothness(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return self._each("smoothness", w, x, y, weight)

    def module(self, w: Tensor) -> nn.Module:
        base = self.bases[round(float(w[-1]))]
        return base.module(w[: base.d])

    def describe(self) -> dict[str, Any]:
        return {"model": "assorted", "bases": [base.describe() for base in self.bases]}

    def _each(self, name: str, w: Tensor, *rows: Tensor, padded: bool = False) -> Tensor:
        """Apply a method of the networks to one client or to the clients of a stack that have each of them."""
        kinds, result = w[..., -1].round().long(), None
        for kind in kinds.unique().tolist():
            base, mine = self.bases[kind], kinds == kind
            parts = [part[mine] if w.dim() > 1 else part for part in (w, *rows)]
            found: Tensor = getattr(base, name)(parts[0][..., : base.d], *parts[1:])
            found = functional.pad(found, (0, self.d - base.d)) if padded else found
            if w.dim() == 1:
                return found
            result = found.new_zeros(len(w), *found.shape[1:]) if result is None else result
            result[mine] = found
        assert result is not None
        return result


def assorted(*networks: Model) -> Assorted:
    """Return a model of which each client has one of several architectures, for methods that share no parameters.

    Parameters
    ----------
    *networks
        Models such as `mlp((8,))` and `mlp((64, 64))`, with the same inputs and outputs.

    Returns
    -------
    Assorted
        The model. `fedmd` gives client k the k-th network, in turn.

    Examples
    --------
    >>> import torch, coterie
    >>> model = coterie.models.assorted(coterie.models.mlp((2,)), coterie.models.mlp((8, 8)))
    >>> model = model.fit_to(torch.randn(20, 3), torch.arange(20) % 4)
    >>> [base.d for base in model.bases], model.d
    ([20, 140], 141)
    """
    if not networks or not all(isinstance(one, Network) for one in networks):
        raise SettingError("assorted needs networks, such as mlp((8,)) and mlp((64, 64))")
    return Assorted(tuple(one for one in networks if isinstance(one, Network)))
