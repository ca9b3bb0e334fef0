"""The numbers that the paper prints, all tables of it: `tables()` and `errata()`."""

from dispfl.paper.printed import Erratum, Printed, RoundsTo, Row, Table, errata, tables

__all__ = ["Erratum", "Printed", "RoundsTo", "Row", "Table", "errata", "tables"]
