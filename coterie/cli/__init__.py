"""The `coterie` command. Thin: it parses, shows progress, prints, and leaves the work to the library."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from coterie import __version__
from coterie.cli import catalogue, federate, models, planning, training
from coterie.errors import CoterieError
from coterie.report import console

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Personalized federated learning: every client gets the best model it can have.",
    epilog="Example: coterie compare heart_disease --client hospital --target sick",
)
data_app = typer.Typer(
    no_args_is_help=True,
    help="Look at a table before training.",
    epilog="Example: coterie data describe heart_disease --client hospital --target sick",
)
HEART = "heart_disease --client hospital --target sick"
COMMANDS: dict[str, dict[Callable[..., None], str]] = {
    "Train": {
        training.compare: f"compare {HEART} --json result.json",
        training.fit: f"fit {HEART} --out heart",
        training.tune: f"tune {HEART} --algorithm ditto --out tuning",
        training.adapters: "adapters texts --model smollm2 --out runs/texts",
        training.resume: "resume runs/heart",
    },
    "Use what was trained": {
        models.report: "report runs/ditto runs/local --out report.html",
        models.predict: "predict runs/heart new.csv --out predictions.csv",
        models.export: "export runs/ditto --client va --to onnx",
        models.adapt: "adapt runs/ditto new_clinic.csv --out runs/with_new_clinic",
    },
    "Before training": {
        planning.advise: f"advise {HEART}",
        planning.plan: f"plan {HEART} --accuracy 0.001 --rounds 10",
    },
    "Learn more": {
        catalogue.algorithms: "algorithms ditto",
        catalogue.reproduce: "reproduce known-clusters/baselines --check",
    },
}
for panel, commands in COMMANDS.items():
    for command, example in commands.items():
        app.command(epilog=f"Example: coterie {example}", rich_help_panel=panel)(command)
data_app.command(epilog=f"Example: coterie data describe {HEART}")(planning.describe)
app.add_typer(data_app, name="data", rich_help_panel="Before training")
app.add_typer(federate.app, name="federate", rich_help_panel="Train")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"coterie {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """Entry point: what the user can put right is printed in one message, with exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        app(args=arguments)
    except CoterieError as problem:
        console.error(str(problem))
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as problem:
        console.error(f"{problem.filename or 'a file'}: {problem.strerror or problem}")
        sys.exit(2)
