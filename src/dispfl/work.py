"""What rounds are made of: the setting that they share, the parts in them, what comes of a part, and who does it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from torch import nn

from dispfl.core.layout import Layout
from dispfl.core.live import Precision
from dispfl.core.packed import PackedModel
from dispfl.core.rng import global_stream
from dispfl.core.train import Report, Samples, Task, Train
from dispfl.costs.ledger import Carried
from dispfl.methods.base import GossipMethod, Method, PeerState, Tuning
from dispfl.topology import Topology
from dispfl.wire.codec import Codec, Wire


@dataclass(frozen=True)
class PeerData:
    """What a peer owns: data to learn from and data to be judged on."""

    train: Samples
    test: Samples


@dataclass(frozen=True)
class Setting:
    """Everything that stays as it is through a run."""

    model: Callable[[], nn.Module]
    peers: Mapping[str, PeerData]
    """Their data, by name."""
    method: Method
    topology: Topology
    train: Train
    task: Task
    seed: int
    rounds: int
    eval_every: int = 1
    device: str = "cpu"
    precision: Precision = "float32"
    wire: Wire = field(default_factory=Wire)
    together: int = 1
    """How many peers with as many samples learn in one stack of their models."""
    elsewhere: Sequence[str] = ()
    """Peers of the federation whose data are not here, but on machines of their own."""

    @cached_property
    def roster(self) -> list[str]:
        """All peers' names, in the order of sums."""
        return sorted({*self.peers, *self.elsewhere})

    @property
    def pulls(self) -> bool:
        """Whether peers ask for models with their own masks."""
        return self.wire.exchange == "pull" and isinstance(self.method, GossipMethod) and self.method.restricts

    def codec(self, layout: Layout) -> Codec:
        """How models travel."""
        densities = set(self.method.densities(len(self.roster)))
        return Codec(layout, self.method.always_dense(layout, densities), self.wire)

    def module(self) -> nn.Module:
        """The module with the weights that all peers start from."""
        with global_stream(self.seed, "model"):
            return self.model()

    def scores(self, t: int) -> bool:
        """Whether round t ends with everyone's model being scored; the last always does."""
        tuning = self.method.tuning
        due = (t + 1) % self.eval_every == 0 and (tuning is None or (t + 1) % tuning.every == 0)
        return due or t + 1 == self.rounds


@dataclass(frozen=True)
class Part:
    """One peer's part in a round, by name; whoever keeps the states makes `Work` of it."""

    peer: str
    t: int
    heard: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Who may hear whom, in a gossip round: everyone that is online."""
    server: PeerState | None = None
    """Who calls it, in a server round."""
    shared: PackedModel | None = None
    """After the round: the model of all that it is judged on, instead of its own."""
    idle: bool = False
    """The peer does nothing this round, except that its model may be judged."""
    scoring: bool = True
    """Whether its model is judged at the end."""
    tuning: Tuning | None = None
    """How its model is fine-tuned before it is judged."""


@dataclass(frozen=True)
class Work:
    """A part with all that it takes, ready to be done anywhere."""

    peer: str
    t: int
    state: PeerState
    heard: Mapping[str, PackedModel]
    """What its senders publish, by sender; from the server, in a server round."""
    idle: bool = False
    scoring: bool = True
    tuning: Tuning | None = None


@dataclass(frozen=True)
class Step:
    """What came of it."""

    state: PeerState
    report: Report
    carried: Sequence[Carried] = ()
    """The messages that were sent for it."""


@dataclass(frozen=True)
class Outcome:
    """What is told of a step; the peer's new state stays with whoever keeps it."""

    report: Report
    carried: Sequence[Carried] = ()
    sent: PackedModel | None = None
    """What arrived at the server, in a server round."""

    @classmethod
    def of(cls, step: Step) -> "Outcome":
        """What is told of this step."""
        return cls(step.report, step.carried, step.state.sent)


class Engine(Protocol):
    """Keeps the peers' states and does their parts, in any order, anywhere."""

    @property
    def states(self) -> Mapping[str, PeerState]:
        """Everyone's state, as of the last turn."""
        ...

    @property
    def judged(self) -> Mapping[str, PeerState]:
        """What each peer was judged on last, where that was a model that all share."""
        ...

    def recall(self, rounds: int) -> None:
        """Take up everyone's state after so many rounds: from the seed, or from its checkpoint."""
        ...

    def under_way(self, t: int) -> dict[str, Outcome]:
        """Take up the steps of round t that were finished before a stop."""
        ...

    def steps(self, parts: Iterable[Part]) -> Iterator[tuple[str, Outcome]]:
        """Each part's outcome, as it is done, with the peer's name."""
        ...

    def turn(self) -> None:
        """The round is over: what the peers have become counts from now on."""
        ...

    def flush(self, t: int) -> None:
        """Write down the finished steps of round t that are not on the disk yet."""
        ...

    def close(self) -> None:
        """Give back threads, processes and memory."""
        ...
