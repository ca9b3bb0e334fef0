"""A federation of real processes and guests: accepted members that never take part in a round.

The test process has the keys of the guests and of non-members and uses them for attacks. The last
of the four peers is started by the last test; until then the other three stay in round 0, so that
each test can observe its effects.
"""

import asyncio
import contextlib
import os
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from real_peers import run_peer

from dispfl.config import compose
from dispfl.files import SITES
from dispfl.peer.deadlines import Deadlines
from dispfl.peer.local_federation import LOG, LOOPBACK, PeerProcesses, create_run, setup_of_peer
from dispfl.peer.membership.identity import Identity, client_context, server_context
from dispfl.peer.setup.local_setup import LocalSetup
from dispfl.peer.setup.spec import spec_digest
from dispfl.peer.site import Site, SiteInfo
from dispfl.peer.transport.base import JSON, Request
from dispfl.peer.transport.http import Limits
from dispfl.peer.transport.https import HttpsTransport
from dispfl.topology import peer_names

PEERS, ROUNDS = 4, 60
SETTINGS = [
    f"peers={PEERS}",
    f"rounds={ROUNDS}",
    "topology=full",
    "partition.samples_per_peer=40",
    "partition.test_samples_per_peer=20",
    "train.epochs=1",
    "workers=1",
    "model=mlp",
]
GUESTS = (
    "curious",
    "foreign",
    "replaying",
    "mistimed",
    "garbling",
    "revoked",
    "nuisance",
    "slow",
    "late",
    "tireless",
)
NEVER = ROUNDS
"""First round of the guests."""
TIMEOUT = 240.0
"""Seconds after which waiting fails; generous because the machine may be busy."""
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class WaitingProcesses(PeerProcesses):
    """Processes whose peers never proceed without each other, and have shorter deadlines for
    headers."""

    def start(self, name: str) -> None:
        """Start a peer that logs to its site's folder."""
        deadlines, limits = (
            Deadlines(min=120, startup=900),
            Limits(connect_timeout=5, header_timeout=5),
        )
        self.run(name, run_peer, self.out, name, deadlines, None, limits)


@dataclass
class AttackedFederation:
    """The federation from the point of view of its attackers."""

    out: Path
    processes: PeerProcesses
    setup: LocalSetup
    """The setup of peer 000, which every member knows."""
    sites: dict[str, Site]
    guests: dict[str, Site]
    settings: Sequence[str]
    rounds: int = ROUNDS

    def status(self, peer: str) -> dict[str, Any]:
        """The status of a peer, at most half a second old."""
        return self.sites[peer].status() or {}

    def refused(self, peer: str, guest: str) -> dict[str, int]:
        """Number of refusals of a guest by a peer, by reason."""
        found: dict[str, int] = self.status(peer).get("refused", {}).get(guest, {})
        return found

    def refusals(self, peer: str, reason: str, name: str = "unknown") -> int:
        """Number of refusals by a peer for one reason."""
        return self.refused(peer, name).get(reason, 0)

    def memory(self, peer: str) -> float:
        """Resident memory of a peer in MB."""
        lines = Path(f"/proc/{self.processes.pid(peer)}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))

    def open_files(self, peer: str) -> int:
        """Number of open file descriptors of a peer."""
        return len(os.listdir(f"/proc/{self.processes.pid(peer)}/fd"))  # noqa: PTH208

    # requests

    def model(self, t: Any = 0, body: bytes | None = None, **changes: JSON) -> Request:
        """A valid model request of a member, with the given changes."""
        mask = self.setup.initial_state().next_mask
        header: dict[str, JSON] = {
            "spec": spec_digest(self.setup.spec),
            "round": t,
            "nonce": secrets.token_hex(16),
        }
        return Request(
            "model",
            header | changes,
            self.setup.codec().encode_request(mask) if body is None else body,
        )

    @contextlib.asynccontextmanager
    async def guest(self, name: str) -> AsyncIterator[HttpsTransport]:
        """The transport of a guest."""
        guest = self.guests[name]

        def identify(leaf: bytes, issuers: Any) -> str | None:
            member = guest.members.find_by_certificate(leaf, issuers)
            return member.name if member else None

        transport = HttpsTransport(
            name,
            (LOOPBACK, 0),
            client=self.context(guest.identity),
            server=server_context(guest.identity, []),
            identify=identify,
            address=lambda peer: self.sites[peer].info.listen_address,
            max_request=lambda kind: 0,
            max_response=lambda kind: 10_000_000,
        )
        try:
            yield transport
        finally:
            await transport.close()

    # raw connections

    def context(self, identity: Identity) -> ssl.SSLContext:
        """TLS client context with this identity."""
        return client_context(identity, [site.identity.certificate for site in self.sites.values()])

    async def connect(self, peer: str, context: ssl.SSLContext | None = None) -> Streams:
        """Open a connection to a peer, with or without TLS."""
        where = self.sites[peer].info.listen_address
        assert where is not None
        return await asyncio.open_connection(*where, ssl=context)

    async def send_raw(
        self, peer: str, content: bytes, context: ssl.SSLContext | None = None
    ) -> bytes:
        """Return a peer's response to these bytes until it closes the connection; empty if it
        closes immediately."""
        with contextlib.suppress(OSError):
            reader, writer = await self.connect(peer, context)
            try:
                writer.write(content)
                return await reader.read()
            finally:
                writer.transport.abort()
        return b""


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "the condition does not hold in time"
        time.sleep(0.05)


def add_guests(sites: dict[str, Site], folder: Path) -> dict[str, Site]:
    """Create members with keys and signed records, accepted by all sites."""
    guests = {}
    for name in GUESTS:
        where = SiteInfo(name=name, listen=f"{LOOPBACK}:9", federation="up")
        guest = guests[name] = Site.create(folder / name, where, {})
        record = guest.members.announce(guest.identity, where.address, 0.5, NEVER)
        for site in sites.values():
            guest.members.accept(site.invite())
            site.members.accept(guest.invite())
            site.members.merge([record.to_json()])
    return guests


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedFederation]:
    """Three of four peers, waiting for the fourth; all are stopped at the end."""
    out = tmp_path_factory.mktemp("hostile") / "up"
    create_run(compose({}, SETTINGS), out)
    processes = WaitingProcesses(out, peer_names(PEERS))
    sites = {name: Site.open(out / SITES / name) for name in processes.names}
    guests = add_guests(sites, out.parent / "guests")
    found = AttackedFederation(out, processes, setup_of_peer(out, "000"), sites, guests, SETTINGS)
    try:
        for name in processes.names[:-1]:
            processes.start(name)
        for name in processes.names[:-1]:
            wait_until(lambda name=name: found.status(name).get("state") == "fetching")  # type: ignore[misc]
        yield found
    finally:
        processes.stop()


@pytest.fixture(scope="module")
def log(attacked: AttackedFederation) -> Callable[[str], str]:
    """`log(peer)` returns the log of a peer."""
    return lambda peer: (attacked.out / SITES / peer / LOG).read_text()


@pytest.fixture(scope="session")
def until() -> Callable[[Callable[[], bool]], None]:
    """`until(condition)` waits until the condition holds."""
    return wait_until
