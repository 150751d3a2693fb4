"""Statistics for the shared encoding as secure sums: the server learns them of all nodes together, of none alone.

A first sum counts values in bins whose limits are powers of two, and levels of categories. With differential privacy
the counts get noise and the encoding is fitted to them. Without it a second sum of deviations from the centres of these
histograms gives means and spreads as exact as fixed-point numbers are. What a node tells in words stays public: names
and kinds of columns, levels, and whether values are missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from coterie._core import files
from coterie._core.errors import RunError
from coterie.data import column_types as columns
from coterie.data.client_sums import ClientSums
from coterie.data.statistics import Levels, Moments, Statistics
from coterie.data.table_spec import TableSpec
from coterie.data.target_task import MOST_LEVELS
from coterie.deploy import secure_aggregation as secure
from coterie.deploy.consent import Refusal
from coterie.deploy.keys import write_private
from coterie.deploy.node_masks import NodeMasks
from coterie.deploy.secure_sums import SumCaller
from coterie.deploy.transport import Envelope
from coterie.engine import accounting
from coterie.engine.noise import Noise, fingerprint
from coterie.engine.privacy import Privacy
from coterie.engine.private_statistics import (
    SHARE,
    STANDS_OUT,
    histogram,
    moments_of,
    one_in_each,
    public_levels,
)
from coterie.train.private import KEY, new_secret

if TYPE_CHECKING:
    import polars

BINS = len(histogram(np.zeros(0), np.zeros(0)))
SMALL = 2.0**-20  # unit of a column whose values are all in the bin about zero
PAID = "statistics.json"  # in the folder of a run: what its statistics have cost


def noise_scale(privacy: Privacy, count: int) -> float:
    """Return the standard deviation of the noise of each bin, for `count` histograms."""
    return math.sqrt(max(count, 1)) * accounting.noise_for(SHARE * privacy.epsilon, SHARE * privacy.delta, 1)


def rest(privacy: Privacy, folder: Path) -> Privacy:
    """Return what is left of the budget of a run on this node after its statistics."""
    if not (folder / PAID).exists():
        return privacy
    return privacy.after(SHARE)


def answer(
    header: Mapping[str, Any], train: polars.DataFrame, spec: TableSpec, folder: Path, masks: NodeMasks
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return this node's part of a sum of statistics, under masks, and with noise if the run has a budget.

    Parameters
    ----------
    header
        The message; what it is `about` is what all nodes must agree on.
    train
        The node's training rows.
    spec
        What each column is for.
    folder
        Where the node keeps the run.
    masks
        The node's keys for the sums of this run.
    """
    about = header["about"]
    privacy = None if about.get("privacy") is None else Privacy(**about["privacy"])
    owner = columns.labels(train[spec.client])
    if about["step"] == "moments":
        if privacy is not None:
            raise Refusal("a run with a budget has noisy histograms only")
        total = _moments(train, spec, about["centres"])
    else:
        weights = (
            one_in_each(owner) if privacy is not None and privacy.unit == "client" else np.ones(train.height)
        )
        parts = [histogram(spec.numbers(train, name).to_numpy(), weights) for name in about["columns"]]
        parts += [_level_counts(train[name], owner, levels) for name, levels in about["levels"].items()]
        total = torch.from_numpy(np.concatenate([np.zeros(0), *parts]))
    if privacy is not None:
        if about["levels"]:
            raise Refusal("a run with a budget does not count levels")
        among = secure.enough(masks.nodes) if about["secure"] else 1
        total = total + _noise(folder, about, privacy, len(about["columns"]), len(total), among)
    if not about["secure"]:
        if privacy is None:
            raise Refusal("sums of statistics leave under masks, or with noise")
        return {}, {"total": total}
    return {}, {"total": masks.masked(header, total, float(train.height))}


def _noise(
    folder: Path, about: Mapping[str, Any], privacy: Privacy, count: int, length: int, among: int
) -> Tensor:
    """Return this node's part of the noise: always the same for a run, so that nobody can average it away."""
    question = fingerprint(about, among)
    stored = files.read_json(folder / PAID) if (folder / PAID).exists() else {"question": question}
    if stored["question"] != question:
        raise Refusal("noisy statistics are answered once per run, with the same nodes")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / KEY).exists():
        write_private(folder / KEY, new_secret())
    files.write_json(folder / PAID, {**stored, "share": SHARE})
    drawn = Noise((folder / KEY).read_bytes()).normal(f"statistics {question}", length)
    return drawn * noise_scale(privacy, count) / math.sqrt(among)


def _moments(train: polars.DataFrame, spec: TableSpec, centres: Mapping[str, Any]) -> Tensor:
    """Return sums of deviations from given centres in given units, and of their squares, of each column."""
    found = []
    for name, (centre, unit) in centres.items():
        values = spec.numbers(train, name).drop_nulls().to_numpy()
        away = (values - float(centre)) / float(unit)
        found += [away.sum(), np.square(away).sum()]
    return torch.tensor(found, dtype=torch.float64)


def _level_counts(column: polars.Series, owner: polars.Series, levels: list[str]) -> np.ndarray[Any, Any]:
    """Return the rows and the clients of each level, one after the other."""
    counts = Levels.of(column, owner).counts
    return np.array([counts.get(level, (0, 0)) for level in levels], dtype=np.float64).reshape(-1)


def collect(
    sums: SumCaller,
    told: Mapping[str, Any],
    envelopes: Mapping[str, Envelope],
    rows: int,
    spec: TableSpec,
    privacy: Privacy | None,
) -> tuple[Statistics, list[str]]:
    """Return the statistics of all training rows, and warnings about columns that noise hides.

    Parameters
    ----------
    sums
        Asks the nodes for sums.
    told
        Descriptions by node.
    envelopes
        The message for each node, without what it is about.
    rows
        Number of training rows of all nodes.
    spec
        What each column is for.
    privacy
        The budget of the run, if it has one.
    """
    names = [*spec.numeric, *([spec.target] if spec.task == "regression" else [])]
    levels = {name: _union(told, name) for name in spec.categories}
    missing = {name for one in told.values() for name in one.get("missing", ())}
    about: dict[str, Any] = {
        "step": "histogram",
        "columns": names,
        "levels": levels if privacy is None else {},
        "privacy": None if privacy is None else privacy.to_json(),
        "secure": sums.secure,
        "weight": float(max(rows, 1)),
    }
    length = BINS * len(names) + sum(2 * len(some) for some in about["levels"].values())
    flat, came = sums.vector(about, envelopes, length)
    counts = {name: flat[k * BINS : (k + 1) * BINS].numpy() for k, name in enumerate(names)}
    if privacy is not None:
        scale = noise_scale(privacy, len(names)) * (1 if sums.secure else math.sqrt(len(came)))
        found, warnings = _from_noise(counts, missing, scale)
        seen = {name: Levels(dict.fromkeys(some, (1, 1)), name in missing) for name, some in levels.items()}
        categories = {name: public_levels(one) for name, one in seen.items()}
    else:
        found, warnings = _exact(sums, {name: envelopes[name] for name in came}, about, counts, missing), []
        categories = _categories(flat[BINS * len(names) :], levels, missing)
    for name, (mean, sd) in _fixed(told, spec.numeric).items():
        found[name] = Moments(max(rows, 1), mean, max(rows, 1) * sd * sd)
    target = found.pop(spec.target) if spec.task == "regression" else Moments()
    return Statistics(found, categories, target, ClientSums.none(len(spec.numeric) + 1)), warnings


def _exact(
    sums: SumCaller,
    envelopes: Mapping[str, Envelope],
    about: Mapping[str, Any],
    counts: Mapping[str, Any],
    missing: set[str],
) -> dict[str, Moments]:
    """Return means and spreads by a second sum, about the centres of the histograms."""
    rough = {name: moments_of(bins, 0) for name, bins in counts.items()}
    centres = {name: (one.mean, one.sd or SMALL) for name, one in rough.items() if one is not None}
    if not centres:
        return {name: Moments(missing=1) for name in counts}
    question = {**about, "step": "moments", "columns": [], "levels": {}, "centres": centres}
    flat, came = sums.vector(question, envelopes, 2 * len(centres))
    if set(came) != set(envelopes):
        raise RunError("a node vanished between two sums of statistics; start the run again")
    found = {name: Moments(missing=1) for name in counts}
    for (name, (centre, unit)), (one, two) in zip(centres.items(), flat.view(-1, 2).tolist(), strict=True):
        count = max(1, round(float(counts[name].sum())))
        spread = max(two - one * one / count, 0.0)
        found[name] = Moments(count, centre + unit * one / count, unit * unit * spread, int(name in missing))
    return found


def _from_noise(
    counts: Mapping[str, Any], missing: set[str], scale: float
) -> tuple[dict[str, Moments], list[str]]:
    """Return means and spreads of noisy histograms; a column that does not stand out keeps its units."""
    found, warnings = {}, []
    for name, bins in counts.items():
        moments = moments_of(np.where(bins > STANDS_OUT * scale, bins, 0.0), int(name in missing))
        if moments is None:
            warnings.append(
                f"Column {name!r} does not stand out from the noise, so it keeps its own units. Rescale it to about "
                "one at the nodes, or spend more (--epsilon)."
            )
        found[name] = moments or Moments(1, 0.0, 1.0, int(name in missing))
    return found, warnings


def _categories(flat: Tensor, levels: Mapping[str, list[str]], missing: set[str]) -> dict[str, Levels]:
    found, at = {}, 0
    for name, some in levels.items():
        pairs = flat[at : at + 2 * len(some)].round().long().view(-1, 2).tolist()
        at += 2 * len(some)
        counts = {
            level: (rows, clients) for level, (rows, clients) in zip(some, pairs, strict=True) if rows > 0
        }
        found[name] = Levels(counts, name in missing)
    return found


def _union(told: Mapping[str, Any], name: str) -> list[str]:
    """Return the levels of a column at all nodes; at most so many."""
    return sorted({level for one in told.values() for level in one.get("levels", {}).get(name, ())})[
        :MOST_LEVELS
    ]


def _fixed(told: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, tuple[float, float]]:
    """Return the encodings that owners of nodes have fixed."""
    found: dict[str, tuple[float, float]] = {}
    for one in told.values():
        for name, (mean, sd) in one.get("fixed", {}).items():
            if name in names:
                found.setdefault(name, (float(mean), float(sd)))
    return found
