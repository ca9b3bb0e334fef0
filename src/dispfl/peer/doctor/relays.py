"""Checks of the way out and of a site's own relays: the proxy, and a call to ourselves."""

import asyncio
import secrets
import ssl
from collections.abc import AsyncIterator
from urllib.request import getproxies

import aiohttp
from yarl import URL

from dispfl.peer.doctor.findings import Finding, failure, ok, warning
from dispfl.peer.membership.address import RelayAddress
from dispfl.peer.membership.identity import Identity, client_context
from dispfl.peer.site import Site
from dispfl.peer.transport.http import Limits
from dispfl.peer.transport.relay_client import RelayClient, RelayError, until_called
from dispfl.peer.transport.relay_protocol import Role

ECHO_SECONDS = 10.0
"""How long a relay has to pass on a few bytes."""
_ECHO_BYTES = 1000


async def check_relays(site: Site, limits: Limits, *, running: bool) -> AsyncIterator[Finding]:
    """Check the proxy, and that this site is reached by each of its relays, both ways."""
    relays = site.info.relay_addresses
    has_relayed_members = any(member.relays for member in site.members.accepted())
    if relays or has_relayed_members:
        yield check_proxy()
    for relay in relays:
        client = RelayClient(
            site.identity,
            limits,
            ca_bundle=site.info.ca_bundle,
            may_connect=site.info.may_connect,
        )
        try:
            yield await _check_relay(client, relay, site.identity, running=running)
        finally:
            await client.close()


def check_proxy() -> Finding:
    """Say which proxy leads to relays."""
    proxy = getproxies().get("https")
    if not proxy:
        return ok("proxy", "none: HTTPS_PROXY is not set")
    try:
        url = URL(proxy)
    except ValueError:
        return failure("proxy", "HTTPS_PROXY is no address", "Write http://HOST:PORT.")
    user = " with a user and a password" if url.user else ""
    text = f"HTTPS_PROXY leads to relays by {url.with_user(None)}{user}"
    if url.scheme != "http" or not url.host:
        return failure("proxy", f"{text}, which is not used", "Write http://HOST:PORT.")
    return ok("proxy", text)


async def _check_relay(
    client: RelayClient, relay: RelayAddress, identity: Identity, *, running: bool
) -> Finding:
    place = f"wss://{relay.address}"
    try:
        if running:
            await _call_node(client, relay, identity)
            return ok("relay", f"{place} connects others with this site's node")
        await _call_ourselves(client, relay, identity.fingerprint)
    except RelayError as problem:
        if running and not problem.advice:
            text = f"{place} does not connect others with this site's node: {problem}"
            return warning("relay", text, "Normal while it starts; otherwise read its log.")
        return failure("relay", f"{place}: {problem}", problem.advice)
    except ssl.SSLError:
        text = f"{place} connects callers of this site with another one, or changes their bytes"
        return failure("relay", text, "Tell its owner, and use another relay meanwhile.")
    except (TimeoutError, aiohttp.ClientError, OSError):
        text = f"{place} accepts this site, but passes no bytes on"
        return failure("relay", text, "Tell its owner, and use another relay meanwhile.")
    return ok("relay", f"{place} connects this site with itself, both ways")


async def _call_node(client: RelayClient, relay: RelayAddress, identity: Identity) -> None:
    """Call this site's running node, and let it prove its key through the relay.

    That takes bytes in both directions. The node then refuses the connection: a site is no member
    of its own list.
    """
    connection = await client.call(relay, identity.fingerprint)
    tls = client_context(identity, [identity.certificate])
    async with asyncio.timeout(ECHO_SECONDS):
        _, writer = await asyncio.open_connection(sock=connection, ssl=tls, server_hostname="")
    writer.transport.abort()


async def _call_ourselves(client: RelayClient, relay: RelayAddress, fingerprint: str) -> None:
    """Send bytes through the relay to ourselves, and back."""
    called = await client.open(relay, Role.PARK)
    try:
        try:
            caller = await client.open(relay, Role.CALL, fingerprint)
        except RelayError:
            if await _was_called(called):  # by a member that runs: so others reach us
                return
            raise
        try:
            async with asyncio.timeout(ECHO_SECONDS):
                sent = secrets.token_bytes(_ECHO_BYTES)
                await caller.send_bytes(sent)
                if not await until_called(called):
                    raise TimeoutError
                await called.send_bytes(await called.receive_bytes())
                if await caller.receive_bytes() != sent:
                    raise TimeoutError
        except TypeError:  # another message than bytes
            raise TimeoutError from None
        finally:
            await caller.close()
    finally:
        await called.close()


async def _was_called(websocket: aiohttp.ClientWebSocketResponse) -> bool:
    try:
        async with asyncio.timeout(ECHO_SECONDS):
            return await until_called(websocket)
    except TimeoutError:
        return False
