"""Write the table of docs/evidence/leaderboard.md from the committed results: `python docs/leaderboard.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coterie.report.numbers import show

PAGE = Path(__file__).parent / "evidence" / "leaderboard.md"
RESULT = Path(__file__).parents[1] / "benchmarks" / "results" / "leaderboard" / "leaderboard.json"
START, END = "<!-- table -->\n", "\n## What it teaches\n"
BEST = 3


def tables(result: dict[str, Any]) -> str:
    """Return a table of methods and one of data sets."""
    lines = [
        "| method | sets | rank | error | worst tenth | new clients | ahead | behind | gained | lost | MB | CPU s |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for one in result["overall"]:
        ratios = [_number(one[name]) for name in ("error_ratio", "worst_ratio", "newcomer_ratio")]
        shares = [_share(one[name]) for name in ("ahead", "behind", "improved", "harmed")]
        cells = [f"`{one['method']}`", str(one["data_sets"]), f"{one['mean_rank']:.1f}", *ratios, *shares]
        cells += [f"{one['mb']:.2g}", f"{one['cpu_seconds']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| data set | best | training alone | one model for all |", "|---|---|--:|--:|"]
    for card in result["data"]:
        mine = {line["method"]: line for line in result["lines"] if line["data"] == card["name"]}
        first = sorted(mine.values(), key=lambda line: line["rank"])[:BEST]
        best = ", ".join(f"`{line['method']}` {show(card['metric'], line['mean'])}" for line in first)
        others = [show(card["metric"], mine[name]["mean"]) for name in ("local", "fedavg")]
        lines.append(f"| `{card['name']}` | {best} | {' | '.join(others)} |")
    return "\n".join(lines) + "\n"


def written(text: str, result: dict[str, Any]) -> str:
    """Return the text of the page with the table in its place."""
    head, rest = text.split(START)
    return head + START + "\n" + tables(result) + END + rest.split(END)[1]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


if __name__ == "__main__":
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
