"""The simulated network: messages go from peer to peer as the codec would send them, at the price of its bytes.

A real peer calls `peer_step` with what came out of its sockets; a simulated one calls `simulated_step`, which gives
`peer_step` the same models and notes the same bytes.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from dispfl.core.live import LiveModel
from dispfl.core.packed import PackedMask, PackedModel
from dispfl.core.rng import stream
from dispfl.core.train import Trainer
from dispfl.costs.ledger import Carried
from dispfl.costs.traffic import paper_bytes
from dispfl.methods.base import SERVER, GossipMethod, PeerState, ServerMethod
from dispfl.round import peer_step, senders_of
from dispfl.wire.codec import Codec
from dispfl.work import Part, Setting, Step, Work


class Arrived(NamedTuple):
    """A model as it came out of the codec at the receiver's end, and what that cost."""

    model: PackedModel
    paper: int
    """Bytes in the paper's currency."""
    wire: int
    """Bytes as sent."""
    message: bytes | None = None
    """The message, where it had to be made."""


Hear = Callable[[str, PackedMask | None], Arrived]
"""A sender's model, asked for with a mask or not."""


def simulated_step(
    setting: Setting,
    codec: Codec,
    live: LiveModel,
    part: Part,
    state: PeerState,
    hear: Hear,
    pulse: Callable[[], None] = lambda: None,
    make_trainer: Callable[..., Trainer] = Trainer,
) -> Step:
    """One peer's round, with all of its messages carried: requests, what it hears, what it sends a server."""
    asked = state.next_mask if setting.pulls else None
    request = 0 if asked is None else request_bytes(codec, asked)
    heard, carried = {}, []
    for sender in senders_of(setting, part, state):
        arrived = hear(sender, asked)
        heard[sender] = arrived.model
        if asked is not None:
            carried.append(Carried(part.peer, sender, 0, request))
        carried.append(Carried(sender, part.peer, arrived.paper, arrived.wire))
    work = Work(part.peer, part.t, state, heard, part.idle, part.scoring, part.tuning)
    return replace(peer_step(setting, live, work, pulse, make_trainer), carried=tuple(carried))


def heard_here(setting: Setting, codec: Codec, part: Part, states: Mapping[str, PeerState]) -> Hear:
    """How a peer hears those whose states are in this process, and the server."""

    def hear(sender: str, asked: PackedMask | None) -> Arrived:
        method = setting.method
        if part.server is not None:
            assert isinstance(method, ServerMethod)
            model = method.broadcast(part.server, states[part.peer])
        else:
            assert isinstance(method, GossipMethod)
            model = method.publish(states[sender])
        return carry(setting, codec, model, asked, sender, part.peer, part.t)

    return hear


def upload(setting: Setting, codec: Codec, part: Part, step: Step) -> tuple[Step, Arrived | None]:
    """A step whose message to the server has arrived there, if there is one; and that message."""
    if step.state.sent is None:
        return step, None
    arrived = carry(setting, codec, step.state.sent, None, part.peer, SERVER, part.t)
    message = Carried(part.peer, SERVER, arrived.paper, arrived.wire)
    state = replace(step.state, sent=arrived.model)
    return replace(step, state=state, carried=(*step.carried, message)), arrived


def carry(
    setting: Setting, codec: Codec, model: PackedModel, asked: PackedMask | None, sender: str, receiver: str, t: int
) -> Arrived:
    """What arrives of a model, asked for with a mask or sent whole, and how many bytes it took.

    Where nothing is lost on the way the model itself arrives, and a plain message's length needs no message:
    the receiver makes the same of it, and the codec's tests see to it that the length is right.
    """
    wire, paper = codec.wire, paper_bytes(model)
    if wire.values == "float32" and wire.coding == "plain":
        return Arrived(model, paper, codec.model_size(model) if asked is None else codec.answer_size(model, asked))
    message = encode(setting, codec, model, asked, sender, receiver, t)
    arrived = model if wire.values == "float32" else decode(codec, message, asked)
    return Arrived(arrived, paper, len(message), message)


def encode(
    setting: Setting, codec: Codec, model: PackedModel, asked: PackedMask | None, sender: str, receiver: str, t: int
) -> bytes:
    """A model as a message from a sender to a receiver in round t."""
    rng = stream(setting.seed, "rounding", sender, receiver, t)
    return codec.encode_model(model, rng=rng) if asked is None else codec.encode_answer(model, asked, rng=rng)


def decode(codec: Codec, message: bytes, asked: PackedMask | None) -> PackedModel:
    """The model in a message."""
    return codec.decode_model(message) if asked is None else codec.decode_answer(message, asked)


def request_bytes(codec: Codec, asked: PackedMask) -> int:
    """What a request takes."""
    return codec.request_size() if codec.wire.coding == "plain" else len(codec.encode_request(asked))
