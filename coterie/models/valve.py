"""A valve before the last layer of a network: it scales and shifts the features that the last layer sees."""

from __future__ import annotations

import copy
from collections import OrderedDict

import torch
from torch import Tensor, nn

from coterie._core.errors import SettingError
from coterie.models.base import Model
from coterie.models.groups import Part

NAME = "valve"


class Valve(nn.Module):
    """relu(features (1 + gain) + shift), with a gain and a shift for each feature; both start at zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the features that pass, for rows x [B, width]."""
        return torch.relu(x * (1 + self.gain) + self.shift)


def with_valve(module: nn.Module) -> nn.Module:
    """Return a copy of a module with a valve before its last linear layer, as GPFL needs it.

    Parameters
    ----------
    module
        Its last `nn.Linear` gives the output.

    Returns
    -------
    nn.Module
        The copy, in which a gain and a shift for each input of the last layer were added; both start at zero.

    Examples
    --------
    >>> import torch, coterie
    >>> from torch import nn
    >>> module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> model = coterie.models.network(coterie.models.with_valve(module))
    >>> model = model.fit_to(torch.randn(10, 3), torch.arange(10) % 2)
    >>> [name for name in model.groups if "valve" in name]
    ['2.valve.gain', '2.valve', '2.valve.shift']
    """
    copied = copy.deepcopy(module)
    layers = [name for name, layer in copied.named_modules() if isinstance(layer, nn.Linear)]
    if not layers or not layers[-1]:
        raise SettingError(
            f"{type(module).__name__} has no nn.Linear after other layers that a valve could be put before."
        )
    owner, _, last = layers[-1].rpartition(".")
    parent = copied.get_submodule(owner)
    head = parent.get_submodule(last)
    assert isinstance(head, nn.Linear)
    setattr(parent, last, nn.Sequential(OrderedDict([(NAME, Valve(head.in_features)), ("head", head)])))
    return copied


def valve_of(model: Model, method: str) -> Part:
    """Return where the valve's gains and shifts are in a model's parameters; raise `SettingError` without one."""
    groups = model.groups
    found = [name for name in groups if name.rpartition(".")[2] == NAME]
    if not found:
        raise SettingError(
            f"{method}: this model has no valve before its last layer; pass"
            " model=coterie.models.mlp(valve=True) or network(coterie.models.with_valve(module)) to the federation"
        )
    return Part(groups[found[0]])
