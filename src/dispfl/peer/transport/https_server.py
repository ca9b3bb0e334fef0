"""Server side of the HTTPS transport: passes requests to a handler and sends its responses.

A member that keeps violating the protocol is banned for a minute, here and by the node's own checks
(`RequestGuard`).
"""

import asyncio
import io
import logging
import re
from collections.abc import Callable

from aiohttp import hdrs, web

from dispfl.peer.transport import http
from dispfl.peer.transport.bandwidth import Bandwidth, Throttle
from dispfl.peer.transport.base import JSON, Handler, Refused, Request, Response
from dispfl.peer.transport.guard import RequestGuard
from dispfl.peer.transport.http import (
    UNKNOWN,
    Identify,
    Limits,
    StalledError,
    TransportCounters,
    body_digest,
    chunks,
    peer_certificates,
    stall_timeout,
)
from dispfl.peer.transport.listener import ServerConnection
from dispfl.wire.refusals import Refusal

HEADER_NAME = "dispfl-header"
STATUS_REFUSED = 403
_PATH = re.compile(r"/v([0-9]{1,9})/([^/?]*)")
_MAX_RECORD_BYTES = 16384
"""Maximum payload of a TLS 1.3 record."""
_RECORD_OVERHEAD = 22
"""The size of its header, content type and tag."""
_POLL_SECONDS = 0.005
"""Interval between checks of how much of a response is sent."""
_FLOODS = (Refusal.BANNED, Refusal.TOO_MANY_REQUESTS)
"""Refusals after which the connection is closed, and new ones from its address wait their turn."""
_log = logging.getLogger(__name__)


class HttpHandler:
    """Authenticates HTTP requests by the client certificate and passes them to a handler."""

    def __init__(
        self,
        name: str,
        identify: Identify,
        max_body: Callable[[str], int],
        handler: Handler,
        limits: Limits,
        counters: TransportCounters,
        guard: RequestGuard,
        bandwidth: Bandwidth,
    ) -> None:
        self._bandwidth = bandwidth
        self._name = name
        self._identify = identify
        self._max_body = max_body
        self._handler = handler
        self._limits = limits
        self._counters = counters
        self._guard = guard

    async def __call__(self, http_request: web.BaseRequest) -> web.StreamResponse:
        """Respond to any HTTP request."""
        connection = http_request.protocol
        assert isinstance(connection, ServerConnection)
        with connection.handling_request():
            try:
                return await self._dispatch(http_request, connection)
            except Refused as refused:
                response = _refusal(http_request, refused)
                if refused.reason in _FLOODS:  # the next request costs it a handshake
                    response.force_close()
                    self._guard.addresses.limit(connection.address, self._guard.BAN_SECONDS)
                return response
            except StalledError:
                connection.abort(Refusal.SLOW)
                raise ConnectionResetError("The connection was too slow.") from None

    async def _dispatch(
        self, http_request: web.BaseRequest, connection: ServerConnection
    ) -> web.StreamResponse:
        name = connection.member or UNKNOWN
        try:
            sender = name = self._authenticate(http_request)
            connection.authenticate_as(sender)
        except Refused as refused:
            self._counters.refuse(refused.reason, name)
            raise
        self._guard.check(sender)
        try:
            request, client_digest = await self._read(http_request, connection)
        except Refused as refused:
            self._guard.count(sender, refused.reason)
            raise
        response = await self._handle(sender, request)
        if isinstance(response, Refused):
            return _refusal(http_request, response)
        offset = await _resumed_offset(request.offset, client_digest, response.body)
        throttle = self._bandwidth.sending(request.kind)
        return await self._send_response(http_request, connection, response, offset, throttle)

    async def _read(
        self, http_request: web.BaseRequest, connection: ServerConnection
    ) -> tuple[Request, str]:
        """Return the request and the client's digest of a partial response.

        Refuses violations of the protocol.
        """
        request_kind = self._kind(http_request)
        fields = http.unpack_header(http_request.headers.get(HEADER_NAME, ""))
        header = fields.get("header")
        offset = fields.get("offset", 0)
        client_digest = fields.get("digest", "")
        is_offset = type(offset) is int and offset >= 0
        if not isinstance(header, dict) or not isinstance(client_digest, str) or not is_offset:
            message = "The message's header lacks a field or has one of the wrong type."
            raise Refused(Refusal.MALFORMED, message)
        body = await self._body(http_request, connection, request_kind)
        return Request(request_kind, header, body, offset), client_digest

    def _authenticate(self, http_request: web.BaseRequest) -> str:
        certificates = peer_certificates(http_request.transport)
        sender = self._identify(*certificates) if certificates else None
        if sender is None:
            raise Refused(
                Refusal.NOT_A_MEMBER,
                f"{self._name} does not accept this certificate; run `dispfl peer accept` there"
                " with your invite.",
            )
        return sender

    def _kind(self, http_request: web.BaseRequest) -> str:
        path = _PATH.fullmatch(http_request.path_qs)
        if http_request.method != hdrs.METH_POST or not path:
            raise Refused(
                Refusal.MALFORMED,
                f"Unknown method or path: {http_request.method[:16]} {http_request.path_qs[:64]}.",
            )
        version = int(path[1])
        request_kind = path[2]
        if version != http.PROTOCOL_VERSION:
            raise Refused(
                Refusal.VERSION,
                f"{self._name} uses version {http.PROTOCOL_VERSION} of the protocol, not {version};"
                " install the same dispfl on both sites.",
            )
        http.check_kind(request_kind)
        return request_kind

    async def _body(
        self, http_request: web.BaseRequest, connection: ServerConnection, kind: str
    ) -> bytes:
        """Read the body, after its declared length was checked, which bounds the memory."""
        length = http_request.content_length
        limit = self._max_body(kind)
        if length is None or length > limit:
            raise Refused(
                Refusal.TOO_LONG,
                f"A {kind!r} request has at most {limit} bytes, got"
                f" {length or 'no content-length'}.",
            )
        if http_request.headers.get(hdrs.EXPECT):
            await http_request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            http_request.writer.output_size = 0  # the interim response does not count as output
        body = io.BytesIO()
        throttle = self._bandwidth.receiving(kind)
        async with stall_timeout(connection.sock, self._limits, throttle):
            async for chunk in http_request.content.iter_chunked(throttle.limit.turn):
                await throttle.take(len(chunk))
                body.write(chunk)
        self._counters.counter(connection.member or UNKNOWN).body_received += length
        return body.getvalue()

    async def _handle(self, sender: str, request: Request) -> Response | Refused:
        """Call the handler; return its refusal, which the handler has counted already."""
        try:
            return await self._handler(sender, request)
        except Refused as refused:
            return refused
        except Exception:
            _log.exception("The %r request of %s failed.", request.kind, sender)
            self._counters.refuse(Refusal.INTERNAL_ERROR, sender)
            return Refused(
                Refusal.INTERNAL_ERROR,
                f"{self._name} could not respond because of an internal error.",
            )

    async def _send_response(
        self,
        http_request: web.BaseRequest,
        connection: ServerConnection,
        response: Response,
        offset: int,
        throttle: Throttle,
    ) -> web.StreamResponse:
        fields: dict[str, JSON] = {
            "version": http.PROTOCOL_VERSION,
            "header": dict(response.header),
            "offset": offset,
        }
        try:
            headers = {HEADER_NAME: http.pack_header(fields)}
        except Refused as refused:
            self._counters.refuse(refused.reason, connection.member or UNKNOWN)
            raise
        http_response = web.StreamResponse(headers=headers)
        http_response.content_type = "application/octet-stream"
        http_response.content_length = len(response.body) - offset
        counter = self._counters.counter(connection.member or UNKNOWN)
        sent_before = connection.sock.sent
        async with stall_timeout(connection.sock, self._limits, throttle):
            await http_response.prepare(http_request)
            for chunk in chunks(response.body, offset, throttle.limit.turn):
                await throttle.take(len(chunk))
                await http_response.write(chunk)
                counter.body_sent += len(chunk)
            await http_response.write_eof()
            await _wait_until_sent(connection, sent_before, http_request.writer.output_size)
        response.on_sent()
        return http_response


async def _resumed_offset(offset: int, client_digest: str, body: bytes) -> int:
    """Return where to resume a response: 0 if the client has the beginning of another one."""
    if offset == 0 or offset > len(body):
        return 0
    return offset if await body_digest(body, offset) == client_digest else 0


async def _wait_until_sent(connection: ServerConnection, sent_before: int, size: int) -> None:
    """Wait until the system has accepted `size` bytes; our own buffers end with the process."""
    records = -(-size // _MAX_RECORD_BYTES)
    encrypted_size = size + records * _RECORD_OVERHEAD
    while connection.sock.sent - sent_before < encrypted_size:
        if connection.transport is None or connection.transport.is_closing():
            raise ConnectionResetError("The connection broke at the end of a response.")
        await asyncio.sleep(_POLL_SECONDS)


def _refusal(http_request: web.BaseRequest, refused: Refused) -> web.StreamResponse:
    fields: dict[str, JSON] = {
        "version": http.PROTOCOL_VERSION,
        "refused": str(refused.reason)[:100],
        "message": refused.message[:1000],
    }
    http_response = web.Response(
        status=STATUS_REFUSED, headers={HEADER_NAME: http.pack_header(fields)}
    )
    if not http_request.content.is_eof():
        http_response.force_close()  # its body is not read
    return http_response
