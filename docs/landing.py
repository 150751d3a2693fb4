"""Draw docs/landing.svg: what each clinic of `coterie demo` gains. Run: python docs/landing.py"""

from __future__ import annotations

from pathlib import Path

import polars

from coterie import compare
from coterie.cli.demo import BUDGET, ROUNDS
from coterie.data import bundled

SIZE, EDGE, LOW, HIGH = 360, 46, 0.4, 1.0


def place(x: float, y: float) -> tuple[float, float]:
    """Return the pixel of two accuracies."""
    scale = (SIZE - 2 * EDGE) / (HIGH - LOW)
    return EDGE + (x - LOW) * scale, SIZE - EDGE - (y - LOW) * scale


def draw(alone: list[float], together: list[float]) -> str:
    """Return the picture."""
    parts = []
    for tick in (0.4, 0.6, 0.8, 1.0):
        (x, _), (_, y) = place(tick, LOW), place(LOW, tick)
        parts.append(f'<text x="{x:.0f}" y="{SIZE - EDGE + 18}" text-anchor="middle">{tick:g}</text>')
        parts.append(f'<text x="{EDGE - 8}" y="{y + 4:.0f}" text-anchor="end">{tick:g}</text>')
    (x0, y0), (x1, y1) = place(LOW, LOW), place(HIGH, HIGH)
    parts.append(f'<path d="M{x0:.0f} {y1:.0f}V{y0:.0f}H{x1:.0f}" fill="none" stroke="#888"/>')
    parts.append(f'<path d="M{x0:.0f} {y0:.0f}L{x1:.0f} {y1:.0f}" stroke="#888" stroke-dasharray="4 4"/>')
    for one, other in zip(alone, together, strict=True):
        x, y = place(one, other)
        colour = "#3f51b5" if other >= one else "#d9822b"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}" fill-opacity="0.75"/>')
    middle = SIZE / 2
    parts.append(f'<text x="{middle}" y="{SIZE - 8}" text-anchor="middle">accuracy, training alone</text>')
    turned = f'transform="rotate(-90 12 {middle})"'
    parts.append(f'<text x="12" y="{middle}" text-anchor="middle" {turned}>accuracy with Coterie</text>')
    style = 'font-family="sans-serif" font-size="12" fill="#888"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE} {SIZE}" width="{SIZE}" {style}>'
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def main() -> None:
    """Compare as the demo does, and draw."""
    table = bundled.path("clinics")
    found = compare(table, "clinic", "readmitted", algorithms=["auto"], rounds=ROUNDS, folds=3, budget=BUDGET)
    folds = found.per_client()  # the mean over folds is over all rows of a clinic, each tested once
    rows = folds.group_by("algorithm", "client").agg(polars.col("accuracy").mean()).sort("client")
    score = {name: rows.filter(rows["algorithm"] == name)["accuracy"].to_list() for name in ("local", "auto")}
    Path(__file__).with_suffix(".svg").write_text(draw(score["local"], score["auto"]), encoding="utf-8")


if __name__ == "__main__":
    main()
