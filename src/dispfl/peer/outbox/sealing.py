"""Encryption for many readers at once: HPKE for a key, AES-GCM with that key for the rest.

A site's *sealing key* is hybrid where `cryptography` has ML-KEM: what lies in an outbox may be
stored for years, so both X25519 and ML-KEM-768 would have to be broken to read it. It is announced
in the site's signed record as `mlkem768-x25519:BASE64` or `x25519:BASE64`.
"""

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import x25519
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from dispfl.errors import ConfigError
from dispfl.files import open_regular
from dispfl.peer.membership.encoding import from_text, to_text
from dispfl.peer.membership.identity import IdentityError, check_private, write_privately

SEALING_KEY = "sealing.key"
"""The file beside a site's key."""
HYBRID = "mlkem768-x25519"
CLASSIC = "x25519"
KEY_BYTES = 32
TAG_BYTES = 16
_X25519_BYTES = 32
_SEED_BYTES = 64
_MLKEM_BYTES = 1184
_CHUNK_BYTES = 256 * 1024 * 1024
"""Bytes that are encrypted at once; AES-GCM has a limit of 2 GB."""
_NONCE_BYTES = 12


def can_seal() -> bool:
    """Whether the installed `cryptography` has HPKE."""
    try:
        from cryptography.hazmat.primitives import hpke  # noqa: F401
    except ImportError:
        return False
    return True


def require_sealing() -> None:
    """Refuse a version of `cryptography` without HPKE."""
    if not can_seal():
        raise ConfigError(
            "An outbox needs cryptography 47 or later (HPKE): pip install 'cryptography>=47'.",
            key="outbox",
        )


@dataclass(frozen=True)
class SealingKey:
    """A site's private key for what others seal for it."""

    kind: str
    secret: bytes
    """The seed of the ML-KEM key, if it is hybrid, and the X25519 key."""

    @classmethod
    def generate(cls) -> "SealingKey":
        """Make a key, hybrid if possible."""
        secret = x25519.X25519PrivateKey.generate().private_bytes_raw()
        try:
            from cryptography.hazmat.primitives.asymmetric import mlkem
            from cryptography.hazmat.primitives.hpke import KEM

            if hasattr(KEM, "MLKEM768_X25519"):
                seed = mlkem.MLKEM768PrivateKey.generate().private_bytes_raw()
                return cls(HYBRID, seed + secret)
        except (ImportError, UnsupportedAlgorithm):
            pass
        return cls(CLASSIC, secret)

    @classmethod
    def load(cls, folder: Path) -> "SealingKey | None":
        """Load the key of a site; None if it has none."""
        file = folder / SEALING_KEY
        try:
            with open_regular(file) as opened:
                check_private(opened)
                kind, _, secret = opened.read().decode().strip().partition(":")
            key = cls(kind, from_text(secret))
            key._private()
        except FileNotFoundError:
            return None
        except (OSError, ValueError, ImportError, UnsupportedAlgorithm) as problem:
            raise IdentityError(
                f"{file} cannot be used ({problem}); delete it, and the node makes a new one."
            ) from None
        return key

    def save(self, folder: Path) -> None:
        """Write the key; only the owner can read it."""
        write_privately(folder / SEALING_KEY, f"{self.kind}:{to_text(self.secret)}\n".encode())

    @property
    def public(self) -> str:
        """The public key as text, as in member records."""
        x25519_key = x25519.X25519PrivateKey.from_private_bytes(self.secret[-_X25519_BYTES:])
        raw = x25519_key.public_key().public_bytes_raw()
        if self.kind == HYBRID:
            from cryptography.hazmat.primitives.asymmetric import mlkem

            mlkem_key = mlkem.MLKEM768PrivateKey.from_seed_bytes(self.secret[:_SEED_BYTES])
            raw = mlkem_key.public_key().public_bytes_raw() + raw
        return f"{self.kind}:{to_text(raw)}"

    def unwrap(self, wrapped: bytes, purpose: bytes) -> bytes:
        """Return a key that was wrapped for this one; raise ValueError."""
        try:
            return bytes(_suite(self.kind).decrypt(wrapped, self._private(), info=purpose))
        except InvalidTag:
            raise ValueError("it is not sealed for this site's key.") from None

    def _private(self) -> Any:
        x25519_key = x25519.X25519PrivateKey.from_private_bytes(self.secret[-_X25519_BYTES:])
        if self.kind == CLASSIC:
            return x25519_key
        from cryptography.hazmat.primitives import hpke
        from cryptography.hazmat.primitives.asymmetric import mlkem

        if self.kind != HYBRID:
            raise ValueError(f"there is no kind of key {self.kind[:40]!r}.")
        mlkem_key = mlkem.MLKEM768PrivateKey.from_seed_bytes(self.secret[:-_X25519_BYTES])
        return hpke.MLKEM768X25519PrivateKey(mlkem_key, x25519_key)


def check_public(text: str) -> str:
    """Return the text of a public key; raise ValueError if it cannot be one."""
    kind, _, encoded = text.partition(":")
    lengths = {HYBRID: _MLKEM_BYTES + _X25519_BYTES, CLASSIC: _X25519_BYTES}
    if len(from_text(encoded)) != lengths.get(kind):
        raise ValueError(f"{text[:40]!r} is not a sealing key.")
    return text


def wrap(key: bytes, public: str, purpose: bytes) -> bytes:
    """Encrypt a key for the owner of a public one.

    Raises ValueError for a key that is none, or of a kind that this `cryptography` does not have.
    """
    kind, _, encoded = public.partition(":")
    raw = from_text(encoded)
    try:
        public_key: Any = x25519.X25519PublicKey.from_public_bytes(raw[-_X25519_BYTES:])
        if kind == HYBRID:
            from cryptography.hazmat.primitives import hpke
            from cryptography.hazmat.primitives.asymmetric import mlkem

            mlkem_key = mlkem.MLKEM768PublicKey.from_public_bytes(raw[:-_X25519_BYTES])
            public_key = hpke.MLKEM768X25519PublicKey(mlkem_key, public_key)
        return bytes(_suite(kind).encrypt(key, public_key, info=purpose))
    except (ImportError, AttributeError, UnsupportedAlgorithm) as problem:
        raise ValueError(f"this site's cryptography has no {kind} ({problem}).") from None


def _suite(kind: str) -> Any:
    from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

    kem = KEM.MLKEM768_X25519 if kind == HYBRID else KEM.X25519
    return Suite(kem, KDF.HKDF_SHA256, AEAD.AES_256_GCM)


def new_key() -> bytes:
    """A random key for one object."""
    return secrets.token_bytes(KEY_BYTES)


def encrypt(key: bytes, content: bytes) -> bytes:
    """Encrypt with a key that is used for nothing else, so that a counter will do as a nonce."""
    cipher = AESGCM(key)
    view = memoryview(content)
    chunks = []
    for number, start in enumerate(range(0, max(1, len(view)), _CHUNK_BYTES)):
        nonce = number.to_bytes(_NONCE_BYTES, "big")
        chunks.append(cipher.encrypt(nonce, view[start : start + _CHUNK_BYTES], None))
    return b"".join(chunks)


def decrypt(key: bytes, ciphertext: bytes) -> bytes:
    """Undo `encrypt`; raise ValueError if a byte was changed."""
    cipher = AESGCM(key)
    view = memoryview(ciphertext)
    step = _CHUNK_BYTES + TAG_BYTES
    chunks = []
    try:
        for number, start in enumerate(range(0, len(view), step)):
            nonce = number.to_bytes(_NONCE_BYTES, "big")
            chunks.append(cipher.decrypt(nonce, view[start : start + step], None))
    except InvalidTag:
        raise ValueError("it was changed after it was encrypted.") from None
    return b"".join(chunks)


def encrypted_size(size: int) -> int:
    """How many bytes `encrypt` returns for so many."""
    chunks = max(1, -(-size // _CHUNK_BYTES))
    return size + chunks * TAG_BYTES
