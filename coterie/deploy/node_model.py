"""The model of a run at a node: made from a description, by code that is here, and compared with the server's."""

from __future__ import annotations

from typing import Any

from coterie._core.printable import printable
from coterie.deploy.consent import Refusal
from coterie.deploy.policy import Policy
from coterie.models.base import Model
from coterie.models.description import from_description
from coterie.models.installed import RESERVED, installed, size_without_building
from coterie.models.signature import difference, signature


def make_model(setup: dict[str, Any], policy: Policy) -> Model:
    """Return the model that a run describes.

    Parameters
    ----------
    setup
        Settings of the run, with the description of the model and the server's `signature` of it.
    policy
        Limits how large a network may be.

    Returns
    -------
    Model
        The model.

    Raises
    ------
    Refusal
        It is not installed here, is too large, or differs from the server's model of this name.
    """
    described = setup["model"]
    name = str(described.get("model"))
    if name not in RESERVED and name not in installed():
        raise Refusal(f"no model {printable(name, 80)} is installed at this node; its owner installs models")
    size = size_without_building(described)
    if size is not None and size > policy.largest_model:
        raise Refusal(f"policy: networks have at most {policy.largest_model} parameters, not {size}")
    model = from_description(described)
    told = setup.get("signature")
    differs = None if told is None else difference(signature(model), told)
    if differs is not None:
        raise Refusal(
            f"the model {printable(name, 80)} of this node is not the server's: {printable(differs)}"
        )
    return model
