"""The `coterie` command: it parses arguments, shows progress, prints, and calls the library.

A command's module is imported when the command is called, so that `coterie --help` does not wait for torch.
"""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from coterie import __version__
from coterie._core import extras
from coterie._core.errors import CoterieError
from coterie.cli import console

if TYPE_CHECKING:
    import click  # typer brings it, under its own name since 0.29

HEART = "heart_disease --client hospital --target sick"


class CommandEntry(NamedTuple):
    """Where a command is defined, an example of it, and the panel of `coterie --help` it is listed in."""

    module: str
    example: str
    panel: str


COMMANDS = {
    "demo": CommandEntry("demo", "demo --out runs/demo", "Train"),
    "compare": CommandEntry("training", f"compare {HEART} --json result.json", "Train"),
    "fit": CommandEntry("training", f"fit {HEART} --out heart", "Train"),
    "tune": CommandEntry("training", f"tune {HEART} --algorithm ditto --out tuning", "Train"),
    "adapters": CommandEntry("training", "adapters texts --model smollm2 --out runs/texts", "Train"),
    "resume": CommandEntry("training", "resume runs/heart", "Train"),
    "federate": CommandEntry("federate", "federate demo", "Train"),
    "report": CommandEntry("models", "report runs/ditto runs/local --out report.html", "After training"),
    "predict": CommandEntry("models", "predict runs/heart new.csv --out predictions.csv", "After training"),
    "export": CommandEntry("models", "export runs/ditto --client va --to onnx", "After training"),
    "adapt": CommandEntry(
        "models", "adapt runs/ditto new_clinic.csv --out runs/with_new_clinic", "After training"
    ),
    "advise": CommandEntry("planning", f"advise {HEART}", "Before training"),
    "plan": CommandEntry("planning", f"plan {HEART} --accuracy 0.001 --rounds 10", "Before training"),
    "privacy": CommandEntry("privacy", f"privacy {HEART} --epsilons 1,4", "Before training"),
    "data": CommandEntry("data", f"data describe {HEART}", "Before training"),
    "theory": CommandEntry("theory", "theory risk --gamma 2 --r2 1 --rho2 2 --noise 0.25", "Learn more"),
    "algorithms": CommandEntry("catalogue", "algorithms ditto", "Learn more"),
    "leaderboard": CommandEntry("leaderboard", "leaderboard run --out leaderboard", "Learn more"),
    "reproduce": CommandEntry("catalogue", "reproduce known-clusters/baselines --check", "Learn more"),
}


class LazyGroup(TyperGroup):
    """A group that lists its commands without importing them, and imports the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, in the order in which help lists them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Return a placeholder that knows what help shows of the command."""
        if name not in COMMANDS:
            return None
        entry = COMMANDS[name]
        return TyperCommand(name, help=_summary(entry.module, name), rich_help_panel=entry.panel)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that is called and import its module."""
        name, found, rest = super().resolve_command(ctx, args)
        return name, found if found is None or name is None else load_command(name), rest


def load_command(name: str) -> click.Command:
    """Import the module of a command and return it."""
    entry = COMMANDS[name]
    module = importlib.import_module(f"{__name__}.{entry.module}")
    if hasattr(module, "app"):
        return typer.main.get_command(module.app)
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command(name, epilog=f"Example: coterie {entry.example}")(getattr(module, name))
    return typer.main.get_command(single)


@functools.cache
def _summaries(module: str) -> dict[str, str]:
    """Return the first paragraph of each function's docstring, and the module's under "", without importing it."""
    tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))
    found: list[Any] = [tree, *(part for part in tree.body if isinstance(part, ast.FunctionDef))]
    return {getattr(part, "name", ""): (ast.get_docstring(part) or "").split("\n\n")[0] for part in found}


def _summary(module: str, name: str) -> str:
    """Return the help text of a command."""
    summaries = _summaries(module)
    return summaries.get(name) or summaries[""]


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Personalized federated learning: every client gets the best model it can have.",
    epilog="Example: coterie compare heart_disease --client hospital --target sick",
)


def _version(asked: bool) -> None:
    """Print the version and exit, if asked."""
    if asked:
        typer.echo(f"coterie {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Take the options that come before a command."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; an error that the user can fix is printed as one message, with exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        app(args=arguments)
    except CoterieError as problem:
        console.error(str(problem))
        sys.exit(2)
    except ImportError as problem:
        explained = extras.explain(problem)
        if explained is None:
            raise
        console.error(str(explained))
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as problem:
        console.error(f"{problem.filename or 'a file'}: {problem.strerror or problem}")
        sys.exit(2)
