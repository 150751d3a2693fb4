"""Show the progress of a run on nodes, then its summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from coterie._core import files
from coterie.cli import console
from coterie.cli.arguments import write_json
from coterie.cli.models import report_beside
from coterie.deploy import advice_job, federation_folder


def follow(folder: Path, job: Path, json: Path | None) -> None:
    """Show progress until the run ends, then its summary."""
    shown = 0
    try:
        with console.progress() as bar:

            def watch(told: dict[str, Any]) -> None:
                nonlocal shown
                fresh = federation_folder.notes(job)[shown:]
                shown += len(fresh)
                console.notes(fresh)
                if told:
                    here = f", {told['here']} of {told['nodes']} nodes" if told.get("here") else ""
                    bar(f"{job.name}: {told['state']}{here}", told["round"], told["rounds"])

            federation_folder.follow(job, watch)
    except KeyboardInterrupt:
        console.notes([f"The run continues. Follow it: coterie federate attach {folder} --run {job.name}"])
        raise typer.Exit(130) from None
    summary = job / "summary.txt"
    if summary.exists():
        console.show(summary.read_text(encoding="utf-8").rstrip())
    out = files.read_json(job / "request.json")["out"]
    console.show(f"Run folder: {out}")
    if not (Path(out) / advice_job.FILE).exists():
        report_beside(Path(out))
    if json is not None:
        write_json(json, files.read_json(job / "summary.json"))
