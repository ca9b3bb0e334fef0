"""A site that the roster has removed, and a site whose copy runs on another machine."""

import asyncio
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from simulated_world import LIMIT as WORLD_LIMIT
from simulated_world import World, reliable
from site_world import HOSTILE, LIMIT, SiteWorld, time_of

from dispfl.errors import RunError
from dispfl.peer.membership.roster import Roster
from dispfl.peer.node import Node
from dispfl.peer.setup.spec import federation_spec
from dispfl.peer.site import Site
from dispfl.peer.state.status import MAX_INSTANCES, PeerStatus
from dispfl.peer.state.store import PeerStore, SavingThread
from dispfl.peer.transport.base import JSON, Request
from dispfl.testing.virtual_time import run

SEED_OF_FIVE_SITES = 0


class RosterWorld(SiteWorld):
    """Honest sites on a virtual clock, whose members a roster lists."""

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(seed, folder)
        self.nodes: dict[str, Node] = {}
        self.key = Ed25519PrivateKey.generate()
        admins = {"ann": self.key.public_key().public_bytes_raw()}
        invites = [self.sites[name].invite() for name in self.names]
        self.roster = Roster("test", 1, 1, admins).with_members(invites).signed_by(self.key)
        for name in self.names:
            self.sites[name].members.revoke(HOSTILE)
            self.sites[name].members.accept_roster(self.roster, self.roster.fingerprint)

    def node(self, site: Site, store: PeerStore) -> tuple[Node, SavingThread]:
        self.nodes[site.name], saving = super().node(site, store)
        return self.nodes[site.name], saving


def test_a_site_that_the_roster_removed_is_told_and_stops_once_it_has_the_signed_roster(
    tmp_path: Path,
) -> None:
    world = RosterWorld(SEED_OF_FIVE_SITES, tmp_path)
    first, *_, removed = world.names
    assert len(world.names) == 5

    async def story() -> None:
        for name in world.names:
            world.start(name)
        while world.nodes.keys() != set(world.names) or world.reached.get(removed, 0) < 2:
            await asyncio.sleep(0.1)
        shorter = world.roster.without_members([removed]).signed_by(world.key)
        for name in world.names[:-1]:
            world.sites[name].members.accept_roster(shorter)
        status = world.nodes[removed].ctx.status
        while not status.waiting or "roster" not in status.waiting:
            await asyncio.sleep(0.1)
        assert "Version 2 of the roster does not list" in status.waiting
        assert not world.running[removed].done()  # on what others say it only waits

        world.sites[removed].members.accept_roster(shorter)
        with pytest.raises(RunError, match="Version 2 of the roster, signed by ann, does not list"):
            await world.running[removed]
        await asyncio.gather(*(world.running[name] for name in world.names[:-1]))

    with time_of(world):
        run(story(), LIMIT)
    assert world.ends[first] == "finished"


def test_a_restarted_site_is_not_taken_for_its_copy_and_a_copy_is_noticed() -> None:
    peer = PeerStatus()
    for process in ("a", "a", "b", "b", "c"):  # restarted twice
        peer.mark_instance(process)
    assert not peer.cloned
    peer.mark_instance("b")
    assert peer.cloned
    for number in range(100):
        peer.mark_instance(str(number))
    assert len(peer.instances) == MAX_INSTANCES


def test_members_tell_two_processes_with_one_key_that_there_are_two() -> None:
    world = World(8, reliable, peers=2)
    spec = federation_spec("test", world.context, world.context.layout, world.weights, 0.5)
    node = world.node("000")

    async def story() -> list[JSON]:
        living = asyncio.create_task(node.run(0, world.start["000"]))
        transport = world.network.join("001")
        await asyncio.sleep(1)
        told = []
        for process in ("here", "there", "here", "there"):
            header: dict[str, JSON] = {"spec": {**spec}, "instance": process, "current_round": 0}
            response = await transport.request("000", Request("sync", header))
            told.append(response.header.get("cloned"))
        living.cancel()
        await asyncio.wait([living])
        await transport.close()
        return told

    assert run(story(), WORLD_LIMIT) == [None, None, True, True]
    assert [event for _, _, event, _ in world.trace].count("cloned site") == 1
    assert node.ctx.status.as_json()["peers"]["001"]["cloned"]


def test_a_site_shows_once_who_has_met_its_copy() -> None:
    world = World(8, reliable, peers=2)
    node = world.node("000")

    async def story() -> None:
        for _ in range(3):
            node.ctx.note_response("001", {"current_round": 0, "cloned": True})

    run(story(), WORLD_LIMIT)
    assert node.ctx.status.as_json()["clone_seen_by"] == ["001"]
    [detail] = [facts for _, _, event, facts in world.trace if event == "cloned site"]
    assert "001 says that another process with this site's key runs" in detail
