"""Runs a relay: its certificate, the members that it admits, and its log."""

import asyncio
import contextlib
import re
import resource
import signal
import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509

from dispfl.errors import ConfigError, DispflError
from dispfl.files import read_regular
from dispfl.peer.membership.address import Address, RelayAddress
from dispfl.peer.membership.identity import CERTIFICATE, KEY, Identity
from dispfl.peer.membership.invite import PREFIX, Invite
from dispfl.peer.membership.roster import Roster
from dispfl.peer.state.log import EventLog, event_logger, logging_as_events
from dispfl.peer.state.metrics import parse_listen, relay_metrics, serve_metrics
from dispfl.peer.transport.http import os_error_text
from dispfl.peer.transport.relay_server import Relay, RelayCertificate, RelayLimits

FILES_INTERVAL = 2.0
"""Seconds between two checks of the members' files, and of the certificate's."""
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

    @property
    def certificate_files(self) -> tuple[Path, Path]:
        """The files of its certificate and of its key."""
        return self.cert or self.identity / CERTIFICATE, self.key or self.identity / KEY

    def certificate(self) -> RelayCertificate:
        """Read the certificate and its key."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        cert, key = self.certificate_files
        try:
            context.load_cert_chain(cert, key)
            [first, *_] = x509.load_pem_x509_certificates(cert.read_bytes())
        except (OSError, ssl.SSLError, ValueError) as problem:
            raise ConfigError(
                f"The certificate {cert} and its key {key} cannot be used:"
                f" {os_error_text(problem)}; both must be PEM files that belong together.",
                key="cert",
            ) from None
        return RelayCertificate(context, first.not_valid_after_utc)

    def _own_identity(self) -> Identity:
        if not (self.identity / KEY).exists():
            Identity.make("relay").save(self.identity)
        return Identity.load(self.identity)


class MemberFiles:
    """The files that name the members of a relay.

    A bad one in a folder, or one that has become bad, does not keep the others from being applied.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.problems: list[str] = []
        """Why files could not be read the last time."""
        self._paths = paths
        self._members: dict[Path, dict[str, str]] = {}
        """What each file has said when it could be read last."""

    def read(self) -> dict[str, str]:
        """Return the names of the admitted members by the fingerprints of their certificates."""
        members = {}
        problems = []
        for file in self._files():
            try:
                members[file] = _read_members(file)
            except DispflError as problem:
                if file in self._paths and file not in self._members:
                    raise
                problems.append(str(problem))
                members[file] = self._members.get(file, {})
        self._members = members
        self.problems = problems

        admitted: dict[str, str] = {}
        for members_of_file in members.values():
            admitted |= members_of_file
        has_folder = any(path.is_dir() for path in self._paths)  # invites may come later
        if not admitted and not has_folder:
            raise ConfigError(
                f"--members names no member: {', '.join(map(str, self._paths))} has neither a"
                " signed roster nor an invite nor a fingerprint.",
                key="members",
            )
        return admitted

    def versions(self) -> list[tuple[str, int, int]]:
        """What changes when a file does."""
        return _versions(self._files())

    def _files(self) -> list[Path]:
        files = []
        for path in self._paths:
            try:
                if path.is_dir():
                    files += [file for file in sorted(path.iterdir()) if _may_name_members(file)]
                else:
                    files.append(path)
            except OSError as problem:
                raise _unreadable(path, problem) from None
        return files


def _may_name_members(file: Path) -> bool:
    """Whether a file in a folder is no hidden one, as desktops and editors leave them behind."""
    return file.is_file() and not file.name.startswith(".")


def _unreadable(path: Path, problem: Exception) -> ConfigError:
    return ConfigError(f"--members {path} cannot be read: {problem}.", key="members")


def _read_members(file: Path) -> dict[str, str]:
    try:
        text = read_regular(file).decode()
    except (OSError, UnicodeDecodeError) as problem:
        raise _unreadable(file, problem) from None
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
    members = MemberFiles(settings.members)
    certificate = settings.certificate()
    relay = Relay(address.address, certificate, members.read(), settings.limits, log)
    await relay.open(Address.parse(settings.listen))
    log("listening", {"address": str(address), "members": len(relay.admitted)})
    try:
        async with (
            serve_metrics(settings.metrics, lambda: relay_metrics(relay), log, "--metrics"),
            asyncio.TaskGroup() as group,
        ):
            group.create_task(relay.log_regularly())
            group.create_task(follow_members(relay, members, log))
            group.create_task(follow_certificate(relay, settings, log))
    finally:
        await relay.close()
        log("stopped", relay.counters.as_fields())


async def follow_members(relay: Relay, members: MemberFiles, log: EventLog) -> None:
    """Read the members' files again when they change, and log problems once."""
    last_versions = None
    logged_problems: list[str] = []
    while True:
        problems = logged_problems
        try:
            versions = members.versions()
            if versions != last_versions:
                admitted = members.read()
                problems = members.problems
                if admitted != relay.admitted:
                    relay.admit(admitted)
                    log("members", {"members": len(admitted)})
            last_versions = versions
        except DispflError as problem:
            problems = [str(problem)]
        for detail in problems:
            if detail not in logged_problems:
                log("problem", {"detail": detail})
        logged_problems = problems
        await asyncio.sleep(FILES_INTERVAL)


async def follow_certificate(relay: Relay, settings: RelaySettings, log: EventLog) -> None:
    """Use a renewed certificate for new connections; keep the last one while the files are bad."""
    last_versions = _versions(settings.certificate_files)
    logged_problem = ""
    while True:
        await asyncio.sleep(FILES_INTERVAL)
        versions = _versions(settings.certificate_files)
        if versions == last_versions:
            continue
        try:
            certificate = settings.certificate()
        except DispflError as problem:  # or only one of the two files is replaced yet
            if str(problem) != logged_problem:
                log("problem", {"detail": str(problem)})
            logged_problem = str(problem)
            continue
        relay.use_certificate(certificate)
        log("certificate", {"until": f"{certificate.ends:%Y-%m-%d}"})
        last_versions = versions
        logged_problem = ""


def _versions(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """What changes when a file does."""
    versions = []
    for file in files:
        with contextlib.suppress(OSError):
            status = file.stat()
            versions.append((str(file), status.st_mtime_ns, status.st_size))
    return versions


def _raise_file_limit() -> None:
    """Use as many file descriptors as the system allows: each connection needs one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
