"""An experiment from a TOML file and overrides: the defaults, then the file, then the overrides.

Choosing another component (`method=local`) discards the keys of the previous one.
"""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dispfl.errors import ConfigError
from dispfl.experiment import DEFAULTS_OF_TASKS, Experiment, RunSettings
from dispfl.files import read_regular
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
        return tomllib.loads(read_regular(path).decode())
    except FileNotFoundError:
        hint = "" if path.suffix == ".toml" else f" To set {path}, write {path}=VALUE."
        raise ConfigError(f"The config file {path} does not exist.{hint}") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"The config file {path} cannot be read: {problem}.") from None
    except (tomllib.TOMLDecodeError, RecursionError) as problem:
        raise ConfigError(f"The config file {path} is not valid TOML: {problem}.") from None


def compose(config: Mapping[str, Any], overrides: Iterable[str] = ()) -> Experiment:
    """Return an experiment: the defaults, overridden by a config, and by `key=value` overrides."""
    return Experiment(**compose_values(Experiment, config, parse_overrides(overrides)))


def compose_values(
    kind: type[RunSettings], config: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values of settings: default tables, a config, and overrides, merged by table.

    Unknown keys are refused.
    """
    if MADE_IN_PYTHON in config:
        raise ConfigError(
            "This run was made in Python; resume it there: Federation(...).run(out, resume=True)."
        )
    for source in (config, overrides):
        check_keys(kind, source)
    overrides = _with_custom_tables(config, overrides)
    defaults = _default_tables(kind)
    task = str({**config, **overrides}.get("task", ""))
    defaults |= {key: {"name": name} for key, name in _defaults_of(kind, task).items()}
    return _overlay(kind, _overlay(kind, defaults, config), overrides)


def _defaults_of(kind: type[RunSettings], task: str) -> dict[str, str]:
    """Return the components that fit a task, by table."""
    components = DEFAULTS_OF_TASKS.get(task, {})
    return {key: name for key, name in components.items() if key in kind.model_fields}


def check_keys(kind: type[RunSettings], keys: Iterable[str]) -> None:
    """Refuse top-level keys that settings do not have, with the nearest key that they have."""
    for key in keys:
        if key in kind.model_fields:
            continue
        if key in KEYS_ELSEWHERE:
            raise ConfigError(f"Unknown key {key}. {KEYS_ELSEWHERE[key]}", key=key)
        valid_keys = _all_keys(kind)
        raise ConfigError(
            f"Unknown key {key}. {did_you_mean(_with_table(key, valid_keys), valid_keys)}", key=key
        )


def _with_table(key: str, valid_keys: Iterable[str]) -> str:
    """Return `train.lr` for `lr` and for `learning_rate`; a key of no table as it is."""
    our_word = OTHER_WORDS.get(key, key)
    for valid_key in valid_keys:
        table, _, field = valid_key.rpartition(".")
        if table and field == our_word:
            return f"{table}.{key}"
    return key


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Return `method=dispfl` and `method.density=0.2` as nested dicts."""
    values: dict[str, Any] = {}
    pairs = [_parse(override) for override in overrides]
    for key, value in sorted(pairs, key=lambda pair: "." in pair[0]):  # a name before its fields
        table, dot, field = key.partition(".")
        if dot:
            values[table] = {**as_table(table, values.get(table, {})), field: value}
        else:
            values[table] = value
    return values


def _with_custom_tables(
    config: Mapping[str, Any], overrides: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Complete overrides such as `data.path=FILE` with a config that describes such custom data."""
    complete = dict(overrides)
    for key in CUSTOM_KEYS.keys() & overrides.keys() & config.keys():
        below = as_table(key, config[key])
        above = as_table(key, overrides[key])
        if above.get("name") == "custom" and "name" not in below:
            complete[key] = {**below, **above}
    return complete


def _default_tables(kind: type[RunSettings]) -> dict[str, Any]:
    """Return the default tables as TOML.

    Components and training state only what differs from their class's defaults: a field may have
    another default where another field is given (`method.structure`, `train.optimizer`).
    """
    tables = {}
    for key, field in kind.model_fields.items():
        default = field.default
        if not isinstance(default, Settings):
            continue
        is_sparse = key in REGISTRIES or key == "train"
        content = default.model_dump(mode="json", exclude_none=True, exclude_defaults=is_sparse)
        if key in REGISTRIES:
            content["name"] = REGISTRIES[key].name_of(default)
        tables[key] = content
    return tables


def _overlay(
    kind: type[RunSettings], base: Mapping[str, Any], top: Mapping[str, Any]
) -> dict[str, Any]:
    """Override the base's keys by the top's.

    A table with another name (`method=local`) replaces the base's table.
    """
    values = dict(base)
    for key, value in top.items():
        below = values.get(key)
        if isinstance(value, Settings):  # given in Python, complete
            values[key] = value
        elif key in kind.CHOICES:
            values[key] = _overlay_component(as_table(key, value), below or {})
        elif isinstance(below, Mapping):
            if isinstance(value, str) and key in kind.SHORT:
                value = {kind.SHORT[key]: value}
            if not isinstance(value, Mapping):
                raise ConfigError(f"{key} must be a table, got {value!r}.", key=key)
            values[key] = {**below, **value}
        else:
            values[key] = value
    return values


def _overlay_component(table: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    name_below = below.get("name")
    if table.get("name", name_below) == name_below:
        return {**below, **table}
    return dict(table)


def _parse(override: str) -> tuple[str, Any]:
    """Parse `method.density=0.2`; values are TOML, or a list with commas, or plain text."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"Expected key=value, got {override!r}; for example method.density=0.2.")
    text = text.strip()
    if text.startswith("{"):
        try:
            tomllib.loads(f"value = {text}")
        except tomllib.TOMLDecodeError:
            raise ConfigError(
                f"{key} is {text}, which is no valid table; put texts in it in quotes, and all of"
                " it in single quotes for the shell:"
                " 'classes.night={speed=1e9, daily=\"22:00-06:00\"}'.",
                key=key.strip(),
            ) from None
    return key.strip(), _value(text)


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        if "," not in text:
            return text
        return [_value(item.strip()) for item in text.split(",")]


def _all_keys(kind: type[RunSettings]) -> list[str]:
    """Return all keys of settings: top-level ones, then those of tables, as `method.density`.

    Those of the default components come before those that only others have.
    """
    default_classes: list[type[Settings]] = []
    other_classes: list[type[Settings]] = []
    for key, field in kind.model_fields.items():
        if isinstance(field.default, Settings):
            default_classes.append(type(field.default))
        if key in kind.CHOICES:
            other_classes += settings_classes(key)
    keys = dict.fromkeys(kind.model_fields)
    for cls in (*default_classes, *other_classes):
        keys |= dict.fromkeys(f"{cls.table}.{name}" for name in cls.model_fields)
    return list(keys)


def differing_keys(first: Experiment, second: Experiment) -> dict[str, tuple[Any, Any]]:
    """Return the dotted keys in which two experiments differ, with both values."""
    first_values = dotted_keys(first.to_toml())
    second_values = dotted_keys(second.to_toml())
    differing = {}
    for key in sorted(first_values.keys() | second_values.keys()):
        first_value = first_values.get(key)
        second_value = second_values.get(key)
        if first_value != second_value:
            differing[key] = (first_value, second_value)
    return differing


def dotted_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without tables: `{"method.density": 0.2}`."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            for field, content in value.items():
                flat[f"{key}.{field}"] = content
        else:
            flat[key] = value
    return flat
