"""The experiment files: every run is a valid experiment, and at paper scale it has the paper's
settings."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from messages import refused

from dispfl import paper
from dispfl.config import differing_keys
from dispfl.costs.estimate import CostInputs, estimate
from dispfl.data.partition import Dirichlet, Pathological
from dispfl.errors import ConfigError
from dispfl.paper.experiments import (
    SCALES,
    PaperRun,
    Scale,
    experiment_names,
    experiments_folder,
    find_experiment,
    read_experiment,
    select_runs,
)
from dispfl.paper.printed_costs import ComparedCost, CostColumn, CostVerdict
from dispfl.paper.workload import dense_flops
from dispfl.registry import METHODS
from dispfl.topology import RandomRegular

OUT = Path("out")
NAMES = [
    "curves",
    "drop",
    "groups",
    "heterogeneous",
    "main",
    "masks",
    "rounds-cifar10",
    "rounds-cifar100",
    "rounds-tiny-imagenet",
    "sparsity",
    "topologies-cifar10",
    "topologies-cifar100",
    "topologies-tiny-imagenet",
]
CLAIMS = ["generalization", "parts", "topologies"]
"""What the paper says without a table or figure of its own."""
AT_THE_DESK = ["cifar10", "cifar100", "little-data", "two-classes"]
"""At desktop scale only."""
ALL = frozenset(METHODS)
NOT_PRINTED: dict[str, frozenset[str]] = {
    "cifar10": frozenset(),
    "two-classes": frozenset({"local", "fedavg-ft", "dpsgd-ft"}),
}
"""By experiment, the methods that the paper's table does not have; others have no table."""
PARTS: dict[str, list[Any]] = {
    "method.regrow": ["random"],
    "method.alpha_0": [0.0, 0.1, 0.3],
    "method.warm_up": [False],
    "method.layers": ["uniform"],
    "method.first_masks": ["common"],
    "method.first_weights": ["own"],
    "method.density": [1.0],
    "topology.degree": [2, 5, 20],
}
TABLES = [name for name in NAMES if name not in ("curves", "drop", "groups", "masks")]


def runs(name: str, scale: Scale, **options: Any) -> list[PaperRun]:
    return find_experiment(name, scale).runs(OUT, **options)


def paths(name: str, scale: Scale) -> set[Path]:
    return {run.cell.path for run in runs(name, scale)}


def test_all_scales_have_the_same_experiments() -> None:
    both = sorted(NAMES + CLAIMS)
    assert {scale: experiment_names(scale) for scale in SCALES} == {
        "laptop": both,
        "desktop": sorted(both + AT_THE_DESK),
        "paper": both,
    }


@pytest.mark.parametrize(
    ("name", "scale"), [*product(CLAIMS, SCALES), *product(AT_THE_DESK, ["desktop"])]
)
def test_every_run_of_a_claim_is_another_row(name: str, scale: Scale) -> None:
    found = runs(name, scale, seeds=1)
    assert (
        len({tuple(run.cell.row.items()) for run in found})
        == len({run.cell.path for run in found})
        == len(found)
    )
    experiment = find_experiment(name, scale)
    if scale != "laptop":
        flops = dense_flops({run.cell.path: run.cell for run in experiment.runs(OUT)}.values())
        assert experiment.about.flops == pytest.approx(flops, rel=0.1)


@pytest.mark.parametrize(
    ("name", "data", "partition", "samples", "batch", "rounds", "decay", "seeds", "rows"),
    [
        ("little-data", "cifar10", 0.3, 100, 32, 300, 0.9967, 3, 11),
        ("two-classes", "cifar10", 2, 500, 128, 150, 0.993348, 1, 11),
        ("cifar10", "cifar10", 0.3, 500, 128, 200, 0.995007, 1, 10),
        ("cifar100", "cifar100", 0.3, 500, 128, 100, 0.99004, 1, 7),
        ("parts", "cifar10", 0.3, 100, 32, 100, 0.99004, 1, 13),
        ("generalization", "cifar10", 0.3, 100, 32, 100, 0.99004, 1, 6),
    ],
)
def test_the_regimes_at_the_desk(
    name: str,
    data: str,
    partition: float,
    samples: int,
    batch: int,
    rounds: int,
    decay: float,
    seeds: int,
    rows: int,
) -> None:
    """100 peers, 10 neighbours or a cohort of 10, 20 steps a round; the learning rate ends at
    0.037."""
    found = runs(name, "desktop")
    assert len(found) == seeds * rows
    for run in found:
        ours, labels = run.cell.experiment, run.labels
        assert (ours.data.name, ours.peers, ours.rounds, ours.model.name) == (
            data,
            100,
            rounds,
            "cnn",
        )
        split = ours.partition
        assert (
            split.alpha if isinstance(split, Dirichlet) else getattr(split, "classes", None)
        ) == partition
        assert (ours.training_samples, ours.train.batch_size, ours.train.lr_decay) == (
            samples,
            batch,
            decay,
        )
        assert ours.train.local_steps(samples) == 20
        assert ours.train.lr * decay**rounds == pytest.approx(0.037, abs=0.0005)
        assert getattr(ours.method, "cohort", 10) == 10
        assert isinstance(ours.topology, RandomRegular)
        assert (
            ours.topology.degree == 10 or labels["variant"] == f"{ours.topology.degree} neighbours"
        )
        assert ours.eval_every == (10 if name == "little-data" else 1)
        assert (run.printed is None) == (
            labels["variant"] in ("channels", "affinity")
            or ours.method.name in NOT_PRINTED.get(name, ALL)
        )


def test_the_parts_differ_from_dispfl_in_one_setting_each() -> None:
    first, *others = runs("parts", "desktop")
    for run in others:
        [(key, (_, value))] = differing_keys(first.cell.experiment, run.cell.experiment).items()
        assert key in PARTS
        assert value in PARTS[key]
    assert sum(map(len, PARTS.values())) == len(others)


def test_an_experiment_of_another_scale_is_named(tmp_path: Path) -> None:
    with refused(ConfigError, key="--scale"):
        find_experiment("little-data", "laptop")


def test_settings_that_make_variants_cannot_be_overridden() -> None:
    with refused(ConfigError, key="method.warm_up"):
        runs("parts", "laptop", overrides=["method.warm_up=false"])
    assert {
        run.cell.experiment.rounds for run in runs("parts", "laptop", overrides=["rounds=2"])
    } == {2}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_every_run_is_valid_and_has_a_printed_row_where_the_paper_has_a_table(
    name: str, scale: Scale
) -> None:
    experiment = find_experiment(name, scale)
    found = experiment.runs(OUT)
    parts, rows = len(experiment.about.parts), len(experiment.about.rows)
    assert len(found) == parts * rows * experiment.about.seeds
    assert all(run.printed is not None for run in found) == (experiment.table is not None)
    assert len({tuple(run.labels.items()) for run in found}) == parts * rows


@pytest.mark.parametrize("name", TABLES)
def test_every_printed_row_has_a_run_at_the_papers_scale(name: str) -> None:
    table = find_experiment(name, "paper").table
    assert table is not None
    assert {run.printed for run in runs(name, "paper")} == set(table.rows)


@pytest.mark.parametrize(
    ("data", "rounds", "alpha", "classes", "samples"),
    [
        ("cifar10", 500, 0.3, 2, 500),
        ("cifar100", 500, 0.2, 10, 500),
        ("tiny-imagenet", 300, 0.2, 20, 1000),
    ],
)
def test_the_papers_settings_are_100_peers_10_neighbours_and_5_epochs(
    data: str, rounds: int, alpha: float, classes: int, samples: int
) -> None:
    found = [
        run.cell.experiment
        for name in TABLES
        for run in runs(name, "paper", seeds=1)
        if run.labels["data"] == data
    ]
    assert len(found) > 30
    for experiment in found:
        assert (experiment.peers, experiment.rounds, experiment.data.augment) == (100, rounds, True)
        assert (experiment.train.epochs, experiment.train.batch_size, experiment.train.lr) == (
            5,
            128,
            0.1,
        )
        assert (experiment.train.lr_decay, experiment.train.weight_decay) == (0.998, 0.0005)
        assert experiment.training_samples == samples
        assert experiment.partition.test_samples_per_peer == 100
        topology, partition = experiment.topology, experiment.partition
        assert not isinstance(topology, RandomRegular) or topology.degree == 10
        assert isinstance(partition, Dirichlet | Pathological)
        assert (partition.alpha if isinstance(partition, Dirichlet) else partition.classes) in (
            alpha,
            classes,
        )


@pytest.mark.parametrize("name", NAMES)
def test_the_desktop_has_the_papers_federation_with_a_small_network_and_fewer_rounds(
    name: str,
) -> None:
    """At the end of a run of T rounds the learning rate is that of the paper at its end: decay^T =
    0.998^500."""

    def key(run: PaperRun) -> str:  # without the digest of the settings
        return str(run.cell.path.parent).rpartition("-")[0]

    papers = {key(run): run.cell.experiment for run in reversed(runs(name, "paper", seeds=1))}
    rounds = {"cifar10": 200, "cifar100": 100, "tiny-imagenet": 60}
    for run in runs(name, "desktop"):
        ours, paper = run.cell.experiment, papers[key(run)]
        assert (ours.peers, ours.topology, ours.data.augment) == (paper.peers, paper.topology, True)
        assert ours.training_samples == paper.training_samples
        assert getattr(ours.method, "cohort", 10) == 10
        assert ours.model.name == "cnn"
        assert ours.rounds == rounds[ours.data.name]
        assert ours.train.lr_decay**ours.rounds == pytest.approx(
            paper.train.lr_decay**paper.rounds, rel=1e-4
        )
        fixed = {"lr_decay": 1.0}
        assert ours.train.model_copy(update=fixed) == paper.train.model_copy(update=fixed)


def test_the_three_data_sets_of_the_laptops_table_1_differ() -> None:
    found = runs("main", "laptop")
    assert len({run.cell.path for run in found}) == len(found) == 54
    data = {run.labels["data"]: run.cell.experiment.data for run in found}
    assert {name: settings.name for name, settings in data.items()} == {
        "cifar10": "fashion-sample",
        "cifar100": "fashion-turned-20",
        "tiny-imagenet": "fashion-turned-40",
    }
    assert not any(settings.augment for settings in data.values())


@pytest.mark.parametrize("name", [name for name in TABLES if name.startswith("rounds")])
def test_the_targets_are_the_papers(name: str) -> None:
    for run in runs(name, "paper", seeds=1):
        assert run.printed is not None
        assert [to.target.value for to in run.printed.rounds_to] == list(run.targets)


@pytest.mark.parametrize("name", [name for name in TABLES if not name.startswith("rounds")])
def test_a_round_costs_what_the_paper_prints(name: str) -> None:
    table = find_experiment(name, "paper").table
    assert table is not None
    checked = 0
    for run in runs(name, "paper", seeds=1):
        row = run.printed
        assert row is not None
        if row.partition == "pathological":  # same costs as the other partition
            continue
        costs = estimate(CostInputs.of(run.cell.experiment), as_printed=True)
        megabytes = costs.mean_mb if table.comm == "mean" else costs.busiest_mb
        figures: list[tuple[CostColumn, paper.PrintedNumber | None, float]] = [
            ("comm", row.comm, megabytes),
            ("flops", row.flops, costs.flops_per_peer),
        ]
        for column, printed, ours in figures:
            erratum = next((one for one in paper.errata() if one.concerns(row, column)), None)
            if printed or erratum:
                assert (
                    ComparedCost(row, column, printed, ours, erratum).verdict is not CostVerdict.OFF
                )
                checked += 1
    assert checked >= len(table.rows) / 2


@pytest.mark.parametrize("scale", SCALES)
def test_tables_share_runs(scale: Scale) -> None:
    main = paths("main", scale)
    assert paths("curves", scale) <= main
    assert all(
        paths(f"rounds-{data}", scale) <= main for data in ("cifar10", "cifar100", "tiny-imagenet")
    )
    assert paths("groups", scale) <= paths("heterogeneous", scale)
    seeds = find_experiment("main", scale).about.seeds
    assert len(paths("sparsity", scale) & main) == seeds  # density 0.5
    assert len(paths("topologies-cifar10", scale) & main) == 2 * seeds  # Local, on both partitions
    assert (
        len(paths("drop", scale) & paths("topologies-cifar10", scale)) == 2 * seeds
    )  # Local, and drop probability 0


@pytest.mark.parametrize("scale", ["desktop", "paper"])
@pytest.mark.parametrize("name", NAMES)
def test_the_flops_in_the_file_are_approximately_those_of_its_runs(name: str, scale: Scale) -> None:
    experiment = find_experiment(name, scale)
    flops = dense_flops({run.cell.path: run.cell for run in experiment.runs(OUT)}.values())
    assert experiment.about.flops == pytest.approx(flops, rel=0.1)


def test_an_experiment_is_found_by_its_name_and_by_its_table() -> None:
    assert {
        find_experiment(name, "laptop").name
        for name in ("topologies-cifar10", "table-2", "Table 2", "table2")
    } == {"topologies-cifar10"}
    with refused(ConfigError):
        find_experiment("sparsty", "laptop")


def test_a_config_for_dispfl_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("rounds = 3\n")
    with refused(ConfigError):
        find_experiment(str(tmp_path / "own.toml"), "laptop")


def test_only_selects_the_union_within_a_label_and_the_intersection_across_labels() -> None:
    everything = runs("main", "laptop")
    found = select_runs(everything, ["dispfl", "local", "dirichlet", "cifar100"])
    assert [
        (run.labels["method"], run.labels["partition"], run.labels["data"]) for run in found
    ] == [
        ("local", "dirichlet", "cifar100"),
        ("dispfl", "dirichlet", "cifar100"),
    ]
    assert select_runs(everything, []) == everything
    with pytest.raises(
        ConfigError, match=r"'dispf' matches no label of these runs. Did you mean dispfl\?"
    ):
        select_runs(everything, ["dispf"])
    with pytest.raises(ConfigError) as refused:
        select_runs(everything, ["xyz"])
    assert (
        str(refused.value)
        == "--only 'xyz' matches no label of these runs. They differ in data: cifar10, cifar100,"
        " tiny-imagenet; partition: dirichlet, pathological; method: local, fedavg, fedavg-ft,"
        " dpsgd, dpsgd-ft, ditto, fedfomo, subfedavg, dispfl; density: 1, 0.5."
    )
    with pytest.raises(ConfigError, match="--only ring,local selects no run"):
        select_runs(runs("topologies-cifar10", "laptop"), ["ring", "local"])


def test_a_key_that_an_experiment_varies_cannot_be_overridden() -> None:
    with refused(ConfigError, key="method"):
        runs("sparsity", "laptop", overrides=["method=local"])
    with refused(ConfigError, key="data"):
        runs("main", "paper", overrides=["data.name=mnist"])
    with refused(ConfigError, key="method.density"):
        runs("sparsity", "laptop", overrides=["method.density=0.1"])
    found = runs(
        "main",
        "laptop",
        overrides=["rounds=3", "partition.samples_per_peer=8", "method.alpha_0=0.1"],
    )
    assert {
        (run.cell.experiment.rounds, run.cell.experiment.partition.samples_per_peer)
        for run in found
    } == {(3, 8)}


def test_an_unknown_table_label_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(
        '[reproduce]\nshows = "Table 4"\ntitle = "Mine."\nlabel = "tab:spars"\n'
    )
    with refused(ConfigError, key="reproduce.label"):
        read_experiment(tmp_path / "own.toml").runs(OUT)


def test_an_override_applies_to_runs_with_its_key_and_is_refused_if_none_has_it() -> None:
    found = [
        run.cell.experiment.topology
        for run in runs("drop", "laptop", overrides=["topology.degree=3"])
    ]
    assert [topology.name for topology in found] == ["random", *["full"] * 5]
    assert isinstance(found[0], RandomRegular)
    assert found[0].degree == 3
    with refused(ConfigError, key="topology.degre"):
        runs("drop", "laptop", overrides=["topology.degre=3"])


def test_workers_and_data_dir_do_not_change_the_run_directory_but_other_settings_do() -> None:
    [default, moved, other] = (
        runs("masks", "laptop", overrides=overrides)[0].cell.path
        for overrides in ([], ["workers=7", "data.dir=/elsewhere"], ["train.lr=0.2"])
    )
    assert default == moved != other
    assert default.name == "seed-0"
    assert [run.cell.path.name for run in runs("masks", "laptop", seeds=2)] == ["seed-0", "seed-1"]


def test_every_file_begins_with_its_table_or_figure() -> None:
    for scale in SCALES:
        for name in NAMES:
            file = experiments_folder() / scale / f"{name}.toml"
            assert file.read_text().startswith(f"# {read_experiment(file).about.shows}")
