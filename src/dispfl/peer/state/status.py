"""The state of a node and of the other peers, for `dispfl peer status` and to decide which peers to
wait for."""

import asyncio
import contextlib
import os
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dispfl.peer.transport.https import HttpsTransport
from dispfl.round.exchange import exchange_costs
from dispfl.round.ledger import BYTES_PER_VALUE, MessageCost
from dispfl.wire.refusals import RefusalCounter

MAX_EPSILON = 1e6
"""The largest budget that is shown of another peer: far beyond any that protects something."""


@dataclass
class PeerStatus:
    """What a node knows of another peer."""

    round: int = -1
    """The latest round that it has reported."""
    last_seen: float | None = None
    """When its last request or response arrived, by the event loop's clock."""
    last_request: float | None = None
    """When its last request arrived, by the same clock: then it could reach us."""
    replies: int = 0
    """Responses to our requests, of any kind."""
    answered: int = 0
    missed: int = 0
    refusals: int = 0
    """How often it refused our requests."""
    received_bytes: int = 0
    sent_bytes: int = 0
    unreachable: bool = False
    """Our last request got no response; its own requests do not count."""
    silent: bool = False
    """Unreachable, and no request came from it since."""
    distance: float | None = None
    """With a robust rule: how far its last model was from ours, as the root mean square difference
    of a weight."""
    privacy: dict[str, float | bool | None] | None = None
    """What it says of its privacy: `epsilon`, its budget, or None if it has only noise; `delta`;
    and whether some of its budget is `left`. None: it says nothing.
    """
    spec_mismatch: str | None = None
    """How its federation spec differs from ours, if it does."""


@dataclass
class NodeStatus:
    """A node's view of the federation."""

    round: int = 0
    rounds: int = 0
    state: str = "starting"
    score: float | None = None
    epsilon: float | None = None
    """With privacy: what the site has spent."""
    privacy_exhausted: bool = False
    """Its budget does not last for another round."""
    deadline: float = 0.0
    unsaved_rounds: int = 0
    """Finished rounds that could not be saved yet."""
    save_problem: str | None = None
    """Why they could not."""
    failed_steps: int = 0
    """Steps that were given up because their numbers were not finite."""
    last_failure: str | None = None
    peers: dict[str, PeerStatus] = field(default_factory=lambda: defaultdict(PeerStatus))
    refused: RefusalCounter = field(default_factory=RefusalCounter)
    _messages: list[tuple[int, MessageCost]] = field(default_factory=list)

    @property
    def line(self) -> str:
        """The status in a line."""
        unsaved = (
            f"; {self.unsaved_rounds} rounds not saved: {self.save_problem}"
            if self.save_problem
            else ""
        )
        return f"Round {self.round} of {self.rounds}, {self.state}{unsaved}"

    def ended(self) -> None:
        """Note that the node has ended."""
        if self.state != "finished":
            self.state = "stopped"

    def mark_seen(self, name: str, t: int | None, now: float) -> None:
        """Note a request or a response of a peer, and its current round."""
        peer = self.peers[name]
        peer.last_seen, peer.silent, peer.spec_mismatch = now, False, None
        if t is not None:
            peer.round = max(peer.round, t)

    def record_request(self, name: str, now: float) -> None:
        """Note a request, whether it is answered or refused: the peer reaches us."""
        self.peers[name].last_request = now

    def record_reply(self, name: str) -> None:
        """Note a response: the peer is reachable."""
        peer = self.peers[name]
        peer.replies, peer.unreachable = peer.replies + 1, False

    def is_unreachable(self, name: str) -> bool:
        """Whether our last request to a peer got no response."""
        return name in self.peers and self.peers[name].unreachable

    def is_silent(self, name: str) -> bool:
        """Whether a peer is unreachable and sends no requests either, so that no model is kept for
        it."""
        return name in self.peers and self.peers[name].silent

    def was_seen(self, name: str) -> bool:
        """Whether a peer ever sent anything."""
        return self.peers[name].last_seen is not None

    def replies_of(self, name: str) -> int:
        """The number of responses of a peer."""
        return self.peers[name].replies

    def mark_unreachable(self, name: str) -> None:
        """Note that a peer did not respond."""
        self.peers[name].unreachable = self.peers[name].silent = True

    def mark_spec_mismatch(self, name: str, message: str) -> None:
        """Note that a peer's spec differs from ours."""
        peer = self.peers[name]
        peer.spec_mismatch = peer.spec_mismatch or message

    def spec_mismatch(self, name: str) -> str | None:
        """How a peer's spec differs from ours; None if it does not."""
        return self.peers[name].spec_mismatch if name in self.peers else None

    def round_of(self, name: str) -> int:
        """The latest round that a peer has reported."""
        return self.peers[name].round

    def record_answer(self, name: str) -> None:
        """Count a neighbour's model that was used in this round."""
        self.peers[name].answered += 1

    def record_distances(self, distances: Mapping[str, float | None]) -> None:
        """Note how far the models of this round were from ours."""
        for name, distance in distances.items():
            self.peers[name].distance = distance

    def record_miss(self, name: str) -> None:
        """Count a round without a neighbour's model."""
        self.peers[name].missed += 1

    def record_refusal(self, name: str) -> None:
        """Count a request of ours that a peer refused."""
        self.peers[name].refusals += 1

    def record_failure(self, t: int, failure: str) -> None:
        """Note that the step of round t was given up, and why."""
        self.failed_steps += 1
        self.last_failure = f"round {t}: {failure}"

    def record_received(
        self, own: str, name: str, t: int, requested: int, size: int, values: int
    ) -> None:
        """Record a received model of `size` bytes and `values` values, and the bytes of its
        request."""
        peer = self.peers[name]
        peer.received_bytes += size
        peer.sent_bytes += requested
        costs = exchange_costs(own, name, requested, BYTES_PER_VALUE * values, size)
        self._messages += [(t, message) for message in costs]

    def record_sent(self, name: str, requested: int, size: int) -> None:
        """Record a sent model of `size` bytes and the bytes of its request: the other end of
        `record_received`."""
        self.peers[name].received_bytes += requested
        self.peers[name].sent_bytes += size

    def take_messages(self, t: int) -> Iterator[MessageCost]:
        """Return and clear the messages of round t."""
        taken = [message for round_, message in self._messages if round_ == t]
        self._messages.clear()
        return iter(taken)

    def as_json(self) -> dict[str, Any]:
        """The content of the status file."""
        return {
            "round": self.round,
            "rounds": self.rounds,
            "state": self.state,
            "score": self.score,
            "epsilon": self.epsilon,
            "deadline_seconds": round(self.deadline, 3),
            "unsaved_rounds": self.unsaved_rounds,
            "save_problem": self.save_problem,
            "failed_steps": self.failed_steps,
            "last_failure": self.last_failure,
            "peers": {name: asdict(peer) for name, peer in sorted(self.peers.items())},
            "refused": {
                name: dict(sorted(reasons.items()))
                for name, reasons in sorted(self.refused.items())
            },
        }


def announced_privacy(said: Any) -> dict[str, float | bool | None] | None:
    """Return what a peer announces of its privacy; None if that is nothing, or not of the right
    form: it may say anything, and cannot prove it.
    """
    if not isinstance(said, dict):
        return None
    epsilon, delta, left = (said.get(key) for key in ("epsilon", "delta", "left"))
    if not (epsilon is None or _is_between(epsilon, 0, MAX_EPSILON)) or not _is_between(
        delta, 0, 1
    ):
        return None
    return {"epsilon": epsilon, "delta": delta, "left": left} if isinstance(left, bool) else None


def _is_between(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low < value < high


STATUS_INTERVAL = 1.0
"""Seconds between two messages, or less if the watchdog needs it."""


@dataclass(frozen=True)
class ServiceManager:
    """The service manager's socket; without an address, nothing is sent."""

    address: str = ""
    watchdog: float | None = None
    """Seconds without a sign of life after which the service manager ends the process."""

    @classmethod
    def of_process(cls, environment: MutableMapping[str, str] = os.environ) -> "ServiceManager":
        """Take the service manager's variables out of the environment: they are for this process
        alone."""
        address = environment.pop("NOTIFY_SOCKET", "")
        micros, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        if address.startswith("@"):  # a socket without a file
            address = "\0" + address[1:]
        watched = micros.isdecimal() and int(micros) > 0 and pid in ("", str(os.getpid()))
        return cls(address, int(micros) / 1e6 if watched else None)

    def send(self, *lines: str) -> None:
        """Send a message, without waiting; a service manager that does not listen is none of the
        node's concern."""
        if self.address:
            with (
                contextlib.suppress(OSError),
                socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out,
            ):
                out.setblocking(False)
                out.sendto("\n".join(lines).encode(), self.address)

    async def watch(self, status: NodeStatus, transport: HttpsTransport) -> None:
        """Report until cancelled."""
        is_ready, said = False, ""
        try:
            while self.address:
                lines = []
                if transport.is_serving and not is_ready:
                    is_ready, lines = True, ["READY=1"]
                if self.watchdog:
                    lines.append("WATCHDOG=1")
                if (line := status.line) != said:
                    said, lines = line, [*lines, f"STATUS={line}"]
                if lines:
                    self.send(*lines)
                await asyncio.sleep(min(STATUS_INTERVAL, (self.watchdog or STATUS_INTERVAL) / 2))
        finally:
            self.send("STOPPING=1")
