"""What `dispfl peer data` prints."""

import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from dispfl.peer.setup.site_data import DataStatus

SHOWN = 8
"""Classes and columns that are shown."""


def print_data(status: "DataStatus", console: Console) -> None:
    """Print a site's data, one line for each fact."""
    table = Table.grid(padding=(0, 2))
    for name, text in _facts(status).items():
        table.add_row(name, escape(text))
    console.print(table)


def _facts(status: "DataStatus") -> dict[str, str]:
    rows = f"{status.training} training, {status.test} test"
    if status.validation:
        rows = f"{status.training} training, {status.validation} validation, {status.test} test"
    facts = {"source": f"{status.source} ({status.kind})", "rows": rows}
    if status.left_out:
        facts["left out"] = f"{status.left_out} test rows, which were trained on before"
    if status.digest is not None:
        facts["digest"] = status.digest[:16]
    facts["classes"] = _listed(status.classes)
    if status.columns:
        facts["columns"] = _listed(status.columns)
    if status.mean is not None and status.std is not None:
        facts["scaling"] = _scaling(status.columns, status.mean, status.std)
    if status.contract is None:
        facts["taken in"] = "at the first start of the node"
    else:
        facts["taken in"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.contract))
    facts["changed"] = f"{status.changes}" if status.changes else "nothing since then"
    if status.contract is None:
        del facts["changed"]
    return facts


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown}, ... ({len(names)})"


def _scaling(columns: list[str], mean: list[float], std: list[float]) -> str:
    """`age 52.1 ± 13.2, bmi 26 ± 4.3`: what is subtracted, and by what is divided."""
    if set(mean) == {0.0} and set(std) == {1.0}:
        return "none"
    names = columns or [f"channel {number}" for number in range(len(mean))]
    texts = []
    for name, centre, deviation in zip(names, mean, std, strict=False):
        texts.append(f"{name} {centre:.4g} ± {deviation:.4g}")
    return _listed(texts)
