"""A node's policy: what its owner lets a server do. It is a file on the node; no message can change it."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie._core import files
from coterie._core.errors import SettingError, nearest
from coterie.algorithms.base import DISCLOSURES
from coterie.data import column_types as columns
from coterie.data import federated, grouping
from coterie.data.federated import Roles
from coterie.deploy.runnable import runnable
from coterie.models.description import description
from coterie.models.installed import installed
from coterie.models.metrics import names
from coterie.models.table_models import TABLE_MODELS
from coterie.models.zoo import FACTORIES

if TYPE_CHECKING:
    import polars

FILE = "policy.toml"
MODELS = ("linear", "logistic", "softmax")
NETWORKS = ("cnn", "resnet9", "mlp")
ROLES = {"images": Roles("client", "class"), "texts": Roles("client", "text")}  # of what is no table
SHAPE = re.compile(r"[1-9][0-9]{0,4}(x[1-9][0-9]{0,4}){2}")
HISTOGRAMS = ("auc", "ece")  # metrics whose sums are histograms, in which few rows can be told apart
TASKS = ("regression", "binary", "multiclass")
EVERY = ["*"]  # in the file: all that are installed
STRICT = ("nothing", "aggregate", "gradient", "model")


def _methods() -> tuple[str, ...]:
    """Return the methods that can do without phases that reveal a personal model or single rows."""
    found = []
    for name, cls in runnable().items():
        words = {word for phase, word in cls.reveals.items() if phase not in cls.optional}
        if words and words <= set(STRICT):
            found.append(name)
    return tuple(found)


def _metrics() -> tuple[str, ...]:
    found = dict.fromkeys(name for task in TASKS for name in names(task))
    return tuple(name for name in found if name not in HISTOGRAMS)


@dataclass(frozen=True)
class Policy:
    """What a node answers. The defaults are strict; `TRUSTING` answers everything.

    Attributes
    ----------
    roles : Roles or None
        The client, target and cluster columns and the task that a run must use; None accepts any.
    columns : dict of str to str or None
        Features that exist for a server: "numeric", "category", or "empty" if it has no values; None offers all. Images
        are one column with their shape, such as "3x32x32", texts one column "text".
    kind : str
        What the node holds: "table", "images" or "texts".
    encoding : dict
        Encodings that the owner fixes: [mean, sd] of a number, levels of a category.
    split, seed
        How rows are split; None accepts any.
    refit : str
        Which rows may train once a run was scored: "validation" or "all" of them too, or "none" beyond training rows. A
        client trains on those of a split only where it has `min_rows_per_statistic` of them.
    guard : bool
        Whether a client whose validation rows speak against the models of a run keeps one that it trains alone.
    min_rows : int
        Clients with fewer rows take no part.
    min_rows_per_statistic : int
        Fewest rows behind a level, a mean or a score that leaves the node.
    reveal : tuple of str
        Kinds of phases that are run, in the words of `DISCLOSURES`.
    algorithms, models, metrics : tuple of str or None
        Those that are allowed; None allows all that are installed.
    settings : dict
        Allowed settings: [low, high] for numbers, or a list of texts. A batch of 0, all rows, is always allowed.
    rounds, messages_per_run, messages_per_day, runs_per_day, splits, largest_count, largest_number, largest_model
        Limits: rounds of a run, messages (a call that visits every client twice counts as two), runs, ways to number
        clients and so to split rows, whole numbers in settings, numbers in messages, parameters of a network.
    approve : bool
        Whether the owner has to approve every run.
    secure : bool
        Whether answers leave in secure sums only.
    least_nodes : int
        Fewest nodes in a secure sum.
    epsilon, delta : float
        Privacy of rows that all runs together may cost; runs without noise in the gradients of rows are refused. An
        infinite epsilon, the default, asks for no noise.
    megabytes : int
        Largest size of what one run stores on the node's disk.
    members : dict of str to str
        SHA-256 of the certificates of other nodes, which the owner compared with theirs; their keys for secure sums
        must be signed with these.
    """

    roles: Roles | None
    columns: dict[str, str] | None
    kind: str = "table"
    encoding: dict[str, Any] = field(default_factory=dict)
    split: tuple[float, float, float] | None = (0.6, 0.2, 0.2)
    seed: int | None = 0
    refit: str = "validation"
    guard: bool = True
    min_rows: int = 20
    min_rows_per_statistic: int = 4
    reveal: tuple[str, ...] = STRICT
    algorithms: tuple[str, ...] | None = field(default_factory=_methods)
    models: tuple[str, ...] | None = MODELS
    metrics: tuple[str, ...] | None = field(default_factory=_metrics)
    settings: dict[str, Any] = field(
        default_factory=lambda: {
            "batch": [16, 1_000_000],
            "steps": [1, 1000],
            "l2": [0.0, 1000.0],
            "lora_rank": [1, 256],
            "target": ["attention", "mlp", "attention+mlp"],
        }
    )
    rounds: int = 1000
    messages_per_run: int = 10_000
    messages_per_day: int = 20_000
    runs_per_day: int = 10
    splits: int = 1
    largest_count: int = 10_000
    largest_number: float = 1e6
    largest_model: int = 20_000_000
    megabytes: int = 10_000
    approve: bool = False
    secure: bool = False
    least_nodes: int = 3
    epsilon: float = math.inf
    delta: float = 1e-5
    members: dict[str, str] = field(default_factory=dict)

    @classmethod
    def strict(cls, frame: polars.DataFrame, roles: Roles, **more: Any) -> Policy:
        """Return the strict policy for a table: the columns it has, with their kinds, and no others.

        Texts that identify rows do not exist for a server unless `roles.keep` names them.

        Examples
        --------
        >>> import polars
        >>> from coterie.data.federated import Roles
        >>> table = polars.DataFrame({"site": ["a", "b"], "age": [30, 50], "name": ["Ann", "Bo"], "ill": [0, 1]})
        >>> Policy.strict(table, Roles("site", "ill", drop=("name",))).columns
        {'age': 'numeric'}
        """
        frame = grouping.combined(frame, roles.groups)
        found = {one.column: one for one in federated.readings(frame, roles)}
        kinds = {name: columns.kind(frame[name]) for name in found}
        offered: dict[str, str] = {}
        for name, one in found.items():
            if one.kind in ("identifier", "free text") and kinds[name] == "category":
                continue
            if one.kind in ("number", "date"):
                offered[name] = "numeric"
            elif name in roles.groups:
                offered[name] = "category"
            elif kinds[name] is not None:
                offered[name] = "empty" if one.kind == "empty" else str(kinds[name])
        return cls(dataclasses.replace(roles, drop=(), keep=(), groups=()), offered, **more)

    @classmethod
    def for_images(cls, shape: Sequence[int], **more: Any) -> Policy:
        """Return the strict policy for images of this shape [channels, height, width].

        Examples
        --------
        >>> Policy.for_images((3, 32, 32)).columns
        {'image': '3x32x32'}
        """
        pinned = {"image": "x".join(str(int(size)) for size in shape)}
        return cls(ROLES["images"], pinned, "images", **{"models": NETWORKS, **more})

    @classmethod
    def for_texts(cls, **more: Any) -> Policy:
        """Return the strict policy for texts; `allowing` names the language models."""
        own = {"models": (), "split": (0.8, 0.1, 0.1), **more}
        return cls(ROLES["texts"], {"text": "text"}, "texts", **own)

    def allowing(self, methods: Sequence[str], models: Sequence[str] = ()) -> Policy:
        """Return the policy with further methods allowed, with the phases and models that they need, and models."""
        known = runnable()
        for name in methods:
            if name not in known:
                raise SettingError(f"no algorithm {name!r}.{nearest(name, known)}")
        words = {word for name in methods for word in known[name].reveals.values()}
        reveal = tuple(word for word in DISCLOSURES if word in words or word in self.reveal)
        algorithms = tuple(dict.fromkeys([*(self.algorithms or ()), *methods]))
        own = [known[name]().trial_model(1) for name in methods]
        needed = [description(one)["model"] for one in own if one is not None]
        for model in models:
            known_models = [*(TABLE_MODELS if self.kind == "table" else FACTORIES), *installed()]
            if model not in known_models:
                raise SettingError(f"no model {model!r} for {self.kind}.{nearest(model, known_models)}")
        allowed = None if self.models is None else tuple(dict.fromkeys([*self.models, *needed, *models]))
        return dataclasses.replace(self, reveal=reveal, algorithms=algorithms, models=allowed)

    @classmethod
    def read(cls, path: Path) -> Policy:
        """Read policy.toml; raise `SettingError`, which names the entry, for anything that is not understood."""
        stored = files.read_toml(path)
        given = [name for name in TABLES if name in stored]
        tables = {name: dict(stored.pop(name, {})) for name in SECTIONS}
        if stored:
            raise SettingError(
                f"{path}: no table or entry {next(iter(stored))!r}. Known: {', '.join(SECTIONS)}"
            )
        data = tables["data"]
        try:
            roles = Roles(*(data.pop(name) for name in ("client", "target")))
            roles = dataclasses.replace(roles, cluster=data.pop("cluster", None), task=data.pop("task", None))
        except KeyError as missing:
            raise SettingError(f"{path}: [data] has no {missing}") from None
        values: dict[str, Any] = {"roles": roles}
        values |= {name: tables[name] for name in given}
        values.setdefault("columns", {})
        values["refit"] = "none"  # of files from before there was a choice
        for name in ("data", "methods", "limits", "privacy", "consent"):
            for key, value in tables[name].items():
                if key not in SECTIONS[name]:
                    raise SettingError(
                        f"{path}: [{name}] has no entry {key!r}.{nearest(key, SECTIONS[name])}"
                    )
                values[key] = None if value == EVERY else tuple(value) if isinstance(value, list) else value
        policy = cls(**values)
        policy._require_sound(path)
        return policy

    def write(self, path: Path) -> None:
        """Write policy.toml, with a comment on every table."""
        assert self.roles is not None and self.columns is not None
        lines = ["# What this node lets a server do. Only you write this file; no message can change it."]
        lines += ["# `coterie federate node FOLDER --show-policy` explains it in words."]
        for section, keys in SECTIONS.items():
            if section in TABLES:
                values = getattr(self, section)
            else:
                values = {key: getattr(self, key, None) for key in keys}
            if section == "methods":
                values = {key: EVERY if value is None else value for key, value in values.items()}
            if section == "data":
                roles = self.roles
                shared = {
                    "client": roles.client,
                    "target": roles.target,
                    "cluster": roles.cluster,
                    "task": roles.task,
                }
                values = {**shared, **values}
            given = {key: value for key, value in values.items() if value is not None}
            lines += ["", f"# {COMMENTS[section]}", f"[{section}]"]
            lines += [f"{_key(key)} = {_value(value)}" for key, value in given.items()]
        files.write_text(path, "\n".join(lines) + "\n")

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of images [channels, height, width] that the owner pinned; None for other data."""
        pinned = (self.columns or {}).get("image") if self.kind == "images" else None
        return None if pinned is None else tuple(int(size) for size in pinned.split("x"))

    def _require_sound(self, path: Path) -> None:
        if self.kind not in ("table", *ROLES):
            raise SettingError(f'{path}: [data] kind = {self.kind!r}; write "table", "images" or "texts"')
        if self.kind != "table":
            self._require_array(path)
        for name, kind in (self.columns or {}).items() if self.kind == "table" else ():
            if kind not in ("numeric", "category", "empty"):
                raise SettingError(
                    f'{path}: [columns] {name} = {kind!r}; write "numeric", "category" or "empty"'
                )
        for name in self.encoding:
            if name not in (self.columns or {}):
                raise SettingError(f"{path}: [encoding] {name!r} is not in [columns]")
        for word in self.reveal:
            if word not in DISCLOSURES:
                raise SettingError(f"{path}: [methods] reveal: {word!r}.{nearest(word, DISCLOSURES)}")
        for name in self.algorithms or ():
            if name not in runnable():
                raise SettingError(f"{path}: [methods] no algorithm {name!r}.{nearest(name, runnable())}")
        whole = (
            "rounds",
            "messages_per_run",
            "messages_per_day",
            "runs_per_day",
            "splits",
            "min_rows",
            "megabytes",
            "least_nodes",
        )
        for name in whole:
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise SettingError(
                    f"{path}: {name} = {getattr(self, name)!r}; it is a whole number, at least 1"
                )
        if not isinstance(self.epsilon, int | float) or not self.epsilon > 0:
            raise SettingError(
                f"{path}: [privacy] epsilon = {self.epsilon!r}; it is a number above 0, or inf"
            )
        if not isinstance(self.delta, float) or not 0 < self.delta < 1:
            raise SettingError(f"{path}: [privacy] delta = {self.delta!r}; it is a number between 0 and 1")
        if self.refit not in ("none", "validation", "all"):
            raise SettingError(f'{path}: [data] refit = {self.refit!r}; write "none", "validation" or "all"')
        if self.split is None or len(self.split) != 3 or not math.isclose(sum(self.split), 1.0):
            raise SettingError(f"{path}: [data] split has three shares that add up to 1")
        for name, bounds in self.settings.items():
            if not isinstance(bounds, list) or not bounds:
                raise SettingError(f"{path}: [settings] {name}: write [lowest, highest], or a list of texts")

    def _require_array(self, path: Path) -> None:
        expected, columns = ROLES[self.kind], self.columns or {}
        assert self.roles is not None
        if (self.roles.client, self.roles.target) != (expected.client, expected.target):
            raise SettingError(
                f"{path}: [data] of {self.kind} has client = {expected.client!r}, target = {expected.target!r}"
            )
        if self.kind == "texts" and columns != {"text": "text"}:
            raise SettingError(f'{path}: [columns] of texts is text = "text"')
        if self.kind == "images" and (set(columns) != {"image"} or not SHAPE.fullmatch(columns["image"])):
            raise SettingError(f'{path}: [columns] of images is image = "CHANNELSxHEIGHTxWIDTH"')


TABLES = ("columns", "encoding", "settings", "members")  # whose entries the owner names
SECTIONS: dict[str, tuple[str, ...]] = {
    "data": ("kind", "split", "seed", "refit", "guard", "min_rows", "min_rows_per_statistic"),
    "columns": (),
    "encoding": (),
    "methods": ("reveal", "algorithms", "models", "metrics", "secure"),
    "settings": (),
    "limits": (
        "rounds",
        "messages_per_run",
        "messages_per_day",
        "runs_per_day",
        "splits",
        "largest_count",
        "largest_number",
        "largest_model",
        "megabytes",
        "least_nodes",
    ),
    "privacy": ("epsilon", "delta"),
    "consent": ("approve",),
    "members": (),
}
COMMENTS = {
    "data": "Roles of columns, how rows are split, and how few rows are too few.",
    "columns": 'Features that exist for a server: "numeric", "category" or "empty". Remove a line to hide one.',
    "encoding": 'Encodings that you fix, such as age = [54.0, 9.0] (mean, sd) or sex = ["f", "m"].',
    "methods": "What may be run. Phases reveal nothing, aggregate, gradient, model, personal, values, peers (relayed).",
    "settings": "Ranges of settings; a batch of 0 means all rows and is always allowed.",
    "limits": "How much may be asked.",
    "privacy": "What all runs together may cost of the privacy of rows; inf: runs need not add noise.",
    "consent": "Whether you approve every run yourself.",
    "members": 'SHA-256 of the certificates of other nodes, if you compared them: north = "ab12...".',
}

TRUSTING = Policy(
    None,
    None,
    split=None,
    seed=None,
    refit="all",
    guard=False,
    min_rows=1,
    min_rows_per_statistic=1,
    reveal=tuple(DISCLOSURES),
    algorithms=None,
    models=None,
    metrics=None,
    settings={},
    rounds=2**62,
    messages_per_run=2**62,
    messages_per_day=2**62,
    runs_per_day=2**62,
    splits=2**62,
    largest_count=2**62,
    largest_number=math.inf,
    largest_model=2**62,
    megabytes=2**62,
)


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        raise SettingError(f"a policy has no nested tables: {value}")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(part) for part in value) + "]"
    return json.dumps(str(value), ensure_ascii=False)
