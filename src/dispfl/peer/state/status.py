"""The status of a node: what it knows of itself and of other peers, as written and shown."""

import asyncio
import contextlib
import os
import socket
import statistics
from collections import defaultdict
from collections.abc import Callable, MutableMapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dispfl.wire.refusals import RefusalCounter

FINISHED = "finished"
FINISHED_ALONE = "finished alone"
"""The last round is over, and most rounds were trained without a model of another site."""
MAX_INSTANCES = 4
"""Processes of a peer that are remembered."""
MAX_EPSILON = 1e6
"""The largest privacy budget of another peer that is shown: far beyond any that protects."""


@dataclass
class PeerStatus:
    """What a node knows of another peer."""

    round: int = -1
    """The latest round that it has reported."""
    last_seen: float | None = None
    """When its last request or response arrived, by the event loop's clock."""
    last_request: float | None = None
    """When its last request arrived, by the same clock: then it could reach us."""
    route: str | None = None
    """How our last request reached it: "direct", the address of a relay, or "outbox PLACE"."""
    outbox_problem: str | None = None
    """Why an older state of its outbox is used instead of the newest; None if it is not."""
    replies: int = 0
    """Responses to our requests, of any kind."""
    answered: int = 0
    """Rounds in which its model was averaged."""
    missed: int = 0
    """Rounds without its model."""
    refusals: int = 0
    """How often it refused our requests."""
    received_bytes: int = 0
    """Message bodies received from it."""
    sent_bytes: int = 0
    """Message bodies sent to it, or stored for it in our outbox."""
    latencies: list[float] = field(default_factory=list)
    """Seconds that it took to answer our last requests for models, oldest first."""
    slow: bool = False
    """Most of these are long: rounds do not wait for it, and use its models when they arrive."""
    unreachable: bool = False
    """Our last request got no response; its own requests do not count."""
    silent: bool = False
    """Unreachable, and no request has arrived from it since: no model is kept for it."""
    distance: float | None = None
    """With a robust rule: the root mean square difference of its last model from ours."""
    similarity: float | None = None
    """With affinities: how similar its last model is to ours, at most 1."""
    affinity: float | None = None
    """With affinities: how much its last model counted in our average; our own counts 1."""
    privacy: dict[str, float | bool | None] | None = None
    """What it says of its privacy: `epsilon`, its budget, or None if it has only noise; `delta`;
    and whether some of its budget is `left`. None: it says nothing.
    """
    hours: list[int] | None = None
    """The minutes of the UTC day from which and until which it takes part; None: always."""
    asleep_until: float | None = None
    """When its hours begin, by the event loop's clock, if it has said that it sleeps."""
    spec_mismatch: str | None = None
    """How its federation spec differs from ours, if it does."""
    revocation: str | None = None
    """What it says of why it has revoked us, if it has."""
    instances: list[str] = field(default_factory=list)
    """The random names of the processes that have its key, in the order in which they came."""
    cloned: bool = False
    """Two processes with its key run at the same time."""

    @property
    def was_seen(self) -> bool:
        """Whether it ever sent anything."""
        return self.last_seen is not None

    @property
    def is_usable(self) -> bool:
        """Whether it may send its model: our last request got a response, and our specs agree."""
        return not self.unreachable and self.spec_mismatch is None

    def is_asleep(self, now: float) -> bool:
        """Whether it sleeps outside of its hours, by what it has said."""
        return self.asleep_until is not None and now < self.asleep_until

    @property
    def latency(self) -> float | None:
        """The median of its last latencies."""
        return statistics.median(self.latencies) if self.latencies else None

    def mark_seen(self, t: int | None, now: float) -> None:
        """Note a request or a response, and its current round."""
        self.last_seen = now
        self.silent = False
        self.spec_mismatch = None
        if t is not None:
            self.round = max(self.round, t)

    def mark_instance(self, instance: str) -> None:
        """Note which process has sent a request.

        A restarted site has a new name. One that comes back after another runs beside it.
        """
        if instance in self.instances[:-1]:
            self.cloned = True
            self.instances.remove(instance)
        if instance not in self.instances:
            self.instances = [*self.instances, instance][-MAX_INSTANCES:]

    def mark_replied(self) -> None:
        """Note a response to one of our requests: the peer is reachable."""
        self.replies += 1
        self.unreachable = False
        self.revocation = None

    def mark_unreachable(self) -> None:
        """Note that one of our requests got no response."""
        self.unreachable = True
        self.silent = True


@dataclass
class NodeStatus:
    """The status of a node, as `dispfl peer status` shows it."""

    round: int = 0
    rounds: int = 0
    spec_version: int = 1
    """The version of the spec that is in force in this round."""
    state: str = "starting"
    waiting: str | None = None
    """Why the node waits instead of training, if it does."""
    clone_seen_by: list[str] = field(default_factory=list)
    """Members that say that another process has this site's key and runs, too."""
    trained_rounds: int = 0
    """Rounds that the site has trained, without those that it skipped."""
    alone_rounds: int = 0
    """Those of them without any of the requested models."""
    alone_in_a_row: int = 0
    """Those since the last received model."""
    company_until: int = 0
    """With `schedule = "async"`: how many rounds had passed at the last received model."""
    score: float | None = None
    epsilon: float | None = None
    """With privacy: what the site has spent."""
    privacy_exhausted: bool = False
    """Whether its budget does not last for another round."""
    protection: str | None = None
    """How the last average was protected from Byzantine peers, in words."""
    is_protected: bool | None = None
    """Whether that withstands any Byzantine peer; None before the first average."""
    discarded: int = 0
    """Models of the last round that were not averaged, because too few arrived for the rule."""
    deadline: float = 0.0
    step_seconds: float | None = None
    """How long the last training step took."""
    saving_errors: int = 0
    """Attempts to save rounds that have failed."""
    unsaved_rounds: int = 0
    """Finished rounds that could not be saved yet."""
    save_problem: str | None = None
    """Why they could not."""
    failed_steps: int = 0
    """Steps that were discarded because their numbers were not finite."""
    last_failure: str | None = None
    peers: dict[str, PeerStatus] = field(default_factory=lambda: defaultdict(PeerStatus))
    refused: RefusalCounter = field(default_factory=RefusalCounter)

    @property
    def silent_peers(self) -> set[str]:
        """Peers that neither respond nor send requests."""
        return {name for name, peer in self.peers.items() if peer.silent}

    @property
    def final_state(self) -> str:
        """The state after the last round."""
        is_mostly_alone = 2 * self.alone_rounds > self.trained_rounds
        return FINISHED_ALONE if is_mostly_alone else FINISHED

    @property
    def line(self) -> str:
        """The status in a line."""
        text = f"Round {self.round} of {self.rounds}, {self.state}"
        if self.waiting:
            text += f": {self.waiting}"
        if self.save_problem:
            text += f"; {self.unsaved_rounds} rounds not saved: {self.save_problem}"
        return text

    def as_json(self) -> dict[str, Any]:
        """The content of the status file."""
        return {
            "round": self.round,
            "rounds": self.rounds,
            "spec_version": self.spec_version,
            "state": self.state,
            "waiting": self.waiting,
            "clone_seen_by": self.clone_seen_by,
            "trained_rounds": self.trained_rounds,
            "alone_rounds": self.alone_rounds,
            "score": self.score,
            "epsilon": self.epsilon,
            "protection": self.protection,
            "discarded": self.discarded,
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


def announced_privacy(announcement: Any) -> dict[str, float | bool | None] | None:
    """Return what a peer announces of its privacy; None if it has another form.

    It is a claim that the peer cannot prove.
    """
    if not isinstance(announcement, dict):
        return None
    epsilon = announcement.get("epsilon")
    delta = announcement.get("delta")
    is_left = announcement.get("left")
    has_valid_budget = epsilon is None or _is_between(epsilon, 0, MAX_EPSILON)
    if not has_valid_budget or not _is_between(delta, 0, 1) or not isinstance(is_left, bool):
        return None
    return {"epsilon": epsilon, "delta": delta, "left": is_left}


def _is_between(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low < value < high


NOTIFY_INTERVAL = 1.0
"""Seconds between two messages to the service manager, or less if the watchdog needs it."""


@dataclass(frozen=True)
class ServiceManager:
    """Reports the status to systemd, if systemd has started the node: sd_notify(3).

    A unit with `Type=notify` gives the process a datagram socket. The node sends READY=1 once it
    accepts connections, a line of status whenever it changes, WATCHDOG=1 from its event loop while
    that is alive, and STOPPING=1 at the end. Without an address, nothing is sent.
    """

    address: str = ""
    watchdog: float | None = None
    """Seconds without a sign of life after which the service manager ends the process."""

    @classmethod
    def of_process(cls, environment: MutableMapping[str, str] = os.environ) -> "ServiceManager":
        """Take the service manager's variables, which are for this process, out of its
        environment."""
        address = environment.pop("NOTIFY_SOCKET", "")
        if address.startswith("@"):  # an abstract socket, without a file
            address = "\0" + address[1:]
        microseconds = environment.pop("WATCHDOG_USEC", "")
        watched_pid = environment.pop("WATCHDOG_PID", "")
        is_watched = watched_pid in ("", str(os.getpid()))
        if not is_watched or not microseconds.isdecimal() or int(microseconds) == 0:
            return cls(address)
        return cls(address, int(microseconds) / 1e6)

    def send(self, *lines: str) -> None:
        """Send a message without waiting, whether or not anybody listens."""
        if not self.address:
            return
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify_socket,
        ):
            notify_socket.setblocking(False)
            notify_socket.sendto("\n".join(lines).encode(), self.address)

    async def watch(self, status: NodeStatus, is_serving: Callable[[], bool]) -> None:
        """Report until cancelled."""
        was_ready = False
        reported = ""
        interval = min(NOTIFY_INTERVAL, (self.watchdog or NOTIFY_INTERVAL) / 2)
        try:
            while self.address:
                lines = []
                if is_serving() and not was_ready:
                    lines.append("READY=1")
                    was_ready = True
                if self.watchdog:
                    lines.append("WATCHDOG=1")
                if status.line != reported:
                    reported = status.line
                    lines.append(f"STATUS={reported}")
                if lines:
                    self.send(*lines)
                await asyncio.sleep(interval)
        finally:
            self.send("STOPPING=1")
