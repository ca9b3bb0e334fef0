"""A site in a process: how it begins, what it notices meanwhile, and how it ends."""

import asyncio
import os
import re
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from dispfl.errors import ConfigError, RunError
from dispfl.peer.pace import Pace
from dispfl.peer.plan import Plan
from dispfl.peer.running import prepared, take_part
from dispfl.peer.share import share_of
from dispfl.peer.site import STATUS, Site, Whereabouts
from dispfl.up import free_ports

PATIENCE = 60.0
"""Seconds after which what should have happened has not; a busy machine takes its time."""


@pytest.fixture
def make_site(tmp_path: Path) -> Callable[[str], Site]:
    """`make_site("alice")`: with a table of its own, for very many rounds."""

    def make(name: str) -> Site:
        data = {"path": "table.csv", "label": "y"}
        plan = Plan(rounds=100_000, model={"name": "mlp"}, data=data).to_toml()
        [port] = free_ports(1)
        site = Site.create(tmp_path / name, Whereabouts(name=name, listen=f"127.0.0.1:{port}"), plan)
        (site.folder / "table.csv").write_text("a,b,y\n" + "1,2,x\n2,1,z\n" * 8)
        return site

    return make


class Told(list[tuple[str, Mapping[str, object]]]):
    """The events that a site has told of."""

    def __call__(self, event: str, facts: Mapping[str, object]) -> None:
        self.append((event, facts))

    @property
    def events(self) -> list[str]:
        """Their names."""
        return [event for event, _ in self]

    async def until(self, event: str) -> Mapping[str, object]:
        """Wait for one; its facts."""
        async with asyncio.timeout(PATIENCE):
            while event not in self.events:
                await asyncio.sleep(0.02)
        return dict(self)[event]


def test_a_polite_kill_is_told_and_leaves_a_status_that_says_stopped(make_site: Callable[[str], Site]) -> None:
    alice, told = make_site("alice"), Told()

    async def story() -> None:
        running = asyncio.create_task(take_part(alice, share_of(alice), Pace(), told))
        await told.until("round")
        assert alice.is_running()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait([running], timeout=PATIENCE)
        assert running.cancelled()

    asyncio.run(story())
    assert told.events[0] == "starting"
    assert told[-1][0] == "stopped"
    assert told[-1][1]["by"] == ["SIGTERM"]
    status = alice.status()
    assert status is not None
    assert status["state"] == "stopped"
    assert not alice.is_running()


def test_a_port_in_use_is_one_sentence_and_nothing_is_said_to_listen(make_site: Callable[[str], Site]) -> None:
    alice, told = make_site("alice"), Told()
    where = alice.where.listening
    sentence = f"Cannot listen on {where} (address already in use); choose another address."
    with socket.create_server(tuple(where)), pytest.raises(ConfigError, match=f"^{re.escape(sentence)}$"):
        asyncio.run(take_part(alice, share_of(alice), Pace(), told))
    assert "starting" not in told.events


def test_a_status_that_cannot_be_written_hides_no_error_and_keeps_no_lock(make_site: Callable[[str], Site]) -> None:
    alice, told = make_site("alice"), Told()

    async def story() -> None:
        async with prepared(alice, share_of(alice), Pace(), told):
            (alice.run_folder / STATUS).mkdir()  # nothing can take its place
            raise RunError("The first error.")

    with pytest.raises(RunError, match=r"^The first error\.$"):
        asyncio.run(story())
    assert not alice.is_running()
    assert "status.json could not be written" in str(dict(told)["trouble"]["why"])


def test_what_changes_on_the_members_list_is_told_by_the_site_that_keeps_it(make_site: Callable[[str], Site]) -> None:
    alice, bob, told = make_site("alice"), make_site("bob"), Told()

    async def story() -> None:
        async with prepared(alice, share_of(alice), Pace(), told):
            typed = Site.open(alice.folder)  # as the commands of another process do
            await asyncio.sleep(0.1)
            typed.members.accept(bob.invite())
            assert await told.until("accepted") == {"peer": "bob"}
            bob.rotate()
            typed.members.accept(Site.open(bob.folder).invite())
            assert await told.until("rotated") == {"peer": "bob"}
            typed.members.revoke("bob")
            assert await told.until("revoked") == {"peer": "bob"}

    asyncio.run(story())
    assert told.events == ["accepted", "rotated", "revoked"]
