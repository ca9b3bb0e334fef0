"""The paper: its printed numbers (`tables()`, `errata()`), and its experiments with our results.

Dai et al., "DisPFL: Towards Communication-Efficient Personalized Federated Learning via
Decentralized Sparse Training", ICML 2022. Importing this package loads the printed numbers only.
"""

from dispfl.paper.printed import (
    Erratum,
    PrintedNumber,
    PrintedRounds,
    PrintedRow,
    PrintedTable,
    errata,
    tables,
)

__all__ = [
    "Erratum",
    "PrintedNumber",
    "PrintedRounds",
    "PrintedRow",
    "PrintedTable",
    "errata",
    "tables",
]
