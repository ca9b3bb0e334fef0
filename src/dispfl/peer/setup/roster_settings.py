"""The settings that a roster carries, so that a new site needs one file and one fingerprint.

Only what the sites of a federation share: no site lets a file of others name its data or its
network, set its limits, or choose code that it runs.
"""

import json
from collections.abc import Mapping
from typing import Any

from dispfl.errors import ConfigError

SHARED = (
    "seed",
    "rounds",
    "smallest_density",
    "data",
    "model",
    "method",
    "topology",
    "train",
    "wire",
    "task",
    "metric",
    "eval_every",
    "schedule",
    "staleness",
)
"""The keys of a config file that a roster may have."""
LOCAL_DATA = ("path", "test_path", "dir", "hub", "reload")
"""Where a site's data is, and when new rows are taken in."""
NAMED = ("data", "model", "method", "topology")
"""Tables whose name may refer to code."""


def roster_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a roster; refuse what is each site's own, and names of code."""
    for key in settings:
        if key not in SHARED:
            _refuse_local(key)
    tables = {key: _table(settings[key]) for key in NAMED if key in settings}
    for key in LOCAL_DATA:
        if key in tables.get("data", {}):
            _refuse_local(f"data.{key}")
    schedule = settings.get("schedule")
    if isinstance(schedule, Mapping):  # hours are each site's own, the mode is a term of all
        for key in schedule:
            if key != "mode":
                _refuse_local(f"schedule.{key}")
    for name, table in tables.items():
        _refuse_code(name, table.get("name"))
        _refuse_code(f"{name}.factory", table.get("factory"))
    metrics = settings.get("metric", [])
    for metric in metrics if isinstance(metrics, list) else [metrics]:
        _refuse_code("metric", metric)
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(settings), allow_nan=False))
    except (TypeError, ValueError) as problem:
        raise ConfigError(f"The settings of a roster are plain values: {problem}.") from None
    return plain


def _table(value: Any) -> Mapping[str, Any]:
    """A table, which may be given by its name alone."""
    return value if isinstance(value, Mapping) else {"name": value}


def _refuse_local(key: str) -> None:
    raise ConfigError(
        f"{key} is each site's own and does not belong into a roster; the site sets it: dispfl peer"
        f" init ... {key}=VALUE. Omit it.",
        key=key,
    )


def _refuse_code(key: str, value: Any) -> None:
    """A name with a colon would be imported, `module:name`."""
    if isinstance(value, str) and ":" in value:
        raise ConfigError(
            f"{key} is {value!r}, which names code; a roster does not choose the code that sites"
            f" run. Omit it; the site sets it: dispfl peer init ... {key}={value}",
            key=key,
        )
