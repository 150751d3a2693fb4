"""A node whose rows are a table: what its policy offers of it, statistics for the encoding, and runs on it."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie._core.errors import DataError
from coterie.data import bundled, federated, tables
from coterie.data import column_types as columns
from coterie.data.federated import Roles
from coterie.data.preprocess import Preprocessor, local_statistics
from coterie.data.split import split_rows
from coterie.data.table_spec import TableSpec
from coterie.deploy import disclosure, secure_statistics
from coterie.deploy.consent import Refusal
from coterie.deploy.node_data import Message, Opened, fractions, require_clients
from coterie.deploy.node_masks import NodeMasks
from coterie.deploy.policy import Policy
from coterie.engine.build import make_runtime
from coterie.models.base import Model

if TYPE_CHECKING:
    import polars


class NodeTable:
    """The table of a node.

    Parameters
    ----------
    source
        A file, the name of a bundled table, or a data frame.
    client
        Whose rows these are, where the table has no client column.
    policy
        What may be said about them.
    log
        Receives remarks for the owner.
    """

    kind = "table"

    def __init__(
        self,
        source: str | Path | polars.DataFrame,
        client: str | None,
        policy: Policy,
        log: Callable[[str], None],
    ) -> None:
        self.source, self.client = bundled.resolve(source), client
        self.name = str(self.source) if isinstance(self.source, str | Path) else "the table"
        self.policy, self.log = policy, log
        self._frames: dict[Roles, Any] = {}
        self._raw: Any = None

    def check(self) -> int:
        """Read the table; return its number of rows."""
        self._raw = tables.read(self.source)
        if self.policy.roles is not None:
            return int(self.rows(self.policy.roles).height)
        return int(self._raw.height)

    def rows(self, roles: Roles) -> Any:
        """Return the rows of this node's clients: the columns that the policy offers, of clients with enough rows."""
        if roles not in self._frames:
            if self._raw is None:
                self._raw = tables.read(self.source)
            rows = federated.own_rows(self._raw, roles, self.client, self.name)
            self._frames.clear()
            self._frames[roles] = disclosure.offered(self.policy, rows, roles, self.name, self.log)
        return self._frames[roles]

    def told(self, header: dict[str, Any]) -> dict[str, Any]:
        """Return names and sizes of clients and kinds of columns."""
        roles = Roles.from_json(header["roles"])
        told = federated.describe(self.rows(roles), roles, self.name)
        told = disclosure.facts(self.policy, told)
        if header.get("secure") or self.policy.secure or math.isfinite(self.policy.epsilon):
            told = disclosure.in_words(self.policy, told, self.rows(roles), roles)
        return told

    def statistics(
        self, header: dict[str, Any], tensors: dict[str, Tensor], folder: Path, masks: NodeMasks | None
    ) -> Message:
        """Return sums over the training rows, for the shared encoding."""
        import polars as pl

        roles, spec = Roles.from_json(header["roles"]), _spec(header["spec"])
        frame, _, counts = tables.by_client(self.rows(roles), roles.client)
        part = split_rows(torch.tensor(counts), fractions(header["split"]), header["seed"], tensors["ids"])
        frame = self._with_columns(frame, spec)
        train = frame[part.train.order.numpy()]
        if masks is not None:
            about = header["about"]
            used = {*spec.numeric, *([spec.target] if spec.task == "regression" else [])}
            asked = {*about["columns"], *about.get("centres", ())}
            if asked - used or about["levels"].keys() - set(spec.categories):
                raise Refusal("statistics of columns that the run does not use")
            for name in about["levels"]:  # levels of few rows count as none, whatever a server asks for
                common = disclosure.common_levels(self.policy, train[name])
                label = columns.labels(train[name])
                train = train.with_columns(pl.when(label.is_in(list(common))).then(label).alias(name))
            hidden = [name for name in self.policy.encoding if name in train.columns]
            train = train.with_columns(pl.lit(None).alias(name) for name in hidden)
            return secure_statistics.answer(header, train, spec, folder, masks)
        sums = disclosure.statistics(self.policy, local_statistics(train, spec), train)
        return {"statistics": federated.statistics_to_json(sums)}, {}

    def open(self, settings: dict[str, Any], tensors: dict[str, Tensor], model: Model) -> Opened:
        """Encode the rows of a run and return its clients."""
        roles = Roles.from_json(settings["roles"])
        preprocessor = Preprocessor.from_json(settings["setup"]["preprocessor"])
        frame, names, counts = tables.by_client(self.rows(roles), roles.client)
        require_clients(names, tensors)
        frame, split = self._with_columns(frame, preprocessor.spec), fractions(settings["split"])
        if self.policy.min_rows_per_statistic > 1:
            part = split_rows(torch.tensor(counts), split, settings["seed"], tensors["ids"])
            frame = disclosure.without_rare(self.policy, frame, part.train.order, preprocessor.spec)
        runtime = make_runtime(
            preprocessor.encode(frame),
            preprocessor.encode_target(frame),
            torch.tensor(counts),
            model,
            tensors.get("clusters"),
            split,
            settings["seed"],
            torch.float64,
            ids=tensors["ids"],
        )
        return Opened(names, runtime, {"client_column": roles.client, "preprocessor": preprocessor.to_json()})

    def _with_columns(self, frame: Any, spec: TableSpec) -> Any:
        missing = [name for name in (*spec.numeric, *spec.categories) if name not in frame.columns]
        if missing:
            raise DataError(f"{self.name}: column {missing[0]!r} is missing; the other nodes have it")
        return frame


@functools.cache
def _spec_from(text: str) -> TableSpec:
    stored = json.loads(text)
    lists = ("classes", "numeric", "categories", "groups")
    return TableSpec(**{**stored, **{name: tuple(stored.get(name, ())) for name in lists}, "warnings": []})


def _spec(stored: dict[str, Any]) -> TableSpec:
    return _spec_from(json.dumps(stored, sort_keys=True))
