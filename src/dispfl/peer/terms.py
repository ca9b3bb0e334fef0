"""What all peers of a federation must have in common, so that their models may be averaged."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from dispfl.core.layout import Layout
from dispfl.work import Setting

PROTOCOL = "1"
Terms = dict[str, str]
CONSEQUENCES = ("first_weights", "layout")
"""Terms that differ where others do, and say less: they are named last."""
REMEDIES = {
    "classes": " List all of the federation's classes in data.classes, the same at every site.",
    "columns": " Every site needs the same columns in the same order.",
}
LONGEST = 120
"""Characters of a term that a sentence shows."""
LONGEST_LIST = 2000
"""Characters of a list of names that a term holds."""


@dataclass(frozen=True)
class Meaning:
    """What goes into a model and what comes out of it. To a site that reads them otherwise the weights mean nothing."""

    classes: tuple[str, ...]
    """In the order of the outputs."""
    shape: tuple[int, ...]
    """Of one input."""
    columns: tuple[str, ...] = ()
    """What the inputs are called, in a table."""

    def terms(self) -> Terms:
        """As terms."""
        return {
            "classes": _listed(self.classes),
            "columns": _listed(self.columns) if self.columns else "not named",
            "input_shape": _compact(self.shape),
        }


def terms_of(
    federation: str,
    setting: Setting,
    layout: Layout,
    first_weights: Tensor,
    smallest_density: float,
    meaning: Meaning | None = None,
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
        **(meaning.terms() if meaning else {}),
    }


def digest_of(terms: Mapping[str, str]) -> str:
    """All terms as one short text that goes with every message."""
    return _digest(_compact(dict(terms)).encode())


def difference(
    ours: Mapping[str, str], theirs: Mapping[str, str], here: str = "here", there: str = "there"
) -> str | None:
    """The first term in which two sites differ, as a sentence; None where they agree.

    It is read at both, so it says where it is what: `here` and `there` are "at alice" and "at carol".
    """
    for name in sorted(ours.keys() | theirs.keys(), key=lambda name: (name in CONSEQUENCES, name)):
        one, other = ours.get(name, "not known"), theirs.get(name, "not known")
        if one != other:
            one, other = _shortly(one, other), _shortly(other, one)
            return f"{name[:LONGEST]} is {one} {here} and {other} {there}.{REMEDIES.get(name, '')}"
    return None


def _shortly(text: str, other: str) -> str:
    """A long text, cut to the place where it differs from another."""
    same = next((k for k, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    start = max(0, min(same - LONGEST // 2, len(text) - LONGEST))
    end = start + LONGEST
    return ("..." if start else "") + text[start:end] + ("..." if end < len(text) else "")


def _listed(names: Sequence[str]) -> str:
    """Names as they are; of very many, how many and their digest: terms travel with every greeting."""
    whole = json.dumps(names, ensure_ascii=False, separators=(",", ":"))
    return whole if len(whole) <= LONGEST_LIST else f"{len(names)} names, {_digest(whole.encode())}"


def _compact(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
