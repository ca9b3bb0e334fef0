"""Checks over the network: the port, the addresses, the clock, and every member both ways."""

import asyncio
import contextlib
import ipaddress
import random
import socket
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from shlex import quote
from typing import Any

from dispfl.errors import DispflError
from dispfl.peer.client import Client
from dispfl.peer.clocks import MAX_DIFFERENCE, wrong_clock
from dispfl.peer.deadlines import Deadlines
from dispfl.peer.doctor.findings import (
    Finding,
    Level,
    check_certificate,
    duration,
    failure,
    ok,
    warning,
)
from dispfl.peer.doctor.outboxes import check_outbox, check_readers
from dispfl.peer.doctor.relays import check_relays
from dispfl.peer.membership.address import Address
from dispfl.peer.membership.identity import is_current, server_context
from dispfl.peer.membership.member_list import Member
from dispfl.peer.membership.sync import SiteMembership
from dispfl.peer.node_context import NodeContext
from dispfl.peer.outbox.storage import StorageAccess
from dispfl.peer.schedule import hours_text, overlap
from dispfl.peer.setup.local_setup import LocalSetup
from dispfl.peer.setup.site_config import SiteConfig
from dispfl.peer.setup.spec_versions import SpecVersions
from dispfl.peer.site import Site
from dispfl.peer.site_network import SiteNetwork
from dispfl.peer.transport.base import JSON
from dispfl.peer.transport.guard import RequestGuard
from dispfl.peer.transport.http import os_error_text, peer_certificates

ANSWER_SECONDS = 10.0
"""How long a member is waited for."""
LISTEN_SECONDS = 5.0
"""How long a member that runs is given to connect to us: in the first round it tries every two
seconds."""
CLOCK_FAILURE = 86_400.0
"""Seconds between two clocks from which on certificates may not be valid yet."""
AT_ONCE = 32
"""Members that are asked at the same time."""


class ReadOnlyMembership(SiteMembership):
    """The members of a site, which other members' records and rosters do not change."""

    def merge(self, records: JSON) -> Collection[str]:
        """Ignore them."""
        return ()

    def lacks_roster(self, version: int, digest: str, administrators: str) -> bool:
        """Fetch none."""
        return False

    def merge_roster(self, text: str) -> bool:
        """Ignore it."""
        return False


@dataclass
class Answers:
    """What the members answered."""

    problems: dict[str, str] = field(default_factory=dict)
    """By member: why it did not answer."""
    mismatches: dict[str, str] = field(default_factory=dict)
    """By member: how its spec differs."""
    replied: set[str] = field(default_factory=set)
    ahead: dict[str, float] = field(default_factory=dict)
    """By member: seconds that its clock is ahead of ours."""
    callers: set[str] = field(default_factory=set)
    """Members that connected to us meanwhile."""
    hours: dict[str, list[int] | None] = field(default_factory=dict)
    """By member: its hours, in minutes of the UTC day; None: always."""
    routes: dict[str, str] = field(default_factory=dict)
    """By member: "direct", or the relay by which it was reached."""

    @property
    def reached(self) -> set[str]:
        """Members that answered, also with a refusal."""
        return self.replied | set(self.mismatches) | set(self.ahead)


def check_network(
    site: Site, setup: LocalSetup, config: SiteConfig, status: Mapping[str, Any], *, running: bool
) -> Iterator[Finding]:
    """Check the port, the addresses, and the members; `status` is what the node wrote last."""
    members = site.members.accepted()
    yield check_address(site, members)
    names = [member.name for member in members]
    t = status.get("round")
    if not isinstance(t, int):
        t = 0
    yield from asyncio.run(relay_findings(site, config, running=running))
    outbox = site.info.outbox
    if outbox is not None:
        access = StorageAccess(config.limits, ca_bundle=site.info.ca_bundle)
        yield asyncio.run(check_outbox(outbox, access))
        yield from check_readers(members)
    port, answers = asyncio.run(ask_members(site, setup, config, names, t, running=running))
    yield port
    if not members:
        folder = quote(str(site.folder))
        advice = f"Exchange invites: dispfl peer accept {folder} INVITE"
        pending = " ".join(site.members.pending())
        if pending:
            advice = f"Compare fingerprints by phone: dispfl peer confirm {folder} {pending}"
        yield warning("members", "no other site is accepted yet", advice)
        return
    if not answers.reached:
        text = f"not one can be reached: {names_of(names)}"
        advice = "Normal while no other site runs. Otherwise check this machine's network."
        yield failure("members", text, advice)
    expired = [member.name for member in members if not is_current(member.certificate)]
    clock = check_clock(answers.ahead, expired)
    yield clock
    yield from check_spec(answers)
    yield from check_hours(config, answers)
    peers = status.get("peers") or {}
    for member in members:
        renew = f"ask {member.name} for a new key and invite"
        finding = check_certificate(member.name, member.certificate, renew)
        if finding.level == Level.FAILURE and answers.ahead and clock.level == Level.OK:
            advice = f"This machine's clock is right, so {renew}, made with a right clock."
            finding = replace(finding, advice=advice)
        if finding.level != Level.OK:
            yield replace(finding, text=f"its certificate is {finding.text}")
        yield check_member(member, answers, peers.get(member.name, {}), running, outbox)


def check_hours(config: SiteConfig, answers: Answers) -> Iterator[Finding]:
    """Check that the hours of this site, and those of each member that answers, overlap."""
    own_hours = config.schedule.start().announcement().get("hours")
    apart = [name for name, hours in answers.hours.items() if not overlap(own_hours, hours)]
    for name in apart:
        text = (
            f"{name} takes part at {hours_text(answers.hours[name] or [])} and this site at"
            f" {hours_text(own_hours or [])} (UTC): they never exchange models"
        )
        yield warning("hours", text, f"Agree with {name} on schedule.hours that overlap.")
    if own_hours and not apart:
        yield ok("hours", f"this site takes part at {hours_text(own_hours)} (UTC)")


async def relay_findings(site: Site, config: SiteConfig, *, running: bool) -> list[Finding]:
    """Check the site's own relays, and the proxy that leads to them."""
    return [finding async for finding in check_relays(site, config.limits, running=running)]


async def ask_members(
    site: Site,
    setup: LocalSetup,
    config: SiteConfig,
    names: Sequence[str],
    t: int,
    *,
    running: bool,
) -> tuple[Finding, Answers]:
    """Ask every member what a starting node asks, and note who connects to us meanwhile."""
    answers = Answers()
    guard = RequestGuard()
    membership = ReadOnlyMembership(site, setup.run.method, setup.layout, setup.density)
    network = SiteNetwork(site, setup, membership, config.limits, guard)

    def log(event: str, fields: Mapping[str, object]) -> None:
        peer = fields.get("peer")
        if isinstance(peer, str):
            answers.problems[peer] = str(fields.get("detail") or event)

    versions = SpecVersions.single(setup.run, setup.spec)
    ctx = NodeContext(
        site.name, setup.run, setup.codec(), versions, membership, log=log, guard=guard
    )
    ctx.status.round = t
    deadlines = Deadlines(min=5 * ANSWER_SECONDS)  # a fifth is the time for a probe
    client = Client(ctx, network.transport, deadlines, random.Random())
    async with _listening(site, membership, answers.callers, running=running) as port:
        try:
            for start in range(0, len(names), AT_ONCE):
                await client.members.sync(names[start : start + AT_ONCE])
            for name in names:
                seconds_ahead = network.transport.clock_ahead(name)
                if seconds_ahead is not None:
                    answers.ahead[name] = seconds_ahead
                route = network.transport.route(name)
                if route is not None:
                    answers.routes[name] = route
                peer = ctx.status.peers[name]
                if peer.replies:
                    answers.replied.add(name)
                    answers.hours[name] = peer.hours
                if peer.spec_mismatch:
                    answers.mismatches[name] = peer.spec_mismatch
            await _wait_for_callers(answers, running=running)
        finally:
            await network.transport.close()
    return port, answers


async def _wait_for_callers(answers: Answers, *, running: bool) -> None:
    """Give members that run some time to connect, where nobody else would notice it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LISTEN_SECONDS):
            while not running and not answers.reached <= answers.callers:
                await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def _listening(
    site: Site, membership: SiteMembership, callers: set[str], *, running: bool
) -> AsyncIterator[Finding]:
    """Listen on the site's port, unless its node does; yield the finding.

    Callers see a connection that breaks.
    """
    where = site.info.listen_address
    if where is None:
        ways = ["its relays"] if site.info.relays else []
        ways += ["its outbox"] if site.info.outbox else []
        yield ok("port", f"none is needed: others reach this site by {' and '.join(ways)}")
        return
    if running:
        yield await _running_port(where)
        return

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        certificates = peer_certificates(writer.transport)
        name = None
        if certificates:
            with contextlib.suppress(DispflError):
                name = membership.identify(*certificates)
        if name:
            callers.add(name)
        writer.transport.abort()  # as if nobody listened

    context = server_context(site.identity, site.members.pinned())
    try:
        server = await asyncio.start_server(
            on_connection, *where, ssl=context, ssl_handshake_timeout=ANSWER_SECONDS
        )
    except OSError as problem:
        text = f"cannot listen on {where}: {os_error_text(problem)}"
        advice = "See which program uses it (ss -ltnp), or choose another `listen` in site.toml."
        yield failure("port", text, advice)
        return
    async with server:
        yield ok("port", f"{where} is free; the node can listen on it")


async def _running_port(where: Address) -> Finding:
    """Check whether the running node accepts connections."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(where.host, where.host)
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            _, writer = await asyncio.open_connection(host, where.port)
    except (OSError, TimeoutError) as problem:
        text = f"the node runs, but does not listen on {where}: {os_error_text(problem)}"
        return warning("port", text, "Normal while it starts; otherwise read its log.")
    writer.transport.abort()
    return ok("port", f"{where} is in use by this site's own node, which runs")


def check_address(site: Site, members: Sequence[Member]) -> Finding:
    """Check that the advertised address resolves, and that we listen on its address family."""
    where = site.info.address
    listen = site.info.listen_address
    if where is None or listen is None:
        return ok("address", f"others reach this site by {site.info.reach}")
    try:
        address_infos = socket.getaddrinfo(*where, type=socket.SOCK_STREAM)
    except OSError as problem:
        text = f"others reach this site at {where}, which does not resolve here: {problem.strerror}"
        return warning(
            "address", text, "Check `advertise` in site.toml, and the name's DNS records."
        )
    families = {family: str(address[0]) for family, _, _, _, address in address_infos}
    text = f"others reach this site at {where}"
    if where.host not in families.values():
        text += f" ({', '.join(families.values())})"
    hosts = [member.address.host for member in members if member.address]
    has_remote_members = not all(map(_is_loopback, hosts))
    if all(map(_is_loopback, families.values())) and has_remote_members:
        advice = "Set `advertise` in site.toml to this machine's address or name."
        return failure("address", f"{text}, which is this machine for each of them", advice)
    if socket.AF_INET6 in families and len(families) > 1 and ":" not in listen.host:
        advice = "Listen on [::], or remove the name's AAAA record."
        return warning("address", f"{text}; it listens on {listen}, IPv4 only", advice)
    listens_on_ipv6_only = ":" in listen.host and listen.host != "::"
    if families.keys() == {socket.AF_INET} and listens_on_ipv6_only:
        advice = "Listen on an IPv4 address, or on 0.0.0.0."
        return failure("address", f"{text}; it listens on {listen}, IPv6 only", advice)
    return ok("address", text)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_clock(ahead: Mapping[str, float], expired: Collection[str] = ()) -> Finding:
    """Compare our clock with those of the members that answered.

    `expired` are members whose certificates are not valid by our clock: if no member answers for
    that reason, our clock is wrong.
    """
    if not ahead:
        shown_time = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        if expired:
            text = (
                f"it shows {shown_time}, when the certificate of {names_of(expired)} is not valid"
            )
            return failure("clock", text, "Set this machine's clock: timedatectl")
        advice = "Compare it with your watch, or run doctor again when a member runs."
        text = f"it shows {shown_time}; no member answered to compare it with"
        return warning("clock", text, advice)

    wrong = wrong_clock(ahead)
    if wrong is None:
        return ok("clock", f"within {MAX_DIFFERENCE:.0f} s of {names_of(ahead)}")
    off = f"{duration(abs(wrong.ahead))} {'ahead of' if wrong.ahead > 0 else 'behind'}"
    finding = failure if abs(wrong.ahead) >= CLOCK_FAILURE else warning
    if not wrong.is_certain:
        advice = "Set the clock that is wrong; NTP keeps it right: timedatectl"
        return finding("clock", f"it is {off} {names_of(ahead)}'s", advice)
    if wrong.name is None:
        advice = "Set this machine's clock; NTP keeps it right: timedatectl"
        return finding("clock", f"it is {off} those of most members", advice)
    advice = f"Tell {wrong.name} to set its clock: timedatectl"
    return warning("clock", f"{wrong.name}'s is {off} the others; ours is right", advice)


def check_spec(answers: Answers) -> Iterator[Finding]:
    """Say with whom the federation's terms differ, and in which fields."""
    for name, mismatch in sorted(answers.mismatches.items()):
        advice = f"Agree with {name}, and create the site that is wrong again."
        yield failure("spec", mismatch, advice)
    agreeing = sorted(answers.replied - set(answers.mismatches))
    if agreeing:
        yield ok("spec", f"the same as at {names_of(agreeing)}")


def check_member(
    member: Member,
    answers: Answers,
    status: Mapping[str, Any],
    running: bool,
    outbox: str | None = None,
) -> Finding:
    """Check whether we reach a member, and it us, by our `outbox` at least."""
    name = member.name
    where = member.address
    if (
        where is None and not member.relays and not member.outbox
    ):  # on a roster, and not announced yet
        advice = "Normal until one of the others knows it; its node must have run once."
        return warning(name, "its address is not known yet", advice)
    if name not in answers.reached:
        text = answers.problems.get(name, "no response")
        return warning(name, text, _advice(text, member))
    if name not in answers.replied and name not in answers.mismatches:
        return failure(name, f"it refuses us: {answers.problems.get(name)}", f"Call {name}.")
    route = answers.routes.get(name, "direct")
    how = f"reached at {where}" if route == "direct" else f"reached by {route}"
    if name in answers.callers:
        return ok(name, f"{how}, and it reaches us")
    last_request = status.get("last_request")
    if running and isinstance(last_request, int | float):
        age = duration(max(0.0, time.time() - last_request))
        return ok(name, f"{how}, and its last request came {age} ago")
    if outbox is not None:
        return ok(name, f"{how}, and it finds our models in our outbox")
    text = f"{how}; that it reaches us is not certain: "
    if running:
        text += "it has sent no request since our node started"
        advice = (
            "Normal right after the start. Otherwise check our address and firewall; the log of"
            f" {name} shows why it fails."
        )
        return warning(name, text, advice)
    text += f"it did not try within {LISTEN_SECONDS:.0f} s"
    return warning(name, text, "Run doctor again while our node runs.")


def _advice(problem: str, member: Member) -> str:
    name = member.name
    where = member.address
    if "certificate" in problem and "accepted" in problem:
        return f"Has {name} accepted our invite? Compare fingerprints by phone."
    if member.outbox and "outbox" in problem:
        if "encrypted" in problem:
            return f"Has {name} accepted our invite, and does it run? It has to read our key once."
        return f"Does {name} run? If its outbox is elsewhere for us: outboxes.{name} in site.toml."
    if where is None:
        return f"Does {name} run? If so, `dispfl peer status` there says what its relays say."
    return f"Does {name} run? If so, is its port open? Try: nc -vz {where.host} {where.port}"


def names_of(names: Collection[str]) -> str:
    """`bob and carol`, or `bob, carol and 12 more`."""
    ordered = sorted(names)
    if len(ordered) > 5:
        ordered = [*ordered[:4], f"{len(ordered) - 4} more"]
    if len(ordered) == 1:
        return ordered[0]
    return f"{', '.join(ordered[:-1])} and {ordered[-1]}"
