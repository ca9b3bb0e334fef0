"""The reference of all settings, from the settings classes themselves: type, range, default and
meaning."""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
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

TABLES = {
    "method": "What a peer does in a round.",
    "topology": "Who receives whose models.",
    "data": "The data set.",
    "partition": "Which samples a peer has.",
    "model": "The network.",
    "train": "Local training; by default the paper's plain SGD.",
    "wire": "How models are sent.",
    "privacy": "Differential privacy of a peer's samples; off by default.",
    "limits": "Timeouts and limits of a site's network.",
    "deadlines": "How long a site's rounds wait for other sites.",
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
    top, tables = [], []
    for key, field in Experiment.model_fields.items():
        classes = _classes(key, field)
        if classes:
            tables.append(_table(key, classes, field.default))
        else:
            default = "as many as the machine has cores" if key == "workers" else field.default
            top.append(_entry(key, field, default, _docs(Experiment).get(key, "")))
    return (Table("", "Keys outside of tables.", {}, tuple(top)), *tables)


@cache
def site_reference() -> tuple[Table, ...]:
    """Return the settings that only a real site has, those outside of tables first; none without
    the extra `peer`."""
    try:
        from dispfl.peer.setup.site_config import SiteConfig
        from dispfl.peer.site import SiteInfo
    except ConfigError:
        return ()
    top, tables = [], []
    for kind in (SiteInfo, SiteConfig):
        for key, field in kind.model_fields.items():
            if key in Experiment.model_fields:
                continue
            if classes := _classes(key, field):
                tables.append(_table(key, classes, field.default))
            else:
                top.append(_entry(key, field, field.default, _docs(kind).get(key, "")))
    simulated = ", ".join(
        f"`{key}`" for key in Experiment.model_fields if key not in SiteConfig.model_fields
    )
    meaning = (
        f"A real site has these settings, and all others but {simulated}. Its defaults are"
        " `topology=full`, and `method.robust=clip` where the method has it."
    )
    found = (Table("site.toml", meaning, {}, tuple(top)), *tables)
    return tuple(
        replace(t, entries=tuple(replace(entry, of_site=True) for entry in t.entries))
        for t in found
    )


def find_entries(key: str) -> tuple[Table, list[Entry]]:
    """Return a setting's table and entries, given by its key or the last part of it, or by a table;
    refuse others."""
    tables = (*settings_reference(), *site_reference())
    for table in tables:
        if key and key == table.name:
            return table, list(table.entries)
        if key in table.components and ":" not in key:
            return table, [e for e in table.entries if not e.components or key in e.components]
    every = [(table, entry) for table in tables for entry in table.entries]
    found = [pair for pair in every if key in (pair[1].key, pair[1].key.rpartition(".")[2])]
    if not found:
        missing = (
            ""
            if site_reference()
            else " The settings of real sites need the extra: pip install 'dispfl[peer]'."
        )
        raise ConfigError(
            f"Unknown key {key}. {did_you_mean(key, [entry.key for _, entry in every])}{missing}",
            key=key,
        )
    return found[0][0], [entry for _, entry in found]


def _classes(key: str, field: FieldInfo) -> list[type[Settings]]:
    """Return the settings classes of a table; none for a top-level key."""
    if key in Experiment.CHOICES:
        return settings_classes(key)
    kind = field.annotation
    return [kind] if isinstance(kind, type) and issubclass(kind, Settings) else []


def _table(key: str, classes: list[type[Settings]], of_run: Any) -> Table:
    by_name = dict(zip(("built-in", "custom"), classes, strict=True)) if key in FUNCTIONS else {}
    by_name = by_name or {_name(cls): cls for cls in classes}
    fields: dict[str, list[str]] = {}
    for name, cls in by_name.items():
        for field in cls.model_fields:
            if field != "name":
                fields.setdefault(field, []).append(name)
    entries = []
    for field, names in fields.items():
        for meaning, having in _by_meaning(
            field, [(name, by_name[name]) for name in names]
        ).items():
            cls = by_name[having[0]]
            some = tuple(having) if len(having) < len(classes) else ()
            of_default = type(of_run) in map(by_name.get, having)
            default = getattr(of_run, field) if of_default else cls.model_fields[field].default
            entries.append(
                _entry(f"{key}.{field}", cls.model_fields[field], default, meaning, some)
            )
    return Table(key, TABLES[key], _components(key, by_name), tuple(entries))


def _components(key: str, classes: Mapping[str, type[Settings]]) -> dict[str, str]:
    """Return the names that a table may have, with what they are."""
    if key in REGISTRIES:
        return {name: _first_paragraph(cls) for name, cls in classes.items()}
    if key == "model":
        with torch.device("meta"):  # shapes alone, no memory
            networks = {name: type(build((3, 32, 32), 10)) for name, build in MODELS.items()}
        return {name: _first_paragraph(network) for name, network in networks.items()}
    if key == "data":
        sets = {name: describe(name) for name in DATASETS}
        return {
            name: f"{' x '.join(map(str, d.shape))} inputs, {d.classes} classes."
            for name, d in sets.items()
        }
    return {}


def _by_meaning(field: str, classes: list[tuple[str, type[Settings]]]) -> dict[str, list[str]]:
    """Return the components that share the meaning of a field."""
    found: dict[str, list[str]] = {}
    for name, cls in classes:
        found.setdefault(_docs(cls).get(field, ""), []).append(name)
    return found


def _name(cls: type[Settings]) -> str:
    default = cls.model_fields["name"].default if "name" in cls.model_fields else ""
    return str(default or cls.__name__)


def _entry(
    key: str, field: FieldInfo, default: Any, meaning: str, components: tuple[str, ...] = ()
) -> Entry:
    kind, limits = _kind(field.annotation), bounds(field.metadata)
    shown = "" if default is PydanticUndefined or default is None else _shown(default)
    return Entry(key, within(kind, limits), shown, " ".join(meaning.split()), components)


def _kind(annotation: Any) -> str:
    """Return a type in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_kind(part) for part in arguments if part is not NoneType))
    if origin is tuple:
        return "a list of " + {"a number": "numbers"}.get(_kind(arguments[0]), "names")
    if hasattr(annotation, "__metadata__"):
        return _kind(annotation.__origin__)
    words = {int: "a whole number", float: "a number", bool: "true | false", str: "text"}
    return words.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_shown, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _first_paragraph(cls: type) -> str:
    return " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())


@cache
def _docs(cls: type) -> dict[str, str]:
    """Return the strings below a class's fields, those of base classes included."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if issubclass(base, Settings):
            found |= dict(_own_docs(base))
    return found


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
        lines += [
            "",
            f"## {f'`{table.name}`' if table.name else 'Top-level keys'}",
            "",
            *_section(table),
        ]
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
        yield from (
            f"| `{name}` | {_cell(meaning)} |" for name, meaning in table.components.items()
        )
    yield from ["", "| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for entry in table.entries:
        of = (
            f" (of {', '.join(f'`{name}`' for name in entry.components)})"
            if entry.components
            else ""
        )
        default = f"`{entry.default}`" if entry.default else ""
        yield f"| `{entry.key}`{of} | {_cell(entry.kind)} | {default} | {_cell(entry.meaning)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
