"""Every reason to refuse a message, a request or a connection, and a counter of refusals."""

import ast
import inspect
from collections import Counter, defaultdict
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from typing import NoReturn

from dispfl.errors import MessageError


class Refusal(StrEnum):
    """Why something from another peer was refused.

    The value is the name on the wire, in logs and in counters.
    """

    # Bytes of a message (`dispfl.wire.codec`)
    TOO_SHORT = "too-short"
    """The message ends inside its header."""
    NOT_OURS = "not-ours"
    """It does not start with the format's magic bytes."""
    VERSION = "version"
    """It has another version of the message format or of the protocol."""
    KIND = "kind"
    """It is another kind of message than expected."""
    FORMAT = "format"
    """Its value format or its compression differs from the federation's."""
    CHECKSUM = "checksum"
    """The checksum does not match."""
    LENGTH = "length"
    """A block is longer or shorter than the layout requires."""
    PADDING = "padding"
    """The unused bits of a mask's last byte are not zero."""
    COUNT = "count"
    """The number of values differs from the number of weights that the mask keeps."""
    COMPRESSION = "compression"
    """A compressed block does not decompress to the expected size."""
    NOT_FINITE = "not-finite"
    """A value or a scale is NaN or infinite."""
    TENSOR = "tensor"
    """A tensor beside the model is not as the method declares it, or not finite."""

    # Connections and HTTP requests (`dispfl.peer.transport`)
    HANDSHAKE = "handshake"
    """The TLS handshake failed."""
    NO_CERTIFICATE = "no-certificate"
    """The client presented no certificate."""
    UNKNOWN_CERTIFICATE = "unknown-certificate"
    """The client presented a certificate that no accepted member has."""
    WRONG_CERTIFICATE = "wrong-certificate"
    """The server presented another certificate than the accepted one."""
    NOT_A_MEMBER = "not-a-member"
    """The certificate belongs to no accepted member."""
    REVOKED = "revoked"
    """The member was revoked here."""
    TOO_MANY_CONNECTIONS = "too-many-connections"
    """All connections of the member, or of the listener, are in use."""
    SLOW = "slow"
    """A handshake, a header or a transfer took too long."""
    NOT_CONNECTED = "not-connected"
    """The called site is not connected to the relay."""
    TOO_LONG = "too-long"
    """A header or a body exceeds its limit."""
    MALFORMED = "malformed"
    """A request, a header or a record lacks a field, or has one of the wrong type."""
    INTERNAL_ERROR = "internal-error"
    """The request failed because of an error in the server."""

    # Requests of members (`dispfl.peer.server`, `dispfl.peer.client`)
    BANNED = "banned"
    """The peer was refused too often within a minute."""
    UNKNOWN_REQUEST = "unknown-request"
    """There is no request of this kind."""
    SPEC_MISMATCH = "spec-mismatch"
    """The peer belongs to another federation, or has other settings."""
    NO_SUCH_ROUND = "no-such-round"
    """The federation has no such round."""
    STALE = "stale"
    """The model of that round is no longer kept: the peer is far behind."""
    JOINING = "joining"
    """This peer has just joined and has no model yet."""
    REPLAYED = "replayed"
    """The request was answered before, or its response was resumed too often."""
    TOO_MANY_REQUESTS = "too-many-requests"
    """The peer has used up its requests, syncs or bytes of this round."""
    DUPLICATE = "duplicate"
    """The same model was requested too often."""
    DENSITY = "density"
    """The mask does not keep the announced number of weights in each layer."""
    NORM = "norm"
    """The weights are far larger than ours, or all zero."""
    WRONG_RESPONSE = "wrong-response"
    """The response belongs to another request."""

    # Outboxes (`dispfl.peer.outbox`)
    NOT_A_RECIPIENT = "not-a-recipient"
    """The head of an outbox is not encrypted for this site."""
    MISSING_OBJECT = "missing-object"
    """The storage does not have an object of which the head says that it is there."""
    DAMAGED_OBJECT = "damaged-object"
    """An object is not the one that its owner has signed, or cannot be read."""

    # Signed records of members (`dispfl.peer.membership`)
    SIGNATURE = "signature"
    """A record is not signed by its certificate's key."""
    CERTIFICATE = "certificate"
    """A record comes with the certificate of another site, or with a broken chain."""
    FEDERATION = "federation"
    """A record belongs to another federation."""
    ROTATION = "rotation"
    """A member replaces its key again within an hour."""
    ROSTER = "roster"
    """A roster is not signed by enough of the administrators that this site has accepted."""
    TOO_MANY_RECORDS = "too-many-records"
    """The peer sent more records within a minute than are verified."""


@cache
def refusal_sentences() -> Mapping[str, str]:
    """Return the sentence below each refusal in this file, by the refusal's value."""
    [definition] = ast.parse(inspect.getsource(Refusal)).body
    assert isinstance(definition, ast.ClassDef)
    sentences = {}
    for statement, after in zip(definition.body, definition.body[1:], strict=False):
        match statement, after:
            case (
                ast.Assign(value=ast.Constant(value=str(name))),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                sentences[name] = inspect.cleandoc(text)
    return sentences


class RefusalCounter(defaultdict[str, Counter[str]]):
    """The number of refusals, by peer and reason."""

    def __init__(self) -> None:
        super().__init__(Counter)

    def add(self, peer: str, reason: str) -> None:
        """Count a refusal."""
        self[peer][str(reason)] += 1

    def total(self) -> int:
        """Return the number of all refusals."""
        return sum(map(Counter.total, self.values()))


def refuse(refusal: Refusal, message: str) -> NoReturn:
    """Raise a `MessageError`."""
    raise MessageError(refusal, message)
