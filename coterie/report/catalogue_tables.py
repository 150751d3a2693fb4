"""Methods, recipes, experiments and the columns of a table, as tables for the terminal."""

from __future__ import annotations

import dataclasses
import datetime
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from coterie.report.cells import text_table, titled

if TYPE_CHECKING:
    from coterie.algorithms.base import Algorithm
    from coterie.data.recipes import Recipe


def describe_algorithm(cls: type[Algorithm]) -> dict[str, Any]:
    """Return name, one-line summary and hyperparameters of a method as JSON values."""
    return {
        "name": cls.name,
        "class": cls.__name__,
        "summary": _summary(cls),
        "settings": [
            {"name": field.name, "default": field.default}
            | {key: value for key, value in field.metadata.items() if value is not None}
            for field in dataclasses.fields(cls)
        ],
    }


def algorithms_table(classes: Sequence[type[Algorithm]]) -> Table:
    """Return a table of methods with their one-line summaries."""
    rows = [(cls.name, _summary(cls)) for cls in classes]
    return text_table("Methods", ("name", "what it does"), rows)


def recipes_table(recipes: Sequence[Recipe]) -> Table:
    """Return a table of data sets: task, model, how clients differ, and the files that they need."""
    rows = [(one.name, one.task, one.model, one.heterogeneity, ", ".join(one.files)) for one in recipes]
    return text_table("Data sets", ("name", "task", "model", "how clients differ", "files needed"), rows)


def recipe_card(recipe: Recipe) -> Table:
    """Return the card of a data set."""
    names = ("title", "task", "model", "client", "heterogeneity", "why", "source", "licence")
    rows = [(name, str(getattr(recipe, name))) for name in names]
    return text_table(recipe.name, ("", ""), [*rows, ("files needed", ", ".join(recipe.files) or "none")])


def algorithm_page(cls: type[Algorithm]) -> list[str | Table]:
    """Return the docstring of a method and a table of its hyperparameters."""
    rows = [
        (field.name, str(field.default), _allowed(field.metadata), field.metadata.get("help", ""))
        for field in dataclasses.fields(cls)
    ]
    headers = ("hyperparameter", "default", "range", "meaning")
    return [f"{cls.name}\n\n{inspect.getdoc(cls)}\n", text_table("", headers, rows)]


def _allowed(limits: Any) -> str:
    """Format the allowed values of a hyperparameter."""
    if limits.get("options"):
        return ", ".join(limits["options"])
    signs = (("low", "≥"), ("above", ">"), ("high", "≤"))
    return ", ".join(f"{sign} {limits[key]}" for key, sign in signs if limits.get(key) is not None)


def _summary(cls: type[Algorithm]) -> str:
    """Return the first line of a method's docstring."""
    return (inspect.getdoc(cls) or "").partition("\n")[0]


def experiments_table(found: list[tuple[str, str]]) -> Table:
    """Return a table of experiments with their titles."""
    return text_table("Experiments", ("name", "what it reproduces"), found)


def description_tables(description: dict[str, Any], most: int = 30) -> list[str | Table]:
    """Return what `coterie data describe` prints: a summary line, columns and clients."""
    sizes = description["client_sizes"]
    summary = (
        f"{description['rows']} rows of {description['clients']} clients "
        f"({sizes['min']:.0f} to {sizes['max']:.0f} rows, median {sizes['median']:.0f}); "
        f"target {description['target']}: {description['task']}"
    )
    columns = [
        (
            column["column"],
            column["read_as"],
            "yes" if column["used"] else "no",
            _percent(column["missing_percent"] / 100),
            _values(column),
        )
        for column in description["columns"]
    ]
    clients = [
        (client["client"], str(client["rows"]), _percent(client["missing_share"]), _target(client))
        for client in description["per_client"]
    ]
    return [
        summary,
        text_table(
            titled("Columns", columns, most),
            ("column", "read as", "used", "missing", "values"),
            columns[:most],
        ),
        text_table(titled("Clients", clients, most), ("client", "rows", "missing", "target"), clients[:most]),
    ]


def _values(column: dict[str, Any], most: int = 5) -> str:
    """Describe the values of a column: mean and standard deviation, or its levels."""
    if not column["used"]:
        return str(column["why"])
    dated = column["read_as"].startswith("date") and not column["read_as"].endswith("hh:mm")
    if dated and column["mean"] is not None and abs(column["mean"]) < 7e5:
        middle = datetime.date(1970, 1, 1) + datetime.timedelta(days=column["mean"])
        text = f"mean {middle.isoformat()}, sd {_short(column['sd'])} days"
    elif column["kind"] == "numeric":
        text = f"mean {_short(column['mean'])}, sd {_short(column['sd'])}"
    else:
        levels = column["levels"]
        text = f"{len(levels)} level{'s' * (len(levels) > 1)}: {', '.join(levels[:most])}"
        text += ", …" if len(levels) > most else ""
    return f"{text}; {column['why']}" if column["why"] else text


def _target(client: dict[str, Any], most: int = 4) -> str:
    """Describe a client's target: its mean, or its most frequent classes."""
    if "target_mean" in client:
        return f"mean {_short(client['target_mean'])}"
    shares = sorted(client["class_shares"].items(), key=lambda pair: -pair[1])
    if len(shares) <= most:
        shares = list(client["class_shares"].items())
    text = ", ".join(f"{name}: {_percent(share)}" for name, share in shares[:most])
    rest = sum(share for _, share in shares[most:])
    return f"{text}, others: {_percent(rest)}" if len(shares) > most else text


def _short(value: float | None) -> str:
    """Format a number with four significant digits, large ones without exponent."""
    if value is None:
        return "too large"
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e10 else f"{value:.4g}"


def _percent(share: float) -> str:
    """Format a share in per cent."""
    return f"{100 * share:.1f} %"
