"""The architecture page is true: the map, the walk through `fit`, the hops to the arithmetic, the files it names."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

import coterie
from coterie import Federation, models
from coterie._core import native
from coterie.algorithms import make
from coterie.models import fast
from coterie.models.fast import dual_sgd
from coterie.models.linear import Linear

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGE = Path(coterie.__file__).parent
MOST_HOPS = 6
Names = tuple[str, ...]
in_c = pytest.mark.skipif(native.library is None, reason="the C library is not built")


# Calls, as they happen


def place(code: CodeType) -> tuple[str, str] | None:
    """Return file and name of a function of the package; None for others, and for comprehensions."""
    if not code.co_filename.startswith(str(PACKAGE)) or code.co_name.startswith(("<listcomp", "<genexpr")):
        return None
    file = Path(code.co_filename).relative_to(PACKAGE).as_posix()
    return file, code.co_qualname.replace(".<locals>", "")


def short(file: str, name: str) -> str:
    """Return `Class.method`, `file.function`, or `native.file.function` for what calls C."""
    if name[:1].isupper():
        return name
    path = Path(file)
    return f"{'native.' * (path.parent.name == 'native')}{path.stem}.{name}"


@contextmanager
def every_call(see: Callable[[FrameType], None]) -> Iterator[None]:
    """Tell of every call of a Python function in this thread."""

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            see(frame)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)


def chains_from_train(fed: Federation, method: Any) -> set[Names]:
    """Return the functions on the stack below the algorithm's `train`, for every call of two rounds after two."""
    found: set[Names] = set()
    rounds = 0

    def see(frame: FrameType | None) -> None:
        if rounds < 2:  # the first measure and prepare
            return
        names: list[str] = []
        while frame is not None:
            at = place(frame.f_code)
            if at is not None:
                if at[0].startswith("algorithms/") and at[1].endswith(".train"):
                    found.add(tuple(reversed(names)))
                    return
                names.append(short(*at))
            frame = frame.f_back

    def watch(t: int, _: int) -> None:
        nonlocal rounds
        rounds = t

    with every_call(see):
        coterie.fit(fed, method, 4, evaluate_every=0, watch=watch)
    return found


# Every path to the arithmetic


class Odd(nn.Module):
    """Not a chain of layers, so no path that knows chains takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x.flatten(1)))
        return self.last(hidden * hidden.detach().abs())


def federation(model: models.Model) -> Federation:
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(n, 8, 8, generator=draw) for n in (12, 9, 15, 12, 4, 7)]
    ys = [torch.randint(0, 3, (len(x),), generator=draw) for x in xs]
    if isinstance(model, Linear):
        return Federation.from_arrays([x[:, 0] for x in xs], [y.float() for y in ys], model)
    return Federation.from_arrays(xs, ys, model)


PATHS: dict[str, tuple[Callable[[], Any], str, dict[str, Any], str]] = {
    "linear, all rows": (models.linear, "fedavg", {"batch": 0, "lr": 0.001}, ""),
    "softmax, all rows": (lambda: models.softmax(classes=3), "fedavg", {"batch": 0}, ""),
    "softmax, minibatches": (lambda: models.softmax(classes=3), "fedavg", {"batch": 4}, "none"),
    "softmax, dual SGD in C": (lambda: models.softmax(classes=3), "ditto", {"batch": 4}, ""),
    "MLP, stacked in C": (lambda: models.mlp((5,), classes=3, stacked=True), "fedavg", {"batch": 4}, ""),
    "CNN, clients in parallel": (
        lambda: models.cnn(channels=(2,), hidden=4, classes=3, stacked=False),
        "fedavg",
        {"batch": 4},
        "",
    ),
    "any module, vmap": (lambda: models.network(Odd, stacked=True), "fedavg", {"batch": 4}, ""),
    "any module, loop": (lambda: models.network(Odd, stacked=False), "fedavg", {"batch": 4}, "none"),
}


def table(heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading of the page."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert rows, f"no table below {heading!r}"
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


HOPS = {
    row[0]: (int(row[1]), tuple(re.findall(r"`([^`]+)`", row[2]))) for row in table("Hops to the arithmetic")
}


def test_the_page_counts_every_path() -> None:
    assert set(HOPS) == set(PATHS)
    for hops, chain in HOPS.values():
        assert hops == len(chain)


@in_c
@pytest.mark.parametrize("path", PATHS)
def test_hops_from_train_to_the_arithmetic(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain that the page shows is on the stack when the function at its end is called."""
    made, name, settings, chosen = PATHS[path]
    monkeypatch.setattr(dual_sgd, "FEWEST_PRODUCTS", 1)
    if chosen:
        monkeypatch.setenv(fast.VARIABLE, chosen)
    hops, chain = HOPS[path]
    found = {calls for calls in chains_from_train(federation(made()), make(name, **settings)) if calls}
    ends = {calls for calls in found if calls[-1] == chain[-1]}
    assert ends, f"{chain[-1]} is never called; the longest chain is {max(found, key=len)}"
    assert ends == {chain}
    assert hops <= MOST_HOPS


@in_c
def test_fit_walks_through_the_functions_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dual_sgd, "FEWEST_PRODUCTS", 1)
    called: list[tuple[str, str]] = []

    def see(frame: FrameType) -> None:
        at = place(frame.f_code)
        if at is not None:
            called.append(at)

    fed = federation(models.softmax(classes=3))
    with every_call(see):
        coterie.fit(fed, make("ditto", batch=4), 2, evaluate_every=1)
    at = 0
    for row in table("One call of `fit`"):
        step = row[0].strip("`"), row[1].strip("`")
        assert step in called[at:], f"{step} is not called after {called[at]}"
        at = called.index(step, at)


# The map and the files


def test_the_map_shows_the_layers_of_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = [re.split(r"\s*:\s*", layer) for layer in contracts["contracts"][0]["layers"]]
    svg = ElementTree.parse(ROOT / "docs" / "architecture.svg").getroot()
    space = {"s": "http://www.w3.org/2000/svg"}
    height = {
        str(group.get("id")): float(str(group.find("s:rect", space).get("y")))  # type: ignore[union-attr]
        for group in svg.findall("s:g", space)
    }
    assert set(height) == {name for layer in layers for name in layer}
    tops = [{height[name] for name in layer} for layer in layers]
    assert all(len(top) == 1 for top in tops), "packages of one layer are side by side"
    assert [min(top) for top in tops] == sorted(min(top) for top in tops)
    for group in svg.findall("s:g", space):
        assert group.find("s:text", space).text == group.get("id")  # type: ignore[union-attr]
    rooms = {row[0].strip("`") for row in table("The rooms")}
    assert rooms == set(height)


@pytest.mark.parametrize(
    "page", ["docs/architecture.md", "docs/speed.md", "docs/evidence/speed.md", "CONTRIBUTING.md"]
)
def test_files_and_tests_that_are_named_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    paths = re.findall(r"`((?:coterie|tests|docs|benchmarks)/[\w./+-]+)`", text)
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), f"{page}: {path}"
    for file, name in re.findall(r"`(tests/[\w/]+\.py)`, `(test_\w+)`", text):
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file} has no {name}"


def test_the_speed_page_lists_every_fast_path() -> None:
    section = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8").partition("\n## Fast paths\n")[2]
    listed = re.findall(r"^\| `([\w-]+)` \| ([\w ,]+) \|", section.partition("\n## ")[0], flags=re.MULTILINE)
    shown = {(name, operation) for name, operations in listed for operation in operations.split(", ")}
    assert shown == {(path.name, path.operation) for path in fast.PATHS}


def test_pages_link_to_the_map() -> None:
    for page in ("README.md", "CONTRIBUTING.md"):
        assert "docs/architecture.md" in (ROOT / page).read_text(encoding="utf-8"), page
    assert "architecture.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_one_class_name_is_one_class() -> None:
    found: dict[str, list[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        for name in re.findall(r"^class (\w+)", file.read_text(encoding="utf-8"), re.M):
            found.setdefault(name, []).append(str(file.relative_to(PACKAGE)))
    assert not {name: files for name, files in found.items() if len(files) > 1}


def test_the_seam_between_server_and_clients_is_typed() -> None:
    text = (PACKAGE / "engine" / "protocol.py").read_text(encoding="utf-8")
    assert not re.findall(r"\bAny\b|\b(?:get|has)attr\(", text)
