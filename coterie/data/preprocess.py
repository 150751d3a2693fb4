"""Encode columns as features and back; fitted on training rows through sums that a federation can add up."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from coterie._core.errors import DataError, nearest
from coterie.data import column_types as columns
from coterie.data.tables import TableSpec

if TYPE_CHECKING:
    import polars

STANDARD, RAW = "standard", "raw"  # the encodings: for linear models and networks, and for trees
MOST_CODES = 48  # levels of a category that is one column of codes in the encoding "raw"
_ROUNDING = 1e-12  # a standard deviation below this share of the mean is rounding, not variation


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squares about the mean of the values present, and how many are missing.

    Sums about the mean merge exactly, and do not cancel when the mean is large.

    Examples
    --------
    >>> import polars
    >>> from coterie.data.preprocess import Moments
    >>> both = Moments.of(polars.Series([1.0, None])).merge(Moments.of(polars.Series([3.0])))
    >>> both, both.sd
    (Moments(count=2, mean=2.0, squares=2.0, missing=1), 1.0)
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    missing: int = 0

    @classmethod
    def of(cls, values: polars.Series) -> Self:
        """Return the moments of a column that may hold nulls."""
        present = values.drop_nulls().to_numpy()
        if not len(present):
            return cls(missing=len(values))
        with np.errstate(over="ignore", invalid="ignore"):
            mean = float(present.mean())
            squares = float(np.square(present - mean).sum())
        return cls(len(present), mean, squares, len(values) - len(present))

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both sets of values together (Chan, Golub, LeVeque 1983)."""
        count = self.count + other.count
        missing = self.missing + other.missing
        if not count:
            return Moments(missing=missing)
        gap, share = other.mean - self.mean, other.count / count
        squares = self.squares + other.squares + gap * gap * self.count * share
        return Moments(count, self.mean + gap * share, squares, missing)

    @property
    def sd(self) -> float:
        """Standard deviation of these values (divided by their count); 0 for constants."""
        sd = math.sqrt(self.squares / self.count) if self.count else 0.0
        return sd if sd > _ROUNDING * abs(self.mean) else 0.0


@dataclass(frozen=True)
class Levels:
    """Levels of a category column, and whether a value was missing."""

    levels: frozenset[str]
    missing: bool

    def merge(self, other: Levels) -> Levels:
        """Return the levels that occur in either."""
        return Levels(self.levels | other.levels, self.missing or other.missing)


@dataclass(frozen=True)
class Statistics:
    """What a client reveals of its training rows so that the preprocessor can be fitted."""

    numeric: dict[str, Moments]
    categories: dict[str, Levels]
    target: Moments

    def merge(self, other: Statistics) -> Statistics:
        """Return the statistics of both sets of rows together."""
        return Statistics(
            {name: mine.merge(other.numeric[name]) for name, mine in self.numeric.items()},
            {name: mine.merge(other.categories[name]) for name, mine in self.categories.items()},
            self.target.merge(other.target),
        )


def local_statistics(frame: polars.DataFrame, spec: TableSpec) -> Statistics:
    """Return the statistics of the training rows of one client, or of several pooled.

    Parameters
    ----------
    frame
        The training rows, from `tables.read`.
    spec
        What each column is for, from `tables.check`.

    Returns
    -------
    Statistics
        Sums to be merged with those of the other clients.
    """
    numeric = {name: Moments.of(columns.numbers(frame, name)) for name in spec.numeric}
    categories = {
        name: Levels(frozenset(columns.levels(frame[name])), frame[name].null_count() > 0)
        for name in spec.categories
    }
    regression = spec.task == "regression"
    target = Moments.of(columns.numbers(frame, spec.target)) if regression else Moments()
    return Statistics(numeric, categories, target)


@dataclass(frozen=True)
class Scale:
    """How a numeric column is standardised; an `sd` of 0 leaves its values out, `missing` adds an indicator column."""

    name: str
    mean: float
    sd: float
    missing: bool


@dataclass(frozen=True)
class OneHot:
    """The levels that a category column is spread over; with `missing`, a missing value is one more level."""

    name: str
    levels: tuple[str, ...]
    missing: bool


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

    Examples
    --------
    >>> from coterie.data import tables
    >>> from coterie.data.preprocess import Preprocessor, local_statistics
    >>> table = {"site": ["a", "a", "b", "b"], "age": [30, 50, None, 40], "sex": list("fmmf"), "ill": [0, 1, 1, 0]}
    >>> frame = tables.read(table)
    >>> spec = tables.check(frame, client="site", target="ill")
    >>> preprocessor = Preprocessor.from_statistics(spec, local_statistics(frame, spec))
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

    @classmethod
    def from_statistics(
        cls,
        spec: TableSpec,
        statistics: Statistics,
        encoding: str = STANDARD,
        target_in_units: bool = False,
    ) -> Self:
        """Fit from the merged statistics of all clients' training rows.

        Parameters
        ----------
        spec
            What each column is for.
        statistics
            Merged statistics.
        encoding
            "standard" or "raw".
        target_in_units
            Leave a numeric target as it is instead of standardising it.

        Returns
        -------
        Preprocessor
            The fitted encoding.

        Raises
        ------
        DataError
            If no feature varies, or a column holds numbers too large to square.
        """
        scales = [_scale(name, moments) for name, moments in statistics.numeric.items()]
        choices = [
            OneHot(name, tuple(sorted(seen.levels)), seen.missing)
            for name, seen in statistics.categories.items()
        ]
        target = _scale(spec.target, statistics.target)
        fitted = cls(
            spec,
            tuple(scale for scale in scales if scale.sd or scale.missing),
            tuple(choice for choice in choices if len(choice.levels) + choice.missing > 1),
            0.0 if target_in_units else target.mean,
            1.0 if target_in_units else target.sd or 1.0,
            encoding,
        )
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
        return sources

    def as_codes(self, choice: OneHot) -> bool:
        """Return True if a category is one column of codes instead of a column per level."""
        return self.encoding == RAW and len(choice.levels) <= MOST_CODES

    @property
    def levels(self) -> tuple[int, ...]:
        """Number of levels of each encoded feature that is a column of codes; 0 for the others."""
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
        features = np.zeros((frame.height, len(self.feature_names)))
        place = 0
        for scale in self.scales:
            _require(frame, scale.name, source)
            values = columns.numbers(frame, scale.name, source, self._client_in(frame))
            if self.encoding == RAW:
                features[:, place] = values.cast(float).fill_null(math.nan).to_numpy()
                place += 1
                continue
            if scale.sd:
                features[:, place] = ((values - scale.mean) / scale.sd).fill_null(0.0).to_numpy()
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
            level[frame[choice.name].is_null().to_numpy()] = len(choice.levels) if choice.missing else -1
            known = np.flatnonzero(level >= 0)
            features[known, place + level[known]] = 1.0
            place += len(choice.levels) + choice.missing
        return torch.from_numpy(features)

    def _client_in(self, frame: polars.DataFrame) -> str | None:
        return self.spec.client if self.spec.client in frame.columns else None

    def encode_target(self, frame: polars.DataFrame, source: str = "the table") -> Tensor:
        """Return class numbers, int64 [rows], or standardised targets, float64 [rows].

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
        if self.spec.task == "regression":
            values = columns.numbers(frame, name, source, self._client_in(frame)).to_numpy()
            encoded, wrong, what = (
                (values - self.target_mean) / self.target_sd,
                np.isnan(values),
                "is missing",
            )
        else:
            encoded = columns.codes(columns.labels(frame[name]), self.spec.classes)
            wrong, what = encoded < 0, f"is not one of {', '.join(self.spec.classes)}"
        if wrong.any():
            where = columns.place(frame, int(wrong.argmax()), source, self._client_in(frame))
            raise DataError(
                f"{source}: target column {name!r}, {where}: the value {what}. Correct or remove it."
            )
        return torch.tensor(encoded)

    def decode(self, predictions: Tensor) -> Tensor | list[str]:
        """Return standardised predictions in the target's units, or class names for class numbers.

        Parameters
        ----------
        predictions
            Standardised values, or class numbers.

        Returns
        -------
        Tensor or list of str
            Values in the target's units, or class names.
        """
        if self.spec.task == "regression":
            return predictions * self.target_sd + self.target_mean
        return [self.spec.classes[number] for number in predictions.flatten().tolist()]

    def to_json(self) -> str:
        """Return everything but the warnings as JSON; floats come back bit for bit."""
        stored = dataclasses.asdict(
            dataclasses.replace(self, spec=dataclasses.replace(self.spec, warnings=[]))
        )
        if self.encoding == STANDARD:
            del stored["encoding"]  # as files before there was another
        return json.dumps(stored, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the preprocessor that `to_json` wrote."""
        stored = json.loads(text, object_hook=_with_tuples)
        return cls(
            TableSpec(**stored["spec"] | {"warnings": []}),
            tuple(Scale(**scale) for scale in stored["scales"]),
            tuple(OneHot(**choice) for choice in stored["choices"]),
            stored["target_mean"],
            stored["target_sd"],
            stored.get("encoding", STANDARD),
        )


def _with_tuples(stored: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()}


def _scale(name: str, moments: Moments) -> Scale:
    if not math.isfinite(moments.squares):
        raise DataError(
            f"Column {name!r} holds numbers too large to square. Rescale it, or leave it out: --drop {name}"
        )
    return Scale(name, moments.mean, moments.sd, moments.missing > 0 and moments.count > 0)


def _require(frame: polars.DataFrame, name: str, source: str) -> None:
    if name not in frame.columns:
        raise DataError(f"{source}: the column {name!r} is missing.{nearest(name, frame.columns)}")
