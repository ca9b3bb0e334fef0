"""The page of a real site, from its folder alone."""

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from html_cells import cells
from messages import refused
from recorded_runs import a_line, scored, spread

from dispfl.errors import ConfigError, RunError
from dispfl.peer.setup.site_config import SiteConfig
from dispfl.peer.site import Site, SiteInfo
from dispfl.peer.state.log import RECENT_LINES, RecentEvents
from dispfl.view.pages import RunPages
from dispfl.view.settings import TOKEN_FILE, serving_site, site_token
from dispfl.view.site_page import LOG_FILE

EVIL = """<script>alert('1')</script>" onload="x"""


def a_site(folder: Path, name: str, **config: Any) -> Site:
    return Site.create(
        folder / name, SiteInfo(name=name, listen=f"{name}.example.org:7600"), config
    )


@pytest.fixture
def alice(tmp_path: Path) -> Site:
    """A site after two rounds, with one member, as its node leaves it."""
    site = a_site(tmp_path, "alice")
    site.members.accept(a_site(tmp_path, "bob").invite())
    run = site.folder / "run"
    run.mkdir()
    lines = []
    for t, (mixed, score) in enumerate([(0.2, 0.5), (0.6, 0.7)]):
        line = a_line(t, scored(spread([score])), mixed=spread([mixed]))
        line |= {"received": ["bob"] if t else [], "missed": [] if t else ["bob"]}
        lines.append(json.dumps(line) + "\n")
    (run / "metrics.jsonl").write_text("".join(lines))
    bob = {"answered": 1, "missed": 1, "round": 1, "route": "direct", "received_bytes": 2_000_000}
    status = {
        "round": 2,
        "rounds": 20,
        "state": "stopped",
        "score": 0.7,
        "epsilon": 3.2,
        "peers": {"bob": bob},
        "refused": {"bob": {"checksum": 3}},
        "log": ["12:00:00  round  round=1"],
    }
    (run / "status.json").write_text(json.dumps(status))
    return site


def sections(folder: Path) -> dict[str, str]:
    """The parts of the page, which is the first one where there is nothing but a site."""
    draw = RunPages([folder]).find("")
    assert draw is not None
    return dict(draw().parts)


def test_the_page_has_rounds_members_refusals_checks_and_the_log(alice: Site) -> None:
    parts = sections(alice.folder)
    assert "<h1>alice: stopped</h1>" in parts["top"]
    assert "Round 2 of 20, stopped. Resume with: dispfl peer run" in parts["site"]
    assert "accuracy 0.700" in parts["site"]
    assert "epsilon 3.2 is spent" in parts["site"]
    assert cells(parts["rounds"]) == [
        ["2", "bob", "–", "0.500", "0.600", "0.700"],
        ["1", "nobody", "bob", "–", "0.200", "0.500"],
    ]
    [member] = cells(parts["members"])
    assert member[:2] == ["bob", "accepted"]
    assert member[2] == "bob.example.org:7600, direct"
    assert member[5:9] == ["1", "1", "-", "2.00 MB"]
    assert 3600 < int(member[-1]) <= 3650  # a new certificate is valid for ten years
    assert cells(parts["refused"]) == [["bob", "checksum", "The checksum does not match.", "3"]]
    assert [row[0] for row in cells(parts["checks"])] == ["key", "certificate"]
    assert "12:00:00  round  round=1" in parts["log"]


def test_the_log_of_a_site_is_no_way_out_of_its_folder(alice: Site, tmp_path: Path) -> None:
    (alice.folder / "run" / "status.json").unlink()
    log = alice.folder / LOG_FILE
    log.write_text("12:00:00  round")
    assert "12:00:00  round" in sections(alice.folder)["log"]
    (tmp_path / "secret").write_text("password")
    log.unlink()
    log.symlink_to(tmp_path / "secret")
    assert "password" not in sections(alice.folder)["log"]


def test_a_check_that_fails_says_what_to_do(alice: Site) -> None:
    alice.folder.chmod(0o755)
    rows = cells(sections(alice.folder)["checks"])
    assert rows[0][0] == "key"
    assert rows[0][1] == "! warning"
    assert rows[0][3] == f"Run: chmod 700 {alice.folder}"


def test_text_of_other_sites_cannot_become_tags(alice: Site) -> None:
    run = alice.folder / "run"
    status = json.loads((run / "status.json").read_text())
    status |= {
        "waiting": EVIL,
        "state": EVIL,
        "log": [EVIL],
        "refused": {EVIL: {EVIL: 1}},
        "protection": EVIL,
    }
    (run / "status.json").write_text(json.dumps(status))
    html = "".join(sections(alice.folder).values())
    assert "<script" not in html
    assert 'onload="x' not in html
    assert "&lt;script&gt;alert" in html


@pytest.mark.parametrize("content", ["{", "[]", '{"peers": 5}', '{"round": {}, "refused": 7}'])
def test_a_damaged_status_is_a_sentence(alice: Site, content: str) -> None:
    (alice.folder / "run" / "status.json").write_text(content)
    assert "site" in sections(alice.folder)


def test_a_node_shows_the_page_where_its_settings_say(tmp_path: Path) -> None:
    events = []

    async def main(site: Site) -> bytes:
        def read(address: str) -> bytes:
            with urllib.request.urlopen(address, timeout=20) as response:
                content: bytes = response.read()
            return content

        async with serving_site(site, lambda event, fields: events.append((event, fields))):
            return await asyncio.to_thread(read, str(events[0][1]["address"]))

    site = a_site(tmp_path, "alice", view={"listen": "127.0.0.1:0"})
    assert b"<h1>alice: not started</h1>" in asyncio.run(main(site))
    assert [event for event, _ in events] == ["view"]
    with refused(ConfigError, key="view.listen"):
        SiteConfig.compose({"view": {"listen": "8090"}})


def test_the_token_of_a_site_stays_and_only_its_owner_reads_it(alice: Site) -> None:
    token = site_token(alice.folder)
    file = alice.folder / "identity" / TOKEN_FILE
    assert (site_token(alice.folder), file.stat().st_mode & 0o077) == (token, 0)
    file.write_text("")
    with refused(RunError):
        site_token(alice.folder)


def test_the_status_file_has_the_last_lines_of_the_log() -> None:
    written = []
    log = RecentEvents(lambda event, fields: written.append(event))
    for t in range(RECENT_LINES + 5):
        log("round", {"round": t, "detail": "a\nb"})
    assert len(written) == RECENT_LINES + 5
    assert len(log.lines) == RECENT_LINES
    assert log.lines[-1].endswith(f'round        round={RECENT_LINES + 4}  detail="a\\nb"')
