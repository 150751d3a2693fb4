"""Pictures of a leaderboard as SVG: the critical-difference diagram and Pareto fronts. Colours are the page's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from coterie._core.html import text
from coterie.theory.ranking import pareto

WIDTH, MARGIN = 760, 190
LINE = 20  # height of a line of text
TICKS = 5


def critical_difference(
    methods: Sequence[str], mean_ranks: Sequence[float], difference: float, cliques: Sequence[Sequence[str]]
) -> str:
    """Return the diagram of Demšar (2006): mean ranks on a line, and bars over methods that cannot be told apart.

    Parameters
    ----------
    methods
        Names.
    mean_ranks
        Mean rank of each, 1 for the best.
    difference
        The critical difference.
    cliques
        Groups of methods whose mean ranks lie within it.

    Returns
    -------
    str
        An SVG element.

    Examples
    --------
    >>> critical_difference(["a", "b"], [1.2, 1.8], 0.4, []).count("<circle")
    2
    """
    order = sorted(range(len(methods)), key=lambda k: mean_ranks[k])
    rank = dict(zip(methods, mean_ranks, strict=True))
    axis, bars = 64, 10 + 9 * len(cliques)
    half = math.ceil(len(order) / 2)
    height = axis + bars + LINE * half + 16

    def x(value: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * (value - 1) / max(1, len(methods) - 1)

    step = max(1, round((len(methods) - 1) / 10))
    parts = [_line(x(1), axis, x(len(methods)), axis)]
    for tick in range(1, len(methods) + 1, step):
        parts += [_line(x(tick), axis - 5, x(tick), axis), _text(x(tick), axis - 10, str(tick), "middle")]
    left, right = x(1), min(x(1 + difference), WIDTH - 20)
    parts += [_line(left, 22, right, 22, 2), _line(left, 18, left, 26, 2), _line(right, 18, right, 26, 2)]
    parts.append(_text((left + right) / 2, 14, f"critical difference {difference:.2f}", "middle"))
    for k, group in enumerate(cliques):
        ends = [rank[name] for name in group]
        level = axis + 10 + 9 * k
        parts.append(_line(x(min(ends)) - 3, level, x(max(ends)) + 3, level, 4, "var(--accent)"))
    for place, k in enumerate(order):
        here, best = x(mean_ranks[k]), place < half
        level = axis + bars + LINE * (place if best else len(order) - 1 - place) + 12
        end = MARGIN - 12 if best else WIDTH - MARGIN + 12
        parts += [_line(here, axis, here, level), _line(here, level, end, level), _dot(here, axis, 3)]
        label = f"{methods[k]}  {mean_ranks[k]:.1f}"
        parts.append(_text(end - 4 if best else end + 4, level + 4, label, "end" if best else "start"))
    said = f"Mean ranks of {len(methods)} methods; bars join methods that cannot be told apart"
    return _svg(WIDTH, height, said, parts)


@dataclass(frozen=True)
class CostPoint:
    """A method in a plot of two costs."""

    name: str
    x: float
    y: float


def front(points: Sequence[CostPoint], x: str, y: str, *, log: bool = False, higher: bool = False) -> str:
    """Plot methods by two criteria and mark those that no other beats in both.

    Parameters
    ----------
    points
        The methods.
    x, y
        Titles of the axes.
    log
        Whether the horizontal axis is logarithmic; zeros are put at its left end.
    higher
        Whether more is better on the vertical axis, and, without `log`, on the horizontal one.

    Returns
    -------
    str
        An SVG element; the methods on the front are named, others have their name as a tooltip.

    Examples
    --------
    >>> drawn = front([CostPoint("a", 0.0, 0.9), CostPoint("b", 2.0, 0.8)], "MB", "accuracy", log=True, higher=True)
    >>> drawn.count('class="front"')
    1
    """
    known = [point for point in points if math.isfinite(point.x) and math.isfinite(point.y)]
    if not known:
        return ""
    width, height, left, bottom = 560, 380, 74, 330
    signs = np.array([-1.0 if higher and not log else 1.0, -1.0 if higher else 1.0])
    best = pareto(np.array([[point.x, point.y] for point in known]) * signs)
    across = _scale([point.x for point in known], left + 26, width - 96, log)
    up = _scale([point.y for point in known], bottom - 14, 22, False)
    parts = [_line(left, bottom, width - 12, bottom), _line(left, bottom, left, 12)]
    for value in across.ticks:
        at = across.place(value)
        parts += [_line(at, bottom, at, bottom + 5), _text(at, bottom + 19, _number(value), "middle")]
    for value in up.ticks:
        at = up.place(value)
        parts += [
            _line(left, at, width - 12, at, 1, "var(--grid)"),
            _text(left - 8, at + 4, _number(value), "end"),
        ]
    parts.append(_text((left + width) / 2, bottom + 42, x, "middle"))
    turned = f'transform="rotate(-90 16 {bottom / 2:.1f})"'
    parts.append(_text(16, bottom / 2, y, "middle", turned))
    chain = sorted((across.place(p.x), up.place(p.y)) for p, on in zip(known, best, strict=True) if on)
    steps = " ".join(f"{a:.1f},{b:.1f}" for a, b in chain)
    parts.append(
        f'<polyline points="{steps}" fill="none" stroke="var(--accent)" stroke-dasharray="4 4"></polyline>'
    )
    taken: list[tuple[float, float]] = []
    for point, on in sorted(zip(known, best, strict=True), key=lambda pair: not pair[1]):
        at, level = across.place(point.x), up.place(point.y)
        title = f"<title>{text(point.name)}: {_number(point.x)}, {_number(point.y)}</title>"
        kind, colour = ("front", "var(--accent)") if on else ("behind", "var(--muted)")
        parts.append(
            f'<circle class="{kind}" cx="{at:.1f}" cy="{level:.1f}" r="{5 if on else 4}" fill="{colour}" '
            f'fill-opacity="{1 if on else 0.55}">{title}</circle>'
        )
        clear = all(abs(at - a) > 90 or abs(level - b) > 13 for a, b in taken)
        if on or (clear and point.name in ("local", "fedavg")):
            shift = 4.0
            while not all(abs(at - a) > 90 or abs(level + shift - b) > 12 for a, b in taken):
                shift -= 12.0
            taken.append((at, level + shift))
            parts.append(_text(at + 8, level + shift, point.name, "start"))
    return _svg(width, height, f"{y} against {x}; {int(best.sum())} methods are on the Pareto front", parts)


@dataclass(frozen=True)
class _Scale:
    """Where a value is drawn, and which values get a tick."""

    place: Callable[[float], float]
    ticks: list[float]


def _scale(values: Sequence[float], start: float, end: float, log: bool) -> _Scale:
    if log:
        positive = [value for value in values if value > 0] or [1.0]
        low, high = math.log10(min(positive)), math.log10(max(positive))
        low, high = low - 0.1, high + 0.1
        zero = any(value <= 0 for value in values)
        first = start + (34 if zero else 0)

        def place(value: float) -> float:
            if value <= 0:
                return start
            return first + (end - first) * (math.log10(value) - low) / (high - low)

        powers = [10.0**k for k in range(math.ceil(low), math.floor(high) + 1)]
        return _Scale(place, [*([0.0] if zero else []), *(powers or [10**low, 10**high])])
    low, high = min(values), max(values)
    room = (high - low) or abs(high) or 1.0
    low, high = low - 0.04 * room, high + 0.04 * room
    step = 10.0 ** math.floor(math.log10((high - low) / TICKS))
    step = next(step * k for k in (1, 2, 5, 10) if (high - low) / (step * k) <= TICKS)
    ticks = [step * k for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return _Scale(lambda value: start + (end - start) * (value - low) / (high - low), ticks)


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1e5 else f"{value:.1e}"


def _svg(width: float, height: float, said: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{text(said)}" '
        f'style="max-width: {width:.0f}px; width: 100%">{"".join(parts)}</svg>'
    )


def _line(x: float, y: float, to: float, down: float, width: float = 1, colour: str = "var(--muted)") -> str:
    return (
        f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to:.1f}" y2="{down:.1f}" stroke="{colour}" '
        f'stroke-width="{width}"></line>'
    )


def _dot(x: float, y: float, radius: float) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="var(--accent)"></circle>'


def _text(x: float, y: float, what: str, anchor: str, more: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="var(--text)" font-size="13" {more}>'
        f"{text(what)}</text>"
    )
