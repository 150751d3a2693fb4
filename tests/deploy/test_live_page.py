"""The page of a running federation: who may look, that nothing of a node commands the page, and how it looks."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coterie._core import files
from coterie.deploy import live_page
from coterie.deploy.live import thinned
from coterie.deploy.live_page import LivePage, Picture

EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\x1b[2J"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def write_job(folder: Path, name: str, t: int, rounds: int = 50, **told: Any) -> Path:
    """A job as the server leaves it on disk, with a node that sends HTML."""
    job = folder / "jobs" / name
    plan = {"rounds": rounds}
    files.write_json(job / "request.json", {"algorithm": {"name": "ditto"}, "plan": plan, "secure": False})
    progress = {"state": "running", "pid": os.getpid(), "round": t, "rounds": rounds, **told}
    files.write_json(job / "progress.json", progress)
    node = {"messages": t, "answers": t, "bytes_down": 1000 * t, "bytes_up": 900 * t, "seconds": 0.12}
    live = {
        "round": t,
        "rounds": rounds,
        "seconds": 3.5 * t,
        "losses": [[k, 0.7 - 0.01 * k, 0.6 - 0.01 * k, 0.9 - 0.01 * k] for k in range(t + 1)],
        "privacy": {"spent": 1.25, "epsilon": 4.0, "delta": 1e-5, "unit": "client"},
        "nodes": {
            "cleveland": {**node, "problem": "", "away": False},
            "hungarian": {**node, "answers": 3, "problem": f"its answer is {EVIL}", "away": True},
            "switzerland": {**node, "problem": "", "away": False},
        },
    }
    files.write_json(job / "live.json", live)
    (job / "notes.txt").write_text(f"12:00:01 hungarian is left out: {EVIL}\n", encoding="utf-8")
    return job


@pytest.fixture
def picture(tmp_path: Path) -> Picture:
    write_job(tmp_path, "ditto-1", 12)
    told = {"cleveland": "online", "hungarian": "offline", "switzerland": "online", "va": EVIL}
    return Picture(tmp_path, lambda: [*told], lambda: told)


def ask(page: LivePage, path: str, query: str = "", method: str = "GET", **headers: str) -> Any:
    given = {"host": "127.0.0.1:8766"} | headers
    scope = {"path": path, "query_string": query.encode(), "method": method}
    return page.answer(scope, {name.encode(): value.encode() for name, value in given.items()})


class TestWhoMayLook:
    @pytest.fixture
    def page(self, picture: Picture) -> LivePage:
        return LivePage(picture, ["observer", "operator"])

    @pytest.mark.parametrize("path", ["/", "/live.json", "/health", "/nothing"])
    @pytest.mark.parametrize(
        "given", [{}, {"authorization": "Bearer x"}, {"cookie": "coterie-observer=observer2"}]
    )
    def test_nobody_without_a_token(self, page: LivePage, path: str, given: dict[str, str]) -> None:
        status, _, body, _ = ask(page, path, **given)
        assert status == 401 and b"ditto" not in body and b"coterie federate page" in body

    @pytest.mark.parametrize(
        "given", [{"authorization": "Bearer observer"}, {"cookie": "coterie-observer=operator"}]
    )
    def test_whoever_has_one(self, page: LivePage, given: dict[str, str]) -> None:
        assert [ask(page, path, **given)[0] for path in ("/", "/live.json", "/health")] == [200, 200, 200]

    def test_the_address_of_the_page_gives_its_token_up_for_a_cookie(self, page: LivePage) -> None:
        status, _, _, more = ask(page, "/", "token=observer")
        headers = dict(more)
        assert (status, headers["location"]) == (303, "/")
        assert "HttpOnly" in headers["set-cookie"] and "SameSite=Strict" in headers["set-cookie"]
        assert ask(page, "/", "token=other")[0] == 401
        assert ask(page, "/live.json", "token=observer")[0] == 401  # only the page itself, which removes it

    def test_no_web_site_reads_it_by_a_name_that_leads_here(self, page: LivePage) -> None:
        for host in ("evil.example:8766", "127.0.0.1.evil.example:8766", "", "localhost.evil:1"):
            assert ask(page, "/health", host=host, authorization="Bearer observer")[0] == 421

    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
    def test_it_changes_nothing(self, page: LivePage, method: str) -> None:
        assert ask(page, "/", method=method, authorization="Bearer observer")[0] == 405

    def test_no_file_is_read_by_its_name(self, page: LivePage, tmp_path: Path) -> None:
        files.write_json(tmp_path / "live.json", {"losses": [[0, 1, 1, 1]], "secret": 1})
        for name in ("..", "../jobs/ditto-1", "%2e%2e", "/etc", "\0"):
            body = ask(page, "/live.json", f"run={name}", authorization="Bearer observer")[2]
            assert json.loads(body)["run"]["name"] == "ditto-1"


class TestWhatIsSeen:
    def test_health(self, picture: Picture) -> None:
        told = picture.health()
        assert told["status"] == "degraded" and told["online"] == ["cleveland", "switzerland"]
        assert told["away"] == ["hungarian", "va"]
        assert told["run"] == {"name": "ditto-1", "state": "running", "round": 12, "rounds": 50}
        assert Picture(picture.folder, lambda: ["a"], lambda: {"a": "online"}).health()["status"] == "ok"

    def test_a_run_whose_process_is_gone_is_interrupted(self, picture: Picture) -> None:
        write_job(picture.folder, "ditto-2", 3, pid=2**22 + 1)
        assert {run["name"]: run["state"] for run in picture.runs()}["ditto-2"] == "interrupted"

    def test_texts_of_nodes_have_no_control_characters(self, picture: Picture) -> None:
        seen = picture.whole()
        assert all(line.isprintable() for line in seen["notes"])
        assert all(node["problem"].isprintable() and node["status"].isprintable() for node in seen["nodes"])

    def test_files_that_are_damaged_or_missing_leave_a_page(self, picture: Picture) -> None:
        job = picture.folder / "jobs" / "ditto-1"
        for name in ("live.json", "progress.json", "notes.txt"):
            (job / name).write_bytes(b'[1, "\xff')
        seen = picture.whole()
        assert seen["run"]["state"] == "waiting" and seen["losses"] == []
        (job / "live.json").unlink()
        assert picture.whole()["nodes"][0]["name"] == "cleveland"

    def test_long_notes_are_cut_and_long_curves_thinned(self, picture: Picture) -> None:
        with open(picture.folder / "jobs" / "ditto-1" / "notes.txt", "w") as stream:
            stream.writelines(f"12:00:00 note {k}\n" for k in range(100_000))
        notes = picture.whole()["notes"]
        assert len(notes) == live_page.MOST_NOTES and notes[-1].endswith("note 99999")
        assert thinned(list(range(10_001)), 5) == [0, 2500, 5000, 7500, 10_000]


@pytest.fixture
def served(picture: Picture) -> Iterator[str]:
    pytest.importorskip("uvicorn", reason="the page needs the extra 'flower'")
    yield f"http://127.0.0.1:{live_page.serve(picture, ['observer'], 0)}"


def test_over_http(served: str) -> None:
    import httpx

    assert httpx.get(f"{served}/health").status_code == 401
    answer = httpx.get(f"{served}/health", headers={"authorization": "Bearer observer"})
    assert answer.json()["run"]["round"] == 12 and answer.headers["cache-control"] == "no-store"
    page = httpx.get(f"{served}/?token=observer", follow_redirects=True)
    rules = page.headers["content-security-policy"]
    assert "default-src 'none'" in rules and rules.split("nonce-")[1][:20] in page.text
    assert (
        "http://" not in page.text.replace("http://www.w3.org/2000/svg", "") and "https://" not in page.text
    )


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium; on Debian: apt-get install chromium")
class TestInABrowser:
    @pytest.fixture
    def visit(self, served: str) -> Iterator[Any]:
        engine = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
        complaints: list[str] = []
        with engine.sync_playwright() as running:
            browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

            def go(width: int = 1100, scheme: str = "light") -> Any:
                context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
                page = context.new_page()
                page.on("console", lambda said: complaints.append(said.text) if said.type != "log" else None)
                page.on("pageerror", lambda error: complaints.append(str(error)))
                page.on(
                    "request",
                    lambda asked: complaints.append(asked.url) if not asked.url.startswith(served) else None,
                )
                page.goto(f"{served}/?token=observer")
                engine.expect(page.locator("#nodes tr")).to_have_count(4)
                return page

            yield go
            browser.close()
        assert [text for text in complaints if not text.startswith("data:") and "503" not in text] == []

    def expect(self, page: Any, where: str, text: str) -> None:
        from playwright.sync_api import expect

        expect(page.locator(where)).to_contain_text(text)

    @pytest.mark.slow
    def test_it_shows_the_run_and_follows_it(self, visit: Any, picture: Picture, served: str) -> None:
        page = visit()
        assert page.url == f"{served}/"
        assert page.locator("#what").inner_text() == "running · ditto · round 12 of 50"
        tiles = page.locator("#tiles").inner_text()
        assert "2 of 4" in tiles and "ε 1.25 / 4" in tiles and "36.0 kB" in tiles
        assert page.locator("#chart svg polyline").count() == 1
        write_job(picture.folder, "ditto-1", 40)
        self.expect(page, "#what", "round 40 of 50")
        write_job(picture.folder, "fedavg-2", 1, state="failed", error=f"nobody answered {EVIL}")
        page.locator("#runs option").nth(1).wait_for(state="attached")
        page.select_option("#runs", "fedavg-2")
        self.expect(page, "#what", "failed")

    @pytest.mark.slow
    def test_texts_of_nodes_stay_texts(self, visit: Any) -> None:
        page = visit()
        assert "<img src=x" in page.locator("#notes").inner_text()
        assert "<script>" in page.locator(".problem").inner_text()
        assert page.locator("#nodes img, #notes img").count() == 0 and "owned" not in page.title()

    @pytest.mark.slow
    @pytest.mark.parametrize(("width", "scheme"), [(1100, "light"), (390, "light"), (390, "dark")])
    def test_it_fits_and_has_two_themes(self, visit: Any, width: int, scheme: str) -> None:
        page = visit(width, scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]
        if "COTERIE_SHOTS" in os.environ:
            page.screenshot(path=f"{os.environ['COTERIE_SHOTS']}/live-{width}-{scheme}.png", full_page=True)

    @pytest.mark.slow
    def test_it_says_when_the_server_is_gone(self, visit: Any) -> None:
        page = visit()
        page.route("**/live.json*", lambda route: route.fulfill(status=503, body=""))
        self.expect(page, "#fresh", "has not answered")


def test_job_states_and_notes_are_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from coterie.deploy.logs import JobWatcher, Log

    watcher = JobWatcher(tmp_path / "jobs", Log("server", "json"))
    job = write_job(tmp_path, "ditto-1", 2)
    watcher.look()
    files.write_json(job / "progress.json", {"state": "failed", "rounds": 50, "error": "the disk is full"})
    watcher.look()
    watcher.look()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["level"] for line in lines] == ["warning", "info", "error"]
    assert lines[0]["run"] == "ditto-1" and "hungarian is left out" in lines[0]["note"]
    assert lines[2]["error"] == "the disk is full" and lines[2]["state"] == "failed"
    assert all(line["who"] == "server" and line["time"].endswith("+00:00") for line in lines)
    assert all(text.isprintable() for line in lines for text in line.values() if isinstance(text, str))
