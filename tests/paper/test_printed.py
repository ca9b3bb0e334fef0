"""The paper's tables: the number of printed rows, the digits as printed, and our names."""

from collections import Counter

import pytest

from dispfl import paper
from dispfl.data.catalogue import DATASETS
from dispfl.models.settings import MODELS
from dispfl.registry import METHODS, TOPOLOGIES

ROWS = [row for table in paper.tables() for row in table.rows]


def row(number: int, **wanted: object) -> paper.PrintedRow:
    """Return the only row of a table with these values."""
    [table] = [table for table in paper.tables() if table.number == number]
    [found] = [
        r for r in table.rows if all(getattr(r, name) == value for name, value in wanted.items())
    ]
    return found


def test_nine_tables_have_their_labels_and_all_lines_for_both_partitions() -> None:
    """Table 1 has 27 lines, 2 columns of accuracy each; Table 4 (sparsity) has 5 columns and one
    partition."""
    assert {table.label: len(table.rows) for table in paper.tables()} == {
        "centralized-main-table": 27 * 2,
        "decentralized-main-table": 7 * 2,
        "extended-table": 12 * 2,
        "tab:spa": 5,
        "CIFAR10-convergence": 6 * 2,
        "CIFAR100-convergence": 6 * 2,
        "tiny-convergence": 6 * 2,
        "tab:de-cifar100": 7 * 2,
        "tab:de-tiny": 7 * 2,
    }
    assert [table.number for table in paper.tables()] == list(range(1, 10))


def test_a_row_has_its_accuracy_as_a_fraction_and_its_costs() -> None:
    found = row(1, data="cifar10", method="dispfl", partition="dirichlet")
    assert (found.topology, found.model, found.density) == ("random", "resnet18", 0.5)
    assert found.accuracy is not None
    assert found.accuracy_std is not None
    assert (found.accuracy.value, found.accuracy_std.value) == pytest.approx((0.8570, 0.002))
    assert found.comm is not None
    assert found.flops is not None
    assert (found.comm.value, found.flops.value) == (223.4, 7.0e12)


def test_trailing_zeros_count_as_printed_digits() -> None:
    sparse, half = row(4, density=0.2).comm, row(4, density=0.5).comm
    assert sparse is not None
    assert half is not None
    assert (str(sparse), str(half)) == ("89.30", "223.4")
    assert (sparse.last_digit, half.last_digit) == pytest.approx((0.01, 0.1))


def test_the_flops_of_the_heterogeneous_table_are_in_units_of_1e11() -> None:
    found = row(3, model="vgg11", density=(0.2, 0.4, 0.6, 0.8, 1.0), partition="pathological")
    assert found.flops is not None
    assert (found.flops.value, found.flops.last_digit) == pytest.approx((1.8e12, 1e10))
    assert found.accuracy_std is None


def test_rounds_to_an_unreached_target_are_none() -> None:
    found = row(5, method="fedfomo", partition="dirichlet")
    assert [(to.target.value, to.rounds) for to in found.rounds_to] == [
        (0.6, 204),
        (0.7, None),
        (0.8, None),
    ]
    assert found.accuracy is None


def test_row_keys_are_unique() -> None:
    keys = Counter(
        (r.table, r.data, r.partition, r.topology, r.model, r.method, r.density) for r in ROWS
    )
    assert max(keys.values()) == 1


def test_all_names_exist_in_our_registries() -> None:
    assert {r.method for r in ROWS} <= set(METHODS)
    assert {r.data for r in ROWS} <= set(DATASETS)
    assert {r.model for r in ROWS} <= set(MODELS)
    assert {r.topology for r in ROWS} - {None} <= set(TOPOLOGIES)


def test_every_erratum_concerns_an_existing_number() -> None:
    assert len(paper.errata()) == 4
    for erratum in paper.errata():
        assert any(erratum.concerns(r, erratum.column) for r in ROWS), erratum.sentence


def test_an_erratum_concerns_one_column_of_one_row() -> None:
    [erratum] = [e for e in paper.errata() if e.table == "tab:de-cifar100"]
    ring, full = (
        row(8, topology=t, method="dispfl", partition="dirichlet") for t in ("ring", "full")
    )
    assert erratum.concerns(ring, "flops")
    assert not erratum.concerns(ring, "comm")
    assert not erratum.concerns(full, "flops")


def test_targets_and_final_accuracies_are_consistent_up_to_known_errata() -> None:
    """A transcription check across tables: rounds to 80 % need a final accuracy of about 80 %, and
    the reverse."""
    final = {
        (r.data, r.partition, r.method): r.accuracy.value
        for r in ROWS
        if r.table[:3] == "cen" and r.accuracy
    }
    odd = {
        (r.data, r.partition, r.method)
        for r in ROWS
        for to in r.rounds_to
        if (to.rounds is None) != (final[r.data, r.partition, r.method] < to.target.value)
    }
    assert odd == {("tiny-imagenet", "pathological", "fedavg")}
