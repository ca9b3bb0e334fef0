"""What a peer's asking and its answering have in common."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from dispfl.errors import MessageError
from dispfl.methods.base import Around, GossipMethod
from dispfl.peer.door import Door, Reason
from dispfl.peer.greeting import News, body_of
from dispfl.peer.shelf import Shelf
from dispfl.peer.standing import Standing
from dispfl.peer.terms import Terms, digest_of
from dispfl.peer.transport import JSON, Refused
from dispfl.wire.codec import Codec
from dispfl.work import Setting

T = TypeVar("T")


class Members(Protocol):
    """Who belongs to the federation, as far as this site knows and agrees."""

    def roster(self, t: int) -> list[str]:
        """Everyone who takes part in round t, ourselves included, sorted."""
        ...

    def kept(self, name: str) -> Sequence[int] | None:
        """How many weights a member's masks keep in each layer, from the density it announced."""
        ...

    def join(self, t: int) -> None:
        """Announce that we take part from round t on."""
        ...

    def records(self) -> list[JSON]:
        """What members say of themselves, signed, for others to know."""
        ...

    def merge(self, records: JSON) -> Collection[str] | None:
        """Take in what others know, on any thread; for which reasons records were refused that no honest peer sends."""
        ...


async def at_once(work: Callable[[], Any]) -> Any:
    """Compute it here and now."""
    return work()


@dataclass
class Context:
    """One peer's settings, its view of the others, and what it has put out for them."""

    name: str
    setting: Setting
    codec: Codec
    terms: Terms
    members: Members
    aside: Callable[[Callable[[], Any]], Awaitable[Any]] = at_once
    """Computes something away from the event loop."""
    tell: Callable[[str, Mapping[str, object]], None] = lambda event, facts: None
    """Told of every event worth a line in a log."""
    standing: Standing = field(default_factory=Standing)
    shelf: Shelf = field(default_factory=Shelf)
    listening: str = ""
    """Where, for the log."""
    joining: bool = False
    """Whether the peer is new to a federation under way, and has no weights of its own to offer yet."""

    def __post_init__(self) -> None:
        self.digest = digest_of(self.terms)
        self.door = Door(lambda: asyncio.get_running_loop().time())
        self.standing.refused = self.door.refused
        self._told: dict[str, tuple[str, object]] = {}
        """What the log last said of a peer in trouble."""
        self._last_graph: tuple[int, list[str], dict[str, list[str]]] | None = None

    @property
    def method(self) -> GossipMethod:
        """The method; a server's has no place here."""
        assert isinstance(self.setting.method, GossipMethod)
        return self.setting.method

    def others(self, t: int) -> list[str]:
        """Everyone else in round t."""
        return [name for name in self.members.roster(t) if name != self.name]

    def around(self, t: int) -> Around:
        """Whom we may hear in round t. Everyone derives the same graph, so nobody has to be asked."""
        roster, heard = self.members.roster(t), self._graph(t)
        if not heard.get(self.name):
            return Around(roster, [], [])
        return Around(roster, heard[self.name], self.setting.topology.reachable(heard, self.name))

    def listeners(self, t: int) -> list[str]:
        """Who will ask for our model of round t."""
        return [name for name, senders in self._graph(t).items() if self.name in senders]

    def _graph(self, t: int) -> dict[str, list[str]]:
        """Who hears whom in round t; the last one is remembered, because it is asked for several times a round."""
        if not self.method.hears:
            return {}
        roster = self.members.roster(t)
        if self._last_graph is None or self._last_graph[:2] != (t, roster):
            self._last_graph = (t, roster, self.setting.topology.heard(self.setting.seed, t, roster))
        return self._last_graph[2]

    def replied(self, name: str, t: JSON) -> None:
        """A peer answered us, and may have said where it is."""
        self.met(name, t)
        self.standing.replied(name)
        if told := self._told.pop(name, None):
            self.tell("here" if told[0] == "waiting" else "back", {"peer": name})

    def trouble(self, name: str, event: str, why: str, reason: str | None = None) -> None:
        """Tell what is wrong with a peer when that changes: what goes on being wrong is no news."""
        told = self._told.get(name)
        if (event, reason) == told or (reason == Reason.CUT_OFF and told and told[0] in ("refused", "disagrees")):
            return
        self._told[name] = (event, reason)
        self.tell(event, {"peer": name, "reason": reason, "why": why})

    def disagree(self, name: str, sentence: str) -> None:
        """A peer's terms are not ours, whoever of us found out."""
        self.standing.disagreed(name, sentence)
        self.trouble(name, "disagrees", sentence)

    def met(self, name: str, t: JSON) -> None:
        """Something came from a peer, which may have said where it is."""
        where = min(t, self.setting.rounds) if isinstance(t, int) and t >= 0 else None  # no peer is beyond the last
        self.standing.met(name, where, asyncio.get_running_loop().time())

    def hello(self, answering: News | None = None) -> tuple[dict[str, JSON], bytes]:
        """How we introduce ourselves: the head and the body, with the records that the other side's greeting lacks."""
        terms: dict[str, JSON] = dict(self.terms)
        records = self.members.records()
        return {"terms": terms, "at": self.standing.round}, body_of(
            records, answering.lacks(records) if answering else []
        )

    async def learn(self, sender: str, body: bytes) -> News:
        """Take in what a greeting says of members; one that cannot be read is refused, and forged records are counted.

        Both take long where members are many, so neither is done on the event loop.
        """
        try:
            news = await self.compute(lambda: News.read(body))
        except MessageError as problem:
            self.door.count(sender, problem.refusal)
            raise Refused(problem.refusal, str(problem)) from None
        if records := news.records[: self.door.ration(sender, len(news.records))]:
            for reason in await self.compute(lambda: self.members.merge(records)) or ():
                self.door.count(sender, reason)
        return news

    async def compute(self, work: Callable[[], T]) -> T:
        """Compute something that takes long without keeping others waiting."""
        result: T = await self.aside(work)
        return result
