"""Network addresses of sites."""

import ipaddress
import re
from typing import NamedTuple

from dispfl.errors import ConfigError

_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
# Names of interfaces, such as eth0 and wlan0.100. In a URL %25 is a percent sign, so 25 would not
# be a zone there.
_ZONE = re.compile(r"(?=.{1,15}\Z)(?!25)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_MAX_CHARS = 300


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
