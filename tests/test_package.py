"""What importing the package does to the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("given", "expected"), [(None, "PASSIVE"), ("active", "active")])
def test_threads_that_wait_sleep_unless_told_otherwise(given: str | None, expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {} if given is None else {"OMP_WAIT_POLICY": given}
    code = "import sys, os, coterie; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [expected, "False"]


@pytest.mark.slow
def test_methods_and_comparisons_load_when_they_are_used() -> None:
    """After installing without bytecode, scipy.stats alone takes two seconds of a first `coterie compare`."""
    code = (
        "import sys, coterie.cli.training, coterie.algorithms as a; a.all_algorithms(); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"scipy.stats", "scipy.optimize", "scipy.cluster", "scipy.spatial", "scipy.sparse"}
    assert not (heavy | {"sklearn", "plotly", "jinja2", "polars", "pandas"}) & set(done.stdout.split())
