"""What the pages of the documentation show is run, and the commands they mention exist."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import coterie
from coterie.data import bundled

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
SHORT = {
    "compare": ["--rounds", "3", "--seeds", "1", "--budget", "1"],
    "fit": ["--rounds", "3"],
    "advise": ["--probe", "2"],
    "tune": ["--rounds", "3", "--trials", "2"],
    "reproduce": ["--quick", "--jobs", "1"],
}
SLOW = {
    "reproduce.md",
    "metrics.md",
    "models.md",
    "coming-from.md",
    "tutorial.md",
    "auto.md",
    "choose.md",
    "sklearn.md",
    "leaderboard.md",
    "survival.md",
    "time.md",
    "workers.md",
    "verdicts.md",
    "speed.md",
    "privacy.md",
    "recipes.md",
    "export.md",
    "algorithms/hierarchical.md",
    "algorithms/cobo.md",
    "algorithms/pfl-tc.md",
    "algorithms/flix.md",
}


@dataclass(frozen=True)
class Piece:
    """Something to run: a command, or a block of Python."""

    kind: str
    text: str


BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^>]*) -->\n\n?)?"
    r"(?:^```(?P<language>\w*)\n(?P<fenced>.*?)^```$|(?P<indented>(?:^    [^\n]*\n)+))",
    flags=re.MULTILINE | re.DOTALL,
)


def pieces(text: str) -> Iterator[Piece]:
    """What a page tells the reader to run, in its order; `<!-- not run here: why -->` above a block leaves it out."""
    for block in BLOCK.finditer(text):
        if (block["mark"] or "").startswith("not run here: "):
            continue
        if block["language"] == "python":
            yield Piece("python", block["fenced"])
        elif block["language"] in (None, "", "sh"):
            lines = (block["indented"] or block["fenced"] or "").replace("\\\n", " ")
            for line in lines.splitlines():
                if line.strip().startswith("coterie "):
                    yield Piece("command", line.partition(" #")[0].strip())


RUNNABLE = [page for page in PAGES if any(pieces(page.read_text(encoding="utf-8")))]


def name(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


# What the pages take for granted


def visits(clinics: tuple[str, ...]) -> str:
    lines = ["clinic,age,sex,outcome"]
    for k in range(30 * len(clinics)):
        age = 30 + k % 41
        lines.append(f"{clinics[k % len(clinics)]},{age},{k % 2},{int((age + 7 * k) % 60 > 30)}")
    return "\n".join(lines) + "\n"


def ratings() -> str:
    lines = ["department,lecturer,hours,rating"]
    for k in range(120):
        lines.append(f"d{k % 3},l{k % 6},{(k * 7) % 11},{(k * 13) % 17 / 4 + k % 6}")
    return "\n".join(lines) + "\n"


def evaluations() -> str:
    lines = ["student,lecturer,department,hours,rating"]
    for k in range(240):
        lecturer = (k * 5 + k // 12) % 8
        rating = (k * 13) % 17 / 8 + lecturer % 3 + k % 12 / 6
        lines.append(f"s{k % 12},l{lecturer},d{lecturer % 3},{(k * 7) % 11},{rating}")
    return "\n".join(lines) + "\n"


EXPERIMENT = """
title = "Mine"
source = "nobody (2026)"
seeds = [0, 1]
[data.generate]
name = "hierarchical_linear"
clusters = 2
clients = 2
rows = 10
[model]
name = "linear"
[[runs]]
key = "local"
algorithm = "local"
rounds = 5
[[rows]]
label = "alone"
run = "local"
metric = "distance"
at_least = 0.0
[quick]
seeds = [0]
"""


def factory() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))


def clients(count: int) -> tuple[list[Any], list[Any]]:
    import torch

    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(20, 2, generator=draw) for _ in range(count)]
    return xs, [(x[:, 0] > 0).long() for x in xs]


def small(model: Any) -> coterie.Federation:
    """Four clients with twenty rows each."""
    names = [f"client {k}" for k in range(4)]
    return coterie.Federation.from_arrays(*clients(4), model, names=names, split=(0.6, 0.2, 0.2))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tables and runs of which the pages speak."""
    from coterie.train.export import export

    folder = tmp_path_factory.mktemp("world")
    tables = {
        "visits.csv": visits(("north clinic", "south", "va")),
        "new_visits.csv": visits(("north clinic", "south", "va")),
        "new_clinic.csv": visits(("west",)),
        "ratings.csv": ratings(),
        "evaluations.csv": evaluations(),
        "heart.csv": bundled.path("heart_disease").read_text(encoding="utf-8"),
        "my-experiment.toml": EXPERIMENT,
    }
    for file, text in tables.items():
        (folder / file).write_text(text, encoding="utf-8")
    fed = coterie.Federation.from_table(folder / "visits.csv", client="clinic", target="outcome")
    for method in ("ditto", "cobo", "local"):
        coterie.fit(fed, method, 3, folder / "runs" / method)
    coterie.compare(
        folder / "visits.csv",
        "clinic",
        "outcome",
        seeds=1,
        rounds=2,
        budget=1,
        out=folder / "runs" / "visits",
    )
    coterie.fit(small(coterie.models.network(factory)), "fedavg", 2, folder / "runs" / "mine")
    export(folder / "runs" / "ditto", "va", "onnx", folder / "va.onnx")
    return folder


def names_for_python(page: str) -> dict[str, Any]:
    """What snippets use without defining it."""
    import numpy as np
    import torch

    xs, ys = clients(4)
    X, y = torch.cat(xs).numpy(), torch.cat(ys).numpy()
    hospital = np.repeat(["a", "b", "c", "d"], 20)
    own = page == "export.md"  # where the module is the reader's own
    fed = small(coterie.models.network(factory) if own else coterie.models.logistic(intercept=True))
    return {
        "__name__": "docs",
        "coterie": coterie,
        "xs": xs,
        "ys": ys,
        "fed": fed,
        "factory": factory,
        "MyNet": lambda width: factory(),
        "table": "visits.csv",
        **{"X": X, "y": y, "hospital": hospital, "X_new": X, "y_new": y, "hospital_new": hospital},
    }


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=[pytest.mark.slow] * (name(p) in SLOW), id=name(p)) for p in RUNNABLE],
)
def test_what_a_page_shows_runs(
    page: Path, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    """Commands and Python in the order of the page, with few rounds; the tutorial starts from nothing at all."""
    import sklearn

    folder = tmp_path / "here"
    if page.name == "tutorial.md":
        folder.mkdir()
    else:
        shutil.copytree(world, folder)
    monkeypatch.chdir(folder)
    space = names_for_python(page.name) if page.name != "tutorial.md" else {"__name__": "tutorial"}
    made: set[str] = set()
    with sklearn.config_context():
        for piece in pieces(page.read_text(encoding="utf-8")):
            if piece.kind == "python":
                text = re.sub(r"\brounds=\d+", "rounds=3", piece.text)
                exec(compile(text, f"{page.name}: {text.splitlines()[0]}", "exec", dont_inherit=True), space)
                continue
            words = shlex.split(piece.text)[1:]
            words += SHORT.get(words[0], [])
            out = words[words.index("--out") + 1] if "--out" in words else ""
            if out and out not in made and Path(out).is_dir():
                shutil.rmtree(out)  # it is of the world that other pages take for granted
            made.add(out)
            words = [word for word in words if word != "--check"]  # few rounds do not reach published numbers
            done = command(*words)
            assert done.code == 0, f"{piece.text}\n{done.out}\n{done.err}"


def test_commands_are_found_and_reasons_are_given() -> None:
    """The parser sees all three kinds of block, and leaves out only what says why."""
    page = "a\n\n    coterie algorithms  # list\n\n```sh\ncoterie fit a \\\n  --out b\n```\n\n```python\nx = 1\n```\n"
    assert [piece.text for piece in pieces(page)] == [
        "coterie algorithms",
        "coterie fit a    --out b",
        "x = 1\n",
    ]
    assert not list(pieces("<!-- not run here: why -->\n\n    coterie federate demo\n"))
    assert list(pieces("<!-- something -->\n\n    coterie federate demo\n"))
    for page_text in (path.read_text(encoding="utf-8") for path in PAGES):
        for reason in re.findall(r"<!-- not run here: (.*?) -->", page_text):
            test = re.search(r"tests/\S+\.py", reason)
            assert test and (ROOT / test[0]).exists(), f"name the test that runs it instead: {reason}"


def mentioned(text: str) -> Iterator[str]:
    """Commands anywhere on a page, also those in the middle of a sentence and those that are not run."""
    for span in re.findall(r"`(coterie [^`]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)):
        yield " ".join(span.split())
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip().startswith("coterie "):
            yield line.partition(" #")[0].strip()


def test_commands_that_are_mentioned_exist() -> None:
    """Whatever a page calls a command is one, and takes the options shown."""
    from coterie.cli import COMMANDS, load_command

    for page in [ROOT / "README.md", *PAGES]:
        for text in mentioned(page.read_text(encoding="utf-8")):
            words = text.split()[1:]
            if words[0] in ("--help", "--version"):
                continue
            assert words[0] in COMMANDS, f"{page.name}: no command in `{text}`"
            at: Any = load_command(words.pop(0))
            while hasattr(at, "commands") and words and not words[0].startswith("-"):
                assert words[0] in at.commands, f"{page.name}: no command in `{text}`"
                at = at.commands[words.pop(0)]
            options = (option for one in at.params for option in (*one.opts, *one.secondary_opts))
            known = {*options, "--help"}
            shown = {word.strip("[],") for word in words if word.startswith("--")}
            assert shown <= known, f"{page.name}: `{text}` has no {sorted(shown - known)}"
