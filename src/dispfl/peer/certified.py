"""Which certificate the other end of a TLS connection has shown."""

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import Any

Who = Callable[[bytes, Sequence[bytes]], str | None]
"""The member's name for a certificate and those that issued it, newest first, as DER; None for a stranger.

May raise `Refused`, with a reason of its own.
"""


def shown(transport: asyncio.BaseTransport | None) -> tuple[bytes, Sequence[bytes]] | None:
    """The certificate, and the issuers that came with it; None where there is no TLS or no certificate."""
    tls = transport.get_extra_info("ssl_object") if transport else None
    leaf = tls.getpeercert(binary_form=True) if tls else None
    if not leaf:
        return None
    chain = [der for der in _chain(tls) if der != leaf]
    return leaf, chain


def _chain(tls: Any) -> list[bytes]:
    if hasattr(tls, "get_unverified_chain"):  # Python 3.13
        return list(tls.get_unverified_chain())
    inner = getattr(tls, "_sslobj", None)  # before, Python has it but does not show it
    certificates = inner.get_unverified_chain() if inner else None
    return [certificate.public_bytes(ssl._ssl.ENCODING_DER) for certificate in certificates or ()]  # type: ignore[attr-defined]
