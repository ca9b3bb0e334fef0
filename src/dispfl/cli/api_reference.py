"""The reference of the Python API as Markdown, from signatures and docstrings."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, get_args

from dispfl.testing import check_method

WIDTH = 100


@dataclass(frozen=True)
class Section:
    """A part of the page, with public names in order, separated by spaces."""

    title: str
    names: str
    settings: str = ""
    """Settings classes, listed in a table before the names."""
    intro: str = ""


SECTIONS = (
    Section("Run a federation", "Federation Run Experiment EarlyStopping StopRun"),
    Section("Run a real site", "Peer"),
    Section(
        "Methods",
        "Method GossipMethod ServerMethod PeerState Neighbourhood Density spread_densities "
        "check_method",
        "DisPFL Local FedAvg FedAvgFT Ditto FedFOMO SubFedAvg DPSGD DPSGDFT "
        "FedProx SCAFFOLD FedPer FedRep FedBN APFL FedALA "
        "DFedAvgM DFedSAM DFedPGP DADPFL SSFL",
        "A method of your own derives from `GossipMethod` or `ServerMethod`: see [Extend "
        "it](../extend.md).",
    ),
    Section("Training", "Trainer Metric", "Train Privacy Wire"),
    Section("Topologies", "Topology", "RandomRegular Ring Full Grid Exponential GraphTopology"),
    Section(
        "Data and partitions",
        "load_dataset Partition Split",
        "Dirichlet Pathological Grouped IID ByColumn",
    ),
    Section("Networks", "SmallCNN MLP ResNet18 VGG11"),
    Section("Errors", "DispflError ConfigError"),
)
MEMBERS = {"Experiment": {"run", "split"}}
"""Of these classes only some methods are shown."""
LAST_SECTION = "Models as flat vectors"
"""The section of all names that are in no other one."""

INTRO = """\
# Python API

What `from dispfl import ...` offers. Settings classes take the keys of [Settings](settings.md) as
arguments, with the same checks and, except for `Train(batch_size=128)`, `RandomRegular(degree=10)`
and `Dirichlet(samples_per_peer="all")`, with the same defaults. This page is generated from the
docstrings by `make reference`; `help(dispfl.Federation)` prints one in full.
"""


def api_as_markdown() -> str:
    """Return the page: every public name with its signature, first sentence and attributes."""
    public = import_module("dispfl")
    lines = [INTRO.rstrip()]
    for section in (*SECTIONS, _last_section(public.__all__)):
        lines += ["", f"## {section.title}"]
        if section.settings:
            lines += ["", "| settings class | what it is |", "| --- | --- |"]
        for name in section.settings.split():
            meaning = _sentence(getattr(public, name).__doc__)
            lines.append(f"| `{name}` | {_cell(meaning)} |")
        if section.intro:
            lines += ["", section.intro]
        for name in section.names.split():
            described = check_method if name == "check_method" else getattr(public, name)
            lines += ["", f"### `{name}`", "", *_entry(name, described)]
    return "\n".join(lines) + "\n"


def _last_section(public_names: Iterable[str]) -> Section:
    """Return the section of the names that no other section lists."""
    unlisted = set(public_names) - {"__version__"}
    for section in SECTIONS:
        unlisted.difference_update(section.names.split(), section.settings.split())
    return Section(LAST_SECTION, " ".join(sorted(unlisted)))


def _entry(name: str, described: Any) -> Iterator[str]:
    """Yield the lines of a class, a function or a type."""
    if inspect.isclass(described):
        yield from _class(name, described)
    elif inspect.isfunction(described):
        yield from _code(_signature(_definition(described), name))
        yield ""
        yield from _paragraph(_sentence(described.__doc__))
    else:
        yield f"A type for annotations: `{_type_text(described)}`."


def _class(name: str, cls: type) -> Iterator[str]:
    body = _definition(cls)
    assert isinstance(body, ast.ClassDef)
    constructor = _constructor(body)
    if constructor is not None and not issubclass(cls, Exception):
        yield from _code(_signature(constructor, name))
        yield ""
    yield from _paragraph(_sentence(cls.__doc__))

    attributes = _attributes(body)
    if attributes and not issubclass(cls, BaseException):
        yield from ["", "| attribute | meaning |", "| --- | --- |"]
        for attribute, meaning in attributes.items():
            yield f"| `{attribute}` | {_cell(meaning)} |"

    methods = []
    for method in body.body:
        if isinstance(method, ast.FunctionDef) and _is_shown(name, method):
            sentence = _sentence(ast.get_docstring(method))
            parameters = ", ".join(_parameters(method.args, annotated=False))
            methods += _paragraph(f"- `{method.name}({parameters})`: {sentence}", indent="  ")
    if methods:
        yield ""
        yield from methods


def _is_shown(class_name: str, method: ast.FunctionDef) -> bool:
    """Whether a method is public, has a docstring, and is no property."""
    decorators = " ".join(map(ast.unparse, method.decorator_list))
    if method.name.startswith(("_", "model_")) or not ast.get_docstring(method):
        return False
    if "property" in decorators or "validator" in decorators:
        return False
    return method.name in MEMBERS.get(class_name, {method.name})


def _attributes(body: ast.ClassDef) -> dict[str, str]:
    """Return the fields and properties of a class that are described, with their meaning."""
    meanings = {}
    for statement, after in zip(body.body, [*body.body[1:], ast.Pass()], strict=True):
        match statement, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                meanings[name] = _sentence(text)
            case ast.FunctionDef(name=name, decorator_list=[ast.Name(id=decorator)]), _:
                docstring = ast.get_docstring(statement)
                if "property" in decorator and docstring and not name.startswith("_"):
                    meanings[name] = _sentence(docstring)
    return meanings


def _definition(described: Any) -> ast.FunctionDef | ast.ClassDef:
    """Return the syntax tree of a class or function."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(described))).body
    assert isinstance(definition, (ast.FunctionDef, ast.ClassDef))
    return definition


def _constructor(body: ast.ClassDef) -> ast.FunctionDef | None:
    for statement in body.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            return statement
    return None


def _signature(definition: ast.AST, name: str) -> str:
    """Return a signature as it is written, on one line or with one line per parameter."""
    assert isinstance(definition, ast.FunctionDef)
    parameters = _parameters(definition.args)
    result = ""
    if definition.returns is not None and definition.name != "__init__":
        result = f" -> {_annotation(definition.returns)}"
    line = f"{name}({', '.join(parameters)}){result}"
    if len(line) <= WIDTH:
        return line
    parameter_lines = [f"    {parameter}," for parameter in parameters]
    return "\n".join([f"{name}(", *parameter_lines, f"){result}"])


def _parameters(arguments: ast.arguments, *, annotated: bool = True) -> list[str]:
    """Return the parameters without `self` and `cls`."""
    positional = [*arguments.posonlyargs, *arguments.args]
    without_default = len(positional) - len(arguments.defaults)
    defaults = [*[None] * without_default, *arguments.defaults]
    texts = []
    for parameter, default in zip(positional, defaults, strict=True):
        if parameter.arg not in ("self", "cls"):
            texts.append(_parameter(parameter, default, annotated))
    if arguments.vararg is not None:
        texts.append(f"*{_parameter(arguments.vararg, None, annotated)}")
    elif arguments.kwonlyargs:
        texts.append("*")
    for keyword, keyword_default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        texts.append(_parameter(keyword, keyword_default, annotated))
    if arguments.kwarg is not None:
        texts.append(f"**{_parameter(arguments.kwarg, None, annotated)}")
    return texts


def _parameter(parameter: ast.arg, default: ast.expr | None, annotated: bool) -> str:
    text = parameter.arg
    if annotated and parameter.annotation is not None:
        text += f": {_annotation(parameter.annotation)}"
    if default is None:
        return text
    equals = " = " if annotated else "="
    return text + equals + ast.unparse(default).replace("'", '"')


def _annotation(annotation: ast.expr) -> str:
    return ast.unparse(annotation).strip("'\"")


def _type_text(described: Any) -> str:
    """Return a type without what validates it."""
    if hasattr(described, "__metadata__"):
        described = get_args(described)[0]
    return str(described)


def _sentence(docstring: str | None) -> str:
    """Return the first sentence of a docstring, on one line."""
    paragraph = " ".join(inspect.cleandoc(docstring or "").partition("\n\n")[0].split())
    sentence = re.match(r".*?\.(?= [A-Z`(]|$)", paragraph)
    return sentence.group(0) if sentence else paragraph


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _code(text: str) -> list[str]:
    return ["```python", text, "```"]


def _paragraph(text: str, indent: str = "") -> list[str]:
    """Wrap a text; `indent` is for all lines but the first."""
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
