"""A page for every client: how its model does, what it rests on, and whom it learns from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from coterie.report import collaboration, fairness
from coterie.report.facts import RunFacts
from coterie.report.gains import VERDICTS, Scores
from coterie.report.held_out import HeldOut
from coterie.report.importance import Coefficients
from coterie.report.numbers import digits, show, show_gain
from coterie.report.quality import LEVEL, half_widths

MOST = 60  # clients that get a page; with more the list of clients has a card for each


@dataclass(frozen=True)
class ClientPage:
    """One client's page: `facts` are pairs of what and how much, `coefficients` rows of a table."""

    name: str
    verdict: str
    words: str
    facts: list[tuple[str, str]]
    coefficients: list[list[str]]
    learns_from: str


def client_pages(
    main: RunFacts,
    alone: RunFacts | None,
    scores: Scores,
    held: HeldOut | None,
    found: Coefficients | None,
    threshold: float,
) -> list[ClientPage]:
    """Return the page of every client; none where there are too many clients."""
    if len(main.names) > MOST:
        return []
    rows = {} if held is None else dict(held.by_client())
    widths = half_widths(held)[0] if held is not None and held.task == "regression" else {}
    teachers = collaboration.neighbours(main) if collaboration.recorded(main) is not None else None
    pages = []
    for k, name in enumerate(main.names):
        facts = _facts(main, alone, scores, k)
        if held is not None and name in rows:
            one = fairness.served(held, name, rows[name], threshold)
            titles = fairness.headers(held, "client")[4:]
            facts += list(zip(titles, one.cells, strict=True))
        if name in widths and math.isfinite(widths[name]):
            facts.append((f"{100 * LEVEL:.0f} % prediction interval", f"prediction ± {digits(widths[name])}"))
        verdict = scores.verdicts[k]
        pages.append(
            ClientPage(
                name,
                verdict,
                "" if alone is None or main.alone else VERDICTS[verdict],
                facts,
                [] if found is None else found.of(name),
                "" if teachers is None else teachers[k],
            )
        )
    return pages


def _facts(main: RunFacts, alone: RunFacts | None, scores: Scores, k: int) -> list[tuple[str, str]]:
    """Return rows, metric with interval, and the gain over training alone."""
    facts = []
    for split in ("train", "test"):
        count = main.rows(split)
        if count is not None:
            facts.append((f"{'training' if split == 'train' else split} rows", f"{count[k]:,}"))
    text = show(main.metric, float(scores.value[k]))
    if not math.isnan(scores.low[k]):
        ends = (show(main.metric, float(end)) for end in (scores.low[k], scores.high[k]))
        text += f" (95 % interval {' to '.join(ends)})"
    facts.append((f"{main.split} {main.metric}", text))
    if alone is not None and alone is not main:
        facts.append(("the same, trained alone", show(main.metric, float(alone.scores[k]))))
        if not math.isnan(scores.gain[k]):
            facts.append(("gain", show_gain(main.metric, float(scores.gain[k]))))
    return facts
