"""Runs a relay: its certificate, the members that it admits, and its log."""

import asyncio
import contextlib
import re
import resource
import signal
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dispfl.errors import ConfigError, DispflError
from dispfl.files import read_regular
from dispfl.peer.membership.address import Address, RelayAddress
from dispfl.peer.membership.identity import CERTIFICATE, KEY, Identity
from dispfl.peer.membership.invite import PREFIX, Invite
from dispfl.peer.membership.roster import Roster
from dispfl.peer.state.log import EventLog, event_logger, logging_as_events
from dispfl.peer.state.metrics import parse_listen, relay_metrics, serve_metrics
from dispfl.peer.transport.http import os_error_text
from dispfl.peer.transport.relay_server import Relay, RelayLimits

MEMBERS_INTERVAL = 2.0
"""Seconds between two checks of the members' files."""
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class RelaySettings:
    """What the operator of a relay decides."""

    listen: str
    members: Sequence[Path]
    """Rosters, invites, lists of fingerprints, and folders of these."""
    advertise: str | None = None
    """HOST:PORT by which sites know it, if it differs from `listen`."""
    identity: Path = Path("relay-identity")
    """The folder of its own key and certificate, made at the first start."""
    cert: Path | None = None
    """A certificate that an authority has signed, and its chain; instead of `identity`."""
    key: Path | None = None
    metrics: str | None = None
    """HOST:PORT at which Prometheus reads its metrics."""
    limits: RelayLimits = field(default_factory=RelayLimits)

    def address(self) -> RelayAddress:
        """The address that sites write into their settings; makes the relay's key if needed."""
        if self.metrics is not None:
            parse_listen(self.metrics, "--metrics")
        place = Address.parse(self.advertise or self.listen)
        if place.is_unspecified:
            raise ConfigError(
                f"Sites cannot connect to {place}; say where they reach this relay: --advertise"
                " HOST:PORT.",
                key="advertise",
            )
        if (self.cert is None) != (self.key is None):
            raise ConfigError(
                "--cert and --key belong together: a certificate chain and its key, as PEM files.",
                key="cert",
            )
        fingerprint = None
        if self.cert is None:
            fingerprint = self._own_identity().fingerprint
        return RelayAddress(place.host.lower(), place.port, fingerprint)

    def context(self) -> ssl.SSLContext:
        """The TLS context of the relay."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        cert = self.cert or self.identity / CERTIFICATE
        key = self.key or self.identity / KEY
        try:
            context.load_cert_chain(cert, key)
        except (OSError, ssl.SSLError) as problem:
            raise ConfigError(
                f"The certificate {cert} and its key {key} cannot be used:"
                f" {os_error_text(problem)}; both must be PEM files that belong together.",
                key="cert",
            ) from None
        return context

    def _own_identity(self) -> Identity:
        if not (self.identity / KEY).exists():
            Identity.make("relay").save(self.identity)
        return Identity.load(self.identity)


def read_members(paths: Sequence[Path]) -> dict[str, str]:
    """Return the names of the admitted members by the fingerprints of their certificates."""
    admitted: dict[str, str] = {}
    for file in _files(paths):
        try:
            text = read_regular(file).decode()
        except (OSError, UnicodeDecodeError) as problem:
            raise ConfigError(
                f"--members {file} cannot be read: {problem}.", key="members"
            ) from None
        admitted |= _members_in(file, text)
    has_folder = any(path.is_dir() for path in paths)  # invites may come later
    if not admitted and not has_folder:
        raise ConfigError(
            f"--members names no member: {', '.join(map(str, paths))} has neither a signed roster"
            " nor an invite nor a fingerprint.",
            key="members",
        )
    return admitted


def _files(paths: Sequence[Path]) -> list[Path]:
    files = []
    for path in paths:
        if path.is_dir():
            files += sorted(file for file in path.iterdir() if file.is_file())
        else:
            files.append(path)
    return files


def _members_in(file: Path, text: str) -> dict[str, str]:
    if text.lstrip().startswith("{"):
        invites = Roster.read(text).verify().members()
        return {invite.fingerprint: invite.name for invite in invites.values()}
    members = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words:
            continue
        first = words[0].lower()
        if words[0].startswith(PREFIX):
            invite = Invite.read(line)
            members[invite.fingerprint] = invite.name
        elif _FINGERPRINT.fullmatch(first):
            members[first] = words[1] if len(words) > 1 else "member"
        else:
            raise ConfigError(
                f"--members {file}, line {number}: {line[:40]!r} is neither an invite nor the"
                " fingerprint of a certificate (64 hexadecimal digits).",
                key="members",
            )
    return members


def run_relay(settings: RelaySettings, *, log_json: bool = False) -> None:
    """Run a relay until SIGINT or SIGTERM."""
    log = event_logger("relay", log_json)
    _raise_file_limit()
    with logging_as_events(log), contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_run(settings, log))


async def _run(settings: RelaySettings, log: EventLog) -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    for stop_signal in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(stop_signal, task.cancel)
    address = settings.address()
    relay = Relay(
        address.address,
        settings.context(),
        read_members(settings.members),
        settings.limits,
        log,
    )
    await relay.open(Address.parse(settings.listen))
    log("listening", {"address": str(address), "members": len(relay.admitted)})
    try:
        async with (
            serve_metrics(settings.metrics, lambda: relay_metrics(relay), log, "--metrics"),
            asyncio.TaskGroup() as group,
        ):
            group.create_task(relay.log_regularly())
            group.create_task(_follow_members(relay, settings.members, log))
    finally:
        await relay.close()
        log("stopped", relay.counters.as_fields())


async def _follow_members(relay: Relay, paths: Sequence[Path], log: EventLog) -> None:
    """Read the members' files again when they change; keep the last list if that fails."""
    last = _versions(paths)
    while True:
        await asyncio.sleep(MEMBERS_INTERVAL)
        versions = _versions(paths)
        if versions == last:
            continue
        last = versions
        try:
            relay.admit(read_members(paths))
        except DispflError as problem:
            log("problem", {"detail": str(problem)})
        else:
            log("members", {"members": len(relay.admitted)})


def _versions(paths: Sequence[Path]) -> list[tuple[str, int, int]]:
    versions = []
    for file in _files(paths):
        with contextlib.suppress(OSError):
            status = file.stat()
            versions.append((str(file), status.st_mtime_ns, status.st_size))
    return versions


def _raise_file_limit() -> None:
    """Use as many file descriptors as the system allows: each connection needs one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
