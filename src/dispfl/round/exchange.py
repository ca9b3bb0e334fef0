"""The exchange of models in a round: who sends, what is requested, sent and accepted.

Functions without I/O. The simulator, the Ray workers, the real peers and `dispfl costs` all call
them, so that they exchange the same messages and count the same bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import gt, le
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from dispfl.core.layout import Layout
from dispfl.core.packed import Mask, PackedModel
from dispfl.core.rng import stream
from dispfl.core.tensors import TensorSpec, total_bytes
from dispfl.errors import ConfigError, MessageError, RunError, user_errors
from dispfl.methods.base import SERVER, GossipMethod, Neighbourhood, PeerState, ServerMethod
from dispfl.robust.attacks import Target
from dispfl.robust.averages import Robust, requested_uploads
from dispfl.round.context import PeerTask, RunContext
from dispfl.round.ledger import BYTES_PER_VALUE, MessageCost
from dispfl.wire.codec import Codec
from dispfl.wire.refusals import Refusal, refuse

Graph = Mapping[str, Sequence[str]]
"""The neighbours of every peer that is online."""

MAX_NORM_RATIO = 10.0
"""A neighbour's weights may have at most this many times the norm of our own."""


class DeliveredModel(NamedTuple):
    """A model as it arrives at the receiver, and what sending it cost."""

    model: PackedModel
    paper: int
    """Bytes as the paper counts them."""
    wire: int
    """Bytes as sent."""
    message: bytes | None = None
    """The encoded message, where it had to be encoded."""
    buffers: Mapping[str, Tensor] = MappingProxyType({})
    """The sender's buffers, where a simulation averages them."""


# Who sends


def exchange_graph(
    context: RunContext, t: int, roster: Sequence[str] | None = None
) -> dict[str, list[str]]:
    """Return the neighbours of every online peer in round t (S_{k,t}).

    There are none if the method sends nothing.
    """
    if roster is None:
        roster = context.roster
    if not context.method.gossips:
        return {peer: [] for peer in roster}
    return context.topology(t).online_neighbours(context.settings.seed, t, roster)


def neighbour_counts(context: RunContext, t: int, graph: Graph) -> dict[str, int]:
    """Return how many neighbours each peer has in round t, with those that are offline."""
    if len(graph) < len(context.roster):
        graph = context.topology(t).checked_neighbours(context.settings.seed, t, context.roster)
    return {peer: len(neighbours) for peer, neighbours in graph.items()}


def exchange_row(
    context: RunContext, t: int, roster: Sequence[str], peer: str
) -> tuple[Graph, list[str]]:
    """Return what one peer needs of `exchange_graph`, and who receives from it.

    The graph has all online peers, but only the neighbours of this one.
    """
    if not context.method.gossips:
        return {peer: []}, []
    topology = context.topology(t)
    seed = context.settings.seed
    senders, receivers = topology.row(seed, t, roster, peer)
    online = topology.online(seed, t, roster)
    graph: dict[str, Sequence[str]] = {name: () for name in roster if name in online}
    if peer in online:
        graph[peer] = senders
    return graph, receivers


def mixing_weights(
    context: RunContext, t: int, graph: Graph, roster: Sequence[str] | None = None
) -> dict[str, dict[str, float]]:
    """Return how much each model counts in the average of each peer of a graph.

    They are the topology's weights, or 1 for the peer itself and each neighbour; where the method
    pushes, those of each sender add up to 1. A peer without an entry counts all models the same.
    """
    topology = context.topology(t)
    method = context.method
    pushes = isinstance(method, GossipMethod) and method.pushes
    if not method.gossips or not (topology.is_weighted or pushes):
        return {}
    if roster is None:
        roster = context.roster
    rows = {}
    for peer, neighbours in graph.items():
        with user_errors(f"topology {topology.name}, round {t}"):
            weights = topology.mixing_weights(context.settings.seed, t, roster, peer)
        if weights is None:
            weights = dict.fromkeys([*neighbours, peer], 1.0)
        rows[peer] = {name: weights[name] for name in (*neighbours, peer)}
    return _divided_by_senders(rows) if pushes else rows


def _divided_by_senders(rows: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return weights of which those of each sender add up to 1."""
    sums = dict.fromkeys(rows, 0.0)
    for row in rows.values():
        for sender, weight in row.items():
            sums[sender] += weight
    divided = {}
    for peer, row in rows.items():
        divided[peer] = {
            sender: weight / sums[sender] for sender, weight in row.items() if sums[sender]
        }
        if not sums[peer]:  # nobody receives from it, and its own weight is 0
            divided[peer][peer] = 1.0
    return divided


def server_cohort(context: RunContext, method: ServerMethod, t: int) -> list[str]:
    """Return the peers that the server selects in round t, of those that are online."""
    return method.cohort_of(context.settings.topology, context.settings.seed, t, context.roster)


def gossip_senders(
    context: RunContext,
    graph: Graph,
    peer: str,
    t: int,
    state: PeerState,
    roster: Sequence[str] | None = None,
) -> Sequence[str]:
    """Return whom a peer requests models from in round t.

    They are its neighbours, or whom its method prefers. Those that are no neighbours respond if
    they choose the peer too (`round_senders`).
    """
    if not graph.get(peer) or not isinstance(context.method, GossipMethod):
        return []
    if roster is None:
        roster = context.roster
    choices = context.choices(t)
    reachable: Sequence[str] = graph[peer]
    if choices:
        reachable = [name for name in graph if name != peer]
    neighbourhood = Neighbourhood(roster, graph[peer], reachable, choices)
    rng = stream(context.settings.seed, "choose", peer, t)
    senders = context.method.choose(state, neighbourhood, rng=rng)
    if isinstance(senders, str) or not isinstance(senders, Sequence):  # of a user's method
        raise ConfigError(
            f"method {context.method.name} must choose a list of peers, got {senders!r} for peer"
            f" {peer} in round {t}.",
            key="method",
        )
    unknown = [sender for sender in senders if sender not in roster]
    if unknown:
        raise ConfigError(
            f"method {context.method.name} chooses {unknown[0]!r} for peer {peer} in round {t},"
            " which is not a peer.",
            key="method",
        )
    if len(set(senders)) < len(senders) or peer in senders:
        raise ConfigError(
            f"method {context.method.name} chooses a sender of peer {peer} twice, or the peer"
            f" itself, in round {t}; choose each neighbour once.",
            key="method",
        )
    others = [sender for sender in senders if sender not in graph[peer]]
    if len(others) > choices:
        raise ConfigError(
            f"method {context.method.name} chooses {len(others)} peers that are no neighbours of"
            f" peer {peer} in round {t}, such as {others[0]}; its function `choices` allows"
            f" {choices}.",
            key="method",
        )
    return senders


def choices_of(
    context: RunContext, t: int, graph: Graph, states: Mapping[str, PeerState]
) -> dict[str, Sequence[str]]:
    """Return whom each of these peers, if it is online, requests models from in round t."""
    choices = {}
    for peer, state in states.items():
        if peer in graph:
            choices[peer] = gossip_senders(context, graph, peer, t, state)
    return choices


def round_senders(
    context: RunContext, t: int, graph: Graph, choices: Graph
) -> dict[str, list[str]]:
    """Return whose models each online peer receives in round t.

    `choices` has whom each of them prefers (`gossip_senders`). Neighbours send, and so do other
    peers that choose it too. Spare neighbours take the places of those that decline. So nobody
    receives, or sends, more models than in a topology without choices.
    """
    agreed = {peer: agreed_choices(graph, choices, peer) for peer in graph}
    spares = spare_neighbours(context, t)
    senders = {}
    for peer in graph:
        neighbours = [name for name in choices[peer] if name in graph[peer]]
        senders[peer] = neighbours + agreed[peer]
        declined = len(choices[peer]) - len(senders[peer])
        for place in needed_places(context.choices(t), declined):
            sender = spares[place].get(peer)
            if sender is None or sender in senders[peer]:
                continue
            if is_free(place, len(agreed[sender])):
                senders[peer].append(sender)
        senders[peer].sort()
    return senders


def agreed_choices(graph: Graph, choices: Graph, peer: str) -> list[str]:
    """Return the peers that one chooses beside its neighbours, and that choose it too."""
    agreed = []
    for name in choices[peer]:
        is_chosen_back = peer in choices[name] and peer not in graph[name]
        if name not in graph[peer] and is_chosen_back:
            agreed.append(name)
    return agreed


def spare_neighbours(
    context: RunContext, t: int, roster: Sequence[str] | None = None
) -> list[dict[str, str]]:
    """Return whom each peer receives from in its spare places of round t, if it is online.

    There are as many spare places as choices. Place n is the one that topologies with n neighbours
    fewer have, and those with n + 1 fewer do not.
    """
    if roster is None:
        roster = context.roster
    seed = context.settings.seed
    topology = context.settings.topology
    places = []
    for place in range(context.choices(t)):
        wider = topology.thinned(place).online_neighbours(seed, t, roster)
        narrower = topology.thinned(place + 1).online_neighbours(seed, t, roster)
        senders = {}
        for peer, neighbours in wider.items():
            for name in neighbours:
                if name not in narrower[peer]:
                    senders[peer] = name
        places.append(senders)
    return places


def needed_places(choices: int, declined: int) -> range:
    """Return the spare places that a peer uses of which so many choices declined.

    It begins with the last one, which is free unless all choices of the sender agree.
    """
    return range(choices - 1, choices - 1 - declined, -1)


def is_free(place: int, agreed: int) -> bool:
    """Whether a peer sends to its receiver in a spare place if so many of its choices agree."""
    return agreed <= place


def task_senders(task: PeerTask) -> Sequence[str]:
    """Return whose models a task needs: the server's, or those of other peers."""
    if task.server is not None:
        return [SERVER]
    return task.senders or ()


# What is requested


def requested_mask(context: RunContext, state: PeerState) -> Mask | None:
    """Return the mask that a peer requests models with; None if whole models are sent."""
    if not context.pulls:
        return None
    return shared_entries(context, state.next_mask)


def shared_entries(context: RunContext, mask: Mask) -> Mask:
    """Return a mask without the private weights."""
    if context.shared_mask is None:
        return mask
    return mask & context.shared_mask


def request_size(codec: Codec, mask: Mask | None) -> int:
    """Return the bytes of a request; 0 if whole models are sent, which takes no request."""
    if mask is None:
        return 0
    if codec.wire.coding == "plain":
        return codec.request_size()
    return len(codec.encode_request(mask))


def check_request(
    mask: Mask,
    announced: Sequence[int],
    sender: str,
    layout: Layout,
    *,
    density_falls: bool = False,
) -> None:
    """Refuse a mask that does not keep the announced number of weights in each layer.

    It may keep fewer where the method prunes further.
    """
    counts = mask.kept_per_layer(layout)
    fits = counts == list(announced)
    if density_falls:
        fits = len(counts) == len(announced) and all(map(le, counts, announced))
    if not fits:
        refuse(
            Refusal.DENSITY,
            f"{sender}'s mask does not keep the announced number of weights in each layer.",
        )


# What is sent


def published_model(context: RunContext, state: PeerState) -> PackedModel:
    """Return the model that a peer's neighbours may request."""
    assert isinstance(context.method, GossipMethod)
    return checked_part(context, context.method.publish(state), "publish")


def sent_model(
    context: RunContext, task: PeerTask, sender: str, states: Mapping[str, PeerState]
) -> PackedModel:
    """Return the model that a sender, a neighbour or the server, sends for a task."""
    if task.models is not None:
        return states[sender].sent[task.models[sender]]
    if task.server is None:
        return published_model(context, states[sender])
    assert isinstance(context.method, ServerMethod)
    model = context.method.broadcast(task.server, states[task.peer])
    return checked_part(context, model, "broadcast")


def sent_in(task: PeerTask, sender: str) -> int:
    """Return when a sender's model was made: the round, or the number of its asynchronous step."""
    return task.t if task.models is None else task.models[sender]


def checked_part(context: RunContext, model: PackedModel, function: str) -> PackedModel:
    """Return the part of a model that is sent.

    Refuse one without the tensors that the method declares, or with others; `function` of the
    method returned it.
    """
    if not isinstance(model, PackedModel):  # of a user's method
        name = f"{type(context.method).__name__}.{function}"
        raise ConfigError(
            f"{name} must return a PackedModel, got {type(model).__name__}.", key="method"
        )
    specs = context.tensors
    if model.tensors or specs:
        _check_tensors(type(context.method).__name__, function, model.tensors, specs)
    return shared_part(context, model)


def _check_tensors(
    method: str, function: str, tensors: Mapping[str, Tensor], specs: Mapping[str, TensorSpec]
) -> None:
    returned = f"{method}.{function} returns a model"
    for name in sorted(specs.keys() - tensors.keys()):
        raise RunError(
            f"{returned} without the tensor {name}, which {method}.tensors declares: add it,"
            f" model.with_tensors({name}=...)."
        )
    for name in sorted(tensors.keys() - specs.keys()):
        raise RunError(
            f"{returned} with the tensor {name}, which {method}.tensors does not declare: declare"
            " its shape and type there, or do not send it."
        )
    for name, spec in specs.items():
        difference = spec.difference(tensors[name])
        if difference:
            raise RunError(f"{returned} whose tensor {name} {difference}.")


def shared_part(context: RunContext, model: PackedModel) -> PackedModel:
    """Return the part of a model that is sent: all but its private weights."""
    if context.shared_mask is None:
        return model
    return model.restrict(context.shared_mask)


def with_private(state: PeerState, received: PackedModel) -> PackedModel:
    """Return the model that a peer of the cohort trains: the server's, and its private weights."""
    if state.private is None:
        return received
    return received.joined(state.private)


def with_private_kept(context: RunContext, before: PeerState, after: PeerState) -> PeerState:
    """Return a state whose upload lacks the private weights, which the peer keeps."""
    if context.private_mask is None or before.private is None:
        return after
    if after.upload is None:
        return replace(after, private=before.private)
    private = replace(after.upload.restrict(context.private_mask), tensors={})
    return replace(after, upload=shared_part(context, after.upload), private=private)


def encode_model(
    context: RunContext,
    codec: Codec,
    model: PackedModel,
    mask: Mask | None,
    sender: str,
    receiver: str,
    t: int,
) -> bytes:
    """Encode a model for a receiver that requested it with a mask, or whole.

    The same arguments give the same bytes.
    """
    rng = stream(context.settings.seed, "rounding", sender, receiver, t)
    if mask is None:
        return codec.encode_model(model, rng=rng)
    return codec.encode_answer(model, mask, rng=rng)


def decode_model(codec: Codec, message: bytes, mask: Mask | None) -> PackedModel:
    """Decode a model that was requested with a mask, or sent whole; refuse an invalid message."""
    if mask is None:
        return codec.decode_model(message)
    return codec.decode_answer(message, mask)


def deliver(
    context: RunContext,
    codec: Codec,
    model: PackedModel,
    mask: Mask | None,
    sender: str,
    receiver: str,
    t: int,
) -> DeliveredModel:
    """Return what a receiver gets of a model, and the bytes that it takes.

    Lossless values arrive as they are, so the model itself is returned; and the length of a plain
    message is known without encoding it. Tests compare both with the encoded messages.
    """
    paper_bytes = BYTES_PER_VALUE * model.values.numel() + total_bytes(codec.tensors)
    is_lossless = codec.wire.values == "float32"
    if is_lossless and codec.wire.coding == "plain":
        size = codec.model_size(model) if mask is None else codec.answer_size(model, mask)
        return DeliveredModel(model, paper_bytes, size)
    message = encode_model(context, codec, model, mask, sender, receiver, t)
    delivered = model if is_lossless else decode_model(codec, message, mask)
    return DeliveredModel(delivered, paper_bytes, len(message), message)


def with_buffers(delivered: DeliveredModel, buffers: Mapping[str, Tensor]) -> DeliveredModel:
    """Add the sender's buffers to a model, and their bytes; counters and flags are not sent."""
    averaged = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
    size = BYTES_PER_VALUE * sum(buffer.numel() for buffer in averaged.values())
    return delivered._replace(
        paper=delivered.paper + size, wire=delivered.wire + size, buffers=averaged
    )


# What is accepted, and what it cost


def check_answer(mask: Mask, announced: Sequence[int], sender: str, layout: Layout) -> None:
    """Refuse a model that holds more weights of a layer than its sender announced."""
    if len(announced) != len(layout.sizes) or any(map(gt, mask.kept_per_layer(layout), announced)):
        refuse(
            Refusal.DENSITY, f"{sender}'s model holds more weights of a layer than it announced."
        )


def check_norm(model: PackedModel, own_norm: float, sender: str) -> None:
    """Refuse weights that are far larger than ours, or all zero, which would shrink ours."""
    norm = model_norm(model)
    if norm == 0 and len(model.values):
        refuse(Refusal.NORM, f"{sender}'s weights are all zero: they were never trained.")
    if norm > MAX_NORM_RATIO * max(own_norm, 1.0):
        refuse(
            Refusal.NORM,
            f"{sender}'s weights are more than {MAX_NORM_RATIO:g} times as large as ours.",
        )


def model_norm(model: PackedModel) -> float:
    """Return the Euclidean norm of a model's weights."""
    return float(torch.linalg.vector_norm(model.values))


def accepted_models(
    context: RunContext, task: PeerTask, state: PeerState, received: Mapping[str, PackedModel]
) -> Mapping[str, PackedModel]:
    """Return the models that a peer accepts: all of them, unless an attack is simulated.

    In an attack, Byzantine peers send other models than their own.
    """
    if task.peer in context.byzantine or context.byzantine.isdisjoint(received):
        return received
    request = requested_mask(context, state)
    if request is None:
        request = shared_entries(context, state.next_mask)
    else:  # as messages would be, which some engines have at hand
        received = {sender: model.restrict(request) for sender, model in received.items()}
    requested = max(task.requested, len(received))
    own_model = shared_part(context, state.model)
    return _accepted_under_attack(
        context, task.peer, task.t, own_model, request, received, requested
    )


def accepted_uploads(
    context: RunContext, t: int, server: PeerState, uploads: Mapping[str, PackedModel]
) -> Mapping[str, PackedModel]:
    """Return the uploads that the server accepts: all of them, unless an attack is simulated."""
    if context.byzantine.isdisjoint(uploads):
        return uploads
    requested = max(requested_uploads(context.method), len(uploads))
    return _accepted_under_attack(
        context, SERVER, t, server.model, server.model.mask, uploads, requested
    )


def _accepted_under_attack(
    context: RunContext,
    name: str,
    t: int,
    own_model: PackedModel,
    request: Mask,
    received: Mapping[str, PackedModel],
    requested: int,
) -> dict[str, PackedModel]:
    """Return the received models, those of Byzantine peers replaced by their attack.

    Models that a real peer would refuse are left out.
    """
    assert context.attack is not None
    layout = context.layout
    announced = context.announced
    honest = [received[sender] for sender in sorted(received) if sender not in context.byzantine]

    def fits(attacker: str, mask: Mask) -> bool:
        return all(map(le, mask.kept_per_layer(layout), announced[attacker]))

    rule = "none"
    assumed_byzantine = 0
    if isinstance(context.method, Robust) and context.method.robust != "none":
        rule = context.method.robust
        assumed_byzantine = context.method.assumed_byzantine(requested)
    target = Target(
        name,
        own_model,
        request,
        honest,
        len(received) - len(honest),
        fits,
        context.settings.seed,
        t,
        rule,
        assumed_byzantine,
        partial(getattr, context, "first_weights"),
        layout.head,
    )

    accepted = {}
    for sender, model in context.attack.attacked(received, target).items():
        if sender in context.byzantine:
            model = model.restrict(request) if context.pulls else shared_part(context, model)
            model = replace(model, tensors=received[sender].tensors)  # attacks forge weights
            try:
                check_answer(model.mask, announced[sender], sender, layout)
                check_norm(model, model_norm(own_model), sender)
            except MessageError:
                continue
        accepted[sender] = model
    return accepted


def exchange_costs(
    receiver: str, sender: str, request: int, paper: int, response: int
) -> list[MessageCost]:
    """Return the messages of one exchange: the request, if there was one, and the model."""
    costs = []
    if request:
        costs.append(MessageCost(receiver, sender, 0, request, is_request=True))
    costs.append(MessageCost(sender, receiver, paper, response))
    return costs
