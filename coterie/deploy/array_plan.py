"""Plan a run on images or texts: check what nodes tell about them, and fit one model to it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from coterie._core.errors import DataError, SettingError, nearest
from coterie.data.federated import Roles, in_order
from coterie.data.target_task import MOST_LEVELS
from coterie.deploy import descriptions
from coterie.deploy.wire import WireError
from coterie.models.base import Model
from coterie.models.causal_lm import CausalLM
from coterie.models.description import description
from coterie.models.installed import describe_installed, installed, make_installed
from coterie.models.zoo import FACTORIES

MOST_PIXELS = 10_000  # along one axis of an image


def require(told: Any, data: str) -> None:
    """Raise `WireError` unless this is what a node with images or texts can tell."""
    if not isinstance(told, dict):
        raise WireError("malformed description of its rows")
    descriptions.require_clients(told)
    if data != "images":
        return
    shape, classes = told.get("shape"), told.get("classes")
    if not isinstance(shape, list) or len(shape) != 3 or not all(_is_size(size) for size in shape):
        raise WireError("malformed shape of images")
    if not isinstance(classes, list) or not classes or not descriptions.plain(classes, MOST_LEVELS):
        raise WireError("malformed classes of images")


def agreed(
    told: Mapping[str, Any], nodes: Mapping[str, Sequence[str]], roles: Roles, note: Callable[[str], None]
) -> dict[str, Any]:
    """Return the descriptions of nodes that do not contradict the majority; the others are named in notes."""
    left = dict(told)
    for reasons in (descriptions.twice, descriptions.too_many, _other_shape):
        for name, why in reasons(left, nodes, roles).items():
            note(f"{name} is left out: {why}")
            del left[name]
    return left


def model(
    told: Mapping[str, Any], name: str, settings: dict[str, Any], l2: float | None, context: int
) -> tuple[dict[str, Any], list[str]]:
    """Return the description of a model for these rows, and the classes of images in their order.

    Parameters
    ----------
    told
        What the nodes told, by node.
    name
        A built-in network, or a model that is installed here.
    settings, l2
        Its settings.
    context
        Tokens that are predicted per row of texts.
    """
    classes = list(in_order({level for one in told.values() for level in one.get("classes", ())}))
    if name in FACTORIES:
        extra = {} if l2 is None else {"l2": l2}
        try:
            wanted: Model = FACTORIES[name](**settings, **extra, classes=max(2, len(classes)))
        except TypeError as problem:
            raise SettingError(f"{name} does not take these settings: {problem}") from problem
    elif name in installed():
        wanted = make_installed(name, **settings)
    else:
        known = [*FACTORIES, *installed()]
        raise SettingError(f"no model {name!r}.{nearest(name, known)} Install one: --models FILE")
    if isinstance(wanted, CausalLM):
        if classes:
            raise SettingError(f"{name!r} is a language model; these nodes have images")
        fitted: Model = dataclasses.replace(wanted, length=context + 1)
        return describe_installed(name, settings, fitted), []
    if not classes:
        raise DataError(f"{name!r} is no language model; these nodes have texts")
    shape = next(iter(told.values()))["shape"]
    labels = torch.arange(max(2, len(classes)))
    fitted = wanted.fit_to(torch.zeros(len(labels), *shape), labels)
    described = describe_installed(name, settings, fitted) if name not in FACTORIES else description(fitted)
    return described, classes


def _other_shape(told: Mapping[str, Any], nodes: Mapping[str, Sequence[str]], roles: Roles) -> dict[str, str]:
    """Return nodes whose images have another shape than at most nodes; rows decide a tie."""
    votes: Counter[tuple[int, ...]] = Counter()
    for one in told.values():
        votes[tuple(one.get("shape", ()))] += 10**12 + sum(one["rows"])
    usual = votes.most_common(1)[0][0] if votes else ()
    return {
        name: f"its images have shape {one['shape']}, those of most nodes {list(usual)}"
        for name, one in told.items()
        if tuple(one.get("shape", ())) != usual
    }


def _is_size(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= MOST_PIXELS
