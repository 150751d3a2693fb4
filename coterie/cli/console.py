"""Print results on standard output; notes, errors and progress on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment

from coterie._core.printable import visible

_WIDEST = 10_000


def width() -> int:
    """Return the columns of the terminal; 80 if there is none."""
    return Console().width


@dataclass(frozen=True)
class _Visible:
    """A table whose cells cannot send commands to the terminal: what cannot be seen is written as an escape."""

    table: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self.table, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def show(*parts: Any) -> None:
    """Print tables and text without wrapping text or truncating numbers, even if a table becomes too wide.

    Names and cells of a table may come from anywhere: square brackets are no markup, and control characters are shown.
    """
    for part in parts:
        text = isinstance(part, str)
        needed = 0 if text else Console(width=_WIDEST, markup=False).measure(part).minimum
        console = Console(highlight=False, markup=False, width=max(width(), needed))
        console.print(visible(part) if text else _Visible(part), soft_wrap=text)


def error(message: str) -> None:
    """Print an error."""
    _say("[bold red]Error:[/]", message)


def notes(messages: list[str]) -> None:
    """Print notes."""
    for message in messages:
        _say("[yellow]Note:[/]", message)


def _say(label: str, message: str) -> None:
    """Print a labelled message on standard error."""
    Console(stderr=True, highlight=False).print(f"{label} {escape(visible(message))}", soft_wrap=True)


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
