"""Whose code a config may name: that of folders which this user made on this machine.

A config names code as `module:name` (a method, a model's factory, a metric, ...), and to import a
module is to run it. A config that a user gives to `run`, `compare`, `sweep`, `costs` or `up` is
theirs, as a Makefile is. A run directory or a site's folder may come from somebody else. The code
that its config names is imported only if this user made the folder here, or says `--trust`, and
never from inside a run directory. Built-in components and those that installed packages declare as
entry points need nothing.

Folders are remembered outside of them, in the user's state directory: the path, a random id that is
also written into the folder, and the code that its config names. So neither a copy, nor another
folder at the same path, nor a config that names other code is taken for the user's own. Where the
state directory or the folder cannot be written, this process alone remembers: the next one needs
`--trust`.

A real site's folder is its operator's, who edits site.toml: it is remembered without its code. At a
site, code is imported from the site's folder and from the modules in `allow_modules` of site.toml,
which no config of a federation can set.
"""

import contextlib
import hashlib
import json
import os
import secrets
import sys
import tomllib
from collections.abc import Collection, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from dispfl.errors import ConfigError, DispflError
from dispfl.files import SITE, read_regular, write_atomically
from dispfl.registry import FUNCTIONS, REGISTRIES, as_table, is_installed
from dispfl.user_functions import has_module

FOLDER_ID = ".folder-id"
"""The file with a folder's id."""
Code = tuple[tuple[str, str], ...]
"""Keys of a config with the `module:name` that they have."""
_OF_A_SITE = "site"
ALLOW_MODULES = "allow_modules"
_accepted: set[tuple[Path, str]] = set()
"""The folders of this process, each with the code that its config names."""


def named_code(config: Mapping[str, Any]) -> Code:
    """Return the `module:name` of all code that a config names, each with its key."""
    code = []
    for key in REGISTRIES.keys() & config.keys():
        name = as_table(key, config[key]).get("name")
        if isinstance(name, str) and ":" in name:
            code.append((key, name))
    for key in FUNCTIONS.keys() & config.keys():
        factory = as_table(key, config[key]).get("factory")
        if factory is not None:
            code.append((f"{key}.factory", str(factory)))
    if config.get("loss") is not None:
        code.append(("loss", str(config["loss"])))
    metrics = config.get("metric", ())
    for name in metrics if isinstance(metrics, list | tuple) else [metrics]:
        if isinstance(name, str) and ":" in name:
            code.append(("metric", name))
    return tuple((key, name) for key, name in sorted(code) if not is_installed(name))


def remember(folder: Path, config: Mapping[str, Any]) -> None:
    """Remember a run directory as this user's own: they made it, or trust it."""
    code = named_code(config)
    if code:
        _remember(folder, json.dumps(code))


def remember_site(folder: Path) -> None:
    """Remember a site's folder as this user's own, whatever code its site.toml names."""
    _remember(folder, _OF_A_SITE)


def check_run(
    folder: Path, config: Mapping[str, Any], own: Mapping[str, Any] | None = None
) -> None:
    """Refuse a run directory of somebody else whose config names code.

    `own` is a config that the user gave: the code that it names is theirs.
    """
    code = named_code(config)
    if not code:
        return
    if own is not None and named_code(own) == code:
        _accepted.add((folder.resolve(), json.dumps(code)))
    elif not _is_remembered(folder, json.dumps(code)):
        raise _untrusted(folder, code)
    for key, name in code:
        if _lies_in(folder, name):
            raise ConfigError(
                f"{key} is {name}, a module inside {folder}, which may come from somebody else:"
                " code is never imported from a run directory. If it is yours, move it to the"
                " folder that you work in.",
                key=key,
            )


def check_site(folder: Path, config: Mapping[str, Any], *, trust: bool = False) -> None:
    """Refuse a site of somebody else whose settings name code, and code that is not allowed."""
    if trust:
        remember_site(folder)
    code = named_code(config)
    if not code:
        return
    if not _is_remembered(folder, _OF_A_SITE):
        raise _untrusted(folder, code)
    site = tomllib.loads(read_regular(folder / SITE).decode())
    check_modules(folder, code, site.get(ALLOW_MODULES, ()))


def check_modules(folder: Path, code: Code, allowed: Collection[str]) -> None:
    """Refuse code that is neither in a site's folder nor in a module that its operator allows."""
    for key, name in code:
        module = name.partition(":")[0]
        is_allowed = any(f"{module}.".startswith(f"{package}.") for package in allowed)
        if not is_allowed and not has_module(folder, name):
            raise ConfigError(
                f"{key} is {name}, but the module {module} is neither in {folder} nor allowed"
                " there. If you trust it, add it to allow_modules in site.toml (dispfl peer init"
                f" --allow-module {module}).",
                key=key,
            )


def _untrusted(folder: Path, code: Code) -> ConfigError:
    names = " and ".join(f"{key} is {name}" for key, name in code)
    return ConfigError(
        f"{names}, and importing that runs code. {folder} was not made by you on this"
        " machine, or was moved or changed since; if you trust its origin, add --trust (in Python,"
        " trust=True).",
        key=code[0][0],
    )


def _remember(folder: Path, code: str) -> None:
    path = folder.resolve()
    _accepted.add((path, code))
    if _is_recorded(path, code):
        return
    folder_id = secrets.token_hex(16)
    record = {"folder": str(path), "id": folder_id, "code": code}
    with contextlib.suppress(
        OSError, RuntimeError, DispflError
    ):  # then this process alone remembers
        file = _record_file(path)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path / FOLDER_ID, folder_id.encode(), durable=False)
        write_atomically(file, json.dumps(record).encode(), durable=False)


def _is_remembered(folder: Path, code: str) -> bool:
    path = folder.resolve()
    return (path, code) in _accepted or _is_recorded(path, code)


def _is_recorded(path: Path, code: str) -> bool:
    """Whether the user's state directory has the path with this code and the folder's id."""
    try:
        record = json.loads(read_regular(_record_file(path)))
        folder_id = read_regular(path / FOLDER_ID).decode()
    except (OSError, ValueError, RuntimeError):
        return False
    return bool(record == {"folder": str(path), "id": folder_id, "code": code})


def _record_file(path: Path) -> Path:
    """Return the file that remembers a folder: `~/.local/state/dispfl/folders/HASH.json`."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():
        state = Path.home() / ".local" / "state"
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:32]
    return state / "dispfl" / "folders" / f"{name}.json"


def _lies_in(folder: Path, name: str) -> bool:
    """Whether Python would import a module from inside a folder; nothing is imported to tell."""
    search_path = [str(Path.cwd()), *sys.path]
    top = name.partition(":")[0].partition(".")[0]
    spec = PathFinder.find_spec(top, search_path)
    if spec is None:
        return False
    locations = [spec.origin] if spec.origin else []
    locations += spec.submodule_search_locations or []
    return any(_is_inside(Path(location), folder) for location in locations)


def _is_inside(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())
