"""Tables of settings, chosen by name: what a config file, a `key=value` word and a site's plan have in common."""

from collections.abc import Mapping
from typing import Any

from dispfl.errors import ConfigError
from dispfl.settings import Settings, did_you_mean

Choices = Mapping[str, type[Settings]]
"""The settings of a table, by its `name` where there is a choice of them; "" stands for all other names."""

OWN: dict[str, tuple[str, ...]] = {"data": ("path", "factory"), "model": ("factory",)}
"""Keys that by themselves say that a table is of the user's own: `data.path=table.csv` needs no `data=own`."""


def as_table(key: str, value: Any) -> dict[str, Any]:
    """A table from a mapping, or from a name alone; a key that only the user's own has is as good as the name."""
    if not isinstance(value, (str, Mapping)):
        raise ConfigError(f"{key} must be a table or a name, got {value!r}.")
    table = dict(value) if isinstance(value, Mapping) else {"name": value}
    return {"name": "own", **table} if any(own in table for own in OWN.get(key, ())) else table


def chosen(key: str, value: Any, choices: Choices, default: Any) -> Settings:
    """A table's settings, from the settings themselves, a mapping, or a name alone."""
    if isinstance(value, Settings):
        return value
    table = as_table(key, value)
    name = str(table.get("name", getattr(default, "name", "")))
    settings = choices.get(name, choices.get(""))
    if settings is None:
        raise ConfigError(f"{key} {name!r} does not exist. {did_you_mean(name, choices)}")
    if key in OWN and name != "own":
        _refuse_own_keys(key, name, table, choices)
    return settings(**table)


def _refuse_own_keys(key: str, name: str, table: Mapping[str, Any], choices: Choices) -> None:
    """Refuse keys of the user's own data or model beside the name of a built-in one."""
    own, built_in = (choices[which].model_fields for which in ("own", ""))
    for field in table:
        if field in OWN[key]:
            raise ConfigError(f"{key}.{field} and {key}.name={name} exclude each other; leave one away.")
        if field in own and field not in built_in:
            raise ConfigError(f"{key}.{field} goes with {' or '.join(f'{key}.{k}' for k in OWN[key])}; give that too.")
