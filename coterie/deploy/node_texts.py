"""A node whose rows are texts, for a language model with adapters whose base its owner installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.data.federated import in_order
from coterie.data.texts import Texts, read_texts
from coterie.data.tokens import rows_of, tokenised
from coterie.deploy.consent import Refusal
from coterie.deploy.node_data import Message, Opened, enough, fractions, require_clients
from coterie.deploy.node_masks import NodeMasks
from coterie.deploy.policy import Policy
from coterie.engine.local_runtime import LocalRuntime
from coterie.models.base import Model
from coterie.models.causal_lm import CausalLM


class NodeTexts:
    """The texts of a node.

    Parameters
    ----------
    source
        A folder with a folder or file per client, or, where `client` says whose texts they are, of documents.
    client
        Whose texts these are.
    policy
        Says how few documents are too few.
    log
        Receives remarks for the owner.
    cache
        Folder for tokens.
    """

    kind = "texts"

    def __init__(
        self,
        source: str | Path | Texts,
        client: str | None,
        policy: Policy,
        log: Callable[[str], None],
        cache: Path,
    ) -> None:
        self.source, self.client, self.policy, self.log, self.cache = source, client, policy, log, cache
        self._texts: Texts | None = None

    def check(self) -> int:
        """Read the texts; return how many documents there are."""
        return sum(len(documents) for documents in self.texts.documents)

    @property
    def texts(self) -> Texts:
        """Documents of clients that have enough, in the order of names."""
        if self._texts is None:
            found = read_texts(self.source)
            if self.client is not None:
                documents = [document for own in found.documents for document in own]
                mine = found.names.index(self.client) if self.client in found.names else None
                found = Texts([self.client], [documents if mine is None else found.documents[mine]])
            by_name = dict(zip(found.names, found.documents, strict=True))
            names = list(in_order(found.names))
            kept = enough(self.policy, names, [len(by_name[name]) for name in names], "documents", self.log)
            self._texts = Texts([names[k] for k in kept], [by_name[names[k]] for k in kept])
        return self._texts

    def told(self, header: dict[str, Any]) -> dict[str, Any]:
        """Return clients and how many documents they have."""
        return {"clients": self.texts.names, "rows": [len(own) for own in self.texts.documents]}

    def statistics(
        self, header: dict[str, Any], tensors: dict[str, Tensor], folder: Path, masks: NodeMasks | None
    ) -> Message:
        """Refuse: tokens are those of the model."""
        raise Refusal("there are no statistics of texts")

    def open(self, settings: dict[str, Any], tensors: dict[str, Tensor], model: Model) -> Opened:
        """Pack the documents into rows of tokens and return the run's clients."""
        if not isinstance(model, CausalLM):
            raise Refusal("texts need a language model")
        require_clients(self.texts.names, tensors)
        found = tokenised(self.texts, model.tokenizer, self.cache)
        context, split = int(settings["setup"]["context"]), fractions(settings["split"])
        splits = rows_of(found, model.separator, context, split, settings["seed"], ids=tensors["ids"])
        fitted = model.fit_to(splits["train"].x, splits["train"].y)
        runtime = LocalRuntime(
            splits, fitted, settings["seed"], torch.float32, tensors.get("clusters"), tensors["ids"]
        )
        return Opened(self.texts.names, runtime, {"client_column": None, "preprocessor": None})
