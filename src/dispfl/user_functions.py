"""Import a user's `module:function` or `module:Class`, and call it; every failure is a ConfigError
of one sentence."""

import difflib
import importlib
import inspect
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from dispfl.errors import ConfigError
from dispfl.settings import did_you_mean

_WORD = r"[^\W\d]\w*"
_NAME = re.compile(rf"{_WORD}(\.{_WORD})*:{_WORD}")


def checked_name(name: str) -> str:
    """Return the name if it has the form `module:function`; for field validators, which prefix the
    message."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"must be module:function, got {name!r}; for example mine:load for load() in mine.py."
        )
    return name


def call_factory(key: str, name: str, folder: Path, **offered: Any) -> Any:
    """Call the function with those of the offered values that it has parameters for, and return its
    result.

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
    """`ValueError: no such site (mine.py, line 7).`: the message, and the innermost line of the
    user's code."""
    message = f"{type(problem).__name__}: {problem}".rstrip(".: ")
    if (
        isinstance(problem, SyntaxError) or folder is None
    ):  # a syntax error's message contains the line
        return f"{message}."
    frames = [
        frame
        for frame in traceback.extract_tb(problem.__traceback__)
        if _inside(frame.filename, folder)
    ]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{message}{where}."


def import_reference(key: str, name: str, folder: Path | None = None) -> Any:
    """Return what a `module:name` reference names; `key` is the setting, for errors.

    The module is looked up in the folder first, if one is given, and then on the Python path.
    """
    module_name, _, attribute = name.partition(":")
    module = _import(key, module_name, folder)
    if not hasattr(module, attribute):
        there = [
            n
            for n, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == module_name
        ]
        hint = f" {did_you_mean(attribute, there)}" if there else ""
        raise ConfigError(f"{key} is {name}, but {module_name} has no {attribute}.{hint}", key=key)
    return getattr(module, attribute)


def _import(key: str, name: str, folder: Path | None) -> ModuleType:
    if folder and str(folder) not in sys.path:
        sys.path.insert(
            0, str(folder)
        )  # kept: a function may import other modules of the folder later
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as problem:
        if problem.name is None or not f"{name}.".startswith(
            f"{problem.name}."
        ):  # another module, which it imports
            raise ConfigError(
                f"{key}: importing {name} raised {describe_error(problem, folder)}", key=key
            ) from problem
        where = f"neither in {folder} nor on PYTHONPATH" if folder else "not installed completely"
        raise ConfigError(
            f"{key} names the module {name}, which is {where}.{_similar_module(name)}", key=key
        ) from None
    except Exception as problem:
        raise ConfigError(
            f"{key}: importing {name} raised {describe_error(problem, folder)}", key=key
        ) from problem
    if folder:
        _check_origin(key, name, module, folder)
    return module


def _similar_module(name: str) -> str:
    """Return ` Did you mean my_module?`, or nothing if no module on the path has a similar name."""
    near = difflib.get_close_matches(
        name, {module.name for module in pkgutil.iter_modules()}, n=1, cutoff=0.85
    )
    return f" Did you mean {near[0]}?" if near else ""


def _check_origin(key: str, name: str, module: ModuleType, folder: Path) -> None:
    """Refuse if another module of the same name was loaded earlier: the wrong code would run
    unnoticed."""
    parts = folder.joinpath(*name.split("."))
    expected = next(
        (file for file in (parts.with_suffix(".py"), parts / "__init__.py") if file.is_file()), None
    )
    loaded = getattr(module, "__file__", None)
    if expected and (loaded is None or not expected.samefile(loaded)):
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
    taken = {p.name for p in parameters if p.kind in by_name}
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in parameters:
        needed = parameter.default is inspect.Parameter.empty and parameter.kind not in optional
        if needed and (parameter.name not in offered or parameter.name not in taken):
            offers = (
                f"only {' and '.join(offered)} can be passed"
                if offered
                else "it is called without arguments"
            )
            raise ConfigError(
                f"{key} {name} requires {parameter.name}, but {offers}. Give {parameter.name} a"
                " default.",
                key=key,
            )
    return {argument: value for argument, value in offered.items() if argument in taken}


def _inside(file: str, folder: Path) -> bool:
    return Path(file).is_relative_to(folder)
