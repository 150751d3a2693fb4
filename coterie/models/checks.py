"""Checks of a module before training starts; each error names its remedy."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import UninitializedParameter

from coterie._core.errors import SettingError
from coterie.models.flat_module import FlatModule


def check_module(module: nn.Module) -> None:
    """Raise an error for layers that cannot be trained as a function of one parameter vector."""
    for name, layer in module.named_modules():
        where = f"{type(layer).__name__} at {name!r}" if name else type(layer).__name__
        if any(
            isinstance(parameter, UninitializedParameter) for parameter in layer.parameters(recurse=False)
        ):
            raise SettingError(
                f"{where} has no sizes yet. Run the module once on a few rows before giving it."
            )
        if isinstance(layer, _NormBase) and not isinstance(layer, _BatchNorm) and layer.track_running_stats:
            raise SettingError(
                f"{where}: its running statistics change when it runs, which a function of the parameters cannot "
                "do. Set track_running_stats=False."
            )
        if (isinstance(layer, _DropoutNd) and layer.p > 0) or _inner_dropout(layer) > 0:
            raise SettingError(
                f"{where} draws random numbers that a rerun could not repeat client by client. "
                "Set its dropout probability to 0, and use l2 > 0 against overfitting."
            )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise SettingError("The module has no parameter with requires_grad=True, so nothing can be trained.")


def check_behaviour(flat_module: FlatModule, x: Tensor) -> Tensor:
    """Run the module on some rows, raise an error if it has side effects, and return its output."""
    w = flat_module.start.to(x.dtype if x.is_floating_point() else torch.get_default_dtype())
    before = x.clone()
    held = {name: value.clone() for name, value in flat_module.constants(w).items()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            torch.manual_seed(1)
            output = flat_module(w, x)
            torch.manual_seed(2)
            again = flat_module(w, before.clone())
            alone = flat_module(w, before[:1].clone())
        except (RuntimeError, TypeError, ValueError, IndexError) as problem:
            raise SettingError(
                f"The module cannot run on {len(x)} rows of shape {tuple(x.shape[1:])} and type {x.dtype}: "
                f"{problem} Its forward must take one tensor [rows, ...]; reshape the inputs to fit."
            ) from problem
    if not isinstance(output, Tensor) or output.dim() not in (1, 2) or output.shape[0] != len(x):
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise SettingError(
            f"The module returns {shape} for {len(x)} rows; it must return [rows] or [rows, outputs]."
        )
    if not torch.equal(before, x):
        raise SettingError("The module overwrites its input. Set inplace=False on its first layer.")
    changed = [name for name, value in flat_module.constants(w).items() if not _same(value, held[name])]
    if changed:
        raise SettingError(
            f"The module changes its buffer {changed[0]!r} when it runs, which makes it client state. "
            "Remove or replace the layer that does so."
        )
    if not _same(output, again):
        raise SettingError(
            "The module draws random numbers when it runs. Remove dropout or noise; "
            "randomness in Coterie must be a function of the seed."
        )
    if not torch.allclose(output[:1], alone, rtol=1e-3, atol=1e-4, equal_nan=True):
        raise SettingError(
            "The module's output for a row depends on the other rows of its batch (as batch normalisation "
            "does), so padding would change it. Use coterie.models.replace_batchnorm(module) or GroupNorm."
        )
    return output


def replace_batchnorm(module: nn.Module) -> nn.Module:
    """Return a copy in which every BatchNorm is a GroupNorm with the same channels, scale and shift.

    Parameters
    ----------
    module
        Any module; it is not changed.

    Returns
    -------
    nn.Module
        The copy.

    Examples
    --------
    >>> from torch import nn
    >>> from coterie.models import replace_batchnorm
    >>> layer = replace_batchnorm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))[1]
    >>> type(layer).__name__, layer.num_groups, layer.num_channels
    ('GroupNorm', 2, 8)
    """
    result = copy.deepcopy(module)
    if isinstance(result, _BatchNorm):
        return _group_norm(result)
    for parent in list(result.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, _BatchNorm):
                setattr(parent, name, _group_norm(layer))
    return result


def groups_for(channels: int) -> int:
    """Return the number of groups for GroupNorm: at most 32, with at least four channels each if possible."""
    return next(g for g in range(min(32, max(1, channels // 4)), 0, -1) if channels % g == 0)


def _group_norm(layer: _BatchNorm) -> nn.GroupNorm:
    affine = layer.affine
    norm = nn.GroupNorm(groups_for(layer.num_features), layer.num_features, eps=layer.eps, affine=affine)
    if affine:
        norm.load_state_dict({"weight": layer.weight, "bias": layer.bias})
        norm.to(layer.weight)
    return norm


def _inner_dropout(layer: nn.Module) -> float:
    """Return the dropout probability inside a recurrent or attention layer."""
    if isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
        return float(layer.dropout)
    return 0.0


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
