"""An experiment from a TOML file and `key=value` overrides: the defaults, overridden by the file,
and by the overrides.

Choosing another component (`method=local`) discards the keys of the previous one.
"""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dispfl.errors import ConfigError
from dispfl.experiment import Experiment, RunSettings
from dispfl.registry import CUSTOM_KEYS, REGISTRIES, as_table, settings_classes
from dispfl.settings import OTHER_WORDS, Settings, did_you_mean

MADE_IN_PYTHON = "made_in_python"
"""The key that marks the config of a run made in Python, which the command line cannot repeat."""
KEYS_ELSEWHERE = {
    "smallest_density": (
        "It is an option of real sites, dispfl peer init --smallest-density; in a simulation all "
        "densities are known: method.density=0.3,0.5."
    ),
    "threads": (
        "It is a setting of real sites (site.toml); in a simulation, workers says how many peers"
        " train at once."
    ),
}
"""Keys that are not settings of a simulation, and where to set them."""


def read_toml(path: Path) -> dict[str, Any]:
    """Return a config file as nested dicts."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        hint = "" if path.suffix == ".toml" else f" To set {path}, write {path}=VALUE."
        raise ConfigError(f"The config file {path} does not exist.{hint}") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"The config file {path} cannot be read: {problem}.") from None
    except tomllib.TOMLDecodeError as problem:
        raise ConfigError(f"The config file {path} is not valid TOML: {problem}.") from None


def compose(config: Mapping[str, Any], overrides: Iterable[str] = ()) -> Experiment:
    """Return an experiment: the defaults, overridden by a config, and by `key=value` overrides."""
    return Experiment(**compose_values(Experiment, config, overrides))


def compose_values(
    kind: type[RunSettings], config: Mapping[str, Any], overrides: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the values of settings of a kind: its defaults, a config, and overrides; refuse
    unknown keys."""
    if MADE_IN_PYTHON in config:
        raise ConfigError(
            "This run was made in Python; resume it there: Federation(...).run(..., resume=True)."
        )
    given: dict[str, Any] = {}
    for key, value in sorted(
        (_parse(override) for override in overrides), key=lambda pair: "." in pair[0]
    ):
        table, dot, field = key.partition(".")
        if dot:
            given[table] = {**as_table(table, given.get(table, {})), field: value}
        else:
            given[table] = value
    # A file may describe custom data whose path an override gives.
    for key in CUSTOM_KEYS.keys() & given.keys() & config.keys():
        below, above = as_table(key, config[key]), as_table(key, given[key])
        if above.get("name") == "custom" and "name" not in below:
            given[key] = {**below, **above}
    values = _overlay(kind, _overlay(kind, _stated(_defaults(kind, config, given)), config), given)
    for key in values:
        if key not in kind.model_fields:
            if key in KEYS_ELSEWHERE:
                raise ConfigError(f"Unknown key {key}. {KEYS_ELSEWHERE[key]}", key=key)
            known = _all_keys(kind)
            ours = OTHER_WORDS.get(key, key)
            tables = [
                table
                for table, _, field in (name.rpartition(".") for name in known)
                if table and field == ours
            ]
            whole = f"{tables[0]}.{key}" if tables else key  # lr is train.lr
            raise ConfigError(f"Unknown key {key}. {did_you_mean(whole, known)}", key=key)
    return values


def _defaults(
    kind: type[RunSettings], config: Mapping[str, Any], given: Mapping[str, Any]
) -> RunSettings:
    """Return the defaults; the default degree depends on the number of peers, unless a degree is
    given."""
    peers = given.get("peers", config.get("peers"))
    degree_given = any(
        "degree" in as_table("topology", source.get("topology", {})) for source in (config, given)
    )
    values = (
        {}
        if peers is None or degree_given or "peers" not in kind.model_fields
        else {"peers": peers}
    )
    return kind(**values)


def _stated(defaults: RunSettings) -> dict[str, Any]:
    """Return the default settings as TOML; of components and of training only what differs from
    their class's defaults, because a field may have another default where another field is given
    (`method.structure`, `train.optimizer`).
    """
    content = defaults.to_toml()
    for key in {*REGISTRIES, "train"} & content.keys():
        stated = getattr(defaults, key).model_dump(
            mode="json", exclude_none=True, exclude_defaults=True
        )
        content[key] = stated | ({"name": content[key]["name"]} if "name" in content[key] else {})
    return content


def _overlay(
    kind: type[RunSettings], base: Mapping[str, Any], top: Mapping[str, Any]
) -> dict[str, Any]:
    """Override the base's keys by the top's. A table with another name (`method=local`) replaces
    the base's table."""
    values = dict(base)
    for key, value in top.items():
        if key in kind.CHOICES:
            table, under = as_table(key, value), values.get(key, {})
            same = table.get("name", under.get("name")) == under.get("name")
            value = {**under, **table} if same else table
        elif isinstance(values.get(key), Mapping):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{key} must be a table, got {value!r}.", key=key)
            value = {**values[key], **value}
        values[key] = value
    return values


def _parse(override: str) -> tuple[str, Any]:
    """Parse `method.density=0.2`; values are TOML, or a list with commas, or plain text."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"Expected key=value, got {override!r}; for example method.density=0.2.")
    return key.strip(), _value(text.strip())


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return [_value(item.strip()) for item in text.split(",")] if "," in text else text


def _all_keys(kind: type[RunSettings]) -> list[str]:
    tables: list[type[Settings]] = []
    for key, field in kind.model_fields.items():
        if key in kind.CHOICES:
            tables += settings_classes(key)
        elif isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            tables.append(field.annotation)
    inside = dict.fromkeys(f"{cls.table}.{field}" for cls in tables for field in cls.model_fields)
    return [*kind.model_fields, *inside]


def differing_keys(one: Experiment, other: Experiment) -> dict[str, tuple[Any, Any]]:
    """Return the dotted keys in which two experiments differ, with both values."""
    a, b = (dotted_keys(experiment.to_toml()) for experiment in (one, other))
    return {
        key: (a.get(key), b.get(key))
        for key in sorted(a.keys() | b.keys())
        if a.get(key) != b.get(key)
    }


def dotted_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without tables: `{"method.density": 0.2}`."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= (
            {f"{key}.{field}": v for field, v in value.items()}
            if isinstance(value, Mapping)
            else {key: value}
        )
    return flat
