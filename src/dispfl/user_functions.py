"""Import and call a user's `module:function` or `module:Class`.

Every failure is a ConfigError of one sentence.
"""

import difflib
import importlib
import inspect
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from dispfl.errors import ConfigError
from dispfl.settings import did_you_mean

_WORD = r"[^\W\d]\w*"
_NAME = re.compile(rf"{_WORD}(\.{_WORD})*:{_WORD}")


def checked_name(name: str) -> str:
    """Return a name of the form `module:function`, refuse others.

    For field validators, which put the key before the message.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"must be module:function, got {name!r}; for example mine:load for load() in mine.py."
        )
    return name


def call_factory(key: str, name: str, folder: Path, **offered: Any) -> Any:
    """Call a user's function with those of the offered values that it has parameters for.

    `key` is the setting that names it, for errors. The module is looked up in the folder, then on
    PYTHONPATH, as Python does for a script in that folder.
    """
    function = import_reference(key, name, folder)
    if not callable(function):
        raise ConfigError(
            f"{key} is {name}, which is not a function but a {type(function).__name__}.", key=key
        )
    arguments = _arguments(key, name, function, offered)
    try:
        return function(**arguments)
    except Exception as problem:
        raise ConfigError(
            f"{key} {name} raised {describe_error(problem, folder)}", key=key
        ) from problem


def describe_error(problem: Exception, folder: Path | None) -> str:
    """Return an error's message and the innermost line of the user's code.

    `ValueError: no such site (mine.py, line 7).`
    """
    message = f"{type(problem).__name__}: {problem}".rstrip(".: ")
    if isinstance(problem, SyntaxError) or folder is None:
        # A syntax error's message contains the line.
        return f"{message}."
    for frame in reversed(traceback.extract_tb(problem.__traceback__)):
        file = Path(frame.filename)
        if file.is_relative_to(folder):
            return f"{message} ({file.name}, line {frame.lineno})."
    return f"{message}."


def import_reference(key: str, name: str, folder: Path | None = None) -> Any:
    """Return what a `module:name` reference names; `key` is the setting, for errors.

    The module is looked up in the folder first, if one is given, and then on the Python path.
    """
    module_name, _, attribute = name.partition(":")
    module = _import(key, module_name, folder)
    if not hasattr(module, attribute):
        functions = _functions_of(module)
        hint = f" {did_you_mean(attribute, functions)}" if functions else ""
        raise ConfigError(f"{key} is {name}, but {module_name} has no {attribute}.{hint}", key=key)
    return getattr(module, attribute)


def has_module(folder: Path, name: str) -> bool:
    """Whether a folder has the module of a `module:name`, or its package; nothing is imported."""
    top = name.partition(":")[0].partition(".")[0]
    importlib.invalidate_caches()  # the file may be new
    return PathFinder.find_spec(top, [str(folder)]) is not None


def _functions_of(module: ModuleType) -> list[str]:
    """Return the names of the functions and classes that a module defines itself."""
    names = []
    for name, value in vars(module).items():
        if callable(value) and getattr(value, "__module__", "") == module.__name__:
            names.append(name)
    return names


def _import(key: str, name: str, folder: Path | None) -> ModuleType:
    if folder and str(folder) not in sys.path and has_module(folder, name):
        # It stays there: a function may import other modules of the folder later. A folder without
        # the module is left out: its files must not take the place of installed modules.
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name)
    except Exception as problem:
        if _is_missing(name, problem):
            where = "not installed completely"
            if folder:
                where = f"neither in {folder} nor on PYTHONPATH"
            raise ConfigError(
                f"{key} names the module {name}, which is {where}.{_similar_module(name, folder)}",
                key=key,
            ) from None
        raise ConfigError(
            f"{key}: importing {name} raised {describe_error(problem, folder)}", key=key
        ) from problem
    if folder:
        _check_origin(key, name, module, folder)
    return module


def _is_missing(name: str, problem: Exception) -> bool:
    """Whether a module itself does not exist, rather than one that it imports."""
    if not isinstance(problem, ModuleNotFoundError) or problem.name is None:
        return False
    return f"{name}.".startswith(f"{problem.name}.")


def _similar_module(name: str, folder: Path | None) -> str:
    """Return ` Did you mean my_module?`, or nothing if no module on the path has a similar name."""
    search_path = [str(folder), *sys.path] if folder else sys.path
    modules = {module.name for module in pkgutil.iter_modules(search_path)}
    similar = difflib.get_close_matches(name, modules, n=1, cutoff=0.85)
    return f" Did you mean {similar[0]}?" if similar else ""


def _check_origin(key: str, name: str, module: ModuleType, folder: Path) -> None:
    """Refuse a module if another one of its name is loaded: the wrong code would run unnoticed."""
    path = folder.joinpath(*name.split("."))
    loaded = getattr(module, "__file__", None)
    for expected in (path.with_suffix(".py"), path / "__init__.py"):
        if not expected.is_file():
            continue
        if loaded is not None and expected.samefile(loaded):
            return
        where = f"from {loaded}" if loaded else "by Python itself"
        raise ConfigError(
            f"{key} refers to {expected}, but another module {name} is already loaded {where}."
            " Rename yours.",
            key=key,
        )


def _arguments(
    key: str, name: str, function: Callable[..., Any], offered: dict[str, Any]
) -> dict[str, Any]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C, without a signature
        return {}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    arguments = {}
    for parameter in parameters:
        if parameter.kind in by_name and parameter.name in offered:
            arguments[parameter.name] = offered[parameter.name]
        elif parameter.default is inspect.Parameter.empty and parameter.kind not in variadic:
            reason = "it is called without arguments"
            if offered:
                reason = f"only {' and '.join(offered)} can be passed"
            raise ConfigError(
                f"{key} {name} requires {parameter.name}, but {reason}. Give {parameter.name} a"
                " default.",
                key=key,
            )
    return arguments
