"""From how many rows on is one split enough? `python -m benchmarks.folds [FIRST_SEED]` prints a table.

Linear clients around a common model choose how strongly to be pulled to it, on the validation rows of one split or of
five folds, and train again on 80 % of their rows. The table shows by how much the error is above that of the best pull
in hindsight, and how often paired test rows make the gain over training alone certain.
"""

from __future__ import annotations

import sys

import numpy as np

from coterie.theory.verdicts import Evidence, judge

ROWS = (10, 20, 40, 80, 160, 320)
PULLS = (
    1e-3,
    0.3,
    1.0,
    3.0,
    10.0,
    30.0,
    100.0,
    1e6,
)  # the first is training alone, the last one model for all
CLIENTS, FEATURES, WORLDS, FOLDS = 12, 5, 40, 5
SPREADS = (0.1, 0.3, 1.0)


def fitted(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the models [pulls, n, d] of clients that are pulled to the least-squares fit of all rows."""
    squares, products = np.einsum("nrd,nre->nde", x, x), np.einsum("nrd,nr->nd", x, y)
    shared = np.linalg.solve(squares.sum(0) + 1e-9 * np.eye(FEATURES), products.sum(0))
    return np.stack(
        [
            np.linalg.solve(squares + pull * np.eye(FEATURES), (products + pull * shared)[..., None])[..., 0]
            for pull in PULLS
        ]
    )


def losses(models: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return squared errors [pulls, n, rows]."""
    return (np.einsum("pnd,nrd->pnr", models, x) - y) ** 2


def world(rows: int, spread: float, seed: int) -> tuple[float, float, bool, bool]:
    """Return the excess error of one split and of folds, and whether each is certain of the gain's true sign."""
    draw = np.random.default_rng([seed, rows, int(100 * spread)])
    own = draw.normal(size=FEATURES) + spread * draw.normal(size=(CLIENTS, FEATURES))
    x = draw.normal(size=(CLIENTS, rows, FEATURES))
    y = np.einsum("nd,nrd->nr", own, x) + draw.normal(size=(CLIENTS, rows))
    part = np.arange(rows) * FOLDS // rows
    held, tested = [], np.empty((len(PULLS), CLIENTS, rows))
    for k in range(FOLDS):
        test, validation = part == k, part == (k + 1) % FOLDS
        models = fitted(x[:, ~test & ~validation], y[:, ~test & ~validation])
        held.append(losses(models, x[:, validation], y[:, validation]).mean((1, 2)))
        tested[:, :, test] = losses(models, x[:, test], y[:, test])
    risks = 1 + ((fitted(x[:, part > 0], y[:, part > 0]) - own) ** 2).sum(-1).mean(1)
    best = risks.min()
    found = []
    for chosen, seen in ((held[0].argmin(), part == 0), (np.mean(held, 0).argmin(), part >= 0)):
        gain = (tested[0] - tested[chosen])[:, seen]
        client = np.repeat(np.arange(CLIENTS), gain.shape[1])
        sign = judge(Evidence.of_rows(gain.ravel(), client, CLIENTS)).by_rows.sign
        found.append((risks[chosen] / best - 1, sign != 0 and sign == np.sign(risks[0] - risks[chosen])))
    (single, sure), (folded, surer) = found
    return single, folded, sure, surer


def main(first: int) -> None:
    """Print a line for every number of rows."""
    print(
        "| rows of a client | test rows | excess, one split | five folds | certain, one split | five folds |"
    )
    print("|---:|---:|---:|---:|---:|---:|")
    for rows in ROWS:
        found = np.array([world(rows, spread, first + k) for spread in SPREADS for k in range(WORLDS)])
        single, folded, sure, surer = (100 * found).mean(0)
        print(
            f"| {rows} | {rows // FOLDS} | {single:.2f} % | {folded:.2f} % | {sure:.0f} % | {surer:.0f} % |"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
