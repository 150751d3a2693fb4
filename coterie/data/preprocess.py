"""Encode columns as features and back; fitted on training rows through sums that a federation can add up."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from coterie._core.errors import DataError, nearest
from coterie.data import column_types as columns
from coterie.data import grouping, odd_clients, survival_times
from coterie.data.scales import (
    FEWEST,
    MOST_FEATURES,
    ClientUnits,
    OneHot,
    Scale,
    all_levels,
    client_units,
    one_hot,
    pooled_levels,
    scale_of,
    standardised,
)
from coterie.data.statistics import Levels, Moments, Statistics, local_statistics
from coterie.data.table_spec import TableSpec

if TYPE_CHECKING:
    import polars

STANDARD, RAW = "standard", "raw"  # the encodings: for linear models and networks, and for trees
BOTH = "both"  # the columns of "standard", then those of "raw": for ensembles of both
MOST_CODES = 48  # levels of a category that is one column of codes in the encoding "raw"

__all__ = ["Levels", "Moments", "OneHot", "Preprocessor", "Scale", "Statistics", "local_statistics"]


@dataclass(frozen=True)
class Preprocessor:
    """Encode rows of a table as features, and targets there and back.

    Numbers are standardised, and categories become 0/1 columns. A missing number becomes the mean, and is marked in
    `<column>_missing` if training rows had missing values; a level that training rows did not have becomes all zeros.

    With the encoding "raw", which trees take, numbers stay as they are, categories of up to 48 levels are codes
    0, 1, ... in one column, and missing values and unknown levels are NaN.

    Parameters
    ----------
    spec
        What each column is for.
    scales
        Scaling of each numeric column that varies.
    choices
        Levels of each category column that varies.
    target_mean
        Mean of the target; 0 for classes.
    target_sd
        Standard deviation of the target; 1 for classes.
    encoding
        "standard" or "raw".
    clients
        Clients that have columns or the target in other units.

    Examples
    --------
    >>> from coterie.data import tables
    >>> from coterie.data.preprocess import Preprocessor, local_statistics
    >>> table = {"site": ["a", "a", "b", "b"], "age": [30, 50, None, 40], "sex": list("fmmf"), "ill": [0, 1, 1, 0]}
    >>> frame = tables.read(table)
    >>> spec = tables.check(frame, client="site", target="ill")
    >>> preprocessor = Preprocessor.from_statistics(spec, local_statistics(frame, spec), fewest=(1, 1))
    >>> preprocessor.feature_names
    ['age', 'age_missing', 'sex=f', 'sex=m']
    >>> preprocessor.encode(frame)[2].tolist(), preprocessor.encode_target(frame).tolist()
    ([0.0, 1.0, 0.0, 1.0], [0, 1, 1, 0])
    """

    spec: TableSpec
    scales: tuple[Scale, ...]
    choices: tuple[OneHot, ...]
    target_mean: float
    target_sd: float
    encoding: str = STANDARD
    clients: Mapping[str, ClientUnits] = field(default_factory=dict)

    @classmethod
    def from_statistics(
        cls,
        spec: TableSpec,
        statistics: Statistics,
        fewest: tuple[int, int] = FEWEST,
        encoding: str = STANDARD,
        target_in_units: bool = False,
        every_group: bool = False,
    ) -> Self:
        """Fit from the merged statistics of all clients' training rows.

        Parameters
        ----------
        spec
            What each column is for.
        statistics
            Merged statistics.
        fewest
            Rows and clients that a level needs; levels with fewer are pooled into one, so that no model names them.
        encoding
            "standard" or "raw".
        target_in_units
            Leave a numeric target as it is instead of standardising it.
        every_group
            Keep all levels of grouping columns, however few rows they have.

        Returns
        -------
        Preprocessor
            The fitted encoding.

        Raises
        ------
        DataError
            If no feature varies, or a column holds numbers too large to square.
        """
        odd = odd_clients.find(statistics, spec)
        if target_in_units:  # counts have no other units
            odd = replace(odd, clients=[one for one in odd.clients if one.column != spec.target])
        scales = [scale_of(name, odd.moments(name, moments)) for name, moments in statistics.numeric.items()]
        clients = min(fewest[1], len(statistics.by_client.names))
        choices = [
            all_levels(name, seen)
            if every_group and name in spec.groups
            else one_hot(name, seen, fewest[0], clients, None if name in spec.groups else MOST_FEATURES)
            for name, seen in statistics.categories.items()
        ]
        target = scale_of(spec.target, odd.moments(spec.target, statistics.target))
        fitted = cls(
            spec,
            tuple(scale for scale in scales if scale.sd or scale.missing),
            tuple(choice for choice in choices if choice.width > 1),
            0.0 if target_in_units else target.mean,
            1.0 if target_in_units else target.sd or 1.0,
            encoding,
        )
        fitted = replace(fitted, clients=client_units(odd, fitted.scales, target, spec.task))
        for warning in (*pooled_levels(statistics.categories, choices), *odd.warnings()):
            if warning not in spec.warnings:
                spec.warnings.append(warning)
        if not fitted.feature_names:
            raise DataError(
                "No feature column varies over the training rows. Add columns, or train on more rows."
            )
        return fitted

    @property
    def target_scale(self) -> float:
        """Units of the target per unit of the model's output (1 for classes)."""
        return self.target_sd

    @functools.cached_property
    def _sources(self) -> dict[str, str]:
        """Column behind each encoded feature, in order."""
        if self.encoding == BOTH:
            standard, raw = (
                [(name, one.feature_of(name)) for name in one.feature_names] for one in self._two
            )
            return {**dict(standard), **{f"{name} (as it is)": column for name, column in raw}}
        sources: dict[str, str] = {}
        taken = {*self.spec.numeric, *self.spec.categories}

        def add(encoded: str, column: str) -> None:
            while encoded in sources or (encoded in taken and encoded != column):
                encoded += "_"
            sources[encoded] = column

        for scale in self.scales:
            if scale.sd or self.encoding == RAW:
                add(scale.name, scale.name)
            if scale.missing and self.encoding == STANDARD:
                add(f"{scale.name}_missing", scale.name)
        for choice in self.choices:
            if self.as_codes(choice):
                add(choice.name, choice.name)
                continue
            for level in choice.levels:
                add(f"{choice.name}={level}", choice.name)
            if choice.missing:
                add(f"{choice.name}_missing", choice.name)
            if choice.other:
                add(f"{choice.name}=other", choice.name)
        return sources

    @property
    def _two(self) -> tuple[Self, Self]:
        """The encodings that "both" puts side by side."""
        return replace(self, encoding=STANDARD), replace(self, encoding=RAW)

    def as_codes(self, choice: OneHot) -> bool:
        """Return True if a category is one column of codes instead of a column per level."""
        return self.encoding == RAW and len(choice.levels) <= MOST_CODES

    @property
    def levels(self) -> tuple[int, ...]:
        """Number of levels of each encoded feature that is a column of codes or an indicator; 0 for numbers."""
        if self.encoding == BOTH:
            return tuple(count for one in self._two for count in one.levels)
        if self.encoding == STANDARD:
            numbers = [
                kind for scale in self.scales for kind in (*[0] * bool(scale.sd), *[2] * scale.missing)
            ]
            return (*numbers, *[2] * sum(choice.width for choice in self.choices))
        codes = {choice.name: len(choice.levels) for choice in self.choices if self.as_codes(choice)}
        return tuple(codes.get(name, 0) for name in self.feature_names)

    @property
    def feature_names(self) -> list[str]:
        """Names of the encoded features, such as `age`, `age_missing`, `pain=typical`, `pain_missing`."""
        return list(self._sources)

    def feature_of(self, encoded: str) -> str:
        """Return the column that an encoded feature comes from."""
        if encoded not in self._sources:
            raise DataError(f"No encoded feature {encoded!r}.{nearest(encoded, self._sources)}")
        return self._sources[encoded]

    def encode(self, frame: polars.DataFrame, source: str = "the table") -> Tensor:
        """Return the features of every row, float64 [rows, features].

        Parameters
        ----------
        frame
            Rows from `tables.read`; columns that are not features are ignored.
        source
            Where the rows are from, for error messages.

        Returns
        -------
        Tensor
            Standardised numbers, and 0 or 1 for categories and missing values; see the class for "raw".
        """
        if self.encoding == BOTH:
            return torch.cat([one.encode(frame, source) for one in self._two], 1)
        frame = grouping.combined(frame, self.spec.groups)
        features = np.zeros((frame.height, len(self.feature_names)))
        place = 0
        own = {name: self._rows_of(frame, name) for name in self.clients}
        for scale in self.scales:
            _require(frame, scale.name, source)
            values = self.spec.numbers(frame, scale.name, source, self._client_in(frame))
            if self.encoding == RAW:
                features[:, place] = values.cast(float).fill_null(math.nan).to_numpy()
                for client, rows in own.items():
                    scales = {one.name: one for one in self.clients[client].scales}
                    if scale.name in scales and len(rows) and scale.sd:
                        aligned = standardised(values[rows], scales[scale.name]) * scale.sd + scale.mean
                        features[rows, place] = np.where(np.isnan(features[rows, place]), math.nan, aligned)
                place += 1
                continue
            if scale.sd:
                features[:, place] = standardised(values, scale)
                for client, rows in own.items():
                    scales = {one.name: one for one in self.clients[client].scales}
                    if scale.name in scales and len(rows):
                        features[rows, place] = standardised(values[rows], scales[scale.name])
                place += 1
            if scale.missing:
                features[:, place] = values.is_null().to_numpy()
                place += 1
        for choice in self.choices:
            _require(frame, choice.name, source)
            level = columns.codes(columns.labels(frame[choice.name]), choice.levels)
            if self.as_codes(choice):
                gone = (level < 0) | frame[choice.name].is_null().to_numpy()
                features[:, place] = np.where(gone, math.nan, level)
                place += 1
                continue
            level[level < 0] = choice.width - 1 if choice.other else -1
            level[frame[choice.name].is_null().to_numpy()] = len(choice.levels) if choice.missing else -1
            known = np.flatnonzero(level >= 0)
            features[known, place + level[known]] = 1.0
            place += choice.width
        return torch.from_numpy(features)

    def _rows_of(self, frame: polars.DataFrame, client: str) -> np.ndarray:
        """Return the positions of a client's rows."""
        if self.spec.client not in frame.columns:
            return np.empty(0, dtype=np.int64)
        return np.flatnonzero((columns.labels(frame[self.spec.client]) == client).fill_null(False).to_numpy())

    def reverses(self, client: str | None) -> bool:
        """Return True for a client whose two classes are encoded the other way round."""
        return self.clients.get(client or "", ClientUnits()).reversed_classes

    def for_client(self, client: str | None) -> Self:
        """Return the encoding of one client alone, in its own units.

        Parameters
        ----------
        client
            Name of the client; None returns the encoding of everybody else.

        Returns
        -------
        Preprocessor
            An encoding without exceptions.
        """
        units = self.clients.get(client or "", ClientUnits())
        own = {scale.name: scale for scale in units.scales}
        mean, sd = units.target or (self.target_mean, self.target_sd)
        classes = self.spec.classes[::-1] if units.reversed_classes else self.spec.classes
        scales = tuple(own.get(scale.name, scale) for scale in self.scales)
        return replace(
            self,
            spec=replace(self.spec, classes=classes),
            scales=scales,
            target_mean=mean,
            target_sd=sd,
            clients={},
        )

    def _client_in(self, frame: polars.DataFrame) -> str | None:
        return self.spec.client if self.spec.client in frame.columns else None

    def encode_target(self, frame: polars.DataFrame, source: str = "the table") -> Tensor:
        """Return class numbers, int64 [rows], standardised targets, or signed times, float64 [rows].

        Parameters
        ----------
        frame
            Rows from `tables.read`.
        source
            Where the rows are from, for error messages.

        Returns
        -------
        Tensor
            One number per row.

        Raises
        ------
        DataError
            If a target is missing or is a class that `spec` does not have.
        """
        name = self.spec.target
        _require(frame, name, source)
        if self.spec.event is not None:
            _require(frame, self.spec.event, source)
            return torch.tensor(
                survival_times.signed_times(frame, name, self.spec.event, source, self._client_in(frame))
            )
        if self.spec.task == "regression":
            values = self.spec.numbers(frame, name, source, self._client_in(frame)).to_numpy()
            encoded, wrong, what = (
                (values - self.target_mean) / self.target_sd,
                np.isnan(values),
                "is missing",
            )
        else:
            encoded = columns.codes(columns.labels(frame[name]), self.spec.classes)
            wrong, what = encoded < 0, f"is not one of {', '.join(self.spec.classes)}"
        for client, units in self.clients.items():
            rows = self._rows_of(frame, client)
            if units.target is not None:
                own = (values[rows] - units.target[0]) / units.target[1]
                encoded[rows] = np.where(np.abs(own) > units.limit, 0.0, own) if units.limit else own
            if units.reversed_classes:
                encoded[rows] = np.where(encoded[rows] < 0, -1, 1 - encoded[rows])
        if wrong.any():
            where = columns.place(frame, int(wrong.argmax()), source, self._client_in(frame))
            raise DataError(
                f"{source}: target column {name!r}, {where}: the value {what}. Correct or remove it."
            )
        return torch.tensor(encoded)

    def decode(self, predictions: Tensor, clients: Sequence[str | None] | None = None) -> Tensor | list[str]:
        """Return standardised predictions in the target's units, or class names for class numbers.

        Parameters
        ----------
        predictions
            Standardised values, or class numbers.
        clients
            Whose predictions these are, one name each; by default those of clients in the common units.

        Returns
        -------
        Tensor or list of str
            Values in the target's units, or class names.
        """
        if self.spec.task == "regression":
            usual = (self.target_mean, self.target_sd)
            own = {name: units.target or usual for name, units in self.clients.items()}
            pairs = [own.get(name or "", usual) for name in clients or ()]
            if not own or not pairs:
                return predictions * self.target_sd + self.target_mean
            mean, sd = predictions.new_tensor(pairs).unbind(1)
            return predictions * sd + mean
        names = [self.spec.classes[number] for number in predictions.flatten().tolist()]
        for k, name in enumerate(clients or ()):
            if self.reverses(name):
                names[k] = self.spec.classes[1 - self.spec.classes.index(names[k])]
        return names

    def to_json(self) -> str:
        """Return everything but the warnings as JSON; floats come back bit for bit."""
        whole = dataclasses.asdict(replace(self, spec=replace(self.spec, readings=()), clients={}))
        stored = whole | {
            "spec": self.spec.stored(),
            "scales": [_without(asdict(scale), limit=0.0) for scale in self.scales],
            "choices": [_without(asdict(choice), other=False) for choice in self.choices],
        }
        del stored["clients"]
        if self.clients:
            stored["clients"] = {
                name: _without(asdict(units), limit=0.0) for name, units in self.clients.items()
            }
        if self.encoding == STANDARD:
            del stored["encoding"]  # as files before there was another
        return json.dumps(stored, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the preprocessor that `to_json` wrote."""
        stored = json.loads(text, object_hook=_with_tuples)
        clients = {
            name: ClientUnits(**units | {"scales": tuple(Scale(**scale) for scale in units["scales"])})
            for name, units in stored.get("clients", {}).items()
        }
        return cls(
            TableSpec(**stored["spec"] | {"warnings": []}),
            tuple(Scale(**scale) for scale in stored["scales"]),
            tuple(OneHot(**choice) for choice in stored["choices"]),
            stored["target_mean"],
            stored["target_sd"],
            stored.get("encoding", STANDARD),
            clients,
        )


def _without(stored: dict[str, Any], **usual: Any) -> dict[str, Any]:
    """Leave out what older versions did not have, where it is as it was then."""
    return {name: value for name, value in stored.items() if name not in usual or value != usual[name]}


def _with_tuples(stored: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()}


def _require(frame: polars.DataFrame, name: str, source: str) -> None:
    if name not in frame.columns:
        raise DataError(f"{source}: the column {name!r} is missing.{nearest(name, frame.columns)}")
    if columns.kind(frame[name]) is None:
        raise DataError(
            f"{source}: column {name!r} holds {frame[name].dtype}, not plain values. Write it as text or numbers."
        )
