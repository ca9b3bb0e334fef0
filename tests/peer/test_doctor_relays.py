"""What `dispfl peer doctor` says of relays, and of the proxy that leads to them."""

import asyncio
from pathlib import Path

import pytest
from relay_world import QUICK, HostileRelay, Lie, RelayWorld

from dispfl.peer.doctor import relays as checks
from dispfl.peer.doctor.findings import Finding, Level
from dispfl.peer.doctor.network import Answers, check_address, check_member
from dispfl.peer.doctor.relays import check_proxy, check_relays
from dispfl.peer.membership.member_list import Member
from dispfl.peer.site import Site, SiteInfo
from dispfl.peer.transport.base import Request, Response


def make_site(folder: Path, world: RelayWorld) -> Site:
    relays = tuple(map(str, world.relays))
    site = Site.create(folder / "alice", SiteInfo(name="alice", relays=relays), {})
    world.identities["alice"] = site.identity
    return site


async def findings(site: Site, *, running: bool = False) -> dict[str, Finding]:
    return {finding.topic: finding async for finding in check_relays(site, QUICK, running=running)}


async def answer(sender: str, request: Request) -> Response:
    return Response({})


def test_the_site_calls_itself_by_its_relay_with_and_without_its_node(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = RelayWorld.of(tmp_path, "bob")
        async with world.relay() as relay:
            site = make_site(tmp_path, world)
            place = f"wss://127.0.0.1:{relay.port}"
            found = (await findings(site))["relay"]
            assert found.level == Level.FAILURE
            assert found.text.startswith(f"{place}: it refuses us: This relay does not admit")
            assert "Send this site's invite to the relay's owner" in found.advice

            relay.admit(world.admitted())
            found = (await findings(site))["relay"]
            assert (found.level, found.text) == (
                Level.OK,
                f"{place} connects this site with itself, both ways",
            )
            found = (await findings(site, running=True))["relay"]
            assert found.level == Level.WARNING
            async with world.site("alice", answer) as node:
                assert node.relays is not None
                while not any(state.is_connected for state in node.relays.states.values()):
                    await asyncio.sleep(0.01)
                found = (await findings(site, running=True))["relay"]
                assert (found.level, found.text) == (
                    Level.OK,
                    f"{place} connects others with this site's node",
                )
            assert check_address(site, []).text == f"others reach this site by {place}"
        found = (await findings(site))["relay"]
        assert found.level == Level.FAILURE
        assert "connection refused" in found.text

    asyncio.run(scenario())


def test_a_relay_that_passes_nothing_on_and_one_with_another_name_are_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "ECHO_SECONDS", 0.3)

    async def scenario() -> None:
        world = RelayWorld.of(tmp_path, "bob")
        async with world.relay(HostileRelay) as relay:
            site = make_site(tmp_path, world)
            relay.admit(world.admitted())
            for lie in (Lie.STALL, Lie.DROP):
                relay.lie = lie
                found = (await findings(site))["relay"]
                assert found.level == Level.FAILURE
                assert found.text.endswith("accepts this site, but passes no bytes on")
            relay.lie = None
            async with world.site("alice", answer) as node:
                assert node.relays is not None
                while not any(state.is_connected for state in node.relays.states.values()):
                    await asyncio.sleep(0.01)
                relay.lie = Lie.STALL
                found = (await findings(site, running=True))["relay"]
                assert found.level == Level.FAILURE
                assert found.text.endswith("accepts this site, but passes no bytes on")
                relay.lie = Lie.FLIP
                found = (await findings(site, running=True))["relay"]
                assert found.level == Level.FAILURE
                assert found.text.endswith("with another one, or changes their bytes")
            relay.lie = None
            relay.name = relay.name._replace(host="relay.example.org")
            found = (await findings(site))["relay"]
            assert found.level == Level.FAILURE
            assert f"--advertise 127.0.0.1:{relay.port}" in found.advice

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("proxy", "level", "text"),
    [
        ("", Level.OK, "none: HTTPS_PROXY is not set"),
        ("http://proxy:3128", Level.OK, "HTTPS_PROXY leads to relays by http://proxy:3128"),
        (
            "http://ann:secret@proxy:3128",
            Level.OK,
            "HTTPS_PROXY leads to relays by http://proxy:3128 with a user and a password",
        ),
        (
            "https://proxy:3128",
            Level.FAILURE,
            "HTTPS_PROXY leads to relays by https://proxy:3128, which is not used",
        ),
    ],
)
def test_the_proxy_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch, proxy: str, level: Level, text: str
) -> None:
    monkeypatch.delenv("https_proxy", raising=False)
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    found = check_proxy()
    assert (found.level, found.text) == (level, text)
    assert "secret" not in found.text


def test_a_member_behind_a_relay_is_reached_by_it(tmp_path: Path) -> None:
    site = Site.create(
        tmp_path / "bob", SiteInfo(name="bob", relays=("wss://relay.example.org",)), {}
    )
    member = Member.invited(site.invite())
    where = "wss://relay.example.org:443"
    answers = Answers(replied={"bob"}, callers={"bob"}, routes={"bob": where})
    assert check_member(member, answers, {}, False).text == f"reached by {where}, and it reaches us"
    silent = check_member(member, Answers(problems={"bob": "no response"}), {}, False)
    assert silent.advice.startswith("Does bob run? If so, `dispfl peer status` there says")
