"""With the core alone: a command that needs an extra says how to install it, and leaves nothing half-done."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import coterie
from coterie.algorithms import make

if TYPE_CHECKING:
    from tests.conftest import Command, WriteTable

OPTIONAL = (
    "PIL", "cryptography", "flwr", "gguf", "httpx", "mlflow", "onnx", "onnxruntime", "onnxscript", "optuna", "pandas",
    "peft", "statsmodels", "tensorboard", "transformers", "uvicorn",
)  # fmt: skip
LINEAR, NETWORK, TEXTS, OUT = "linear", "network", "texts", "out"
TABLE = ("table.csv", "--client", "site", "--target", "y")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, write_table: WriteTable) -> Path:
    """A table, a run of it with the usual model and one with a network, and texts."""
    folder = tmp_path_factory.mktemp("core")
    table = write_table(folder / "table.csv", "binary", 60)
    for name, model in ((LINEAR, None), (NETWORK, coterie.models.mlp(hidden=(2,)))):
        fed = coterie.Federation.from_table(table, "site", "y", model=model)
        coterie.fit(fed, make("local"), 1, folder / name)
    for language in ("de", "nl"):
        (folder / TEXTS / language).mkdir(parents=True)
        (folder / TEXTS / language / "a.txt").write_text("een boom " * 40)
    return folder


@pytest.fixture
def core_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the package's own requirements can be imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] in OPTIONAL]:
        monkeypatch.delitem(sys.modules, name)
    for name in OPTIONAL:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "coterie.deploy.flower", raising=False)


@pytest.mark.usefixtures("core_alone")
@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("flower", ("federate", "demo", "--out", OUT)),
        ("flower", ("federate", "init", OUT, "--node", "a")),
        ("export", ("export", LINEAR, "--client", "south", "--to", "onnx", "--out", OUT)),
        ("export", ("export", NETWORK, "--client", "south", "--to", "onnx", "--out", OUT)),
        ("tune", ("tune", *TABLE, "--algorithm", "ditto", "--out", OUT)),
        ("llm", ("adapters", TEXTS, "--model", "smollm2", "--out", OUT)),
        ("track", ("fit", *TABLE, "--track", "tensorboard", "--out", OUT)),
        ("track", ("fit", *TABLE, "--track", "mlflow", "--out", OUT)),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[:2]),
)
def test_a_command_names_the_extra_it_lacks(
    extra: str, words: tuple[str, ...], world: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(world)
    done = command(*words)
    assert done.code == 2
    assert f"pip install coterie[{extra}]" in done.err.replace("'", "").replace("\n", " ")
    assert not Path(OUT).exists()


@pytest.mark.usefixtures("core_alone")
def test_the_core_compares_and_predicts(
    world: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(world)
    small = (
        "--algorithms",
        "ditto",
        "--rounds",
        "1",
        "--seeds",
        "1",
        "--budget",
        "1",
        "--out",
        tmp_path / "all",
    )
    assert command("compare", *TABLE, *small).code == 0
    assert command("predict", LINEAR, "table.csv", "--out", tmp_path / "answers.csv").code == 0
