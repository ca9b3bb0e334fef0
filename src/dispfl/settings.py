"""The base class of all settings: frozen, unknown keys refused, and errors as sentences.

A component's settings are a subclass beside the component that names its table in the config file.
The same class serves the Python API (`DisPFL(density=0.2)`) and the command line
(`method.density=0.2`), so both have the same checks and the same error messages.
"""

import difflib
import inspect
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, get_args, get_origin

import annotated_types
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails

from dispfl.errors import ConfigError


class Settings(BaseModel):
    """Base class of all settings. `table` is their table in the config file: `method` for
    `method.density`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )
    table: ClassVar[str] = ""

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_for_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and _is_number(
            cls.model_fields[str(info.field_name)].annotation
        ):
            raise ValueError(f"must be a number, got {str(value).lower()}.")
        return value

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as problem:
            errors = [_config_error(type(self), error) for error in problem.errors()]
            sentences = dict.fromkeys(map(str, errors))
            raise ConfigError(" ".join(sentences), key=errors[0].key) from None


def _is_number(annotation: Any) -> bool:
    """Whether a field takes a number, or else nothing or a word: `int`, `float | None`, `int |
    Literal["all"]`."""
    kinds = {
        kind for kind in get_args(annotation) or (annotation,) if get_origin(kind) is not Literal
    }
    return bool(kinds & {int, float}) and kinds <= {int, float, type(None)}


class Component(Settings):
    """Settings of one of several components of a kind, such as a method; `name` is its name in
    tables and reports.

    A subclass that does not set its own name is called by its class name.
    """

    name: str = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        annotations = inspect.get_annotations(cls)
        if "name" not in annotations:
            cls.__annotations__ = {**annotations, "name": str}
            cls.name = cls.__name__


OTHER_WORDS = {
    "clients": "peers",
    "dataset": "data",
    "learning_rate": "lr",
    "network": "model",
    "nodes": "peers",
    "sparsity": "density",
}
"""What other programs and papers call some of our settings."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `Did you mean density?`, or the list of known names if none is similar.

    Of dotted keys only those of the same table are compared, without it: a common `train.` does not
    make keys similar.
    """
    table, dot, last = name.rpartition(".")
    inside = {
        key.removeprefix(f"{table}{dot}"): key
        for key in sorted(known)
        if key.rpartition(".")[0] == table
    }
    if not inside:  # an unknown table, or names of another kind
        inside = {key: key for key in sorted(known)}
        last = name
    our_word = OTHER_WORDS.get(last)
    if our_word in inside:
        hint = ", which is 1 - sparsity" if last == "sparsity" else ""
        return f"Did you mean {inside[our_word]}{hint}?"

    last = last.lower()
    by_lower_case = {key.lower(): whole_key for key, whole_key in inside.items()}
    similar = [key for key in by_lower_case if last and key.startswith(last)]
    similar = similar or difflib.get_close_matches(last, by_lower_case, n=1, cutoff=0.5)
    if similar:
        return f"Did you mean {by_lower_case[similar[0]]}?"
    return f"Known: {', '.join(by_lower_case.values())}."


def check_known(name: str, known: Iterable[str]) -> str:
    """Return a known name, refuse others; for field validators, whose key begins the sentence
    raised here."""
    known = list(known)
    if name not in known:
        raise ValueError(f"{name!r} does not exist. {did_you_mean(name, known)}")
    return name


def _config_error(cls: type[Settings], error: ErrorDetails) -> ConfigError:
    """Return one of pydantic's errors as a sentence about the key that it refuses."""
    raised = error.get("ctx", {}).get("error")
    if isinstance(raised, ConfigError):  # raised by a validator of ours, as a whole sentence
        return raised
    name = str(error["loc"][0]) if error["loc"] else ""
    key = f"{cls.table}.{name}" if cls.table else name
    return ConfigError(_sentence(cls, error, name, key), key=key or None)


def _sentence(cls: type[Settings], error: ErrorDetails, name: str, key: str) -> str:
    if error["type"] == "extra_forbidden":
        prefix = f"{cls.table}." if cls.table else ""
        return (
            f"Unknown key {key}."
            f" {did_you_mean(key, (prefix + field for field in cls.model_fields))}"
        )
    if error["type"] == "missing":
        return f"{key} is missing; give it a value."
    got = repr(error["input"])
    if error["type"] == "value_error":  # raised by a validator of ours: the rest of the sentence
        return f"{key} {error['ctx']['error']}"
    field = cls.model_fields.get(name)
    allowed = _allowed(field.annotation) if field else ""
    limits = bounds(field.metadata) if field else ""
    if allowed:
        return f"{key} must be {allowed}, got {got}."
    if limits and error["type"].startswith(("greater", "less")):
        return f"{key} must be {limits}, got {got}."
    wanted = {
        "finite": "a finite number",
        "int": "a whole number",
        "float": "a number",
        "string": "text",
        "bool": "true or false",
    }
    kind = next((text for start, text in wanted.items() if error["type"].startswith(start)), "")
    if kind:
        return f"{key} must be {within(kind, limits)}, got {got}."
    return f"{key}: {error['msg']}, got {got}."


def _allowed(annotation: Any) -> str:
    """Return `'train' or 'skip'` for a Literal, otherwise an empty string."""
    if get_origin(annotation) is not Literal:
        return ""
    names = [repr(value) for value in get_args(annotation)]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def within(kind: str, limits: str) -> str:
    """Return a kind of value with its limits: `a whole number of at least 1`."""
    if not limits:
        return kind
    return f"{kind} of {limits}" if limits.startswith("at ") else f"{kind} {limits}"


def bounds(metadata: Iterable[Any]) -> str:
    """Return a field's limits as `in (0, 1]`, `at least 1` or `above 0`."""
    low = high = ""
    low_closed = high_closed = False
    for limit in metadata:
        match limit:
            case annotated_types.Gt(gt=value):
                low = str(value)
            case annotated_types.Ge(ge=value):
                low, low_closed = str(value), True
            case annotated_types.Lt(lt=value):
                high = str(value)
            case annotated_types.Le(le=value):
                high, high_closed = str(value), True
    if low and high:
        return f"in {'[' if low_closed else '('}{low}, {high}{']' if high_closed else ')'}"
    if low:
        return f"{'at least' if low_closed else 'above'} {low}"
    if high:
        return f"{'at most' if high_closed else 'below'} {high}"
    return ""
