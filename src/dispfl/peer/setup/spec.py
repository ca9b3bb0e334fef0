"""The federation spec: what all peers must have in common, so that their models can be averaged."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from dispfl.core.layout import Layout
from dispfl.core.task import TargetUnit, TaskName
from dispfl.round.context import RunContext

PROTOCOL = "1"
FederationSpec = dict[str, str]
DERIVED_FIELDS = ("first_weights", "layout")
"""Entries that follow from others, and are only reported if no other differs."""
REMEDIES = {
    "classes": " List all of the federation's classes in data.classes, the same at every site.",
    "columns": " Every site needs the same columns in the same order.",
    "target_unit": " Set data.target_mean and data.target_std, the same at every site.",
}
CHANGEABLE_TABLES = ("topology", "train", "deadlines", "method")
"""Tables of which a signed change of the spec may set keys; and `rounds`."""
FIXED_METHOD_KEYS = frozenset(
    {
        "name",
        "density",
        "target_density",
        "structure",
        "layers",
        "first_masks",
        "first_weights",
        "keep",
        "private",
    }
)
"""Keys of the method that decide which weights a model keeps or sends, and so never change."""
MAX_CHARS = 120
"""Characters of an entry that a message shows."""
MAX_DIFFERENCES = 8
"""Entries that a message shows."""
MAX_LIST_CHARS = 2000
"""Characters of a list of names that an entry holds."""


@dataclass(frozen=True)
class DataSchema:
    """The inputs and outputs of a model, the same at all sites whose weights are averaged."""

    classes: tuple[str, ...]
    """The class names, in the order of the outputs."""
    shape: tuple[int, ...]
    """The shape of one input."""
    columns: tuple[str, ...] = ()
    """The column names of a table."""
    task: TaskName = "classification"
    unit: TargetUnit | None = None
    """Regression: the declared unit of the targets; None for that of each site's own data."""

    def spec(self) -> FederationSpec:
        """Entries of the federation spec."""
        spec = {
            "classes": _names_as_text(self.classes),
            "columns": _names_as_text(self.columns) if self.columns else "not named",
            "input_shape": _compact(self.shape),
        }
        if self.task != "classification":
            spec["task"] = self.task
        if self.task == "regression":
            spec["target_unit"] = "each site's own"
            if self.unit is not None:
                spec["target_unit"] = (
                    f"mean {_compact(self.unit.mean)}, std {_compact(self.unit.std)}"
                )
        return spec


def federation_spec(
    federation: str,
    context: RunContext,
    layout: Layout,
    first_weights: Tensor,
    smallest_density: float,
    schema: DataSchema | None = None,
) -> FederationSpec:
    """Return the spec: entries by name, each a short text that can be shown to people."""
    excluded = {"density"}  # each site has its own
    if getattr(context.method, "robust", "none") == "none":
        excluded |= {"robust", "byzantine"}
    method = context.method.model_dump(mode="json", exclude=excluded)
    weight_bytes = first_weights.numpy().astype("<f4", copy=False).tobytes()
    spec = {
        "protocol": PROTOCOL,
        "federation": federation,
        "seed": str(context.settings.seed),
        "rounds": str(context.settings.rounds),
        **_entries("method", method),
        "smallest_density": f"{smallest_density:g}",
        **_entries("topology", context.settings.topology.shared_settings()),
        **_entries("wire", context.settings.wire.model_dump(mode="json")),
        "layout": f"{layout.size} weights, {_digest(layout.spec().encode())}",
        "first_weights": _digest(weight_bytes),
    }
    if context.settings.is_async:
        spec["schedule"] = "async"
        spec |= _entries("staleness", context.settings.staleness.model_dump(mode="json"))
    if context.tensors:
        spec["tensors"] = _compact({name: str(context.tensors[name]) for name in context.tensors})
    if schema is not None:
        spec |= schema.spec()
    return spec


def is_changeable(key: str) -> bool:
    """Whether a signed change of the spec may set a dotted key, such as `topology.degree`."""
    table, _, field = key.partition(".")
    if table == "method":
        return bool(field) and field not in FIXED_METHOD_KEYS
    return key == "rounds" or table in CHANGEABLE_TABLES


def fixed_entries(spec: Mapping[str, str]) -> FederationSpec:
    """Return the entries of a spec that are the same in all of its versions."""
    return {name: value for name, value in spec.items() if not is_changeable(name)}


def spec_digest(spec: Mapping[str, str]) -> str:
    """A digest of the spec, sent with every model request."""
    return _digest(_compact(dict(spec)).encode())


def spec_difference(
    own_spec: Mapping[str, str],
    other_spec: Mapping[str, str],
    own_place: str = "here",
    other_place: str = "there",
) -> str | None:
    """Describe the entries in which two specs differ; None if they are equal.

    Both sites log the message, so the places name them: "at alice" and "at carol".
    """
    names = sorted(own_spec.keys() | other_spec.keys())
    differing = [name for name in names if own_spec.get(name) != other_spec.get(name)]
    if not differing:
        return None
    causes = [name for name in differing if name not in DERIVED_FIELDS]
    shown = causes or differing[:1]

    sentences = []
    for name in shown[:MAX_DIFFERENCES]:
        own_value = own_spec.get(name, "not given")
        other_value = other_spec.get(name, "not given")
        sentences.append(
            f"{name[:MAX_CHARS]} is {_excerpt(own_value, other_value)} {own_place}"
            f" and {_excerpt(other_value, own_value)} {other_place}"
        )
    if len(shown) > MAX_DIFFERENCES:
        sentences.append(f"and {len(shown) - MAX_DIFFERENCES} more")
    remedies = "".join(REMEDIES.get(name, "") for name in shown)
    return "; ".join(sentences) + "." + remedies


def _excerpt(text: str, compared: str) -> str:
    """The part of a long text where it differs from another."""
    common_length = 0
    for char, compared_char in zip(text, compared, strict=False):
        if char != compared_char:
            break
        common_length += 1
    start = max(0, min(common_length - MAX_CHARS // 2, len(text) - MAX_CHARS))
    excerpt = text[start : start + MAX_CHARS]
    if start > 0:
        excerpt = "..." + excerpt
    if start + MAX_CHARS < len(text):
        excerpt += "..."
    return excerpt


def _names_as_text(names: Sequence[str]) -> str:
    """The names; of very many, their number and a digest."""
    text = json.dumps(names, ensure_ascii=False, separators=(",", ":"))
    if len(text) <= MAX_LIST_CHARS:
        return text
    return f"{len(names)} names, {_digest(text.encode())}"


def _entries(table: str, settings: Mapping[str, object]) -> FederationSpec:
    """An entry for each setting of a table, named as in a config file."""
    entries = {}
    for key, value in settings.items():
        entries[f"{table}.{key}"] = value if isinstance(value, str) else _compact(value)
    return entries


def _compact(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
