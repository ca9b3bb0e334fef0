"""The base class of all settings: frozen, unknown keys refused, and errors as sentences.

A component's settings are a subclass beside the component that names its table in the config file.
The same class serves the Python API (`DisPFL(density=0.2)`) and the command line
(`method.density=0.2`), so both have the same checks and the same error messages.
"""

import difflib
import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin

import annotated_types
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails

from dispfl.errors import ConfigError


class Settings(BaseModel):
    """Base class of all settings.

    `table` is their table in the config file: `method` for `method.density`.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )
    table: ClassVar[str] = ""

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_for_number(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and _is_number(annotation):
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
    """Whether a field takes a number, and besides at most None or certain words.

    `int`, `float | None`, `int | Literal["all"]`.
    """
    types = set()
    for member in get_args(annotation) or (annotation,):
        if get_origin(member) is not Literal:
            types.add(member)
    return bool(types & {int, float}) and types <= {int, float, type(None)}


class Component(Settings):
    """Settings of one of several components of a kind, such as a method.

    `name` is its name in tables and reports. A subclass that does not set its own name is called by
    its class name.
    """

    name: str = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        annotations = inspect.get_annotations(cls)
        if "name" not in annotations:
            cls.__annotations__ = {**annotations, "name": str}
            cls.name = cls.__name__

    @classmethod
    def located(cls, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Return settings with the paths of files in a site's folder; by default there are none."""
        return settings


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
    table, _, last = name.rpartition(".")
    keys = sorted(known)
    inside = {}
    for key in keys:
        key_table, _, key_name = key.rpartition(".")
        if key_table == table:
            inside[key_name] = key
    if not inside:  # an unknown table, or names of another kind
        inside = dict(zip(keys, keys, strict=True))
        last = name
    our_word = OTHER_WORDS.get(last)
    if our_word in inside:
        hint = ", which is 1 - sparsity" if last == "sparsity" else ""
        return f"Did you mean {inside[our_word]}{hint}?"

    last = last.lower()
    by_lower_case = {key_name.lower(): key for key_name, key in inside.items()}
    similar = []
    if last:
        similar = [key_name for key_name in by_lower_case if key_name.startswith(last)]
    if not similar:
        similar = difflib.get_close_matches(last, by_lower_case, n=1, cutoff=0.5)
    if similar:
        return f"Did you mean {by_lower_case[similar[0]]}?"
    return f"Known: {', '.join(by_lower_case.values())}."


def check_known(name: str, known: Iterable[str]) -> str:
    """Return a known name, refuse others.

    For field validators, which put the key before the message.
    """
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
    error_type = error["type"]
    if error_type == "extra_forbidden":
        prefix = f"{cls.table}." if cls.table else ""
        keys = [prefix + field for field in cls.model_fields]
        return f"Unknown key {key}. {did_you_mean(key, keys)}"
    if error_type == "missing":
        return f"{key} is missing; give it a value."
    if error_type == "value_error":  # raised by a validator of ours: the rest of the sentence
        return f"{key} {error['ctx']['error']}"

    value = repr(error["input"])
    limits = ""
    field = cls.model_fields.get(name)
    if field is not None:
        allowed = _allowed(field.annotation)
        if allowed:
            return f"{key} must be {allowed}, got {value}."
        limits = bounds(field.metadata)
    if limits and error_type.startswith(("greater", "less")):
        return f"{key} must be {limits}, got {value}."
    for start, expected in EXPECTED_VALUES.items():
        if error_type.startswith(start):
            return f"{key} must be {within(expected, limits)}, got {value}."
    return f"{key}: {error['msg']}, got {value}."


EXPECTED_VALUES = {
    "finite": "a finite number",
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "bool": "true or false",
}
"""What a field takes, by the beginning of pydantic's type of an error."""


def _allowed(annotation: Any) -> str:
    """Return `'train' or 'skip'` for a Literal, otherwise an empty string."""
    if get_origin(annotation) is not Literal:
        return ""
    *names, last_name = map(repr, get_args(annotation))
    if not names:
        return last_name
    return f"{', '.join(names)} or {last_name}"


def within(value_type: str, limits: str) -> str:
    """Return a type of value with its limits: `a whole number of at least 1`."""
    if not limits:
        return value_type
    if limits.startswith("at "):
        return f"{value_type} of {limits}"
    return f"{value_type} {limits}"


def bounds(metadata: Iterable[Any]) -> str:
    """Return a field's limits as `in (0, 1]`, `at least 1` or `above 0`."""
    low = high = ""  # as ends of an interval: `(0`, `1]`
    low_words = high_words = ""
    for limit in metadata:
        match limit:
            case annotated_types.Gt(gt=value):
                low = f"({value}"
                low_words = f"above {value}"
            case annotated_types.Ge(ge=value):
                low = f"[{value}"
                low_words = f"at least {value}"
            case annotated_types.Lt(lt=value):
                high = f"{value})"
                high_words = f"below {value}"
            case annotated_types.Le(le=value):
                high = f"{value}]"
                high_words = f"at most {value}"
    if low and high:
        return f"in {low}, {high}"
    return low_words or high_words
