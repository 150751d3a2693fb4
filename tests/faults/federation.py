"""Faults of a real federation, each at a random moment: processes that die or halt, full disks, wrong certificates."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from coterie._core import files
from coterie._core.errors import RunError
from coterie.algorithms import make
from coterie.deploy import audit, federation_folder, keys
from coterie.train.fit import fit
from tests.conftest import _absent_in as absent_in
from tests.e2e.conftest import THREE, Live, wait_until
from tests.faults.moments import Fault

ROUNDS = 12
STARTS_WITHIN = 600.0  # seconds for a busy machine to start a run
DISK = 6 << 20  # bytes of a small disk
SAME = ("metrics.parquet", "ledger.parquet")


@contextmanager
def federation(folder: Path) -> Iterator[Scene]:
    """Start a server and three nodes in processes of their own."""
    with ExitStack() as stack:
        live = Live(folder / "federation", stack)
        live.start_server()
        for name in THREE:
            live.start_node(name)
        yield Scene(live, stack)


class Scene:
    """A running federation and what can go wrong with it; every fault returns in a few words what was seen."""

    def __init__(self, live: Live, stack: ExitStack) -> None:
        self.live, self.stack = live, stack
        self.algorithm = make("ditto", lr=0.1, batch=4, participation=0.6)
        self.count = 0
        self._whole: Path | None = None

    def job(self, what: str, **more: Any) -> Path:
        """Return a job that is not started yet."""
        self.count += 1
        return self.live.job(f"{what}-{self.count}", self.algorithm, ROUNDS, checkpoint_every=3, **more)

    def run(self, job: Path, watch: Callable[[dict[str, Any]], None] = lambda told: None) -> None:
        """Start a job, or go on with it, and follow it to the end."""
        federation_folder.submit(self.live.folder, [job])
        federation_folder.follow(job, watch, limit=STARTS_WITHIN)

    def down(self, name: str) -> None:
        """Kill -9 a process, unless it is dead already."""
        if self.live.processes[name].poll() is None:
            self.live.kill(name)

    def up(self) -> None:
        """Start again whatever a fault has left dead."""
        if self.live.processes["server"].poll() is not None:
            self.live.start_server()
        for name in THREE:
            if self.live.processes[name].poll() is not None:
                self.live.start_node(name)
        self.wait_for_nodes()

    def whole(self) -> Path:
        """Return the same job, done without a fault."""
        if self._whole is None:
            self._whole = self.job("whole")
            self.run(self._whole)
        return self._whole

    def kill_node(self, moment: random.Random) -> str:
        """Kill -9 a node in a round, and start it again."""
        job, name, at = self.job("node", deadline=8.0), moment.choice(THREE), moment.randint(1, 8)
        after = moment.uniform(0.0, 0.3)
        self.run(job, watch=_once(at, after, lambda: self.down(name), lambda: self.live.start_node(name)))
        return f"{name} killed {after:.2f} s after round {at}; {self._same_with_gaps(job)}"

    def stop_node(self, moment: random.Random) -> str:
        """SIGSTOP a node beyond the deadline, then let it go on."""
        job, name, at = self.job("halted", deadline=2.0), moment.choice(THREE), moment.randint(1, 8)
        stop, go_on = (lambda how=how: self.live.kill(name, how) for how in (signal.SIGSTOP, signal.SIGCONT))
        try:
            self.run(job, watch=_once(at, 0.0, stop, go_on, pause=moment.uniform(1.0, 5.0)))
        finally:
            go_on()
        return f"{name} halted after round {at}; {self._same_with_gaps(job)}"

    def stop_server(self, moment: random.Random) -> str:
        """SIGSTOP the server for a few seconds; nobody is lost."""
        job, at, pause = self.job("pause"), moment.randint(1, 8), moment.uniform(1.0, 6.0)
        stop, go_on = (
            lambda how=how: self.live.kill("server", how) for how in (signal.SIGSTOP, signal.SIGCONT)
        )
        try:
            self.run(job, watch=_once(at, 0.0, stop, go_on, pause=pause))
        finally:
            go_on()
        return f"server halted after round {at} for {pause:.1f} s; {self._same_with_gaps(job)}"

    def kill_server(self, moment: random.Random) -> str:
        """Kill -9 the server and with it the run; start it again and resume."""
        return self._interrupt(moment, ["server"])

    def kill_both(self, moment: random.Random) -> str:
        """Kill -9 the server and a node at the same time; start both again and resume."""
        return self._interrupt(moment, ["server", moment.choice(THREE)])

    def _interrupt(self, moment: random.Random, names: Sequence[str]) -> str:
        whole, job, at = self.whole(), self.job("killed"), moment.randint(0, ROUNDS - 2)
        after = moment.uniform(0.0, 0.5)
        try:
            self.run(job, watch=_once(at, after, lambda: [self.down(name) for name in names]))
        except RunError as problem:
            if f"--resume {job.name}" not in str(problem):
                raise Fault(f"the operator is not told how to go on: {problem}") from None
        else:
            raise Fault("the run ended although the server was killed")
        self.live.start_server()
        for name in names[1:]:
            self.live.start_node(name)
        self.wait_for_nodes()
        self.run(job)
        self.same_bytes(whole, job)
        return f"{' and '.join(names)} killed {after:.2f} s after round {at}; the same bytes after --resume"

    def join_late(self, moment: random.Random) -> str:
        """Start a node when the run is under way."""
        name = "n2"
        self.down(name)
        roles = self.live.roles.to_json() | {"cluster": None, "drop": ["group"]}
        at = moment.randint(1, 6)
        job = self.live.job(f"late-{at}", self.algorithm, 60, roles=roles, deadline=3.0, patience=4.0)
        self.run(job, watch=_once(at, 0.0, lambda: self.live.start_node(name)))
        own = set(self.live.folder.nodes[name])
        rounds = {t for t, who in self.live.missed(job) if who in own}
        if 1 not in rounds or max(rounds) >= 60:
            raise Fault(f"{name} missed {sorted(rounds)}")
        return f"{name} came after round {at} and took part from round {max(rounds) + 1}"

    def full_disk_of_a_node(self, moment: random.Random) -> str:
        """Fill the disk of a node's state in a run; it is left out by name and comes back when there is space."""
        name, at = "n1", moment.randint(2, 6)
        state = self.live.folder.path / "nodes" / name / "state"
        self.down(name)
        with small_disk(state):
            self.live.start_node(name)
            self.wait_for_nodes()
            job = self.live.job(f"node-disk-{at}", self.algorithm, 60, deadline=5.0)
            self.run(job, watch=_once(at, 0.0, lambda: fill(state), lambda: free(state), pause=4.0))
            self.down(name)
        self.live.start_node(name)
        self.wait_for_nodes()
        own = set(self.live.folder.nodes[name])
        missed = {t for t, who in self.live.missed(job) if who in own}
        told = [line for line in federation_folder.notes(job) if name in line]
        if not missed or max(missed) >= 60:
            raise Fault(f"{name} missed {sorted(missed)}: {told}")
        if not any("disk is full" in line for line in told):
            raise Fault(f"nobody says that a disk is full: {told[:3]}")
        return f"{name} was left out of {len(missed)} of 60 rounds: {told[0][9:]}"

    def full_disk_of_the_server(self, moment: random.Random) -> str:
        """Fill the disk of the server in a run; the run ends with a reason and resumes when there is space."""
        whole, at = self.whole(), moment.randint(2, 8)
        with self._server_on_a_small_disk() as disk:
            job = self.job("server-disk")
            try:
                self.run(job, watch=_once(at, 0.0, lambda: fill(disk)))
            except RunError as problem:
                told = str(problem)
            else:
                raise Fault("the run ended although the disk was full")
            if "is full" not in told or f"--resume {job.name}" not in told or "\n" in told:
                raise Fault(f"the operator is not told what to do: {told}")
            half = [path.name for path in disk.rglob("*.tmp")]
            if half or not list(audit.verify(job / audit.FILE)):
                raise Fault(f"half-written: {half}")
            said = subprocess.run(
                federation_folder.command("federate", "attach", self.live.folder.path, "--run", job.name),
                capture_output=True, text=True, timeout=STARTS_WITHIN, check=False,
            )  # fmt: skip
            if said.returncode != 2 or "is full" not in " ".join(said.stderr.split()):
                raise Fault(f"exit code {said.returncode}: {said.stderr[-500:]}")
            free(disk)
            self.run(job)
            self.same_bytes(whole, job)
        return f"full after round {at}: {told}; the same bytes after --resume"

    @contextmanager
    def _server_on_a_small_disk(self) -> Iterator[Path]:
        """Move all that the server writes, its output too, to a small disk, and back."""
        path, parts = self.live.folder.path, ("jobs", "runs", "server", "server.log")
        disk = keys.private_folder(path / "small")
        self.down("server")
        with small_disk(disk, 4 * DISK):
            for part in parts:
                shutil.move(path / part, disk / part)
                (path / part).symlink_to(disk / part)
            try:
                self.live.start_server()
                self.wait_for_nodes()
                yield disk
            finally:
                self.down("server")
                free(disk)
                for part in parts:
                    (path / part).unlink()
                    shutil.move(disk / part, path / part)
        self.up()

    def same_bytes(self, whole: Path, job: Path) -> None:
        """Raise `Fault` unless two jobs made the same files and models."""
        runs = self.live.folder.path / "runs"
        for name in SAME:
            if files.sha256(runs / whole.name / name) != files.sha256(runs / job.name / name):
                raise Fault(f"{job.name}: other bytes in {name}")
        once, again = self.live.models(whole), self.live.models(job)
        other = [name for name in once if not torch.equal(once[name], again[name])]
        if other:
            raise Fault(f"{job.name}: other models of {', '.join(other)}")

    def wait_for_nodes(self, names: Sequence[str] = THREE) -> None:
        """Wait until nodes are connected."""
        operator = self.live.folder.operator(observe=True)
        wait_until(lambda: all("online" in operator.nodes().get(name, "") for name in names), STARTS_WITHIN)

    def _same_with_gaps(self, job: Path) -> str:
        """Compare with a local run in which the same clients were away in the same rounds."""
        missed, result = self.live.missed(job), self.live.result(job)
        if result["lost_rounds"]:
            raise Fault(f"{job.name}: {result['lost_rounds']} rounds were lost")
        phases = {(t, name, why.partition(":")[0]) for t, name, why in result["left_out"]}
        here = fit(absent_in(self.live.local(), phases), self.algorithm, ROUNDS, evaluate_every=0)
        nodes = federation_folder.progress(job)["models_at"]
        for name, model in self.live.models(job, nodes).items():
            if float((model - here.personal[here.fed.names.index(name)]).abs().max()) > 1e-12:
                raise Fault(f"{job.name}: another model of {name} than with the same gaps in one process")
        self.wait_for_nodes()
        return f"{len(missed)} answers missed, no round lost, models as with these gaps"

    def wrong_certificates(self, moment: random.Random) -> str:
        """Start nodes with certificates that are expired or foreign; each ends with a reason and a remedy."""
        path = self.live.folder.path
        place, work = path / "nodes" / "n2", path / "wrong"
        self.down("n2")
        told = []
        try:
            for kind in ("expired", "foreign", "foreign server"):
                shutil.rmtree(work, ignore_errors=True)
                shutil.copytree(place, work / "n2", ignore=shutil.ignore_patterns("state"))
                key = keys.load_node_key(work / "n2" / "node.key")[1]
                keys.make_authority(work / "other", "other")
                if kind == "expired":
                    keys.certify(path / "ca", key, "n2", work / "n2", days=-1)
                elif kind == "foreign":
                    keys.certify(work / "other", key, "n2", work / "n2")
                else:
                    shutil.copy(work / "other" / "ca.crt", work / "n2" / "ca.crt")
                told.append(f"{kind}: {self._refused(work / 'n2')}")
        finally:
            shutil.rmtree(work, ignore_errors=True)
            self.live.start_node("n2")
            self.wait_for_nodes()
        return "; ".join(told)

    def _refused(self, folder: Path) -> str:
        words = federation_folder.command("federate", "node", folder, "--data", self.live.table("n2"))
        words += ["--server", f"127.0.0.1:{self.live.folder.port}"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=STARTS_WITHIN, check=False)
        text = " ".join(done.stderr.split())
        if done.returncode != 2 or "Traceback" in text or not text:
            raise Fault(f"exit code {done.returncode}: {text[-500:]}")
        return text


FAULTS = (
    Scene.kill_node,
    Scene.kill_server,
    Scene.kill_both,
    Scene.stop_node,
    Scene.stop_server,
    Scene.join_late,
    Scene.wrong_certificates,
)
DISKS = (Scene.full_disk_of_a_node, Scene.full_disk_of_the_server)


def _once(
    at: int, after: float, deed: Callable[[], Any], undo: Callable[[], Any] | None = None, pause: float = 0.5
) -> Callable[[dict[str, Any]], None]:
    """Return a `watch` that does a deed some time after a round, and something else after a pause."""
    due: list[tuple[float | None, Callable[[], Any]]] = [(None, deed)]

    def watch(told: dict[str, Any]) -> None:
        if due and due[0][0] is None and told.get("state") == "running" and told.get("round", 0) >= at:
            time.sleep(after)
            due.pop()[1]()
            if undo is not None:
                due.append((time.monotonic() + pause, undo))
        elif due and due[0][0] is not None and time.monotonic() > due[0][0]:
            due.pop()[1]()

    return watch


@contextmanager
def small_disk(place: Path, size: int = DISK) -> Iterator[None]:
    """Mount a small disk; needs a mount namespace of one's own, which `unshare -rm` gives."""
    place.mkdir(mode=0o700, exist_ok=True)
    options = f"size={size},mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> None:
    """Write until the disk is full."""
    with suppress(OSError), open(place / "ballast", "wb", buffering=0) as stream:
        while True:
            stream.write(b"\0" * 4096)
    with suppress(OSError), open(place / "ballast", "ab", buffering=0) as stream:
        while True:
            stream.write(b"\0")


def free(place: Path) -> None:
    """Give the space back."""
    (place / "ballast").unlink(missing_ok=True)
