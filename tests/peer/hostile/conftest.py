"""A federation of real processes, and guests: members whom all have accepted, and who never take part in a round.

The test process holds the guests' keys and those of strangers, and does with them what it likes. The last of the four
peers is started by the last test, so until then the other three stay in round 0, where a test can see what it did.
"""

import asyncio
import contextlib
import os
import secrets
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dispfl.config import compose
from dispfl.peer.https import HttpsTransport
from dispfl.peer.identity import Identity, client_context, server_context
from dispfl.peer.share import Share
from dispfl.peer.site import Site, Whereabouts
from dispfl.peer.terms import digest_of
from dispfl.peer.transport import JSON, Ask
from dispfl.roster import roster_names
from dispfl.up import LOG, LOOPBACK, SITES, Processes, set_up, share_in

PEERS, ROUNDS = 4, 60
SETTINGS = [
    f"peers={PEERS}",
    f"rounds={ROUNDS}",
    "topology=full",
    "partition.samples=40",
    "partition.test_samples=20",
    "train.epochs=1",
    "threads=1",
    "model=mlp",
]
GUESTS = ("curious", "foreign", "replaying", "mistimed", "garbling", "revoked", "nuisance", "slow", "late", "tireless")
NEVER = 10**6
"""The round from which guests take part."""
PATIENCE = 240.0
"""Seconds after which something that does not happen has failed; a busy machine takes its time."""
PEER = """
import asyncio, sys
from pathlib import Path
from dispfl.peer.limits import Limits
from dispfl.peer.log import teller
from dispfl.peer.pace import Pace
from dispfl.peer.running import take_part
from dispfl.peer.site import Site
from dispfl.up import SITES, share_in

out, name = Path(sys.argv[1]), sys.argv[2]
pace, limits = Pace(floor=120, first=900), Limits(connect=5, head=5)
asyncio.run(take_part(Site.open(out / SITES / name), share_in(out, name), pace, teller(name), limits))
"""
"""A peer as `dispfl up` starts it, but more patient with its neighbours (slow is the machine), less with slow heads."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class PatientProcesses(Processes):
    """Processes whose peers never go on without each other."""

    def start(self, name: str) -> None:
        """Start a peer; its log goes to its site's folder."""
        with (self.out / SITES / name / LOG).open("ab") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-c", PEER, str(self.out), name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )


@dataclass
class Attacked:
    """The federation, as its attackers see it."""

    out: Path
    processes: Processes
    share: Share
    """Of peer 000: what a member knows of the federation."""
    sites: dict[str, Site]
    guests: dict[str, Site]
    settings: Sequence[str]

    def status(self, peer: str) -> dict[str, Any]:
        """What a peer says of itself, at most half a second ago."""
        return self.sites[peer].status() or {}

    def refused(self, peer: str, guest: str) -> dict[str, int]:
        """How often a peer has refused this guest's questions, by reason."""
        found: dict[str, int] = self.status(peer).get("refused", {}).get(guest, {})
        return found

    def at_the_door(self, peer: str, reason: str, name: str = "unknown") -> int:
        """How often a peer's transport has refused somebody for this reason."""
        found: dict[str, int] = self.status(peer).get("refused_at_the_door", {})
        return found.get(f"{reason} ({name})", 0)

    def memory(self, peer: str) -> float:
        """A peer's resident memory in MB."""
        lines = Path(f"/proc/{self.processes.running[peer].pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))

    def open_files(self, peer: str) -> int:
        """How many file descriptors a peer has."""
        return len(os.listdir(f"/proc/{self.processes.running[peer].pid}/fd"))  # noqa: PTH208

    # questions

    def model(self, t: Any = 0, body: bytes | None = None, **more: JSON) -> Ask:
        """A member's question for a model: as it should be, but for what is given."""
        mask = self.share.first_state().next_mask
        head: dict[str, JSON] = {"terms": digest_of(self.share.terms), "round": t, "nonce": secrets.token_hex(16)}
        return Ask("model", head | more, self.share.codec().encode_request(mask) if body is None else body)

    @contextlib.asynccontextmanager
    async def guest(self, name: str) -> AsyncIterator[HttpsTransport]:
        """A guest's end of the protocol."""
        guest = self.guests[name]

        def who(leaf: bytes, issuers: Any) -> str | None:
            member = guest.members.who(leaf, issuers)
            return member.name if member else None

        transport = HttpsTransport(
            name,
            (LOOPBACK, 0),
            client=self.context(guest.identity),
            server=server_context(guest.identity, []),
            who=who,
            address=lambda peer: self.sites[peer].where.listening,
            max_ask=lambda what: 0,
            max_reply=lambda what: 10_000_000,
        )
        try:
            yield transport
        finally:
            await transport.close()

    # bare connections

    def context(self, identity: Identity) -> ssl.SSLContext:
        """TLS as the holder of this key does it."""
        return client_context(identity, [site.identity.certificate for site in self.sites.values()])

    async def connect(self, peer: str, context: ssl.SSLContext | None = None) -> Streams:
        """A connection to a peer, encrypted or not."""
        return await asyncio.open_connection(*self.sites[peer].where.listening, ssl=context)

    async def say(self, peer: str, what: bytes, context: ssl.SSLContext | None = None) -> bytes:
        """What a peer answers to these bytes before it ends the connection; nothing, if it ends it at once."""
        with contextlib.suppress(OSError):
            reader, writer = await self.connect(peer, context)
            try:
                writer.write(what)
                return await reader.read()
            finally:
                writer.transport.abort()
        return b""


def wait_until(happened: Callable[[], bool]) -> None:
    """Wait for it."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def add_guests(sites: dict[str, Site], folder: Path) -> dict[str, Site]:
    """Members with keys and signed records, accepted by all."""
    guests = {}
    for name in GUESTS:
        where = Whereabouts(name=name, listen=f"{LOOPBACK}:9", federation="up")
        guest = guests[name] = Site.create(folder / name, where, {})
        record = guest.members.announce(guest.identity, where.address, 0.5, NEVER)
        for site in sites.values():
            guest.members.accept(site.invite())
            site.members.accept(guest.invite())
            site.members.merge([record.to_json()])
    return guests


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """Three of four peers, waiting for the fourth; whatever happens, none is left running."""
    out = tmp_path_factory.mktemp("hostile") / "up"
    set_up(compose({}, SETTINGS), out)
    processes = PatientProcesses(out, roster_names(PEERS))
    sites = {name: Site.open(out / SITES / name) for name in processes.names}
    guests = add_guests(sites, out.parent / "guests")
    found = Attacked(out, processes, share_in(out, "000"), sites, guests, SETTINGS)
    try:
        for name in processes.names[:-1]:
            processes.start(name)
        for name in processes.names[:-1]:
            wait_until(lambda name=name: found.status(name).get("state") == "asking")  # type: ignore[misc]
        yield found
    finally:
        processes.stop()


@pytest.fixture(scope="module")
def log(attacked: Attacked) -> Callable[[str], str]:
    """`log(peer)`: what a peer has told so far."""
    return lambda peer: (attacked.out / SITES / peer / LOG).read_text()


@pytest.fixture(scope="session")
def until() -> Callable[[Callable[[], bool]], None]:
    """`until(happened)`: wait for it."""
    return wait_until
