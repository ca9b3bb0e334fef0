"""The federation spec: what all peers must have in common, so that their models can be averaged."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from dispfl.core.layout import Layout
from dispfl.round.context import RunContext

PROTOCOL = "1"
FederationSpec = dict[str, str]
DERIVED_FIELDS = ("first_weights", "layout")
"""Entries that follow from others, and are only reported if no other differs."""
REMEDIES = {
    "classes": " List all of the federation's classes in data.classes, the same at every site.",
    "columns": " Every site needs the same columns in the same order.",
}
MAX_CHARS = 120
"""Characters of an entry that a message shows."""
MAX_DIFFERENCES = 8
"""Entries that a message shows."""
MAX_LIST_CHARS = 2000
"""Characters of a list of names that an entry holds."""


@dataclass(frozen=True)
class DataSchema:
    """The inputs and outputs of a model. Weights can only be averaged between sites with the same
    schema."""

    classes: tuple[str, ...]
    """The class names, in the order of the outputs."""
    shape: tuple[int, ...]
    """The shape of one input."""
    columns: tuple[str, ...] = ()
    """The column names of a table."""

    def spec(self) -> FederationSpec:
        """Entries of the federation spec."""
        return {
            "classes": _listed(self.classes),
            "columns": _listed(self.columns) if self.columns else "not named",
            "input_shape": _compact(self.shape),
        }


def federation_spec(
    federation: str,
    context: RunContext,
    layout: Layout,
    first_weights: Tensor,
    smallest_density: float,
    schema: DataSchema | None = None,
) -> FederationSpec:
    """Return the spec: entries by name, each a short text, so that a difference can be shown to
    people."""
    unused = (
        {"robust", "byzantine"} if getattr(context.method, "robust", "none") == "none" else set()
    )
    method = context.method.model_dump(
        mode="json", exclude={"density", *unused}
    )  # each site has its own density
    return {
        "protocol": PROTOCOL,
        "federation": federation,
        "seed": str(context.seed),
        "rounds": str(context.rounds),
        **_entries("method", method),
        "smallest_density": f"{smallest_density:g}",
        **_entries("topology", context.topology.model_dump(mode="json")),
        **_entries("wire", context.wire.model_dump(mode="json")),
        "layout": f"{layout.size} weights, {_digest(layout.spec().encode())}",
        "first_weights": _digest(first_weights.numpy().astype("<f4", copy=False).tobytes()),
        **(schema.spec() if schema else {}),
    }


def spec_digest(spec: Mapping[str, str]) -> str:
    """A digest of the spec, sent with every model request."""
    return _digest(_compact(dict(spec)).encode())


def spec_difference(
    ours: Mapping[str, str], theirs: Mapping[str, str], here: str = "here", there: str = "there"
) -> str | None:
    """Describe the entries in which two specs differ; None if they are equal.

    Both sites log the message, so `here` and `there` name them: "at alice" and "at carol".
    """
    differing = [
        name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)
    ]
    if not differing:
        return None
    shown = [name for name in differing if name not in DERIVED_FIELDS] or differing[:1]
    described = []
    for name in shown[:MAX_DIFFERENCES]:
        one, other = ours.get(name, "not given"), theirs.get(name, "not given")
        described.append(
            f"{name[:MAX_CHARS]} is {_excerpt(one, other)} {here} and {_excerpt(other, one)}"
            f" {there}"
        )
    more = f"; and {len(shown) - MAX_DIFFERENCES} more" if len(shown) > MAX_DIFFERENCES else ""
    return "; ".join(described) + more + "." + "".join(REMEDIES.get(name, "") for name in shown)


def _excerpt(text: str, other: str) -> str:
    """The part of a long text where it differs from another."""
    same = next(
        (k for k, (a, b) in enumerate(zip(text, other, strict=False)) if a != b),
        min(len(text), len(other)),
    )
    start = max(0, min(same - MAX_CHARS // 2, len(text) - MAX_CHARS))
    end = start + MAX_CHARS
    return ("..." if start else "") + text[start:end] + ("..." if end < len(text) else "")


def _listed(names: Sequence[str]) -> str:
    """The names; of very many, their number and a digest."""
    whole = json.dumps(names, ensure_ascii=False, separators=(",", ":"))
    return (
        whole if len(whole) <= MAX_LIST_CHARS else f"{len(names)} names, {_digest(whole.encode())}"
    )


def _entries(table: str, settings: Mapping[str, object]) -> FederationSpec:
    """An entry for each setting of a table, named as in a config file."""
    return {
        f"{table}.{key}": value if isinstance(value, str) else _compact(value)
        for key, value in settings.items()
    }


def _compact(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
