"""Relays are reached through HTTP proxies, and through proxies that inspect TLS."""

import contextlib
import datetime
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from messages import check_wording
from own_authority import authority_and_certificate
from real_peers import until
from relay_world import LOCAL, RelayWorld

from dispfl.peer.local_federation import free_ports
from dispfl.peer.membership.address import RelayAddress
from dispfl.peer.transport.base import Request, Response
from dispfl.peer.transport.relay_client import RelayError
from dispfl.peer.transport.relay_protocol import Role

Play = Callable[[Any], None]
REQUEST = Request("model", {}, b"mask")
DAY = datetime.timedelta(days=1)


async def answer(sender: str, request: Request) -> Response:
    return Response({"sender": sender}, b"model" * 100_000)


def is_listening(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((LOCAL, port)).close()
        return True
    return False


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[str]:
    """A proxy that wants a user and a password, as HOST:PORT; its log is in proxy.log."""
    program = shutil.which("tinyproxy")
    if program is None:
        pytest.skip("there is no tinyproxy (Debian: apt-get install tinyproxy)")
    [port] = free_ports(1)
    log = tmp_path / "proxy.log"
    config = tmp_path / "tinyproxy.conf"
    config.write_text(
        f"Port {port}\nListen {LOCAL}\nTimeout 600\nBasicAuth ann secret\nLogLevel Connect\n"
        f'LogFile "{log}"\nMaxClients 50\n'
    )
    process = subprocess.Popen([program, "-d", "-c", str(config)], stdout=subprocess.DEVNULL)
    try:
        until(lambda: is_listening(port), pause=0.02)
        yield f"{LOCAL}:{port}"
    finally:
        process.kill()
        process.wait()


def test_sites_behind_a_proxy_with_a_password_reach_each_other(
    tmp_path: Path, proxy: str, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "")

    async def scenario() -> None:
        world = RelayWorld.of(tmp_path, "alice", "bob")
        monkeypatch.setenv("HTTPS_PROXY", f"http://ann:secret@{proxy}")
        async with (
            world.relay(),
            world.site("bob", answer),
            world.site("alice", own=()) as alice,
        ):
            response = await alice.request("bob", REQUEST)
            assert response.body == b"model" * 100_000
            [relay] = world.relays
            assert f"CONNECT {relay.address}" in (tmp_path / "proxy.log").read_text()

            monkeypatch.setenv("HTTPS_PROXY", f"http://ann:wrong@{proxy}")
            assert alice.relays is not None
            with pytest.raises(RelayError) as caught:
                await alice.relays.open(relay, Role.PARK)
            problem = caught.value
            assert str(problem) == "the proxy wants another user or password (status 401)"
            assert problem.advice == "Set HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT."

            [nowhere] = free_ports(1)
            monkeypatch.setenv("HTTPS_PROXY", f"http://{LOCAL}:{nowhere}")
            with pytest.raises(RelayError, match="the proxy cannot be reached: connection refused"):
                await alice.relays.open(relay, Role.PARK)

    play(scenario)


def test_a_certificate_of_the_sites_own_authority_is_trusted_by_its_ca_bundle_alone(
    tmp_path: Path, play: Play
) -> None:
    """As of a proxy that inspects TLS, or of a relay inside a hospital."""
    ca_bundle = authority_and_certificate(tmp_path)

    async def scenario() -> None:
        world = RelayWorld.of(tmp_path, "alice", "bob")
        async with world.relay() as relay:
            pinned = world.relays[0]
            public = RelayAddress(*pinned.address)
            relay._listener.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            relay._listener.context.load_cert_chain(tmp_path / "relay.pem")
            world.relays[:] = [public]
            async with (
                world.site("bob", answer, ca_bundle=str(ca_bundle)),
                world.site("alice", own=(), ca_bundle=str(ca_bundle)) as alice,
                world.site("alice", own=()) as trusting_nobody,
            ):
                assert (await alice.request("bob", REQUEST)).body == b"model" * 100_000
                assert trusting_nobody.relays is not None
                with pytest.raises(RelayError) as caught:
                    await trusting_nobody.relays.open(public, Role.PARK)
                check_wording(f"{caught.value} {caught.value.advice}")
                with pytest.raises(RelayError) as caught:
                    await trusting_nobody.relays.open(pinned, Role.PARK)
                check_wording(f"{caught.value} {caught.value.advice}")

    play(scenario)
