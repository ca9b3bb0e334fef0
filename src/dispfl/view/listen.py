"""The address at which pages are served."""

import ipaddress
import socket
from urllib.parse import urlsplit

from dispfl.errors import ConfigError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8090
OTHER_PORTS = 20
"""Ports from the default one on that are tried."""


def parse_listen(text: str, key: str = "--listen") -> tuple[str, int]:
    """Return host and port of `127.0.0.1:8000` or `[::1]:8000`; port 0 is any free one."""
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port is None or parts.path or parts.username:
        raise ConfigError(f"{key} is HOST:PORT, got {text!r}; for example 127.0.0.1:8000.", key=key)
    return host, port


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine can connect to an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def names_of_listener(host: str) -> tuple[str, str]:
    """Return the names in the addresses of pages: for this machine, and for others."""
    if host == "0.0.0.0":  # all addresses of this machine
        return "127.0.0.1", socket.gethostname()
    if host == "::":
        return "[::1]", socket.gethostname()
    name = f"[{host}]" if ":" in host else host
    return name, name
