"""What a round will cost, before anything is trained and without any data: model, masks and topology decide it.

Two currencies. The paper's: 4 bytes a kept value and nothing for masks, MB are 1e6 bytes, the node with the largest
download; operations as `flops.py` counts them. And the wire's: messages as the codec sends them, with masks, headers
and requests. Both are of round 0; only a method that prunes as it trains (SubFedAvg) costs less later.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from statistics import fmean

import torch

from dispfl.core.erk import erk_densities, uniform_densities
from dispfl.core.layout import Layout
from dispfl.core.live import LiveModel
from dispfl.core.masks import kept_count, kept_per_layer
from dispfl.core.packed import PackedMask, PackedModel
from dispfl.core.rng import global_stream, stream
from dispfl.core.train import Train
from dispfl.costs.flops import ForwardCost, forward_cost
from dispfl.costs.ledger import Carried, Ledger
from dispfl.costs.traffic import BYTES_PER_VALUE
from dispfl.data.catalogue import DataSpec
from dispfl.methods.base import SERVER, Around, GossipMethod, Method, PeerState, ServerMethod, empty_state, fresh_state
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.ditto import Ditto
from dispfl.methods.dpsgd import DPSGD
from dispfl.methods.fedfomo import FedFOMO
from dispfl.models.registry import Model
from dispfl.roster import roster_names
from dispfl.topology import Topology
from dispfl.wire.codec import Codec, Wire

MB = 1e6
DRAW_EVERYONE = 20_000_000
"""Draw the masks of all peers up to so many weights in all; of two peers a density beyond."""


@dataclass(frozen=True)
class Plan:
    """What the costs of a round follow from."""

    model: Model
    data: DataSpec
    method: Method
    topology: Topology
    peers: int
    samples: int
    """Training samples a peer."""
    train: Train
    wire: Wire
    seed: int = 0

    @cached_property
    def roster(self) -> list[str]:
        """The peers' names."""
        return roster_names(self.peers)

    @cached_property
    def densities(self) -> dict[str, float]:
        """How dense each peer's model is."""
        return dict(zip(self.roster, self.method.densities(self.peers), strict=True))


@dataclass(frozen=True)
class LayerCost:
    """One parameter of the model; kept weights and operations are means over peers."""

    name: str
    shape: tuple[int, ...]
    size: int
    kept: float
    flops: float
    """Of one sample's forward pass."""


@dataclass(frozen=True)
class GroupCost:
    """The peers of one density."""

    density: float
    peers: int
    kept: int
    flops: int
    """Of one peer's local phase."""


@dataclass(frozen=True)
class Costs:
    """A round in the paper's currency."""

    parameters: int
    layers: tuple[LayerCost, ...]
    groups: tuple[GroupCost, ...]
    busiest_mb: float
    """The largest download of any node; of the server, where there is one, from its cohort."""
    mean_mb: float
    """A peer's download, mean over peers."""
    flops_per_peer: float
    """The local phase of a peer that trains, mean over peers."""

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
    """How many peers' masks were drawn to find out."""


def estimate(plan: Plan, *, as_printed: bool = False) -> Costs:
    """A round's costs in the paper's currency.

    `as_printed` charges two methods as the paper's tables do, not by the work that they do here: FedFOMO also trains on
    what it holds back, and D-PSGD under a fixed mask pays for a mask search too.
    """
    layout, forward = network(plan.model, plan.data.shape, plan.data.classes)
    kept = {density: kept_weights(plan.method, layout, density) for density in set(plan.densities.values())}
    flops = {density: _local_phase(plan, forward, counts, as_printed) for density, counts in kept.items()}
    everyone = list(plan.densities.values())
    layers = []
    for i, (name, shape, size) in enumerate(zip(layout.names, layout.shapes, layout.sizes, strict=True)):
        mean = fmean(kept[density][i] for density in everyone)
        layers.append(LayerCost(name, shape, size, mean, mean * forward.per_weight[i]))
    size_of = {peer: BYTES_PER_VALUE * sum(kept[density]) for peer, density in plan.densities.items()}
    ledger = Ledger.of(
        Carried(sender, receiver, size_of[receiver if sender == SERVER else sender], 0)
        for sender, receiver in links(plan)
    )
    return Costs(
        parameters=layout.size,
        layers=tuple(layers),
        groups=tuple(GroupCost(d, everyone.count(d), sum(kept[d]), flops[d]) for d in sorted(kept)),
        busiest_mb=ledger.busiest().paper / MB,
        mean_mb=_mean_download(ledger.paper, plan.roster) / MB,
        flops_per_peer=fmean(flops[density] for density in everyone),
    )


@cache
def network(model: Model, shape: tuple[int, int, int], classes: int) -> tuple[Layout, ForwardCost]:
    """A model's parameters and what each costs, for pictures of this shape; nothing is computed, not even weights."""
    with torch.device("meta"):
        module = model.build(shape[0], classes, shape[1])
        sample = torch.empty(1, *shape)
    layout = Layout.of(module)
    return layout, forward_cost(module, layout, sample)


@cache
def kept_weights(method: Method, layout: Layout, density: float) -> tuple[int, ...]:
    """How many weights of each parameter a peer of this density trains and sends in round 0.

    Those of its first mask. A random mask's counts are known before it is drawn, which for large models takes long.
    """
    start = type(method).start
    if isinstance(method, DisPFL) and start is DisPFL.start:
        spread = (erk_densities if method.layers == "erk" else uniform_densities)(layout.by_name, density)
    elif start is DPSGD.start:
        spread = uniform_densities(layout.by_name, density)
    elif start is Method.start or isinstance(method, ServerMethod):  # a server's first model is dense
        return layout.sizes
    else:
        state = method.start(torch.zeros(layout.size), layout, density, seed=0, peer=roster_names(1)[0])
        return tuple(kept_per_layer(state.next_mask.unpack(), layout))
    return tuple(kept_count(size, spread[name]) for name, size in zip(layout.names, layout.sizes, strict=True))


def _local_phase(plan: Plan, forward: ForwardCost, kept: Sequence[int], as_printed: bool) -> int:
    """A peer's training in one round, and one dense batch where it searches a mask."""
    method, epochs, samples, search = plan.method, plan.train.epochs, plan.samples, 0
    match method:
        case Ditto():
            epochs = method.global_epochs + method.personal_epochs
        case FedFOMO() if samples > 1 and not as_printed:
            samples -= max(1, int(method.validation * samples))
        case DisPFL(regrow="gradient"):
            search = plan.train.batch
        case DPSGD() if method.density < 1 and as_printed:
            search = plan.train.batch
    return forward.local_phase(kept, samples, epochs, min(search, samples))


def links(plan: Plan) -> Iterator[tuple[str, str]]:
    """Who sends a model to whom in round 0, as (sender, receiver)."""
    method, topology, roster, seed = plan.method, plan.topology, plan.roster, plan.seed
    if isinstance(method, ServerMethod):
        cohort = method.pick(seed, 0, sorted(topology.online(seed, 0, roster)))
        yield from ((SERVER, peer) for peer in cohort)
        yield from ((peer, SERVER) for peer in cohort)
    elif isinstance(method, GossipMethod) and method.hears:
        heard, nothing_yet = topology.heard(seed, 0, roster), empty_state(Layout((), ()))
        for peer in heard:
            around = Around(roster, heard[peer], topology.reachable(heard, peer))
            chosen = method.choose(nothing_yet, around, rng=stream(seed, "choose", peer, 0))
            yield from ((sender, peer) for sender in chosen)


def _mean_download(sent: Mapping[tuple[str, str], int], roster: Sequence[str]) -> float:
    return sum(count for (_, receiver), count in sent.items() if receiver != SERVER) / len(roster)


def wire_costs(plan: Plan) -> WireCosts:
    """A round's messages as the codec sends them, under masks that the method itself draws."""
    layout, _ = network(plan.model, plan.data.shape, plan.data.classes)
    codec = Codec(layout, plan.method.always_dense(layout, set(plan.densities.values())), plan.wire)
    drawn = _drawn_peers(plan, layout)
    states = _first_states(plan, layout, {peer for pair in drawn.values() for peer in pair})
    sizes: dict[tuple[str, str], tuple[int, int]] = {}
    messages = []
    for sender, receiver in links(plan):
        pair = drawn[sender][0], drawn[receiver][1]
        if pair not in sizes:
            sizes[pair] = _message_sizes(plan, codec, states, *pair)
        request, model = sizes[pair]
        messages += [Carried(receiver, sender, 0, request), Carried(sender, receiver, 0, model)]
    ledger = Ledger.of(messages)
    busiest, mean = ledger.busiest(), _mean_download(ledger.wire, plan.roster)
    return WireCosts(busiest.up / MB, busiest.down / MB, mean / MB, len(states) - 1)


def _drawn_peers(plan: Plan, layout: Layout) -> dict[str, tuple[str, str]]:
    """Whose masks stand for each node's when it sends and when it receives: its own, where all masks are drawn.

    Of a large model two masks a density are drawn, one for all senders and one for all receivers. They are as
    independent as any two, and so large that the overlap of any other two differs by about one in a thousand.
    """
    drawn = {SERVER: (SERVER, SERVER)}
    if plan.peers * layout.size <= DRAW_EVERYONE:
        return drawn | {peer: (peer, peer) for peer in plan.roster}
    by_density: dict[float, list[str]] = {}
    for peer, density in plan.densities.items():
        by_density.setdefault(density, []).append(peer)
    return drawn | {peer: (by_density[d][0], by_density[d][:2][-1]) for peer, d in plan.densities.items()}


def _first_states(plan: Plan, layout: Layout, nodes: set[str]) -> dict[str, PeerState]:
    """Some nodes' states before round 0."""
    channels, size, _ = plan.data.shape
    with global_stream(plan.seed, "model"):
        weights = LiveModel(plan.model.build(channels, plan.data.classes, size)).read()
    states = {SERVER: fresh_state(weights, torch.ones(layout.size, dtype=torch.bool))}
    for peer in sorted(nodes - {SERVER}):
        states[peer] = plan.method.start(weights, layout, plan.densities[peer], seed=plan.seed, peer=peer)
    return states


def _message_sizes(
    plan: Plan, codec: Codec, states: Mapping[str, PeerState], sender: str, receiver: str
) -> tuple[int, int]:
    """Bytes of the request for a model (none where models are pushed) and of the model."""
    method, plain = plan.method, plan.wire.coding == "plain"
    rng = stream(plan.seed, "rounding", sender, receiver, 0)
    model: PackedModel
    asked: PackedMask | None = None
    if isinstance(method, ServerMethod):
        model = method.broadcast(states[SERVER], states[receiver if sender == SERVER else sender])
    else:
        assert isinstance(method, GossipMethod)
        model = method.publish(states[sender])
        if method.restricts and plan.wire.exchange == "pull":
            asked = states[receiver].next_mask
    if asked is None:
        return 0, codec.model_size(model) if plain else len(codec.encode_model(model, rng=rng))
    if plain:
        return codec.request_size(), codec.answer_size(model, asked)
    return len(codec.encode_request(asked)), len(codec.encode_answer(model, asked, rng=rng))
