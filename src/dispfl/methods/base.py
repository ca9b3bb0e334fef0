"""What a method is: settings that are frozen, and functions from a peer's state to its next state.

Every method says what a peer starts from (`start`). A gossip method says what a peer lets others hear (`publish`), whom
it wants to hear (`choose`), and what it makes of what it heard (`step`). A server method says what the server sends
(`broadcast`), what a peer of the cohort makes of it (`step`), and what the server makes of what comes back
(`aggregate`).
Methods keep no state of their own, so the same object serves every peer, round and worker.
"""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from dispfl.core.layout import Layout
from dispfl.core.packed import PackedMask, PackedModel
from dispfl.core.rng import stream_seed
from dispfl.core.train import Trainer
from dispfl.errors import ConfigError
from dispfl.settings import Settings


@dataclass(frozen=True)
class PeerState:
    """A peer between two rounds, packed."""

    model: PackedModel
    """Its weights and the mask that they were trained under (`mask`, m_{k,t} in the paper)."""
    next_mask: PackedMask
    """The mask found after training, applied at the next mix (`next_mask`, m_{k,t+1})."""
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    """The module's buffers, such as running means; they never leave the peer (deviation 10)."""
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    """Whatever else a method remembers of the peer."""
    sent: PackedModel | None = None
    """What a server method's peer sends back, until the server has it."""


class Method(Settings):
    """What gossip and server methods have in common."""

    table: ClassVar[str] = "method"
    name: str
    shares: ClassVar[bool] = False
    """Whether peers are judged on a model that they share (`shared`, `judged`) instead of each on its own."""

    @property
    def tuning(self) -> "Tuning | None":
        """How a shared model is fine-tuned on a peer's data before it is judged, if it is."""
        return None

    def densities(self, peers: int) -> list[float]:
        """How dense each peer's model is."""
        return [1.0] * peers

    def always_dense(self, layout: Layout, densities: Collection[float]) -> list[bool]:
        """Which layers everyone keeps whole in every round, so that no mask of them is sent: all, or none."""
        return [all(density == 1 for density in densities)] * len(layout.sizes)

    def start(self, weights: Tensor, layout: Layout, density: float, *, seed: int, peer: str) -> PeerState:
        """A peer's state before round 0, from the weights that all peers start from; dense unless told otherwise."""
        return fresh_state(weights, torch.ones(layout.size, dtype=torch.bool))

    def shared(self, states: Mapping[str, PeerState]) -> PackedModel:
        """The model that all peers share, where the method has one."""
        raise NotImplementedError

    def judged(self, state: PeerState, shared: PackedModel) -> PackedModel:
        """What a peer is judged on, given the shared model: the shared model, unless told otherwise."""
        return shared


@dataclass(frozen=True)
class Around:
    """Who is around a peer in a round."""

    roster: Sequence[str]
    """Everyone in the federation."""
    neighbours: Sequence[str]
    """Whom the topology lets the peer hear."""
    reachable: Sequence[str]
    """Whom it could hear instead."""


class GossipMethod(Method):
    """A method in which peers hear each other directly."""

    hears: ClassVar[bool] = True
    """Whether peers exchange anything at all."""
    restricts: ClassVar[bool] = False
    """Whether a peer uses only what lies under its own next mask, so that neighbours need not send the rest."""

    def publish(self, state: PeerState) -> PackedModel:
        """What neighbours may hear."""
        return state.model

    def choose(self, state: PeerState, around: "Around", *, rng: torch.Generator) -> Sequence[str]:
        """Whom a peer hears: the topology's neighbours, unless the method prefers others that are reachable."""
        return around.neighbours

    @abstractmethod
    def step(self, peer: Trainer, state: PeerState, heard: Mapping[str, PackedModel]) -> PeerState:
        """One peer's round: from its state and what it heard, by sender, to its next state."""


SERVER = "server"
"""The server's name in states, ledgers and checkpoints."""


class ServerMethod(Method):
    """A method in which a server keeps a global model and works with a random cohort of peers each round."""

    shares: ClassVar[bool] = True
    cohort: int = Field(default=10, ge=1)
    """How many peers the server works with in a round; as many as a decentralized peer has neighbours."""

    def pick(self, seed: int, t: int, online: Sequence[str]) -> list[str]:
        """The cohort of round t."""
        return sorted(sorted(online, key=lambda peer: stream_seed(seed, "cohort", peer, t))[: self.cohort])

    def shared(self, states: Mapping[str, PeerState]) -> PackedModel:
        """The global model."""
        return states[SERVER].model

    def broadcast(self, server: PeerState, state: PeerState) -> PackedModel:
        """What the server sends a peer."""
        return server.model

    @abstractmethod
    def step(self, peer: Trainer, state: PeerState, received: PackedModel) -> PeerState:
        """One peer's round: from its state and the server's model to its next state, with what it sends back."""

    @abstractmethod
    def aggregate(self, server: PeerState, sent: Mapping[str, PackedModel], samples: Mapping[str, int]) -> PeerState:
        """The server's next state, from what the cohort sent and how many samples each has."""


@dataclass(frozen=True)
class Tuning:
    """Fine-tuning before a model is judged: how long, at which learning rate, and in which rounds beside the last."""

    epochs: int
    rate: Literal["initial", "current"]
    every: int


def fresh_state(weights: Tensor, mask: Tensor) -> PeerState:
    """A state whose mask is also its next mask."""
    model = PackedModel.pack(weights, mask)
    return PeerState(model, model.mask)


def empty_state(layout: Layout) -> PeerState:
    """The state of a peer that keeps no model between rounds."""
    return fresh_state(torch.zeros(layout.size), torch.zeros(layout.size, dtype=torch.bool))


def _check_density(value: Any) -> Any:
    several = isinstance(value, (list, tuple))
    for density in value if several else [value]:
        if isinstance(density, bool) or not isinstance(density, (int, float)):
            raise ValueError(f"must be a number in (0, 1], or a list of them, got {value!r}.")
        if not 0 < density <= 1:
            hint = f" To keep {density:g}% of the weights write {density / 100:g}." if 1 < density <= 100 else ""
            raise ValueError(f"must be in (0, 1], got {density:g}.{hint}")
    if several and not value:
        raise ValueError("must be a number or a list of numbers in (0, 1], got an empty list.")
    return tuple(value) if several else value


Density = Annotated[float | tuple[float, ...], BeforeValidator(_check_density)]
"""One density for all peers, or a list: as many groups of peers of equal size, in roster order."""


def spread_densities(density: float | tuple[float, ...], peers: int) -> list[float]:
    """A density for each peer: a list of g densities makes g groups, in roster order, sizes equal up to one."""
    groups = density if isinstance(density, tuple) else (density,)
    if len(groups) > peers:
        raise ConfigError(f"method.density lists {len(groups)} groups for {peers} peers; give at most one a peer.")
    return [groups[k * len(groups) // peers] for k in range(peers)]
