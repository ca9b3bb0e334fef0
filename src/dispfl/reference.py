"""The reference of all settings, generated from the settings classes themselves."""

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import torch
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dispfl.data.catalogue import DATASETS, describe
from dispfl.errors import ConfigError
from dispfl.experiment import Experiment
from dispfl.models.settings import MODELS
from dispfl.registry import FUNCTIONS, REGISTRIES, settings_classes
from dispfl.settings import Settings, bounds, did_you_mean, within
from dispfl.user_functions import import_reference

TABLES = {
    "method": "What a peer does in a round.",
    "topology": "Who receives whose models.",
    "data": "The data set.",
    "partition": "Which samples a peer has.",
    "model": "The network.",
    "train": "Local training; by default the paper's plain SGD.",
    "wire": "How models are sent.",
    "network": "The network between the devices of a clock.",
    "fit": "How method.density=fit chooses the densities of devices.",
    "staleness": 'How received models count with `schedule = "async"`.',
    "privacy": "Differential privacy of a peer's samples; off by default.",
    "limits": "Timeouts and limits of a site's network.",
    "deadlines": "How long a site's rounds wait for other sites.",
    "schedule": "When a site trains and exchanges models; by default always.",
    "metrics": "Where a site shows its figures to Prometheus; off by default.",
    "view": "Where a site shows [its page](../view.md) to a browser; off by default.",
}


@dataclass(frozen=True)
class Entry:
    """One setting."""

    key: str
    """As a user writes it: `train.momentum`."""
    kind: str
    """`a number in [0, 1)`."""
    default: str
    """As a config file has it; empty if there is none."""
    meaning: str
    components: tuple[str, ...] = ()
    """The components that have it: `dispfl`, `subfedavg`. Empty: all of the table."""
    of_site: bool = False
    """Whether only real sites have it."""


@dataclass(frozen=True)
class Table:
    """A table of settings, or the top-level keys."""

    name: str
    """`train`; empty for the top-level keys."""
    meaning: str
    components: dict[str, str]
    """The names that the table may have, with what they are."""
    entries: tuple[Entry, ...]


@cache
def settings_reference() -> tuple[Table, ...]:
    """Return all settings of a simulated run, the top-level keys first."""
    top = []
    tables = []
    for key, field in Experiment.model_fields.items():
        classes = _classes(key, field)
        if classes:
            tables.append(_table(key, classes, field.default))
        else:
            default = field.default
            if key == "workers":
                default = "as many as the machine has cores"
            top.append(_entry(key, field, default, _docs(Experiment).get(key, "")))
    return (Table("", "Keys outside of tables.", {}, tuple(top)), *tables)


@cache
def site_reference() -> tuple[Table, ...]:
    """Return the settings that only a real site has; none without the extra `peer`.

    Those outside of tables come first.
    """
    try:
        from dispfl.peer.setup.site_config import SiteConfig
        from dispfl.peer.site import SiteInfo
    except ConfigError:
        return ()
    top = []
    tables = []
    for cls in (SiteInfo, SiteConfig):
        for key, field in cls.model_fields.items():
            simulated_field = Experiment.model_fields.get(key)
            if simulated_field is not None and _classes(key, simulated_field) == _classes(
                key, field
            ):
                continue
            classes = _classes(key, field)
            if classes:
                tables.append(_table(key, classes, field.default))
            else:
                top.append(_entry(key, field, field.default, _docs(cls).get(key, "")))

    simulated = [key for key in Experiment.model_fields if key not in SiteConfig.model_fields]
    meaning = (
        f"A real site has these settings, and all others but {_code_list(simulated)}. Its defaults"
        " are `topology=full`, and `method.robust=clip` where the method has it."
    )
    site = Table("site.toml", meaning, {}, tuple(top))
    return tuple(map(_of_site, (site, *tables)))


def _of_site(table: Table) -> Table:
    """Return a table whose entries say that only real sites have them."""
    entries = [replace(entry, of_site=True) for entry in table.entries]
    return replace(table, entries=tuple(entries))


def find_entries(key: str) -> tuple[Table, list[Entry]]:
    """Return a table and its entries that a key, the last part of one, or a table's name means.

    `module:Class` means a component of the user's own.
    """
    if ":" in key:
        own_table = _own_component(key)
        return own_table, list(own_table.entries)
    tables = (*settings_reference(), *site_reference())
    for table in tables:
        if key and key == table.name:
            same_name = [entry for entry in tables[0].entries if entry.key == key]
            return table, [*same_name, *table.entries]
        if key in table.components:
            return table, _entries_of(table, key)

    matches = []
    all_keys = []
    for table in tables:
        for entry in table.entries:
            all_keys.append(entry.key)
            if key in (entry.key, entry.key.rpartition(".")[2]):
                matches.append((table, entry))
    if not matches:
        missing = ""
        if not site_reference():
            missing = " The settings of real sites need the extra: pip install 'dispfl[peer]'."
        raise ConfigError(f"Unknown key {key}. {did_you_mean(key, all_keys)}{missing}", key=key)
    first_table, _ = matches[0]
    return first_table, [entry for _, entry in matches]


def _own_component(reference: str) -> Table:
    """Return the settings of a class of the user's own, as a table that has it alone."""
    component = import_reference("explain", reference, Path.cwd())
    key = getattr(component, "table", "")
    if not isinstance(component, type) or key not in REGISTRIES:
        raise ConfigError(
            f"{reference} has no settings to explain: it is not a class of a method, topology,"
            " partition or another component.",
            key=reference,
        )
    cls = REGISTRIES[key].find(reference)
    table = _table(key, [cls], None)
    return replace(table, components={reference: _first_paragraph(cls)})


def _entries_of(table: Table, component: str) -> list[Entry]:
    """Return the settings that one of a table's components has."""
    return [
        entry for entry in table.entries if not entry.components or component in entry.components
    ]


def _classes(key: str, field: FieldInfo) -> list[type[Settings]]:
    """Return the settings classes of a table; none for a top-level key."""
    if key in Experiment.CHOICES:
        return settings_classes(key)
    annotation = field.annotation
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    return []


def _table(key: str, classes: list[type[Settings]], default_component: Any) -> Table:
    """Return a table: an entry for each field, or for each meaning that a field has."""
    if key in FUNCTIONS:
        by_name = dict(zip(("built-in", "custom"), classes, strict=True))
    else:
        by_name = {_name(cls): cls for cls in classes}

    entries = []
    for (field, meaning), names in _components_by_meaning(by_name).items():
        info = by_name[names[0]].model_fields[field]
        default = info.default
        if type(default_component) in [by_name[name] for name in names]:
            default = getattr(default_component, field)
        components = tuple(names) if len(names) < len(classes) else ()
        entries.append(_entry(f"{key}.{field}", info, default, meaning, components))
    return Table(key, TABLES[key], _components(key, by_name), tuple(entries))


def _components(key: str, classes: Mapping[str, type[Settings]]) -> dict[str, str]:
    """Return the names that a table may have, with what they are."""
    components = {}
    if key in REGISTRIES:
        for name, cls in classes.items():
            components[name] = _first_paragraph(cls)
    elif key == "model":
        with torch.device("meta"):  # shapes alone, no memory
            for name, build in MODELS.items():
                components[name] = _first_paragraph(type(build((3, 32, 32), 10)))
    elif key == "data":
        for name in DATASETS:
            spec = describe(name)
            shape = " x ".join(map(str, spec.shape))
            components[name] = f"{shape} inputs, {spec.classes} classes."
    return components


def _components_by_meaning(
    classes: Mapping[str, type[Settings]],
) -> dict[tuple[str, str], list[str]]:
    """Return the components that share a field and its meaning; a field's meanings are adjacent."""
    by_field: dict[str, dict[str, list[str]]] = {}
    for name, cls in classes.items():
        for field in cls.model_fields:
            if field != "name":
                meaning = _docs(cls).get(field, "")
                by_field.setdefault(field, {}).setdefault(meaning, []).append(name)

    components = {}
    for field, by_meaning in by_field.items():
        for meaning, names in by_meaning.items():
            components[field, meaning] = names
    return components


def _name(cls: type[Settings]) -> str:
    if "name" not in cls.model_fields:
        return cls.__name__
    return str(cls.model_fields["name"].default or cls.__name__)


def _entry(
    key: str, field: FieldInfo, default: Any, meaning: str, components: tuple[str, ...] = ()
) -> Entry:
    value_type = within(_type_in_words(field.annotation), bounds(field.metadata))
    return Entry(key, value_type, _shown(default), " ".join(meaning.split()), components)


def _type_in_words(annotation: Any) -> str:
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (Union, UnionType):
        members = [member for member in arguments if member is not NoneType]
        return " or ".join(dict.fromkeys(map(_type_in_words, members)))
    if origin is tuple:
        is_number = _type_in_words(arguments[0]) == "a number"
        return "a list of numbers" if is_number else "a list of names"
    if hasattr(annotation, "__metadata__"):
        return _type_in_words(annotation.__origin__)
    words = {int: "a whole number", float: "a number", bool: "true | false", str: "text"}
    return words.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _shown(default: Any) -> str:
    """Return a default as a config file has it; empty if there is none."""
    if default is PydanticUndefined or default is None:
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, (tuple, list)):
        return f"[{', '.join(map(_shown, default))}]"
    if isinstance(default, float):
        return f"{default:g}"
    return str(default)


def _first_paragraph(cls: type) -> str:
    return " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())


@cache
def _docs(cls: type) -> dict[str, str]:
    """Return the strings below a class's fields, those of base classes included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if issubclass(base, Settings):
            docs.update(_own_docs(base))
    return docs


def _own_docs(cls: type) -> Iterator[tuple[str, str]]:
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    for statement, after in zip(body.body, body.body[1:], strict=False):
        match statement, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(text))
            ):
                yield name, inspect.cleandoc(text)


def as_markdown() -> str:
    """Return the whole reference as Markdown."""
    lines = [
        "# Settings",
        "",
        (
            "Every setting of `dispfl run`, `compare`, `sweep` and config files, with the default"
            " of `dispfl run`; at the end those of [real sites](#real-sites-sitetoml). `dispfl"
            " explain KEY` prints an entry. This page is generated from the settings classes by"
            " `make reference`."
        ),
    ]
    for table in settings_reference():
        heading = f"`{table.name}`" if table.name else "Top-level keys"
        lines += ["", f"## {heading}", "", *_section(table)]
    site, *tables = site_reference()
    lines += ["", f"## Real sites (`{site.name}`)", "", *_section(site)]
    lines += [
        "",
        (
            "Which settings must be equal at all sites: [Federation"
            " spec](../protocol.md#federation-spec)."
        ),
    ]
    for table in tables:
        lines += ["", f"### `{table.name}`", "", *_section(table)]
    return "\n".join(lines) + "\n"


def _section(table: Table) -> Iterator[str]:
    """Yield the lines of a table: its meaning, its components and its entries."""
    yield table.meaning
    if table.components:
        yield from ["", "| name | what it is |", "| --- | --- |"]
        for name, meaning in table.components.items():
            yield f"| `{name}` | {_cell(meaning)} |"
    yield from ["", "| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for entry in table.entries:
        key = f"`{entry.key}`"
        if entry.components:
            key += f" (of {_code_list(entry.components)})"
        default = f"`{entry.default}`" if entry.default else ""
        yield f"| {key} | {_cell(entry.kind)} | {default} | {_cell(entry.meaning)} |"


def _code_list(names: Iterable[str]) -> str:
    """Return names as Markdown code: "`ring`, `full`"."""
    return ", ".join(f"`{name}`" for name in names)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
