"""Imports point one way, and neither `import dispfl` nor `dispfl --help` loads torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dispfl

PACKAGE = Path(dispfl.__file__).parent
TIERS = [
    {"errors", "extras", "files", "processes", "settings", "terminal"},
    {"core"},
    {"channels", "robust", "privacy", "user_functions", "topology", "methods"},
    {"wire", "data", "models", "clock"},
    {"registry"},
    {"config", "experiment", "trust"},
    {"round"},
    {"costs"},
    {"engines"},
    {"runs"},
    {"federation", "peer", "view"},
    {"privacy.audit", "export", "reference", "testing"},
    {"paper", "peer.peer"},
    {"cli"},
]
"""A module may import from its own tier and those before it in this list."""
RANK = {name: rank for rank, tier in enumerate(TIERS) for name in tier}
REPORT_MAY = (
    "dispfl.config",
    "dispfl.core.device_classes",
    "dispfl.core.metric",
    "dispfl.core.names",
    "dispfl.core.quantities",
    "dispfl.core.report",
    "dispfl.registry",
    "dispfl.runs",
    "dispfl.topology",
)
"""Apart from errors, extras, files, settings and terminal: `report` reads run directories only.

`core.quantities` and `core.report` declare what they contain.
"""

Import = tuple[Path, int, str, bool]
"""Where an import stands, what it names, and whether it is delayed into a function."""


def imports(file: Path) -> Iterator[Import]:
    """Every import of the package's own modules in a file; one for type checkers alone counts as
    delayed."""
    tree = ast.parse(file.read_text())
    delayed = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING")
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = ["." * node.level + (node.module or "")]
            if names == ["dispfl"]:  # `from dispfl import core` names modules of their own
                names = [f"dispfl.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name == "dispfl" or name.startswith(("dispfl.", ".")):
                yield file, node.lineno, name, id(node) in delayed


def place(file: Path) -> str:
    """The name under which a file stands in the tiers: `core` for core/rng.py."""
    return room(".".join(file.relative_to(PACKAGE).with_suffix("").parts))


def room(module: str) -> str:
    """The room of a module: its first name, unless a part of that room has a tier of its own."""
    first_two = ".".join(module.split(".")[:2])
    return first_two if first_two in RANK else module.partition(".")[0]


def problem(found: Import) -> str | None:
    """Return what is wrong with an import, as a sentence; None if nothing is."""
    file, line, name, delayed = found
    here, there = place(file), room(name.removeprefix("dispfl."))
    where = f"{file.relative_to(PACKAGE.parent)}, line {line}, imports {name}"
    if name.startswith("."):
        return f"{where}; write the whole name, dispfl...."
    if here == "report":
        fine = there in {"report", *TIERS[0]} or name.startswith(REPORT_MAY)
        return (
            None if fine else f"{where}, but report reads run directories: {', '.join(REPORT_MAY)}."
        )
    if (
        there == "report"
    ):  # a finished run's learning curve needs matplotlib, which is slow to import
        fine = here in ("cli", "paper", "view") or (here == "runs" and delayed)
        return (
            None if fine else f"{where}; only cli, paper and view may, and runs inside a function."
        )
    if here == "experiment" and there == "runs" and delayed:  # Experiment.run
        return None
    for module in (here, there):
        if module not in RANK:
            return f"{where}, and {module} has no tier; give it one in {Path(__file__).name}."
    if RANK[there] > RANK[here]:
        return (
            f"{where}, which is in a later tier; imports point from"
            f" {', '.join(sorted(TIERS[RANK[there]]))} downwards."
        )
    return None


def test_imports_point_one_way() -> None:
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if file != PACKAGE / "__init__.py"]
    found = [one for file in files for one in imports(file)]
    assert len(found) > 50  # the search itself works
    problems = [sentence for sentence in map(problem, found) if sentence]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("file", "name", "delayed", "sentence"),
    [
        (
            "core/rng.py",
            "dispfl.round.round",
            False,
            "core/rng.py, line 7, imports dispfl.round.round, which is in",
        ),
        ("core/rng.py", "dispfl.settings", False, None),
        ("costs/estimate.py", "dispfl.round.ledger", False, None),
        (
            "runs/loop.py",
            "dispfl.federation",
            True,
            "imports dispfl.federation, which is in a later tier",
        ),
        ("runs/execute.py", "dispfl.report.plots", True, None),
        (
            "runs/execute.py",
            "dispfl.report.plots",
            False,
            "only cli, paper and view may, and runs inside a function",
        ),
        (
            "federation.py",
            "dispfl.report.plots",
            True,
            "only cli, paper and view may, and runs inside a function",
        ),
        ("experiment.py", "dispfl.runs.execute", True, None),
        (
            "experiment.py",
            "dispfl.runs.execute",
            False,
            "imports dispfl.runs.execute, which is in a later tier",
        ),
        ("report/plots.py", "dispfl.runs.directory", False, None),
        ("report/plots.py", "dispfl.engines.inprocess", False, "but report reads run directories"),
        ("core/rng.py", ".layout", False, "write the whole name"),
        ("novelty.py", "dispfl.core.rng", False, "novelty has no tier"),
    ],
)
def test_the_check_says_what_is_wrong_and_where(
    file: str, name: str, delayed: bool, sentence: str | None
) -> None:
    said = problem((PACKAGE / file, 7, name, delayed))
    assert said is None if sentence is None else sentence in (said or "")


def python(code: str) -> list[str]:
    """What a fresh Python prints, by lines."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout.splitlines()


HEAVY = (
    "print([name for name in ('torch', 'numpy', 'matplotlib', 'pydantic') if name in sys.modules])"
)


def test_import_dispfl_loads_nothing_heavy() -> None:
    assert python(f"import sys, dispfl; dispfl.__version__; dir(dispfl); {HEAVY}") == ["[]"]


def test_the_help_text_does_not_load_torch() -> None:
    code = (
        "import sys, dispfl.cli\n"
        "sys.argv = ['dispfl', '--help']\n"
        "try: dispfl.cli.main()\n"
        "except SystemExit as end: print('ended with', end.code)\n"
        "print([name for name in ('torch', 'matplotlib') if name in sys.modules])"
    )
    lines = python(code)
    assert any("demo" in line for line in lines)
    assert lines[-2:] == ["ended with 0", "[]"]


def test_the_costs_that_a_run_announces_do_not_load_sympy() -> None:
    """It takes a tenth of the time that a command needs to start."""
    code = (
        "import sys\n"
        "from dispfl.costs.estimate import network\n"
        "from dispfl.models.settings import Model\n"
        "network(Model(), (1, 28, 28), 10)\n"
        "print('sympy' in sys.modules)"
    )
    assert python(code) == ["False"]


@pytest.mark.parametrize("name", dispfl.__all__)
def test_every_public_name_resolves_and_is_listed(name: str) -> None:
    assert getattr(dispfl, name) is not None
    assert name in dir(dispfl)


def test_the_public_names_are_those_that_type_checkers_see() -> None:
    source = ast.parse((PACKAGE / "__init__.py").read_text())
    [block] = [node for node in source.body if isinstance(node, ast.If)]
    seen = {
        alias.asname
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == set(dispfl.__all__) - {"__version__"}


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'dispfl' has no attribute 'Federaton'"):
        _ = dispfl.Federaton
