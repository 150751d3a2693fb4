"""What the API pages list is documented in full: every parameter has a line, and an example is run as a doctest."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parent.parent / "docs"
DONE = (
    "coterie._core.",
    "coterie.data.",
    "coterie.theory.",
    "coterie.engine.replies",
    "coterie.engine.state",
)
DIRECTIVE = re.compile(r"^::: (\S+)\n((?:    .*\n)*)", re.MULTILINE)


def listed() -> Iterator[tuple[str, Any]]:
    """Functions and classes behind the directives of the API pages, of the rooms whose docstrings are done."""
    for page in ("api.md", "api-theory.md"):
        for path, options in DIRECTIVE.findall((DOCS / page).read_text(encoding="utf-8") + "\n"):
            if not path.startswith(DONE):
                continue
            try:
                module, names = importlib.import_module(path), re.search(r"members: \[(.*?)\]", options)
            except ModuleNotFoundError:
                home, _, name = path.rpartition(".")
                yield path, getattr(importlib.import_module(home), name)
                continue
            own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == path]
            chosen = names[1].split(", ") if names else [name for name in own if not name.startswith("_")]
            for name in chosen:
                value = getattr(module, name)
                if inspect.isclass(value) or inspect.isfunction(value):
                    yield f"{path}.{name}", value


LISTED = dict(listed())


def test_the_pages_list_what_there_is():
    assert {"coterie.data.readers.libsvm", "coterie.theory.flix_steps.diana_step"} <= LISTED.keys() and len(
        LISTED
    ) > 90


@pytest.mark.parametrize("name", LISTED)
def test_what_is_listed_has_a_run_example(name):
    text = inspect.getdoc(LISTED[name]) or ""
    assert "\nExamples\n--------\n" in text and ">>> " in text, f"{name} has no Examples section"


@pytest.mark.parametrize("name", [name for name, value in LISTED.items() if inspect.isfunction(value)])
def test_every_parameter_has_a_line(name):
    parameters = list(inspect.signature(LISTED[name]).parameters)
    text = inspect.getdoc(LISTED[name]) or ""
    if len(parameters) < 2 and "\nParameters\n" not in text:
        return  # one parameter, which the summary names
    section = text.partition("\nParameters\n")[2].partition("\nReturns\n")[0]
    missing = [one for one in parameters if not re.search(rf"^\**{re.escape(one)}$", section, re.MULTILINE)]
    assert not missing, f"{name}: no line for {missing}"
