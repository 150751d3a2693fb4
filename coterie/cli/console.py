"""Print results on standard output; notes, errors and progress on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape

_WIDEST = 10_000


def width() -> int:
    """Return the columns of the terminal; 80 if there is none."""
    return Console().width


def show(*parts: Any) -> None:
    """Print tables and text without wrapping text or truncating numbers, even if a table becomes too wide."""
    for part in parts:
        needed = 0 if isinstance(part, str) else Console(width=_WIDEST).measure(part).minimum
        console = Console(highlight=False, markup=False, width=max(width(), needed))
        console.print(part, soft_wrap=isinstance(part, str))


def error(message: str) -> None:
    """Print an error."""
    _say("[bold red]Error:[/]", message)


def notes(messages: list[str]) -> None:
    """Print notes."""
    for message in messages:
        _say("[yellow]Note:[/]", message)


def _say(label: str, message: str) -> None:
    """Print a labelled message on standard error."""
    Console(stderr=True, highlight=False).print(f"{label} {escape(message)}", soft_wrap=True)


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar on terminals; yield a function that takes what is being done, how much, and of how much."""
    # Here, because `coterie --help` shows none and would wait for it.
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)

        def watch(what: str, done: int, total: int) -> None:
            bar.update(task, description=escape(what), completed=done, total=total)

        yield watch
