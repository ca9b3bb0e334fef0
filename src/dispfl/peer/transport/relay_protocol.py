"""What a site and a relay say to each other before the relay passes bytes on.

A relay connects two sites that both connect outward, by WebSockets over TLS:

    GET /v1/relay                                               an upgrade to a WebSocket
    {"version":1,"challenge":"5f1c..."}                         the relay: 32 random bytes
    {"version":1,"role":"call","to":"9db1...","chain":[...],"signature":"..."}    the site
    {"status":"connected"}                                      the relay; or {"refused":...}
    (binary messages)                                           the sites' own TLS connection

A site that cannot be reached parks some connections (`"role":"park"`), and each is used for one
call of another site, of which the relay tells it (`{"status":"called"}`). Both prove their keys:
the signature covers the relay's name and challenge, the role, and whom they call, so that it is of
no use elsewhere. What the relay then passes on is a TLS connection between the two sites, with both
their certificates: the relay sees ciphertext.
"""

import json
from dataclasses import dataclass
from enum import StrEnum

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from dispfl.errors import DispflError
from dispfl.peer.membership.address import Address
from dispfl.peer.membership.encoding import canonical, from_text, to_text
from dispfl.peer.membership.identity import (
    MAX_ISSUERS,
    Identity,
    der,
    fingerprint,
    is_successor,
    read_certificate,
)
from dispfl.peer.transport.base import JSON, Refused
from dispfl.wire.refusals import Refusal

RELAY_VERSION = 1
RELAY_PATH = f"/v{RELAY_VERSION}/relay"
CHALLENGE_BYTES = 32
MAX_MESSAGE_BYTES = 1024 * 1024
"""Maximum size of a WebSocket message."""
CHUNK = 256 * 1024
"""Bytes that a site sends in one message."""
PING_SECONDS = 20.0
"""Interval of the relay's pings on parked connections, which keep them open in routers."""
PARKED_TIMEOUT = 60.0
"""Seconds without a ping or its answer after which a parked connection is dead."""
_PURPOSE = b"dispfl relay 1\n"
_MAX_CHARS = 64


class Role(StrEnum):
    """What a site wants of a relay."""

    PARK = "park"
    """To be called by others."""
    CALL = "call"
    """To be connected with a parked site."""


@dataclass(frozen=True)
class Proof:
    """What a site wants of a relay, signed with its key."""

    role: Role
    to: str
    """Fingerprint of the called site's certificate; empty to park."""
    chain: tuple[x509.Certificate, ...]
    """The site's certificate and the earlier ones."""
    signature: bytes

    @classmethod
    def sign(
        cls, identity: Identity, relay: Address, challenge: str, role: Role, to: str = ""
    ) -> "Proof":
        """Sign the challenge of a relay, which the site knows by this name."""
        signature = identity.sign(_signed(relay, challenge, role, to))
        return cls(role, to, identity.chain, signature)

    def to_text(self) -> str:
        """Write it as a message."""
        certificates: list[JSON] = [to_text(der(certificate)) for certificate in self.chain]
        fields: dict[str, JSON] = {
            "version": RELAY_VERSION,
            "role": str(self.role),
            "to": self.to,
            "chain": certificates,
            "signature": to_text(self.signature),
        }
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def read(cls, text: str) -> "Proof":
        """Parse an untrusted message; raise `Refused` if it is malformed."""
        fields = read_message(text)
        chain = fields.get("chain")
        to = fields.get("to")
        try:
            if not isinstance(chain, list) or not 1 <= len(chain) <= 1 + MAX_ISSUERS:
                raise ValueError(f"it needs 1 to {1 + MAX_ISSUERS} certificates")
            if not isinstance(to, str) or len(to) > _MAX_CHARS:
                raise ValueError("it does not say who is called")
            certificates = tuple(read_certificate(from_text(text)) for text in chain)
            role = Role(str(fields.get("role")))
            return cls(role, to, certificates, from_text(fields.get("signature")))
        except (ValueError, DispflError) as problem:
            raise Refused(Refusal.MALFORMED, f"The proof is invalid: {problem}.") from None

    def fingerprints(self, relay: Address, challenge: str) -> list[str]:
        """Verify the signature; return the fingerprints that the site has proved, newest first.

        They are those of its certificate and of the earlier ones from which it descends.
        """
        key = self.chain[0].public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)  # checked by read_certificate
        content = _signed(relay, challenge, self.role, self.to)
        try:
            key.verify(self.signature, content, ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            raise Refused(
                Refusal.SIGNATURE,
                f"The signature is not for this relay, {relay}, or not of this key.",
            ) from None
        proved = [fingerprint(der(self.chain[0]))]
        for newer, older in zip(self.chain, self.chain[1:], strict=False):
            if not is_successor(newer, older):
                break
            proved.append(fingerprint(der(older)))
        return proved


def _signed(relay: Address, challenge: str, role: Role, to: str) -> bytes:
    content: JSON = {"relay": str(relay), "challenge": challenge, "role": str(role), "to": to}
    return _PURPOSE + canonical(content).encode()


def read_message(text: str) -> dict[str, JSON]:
    """Parse an untrusted message of this protocol; raise `Refused` if it is none."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise Refused(Refusal.MALFORMED, "The message is not a JSON object.")
    return fields
