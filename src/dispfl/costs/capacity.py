"""Densities that fit devices: the largest with which a peer's round stays within a common time.

The paper gives each client a capacity c_k; here it is computed from the peer's device
(`method.density = "fit"`). The time of a round is that of its training and of its transfers:

- training takes the operations that the kernels do: with masks of channels those of the small
  network, with masks of single weights those of the dense one, which no density changes;
- a peer sends a model of its density to as many neighbours as it has, and receives as many, both at
  the same time. Latencies, shared links and offline hours are left out.

Where a device has a `memory`, a step must fit into it too: weights and gradients of the network
that is computed, what the backward pass keeps of a batch, and the received models.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any

import torch
from torch import Tensor

from dispfl.clock.fleet import MEGABIT, Fleet
from dispfl.core.device_classes import FIT, Device, Fit, FittedDensities, FittedPeer
from dispfl.core.flat_module import FlatModule
from dispfl.core.inputs import Inputs, take_rows
from dispfl.core.layout import Layout
from dispfl.core.packed import Mask
from dispfl.core.rng import forked_generators
from dispfl.core.train import Train
from dispfl.costs.flops import ForwardCost, forward_cost
from dispfl.costs.steps import training_operations
from dispfl.errors import ConfigError
from dispfl.methods.base import PeerState
from dispfl.round.context import RunContext
from dispfl.round.exchange import deliver, published_model, request_size, requested_mask

DEFAULT_DENSITY = 0.5
"""Without `fit.round_time`, the density with which the median device's round takes that time."""
MEGABYTE = 1e6


def with_fitted_densities(
    context: RunContext, samples: Mapping[str, int] | None = None
) -> RunContext:
    """Return a run with the densities that fit its devices, if its method asks for them.

    `samples` are the training samples of each peer, where the context has no data.
    """
    if getattr(context.method, "density", None) != FIT:
        return context
    return replace(context, fitted=fit_densities(context, samples))


def fit_densities(context: RunContext, samples: Mapping[str, int] | None = None) -> FittedDensities:
    """Return the density that fits each peer's device."""
    if samples is None:
        samples = {name: len(data.train) for name, data in context.data.peers.items()}
    peers = context.data.participants
    fleet = context.simulation.fleet_of(peers)
    if fleet is None:
        raise ConfigError(
            "method.density is fit, which needs the devices of the peers: fleet=phones, or classes"
            " with a speed. Or give a number in (0, 1].",
            key="method.density",
        )
    costs = _CostsByDensity(context)
    workloads = {}
    for peer in peers:
        workloads[peer] = _Workload(
            fleet.devices[peer], context.train_of(peer), samples[peer], costs
        )

    fit = context.simulation.fit
    round_time = fit.round_time
    if round_time is None:
        round_time = median(work.seconds(DEFAULT_DENSITY) for work in workloads.values())
    fitted: dict[_Workload, FittedPeer] = {}
    by_peer = {}
    for peer, work in workloads.items():
        if work not in fitted:
            _check_memory(work, fit, fleet, peer)
            density = largest_density(work, fit, round_time)
            fitted[work] = FittedPeer(density, work.seconds(density))
        by_peer[peer] = fitted[work]
    return FittedDensities(round_time, by_peer)


def largest_density(work: "_Workload", fit: Fit, round_time: float) -> float:
    """Return the largest density that fits; the smallest one if even that takes too long."""
    densities = fit.densities
    first = 0
    last = len(densities) - 1
    while first < last:
        middle = (first + last + 1) // 2
        density = densities[middle]
        if work.seconds(density) <= round_time and work.fits_memory(density):
            first = middle
        else:
            last = middle - 1
    return densities[first]


def _check_memory(work: "_Workload", fit: Fit, fleet: Fleet, peer: str) -> None:
    if work.fits_memory(fit.floor):
        return
    needed = work.memory(fit.floor) / MEGABYTE
    fix = "Lower fit.floor or train.batch_size"
    if not work.masks_channels:
        fix += ", use method.structure=channels"
    raise ConfigError(
        f"The memory of a device of class {fleet.class_of[peer]}, {work.device.memory:g} MB, fits"
        f" no density: with {fit.floor:g} (fit.floor) a step needs {needed:.3g} MB. {fix}, or"
        " leave the device out.",
        key="fit.floor",
    )


@dataclass(frozen=True)
class _Workload:
    """What a round demands of a device, by density."""

    device: Device
    train: Train
    samples: int
    _costs: "_CostsByDensity" = field(compare=False)

    def seconds(self, density: float) -> float:
        """Return how long training and transfers of a round take."""
        assert self.device.speed is not None
        operations = self._costs.operations(density, self.train, self.samples)
        transferred = self._costs.transferred_bytes(density)
        seconds = operations / self.device.speed
        rates = [rate for rate in (self.device.up, self.device.down) if rate is not None]
        if rates:
            seconds += transferred / (min(rates) * MEGABIT)
        return seconds

    @property
    def masks_channels(self) -> bool:
        """Whether a smaller density makes the network smaller that is computed."""
        return self._costs.masks_channels

    def memory(self, density: float) -> int:
        """Return the bytes of a training step."""
        return self._costs.memory(density, min(self.train.batch_size, self.samples))

    def fits_memory(self, density: float) -> bool:
        """Whether a training step fits into the device's memory."""
        if self.device.memory is None:
            return True
        return self.memory(density) <= self.device.memory * MEGABYTE


class _CostsByDensity:
    """What a peer of a density computes, sends and keeps in memory; the same for all peers."""

    def __init__(self, context: RunContext) -> None:
        self.masks_channels = context.method.masks_channels
        self._context = context
        self._peer = context.data.participants[0]
        self._states: dict[float, PeerState] = {}
        self._activations: dict[float, int] = {}
        topology = context.settings.topology
        self._neighbours = topology.connections(len(context.roster))

    def operations(self, density: float, train: Train, samples: int) -> int:
        """Return the operations of the kernels in a peer's training."""
        return training_operations(self._context, self._forward, density, train, samples)

    def transferred_bytes(self, density: float) -> int:
        """Return the bytes of the models that a peer receives in a round, and of its requests.

        As many are sent. A model is at most the whole one of the peer's own density.
        """
        context = self._context
        state = self._state(density)
        codec = context.codec_of({density})
        model = published_model(context, state)
        mask = requested_mask(context, state)
        delivered = deliver(context, codec, model, mask, self._peer, self._peer, 0)
        return self._neighbours * (delivered.wire + request_size(codec, mask))

    def memory(self, density: float, batch_size: int) -> int:
        """Return the bytes of a training step on a batch."""
        mask = self._state(density).next_mask
        computed = mask.small.size if mask.small is not None else self._context.layout.size
        weights_and_gradients = 2 * 4 * computed
        activations = self._activation_bytes(density, mask) * batch_size
        return weights_and_gradients + activations + self.transferred_bytes(density)

    def _state(self, density: float) -> PeerState:
        """Return a first state of this density."""
        if density not in self._states:
            context = self._context
            self._states[density] = context.method.start(
                context.first_weights,
                context.layout,
                density,
                seed=context.settings.seed,
                peer=self._peer,
            )
        return self._states[density]

    def _activation_bytes(self, density: float, mask: Mask) -> int:
        """Return the bytes that the backward pass keeps of one sample."""
        if mask.small is None:
            density = 1.0  # the dense network, whatever the density
        if density not in self._activations:
            network = self._network.for_mask(mask)
            with forked_generators(self._context.settings.device):
                of_two_samples = saved_for_backward(network, self._context.example())
            self._activations[density] = of_two_samples // 2
        return self._activations[density]

    @cached_property
    def _network(self) -> FlatModule:
        return self._context.network()

    @cached_property
    def _forward(self) -> ForwardCost:
        module = self._context.module()
        sample = take_rows(self._context.example(), slice(1))
        return forward_cost(module, Layout.of(module), sample)


def saved_for_backward(network: FlatModule, inputs: Inputs) -> int:
    """Return the bytes that autograd keeps of a forward pass, besides the weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in network.module.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def restore(tensor: Any) -> Any:
        return tensor

    network.module.train()
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, restore):
        outputs = network(inputs)
    del outputs  # kept until here, so that no address is used twice
    return sum(kept.values())
