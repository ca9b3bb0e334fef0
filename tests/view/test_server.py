"""Requests over a real socket: who may ask, what they get, and hostile run directories."""

import http.client
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from messages import refused

from dispfl.errors import ConfigError
from dispfl.report.html import page_script
from dispfl.runs.directory import RunDirectory
from dispfl.view import background, server
from dispfl.view.background import viewed
from dispfl.view.listen import parse_listen

Write = Callable[..., Path]
EVIL = """<script>alert('1')</script>" onload="x"""


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the files all the time."""
    monkeypatch.setattr(server, "POLL_SECONDS", 0.02)
    monkeypatch.setattr("dispfl.view.pages.LOOK_SECONDS", 0.0)


class Client:
    """A browser's requests to the pages of a folder."""

    def __init__(self, address: str) -> None:
        self.host, self.port = urlsplit(address).hostname, urlsplit(address).port
        self.opened = ExitStack()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.close()

    def request(
        self, path: str, method: str = "GET", body: str | None = None, **headers: str
    ) -> http.client.HTTPResponse:
        """The response to a request whose path is sent as it is."""
        connection = http.client.HTTPConnection(str(self.host), self.port, timeout=20)
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body.encode() if body else None)
        self.opened.callback(connection.close)
        return self.opened.enter_context(connection.getresponse())

    def page(self, path: str) -> str:
        response = self.request(path)
        assert response.status == 200
        return response.read().decode()

    def events(self, path: str) -> Iterator[dict]:
        """The changes of a page, as they come."""
        response = self.request(path)
        assert response.getheader("Content-Type", "").startswith("text/event-stream")
        for line in response:
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))


@pytest.fixture
def client(write: Write, tmp_path: Path, fast: None) -> Iterator[Client]:
    """Two runs of a comparison."""
    write("runs/five/dispfl/seed-0", [[0.5, 0.6]])
    write("runs/five/local/seed-0", [[0.4, 0.5]], rounds=3, method={"name": "local"})
    with viewed(tmp_path / "runs") as place:
        assert place is not None
        with Client(place.address) as opened:
            yield opened


def test_the_list_links_to_reports_of_runs_and_comparisons(client: Client) -> None:
    html = client.page("/")
    assert 'href="/page/runs/five/dispfl/seed-0"' in html
    assert 'href="/page/runs/five"' in html
    assert "finished" in html
    assert "stopped" in html
    assert "<h1>Dis-PFL</h1>" in client.page("/page/runs/five/dispfl/seed-0")
    assert "Dis-PFL and Local</h1>" in client.page("/page/runs/five")


def test_a_comparison_is_linked_while_all_of_its_runs_are_running(
    write: Write, tmp_path: Path
) -> None:
    with ExitStack() as running:
        for name in ("dispfl", "local"):
            path = write(f"runs/five/{name}/seed-0", [[0.5, 0.6]], rounds=3)
            running.enter_context(closing(RunDirectory.open(path)))
        place = running.enter_context(viewed(tmp_path / "runs"))
        assert place is not None
        client = running.enter_context(Client(place.address))
        html = client.page("/")
        assert "2 runs, 2 running" in html
        assert '<a href="/page/runs/five">Compare all of these runs</a>' in html


def test_a_finished_round_is_sent_without_what_has_not_changed(
    client: Client, tmp_path: Path
) -> None:
    html = client.page("/page/runs/five/local/seed-0")
    [address] = [part.split('"')[1] for part in html.split("data-events=")[1:]]
    events = client.events(address)
    metrics = tmp_path / "runs/five/local/seed-0/metrics.jsonl"
    record = json.loads(metrics.read_text())
    with metrics.open("a") as file:
        file.write(json.dumps(record | {"round": 1}) + "\n")
    changed = next(events)
    assert "2 of 3 rounds finished" in changed["changed"]["now"]
    assert "labels" in changed["order"]
    assert "labels" not in changed["changed"]  # no label is learned anew in a round


def test_a_reader_of_a_deleted_run_is_told_so(client: Client, tmp_path: Path) -> None:
    response = client.request("/events/runs/five/dispfl/seed-0")
    assert response.readline() == b"event: parts\n"
    shutil.rmtree(tmp_path / "runs/five/dispfl")
    assert b"event: gone\n" in list(response)
    assert client.request("/page/runs/five/dispfl/seed-0").status == 404
    assert "seed-0" in client.page("/")  # of local


def test_who_follows_a_run_that_is_gone_already_is_told_so(client: Client, tmp_path: Path) -> None:
    assert list(client.request("/events/runs/none")) == [b"event: gone\n", b"data: {}\n", b"\n"]


def test_readers_who_have_left_make_room_for_others(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing changes on the page, so nothing is written to those who have left."""
    monkeypatch.setattr(server, "MAX_READERS", 1)
    monkeypatch.setattr(server, "KEEP_ALIVE_SECONDS", 1e9)
    address = "/events/runs/five/dispfl/seed-0"
    with Client(f"http://{client.host}:{client.port}") as first:
        assert first.request(address).readline() == b"event: parts\n"
        assert client.request(address).status == 503
    for _ in range(100):
        status = client.request(address).status
        if status == 200:
            break
        time.sleep(0.05)
    assert status == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil.example", ""])
def test_a_web_site_that_points_its_name_here_gets_nothing(client: Client, host: str) -> None:
    for path in ("/", "/page/runs/five", "/events/"):
        response = client.request(path, Host=host)
        assert response.status == 403
        assert b"Dis-PFL" not in response.read()


@pytest.mark.parametrize("host", ["localhost", "localhost:9999", "127.0.0.1", "[::1]:80"])
def test_this_machine_is_answered_under_its_own_names(client: Client, host: str) -> None:
    assert client.request("/", Host=host).status == 200  # also through a tunnel's port


@pytest.mark.parametrize(
    "path",
    [
        "/page/../../../../etc/passwd",
        "/page/%2e%2e/%2e%2e/etc/passwd",
        "/page//etc/passwd",
        "/page/runs/five/..",
        "/page/runs/five/dispfl/seed-0/config.toml",
        "/page/runs%00",
        "/etc/passwd",
        "/static/page.js",
    ],
)
def test_no_path_leads_to_a_file(client: Client, path: str) -> None:
    response = client.request(path)
    assert response.status in (400, 404)
    assert b"seed = 0" not in response.read()


def test_nothing_can_be_changed_and_nothing_runs_but_our_script(client: Client) -> None:
    for method in ("POST", "PUT", "DELETE"):
        assert client.request("/", method).status == 405
    response = client.request("/")
    policy = response.getheader("Content-Security-Policy", "")
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    assert "frame-ancestors 'none'" in policy
    assert response.getheader("Access-Control-Allow-Origin") is None


def test_a_hostile_run_directory_is_text_and_does_not_stop_the_others(
    write: Write, tmp_path: Path, fast: None
) -> None:
    write(f"runs/{EVIL.replace('/', '_')}", [[0.5, 0.6]], method={"name": EVIL})
    evil_names = {"method": {"name": EVIL}, "names": [EVIL, "bob"]}
    named = write("runs/named", [[0.5, 0.6]], rounds=3, **evil_names)
    content = {"round": 1, "began": 1e300, "finished": [EVIL], "error": EVIL}
    (named / ".progress.json").write_text(json.dumps(content))
    os.mkfifo(write("runs/pipe", [[0.5]], rounds=2) / "summary.json")
    os.mkfifo(write("runs/lock", [[0.5]], rounds=2) / ".lock")
    (write("runs/link", [[0.5]]) / "summary.json").unlink()
    (tmp_path / "runs/link/summary.json").symlink_to("/etc/passwd")
    deep = "[" * 100_000
    (write("runs/deep", [[0.5]]) / "metrics.jsonl").write_text(deep)
    (tmp_path / "runs/deep/summary.json").write_text(deep)
    many = write("runs/many", [[0.5]])
    (many / "config.toml").write_text(
        'seed = 0\nrounds = 1\npeers = 10000000000\n[method]\nname="a"'
    )
    write("runs/good", [[0.5, 0.6]])
    write(os.fsdecode(b"runs/no-text-\xff"), [[0.5, 0.6]])
    write("runs/two\nlines", [[0.5, 0.6]])
    running = RunDirectory.open(named)
    with closing(running), viewed(tmp_path / "runs") as place:
        assert place is not None
        with Client(place.address) as client:
            pages = [client.page("/")]
            for link in {part.split('"')[0] for part in pages[0].split('href="/page/')[1:]}:
                pages.append(client.page(f"/page/{link.replace('&#39;', '%27')}"))
    assert len(pages) == 12  # the list, ten runs of their own and all of them together
    for html in pages:
        assert html.count("<script") == 1
        assert str(page_script()) in html
        assert 'onload="x' not in html
        assert "root:" not in html
    assert "&lt;script&gt;alert" in pages[0]
    assert any("The name of a peer must be 1 to 40 letters" in html for html in pages)


def test_a_run_that_cannot_be_drawn_is_named_beside_the_report_of_the_others(
    write: Write, tmp_path: Path
) -> None:
    write("runs/good", [[0.5, 0.6]])
    write("runs/evil", [[0.5, 0.6]], names=["../..", "bob"])
    with viewed(tmp_path / "runs") as place:
        assert place is not None
        with Client(place.address) as client:
            html = client.page("/page/runs")
            assert "<h1>Dis-PFL</h1>" in html
            assert "runs/evil: The name of a peer must be 1 to 40 letters" in html
            assert "<h1>evil</h1>" in client.page("/page/runs/evil")


def test_a_huge_file_is_named_and_not_read(write: Write, tmp_path: Path) -> None:
    """Each has 5 GB of zeros, which take no space on the disk."""
    for name in ("metrics.jsonl", "summary.json", ".progress.json", "split.safetensors"):
        with (write(f"runs/huge{name}", [[0.5, 0.6]]) / name).open("a") as file:
            file.truncate(5_000_000_000)
    write("runs/good", [[0.5, 0.6]])
    with viewed(tmp_path / "runs") as place:
        assert place is not None
        with Client(place.address) as client:
            assert client.page("/").count("5,000 MB; pages read files of at most 500 MB") == 4
            assert "metrics.jsonl has 5,000 MB" in client.page("/page/runs/hugemetrics.jsonl")
            assert "<h1>Dis-PFL</h1>" in client.page("/page/runs")  # good


def test_no_file_leads_out_of_the_folders(write: Write, tmp_path: Path) -> None:
    """Each run has a link to a file of a run or site elsewhere, whose score is 0.123."""
    secret = write("secret", [[0.123, 0.123]], method={"name": "secret"})
    for name in ("config.toml", "metrics.jsonl", "summary.json"):
        file = write(f"runs/{name}", [[0.5, 0.6]]) / name
        file.unlink()
        file.symlink_to(secret / name)
    site = write("elsewhere/secret/run", [[0.123]]).parent
    (site / "site.toml").touch()
    status = {"round": 1, "score": 0.123, "state": "secret", "peers": {}}
    (site / "run/status.json").write_text(json.dumps(status))
    (write("runs/all", [], rounds=2) / "sites").symlink_to(site.parent)
    of_one = write("runs/one", [], rounds=2) / "sites"
    of_one.mkdir()
    (of_one / "000").symlink_to(site)
    of_run = write("runs/two", [], rounds=2) / "sites/000"
    of_run.mkdir(parents=True)
    (of_run / "site.toml").touch()
    (of_run / "run").symlink_to(site / "run")
    with viewed(tmp_path / "runs") as place:
        assert place is not None
        with Client(place.address) as client:
            html = client.page("/")
            assert html.count("is a link; pages do not follow it") == 3
            for name in ("config.toml", "metrics.jsonl", "summary.json", "all", "one", "two"):
                html += client.page(f"/page/runs/{name}")
    assert "0.123" not in html
    assert "secret" not in html


def test_beyond_this_machine_a_token_is_asked_for(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: None
) -> None:
    write("runs/a", [[0.5, 0.6]])
    monkeypatch.setattr(background, "DEFAULT_HOST", "0.0.0.0")
    with viewed(tmp_path / "runs") as place:
        assert place is not None
        assert place.token
        here, elsewhere = urlsplit(place.address), urlsplit(place.elsewhere_with_token)
        assert (here.hostname, elsewhere.hostname) == ("127.0.0.1", socket.gethostname().lower())
        assert elsewhere.query == f"token={place.token}"
        with Client(place.address) as client:
            for path in ("/", "/page/runs/a", "/events/", "/?token=wrong"):
                response = client.request(path)
                assert response.status == 401
                assert response.getheader("X-Frame-Options") == "DENY"
                assert b"runs/a" not in response.read()
            form = {"Content_Type": "application/x-www-form-urlencoded"}
            assert client.request("/", "POST", "token=wrong", **form).status == 401
            admitted = [
                client.request("/page/runs/a", "POST", f"token={place.token}", **form),
                client.request(f"/page/runs/a?token={place.token}"),
            ]
            for response in admitted:
                assert response.status == 303
                assert response.getheader("Location") == "/page/runs/a"
                cookie = response.getheader("Set-Cookie", "")
                assert "HttpOnly" in cookie
                assert "SameSite=Lax" in cookie
                assert client.request("/", Cookie=cookie.partition(";")[0]).status == 200
            assert client.request("/", Host="evil.example").status == 403
            redirect = client.request(f"//evil.example/?token={place.token}")
            assert redirect.getheader("Location") == "/evil.example/"


def test_an_address_that_is_taken_is_named() -> None:
    import asyncio

    from dispfl.view.pages import RunPages

    async def serve(port: int) -> None:
        async with server.serving(RunPages([]), "127.0.0.1", port):
            pass

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with refused(ConfigError, key="--listen"):
            asyncio.run(serve(taken.getsockname()[1]))


@pytest.mark.parametrize("text", ["8000", "localhost", "host:port", "a/b:1", "", "me@host:1"])
def test_an_address_is_a_host_and_a_port(text: str) -> None:
    with refused(ConfigError, key="--listen"):
        parse_listen(text)


def test_an_address_with_brackets_is_ipv6() -> None:
    assert parse_listen("[::1]:8000") == ("::1", 8000)
