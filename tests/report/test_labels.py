"""Labels of rows from their configs, and whether FLOPs are counted or saved."""

from typing import Any

from dispfl.report.labels import (
    COUNTED,
    SAVED,
    connections_note,
    flops_kind,
    flops_note,
    row_labels,
)


def config(method: str = "dispfl", seed: int = 0, rounds: int = 4, **own: Any) -> dict[str, Any]:
    return {"seed": seed, "rounds": rounds, "method": {"name": method, **own}}


WEIGHTS = config(structure="weights", regrow="gradient", layers="erk", density=0.5)
CHANNELS = config(structure="channels", regrow="random", layers="uniform", density=0.5)


def test_channels_stand_beside_the_papers_method() -> None:
    assert row_labels([WEIGHTS, CHANNELS, config("fedavg")]) == [
        "Dis-PFL",
        "Dis-PFL (channels)",
        "FedAvg",
    ]
    assert row_labels([CHANNELS]) == ["Dis-PFL (channels)"]


def test_variants_of_one_kind_are_told_apart_by_what_differs() -> None:
    thin = config(structure="channels", regrow="random", layers="uniform", density=0.2)
    assert row_labels([WEIGHTS, CHANNELS, thin]) == [
        "Dis-PFL",
        "Dis-PFL (channels, density 0.5)",
        "Dis-PFL (channels, density 0.2)",
    ]
    assert row_labels([config(density=0.5), config(density=[0.2, 1.0])]) == [
        "Dis-PFL (density 0.5)",
        "Dis-PFL (density 0.2/1)",
    ]


def test_seeds_of_a_row_have_the_same_label() -> None:
    assert row_labels([config(seed=0), config(seed=1), config("mine")]) == [
        "Dis-PFL",
        "Dis-PFL",
        "mine",
    ]


def test_flops_of_channels_are_saved_and_all_others_counted() -> None:
    assert [flops_kind(one) for one in (WEIGHTS, CHANNELS, config("fedavg"))] == [
        COUNTED,
        SAVED,
        COUNTED,
    ]


def test_the_note_names_the_rows_whose_flops_are_saved() -> None:
    assert flops_note({"a": COUNTED, "b": COUNTED}) == "FLOPs are counted: the kernels are dense."
    assert (
        flops_note({"a": SAVED})
        == "FLOPs are saved: peers train small networks that compute only these."
    )
    assert flops_note({"a": SAVED, "b": COUNTED, "c": SAVED}).startswith(
        "FLOPs of a and c are saved: "
    )
    assert flops_note({"a": SAVED, "b": COUNTED}).endswith(
        "those of the others are counted: the kernels are dense."
    )


def test_many_rows_with_equal_connections_are_not_all_named() -> None:
    counts = {"degree 2": 2, "base": 10, "uniform": 10, "random": 10, "degree 5": 5}
    assert (
        connections_note(counts)
        == "Not at equal connections: a node receives at most 2 models with degree 2, 5 models with"
        " degree 5 and 10 models with the others in a round."
    )


def test_of_many_rows_with_as_many_connections_two_are_named() -> None:
    counts = {f"ring {k}": 2 for k in range(5)} | {f"full {k}": 19 for k in range(3)} | {"local": 0}
    assert (
        connections_note(
            {label: count for label, count in counts.items() if not label.startswith("full")}
        )
        == "Compared at equal connections: no node receives more than 2 models in a round."
    )
    assert (
        connections_note(counts | {f"grid {k}": 4 for k in range(6)})
        == "Not at equal connections: a node receives at most 2 models with ring 0, ring 1 and 3"
        " other rows, 19 models with full 0, full 1 and full 2 and 4 models with the others in a"
        " round."
    )
