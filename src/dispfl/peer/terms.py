"""What all peers of a federation must have in common, so that their models may be averaged."""

import hashlib
import json
from collections.abc import Mapping

from torch import Tensor

from dispfl.core.layout import Layout
from dispfl.round import Setting

PROTOCOL = "1"
Terms = dict[str, str]


def terms_of(
    federation: str, setting: Setting, layout: Layout, first_weights: Tensor, smallest_density: float
) -> Terms:
    """The terms, by name. Each is a short text, so that two sites can see where theirs differ."""
    method = setting.method.model_dump(mode="json", exclude={"density"})  # each site has its own density
    shapes = json.dumps([layout.names, layout.shapes])
    return {
        "protocol": PROTOCOL,
        "federation": federation,
        "seed": str(setting.seed),
        "rounds": str(setting.rounds),
        "method": _compact(method),
        "smallest_density": f"{smallest_density:g}",
        "topology": _compact(setting.topology.model_dump(mode="json")),
        "wire": _compact(setting.wire.model_dump(mode="json")),
        "layout": f"{layout.size} weights, {_digest(shapes.encode())}",
        "first_weights": _digest(first_weights.numpy().astype("<f4", copy=False).tobytes()),
    }


def digest_of(terms: Mapping[str, str]) -> str:
    """All terms as one short text that goes with every message."""
    return _digest(_compact(dict(terms)).encode())


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """The first term in which two sites differ, as a sentence; None where they agree."""
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            return f"{name} is {ours.get(name, 'not known')} here and {theirs.get(name, 'not known')} there."
    return None


def _compact(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
