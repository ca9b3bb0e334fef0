"""A site takes part: its node with a real network, a real disk and a thread to learn on."""

import asyncio
import contextlib
import json
import random
import signal
import ssl
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from shlex import quote

from dispfl.errors import DispflError, RunError
from dispfl.methods.base import PeerState
from dispfl.peer import greeting
from dispfl.peer.asks import Asks
from dispfl.peer.context import Context
from dispfl.peer.fellows import Fellows
from dispfl.peer.https import HttpsTransport
from dispfl.peer.identity import client_context, pin, server_context
from dispfl.peer.learning import Aside, ThreadLearner
from dispfl.peer.limits import Limits
from dispfl.peer.log import Tell, teller
from dispfl.peer.node import Node
from dispfl.peer.pace import Pace
from dispfl.peer.share import Share, share_of
from dispfl.peer.site import STATUS, Site
from dispfl.peer.store import PeerStore, rounds_of
from dispfl.runs.files import write_atomically
from dispfl.wire.codec import HEADER

EVERY = 0.5
"""Seconds between two looks at the members' list and two writings of the status file."""
SLACK = 4096
"""Bytes that a body may have beyond the largest message, so that a longer one is refused by name."""


def run_site(site: Site, log_json: bool = False, *, alone: bool = True) -> None:
    """Take part to the last round; a polite kill or Ctrl-C ends it between two batches, and it can be gone on with.

    Unless it may train `alone`, a site that nobody has introduced to others does not begin.
    """
    if not (alone or site.members.names() or rounds_of(site.run_folder)):
        raise RunError(
            f"Nobody is accepted yet, so {site.name} would train alone: exchange invites "
            f"(dispfl peer accept {quote(str(site.folder))} INVITE), or say --alone."
        )
    plan, share = site.plan(), share_of(site)
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(take_part(site, share, plan.pace.begin(), teller(site.name, log_json), plan.limits))


async def take_part(site: Site, share: Share, pace: Pace, tell: Tell, limits: Limits | None = None) -> PeerState:
    """Take part to the last round, from where this site stopped, if it did."""
    loop, me, signals = asyncio.get_running_loop(), asyncio.current_task(), list[str]()
    assert me is not None

    def stop(which: signal.Signals) -> None:
        signals.append(which.name)
        me.cancel()

    for which in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(which, stop, which)
    async with prepared(site, share, pace, tell, limits) as (node, store):
        try:
            final = await node.run(*(store.last() or (0, share.first_state())))
        except asyncio.CancelledError:
            tell("stopped", {"round": node.here.standing.round, "by": signals})
            raise
        tell("finished", {"score": node.here.standing.score})
    return final


@contextlib.asynccontextmanager
async def prepared(
    site: Site, share: Share, pace: Pace, tell: Tell, limits: Limits | None = None
) -> AsyncIterator[tuple[Node, PeerStore]]:
    """A site's node and its disk; in the end everything is closed."""
    with contextlib.closing(PeerStore(site.run_folder, site.name, share.terms)) as store:
        learner, aside = ThreadLearner(share.setting, share.threads), Aside()
        fellows = Fellows(site, share.setting.method, share.layout, share.density)
        site.members.announce(site.identity, site.where.address, share.density, site.members.own_first_round)
        network = _Network(site, share, fellows, limits or Limits())
        listening = str(site.where.listening)
        here = Context(site.name, share.setting, share.codec(), share.terms, fellows, aside, tell, listening=listening)
        asks = Asks(here, network.transport, pace, random.Random())
        looking = asyncio.create_task(_look_around(site, here, network))
        try:
            yield Node(here, asks, learner, store), store
        finally:
            looking.cancel()
            await asyncio.wait([looking])
            await network.transport.close()
            learner.close()
            aside.close()
            here.standing.ended()
            try:
                write_status(site, here, network)
            except (DispflError, OSError) as problem:  # not raised: whatever ended the node is what people must see
                tell("trouble", {"why": str(problem)})


class _Network:
    """The transport, and the TLS contexts that learn of new members while it runs."""

    def __init__(self, site: Site, share: Share, fellows: Fellows, limits: Limits) -> None:
        pinned = site.members.pinned()
        self.contexts: tuple[ssl.SSLContext, ssl.SSLContext] = (
            client_context(site.identity, pinned),
            server_context(site.identity, pinned),
        )
        mask, values = share.layout.size // 8, 4 * (share.layout.size + len(share.layout.sizes))
        asks = {"hello": greeting.LIMIT, "model": HEADER.size + mask + SLACK}
        replies = {"hello": greeting.LIMIT, "model": HEADER.size + mask + values + SLACK}
        self.transport = HttpsTransport(
            site.name,
            site.where.listening,
            client=self.contexts[0],
            server=self.contexts[1],
            who=fellows.who,
            address=fellows.address,
            max_ask=lambda what: asks.get(what, 0),
            max_reply=lambda what: replies.get(what, 0),
            limits=limits,
        )
        self.before = carried_before(site)
        self._generation = site.members.generation
        self._pinned = set(pinned)

    def learn_of_new_members(self, site: Site) -> None:
        """Trust the certificates that were accepted since."""
        if site.members.generation != self._generation:
            self._generation = site.members.generation
            for certificate in set(site.members.pinned()) - self._pinned:
                self._pinned.add(certificate)
                for context in self.contexts:
                    pin(context, certificate)

    @property
    def carried(self) -> dict[str, int]:
        """Bytes that the sockets have sent and received, TLS and HTTP included."""
        meters = self.transport.counters.carried.values()
        return {"sent": sum(meter.sent for meter in meters), "received": sum(meter.received for meter in meters)}


async def _look_around(site: Site, here: Context, network: _Network) -> None:
    """Notice what `dispfl peer accept` and `revoke` change, and say how it goes."""
    listed, said = _listed(site), ""
    while True:
        try:
            network.learn_of_new_members(site)
            listed, before = _listed(site), listed
            for event, name in changes(before, listed):
                here.tell(event, {"peer": name})
            write_status(site, here, network)
            said = ""
        except (DispflError, OSError) as problem:
            if said != str(problem):
                said = str(problem)
                here.tell("trouble", {"why": said})
        await asyncio.sleep(EVERY)


Listed = Mapping[str, tuple[str, str]]
"""Each member's state and fingerprint."""


def _listed(site: Site) -> Listed:
    return {member.name: (member.state, member.fingerprint) for member in site.members.all()}


def changes(before: Listed, after: Listed) -> Iterator[tuple[str, str]]:
    """What has happened to whom on the members' list: accepted, revoked, rotated."""
    for name, (state, fingerprint) in after.items():
        old_state, old_fingerprint = before.get(name, (None, fingerprint))
        if state != old_state:
            yield state, name
        elif fingerprint != old_fingerprint:
            yield "rotated", name


def write_status(site: Site, here: Context, network: _Network) -> None:
    """What `dispfl peer status` shows."""
    found = here.standing.as_json()
    behind = time.time() - asyncio.get_running_loop().time()  # the loop's clock is not a calendar's
    for neighbour in found["peers"].values():
        neighbour["last_seen"] = None if neighbour["last_seen"] is None else neighbour["last_seen"] + behind
    found["sockets"], found["sockets_before"] = network.carried, network.before
    counters = network.transport.counters
    found["refused_at_the_door"] = {f"{reason} ({name})": n for (reason, name), n in sorted(counters.refused.items())}
    found["updated"] = time.time()
    write_atomically(site.run_folder / STATUS, json.dumps(found).encode())


def carried_before(site: Site) -> dict[str, int]:
    """What the sockets carried whenever the node ran before, as far as it came to writing it down."""
    try:
        found = site.status() or {}
        counted = (found["sockets"], found["sockets_before"])
        return {way: sum(int(each[way]) for each in counted) for way in ("sent", "received")}
    except (RunError, KeyError, TypeError, ValueError):
        return {"sent": 0, "received": 0}
