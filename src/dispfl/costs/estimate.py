"""What a round will cost, before training; without data, unless they are the user's own.

Costs depend on model, masks and topology. They are counted in two ways. As in the paper: 4 bytes
per kept value and nothing for masks, MB are 1e6 bytes, the node with the largest download;
operations as `flops.py` counts them. On the wire: messages as the codec sends them, with masks,
headers and requests. Both are of round 0; only a method that prunes in training (SubFedAvg) costs
less later.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain
from statistics import fmean

import torch
from torch import Tensor, nn

from dispfl.clock.fleet import Network
from dispfl.core.device_classes import DeviceClass, Fit
from dispfl.core.layout import Layout
from dispfl.core.tensors import total_bytes
from dispfl.core.train import Train
from dispfl.costs.capacity import with_fitted_densities
from dispfl.costs.flops import ForwardCost, forward_cost
from dispfl.data.catalogue import DataSpec, describe
from dispfl.errors import user_errors
from dispfl.experiment import Experiment, Simulation
from dispfl.methods.base import SERVER, Method, PeerState, ServerMethod, empty_state
from dispfl.methods.dpsgd import DPSGD
from dispfl.models.settings import Model
from dispfl.round.context import PeerTask, RunContext, RunData
from dispfl.round.exchange import (
    deliver,
    exchange_costs,
    exchange_graph,
    gossip_senders,
    request_size,
    requested_mask,
    sent_model,
    server_cohort,
)
from dispfl.round.ledger import BYTES_PER_VALUE, Ledger, MessageCost
from dispfl.round.round import initial_states
from dispfl.topology import Topology
from dispfl.wire.codec import Codec, Wire

MB = 1e6
MAX_DRAWN_WEIGHTS = 20_000_000
"""Up to this many weights in all, the masks of all peers are drawn; else two per density."""


@dataclass(frozen=True)
class OwnData:
    """What costs depend on of a user's own data."""

    name: str
    shape: tuple[int, ...]
    classes: int
    """Classes, or other outputs."""


@dataclass(frozen=True)
class CostInputs:
    """Everything that the costs of a round depend on."""

    model: Model
    data: DataSpec | OwnData
    method: Method
    topology: Topology
    peers: int
    samples: int
    """Training samples per peer."""
    train: Train
    wire: Wire
    seed: int = 0
    names: tuple[str, ...] = ()
    classes: Mapping[str, DeviceClass] = field(default_factory=dict)
    fleet: str | None = None
    network: Network = field(default_factory=Network)
    fit: Fit = field(default_factory=Fit)
    run: RunContext | None = None
    """The context of the run itself, where its data had to be read."""

    @classmethod
    def of(cls, experiment: Experiment) -> "CostInputs":
        """Return what the costs of an experiment's rounds depend on."""
        data = describe(experiment.data.name)
        return cls._of(experiment, data, experiment.training_samples)

    @classmethod
    def of_run(cls, experiment: Experiment, run: RunContext, data: OwnData) -> "CostInputs":
        """Return the same for a user's own data, which the run has read and divided."""
        samples = round(fmean(len(peer.train) for peer in run.data.peers.values()))
        return replace(cls._of(experiment, data, samples), run=run)

    @classmethod
    def _of(cls, experiment: Experiment, data: DataSpec | OwnData, samples: int) -> "CostInputs":
        return cls(
            model=experiment.model,
            data=data,
            method=experiment.method,
            topology=experiment.topology,
            peers=experiment.peers,
            samples=samples,
            train=experiment.train,
            wire=experiment.wire,
            seed=experiment.seed,
            names=experiment.names,
            classes=experiment.classes,
            fleet=experiment.fleet,
            network=experiment.network,
            fit=experiment.fit,
        )

    @cached_property
    def context(self) -> RunContext:
        """The context of such a run, without any data unless they had to be read."""
        if self.run is not None:
            return self.run
        assert isinstance(self.data, DataSpec)
        classes = self.data.classes
        channels, size, _ = self.data.shape
        settings = Simulation(
            peers=self.peers,
            method=self.method,
            topology=self.topology,
            train=self.train,
            wire=self.wire,
            seed=self.seed,
            names=self.names,
            classes=dict(self.classes),
            fleet=self.fleet,
            network=self.network,
            fit=self.fit,
        )
        context = RunContext(
            settings=settings,
            data=RunData(remote_peers=settings.roster),
            model=lambda: self.model.build(channels, classes, size),
            input_shape=self.data.shape,
        )
        return with_fitted_densities(context, dict.fromkeys(settings.roster, self.samples))

    @property
    def roster(self) -> list[str]:
        """The peers' names."""
        return self.context.roster

    @cached_property
    def densities(self) -> dict[str, float]:
        """Each peer's density."""
        return self.context.densities

    @cached_property
    def layout(self) -> Layout:
        """The parameters of the network, with their units where masks are of channels."""
        if self.method.masks_channels or self.run is not None:
            return self.context.layout
        return self._network[0]

    @cached_property
    def forward(self) -> ForwardCost:
        """What each parameter of the network costs in a forward pass of one sample."""
        return self._network[1]

    @cached_property
    def _network(self) -> tuple[Layout, ForwardCost]:
        if self.run is None:
            assert isinstance(self.data, DataSpec)
            return network(self.model, self.data.shape, self.data.classes)
        module = self.run.module()
        layout = Layout.of(module)
        first_peer = next(iter(self.run.data.peers.values()))
        sample, _ = next(first_peer.train.batches(1))
        return layout, forward_cost(module, layout, sample)


@dataclass(frozen=True)
class LayerCost:
    """One parameter of the model; kept weights and operations are means over peers."""

    name: str
    shape: tuple[int, ...]
    size: int
    kept: float
    flops: float
    """Operations of one sample's forward pass."""
    small_shape: tuple[int, ...] | None = None
    """Its shape in the small network; None unless all peers have channel masks of one density."""


@dataclass(frozen=True)
class GroupCost:
    """The peers of one class, or of one density."""

    density: float
    peers: int
    kept: int
    flops: int
    """Operations of one peer's local training."""
    name: str = ""
    """The class of the peers, if there are classes."""


@dataclass(frozen=True)
class RoundCosts:
    """The costs of a round as the paper counts them."""

    parameters: int
    layers: tuple[LayerCost, ...]
    groups: tuple[GroupCost, ...]
    busiest_mb: float
    """The largest download of any node; of the server, where there is one, from its cohort."""
    mean_mb: float
    """A peer's download, mean over peers."""
    flops_per_peer: float
    """The local training of a peer, mean over peers."""
    dense_layers: tuple[str, ...] = ()
    """With masks of channels: the layers that stay whole, because they have no units to omit."""
    fixed_flops: int = 0
    """Operations of one sample's forward pass that no parameter has, as in attention."""
    omission: str | None = None
    """A sentence about operations that are not counted, if there are any."""

    @property
    def kept(self) -> float:
        """Weights that a peer keeps, mean over peers."""
        return sum(layer.kept for layer in self.layers)


@dataclass(frozen=True)
class WireCosts:
    """A round's messages as sent."""

    busiest_up_mb: float
    busiest_down_mb: float
    mean_mb: float
    """A peer's download, mean over peers."""
    peers_drawn: int
    """The number of peers whose masks were drawn for it."""


def estimate(inputs: CostInputs, *, as_printed: bool = False) -> RoundCosts:
    """Return a round's costs as the paper counts them.

    `as_printed` charges two methods as the paper's tables do, not by the work that they do here:
    FedFOMO also trains on its validation data, and D-PSGD under a fixed mask pays for a mask search
    too.
    """
    forward = inputs.forward
    layout = inputs.layout
    tensor_bytes = total_bytes(inputs.context.tensors)
    kept_counts = {}
    message_bytes = {}
    for density in sorted(set(inputs.densities.values())):
        kept_counts[density] = inputs.method.kept_counts(layout, density)
        sent = sum(inputs.method.sent_counts(layout, density))
        message_bytes[density] = BYTES_PER_VALUE * sent + tensor_bytes

    members: dict[tuple[str, float], list[str]] = {}
    for peer, density in inputs.densities.items():
        name = inputs.context.class_of.get(peer, "")
        members.setdefault((name, density), []).append(peer)
    groups = []
    for (name, density), peers in sorted(members.items()):
        train = inputs.context.train_of(peers[0])
        counts = kept_counts[density]
        flops = _local_training(inputs, train, forward, counts, as_printed)
        groups.append(GroupCost(density, len(peers), sum(counts), flops, name))

    messages = []
    for sender, receiver in links(inputs.context):
        density = inputs.densities[_peer_of_link(sender, receiver)]
        messages.append(MessageCost(sender, receiver, message_bytes[density], 0))
    ledger = Ledger.of(messages)
    return RoundCosts(
        parameters=layout.size,
        layers=tuple(_layer_costs(inputs, forward, kept_counts)),
        groups=tuple(groups),
        busiest_mb=ledger.busiest().paper / MB,
        mean_mb=_mean_download(ledger.paper, inputs.roster) / MB,
        flops_per_peer=sum(group.peers * group.flops for group in groups) / inputs.peers,
        dense_layers=tuple(layout.dense_layers),
        fixed_flops=forward.fixed,
        omission=forward.omission,
    )


def _layer_costs(
    inputs: CostInputs, forward: ForwardCost, kept_counts: Mapping[float, Sequence[int]]
) -> Iterator[LayerCost]:
    """Yield the cost of each layer, mean over peers, from the kept weights of each density."""
    layout = inputs.layout
    small_shapes = _small_shapes(inputs)
    for i, (name, shape) in enumerate(layout.by_name.items()):
        mean_kept = fmean(kept_counts[density][i] for density in inputs.densities.values())
        flops = mean_kept * forward.per_weight[i]
        yield LayerCost(name, shape, layout.sizes[i], mean_kept, flops, small_shapes.get(name))


def _small_shapes(inputs: CostInputs) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of the small network's parameters; empty unless all peers share them."""
    if not inputs.method.masks_channels or len(set(inputs.densities.values())) > 1:
        return {}
    peer = inputs.roster[0]
    mask = initial_states(inputs.context, {peer})[peer].next_mask
    assert mask.small is not None
    return mask.small.by_name


@cache
def network(model: Model, shape: tuple[int, int, int], classes: int) -> tuple[Layout, ForwardCost]:
    """Return a model's parameters and what each costs, for images of this shape."""
    with torch.device("meta"):  # no weights are drawn
        module = model.build(shape[0], classes, shape[1])
    # On the CPU one image takes milliseconds; a norm on "meta" loads torch's compiler, for seconds.
    _move_to_cpu(module)
    layout = Layout.of(module)
    with user_errors(f"The network, on an image of shape {'x'.join(map(str, shape))}"):
        return layout, forward_cost(module, layout, torch.zeros(1, *shape))


def _move_to_cpu(module: nn.Module) -> None:
    """Give a module on "meta" memory for its parameters and buffers, filled with zeros.

    `to_empty` does the same, but imports sympy, which takes longer than all the rest.
    """
    tensors: dict[Tensor, Tensor] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter not in tensors:
                values = torch.zeros(parameter.shape, dtype=parameter.dtype)
                tensors[parameter] = nn.Parameter(values, parameter.requires_grad)
            setattr(part, name, tensors[parameter])
        for name, buffer in part.named_buffers(recurse=False):
            if buffer not in tensors:
                tensors[buffer] = torch.zeros(buffer.shape, dtype=buffer.dtype)
            setattr(part, name, tensors[buffer])


def _local_training(
    inputs: CostInputs, train: Train, forward: ForwardCost, kept: Sequence[int], as_printed: bool
) -> int:
    """Return the operations of a peer's training in one round.

    One dense batch is added where it searches a mask.
    """
    method = inputs.method
    samples = inputs.samples
    search = method.searched_samples(train)
    if not as_printed:
        samples -= method.held_back(samples)
    elif isinstance(method, DPSGD) and method.density < 1:
        search = train.batch_size
    operations = forward.training(forward.sizes, min(search, samples))
    for passes in method.training_passes(train, samples, inputs.layout, kept):
        operations += forward.training(passes.kept, passes.samples, passes.trained)
    return operations


def links(context: RunContext) -> Iterator[tuple[str, str]]:
    """Yield who sends a model to whom in round 0, as (sender, receiver)."""
    if isinstance(context.method, ServerMethod):
        cohort = server_cohort(context, context.method, 0)
        for peer in cohort:
            yield SERVER, peer
        for peer in cohort:
            yield peer, SERVER
        return
    graph = exchange_graph(context, 0)
    if context.choices(0):  # whom peers choose is only known later: as many as the topology gives
        graph = context.settings.topology.online_neighbours(
            context.settings.seed, 0, context.roster
        )
    no_state = empty_state(Layout((), ()))
    for peer in graph:
        for sender in gossip_senders(context, graph, peer, 0, no_state):
            yield sender, peer


def _peer_of_link(sender: str, receiver: str) -> str:
    """Return the peer whose mask a model is sent under: the sender, or whom the server sends to."""
    if sender == SERVER:
        return receiver
    return sender


def _mean_download(bytes_by_link: Mapping[tuple[str, str], int], roster: Sequence[str]) -> float:
    downloaded = 0
    for (_, receiver), count in bytes_by_link.items():
        if receiver != SERVER:
            downloaded += count
    return downloaded / len(roster)


def wire_costs(inputs: CostInputs) -> WireCosts:
    """Return a round's messages as the codec sends them, under masks that the method draws."""
    context = inputs.context
    codec = context.codec
    drawn = _drawn_peers(inputs)
    states = _drawn_states(inputs, set(chain.from_iterable(drawn.values())))
    sizes: dict[tuple[str, str], tuple[int, int]] = {}
    messages: list[MessageCost] = []
    for sender, receiver in links(context):
        pair = drawn[sender][0], drawn[receiver][1]
        if pair not in sizes:
            sizes[pair] = _message_sizes(context, codec, states, *pair)
        request, model = sizes[pair]
        messages += exchange_costs(receiver, sender, request, 0, model)
    ledger = Ledger.of(messages)
    busiest = ledger.busiest()
    mean = _mean_download(ledger.wire, inputs.roster)
    return WireCosts(busiest.up / MB, busiest.down / MB, mean / MB, len(states.keys() - {SERVER}))


def _drawn_peers(inputs: CostInputs) -> dict[str, tuple[str, str]]:
    """Return whose masks represent each node's when it sends and when it receives.

    Where all masks are drawn, these are its own. For a large model two masks per density are drawn,
    one for all senders and one for all receivers. They are as independent as any two, and so large
    that the overlap of any other two differs by about one in a thousand. A mask of units is small,
    and overlaps differ more: all are drawn, unless messages are encoded to know their length.
    """
    drawn = {SERVER: (SERVER, SERVER)}
    if inputs.peers * inputs.layout.size <= MAX_DRAWN_WEIGHTS or _needs_only_masks(inputs):
        for peer in inputs.roster:
            drawn[peer] = (peer, peer)
        return drawn

    by_density: dict[float, list[str]] = {}
    for peer, density in inputs.densities.items():
        by_density.setdefault(density, []).append(peer)
    for peers in by_density.values():
        first_two = peers[:2]
        for peer in peers:
            drawn[peer] = (first_two[0], first_two[-1])
    return drawn


def _needs_only_masks(inputs: CostInputs) -> bool:
    plain = inputs.wire.values == "float32" and inputs.wire.coding == "plain"
    return plain and inputs.method.masks_channels


def _drawn_states(inputs: CostInputs, peers: Set[str]) -> dict[str, PeerState]:
    """Return the first states of these peers, without weights where only masks matter."""
    context = inputs.context
    if not _needs_only_masks(inputs):
        return initial_states(context, peers)
    states = {}
    for peer in sorted(peers - {SERVER}):
        density = inputs.densities[peer]
        state = context.method.start(
            context.first_weights, context.layout, density, seed=context.settings.seed, peer=peer
        )
        without_values = replace(state.model, values=state.model.values[:0].clone())
        states[peer] = replace(state, model=without_values)
    return states


def _message_sizes(
    context: RunContext, codec: Codec, states: Mapping[str, PeerState], sender: str, receiver: str
) -> tuple[int, int]:
    """Return the bytes of the request for a model (0 where models are pushed) and of the model."""
    task = PeerTask(_peer_of_link(sender, receiver), 0, server=states.get(SERVER))
    mask = None
    if SERVER not in (sender, receiver):
        mask = requested_mask(context, states[receiver])
    model = sent_model(context, task, sender, states)
    delivered = deliver(context, codec, model, mask, sender, receiver, 0)
    return request_size(codec, mask), delivered.wire
