"""GitHub's workflows, as far as they can be tried elsewhere: what their steps call is there, and nothing is movable."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="needs PyYAML")

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
OF_RUNNERS = {"git", "gh", "sed", "test", "echo", "rm", "apt-get", "installed/bin/python"}
INSTALLED = {
    "uv": "uv",
    "cyclonedx-py": "cyclonedx-bom",
}  # the package of a command that a step before installs
MODULES = {"pip", "venv", "pytest", "cibuildwheel", "release.ready"}


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    return found


def commands(job: dict[str, Any]) -> Iterator[str]:
    """Yield the commands of a job, for every cell of its matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    for cell in itertools.product(*matrix.values()):
        values = dict(zip(matrix, cell, strict=True))
        for step in job["steps"]:
            text = step.get("run", "")
            for key, value in values.items():
                text = text.replace(f"${{{{ matrix.{key} }}}}", str(value))
            assert "${{" not in text, f"{text}: a value of GitHub in a script belongs into `env`"
            yield from text.splitlines()


CASES = [(path, name) for path in WORKFLOWS for name in jobs(path)]


@pytest.mark.parametrize(("path", "name"), CASES, ids=lambda value: getattr(value, "stem", value))
def test_every_step_calls_what_there_is(path: Path, name: str) -> None:
    job = jobs(path)[name]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    seen = ""
    for line in commands(job):
        words = re.sub(r"^\w+=\$\((.*)\)$", r"\1", line.strip()).split()
        if words[0] == "make":
            assert words[1] in targets, f"{line}: the Makefile has no such target"
        elif words[:2] == ["python", "-m"]:
            assert words[2] in MODULES, line
        elif words[0] in INSTALLED:
            assert f"pip install {INSTALLED[words[0]]}" in seen, f"{line}: nothing has installed it"
        else:
            assert words[0] in OF_RUNNERS, line
        for file in re.findall(r"[\w./-]+\.(?:py|toml|txt|md)\b", line):
            assert (ROOT / file).exists() or f"> {file}" in seen + line, f"{line}: there is no {file}"
        seen += line + "\n"


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_scripts_are_scripts(path: Path) -> None:
    for job in jobs(path).values():
        for step in job["steps"]:
            done = subprocess.run(["bash", "-n"], input=step.get("run", ""), capture_output=True, text=True)
            assert not done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_have_the_inputs_they_take(path: Path) -> None:
    """A tag can be moved to other code; a commit cannot. The inputs are those of the versions that are named."""
    takes = {
        "actions/checkout": {"fetch-depth", "persist-credentials"},
        "actions/setup-python": {"python-version", "cache", "cache-dependency-path"},
        "actions/upload-artifact": {"name", "path", "if-no-files-found"},
        "actions/download-artifact": {"name", "path", "pattern", "merge-multiple"},
        "actions/attest-build-provenance": {"subject-path"},
        "actions/attest-sbom": {"subject-path", "sbom-path"},
        "pypa/gh-action-pypi-publish": {"attestations"},
    }
    text = path.read_text(encoding="utf-8")
    for line in re.findall(r"uses: (.+)", text):
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", line), line
    pins = {line.partition("@")[0]: line for line in re.findall(r"uses: (.+)", text)}
    assert set(re.findall(r"uses: (.+)", text)) == set(pins.values()), "an action in two versions"
    for job in jobs(path).values():
        for step in job["steps"]:
            if "uses" in step:
                assert set(step.get("with", {})) <= takes[step["uses"].partition("@")[0]], step
            if step.get("uses", "").startswith("actions/checkout@"):
                pushes = "git push" in str(job)
                assert step["with"].get("persist-credentials") is pushes, (
                    "a token is left only where it is used"
                )


def test_what_one_job_takes_another_has_made() -> None:
    """Artifacts by name, and files in them."""
    release = jobs(ROOT / ".github" / "workflows" / "release.yml")
    for name, job in release.items():
        needed = job.get("needs", [])
        before = [release[one] for one in ([needed] if isinstance(needed, str) else needed)]
        made = [
            step["with"]["name"]
            for one in before
            for step in one["steps"]
            if "upload" in step.get("uses", "")
        ]
        for step in job["steps"]:
            if "download-artifact" in step.get("uses", ""):
                wanted = step["with"].get("name") or step["with"]["pattern"].rstrip("*")
                assert any(one.startswith(wanted) for one in made), (name, wanted)


def test_cibuildwheel_has_the_pythons_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    named = {f"cp3{one.rpartition('.')[2]}-*" for one in project["project"]["classifiers"] if ":: 3." in one}
    assert set(project["tool"]["cibuildwheel"]["build"].split()) == named
