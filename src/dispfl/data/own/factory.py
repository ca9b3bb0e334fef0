"""A site's own code, by name: `module:function` is imported and called, and what goes wrong is said in a sentence."""

import importlib
import inspect
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
    """The name itself, if it has the form of one; for field validators, which finish the sentence."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"must be module:function, got {name!r}; for example mine:load for load() in mine.py.")
    return name


def call(key: str, name: str, folder: Path, **offered: Any) -> Any:
    """What the function returns, called with those of the offered values that it takes by name.

    `key` is the setting that names it, for errors. The module is looked for in the folder, then on PYTHONPATH, as
    Python does for a script of that folder.
    """
    function = _find(key, name, folder)
    arguments = _arguments(key, name, function, offered)
    try:
        return function(**arguments)
    except Exception as problem:
        raise ConfigError(f"{key} {name} raised {describe(problem, folder)}") from problem


def describe(problem: Exception, folder: Path) -> str:
    """`ValueError: no such site (mine.py, line 7).`: the message, and the last line of the site's code under way."""
    message = f"{type(problem).__name__}: {problem}".rstrip(".: ")
    if isinstance(problem, SyntaxError):  # its message says where
        return f"{message}."
    frames = [frame for frame in traceback.extract_tb(problem.__traceback__) if _inside(frame.filename, folder)]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{message}{where}."


def _find(key: str, name: str, folder: Path) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    module = _import(key, module_name, folder)
    if not hasattr(module, function_name):
        there = [
            n
            for n, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == module_name
        ]
        hint = f" {did_you_mean(function_name, there)}" if there else ""
        raise ConfigError(f"{key} is {name}, but {module_name} has no {function_name}.{hint}")
    function = getattr(module, function_name)
    if not callable(function):
        raise ConfigError(f"{key} is {name}, which is no function but a {type(function).__name__}.")
    return function  # type: ignore[no-any-return]


def _import(key: str, name: str, folder: Path) -> ModuleType:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # it stays: a function may import its neighbours when it is called
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as problem:
        if problem.name is None or not f"{name}.".startswith(f"{problem.name}."):  # a module that it imports itself
            raise ConfigError(f"{key}: importing {name} raised {describe(problem, folder)}") from problem
        raise ConfigError(f"{key} names the module {name}, which is neither in {folder} nor on PYTHONPATH.") from None
    except Exception as problem:
        raise ConfigError(f"{key}: importing {name} raised {describe(problem, folder)}") from problem
    _demand_the_sites_own(key, name, module, folder)
    return module


def _demand_the_sites_own(key: str, name: str, module: ModuleType, folder: Path) -> None:
    """Refuse another module of the same name, loaded before: the wrong code would run in silence."""
    parts = folder.joinpath(*name.split("."))
    meant = next((file for file in (parts.with_suffix(".py"), parts / "__init__.py") if file.is_file()), None)
    loaded = getattr(module, "__file__", None)
    if meant and (loaded is None or not meant.samefile(loaded)):
        where = f"from {loaded}" if loaded else "by Python itself"
        raise ConfigError(f"{key} means {meant}, but another {name} is loaded already {where}. Rename yours.")


def _arguments(key: str, name: str, function: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
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
            offers = f"it is given {' and '.join(offered)} if it takes them" if offered else "it is called with nothing"
            raise ConfigError(f"{key} {name} wants {parameter.name}, but {offers}. Give {parameter.name} a default.")
    return {argument: value for argument, value in offered.items() if argument in taken}


def _inside(file: str, folder: Path) -> bool:
    return Path(file).is_relative_to(folder)
