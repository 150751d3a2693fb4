"""What is published: metadata, workflows, and builds that repeat to the bit (`make release-check` does all of it)."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import coterie
from coterie._core.extras import EXTRAS
from coterie.cli import COMMANDS
from release import elsewhere, install, lock, ready, smoke

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    """The build hooks, which need hatchling."""
    pytest.importorskip("hatchling", reason="the build backend, which coterie[test] brings")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_command_and_extra_is_tried_after_installing() -> None:
    assert {step.words[0] for step in smoke.STEPS if step.words} >= set(COMMANDS)
    assert {step.extra for step in smoke.STEPS} - {""} == set(EXTRAS)
    assert set(install.extras()) == set(EXTRAS) - {"ray"}  # large: only the sentence that names it is tried


def test_continuous_integration_runs_what_the_script_runs() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    here = re.search(r"for target in ([^;]+);", script)
    there = re.search(r"target: \[([^\]]+)\]", workflow)
    assert here is not None and there is not None
    assert here[1].split() == there[1].split(", ")
    classified = {one.rpartition(" ")[2] for one in PROJECT["classifiers"] if "Python :: 3." in one}
    assert classified == set(re.findall(r'"(3\.\d+)"', workflow.partition("python: [")[2].partition("]")[0]))


@pytest.mark.parametrize(
    "name", [".github/workflows/ci.yml", ".github/workflows/release.yml", "CITATION.cff"]
)
def test_files_for_machines_can_be_read(name: str) -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    found = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
    if name == "CITATION.cff":
        assert len(found["references"]) == 5 and found["license"] == PROJECT["license"]
        assert coterie.__version__.partition(".dev")[0] == found["version"]
        assert [author["name"] for author in found["authors"]] == [one["name"] for one in PROJECT["authors"]]
    elif name.endswith("release.yml"):
        publish = found["jobs"]["publish"]
        assert publish["permissions"]["id-token"] == "write" and "secrets." not in str(found)
        assert set(publish["needs"]) == set(found["jobs"]) - {"publish"}


RELATIVE = re.compile(r"\]\((?!https?://|#)")


def published(repository: str) -> tuple[dict[str, str], str]:
    """Return project URLs and README as the build backend makes them, if pyproject.toml names this address."""
    pytest.importorskip("hatchling", reason="the build backend, which coterie[test] brings")
    from hatchling.metadata.core import ProjectMetadata
    from hatchling.plugin.manager import PluginManager

    whole = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    whole["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"] = repository
    core = ProjectMetadata(str(ROOT), PluginManager(), whole).core
    assert not core.dynamic
    return core.urls, core.readme


def test_pypi_shows_links_that_lead_to_the_files_of_the_version() -> None:
    urls, readme = published("https://example.org/a/b")
    there = f"https://example.org/a/b/blob/v{coterie.__version__}/"
    assert urls["Repository"] == "https://example.org/a/b" and urls["Changelog"] == f"{there}CHANGELOG.md"
    assert not RELATIVE.search(readme) and f"[docs/verdicts.md]({there}docs/verdicts.md)" in readme
    files = [
        link for link in (*urls.values(), *re.findall(r"\]\(([^)]+)\)", readme)) if link.startswith(there)
    ]
    assert len(files) > 20
    for link in files:
        assert ROOT.joinpath(link.removeprefix(there).partition("#")[0]).exists(), link


def test_pypi_shows_no_link_while_the_address_is_unknown() -> None:
    urls, readme = published("")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert RELATIVE.search(text) and not RELATIVE.search(readme)
    assert not urls and "(docs/verdicts.md)" in readme  # the words of a link
    assert re.search(r"^pip install coterie$", text.partition("## From Python")[0], flags=re.MULTILINE)


def test_a_release_is_refused_until_everything_is_filled_in(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        tmp_path.joinpath(name).parent.mkdir(exist_ok=True)
        tmp_path.joinpath(name).write_text(text, encoding="utf-8")

    def name_the_address(address: str) -> None:
        write("pyproject.toml", f"[tool.hatch.metadata.hooks.custom]\nrepository = '{address}'\n")

    github = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "a/b"}
    write("coterie/__init__.py", '__version__ = "1.2.3"\n')
    write("CITATION.cff", "cff-version: 1.2.0\nversion: 1.2.2\n")
    write("CHANGELOG.md", "## [Unreleased]\n### Added\n- one\n- two\n\n## [1.2.2]\n- three\n")
    name_the_address("")
    found = ready.problems("v1.2.4", tmp_path, github)
    assert [line.partition(":")[0] for line in found] == [
        "coterie/__init__.py", "CITATION.cff", "CHANGELOG.md", "CHANGELOG.md", "pyproject.toml",
    ]  # fmt: skip
    assert "2 entries" in found[3] and "https://github.com/a/b" in found[4]

    write("CITATION.cff", "cff-version: 1.2.0\nversion: 1.2.3\n")
    write("CHANGELOG.md", "## [Unreleased]\n\n## [1.2.3]\n- one\n- two\n\n## [1.2.2]\n- three\n")
    for address, word in (("https://github.com/a/b/", "slash"), ("https://github.com/a/c", "publishes")):
        name_the_address(address)
        (problem,) = ready.problems("v1.2.3", tmp_path, github)
        assert address in problem and word in problem
    name_the_address("https://github.com/A/b")
    assert ready.problems("v1.2.3", tmp_path, github) == ready.problems("v1.2.3", tmp_path, {}) == []


def test_the_release_workflow_asks_whether_the_commit_is_ready() -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))
    scripts = [step.get("run", "") for step in workflow["jobs"]["check"]["steps"]]
    asked = scripts.index('python -m release.ready "$GITHUB_REF_NAME"')
    assert asked < scripts.index("make release-check") and "check" in workflow["jobs"]["publish"]["needs"]


@pytest.mark.parametrize(
    ("target", "machine", "tag"),
    [
        ("11.0", "arm64", "macosx_11_0_arm64"),
        ("15.4", "arm64", "macosx_15_0_arm64"),
        ("10.13", "x86_64", "macosx_10_13_x86_64"),
    ],
)
def test_wheels_of_macos(
    hooks: ModuleType, target: str, machine: str, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(hooks.platform, "machine", lambda: machine)
    monkeypatch.setenv("MACOSX_DEPLOYMENT_TARGET", target)
    assert hooks.platform_tag() == tag


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_library_is_the_same_bytes_wherever_it_is_built(hooks: ModuleType, tmp_path: Path) -> None:
    made = []
    for name in ("one", "another and longer"):
        folder = tmp_path / name
        shutil.copytree(
            ROOT / "coterie" / "_core" / "native", folder, ignore=shutil.ignore_patterns("kernels*")
        )
        assert hooks.compile_to(folder / "kernels.so") == ""
        made.append((folder / "kernels.so").read_bytes())
        assert [path.name for path in folder.glob("kernels*")] == ["kernels.so"]
    assert made[0] == made[1]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("clang") is None, reason="there is no clang")
def test_clang_compiles_the_library(
    hooks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes the wheels of macOS, and lacks some of gcc's functions; `make release-check` compiles for macOS."""
    native = ROOT / "coterie" / "_core" / "native"
    folder = shutil.copytree(native, tmp_path / "native", ignore=shutil.ignore_patterns("kernels*"))
    monkeypatch.setenv("CC", "clang -Werror -Wno-unknown-warning-option")
    assert hooks.compile_to(Path(folder) / "kernels.so") == ""


def test_wheels_are_compiled_for_the_systems_that_they_are_built_on() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cibuildwheel"]
    images = {machine: settings["linux"][f"manylinux-{machine}-image"] for machine in ("x86_64", "aarch64")}
    assert set(images.values()) == {"manylinux_2_28"}
    targets = {f"{machine}-linux-gnu.2.28" for machine in images}
    targets |= {f"aarch64-macos.{settings['macos']['environment']['MACOSX_DEPLOYMENT_TARGET']}"}
    assert set(elsewhere.TARGETS.values()) == targets


def test_without_a_compiler_there_is_a_reason(
    hooks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "no-such-compiler" in hooks.compile_to(tmp_path / "kernels.so")
    assert not list(tmp_path.iterdir())


def test_requirements_with_hashes_are_those_of_the_constraints() -> None:
    """`make lock` writes both; a package that is in one only would be installed without its hash, or not at all."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split())
    pinned = {lock.name_of(name): version for name, version in pins.items()}
    core = [name for name in ("torch", "cuda", "core") for name in hashed(name)]
    assert {path.stem for path in lock.FOLDER.glob("*.txt")} == set(lock.purposes())
    for purpose in lock.purposes():
        found = hashed(purpose)
        lacking = set(lock.direct(purpose)) - set(found) - set(core)
        assert not lacking, f"requirements/{purpose}.txt lacks {sorted(lacking)}; run `make lock`"
        for name, (version, hashes) in found.items():
            assert version == pinned.get(name, version), (
                f"requirements/{purpose}.txt: {name}; run `make lock`"
            )
            assert hashes, name
        if purpose not in ("torch", "cuda", "core", "build"):
            assert not set(found) & set(hashed("core")), "what the core has is not repeated"


def hashed(purpose: str) -> dict[str, tuple[str, list[str]]]:
    """Return version and hashes of the packages in a file of requirements/."""
    text = (lock.FOLDER / f"{purpose}.txt").read_text(encoding="utf-8")
    found = lock.read(text).items()
    return {
        name: (pin.split()[0].partition("==")[2], re.findall(r"sha256:\w{64}\b", pin)) for name, pin in found
    }
