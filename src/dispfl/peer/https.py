"""The transport between machines: HTTPS with mutual TLS, one POST for an ask, its answer in the response.

    POST /v1/model                         the question's name, under the protocol's version
    dispfl-head: {"version":1,"head":...}  the head, as one line of JSON
    (body)                                 a message of the codec

    200, dispfl-head: {"version":1,"head":...,"offset":0}    the reply, from a byte on
    403, dispfl-head: {"version":1,"refused":...}            a refusal, by name and in a sentence

An ask reaches the other side's handler once. If its connection breaks before anything of the answer is here, that is
`Unreachable`, and the caller's to ask anew. If the answer has begun, the transport goes on with it by itself: it asks
again, with the number of bytes that it has and their digest, and the rest is sent.
"""

import asyncio
import ssl
from collections.abc import Callable

from dispfl.peer import heads
from dispfl.peer.certified import Who
from dispfl.peer.counting import Counters
from dispfl.peer.https_client import BrokenError, Neighbour
from dispfl.peer.https_server import Answering
from dispfl.peer.limits import Limits
from dispfl.peer.listener import Listener, until
from dispfl.peer.parts import Part
from dispfl.peer.transport import Ask, Handler, Reply, Unreachable

__all__ = ["Counters", "HttpsTransport", "Limits", "Who"]

_WORTH_IT = 64 * 1024
"""Bytes that an attempt must bring for the next not to count as one to no avail."""


class HttpsTransport:
    """A `Transport` over HTTPS. It knows members only through what it is handed.

    `client` and `server` are TLS contexts that demand a certificate; `who` names the member behind one; `address` says
    where a member listens; `max_ask` and `max_reply` say how long a body may be, by the question's name.
    """

    def __init__(
        self,
        name: str,
        listen: tuple[str, int],
        *,
        client: ssl.SSLContext,
        server: ssl.SSLContext,
        who: Who,
        address: Callable[[str], tuple[str, int]],
        max_ask: Callable[[str], int],
        max_reply: Callable[[str], int],
        limits: Limits | None = None,
    ) -> None:
        self.name = name
        self.limits = limits or Limits()
        self.counters = Counters()
        self._listen = listen
        self._client = client
        self._server = server
        self._who = who
        self._address = address
        self._max_ask = max_ask
        self._max_reply = max_reply
        self._neighbours: dict[str, Neighbour] = {}
        self._listener: Listener | None = None
        self._asks_under_way = 0
        self._is_closed = False

    @property
    def port(self) -> int:
        """Where it listens: what the system chose, if it was left to it."""
        return self._listener.port if self._listener else self._listen[1]

    async def serve(self, handler: Handler) -> None:
        """Begin to listen; returns once listening."""
        answering = Answering(self.name, self._who, self._max_ask, handler, self.limits, self.counters)
        self._listener = Listener(self._server, answering, self.limits, self.counters)
        await self._listener.open(*self._listen)

    async def ask(self, peer: str, ask: Ask) -> Reply:
        """The reply of that peer, and of nobody else; raises `Refused` or `Unreachable`."""
        heads.check_what(ask.what)
        self._asks_under_way += 1
        try:
            return await self._ask(peer, ask)
        finally:
            self._asks_under_way -= 1

    async def close(self) -> None:
        """Stop listening, end all connections. Who is being asked or answered learns that it broke."""
        self._is_closed = True
        neighbours, self._neighbours = list(self._neighbours.values()), {}
        if self._listener:
            await self._listener.close()
        for neighbour in neighbours:
            await neighbour.close()
        await until(lambda: not (self._asks_under_way or any(one.sockets for one in neighbours)), self.limits.connect)

    async def _ask(self, peer: str, ask: Ask) -> Reply:
        part, fruitless = Part(), 0
        while True:
            before = part.length
            try:
                return await self._neighbour(peer).attempt(self._address(peer), ask, self._max_reply(ask.what), part)
            except BrokenError as broken:
                fruitless = 0 if part.length - before >= _WORTH_IT else fruitless + 1
                if not part.length or fruitless >= self.limits.attempts or self._is_closed:
                    raise Unreachable(peer, str(broken)) from broken
            await asyncio.sleep(self.limits.backoff * 2**fruitless)

    def _neighbour(self, peer: str) -> Neighbour:
        if self._is_closed:
            raise BrokenError("this site is shutting down")
        if peer not in self._neighbours:
            meter = self.counters.meter(peer)
            self._neighbours[peer] = Neighbour(peer, self._client, self._who, self.limits, meter)
        return self._neighbours[peer]
