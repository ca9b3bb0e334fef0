"""The answering half of the HTTPS transport: a request becomes an ask, a reply or a refusal becomes a response.

A member that keeps sending what is not the protocol is cut off for a while, as the node does with whoever keeps asking
what nobody should ask.
"""

import asyncio
import io
import logging
import re
from collections.abc import Callable

from aiohttp import hdrs, web

from dispfl.peer import heads
from dispfl.peer.certified import Who, shown
from dispfl.peer.counting import UNKNOWN, Counters
from dispfl.peer.door import Door
from dispfl.peer.limits import Limits
from dispfl.peer.listener import Line
from dispfl.peer.moving import StalledError, moving
from dispfl.peer.parts import chunks, digest
from dispfl.peer.transport import JSON, Ask, Handler, Refused, Reply

HEAD = "dispfl-head"
REFUSED = 403
_PATH = re.compile(r"/v([0-9]{1,9})/([^/?]*)")
_LARGEST_RECORD, _RECORD_OVERHEAD = 16384, 22
"""Bytes of a TLS 1.3 record: what it carries at most, and its header, kind and tag."""
_PAUSE = 0.005
"""Seconds between two looks at how much of a reply has left."""
_log = logging.getLogger(__name__)


class Answering:
    """Answers requests with a handler, each authenticated by the certificate of its connection."""

    def __init__(
        self, name: str, who: Who, max_body: Callable[[str], int], handler: Handler, limits: Limits, counters: Counters
    ) -> None:
        self._name = name
        self._who = who
        self._max_body = max_body
        self._handler = handler
        self._limits = limits
        self._counters = counters
        self._door = Door(asyncio.get_running_loop().time)

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """The response to a request, whatever it is."""
        line = request.protocol
        assert isinstance(line, Line)
        with line.answering():
            try:
                return await self._answer(request, line)
            except Refused as refused:
                self._counters.refuse(refused.reason, line.member or UNKNOWN)
                return _refusal(request, refused)
            except StalledError:
                line.cut("slow")
                raise ConnectionResetError("The connection was too slow.") from None

    async def _answer(self, request: web.BaseRequest, line: Line) -> web.StreamResponse:
        sender = self._authenticate(request)
        line.belongs_to(sender)
        self._door.check(sender)
        try:
            ask, had = await self._read(request, line)
        except Refused as refused:
            self._door.count(sender, refused.reason)
            raise
        reply, offset = await self._handle(sender, ask), ask.offset
        if isinstance(reply, Refused):
            return _refusal(request, reply)
        if offset and (offset > len(reply.body) or await digest(reply.body, offset) != had):
            offset = 0  # the asker has the beginning of another reply
        return await self._respond(request, line, reply, offset)

    async def _read(self, request: web.BaseRequest, line: Line) -> tuple[Ask, str]:
        """The ask in a request, and the digest of what the asker has of its reply; refused if it is not of ours."""
        what = self._question(request)
        fields = heads.unpack(request.headers.get(HEAD, ""))
        head, offset, had = fields.get("head"), fields.get("offset", 0), fields.get("digest", "")
        if not (isinstance(head, dict) and isinstance(had, str) and type(offset) is int and offset >= 0):
            raise Refused("malformed", "The message's head lacks a field, or has one of the wrong kind.")
        return Ask(what, head, await self._body(request, line, what), offset), had

    def _authenticate(self, request: web.BaseRequest) -> str:
        certificates = shown(request.transport)
        sender = self._who(*certificates) if certificates else None
        if sender is None:
            raise Refused(
                "not-a-member",
                f"{self._name} does not accept this certificate; its people have to `dispfl peer accept` your invite.",
            )
        return sender

    def _question(self, request: web.BaseRequest) -> str:
        path = _PATH.fullmatch(request.path_qs)
        if request.method != hdrs.METH_POST or not path:
            raise Refused("malformed", f"There is nothing at {request.method[:16]} {request.path_qs[:64]}.")
        version, what = int(path[1]), path[2]
        if version != heads.VERSION:
            raise Refused(
                "version",
                f"{self._name} speaks version {heads.VERSION} of the protocol, not {version}; "
                "install the same dispfl on both sites.",
            )
        heads.check_what(what)
        return what

    async def _body(self, request: web.BaseRequest, line: Line, what: str) -> bytes:
        """The body, refused by its length before it is read; no more memory than the limit is ever taken."""
        length, limit = request.content_length, self._max_body(what)
        if length is None or length > limit:
            raise Refused("too-long", f"A question {what!r} has at most {limit} bytes, not {length or 'any number'}.")
        if request.headers.get(hdrs.EXPECT):
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # what counts as an answer is still to come
        body = io.BytesIO()
        async with moving(line.counted, self._limits):
            async for chunk in request.content.iter_any():
                body.write(chunk)
        self._counters.meter(line.member or UNKNOWN).body_received += length
        return body.getvalue()

    async def _handle(self, sender: str, ask: Ask) -> Reply | Refused:
        """What the handler says; a refusal of its own is returned, because it has counted that itself."""
        try:
            return await self._handler(sender, ask)
        except Refused as refused:
            return refused
        except Exception:
            _log.exception("%s's question %r could not be answered.", sender, ask.what)
            raise Refused("failed", f"{self._name} could not answer, for a mistake of its own; see its log.") from None

    async def _respond(self, request: web.BaseRequest, line: Line, reply: Reply, offset: int) -> web.StreamResponse:
        fields: dict[str, JSON] = {"version": heads.VERSION, "head": dict(reply.head), "offset": offset}
        response = web.StreamResponse(headers={HEAD: heads.pack(fields)})
        response.content_type = "application/octet-stream"
        response.content_length = len(reply.body) - offset
        meter, before = self._counters.meter(line.member or UNKNOWN), line.counted.sent
        async with moving(line.counted, self._limits):
            await response.prepare(request)
            for chunk in chunks(reply.body, offset):
                await response.write(chunk)
                meter.body_sent += len(chunk)
            await response.write_eof()
            await _has_left(line, before, request.writer.output_size)
        reply.sent()
        return response


async def _has_left(line: Line, before: int, size: int) -> None:
    """Wait until the system has taken a reply of so many bytes: what is in our own buffers is lost if we end now."""
    encrypted = size + _RECORD_OVERHEAD * -(-size // _LARGEST_RECORD)
    while line.counted.sent - before < encrypted:
        if line.transport is None or line.transport.is_closing():
            raise ConnectionResetError("The connection broke at the end of an answer.")
        await asyncio.sleep(_PAUSE)


def _refusal(request: web.BaseRequest, refused: Refused) -> web.StreamResponse:
    fields: dict[str, JSON] = {
        "version": heads.VERSION,
        "refused": str(refused.reason)[:100],
        "sentence": refused.sentence[:1000],
    }
    response = web.Response(status=REFUSED, headers={HEAD: heads.pack(fields)})
    if not request.content.is_eof():
        response.force_close()  # its body stays where it is
    return response
