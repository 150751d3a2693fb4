"""Recipes for containers and clusters, tried as far as a machine without Docker and SLURM allows."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coterie.cli.federate import app

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile with their arguments; a line that ends in \\ goes on."""
    text = (RECIPES / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(name.upper(), rest.strip()) for name, _, rest in (line.partition(" ") for line in lines)]


class TestDockerfile:
    """What hadolint would say, and what we promise."""

    def test_images_are_pinned_and_the_last_user_has_no_rights(self) -> None:
        images = [rest.split()[0] for name, rest in instructions() if name == "FROM"]
        assert len(images) == 2 and all(re.fullmatch(r"python:3\.\d+-slim", image) for image in images)
        last = [name for name, _ in instructions()]
        user = dict(instructions())["USER"]
        assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", user)
        assert "RUN" not in last[last.index("USER") :] and "COPY" not in last[last.index("USER") :]

    def test_nothing_is_left_in_layers(self) -> None:
        for name, rest in instructions():
            assert name not in ("ADD", "MAINTAINER") and "sudo" not in rest and "latest" not in rest
            if "apt-get install" in rest:
                assert "--no-install-recommends" in rest and "rm -rf /var/lib/apt/lists/*" in rest
                assert "apt-get update &&" in rest and "--yes" in rest
            if "pip install" in rest:
                assert "--no-cache-dir" in rest and "--constraint constraints.txt" in rest
            if name in ("ENTRYPOINT", "CMD"):
                assert rest.startswith("[")  # signals reach the program, not a shell
            if name == "WORKDIR":
                assert rest.startswith("/")

    def test_what_is_copied_exists_and_holds_no_secret(self) -> None:
        copied = [rest.split() for name, rest in instructions() if name == "COPY"]
        sources = [word for words in copied if not words[0].startswith("--") for word in words[:-1]]
        assert sources and all((ROOT / source).exists() for source in sources)
        assert "." not in sources  # nothing that lies about in a clone gets into the image

    def test_torch_is_chosen_by_an_argument(self) -> None:
        given = dict(instructions())
        assert "TORCH=cpu" in [rest for name, rest in instructions() if name == "ARG"]
        assert "${TORCH}" in next(rest for name, rest in instructions() if "torch" in rest and name == "RUN")
        assert given["ENTRYPOINT"] == '["coterie"]'

    @pytest.mark.slow
    def test_its_commands_build_the_package(self, tmp_path: Path) -> None:
        """The build stage in a folder in place of a container; packages that are here are not fetched again."""
        place, work = tmp_path / "coterie", tmp_path / "src"
        environment = {**os.environ, "TORCH": "cpu", "EXTRAS": "flower", "PIP_NO_BUILD_ISOLATION": "0"}
        environment |= {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        here = next(path for path in map(Path, sys.path) if path.name == "site-packages")
        for name, rest in instructions():
            if name == "FROM" and not rest.endswith("AS build"):
                break
            rest = rest.replace("/opt/coterie", str(place)).replace("/src", str(work))
            if name == "ENV":
                key, _, value = rest.partition("=")
                environment[key] = value.replace("$PATH", environment["PATH"])
            elif name == "WORKDIR":
                Path(rest).mkdir()
            elif name == "COPY":
                *sources, target = rest.split()
                for source in sources:
                    goal = work / (source if target == "./" else target)
                    copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                    copy(ROOT / source, goal)
            elif name == "RUN" and "apt-get" not in rest:
                rest = rest.replace("python -m venv", f"{sys.executable} -m venv")
                rest = rest.replace("--index-url", "--extra-index-url")  # what is here is enough
                done = subprocess.run(
                    ["sh", "-c", rest], cwd=work if work.exists() else tmp_path, env=environment,
                    capture_output=True, text=True, check=False,
                )  # fmt: skip
                assert done.returncode == 0, f"{rest}\n{done.stdout}\n{done.stderr}"
                if "venv" in rest:
                    own = next(place.glob("lib/python*/site-packages"))
                    for old in own.glob("setuptools*"):  # that of venv hides the one that is here
                        shutil.rmtree(old)
                    (own / "here.pth").write_text(f"{here}\n")
        said = subprocess.run(
            [place / "bin" / "coterie", "--version"], capture_output=True, text=True, cwd=tmp_path, check=True
        )
        assert said.stdout.startswith("coterie ")
        assert list(place.glob("lib/python*/site-packages/coterie/deploy/templates/live.html"))


def compose() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return dict(yaml.safe_load((RECIPES / "docker-compose.yml").read_text()))


class TestCompose:
    def test_a_server_and_four_nodes_without_rights(self) -> None:
        services = compose()["services"]
        assert set(services) == {"server", *HOSPITALS}
        for name, service in services.items():
            assert service["cap_drop"] == ["ALL"] and service["read_only"] and "user" in service, name
            assert "no-new-privileges:true" in service["security_opt"] and "privileged" not in service
        assert [name for name, service in services.items() if "ports" in service] == ["server"]

    def test_every_container_sees_its_own_folder_only(self) -> None:
        mounts = {name: service["volumes"] for name, service in compose()["services"].items()}
        assert mounts == {
            name: [f"${{FEDERATION:-../federation}}/{name}:/{'federation' if name == 'server' else 'node'}"]
            for name in mounts
        }

    def test_commands_are_commands_of_ours(self) -> None:
        from typer.main import get_command

        known = get_command(app)
        services = compose()["services"]
        words = [service["command"] for service in services.values()]
        words += [services["server"]["healthcheck"]["test"][2:]]
        for federate, name, *rest in words:
            assert federate == "federate"
            known.get_command(None, name).make_context(name, list(rest))


@pytest.mark.parametrize("name", ["hospitals.sh", "fit.slurm"])
def test_scripts_are_valid(name: str) -> None:
    shell = "sh" if name.endswith(".sh") else "bash"
    subprocess.run([shell, "-n", str(RECIPES / name)], check=True)
    assert "set -eu" in (RECIPES / name).read_text()
    no_arguments = subprocess.run([shell, str(RECIPES / name)], capture_output=True, text=True, check=False)
    assert no_arguments.returncode != 0 and "usage: " in no_arguments.stderr


def bin_folder(folder: Path) -> Path:
    """A folder for PATH with `coterie` and `python` as they are here."""
    folder.mkdir()
    _program(folder / "coterie", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m coterie "$@"\n')
    _program(folder / "python", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    return folder


def _program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


# As many processes as the script asks for, with the variables that SLURM sets.
SRUN = """#!/bin/sh
for rank in 1 0; do
    SLURM_PROCID=$rank SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=2 SLURM_JOB_NODELIST=127.0.0.1 "$@" &
done
wait $!
"""


@pytest.mark.slow
def test_the_slurm_script_trains_and_goes_on(tmp_path: Path) -> None:
    """With two processes that a stand-in for srun starts."""
    programs = bin_folder(tmp_path / "bin")
    _program(programs / "srun", SRUN)
    out = tmp_path / "run"
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "MASTER_PORT": "29631",
        "SLURM_CPUS_PER_TASK": "1",
    }
    data = ("heart_disease", str(out), "--client", "hospital", "--target", "sick", "--rounds", "4")

    def submit() -> str:
        script = ["bash", str(RECIPES / "fit.slurm"), *data]
        done = subprocess.run(
            script, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert submit().count("Run folder") == 1
    models = (out / "models" / "models.safetensors").read_bytes()
    assert "is complete" in submit()
    (out / "result.json").unlink()
    environment["MASTER_PORT"] = "29632"
    submit()
    assert (out / "models" / "models.safetensors").read_bytes() == models
