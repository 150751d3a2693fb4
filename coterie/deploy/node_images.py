"""A node whose rows are images with classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie._core.errors import DataError
from coterie.data.clients import Clients
from coterie.data.federated import in_order
from coterie.data.image_folders import Images, read_images
from coterie.deploy.consent import Refusal
from coterie.deploy.node_data import Message, Opened, enough, fractions, require_clients
from coterie.deploy.node_masks import NodeMasks
from coterie.deploy.policy import Policy
from coterie.engine.build import make_runtime
from coterie.models.base import Model


class NodeImages:
    """The images of a node.

    Parameters
    ----------
    source
        What `coterie.data.image_folders.read_images` reads, or images that were read.
    client
        Whose images these are, where the folder does not say.
    policy
        Pins their shape, and how few images are too few.
    log
        Receives remarks for the owner.
    """

    kind = "images"

    def __init__(
        self, source: str | Path | Images, client: str | None, policy: Policy, log: Callable[[str], None]
    ) -> None:
        self.source, self.client, self.policy, self.log = source, client, policy, log
        self._images: Images | None = None

    def check(self) -> int:
        """Read the images; return how many there are."""
        return int(self.images.rows.sizes.sum())

    @property
    def images(self) -> Images:
        """Images of clients that have enough, in the order of names; all have the shape of the policy."""
        if self._images is None:
            shape = self.policy.shape
            found = self.source
            if not isinstance(found, Images):
                found = read_images(found, self.client, None if shape is None else shape[0])
            rows = found.rows
            mine = tuple(rows.xs[0].shape[1:])
            if shape is not None and mine != shape:
                raise DataError(f"{self.source}: images of shape {mine}; the policy says {shape}")
            order = [rows.names.index(name) for name in in_order(rows.names)]
            names, sizes = [rows.names[k] for k in order], [len(rows.ys[k]) for k in order]
            kept = [order[k] for k in enough(self.policy, names, sizes, "images", self.log)]
            own = Clients(
                [rows.xs[k] for k in kept], [rows.ys[k] for k in kept], [rows.names[k] for k in kept]
            )
            self._images = Images(own, found.classes)
        return self._images

    def told(self, header: dict[str, Any]) -> dict[str, Any]:
        """Return clients, how many images they have, the shape of images and the names of classes."""
        rows = self.images.rows
        return {
            "clients": rows.names,
            "rows": rows.sizes.tolist(),
            "shape": list(rows.xs[0].shape[1:]),
            "classes": self.images.classes,
        }

    def statistics(
        self, header: dict[str, Any], tensors: dict[str, Tensor], folder: Path, masks: NodeMasks | None
    ) -> Message:
        """Refuse: pixels are not standardised."""
        raise Refusal("there are no statistics of images")

    def open(self, settings: dict[str, Any], tensors: dict[str, Tensor], model: Model) -> Opened:
        """Label the images as the run does and return its clients."""
        classes = [str(name) for name in settings["setup"]["classes"]]
        if not set(self.images.classes) <= set(classes):
            raise Refusal("a class of this node is not among those of the run")
        if len(classes) > max(2, model.outputs or 1):
            raise Refusal(f"the model has {model.outputs} outputs for {len(classes)} classes")
        rows = self.images.relabelled(classes).rows
        require_clients(rows.names, tensors)
        shape = list(rows.xs[0].shape[1:])
        if getattr(model, "features", None) not in (None, tuple(shape)):
            raise Refusal(f"the model is for rows of another shape than {shape}")
        runtime = make_runtime(
            torch.cat(rows.xs),
            torch.cat(rows.ys),
            rows.sizes,
            model,
            tensors.get("clusters"),
            fractions(settings["split"]),
            settings["seed"],
            torch.float32,
            ids=tensors["ids"],
        )
        return Opened(rows.names, runtime, {"classes": classes, "client_column": None, "preprocessor": None})
