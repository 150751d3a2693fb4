"""Linux as it is, and Windows and macOS as far as their refusals can be acted out on Linux."""

from __future__ import annotations

import ast
import atexit
import errno
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars
import pytest

from coterie._core import files, systems
from coterie._core.errors import RunError, SettingError
from coterie.data import bundled
from coterie.report import pdf

if TYPE_CHECKING:
    from tests.conftest import Command

POSIX_ONLY = (
    "killpg", "fork", "getuid", "setsid", "sched_getaffinity", "register_at_fork", "fchmod", "mkfifo", "O_NOFOLLOW",
)  # fmt: skip
TABLE = ("heart_disease", "--client", "hospital", "--target", "sick")


def in_use(path: str | Path) -> bool:
    """Return True if this process has the file open or mapped."""
    name = os.path.realpath(path)
    with open("/proc/self/maps") as maps:
        if any(line.rstrip("\n").endswith(f" {name}") for line in maps):
            return True
    links = (os.path.join("/proc/self/fd", one) for one in os.listdir("/proc/self/fd"))
    return any(os.path.lexists(link) and os.path.realpath(link) == name for link in links)


def refuse_if_in_use(real: Callable[..., None], which: int) -> Callable[..., None]:
    def acted(*paths: Any, **more: Any) -> None:
        if in_use(paths[which]):
            raise PermissionError(errno.EACCES, "in use by a process", str(paths[which]))
        if real is os.replace and os.path.isdir(paths[1]):
            raise PermissionError(errno.EACCES, "a folder is there", str(paths[1]))
        real(*paths, **more)

    return acted


def no_privilege(*paths: Any, **more: Any) -> None:
    raise OSError(errno.EINVAL, "A required privilege is not held by the client")


@pytest.fixture
def windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Windows refuses: folders opened as files, files in use replaced or removed, modes, and POSIX's own calls."""
    if sys.platform != "linux":
        pytest.skip("acted out on Linux, by means of /proc")
    opened = os.open

    def no_folder(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if not isinstance(path, int) and os.path.isdir(path) and not flags & os.O_DIRECTORY:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, flags, mode, **more)

    for name in POSIX_ONLY:
        monkeypatch.delattr(os, name, raising=False)
    for module in ("fcntl", "resource", "pwd", "grp", "termios"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(os, "open", no_folder)
    monkeypatch.setattr(shutil, "_use_fd_functions", False)  # rmtree opens folders where the system lets it
    if hasattr(shutil, "_rmtree_impl"):  # since Python 3.14 it has decided when it is imported
        monkeypatch.setattr(shutil, "_rmtree_impl", shutil._rmtree_unsafe)  # type: ignore[attr-defined]
    monkeypatch.setattr(os, "replace", refuse_if_in_use(os.replace, 1))
    monkeypatch.setattr(os, "unlink", refuse_if_in_use(os.unlink, 0))
    monkeypatch.setattr(os, "kill", lambda *given: pytest.fail("os.kill would send Ctrl-C"))
    monkeypatch.setattr(os, "execve", lambda *given: pytest.fail("os.execve would return to the shell"))
    for name in ("symlink", "link"):
        monkeypatch.setattr(os, name, no_privilege)
    monkeypatch.setattr(systems, "sys", types.SimpleNamespace(platform="win32"))
    lock = types.SimpleNamespace(locking=lambda file, how, count: None, LK_NBLCK=2)
    monkeypatch.setitem(sys.modules, "msvcrt", lock)
    monkeypatch.setattr(systems, "_PATIENCE", 0.2)
    monkeypatch.setattr(systems.subprocess, "CREATE_NEW_PROCESS_GROUP", 512, raising=False)
    ran = subprocess.run

    def icacls(words: Any, *given: Any, **more: Any) -> Any:
        return subprocess.CompletedProcess(words, 0) if words[0] == "icacls" else ran(words, *given, **more)

    monkeypatch.setattr(subprocess, "run", icacls)


@pytest.mark.usefixtures("windows")
def test_the_acted_windows_refuses(tmp_path: Path) -> None:
    """Otherwise the tests below prove nothing."""
    with pytest.raises(PermissionError):
        os.open(tmp_path, os.O_RDONLY)
    (tmp_path / "new").write_text("new")
    with open(tmp_path / "old", "w"), pytest.raises(PermissionError):
        os.replace(tmp_path / "new", tmp_path / "old")
    with pytest.raises(ImportError):
        import fcntl  # noqa: F401
    with open(tmp_path / "new"), pytest.raises(PermissionError):
        shutil.rmtree(tmp_path)
    with pytest.raises(OSError, match="privilege"):
        os.symlink(tmp_path / "new", tmp_path / "link")


@pytest.mark.slow
@pytest.mark.usefixtures("windows")
def test_commands_on_windows(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = polars.read_csv(bundled.path("heart_disease")).head(40)
    table.with_columns(hospital=polars.lit("elsewhere")).write_csv("elsewhere.csv")
    for words in (
        ("fit", *TABLE, "--algorithm", "ditto", "--rounds", "4", "--checkpoint-every", "1", "--out", "run"),
        ("resume", "run"),
        ("predict", "run", "heart_disease", "--out", "answers.csv"),
        ("export", "run", "--client", "cleveland", "--to", "csv"),
        ("report", "run"),
        ("adapt", "run", "elsewhere.csv", "--out", "adapted"),
        ("fit", *TABLE, "--algorithm", "ditto", "--rounds", "1", "--state-memory", "0.001", "--out", "large"),
        ("advise", *TABLE, "--json", "advice.json"),
        ("compare", *TABLE, "--rounds", "1", "--budget", "1", "--out", "all"),
        ("fit", *TABLE, "--algorithm", "fedavg", "--rounds", "1", "--out", "run"),
    ):
        done = command(*words)
        assert done.code == (2 if words[-1] == "run" and "fedavg" in words else 0), (words, done.err)
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.usefixtures("windows")
@pytest.mark.parametrize(
    ("package", "words"),
    [
        (
            "optuna",
            ("tune", *TABLE, "--algorithm", "ditto", "--trials", "1", "--rounds", "1", "--out", "tuned"),
        ),
        ("flwr", ("federate", "init", "federation", "--node", "a")),
    ],
)
def test_commands_of_extras_on_windows(
    package: str, words: tuple[str, ...], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    done = command(*words)
    assert done.code == 0, done.err


@pytest.mark.usefixtures("windows")
def test_a_run_goes_on_over_its_own_checkpoint_on_windows(tmp_path: Path) -> None:
    """A checkpoint that is being read is mapped, and nobody may remove it."""
    from coterie import Federation, fit, resume
    from coterie.algorithms import make

    class Stop(Exception):
        pass

    def watch(done: int, total: int) -> None:
        if done >= 3:
            raise Stop

    fed = Federation.from_table("heart_disease", "hospital", "sick")
    with pytest.raises(Stop):
        fit(fed, make("ditto"), 6, tmp_path / "run", checkpoint_every=1, watch=watch)
    again = resume(tmp_path / "run")
    whole = fit(Federation.from_table("heart_disease", "hospital", "sick"), make("ditto"), 6)
    assert (again.personal == whole.personal).all()
    assert len(list((tmp_path / "run" / "checkpoint").glob("round-*"))) <= 1


@pytest.mark.usefixtures("windows")
def test_a_file_that_stays_in_use_is_named(tmp_path: Path) -> None:
    target = tmp_path / "metrics.json"
    target.write_text("{}")
    with open(target), pytest.raises(RunError, match=r"metrics\.json cannot be written \(in use"):
        files.write_text(target, "new")
    files.write_text(target, "new")
    assert target.read_text() == "new"
    assert os.listdir(tmp_path) == ["metrics.json"]


@pytest.mark.usefixtures("windows")
def test_a_virus_scanner_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = iter([True, True, False])
    real = os.replace

    def scanned(*paths: Any) -> None:
        if next(tries):
            raise PermissionError(errno.EACCES, "being scanned")
        real(*paths)

    monkeypatch.setattr(os, "replace", scanned)
    files.write_text(tmp_path / "a", "text")
    assert (tmp_path / "a").read_text() == "text"


@pytest.mark.usefixtures("windows")
def test_what_is_in_use_goes_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later: list[tuple[Any, ...]] = []
    monkeypatch.setattr(atexit, "register", lambda *call: later.append(call))
    path = tmp_path / "old"
    path.write_text("x")
    with open(path):
        systems.discard(path)
    assert path.exists() and len(later) == 1
    later[0][0](*later[0][1:])
    assert not path.exists()


@pytest.mark.usefixtures("windows")
def test_secrets_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Access lists take the place of modes, and bytes are not translated."""
    calls: list[list[str]] = []

    def ran(words: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        calls.append(words)
        return subprocess.CompletedProcess(words, 0 if len(calls) < 3 else 5, "", "denied")

    monkeypatch.setattr(systems.subprocess, "run", ran)
    monkeypatch.setattr(os, "O_BINARY", 0, raising=False)
    folder = systems.private_folder(tmp_path / "keys")
    os.close(systems.open_private(folder / "node.key", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    assert [Path(words[1]).name for words in calls] == ["keys", "node.key"]
    assert all(words[0] == "icacls" and "/inheritance:r" in words for words in calls)
    assert not systems.others_can_read(folder / "node.key")
    with pytest.raises(SettingError, match="cannot be kept from other users: denied"):
        systems.keep_private(folder / "node.key")


@pytest.mark.usefixtures("windows")
def test_processes_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = {7: 259, 8: 0}

    class Kernel:
        def OpenProcess(self, rights: int, inherit: bool, pid: int) -> int:
            return pid if pid in codes else 0

        def GetExitCodeProcess(self, handle: int, code: Any) -> None:
            code._obj.value = codes.get(handle, 0)

        def CloseHandle(self, handle: int) -> None:
            pass

    monkeypatch.setattr(systems.ctypes, "WinDLL", lambda name: Kernel(), raising=False)
    assert [systems.is_alive(pid) for pid in (7, 8, 9)] == [True, False, False]
    assert systems.apart() == {"creationflags": 512}
    assert not systems.has_libuv()
    assert systems.quoted(["--client", "north clinic"]) == '--client "north clinic"'  # no single quotes
    name, content = systems.script(["coterie", "federate", "node", "--client", "a 5% b"])
    assert name == "start.cmd" and content.endswith('&& coterie federate node --client "a 5%% b" %*\r\n')


@pytest.mark.parametrize(
    ("platform", "home", "program"),
    [
        ("win32", "PROGRAMFILES(X86)", "Microsoft/Edge/Application/msedge.exe"),
        ("win32", "LOCALAPPDATA", "Google/Chrome/Application/chrome.exe"),
        ("darwin", "HOME", "Google Chrome.app"),
    ],
)
def test_a_browser_that_is_not_on_the_path(
    platform: str, home: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows and macOS install browsers where no shell looks for them."""
    for name in ("PROGRAMFILES", "PROGRAMFILES(X86)", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(home, str(tmp_path))
    monkeypatch.setattr(systems, "sys", types.SimpleNamespace(platform=platform))
    with pytest.raises(SettingError, match="none is installed"):
        pdf.find_browser()
    inside = f"Applications/{program}/Contents/MacOS/{program.removesuffix('.app')}"
    place = tmp_path / (inside if program.endswith(".app") else program)
    place.parent.mkdir(parents=True)
    place.touch()
    assert pdf.find_browser() == str(place)
    monkeypatch.setattr(systems, "sys", types.SimpleNamespace(platform="linux"))
    with pytest.raises(SettingError, match="none is installed"):
        pdf.find_browser()


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_a_console_that_has_few_characters(encoding: str) -> None:
    """Windows' consoles and pipes are not always UTF-8; what they lack becomes a question mark."""
    done = subprocess.run(
        [sys.executable, "-m", "coterie", "algorithms", "ditto"],
        env={
            **os.environ,
            "PYTHONIOENCODING": encoding,
            "PYTHONUTF8": "0",
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert b"?" in done.stdout


def file_calls() -> Iterator[tuple[Path, str, str]]:
    """Yield file, function and text of the package's calls that read or write text."""
    package = Path(systems.__file__).parents[1]
    for path in package.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if not re.search(r"open\(|\.(read|write)_text\(", source):
            continue
        for call in ast.walk(ast.parse(source)):
            if isinstance(call, ast.Call):
                name = getattr(call.func, "id", getattr(call.func, "attr", ""))
                if name.endswith("open") or name in ("read_text", "write_text"):
                    yield path, ast.unparse(call.func), ast.unparse(call)


def test_every_text_file_is_the_same_everywhere() -> None:
    """Systems differ in the encoding that Python takes, and Windows turns \\n into \\r\\n unless `newline` is given."""
    seen = 0
    for path, called, words in file_calls():
        seen += 1
        bare = words.endswith(".read_text()") or re.match(r"(os\.fd)?open\(", words)
        named = "encoding=" in words or re.search(r"'[rwax+]*b[rwax+]*'", words)
        assert not bare or named, f"{path}: {words}: encoding=?"
        if called.endswith(".write_text"):
            assert called == "files.write_text", f"{path}: {words}: write bytes, or with files.write_text"
        elif called == "open" and re.search(r", '[wax]'", words):
            assert "newline=" in words, f"{path}: {words}: newline=?"
    assert seen > 50


@pytest.mark.usefixtures("windows")
def test_a_program_in_place_of_this_process_on_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[list[str], dict[str, str]]] = []

    def ran(words: list[str], env: dict[str, str], **more: Any) -> subprocess.CompletedProcess[str]:
        calls.append((words, env))
        return subprocess.CompletedProcess(words, 3)

    monkeypatch.setattr(systems.subprocess, "run", ran)
    program = tmp_path / "supernode"
    program.touch(mode=0o700)
    with pytest.raises(SystemExit) as ended:
        systems.become(["supernode", "--config", "a b"], {"PATH": str(tmp_path)})
    assert ended.value.code == 3
    assert calls == [([str(program), "--config", "a b"], {"PATH": str(tmp_path)})]
    with pytest.raises(SettingError, match="other is not installed"):
        systems.become(["other"], {"PATH": str(tmp_path)})


@pytest.mark.usefixtures("windows")
def test_errors_that_windows_counts_in_its_own_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Polars says "(os error 112)" where a disk is full."""
    full = OSError(errno.ENOSPC, "There is not enough space on the disk")
    monkeypatch.setattr(systems.ctypes, "WinError", {112: full}.get, raising=False)

    def write(path: Path) -> None:
        raise ValueError("cannot write (os error 112)")

    with pytest.raises(RunError, match="not enough space on the disk") as raised:
        files.write_with(tmp_path / "metrics.parquet", write)
    assert files.disk_is_full(raised.value)


@pytest.mark.usefixtures("windows")
def test_a_report_of_a_run_without_a_folder_on_windows(tmp_path: Path) -> None:
    """The folder that it makes for a moment has to go, so nothing in it may still be mapped."""
    from coterie import Federation, fit
    from coterie.algorithms import make

    run = fit(Federation.from_table("heart_disease", "hospital", "sick"), make("ditto"), 1)
    assert run.report(tmp_path / "page.html").stat().st_size > 1_000_000


def test_a_worker_that_ended_is_told_of_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a write to a pipe that nobody reads is an invalid argument."""
    from coterie.leaderboard import workers

    def refuse(text: str = "") -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    def ended(*words: Any, stderr: Any, **more: Any) -> Any:
        stderr.write(b"no memory")
        stdin = types.SimpleNamespace(write=refuse, close=refuse)
        stdout = types.SimpleNamespace(readline=str, close=lambda: None)
        return types.SimpleNamespace(stdin=stdin, stdout=stdout, wait=lambda: 9, kill=lambda: None)

    monkeypatch.setattr(workers, "subprocess", types.SimpleNamespace(Popen=ended, PIPE=-1))
    worker, job = workers._Worker(tmp_path, None), types.SimpleNamespace(json=dict, title="ditto on digits")
    assert worker.run(job) == "ditto on digits (exit code 9):\n  no memory"  # type: ignore[arg-type]
    worker.end()


@pytest.mark.usefixtures("windows")
def test_a_lock_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: set[str] = set()

    def locking(descriptor: int, mode: int, count: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if name in held:
            raise OSError(errno.EACCES, "locked")
        held.add(name)

    monkeypatch.setitem(sys.modules, "msvcrt", types.SimpleNamespace(locking=locking, LK_NBLCK=2))
    with systems.locked(tmp_path / "lock") as first, systems.locked(tmp_path / "lock") as second:
        assert (first, second) == (True, False)


@pytest.mark.skipif(sys.platform == "win32", reason="flock is POSIX's")
def test_a_lock(tmp_path: Path) -> None:
    with systems.locked(tmp_path / "lock") as first, systems.locked(tmp_path / "lock") as second:
        assert (first, second) == (True, False)
    with systems.locked(tmp_path / "lock") as again:
        assert again


@pytest.mark.parametrize("offered", [True, False])
def test_macos_flushes_past_the_cache_of_the_disk(
    offered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def control(descriptor: int, what: int) -> None:
        if not offered:
            raise OSError(errno.ENOTSUP, "not here")
        done.append("full")

    monkeypatch.setitem(sys.modules, "fcntl", types.SimpleNamespace(fcntl=control, F_FULLFSYNC=51))
    monkeypatch.setattr(systems, "sys", types.SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append("plain"))
    with open(tmp_path / "a", "w") as stream:
        systems.flush(stream.fileno())
    assert done == ["full" if offered else "plain"]
    assert systems.apart() == {"start_new_session": True}  # there is no prctl


def test_a_file_system_that_cannot_flush_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(code: int) -> Callable[[int], None]:
        def fsync(descriptor: int) -> None:
            raise OSError(code, os.strerror(code))

        return fsync

    monkeypatch.setattr(os, "fsync", refuse(errno.EINVAL))
    systems.flush_folder(tmp_path)
    monkeypatch.setattr(os, "fsync", refuse(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        systems.flush_folder(tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="sessions are POSIX's")
def test_a_process_ends_with_what_it_started() -> None:
    code = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    running = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, **systems.apart())
    assert running.stdout is not None
    child = int(running.stdout.readline())
    running.stdout.close()
    assert systems.is_alive(child)
    systems.end(running, 5.0)
    for _ in range(100):
        if not systems.is_alive(child):
            break
        systems.time.sleep(0.02)
    assert running.returncode is not None and not systems.is_alive(child)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such processes")
@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_process_that_has_ended_is_not_alive_before_its_parent_asks(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower does not ask, and whoever waited for such a process would wait for ever."""
    if platform == "darwin" and systems.find_program(["ps"]) is None:
        pytest.skip("needs the program ps")
    running = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", platform)
        assert not systems.is_alive(running.pid) and systems.is_alive(os.getpid())
    running.wait()
    assert not systems.is_alive(running.pid)


def test_no_other_module_asks_for_the_system() -> None:
    """POSIX-only calls are in one file; the other one that asks keeps threads off a processor, on Linux alone."""
    asks = re.compile(
        r"\bfcntl\b|\bmsvcrt\b|os\.(fsync|chmod|kill|killpg|setsid|fork|getuid|umask|symlink|link|exec\w+|nice|uname|mkfifo|getpgid)\("
        r"|signal\.SIG(KILL|CONT|STOP|HUP|USR)|preexec_fn|start_new_session|os\.open\(|os\.replace\(|NamedTemporaryFile"
        r"|/dev/|/proc/|os\.name\b|sys\.platform"
    )
    package = Path(systems.__file__).parents[1]
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if asks.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"_core/systems.py", "_core/affinity.py"}


def run_by_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what Python runs when it imports a module: everything but the bodies of functions and annotations."""
    for name, value in ast.iter_fields(node):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and name in ("body", "returns"):
            continue
        if isinstance(node, ast.Lambda) or name == "annotation":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
                yield from run_by_import(child)


def test_tests_are_collected_on_windows() -> None:
    """One file that cannot be imported ends the whole run there; a test may ask for more, or be skipped."""
    lacking = {f"os.{name}" for name in (*POSIX_ONLY, "geteuid", "waitid", "P_PID", "uname")}
    lacking |= {f"signal.SIG{name}" for name in ("KILL", "STOP", "CONT", "HUP", "USR1", "USR2", "ALRM")}
    modules = {"fcntl", "resource", "pwd", "grp", "termios", "pty", "readline"}
    named = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in lacking | modules))
    for path in Path(__file__).parents[1].rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        for node in run_by_import(ast.parse(source)) if named.search(source) else ():
            asked = {ast.unparse(node)} & lacking if isinstance(node, ast.Attribute) else set()
            asked |= {one.name for one in node.names} & modules if isinstance(node, ast.Import) else set()
            assert not asked, f"{path}, line {getattr(node, 'lineno', 0)}: Windows has no {asked.pop()}"
