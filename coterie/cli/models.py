"""Commands for what comes after training: the report, predictions, and models that leave the run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.arguments import (
    JsonOption,
    RunArgument,
    TableArgument,
    find_table,
    require_place,
    write_json,
)
from coterie.errors import CoterieError, SettingError
from coterie.report import console


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="run folders, or folders that `coterie compare --out` made"),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="page to write; report.html in the first folder if not given"),
    ] = None,
) -> None:
    """One web page about one or more runs: who gained, who lost, who learns from whom, at what price.

    The page needs no network. Name a run of the method `local` too to see gains over training alone; one that
    lies beside the first run is found by itself.
    """
    from coterie.report.page import write_report

    require_place(out)
    console.show(f"Report written to {write_report(runs, out)}")


def predict(
    run: RunArgument,
    table: TableArgument,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CSV or Parquet file; printed as CSV if not given")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Predict new rows, each with its client's model.

    A client that was not in training gets the common model and a warning.
    """
    from coterie.report.tables import prediction_notes
    from coterie.runs import files
    from coterie.runs.predict import Predictor

    source = find_table(table)
    for place in (out, json):
        require_place(place, other_than=source)
    if out is not None and out.suffix not in (".csv", ".parquet", ".pq"):
        raise SettingError(f"--out {out}: give it a name that ends in .csv or .parquet")
    predictor = Predictor.load(run)
    predictions = predictor(source)
    console.notes(prediction_notes(predictions, predictor.client_column))
    write_json(json, predictions.to_dicts())
    if out is None:
        typer.echo(predictions.write_csv(), nl=False)
        return
    files.write_with(out, predictions.write_csv if out.suffix == ".csv" else predictions.write_parquet)
    console.show(f"{len(predictions)} predictions written to {out}")


def export(
    run: RunArgument,
    to: Annotated[str, typer.Option(metavar="FORMAT", help="safetensors, onnx, torchscript or csv")],
    client: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="whose model; the common model for newcomers if not given"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="file to write; in the run's folder if not given")
    ] = None,
) -> None:
    """Take a client's model away, with the preprocessing inside; csv is for linear models."""
    from coterie.runs.export import export as write

    require_place(out)
    console.show(f"Model of {client or 'newcomers'} written to {write(run, client, to, out)}")


def adapt(
    run: RunArgument,
    table: TableArgument,
    client: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="name of the new client, if the table has no client column"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="folder to make; in the run's folder if not given")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Give clients that were not in training their own models; nobody else trains again.

    The new folder serves `coterie predict` and `coterie export` for old and new clients.
    """
    from coterie.report.tables import adapted_table
    from coterie.runs.adapt import adapt as find_models
    from coterie.runs.folder import RunFolder

    require_place(json)
    source = find_table(table)
    place = run / "adapted" / Path(source).name.partition(".")[0] if out is None else out
    RunFolder.require_free(place)
    found = find_models(run, source, client)
    console.show(adapted_table(found), f"Models of old and new clients: {found.save(place, run)}")
    write_json(json, found.frame().to_dicts())


def report_beside(folder: Path) -> None:
    """Write report.html into a folder that has none, where plotly and jinja2 are installed."""
    if not (folder / "report.html").exists() and all(
        importlib.util.find_spec(name) for name in ("plotly", "jinja2", "polars")
    ):
        from coterie.report.page import write_report

        try:
            console.show(f"Report: {write_report([folder])}")
        except CoterieError as problem:
            console.notes([f"No report was written: {problem}"])
