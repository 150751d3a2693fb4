"""The pages that list theorems name functions and tests that exist, and leave no statement out."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from coterie.theory.crossover import METHODS

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "docs" / "flix-theory.md", ROOT / "docs" / "asymptotics-theory.md"]


def names(page: Path) -> list[str]:
    """What a page's tables name in backticks in their last two columns."""
    rows = [
        line.split(" | ") for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")
    ]
    return [name for row in rows for cell in row[-2:] for name in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_name_exists(page):
    found = names(page)
    assert len(found) > 20
    for name in found:
        path, colons, test = name.partition("::")
        if colons:
            tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
            assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name
        else:
            module, *rest = name.split(".")
            thing = importlib.import_module(f"coterie.theory.{module}")
            for part in rest:
                thing = getattr(thing, part)


def test_no_statement_of_flix_is_missing():
    text = PAGES[0].read_text(encoding="utf-8")
    labels = [line.split(" | ")[0].strip("| ") for line in text.splitlines() if line.startswith("| ")]
    for kind, count in (("Theorem", 9), ("Corollary", 6)):
        assert [f"{kind} {k}" for k in range(1, count + 1)] == [one for one in labels if one.startswith(kind)]
    assert [f"Proposition {k}" for k in range(3, 7)] == [
        one for one in labels if one.startswith("Proposition ")
    ]
    assert "Propositions 1, 2" in labels


def test_no_theorem_or_risk_of_the_asymptotics_is_missing():
    text = PAGES[1].read_text(encoding="utf-8")
    assert all(f"| Theorem {k} |" in text for k in range(1, 5))
    listed = {name for name in names(PAGES[1]) if "::" not in name}
    assert {
        f"{function.__module__.rpartition('.')[2]}.{function.__name__}" for function in METHODS.values()
    } <= listed


def test_no_public_function_on_flix_is_unlisted():
    listed = {name for name in names(PAGES[0]) if "::" not in name}
    for module in ("flix", "flix_steps", "flix_bounds", "flix_nonconvex"):
        tree = ast.parse((ROOT / "coterie" / "theory" / f"{module}.py").read_text(encoding="utf-8"))
        public = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) if node.name[0] != "_"}
        assert {f"{module}.{name}" for name in public} - listed <= {"flix.diameter", "flix_steps.step"}
