"""The simulated network: messages go from peer to peer as the codec would send them, at the price of its bytes.

A real peer calls `peer_step` with what came out of its sockets; a simulated one calls `simulated_step`, which gives
`peer_step` the same models and notes the same bytes.
"""

from collections.abc import Callable
from dataclasses import replace

from dispfl.core.live import LiveModel
from dispfl.core.packed import PackedMask, PackedModel
from dispfl.core.rng import stream
from dispfl.costs.ledger import Carried
from dispfl.costs.traffic import paper_bytes
from dispfl.methods.base import SERVER
from dispfl.round import Setting, Step, Work, peer_step
from dispfl.wire.codec import Codec


def simulated_step(
    setting: Setting, codec: Codec, live: LiveModel, work: Work, pulse: Callable[[], None] = lambda: None
) -> Step:
    """One peer's round, with all of its messages carried: requests, what it hears, what it sends a server."""
    asked = work.state.next_mask if setting.pulls else None
    heard, carried = {}, []
    for sender, model in work.heard.items():
        if asked is not None:
            carried.append(Carried(work.peer, sender, 0, _request_bytes(codec, asked)))
        arrived, size = carry(setting, codec, model, asked, sender, work.peer, work.t)
        heard[sender] = arrived
        carried.append(Carried(sender, work.peer, paper_bytes(model), size))
    step = peer_step(setting, live, replace(work, heard=heard), pulse)
    if (sent := step.state.sent) is not None:
        arrived, size = carry(setting, codec, sent, None, work.peer, SERVER, work.t)
        step = replace(step, state=replace(step.state, sent=arrived))
        carried.append(Carried(work.peer, SERVER, paper_bytes(sent), size))
    return replace(step, carried=tuple(carried))


def carry(
    setting: Setting, codec: Codec, model: PackedModel, asked: PackedMask | None, sender: str, receiver: str, t: int
) -> tuple[PackedModel, int]:
    """What arrives of a model, asked for with a mask or sent whole, and how many bytes it took.

    Where nothing is lost on the way the model itself arrives, and a plain message's length needs no message:
    the receiver makes the same of it, and the codec's tests see to it that the length is right.
    """
    wire = codec.wire
    if wire.values == "float32" and wire.coding == "plain":
        return model, codec.model_size(model) if asked is None else codec.answer_size(model, asked)
    rng = stream(setting.seed, "rounding", sender, receiver, t)
    if asked is None:
        frame = codec.encode_model(model, rng=rng)
        return model if wire.values == "float32" else codec.decode_model(frame), len(frame)
    frame = codec.encode_answer(model, asked, rng=rng)
    return model if wire.values == "float32" else codec.decode_answer(frame, asked), len(frame)


def _request_bytes(codec: Codec, asked: PackedMask) -> int:
    return codec.request_size() if codec.wire.coding == "plain" else len(codec.encode_request(asked))
