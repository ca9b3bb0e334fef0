"""Sites with real certificates on loopback, a proxy that counts bytes and breaks connections, and a
leak check."""

import asyncio
import contextlib
import datetime
import gc
import os
import ssl
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dispfl.peer.transport.base import Handler
from dispfl.peer.transport.http import Limits
from dispfl.peer.transport.https import HttpsTransport

LOCAL = "127.0.0.1"
DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Site:
    """A site with its key and certificate in PEM files."""

    name: str
    certificate: x509.Certificate
    files: Path

    @property
    def der(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.DER)

    def context(self, protocol: int, trusted: Sequence["Site"]) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self.files)
        for site in trusted:
            context.load_verify_locations(cadata=site.der)
        return context


def new_site(name: str, folder: Path) -> Site:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(
            subject, subject, key.public_key(), x509.random_serial_number(), now - DAY, now + DAY
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = folder / f"{name}-{certificate.serial_number}.pem"
    plain = serialization.NoEncryption()
    files.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    return Site(name, certificate, files)


@dataclass
class Network:
    """Three sites that accept each other, and their addresses; `members` may be changed at any
    time."""

    sites: dict[str, Site]
    members: dict[bytes, str]
    addresses: dict[str, tuple[str, int]] = field(default_factory=dict)
    limit: int = 50_000_000

    def join(self, name: str, **changes: Any) -> HttpsTransport:
        """Create the transport of a site."""
        site, others = (
            self.sites[name],
            [other for other in self.sites.values() if other.name != name],
        )
        settings: dict[str, Any] = {
            "client": site.context(ssl.PROTOCOL_TLS_CLIENT, others),
            "server": site.context(ssl.PROTOCOL_TLS_SERVER, others),
            "identify": lambda leaf, issuers: self.members.get(leaf),
            "address": self.addresses.__getitem__,
            "max_request": lambda kind: self.limit,
            "max_response": lambda kind: self.limit,
            "limits": Limits(backoff=0.01, shutdown_grace=0.1),
        }
        return HttpsTransport(name, (LOCAL, 0), **(settings | changes))

    async def serve(self, name: str, handler: Handler, **changes: Any) -> HttpsTransport:
        """Create a transport that listens, and publish its address."""
        transport = self.join(name, **changes)
        await transport.serve(handler)
        self.addresses[name] = (LOCAL, transport.port)
        return transport

    async def connect_as(self, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a raw TLS connection to bob with a member's certificate."""
        context = self.sites[name].context(ssl.PROTOCOL_TLS_CLIENT, [self.sites["bob"]])
        return await asyncio.open_connection(*self.addresses["bob"], ssl=context)


@dataclass
class Proxy:
    """Forwards bytes to a site, counts them, and can break or stall a connection after some bytes
    of the response."""

    target: tuple[str, int]
    breaks: list[int] = field(default_factory=list)
    """Bytes towards the client after which each of the next connections is broken."""
    silence_after: int | None = None
    """Bytes towards the client after which a connection forwards nothing more."""
    up: int = 0
    down: int = 0
    connections: int = 0
    port: int = 0

    async def __aenter__(self) -> "Proxy":
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._connect, LOCAL, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *problem: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        break_after = self.breaks.pop(0) if self.breaks else None
        server_reader, server_writer = await asyncio.open_connection(*self.target)
        up = asyncio.ensure_future(self._forward_up(reader, server_writer))
        down = asyncio.ensure_future(self._forward_down(server_reader, writer, break_after))
        with contextlib.suppress(asyncio.CancelledError):  # the proxy is being closed
            await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        down.cancel()
        await asyncio.gather(up, down, return_exceptions=True)
        for end in (writer, server_writer):
            end.transport.abort()
        self._tasks.discard(task)

    async def _forward_up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            self.up += len(data)
            writer.write(data)
            await writer.drain()

    async def _forward_down(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, break_after: int | None
    ) -> None:
        forwarded = 0
        while data := await reader.read(
            min(65536, break_after - forwarded) if break_after else 65536
        ):
            if self.silence_after is not None and forwarded > self.silence_after:
                continue
            forwarded += len(data)
            self.down += len(data)
            writer.write(data)
            await writer.drain()
            if break_after and forwarded >= break_after:
                return


@pytest.fixture(scope="session")
def make_site(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Site]:
    """`make_site(name)` creates a key and a certificate."""
    return lambda name: new_site(name, tmp_path_factory.mktemp("sites"))


@pytest.fixture(scope="session")
def three_sites(make_site: Callable[[str], Site]) -> list[Site]:
    return [make_site(name) for name in ("alice", "bob", "carol")]


@pytest.fixture
def network(three_sites: list[Site]) -> Network:
    """Alice, bob and carol, who accept each other."""
    return Network(
        {site.name: site for site in three_sites}, {site.der: site.name for site in three_sites}
    )


@pytest.fixture
def proxy_to() -> Callable[..., Proxy]:
    """`proxy_to(address, breaks=[...])` creates a proxy in front of a site, to be used with `async
    with`."""
    return Proxy


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0  # noqa: PTH208


@pytest.fixture(scope="session")
def _frozen_objects() -> Iterator[None]:
    """Exclude all existing objects from garbage collection, so that `play` collects quickly."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def play(_frozen_objects: None) -> Callable[[Callable[[], Coroutine[Any, Any, None]]], None]:
    """`play(scenario)` runs a scenario and checks that it leaves no task and no open file
    behind."""

    def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def within_a_minute() -> None:
            async with asyncio.timeout(60):
                await scenario()
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"left behind: {left}"

        asyncio.run(asyncio.sleep(0))  # opens files that Python keeps
        before = open_files()
        asyncio.run(within_a_minute())
        gc.collect()
        assert open_files() <= before

    return run
