"""Tables of a leaderboard for the terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from coterie._core.amounts import size
from coterie._core.errors import SettingError, nearest
from coterie.report.numbers import show

OTHERS = ("worst tenth", "new clients", "ahead", "behind", "gained", "lost", "traffic", "CPU s")


def overall_table(result: dict[str, Any]) -> Table:
    """Return methods over all data sets, best mean rank first."""
    rows = []
    for one in result["overall"]:
        rows.append(
            [
                one["method"],
                f"{one['mean_rank']:.1f}",
                str(one["wins"]),
                str(one["data_sets"]),
                *(_number(one[name]) for name in ("error_ratio", "worst_ratio", "newcomer_ratio")),
                *(_share(one[name]) for name in ("ahead", "behind", "improved", "harmed")),
                size(one["mb"]),
                f"{one['cpu_seconds']:.1f}",
            ]
        )
    return _table(
        f"{len(result['methods'])} methods on {len(result['data'])} data sets; errors relative to training alone",
        ("method", "mean rank", "wins", "sets", "error", *OTHERS),
        rows,
    )


def data_table(result: dict[str, Any], data: str) -> Table:
    """Return the methods on one data set, best first; raise `SettingError` if there is no such data set."""
    mine = sorted((line for line in result["lines"] if line["data"] == data), key=lambda line: line["rank"])
    if not mine:
        known = [card["name"] for card in result["data"]]
        raise SettingError(f"no data set {data!r} on this leaderboard.{nearest(data, known)}")
    metric = mine[0]["metric"]
    rows = []
    for line in mine:
        late = line["newcomers"]
        rows.append(
            [
                line["method"],
                show(metric, line["mean"]),
                show(metric, line["worst_decile"]),
                "" if late is None else show(metric, late),
                *(_share(line[name]) for name in ("ahead", "behind", "improved", "harmed")),
                size(line["mb"]),
                f"{line['cpu_seconds']:.1f}",
            ]
        )
    return _table(
        f"{data}: test {metric}, mean over clients and {mine[0]['seeds']} seeds",
        ("method", metric, *OTHERS),
        rows,
    )


def _table(title: str, headers: tuple[str, ...], rows: list[list[str]]) -> Table:
    """Return a table whose cells are never cut, even on a narrow terminal."""
    table = Table(title=title)
    for name, cells in zip(headers, zip(*rows, strict=True), strict=True):
        widest = max(len(word) for word in (*cells, *name.split()))
        table.add_column(name, justify="left" if name == "method" else "right", width=widest)
    for row in rows:
        table.add_row(*row)
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"
