"""What a method is: settings that are frozen, and functions from a peer's state to its next state.

A gossip method says what a peer starts from (`start`), what it lets others hear (`publish`), and what it makes of
what it heard (`step`). It keeps no state of its own, so the same object serves every peer, round and worker.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from pydantic import BeforeValidator
from torch import Tensor

from dispfl.core.layout import Layout
from dispfl.core.packed import PackedMask, PackedModel
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


class GossipMethod(Settings):
    """A method in which peers hear each other directly."""

    table: ClassVar[str] = "method"
    name: str
    hears: ClassVar[bool] = True
    """Whether peers exchange anything at all."""

    @property
    def searches(self) -> bool:
        """Whether a step ends with the dense gradient of one batch, which costs FLOPs of its own."""
        return False

    def densities(self, peers: int) -> list[float]:
        """How dense each peer's model is."""
        return [1.0] * peers

    def start(self, weights: Tensor, layout: Layout, density: float, *, rng: torch.Generator) -> PeerState:
        """A peer's state before round 0, from the weights that all peers start from; dense unless told otherwise."""
        return fresh_state(weights, torch.ones(layout.size, dtype=torch.bool))

    def publish(self, state: PeerState) -> PackedModel:
        """What neighbours may hear."""
        return state.model

    @abstractmethod
    def step(self, peer: Trainer, state: PeerState, heard: Mapping[str, PackedModel]) -> PeerState:
        """One peer's round: from its state and what it heard, by sender, to its next state."""


def fresh_state(weights: Tensor, mask: Tensor) -> PeerState:
    """A state whose mask is also its next mask."""
    model = PackedModel.pack(weights, mask)
    return PeerState(model, model.mask)


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
