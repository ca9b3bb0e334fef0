"""Network addresses of sites, of the relays by which they are reached, and of outboxes."""

import ipaddress
import re
from collections.abc import Iterable
from typing import NamedTuple

from dispfl.errors import ConfigError

_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
# Names of interfaces, such as eth0 and wlan0.100. In a URL %25 is a percent sign, so 25 would not
# be a zone there.
_ZONE = re.compile(r"(?=.{1,15}\Z)(?!25)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_MAX_CHARS = 300
_RELAY = re.compile(r"wss://([^/?#@\s]+)/?(?:#sha256=([0-9A-Fa-f]{64}))?")
_HTTPS_PORT = 443
_BUCKET = re.compile(r"(s3|gs|az)://[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._=-]+)*/?")
_FOLDER = re.compile(r"(/[^/\x00-\x1f\x7f-\U0010ffff]+)+/?")
MAX_RELAYS = 4
"""Relays of one site."""


class Address(NamedTuple):
    """Host and port of a site. An IPv6 host is stored without brackets.

    Addresses come from other sites: what `parse` accepts can be part of a URL and be passed to the
    resolver.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Parse `alice.example.org:7600`, `192.0.2.7:7600` or `[2001:db8::7]:7600`."""
        if len(text) > _MAX_CHARS:
            raise ConfigError(
                f"An address has at most {_MAX_CHARS} characters, got {len(text)}: {text[:40]!r}..."
            )
        host, colon, port = text.strip().rpartition(":")
        if not colon or not host:
            raise ConfigError(
                f"An address is HOST:PORT, got {text!r}; for example alice.example.org:7600."
            )
        if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535):
            raise ConfigError(
                f"The port of an address is a number from 1 to 65535, got {port!r} in {text!r}."
            )
        return cls(_host(host, text), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_unspecified(self) -> bool:
        """Whether the host is 0.0.0.0 or [::]: all interfaces, which nobody can connect to."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False


class RelayAddress(NamedTuple):
    """Where a relay is, and the fingerprint of its certificate if it has made that itself."""

    host: str
    port: int
    fingerprint: str | None = None
    """SHA-256 of the certificate, in hexadecimal; None if a public authority has signed it."""

    @classmethod
    def parse(cls, text: str) -> "RelayAddress":
        """Parse `wss://relay.example.org`, with `:PORT` and `#sha256=FINGERPRINT` if needed."""
        match = _RELAY.fullmatch(text.strip()) if len(text) <= _MAX_CHARS else None
        if match is None:
            raise ConfigError(
                f"A relay is wss://HOST:PORT or wss://HOST:PORT#sha256=FINGERPRINT, got"
                f" {text[:_MAX_CHARS]!r}; copy the line that `dispfl relay` prints."
            )
        authority = match[1]
        has_port = re.search(r":[0-9]*$", authority) and not authority.endswith("]")
        if not has_port:
            authority = f"{authority}:{_HTTPS_PORT}"
        host, port = Address.parse(authority)
        return cls(host.lower(), port, match[2].lower() if match[2] else None)

    @property
    def address(self) -> Address:
        """Host and port, which also name the relay in what is signed for it."""
        return Address(self.host, self.port)

    def __str__(self) -> str:
        text = f"wss://{self.address}"
        return f"{text}#sha256={self.fingerprint}" if self.fingerprint else text


def parse_relays(text: str) -> tuple[RelayAddress, ...]:
    """Parse the relays of a record or an invite, which are separated by spaces."""
    relays = tuple(map(RelayAddress.parse, text.split()))
    if len(relays) > MAX_RELAYS:
        raise ConfigError(f"A site has at most {MAX_RELAYS} relays, got {len(relays)}.")
    if any(relay.address.is_unspecified for relay in relays):
        raise ConfigError(f"Nobody can connect to the relay in {text[:_MAX_CHARS]!r}.")
    return relays


def relays_text(relays: Iterable[RelayAddress]) -> str:
    """Write relays as `parse_relays` reads them."""
    return " ".join(map(str, relays))


def parse_outbox(text: str) -> str:
    """Return the address of an outbox: a bucket with a prefix, or an absolute path."""
    is_known = _BUCKET.fullmatch(text) or _FOLDER.fullmatch(text)
    is_relative = any(part in (".", "..") for part in text.split("/"))
    if not is_known or is_relative or len(text) > _MAX_CHARS:
        raise ConfigError(
            "An outbox is s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or an"
            f" absolute folder in ASCII, got {text[:_MAX_CHARS]!r}; for example"
            " s3://hearts/alice or /mnt/share/alice.",
            key="outbox",
        )
    return text.rstrip("/")


def reach_text(
    address: Address | None, relays: Iterable[RelayAddress], outbox: str | None = None
) -> str:
    """`bob.example.org:7600, wss://relay.example.org:443, outbox s3://hearts/bob`: how a site is
    reached, for people."""
    places = [str(address)] if address else []
    places += [f"wss://{relay.address}" for relay in relays]
    places += [f"outbox {outbox}"] if outbox else []
    return ", ".join(places)


def _host(host: str, text: str) -> str:
    shown = repr(host)[1:-1]  # without control characters
    if host.startswith("[") and host.endswith("]"):
        try:
            address = ipaddress.IPv6Address(host[1:-1])
        except ValueError:
            raise ConfigError(
                f"{shown} in {text!r} is not an IPv6 address; for example [2001:db8::7]:7600."
            ) from None
        if address.scope_id is not None and not _ZONE.fullmatch(address.scope_id):
            raise ConfigError(
                f"The zone {address.scope_id!r} of an IPv6 address must be the name of an"
                f" interface, 1 to 15 letters, digits, dots, dashes and underscores, got {text!r};"
                " for example [fe80::7%eth0]:7600."
            )
        return str(address)
    if ":" in host and "/" not in host:
        raise ConfigError(f"An IPv6 address needs brackets, got {text!r}; write [{shown}]:PORT.")
    if re.fullmatch(r"[0-9.]+", host):
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError:
            raise ConfigError(
                f"{shown} in {text!r} is not an IPv4 address; for example 192.0.2.7:7600."
            ) from None
    labels = host.removesuffix(".").split(".")
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ConfigError(
            f"{shown} in {text!r} is not a host name; for example alice.example.org:7600."
        )
    return host
