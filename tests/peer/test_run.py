"""The node of a site with a real network and disk: start, events while it runs, and end."""

import asyncio
import os
import re
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from dispfl.errors import ConfigError, RunError
from dispfl.peer.config import Deadlines, SiteConfig
from dispfl.peer.local import free_ports
from dispfl.peer.membership.address import Address
from dispfl.peer.membership.records import MemberRecord
from dispfl.peer.run import open_node, run_node
from dispfl.peer.setup import local_setup
from dispfl.peer.site import STATUS, Site, SiteInfo
from dispfl.peer.transport.base import Request, Response, Unreachable

PATIENCE = 60.0
"""Seconds after which a test fails; generous for a loaded machine."""


@pytest.fixture
def make_site(tmp_path: Path) -> Callable[[str], Site]:
    """`make_site("alice")`: create a site with its own table and many rounds."""

    def make(name: str) -> Site:
        data = {"path": "table.csv", "label": "y"}
        config = SiteConfig.from_values({"rounds": 100_000, "model": {"name": "mlp"}, "data": data}).to_toml()
        [port] = free_ports(1)
        site = Site.create(tmp_path / name, SiteInfo(name=name, listen=f"127.0.0.1:{port}"), config)
        (site.folder / "table.csv").write_text("a,b,y\n" + "1,2,x\n2,1,z\n" * 8)
        return site

    return make


class EventRecorder(list[tuple[str, Mapping[str, object]]]):
    """Records the logged events."""

    def __call__(self, event: str, fields: Mapping[str, object]) -> None:
        self.append((event, fields))

    @property
    def events(self) -> list[str]:
        """The names of the events."""
        return [event for event, _ in self]

    async def until(self, event: str) -> Mapping[str, object]:
        """Wait for an event and return its fields."""
        async with asyncio.timeout(PATIENCE):
            while event not in self.events:
                await asyncio.sleep(0.02)
        return dict(self)[event]


def test_sigterm_is_logged_and_sets_the_status_to_stopped(make_site: Callable[[str], Site]) -> None:
    alice, recorder = make_site("alice"), EventRecorder()

    async def story() -> None:
        running = asyncio.create_task(run_node(alice, local_setup(alice), Deadlines(), recorder))
        await recorder.until("round")
        assert alice.is_running()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait([running], timeout=PATIENCE)
        assert running.cancelled()

    asyncio.run(story())
    assert recorder.events[0] == "starting"
    assert recorder[-1][0] == "stopped"
    assert recorder[-1][1]["by"] == ["SIGTERM"]
    status = alice.status()
    assert status is not None
    assert status["state"] == "stopped"
    assert not alice.is_running()


def test_a_port_in_use_is_reported_and_the_node_does_not_start(make_site: Callable[[str], Site]) -> None:
    alice, recorder = make_site("alice"), EventRecorder()
    where = alice.info.listen_address
    sentence = f"Cannot listen on {where} (address already in use); choose another address."
    with socket.create_server(tuple(where)), pytest.raises(ConfigError, match=f"^{re.escape(sentence)}$"):
        asyncio.run(run_node(alice, local_setup(alice), Deadlines(), recorder))
    assert "starting" not in recorder.events


def test_an_unwritable_status_hides_no_error_and_keeps_no_lock(make_site: Callable[[str], Site]) -> None:
    alice, recorder = make_site("alice"), EventRecorder()

    async def story() -> None:
        async with open_node(alice, local_setup(alice), Deadlines(), recorder):
            (alice.run_folder / STATUS).mkdir()  # a folder cannot be replaced by a file
            raise RunError("The first error.")

    with pytest.raises(RunError, match=r"^The first error\.$"):
        asyncio.run(story())
    assert not alice.is_running()
    assert "status.json could not be written" in str(dict(recorder)["problem"]["detail"])


def test_a_running_site_logs_changes_of_its_members(make_site: Callable[[str], Site]) -> None:
    alice, bob, recorder = make_site("alice"), make_site("bob"), EventRecorder()

    async def story() -> None:
        async with open_node(alice, local_setup(alice), Deadlines(), recorder):
            other = Site.open(alice.folder)  # as in another process
            await asyncio.sleep(0.1)
            other.members.accept(bob.invite())
            assert await recorder.until("accepted") == {"peer": "bob", "address": bob.info.listen}
            bob.rotate()
            other.members.accept(Site.open(bob.folder).invite())
            assert await recorder.until("rotated") == {"peer": "bob", "before": bob.identity.fingerprint}
            other.members.revoke("bob")
            assert await recorder.until("revoked") == {"peer": "bob"}

    asyncio.run(story())
    assert recorder.events == ["accepted", "rotated", "revoked"]


def test_a_revoked_members_transfer_is_cut_and_its_certificate_no_longer_passes_tls(
    make_site: Callable[[str], Site],
) -> None:
    alice, bob, recorder = make_site("alice"), make_site("bob"), EventRecorder()
    alice.members.accept(bob.invite())
    bob.members.accept(alice.invite())
    asked = asyncio.Event()

    async def never(sender: str, request: Request) -> Response:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def story() -> None:
        async with (
            open_node(alice, local_setup(alice), Deadlines(), recorder) as (node, _),
            open_node(bob, local_setup(bob), Deadlines(), EventRecorder()) as (other, _),
        ):
            await node.client.transport.serve(never)
            transfer = asyncio.create_task(other.client.transport.request("alice", Request("model", {})))
            await asked.wait()
            Site.open(alice.folder).members.revoke("bob")  # as in another process
            async with asyncio.timeout(PATIENCE):
                with pytest.raises(Unreachable, match="the connection broke"):
                    await transfer
                with pytest.raises(Unreachable, match="alice may not have accepted our certificate"):
                    await other.client.transport.request("alice", Request("model", {}))
            assert node.ctx.guard.refused["unknown"]["unknown-certificate"] == 1
            assert "bob" not in node.ctx.guard.refused  # no request of it was read

    asyncio.run(story())


def test_a_new_address_of_a_member_is_logged_and_not_used_outside_the_allowed_networks(
    make_site: Callable[[str], Site],
) -> None:
    alice, bob, recorder = make_site("alice"), make_site("bob"), EventRecorder()
    config = alice.folder / "site.toml"
    config.write_text(config.read_text().replace("allow_networks = []", 'allow_networks = ["127.0.0.2/32"]'))
    alice = Site.open(alice.folder)
    alice.members.accept(bob.invite())
    record = MemberRecord.sign(bob.identity, "dispfl", Address("localhost", 9), 0.5, 0, 1).to_json()

    async def story() -> None:
        async with open_node(alice, local_setup(alice), Deadlines(), recorder) as (node, _):
            await node.ctx.compute(lambda: node.ctx.membership.merge([record]))
            changed = {"peer": "bob", "address": "localhost:9", "before": bob.info.listen}
            assert await recorder.until("address changed") == changed
            with pytest.raises(
                Unreachable, match=r"cannot be reached at localhost:9: .*127\.0\.0\.1 is not in allow_networks"
            ):
                await node.client.transport.request("bob", Request("sync", {}))

    asyncio.run(story())
