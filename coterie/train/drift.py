"""Does the past predict the future? What changed between training rows and later test rows, client by client."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie._core import broadcast, files
from coterie.data.rows import Rows
from coterie.models.metrics import LOSS

if TYPE_CHECKING:
    from coterie.train.run import Run

FILE = "drift.json"
BLOCKS = 4  # into which a client's test rows are cut, from the earliest to the latest
FEWEST = 8  # rows of a client in a split, below which nothing is said about its inputs
LEVEL = 0.05  # share of false ones among inputs that are said to have moved
SURE = 2.576  # standard errors by which test rows have to be worse


@dataclass(frozen=True)
class Shift:
    """An input of a client whose mean has moved: by so many standard deviations, with the p-value of that."""

    client: str
    feature: str
    change: float
    p: float


@dataclass(frozen=True)
class Drift:
    """What changed over time.

    Attributes
    ----------
    names : list of str
        Clients with validation and test rows.
    validation : list of float
        Their mean loss on validation rows.
    test : list of list of float
        Their mean loss on consecutive blocks of test rows.
    moved : list of Shift
        Inputs that have moved between training and test rows, at most 5 % of them expected to be false (Benjamini and
        Hochberg over all clients and inputs), the largest first.
    looked_at : int
        Number of means that were compared.
    rise, error : float
        How much higher the loss is on test rows than on validation rows of the same clients, and its standard error.
    """

    names: list[str]
    validation: list[float]
    test: list[list[float]]
    moved: list[Shift]
    looked_at: int
    rise: float
    error: float

    @classmethod
    def of(cls, run: Run) -> Drift | None:
        """Return the drift of a run whose rows are ordered in time and in this process, and that has test rows."""
        fed = run.fed
        ordered = fed.table is not None and fed.table.times is not None
        if fed.promised is not None:  # rows are not to be looked at without noise
            return None
        if not ordered or LOSS.name not in run.test_rows or not fed.has_rows("validation"):
            return None
        assert fed.table is not None
        models = broadcast.to(run.personal if run.scored is None else run.scored, fed.device)
        before = fed.row_values(models, "validation")[LOSS.name].numpy()
        losses = [_by_client(before, fed.runtime.rows("validation"))]
        losses.append(_by_client(run.test_rows[LOSS.name].numpy(), fed.runtime.rows("test")))
        known = [k for k in range(fed.n) if len(losses[0][k]) and len(losses[1][k])]
        rise, error = 0.0, 0.0
        if not fed.model.whole_clients:  # where they grow with the number of rows, they cannot be compared
            rise, error = _rise([(losses[0][k], losses[1][k]) for k in known])
        moved, looked_at = _moved(run, fed.table.preprocessor.feature_names)
        return cls(
            [fed.names[k] for k in known],
            [float(losses[0][k].mean()) for k in known],
            [
                [float(part.mean()) for part in np.array_split(losses[1][k], BLOCKS) if len(part)]
                for k in known
            ],
            moved,
            looked_at,
            rise,
            error,
        )

    def sentence(self) -> str:
        """Say that the past does not predict the future; nothing where chance explains the difference."""
        if not (self.error > 0 and self.rise > SURE * self.error):
            return ""
        most = max(self.moved, key=lambda one: abs(one.change), default=None)
        moved = (
            "" if most is None else f" Inputs have moved, most of all {most.feature!r} of {most.client!r}."
        )
        return (
            f"The past does not predict the future here: on test rows, which are the latest, the loss is "
            f"{self.rise:.3g} higher than on the validation rows before them (standard error {self.error:.2g}).{moved} "
            "Train on recent rows, or again and again."
        )

    def save(self, folder: Path) -> None:
        """Write the drift into a run folder."""
        files.write_json(folder / FILE, asdict(self))

    @classmethod
    def load(cls, folder: Path) -> Drift | None:
        """Return what `save` wrote, or None."""
        if not (folder / FILE).exists():
            return None
        stored: dict[str, Any] = files.read_json(folder / FILE)
        return cls(**stored | {"moved": [Shift(**one) for one in stored["moved"]]})


def _by_client(values: np.ndarray, rows: Rows) -> list[np.ndarray]:
    """Return the values of every client's rows."""
    return np.split(values, np.cumsum(rows.size.cpu().numpy())[:-1])


def _rise(pairs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[float, float]:
    """Return by how much the mean of the second rows is above the first, client by client, and its standard error.

    A client counts by its second rows. Rows of one client vary alike in both parts.
    """
    pairs = [pair for pair in pairs if min(len(part) for part in pair) >= 2]
    if not pairs:
        return 0.0, 0.0
    sizes = np.array([[len(first), len(second)] for first, second in pairs], dtype=float)
    means = np.array([[first.mean(), second.mean()] for first, second in pairs])
    spread = np.array([np.r_[a - a.mean(), b - b.mean()].var() for a, b in pairs])
    share = sizes[:, 1] / sizes[:, 1].sum()
    variance = (share**2 * spread * (1 / sizes[:, 0] + 1 / sizes[:, 1])).sum()
    return float(share @ (means[:, 1] - means[:, 0])), math.sqrt(variance)


def _moved(run: Run, names: list[str]) -> tuple[list[Shift], int]:
    """Return the inputs whose mean has moved, with false discovery control, and how many were looked at."""
    from scipy.stats import false_discovery_control, ttest_ind_from_stats

    early, late = (run.fed.runtime.rows(split).to("cpu") for split in ("train", "test"))
    found: list[Shift] = []
    for k, client in enumerate(run.fed.names):
        first, second = (part.of(k)[0].double().numpy()[:, : len(names)] for part in (early, late))
        if min(len(first), len(second)) < FEWEST:
            continue
        sd = [part.std(0, ddof=1) for part in (first, second)]
        varies = np.flatnonzero((sd[0] > 1e-9) & (sd[1] > 1e-9))
        means = [part.mean(0)[varies] for part in (first, second)]
        tested = ttest_ind_from_stats(
            means[1], sd[1][varies], len(second), means[0], sd[0][varies], len(first), equal_var=False
        )
        change = (means[1] - means[0]) / sd[0][varies]
        found += [
            Shift(client, names[j], float(c), float(p))
            for j, c, p in zip(varies, change, np.atleast_1d(tested.pvalue), strict=True)
        ]
    if not found:
        return [], 0
    adjusted = false_discovery_control([one.p for one in found])
    moved = [one for one, p in zip(found, adjusted, strict=True) if p <= LEVEL]
    return sorted(moved, key=lambda one: -abs(one.change)), len(found)
