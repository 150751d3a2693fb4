"""Means and standard deviations of a table's columns under differential privacy, for its encoding.

Every numeric column gets one noisy histogram whose bins are powers of two, which are the same for all tables, so that
no range has to be known. Bins that could be noise are dropped; the others give the mean and the standard deviation.
A column whose values do not stand out from the noise is left in its own units. Names, kinds and levels of columns, and
whether values are missing, are taken as public.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.data import column_types as columns
from coterie.data.client_sums import ClientSums
from coterie.data.statistics import Levels, Moments, Statistics, local_statistics
from coterie.engine import accounting
from coterie.engine.noise import Noise
from coterie.engine.privacy import Privacy

if TYPE_CHECKING:
    import polars

    from coterie.data.table_spec import TableSpec

SHARE = 0.2  # of epsilon and delta for statistics
LOW, HIGH = -10, 31  # bins from 2^-10 to 2^31 on either side of zero
STANDS_OUT = 4.5  # standard deviations of noise: one column in 3,000 has a bin of nothing but noise

ANY = 10**9  # rows and clients of a level that is not counted

Histogram = np.ndarray[Any, np.dtype[np.float64]]


def noisy_statistics(
    frame: polars.DataFrame, spec: TableSpec, client: str, settings: Privacy, noise: Noise
) -> tuple[Statistics, list[str]]:
    """Return statistics of training rows that cost `SHARE` of the budget, and warnings about single columns.

    Parameters
    ----------
    frame
        The training rows.
    spec
        What each column is for.
    client
        Name of the client column.
    settings
        The budget of the whole run.
    noise
        Secret noise.
    """
    exact = local_statistics(frame, spec)
    names = [*spec.numeric, *([spec.target] if spec.task == "regression" else [])]
    if not names:
        return exact, []
    weights = np.ones(frame.height)
    if settings.unit == "client":
        weights = one_in_each(columns.labels(frame[client]))
    scale = math.sqrt(len(names)) * accounting.noise_for(SHARE * settings.epsilon, SHARE * settings.delta, 1)
    found, warnings = {}, []
    for name in names:
        values = spec.numbers(frame, name)
        counts = histogram(values.to_numpy(), weights)
        counts = counts + scale * noise.normal(f"statistics of {name}", len(counts)).numpy()
        moments = moments_of(np.where(counts > STANDS_OUT * scale, counts, 0.0), int(values.null_count() > 0))
        if moments is None:
            warnings.append(
                f"Column {name!r} does not stand out from the noise, so it keeps its own units. Rescale it to about "
                "one yourself, or spend more (--epsilon)."
            )
            moments = Moments(1, 0.0, 1.0, int(values.null_count() > 0))
        found[name] = moments
    target = found.pop(spec.target) if spec.task == "regression" else exact.target
    categories = {name: public_levels(seen) for name, seen in exact.categories.items()}
    return Statistics(found, categories, target, ClientSums.none(len(spec.numeric) + 1)), warnings


def public_levels(seen: Levels) -> Levels:
    """Return levels that are all as frequent as can be: how often each occurs is not told."""
    return Levels(dict.fromkeys(seen.counts, (ANY, ANY)), seen.missing)


def histogram(values: Histogram, weights: Histogram) -> Histogram:
    """Return the weight of values in each bin: negative powers of two, zero, positive powers of two.

    A row adds its weight to one bin at most; missing values count nothing.
    """
    here = np.isfinite(values)
    values, weights = values[here], weights[here]
    with np.errstate(divide="ignore"):
        power = np.floor(np.log2(np.abs(values))).clip(LOW - 1, HIGH)
    place = np.where(power < LOW, 0, np.sign(values) * (power - LOW + 1)).astype(int)
    width = HIGH - LOW + 1
    return np.bincount(place + width, weights=weights, minlength=2 * width + 1).astype(np.float64)


def moments_of(counts: Histogram, missing: int) -> Moments | None:
    """Return mean and spread of values that lie evenly in their bins; None if all bins are empty."""
    total = counts.sum()
    if total <= 0:
        return None
    power = 2.0 ** np.arange(LOW, HIGH + 1)
    middle = np.concatenate([-1.5 * power[::-1], [0.0], 1.5 * power])
    square = np.concatenate([7 / 3 * power[::-1] ** 2, [0.0], 7 / 3 * power**2])
    mean = float((counts * middle).sum() / total)
    variance = max(float((counts * square).sum() / total) - mean**2, 0.0)
    count = max(1, round(float(total)))
    return Moments(count, mean, variance * count, missing)


def one_in_each(label: polars.Series) -> Histogram:
    """Return weights that sum to one over the rows of each client."""
    _, place, size = np.unique(label.to_numpy().astype(str), return_inverse=True, return_counts=True)
    weights: Histogram = 1.0 / size[place]
    return weights
