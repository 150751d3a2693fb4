"""A worker: it reads a cell per line from standard input, runs it, writes its file, and answers with a line."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

from coterie._core import files
from coterie.leaderboard.cell import measure
from coterie.leaderboard.plan import Job


def main(folder: Path, data_files: str | None) -> None:
    """Run cells until standard input ends, as it does when the process that started this one is gone."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a method prints is no answer
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        job = Job.from_json(json.loads(line))
        record = measure(job, data_files)
        files.write_json(job.place(folder), record)
        print(json.dumps({"status": record["status"]}), file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] or None)
