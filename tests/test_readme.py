"""What README and the examples show is run here."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import coterie

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture
def visits(tmp_path, monkeypatch):
    """A table such as the README speaks of."""
    lines = ["clinic,age,smoker,outcome"]
    for k in range(90):
        clinic, age = ("north clinic", "south", "east")[k % 3], 30 + k % 41
        lines.append(f"{clinic},{age},{'yes' if k % 4 else 'no'},{int((age + 7 * k) % 60 > 30)}")
    for name in ("visits.csv", "new_visits.csv"):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def test_python_from_the_readme_runs(visits, monkeypatch, capsys):
    compare = coterie.compare
    monkeypatch.setattr(
        coterie, "compare", lambda *a, **k: compare(*a, **k, seeds=1, rounds=3, budget=1), raising=False
    )
    space: dict[str, object] = {}
    exec(BLOCKS[0].replace("rounds=200", "rounds=5"), space)
    assert space["run"].personal.shape[0] == 3 and "training alone" in capsys.readouterr().out


@pytest.mark.slow
def test_algorithm_from_the_readme_keeps_its_promises():
    space: dict[str, object] = {"__name__": "readme"}
    exec(BLOCKS[1], space)
    assert len(BLOCKS[1].strip().splitlines()) <= 40
    coterie.check_algorithm(space["SharedPlusOffset"]())


@pytest.mark.slow
def test_commands_from_the_readme_run(visits, command):
    commands = [line.strip() for line in README.splitlines() if line.startswith("    coterie ")]
    assert len(commands) == 4
    for line in commands:
        words = line.split()[1:]
        words += ["--rounds", "3"] if words[0] in ("compare", "fit") else []
        words += ["--seeds", "1", "--budget", "1"] if words[0] == "compare" else []
        done = command(*words)
        assert done.code == 0, done.err


def test_links_in_the_documentation_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            file = page.parent / target
            built = file.parent.name == "gallery" and file.with_suffix(".png").exists()  # with the site
            assert target.startswith("http") or built or file.exists(), f"{page.name}: {target}"


def test_every_algorithm_has_its_page():
    from coterie.algorithms import all_algorithms

    for name in all_algorithms():
        assert (ROOT / "docs" / "algorithms" / f"{name}.md").exists(), name


EXAMPLES = {path.name for path in (ROOT / "examples").glob("*.py")}
ELSEWHERE = {"languages.py"}  # needs texts and a model: tests/language/test_methods.py


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EXAMPLES - ELSEWHERE))
def test_example_runs(name):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
