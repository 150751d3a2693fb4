"""What two machines compare before they train one model: parameters, frozen weights, and a loss on made-up rows."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from coterie._core import randomness
from coterie.models.base import Model
from coterie.models.causal_lm import CausalLM
from coterie.models.network import Network

ROWS, LENGTH = 4, 8  # of made-up rows
TOLERANCE = 1e-3  # relative, of losses that different machines compute


def signature(model: Model) -> dict[str, Any]:
    """Return names and shapes of a fitted model's parameters, a hash of its frozen weights, and a loss.

    Parameters
    ----------
    model
        A model that was fitted to the shapes of its rows.

    Returns
    -------
    dict
        JSON values: "parameters", "frozen" (None without frozen weights) and "loss" (None for models of Coterie
        that are linear in their parameters), for `difference`.

    Examples
    --------
    >>> import torch, coterie
    >>> model = coterie.models.mlp((2,)).fit_to(torch.zeros(4, 3), torch.arange(4) % 2)
    >>> [name for name, shape in signature(model)["parameters"]]
    ['1.weight', '1.bias', '3.weight', '3.bias']
    """
    if isinstance(model, CausalLM):
        adapted = model.adapted
        shapes = [list(parameter.shape) for parameter in adapted.parameters]
        kept = [
            (name, value) for name, value in adapted.module.named_parameters() if name not in adapted.names
        ]
        tokenizer = getattr(model.tokenizer, "backend_tokenizer", None)
        text = "" if tokenizer is None else tokenizer.to_str()
        tokens = (torch.arange(ROWS * LENGTH) % adapted.vocabulary).view(ROWS, LENGTH)
        loss = _loss(model, model.initial(0, torch.float32), tokens, torch.full((ROWS,), LENGTH - 1.0))
        return {
            "parameters": [list(pair) for pair in zip(adapted.names, shapes, strict=True)],
            "frozen": _hash(kept, text),
            "loss": loss,
        }
    if not isinstance(model, Network):
        return {"parameters": [["all", [model.d]]], "frozen": None, "loss": None}
    flat = model.flat_module
    parameters = [[name, list(shape)] for name, shape in zip(flat.names, flat.shapes, strict=True)]
    if flat.d > flat.trainable:
        parameters.append(["buffers", [flat.d - flat.trainable]])
    held = flat.constants(torch.empty(0, dtype=torch.float32))
    return {
        "parameters": parameters,
        "frozen": _hash(held.items()) if held else None,
        "loss": _made_up(model),
    }


def difference(mine: dict[str, Any], told: dict[str, Any]) -> str | None:
    """Return in words how a model differs from the one that another machine told of; None if it does not.

    Examples
    --------
    >>> one = {"parameters": [["w", [3]]], "frozen": None, "loss": 0.5}
    >>> difference(one, {**one, "parameters": [["w", [4]]]})
    "its parameter 'w' has shape [3], not [4]"
    """
    own, other = list(mine["parameters"]), list(told["parameters"])
    for here, there in zip(own, other, strict=False):
        if here[0] != there[0]:
            return f"it has a parameter {here[0]!r} in the place of {str(there[0])[:80]!r}"
        if list(here[1]) != list(there[1]):
            return f"its parameter {here[0]!r} has shape {list(here[1])}, not {list(there[1])[:8]}"
    if len(own) != len(other):
        return f"it has {len(own)} parameters, not {len(other)}"
    if mine["frozen"] != told["frozen"]:
        return "its frozen weights are others"
    if None not in (mine["loss"], told["loss"]) and not math.isclose(
        mine["loss"], float(told["loss"]), rel_tol=TOLERANCE, abs_tol=1e-6
    ):
        return "it computes another loss from the same parameters and rows"
    return None


def _made_up(model: Network) -> float | None:
    """Return the loss of made-up rows at made-up parameters, which no generator of torch draws."""
    assert model.features is not None
    size = math.prod(model.features)
    x = _numbers("rows", ROWS * size).view(ROWS, *model.features).float()
    if model.tokens:
        x = (torch.arange(ROWS * size) % 2).view(ROWS, *model.features)
    trainable = model.flat_module.trainable
    w = torch.ones(model.d)
    w[:trainable] = 0.1 * _numbers("parameters", trainable).float()
    y = torch.arange(ROWS) % 2
    return _loss(model, w, x, y if model.task == "multiclass" else y.float())


def _numbers(what: str, count: int) -> Tensor:
    return randomness.normal(randomness.slots(randomness.key("signature", what), count))


def _loss(model: Model, w: Tensor, x: Tensor, y: Tensor) -> float | None:
    value = float(model.loss(w, x, y, torch.full((len(x),), 1 / len(x))))
    return value if math.isfinite(value) else None


def _hash(tensors: Iterable[tuple[str, Tensor]], text: str = "") -> str:
    digest = hashlib.sha256(text.encode())
    for name, value in sorted(tensors, key=lambda pair: pair[0]):
        digest.update(f"{name} {list(value.shape)} ".encode())
        digest.update(value.detach().cpu().float().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
