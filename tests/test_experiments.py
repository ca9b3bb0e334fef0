"""The experiment files: at both scales every run is a valid experiment, and at the paper's scale it is the paper's."""

from pathlib import Path
from typing import Any

import pytest

from dispfl import paper
from dispfl.config import compose
from dispfl.costs.against_paper import CostColumn, Figure, Verdict
from dispfl.costs.estimate import estimate
from dispfl.data.partition import Dirichlet, Pathological
from dispfl.errors import ConfigError
from dispfl.grid import Cell
from dispfl.reproduce.differences import difference
from dispfl.reproduce.experiments import SCALES, Scale, find, folder, names, read
from dispfl.reproduce.placing import PlacedRun, chosen
from dispfl.reproduce.work import dense_flops, hours_left, plan_of, samples_trained
from dispfl.runs.directory import RunDirectory
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
TABLES = [name for name in NAMES if name not in ("curves", "drop", "groups", "masks")]


def runs(name: str, scale: Scale, **asked: Any) -> list[PlacedRun]:
    return find(name, scale).runs(OUT, **asked)


def paths(name: str, scale: Scale) -> set[Path]:
    return {run.cell.path for run in runs(name, scale)}


def test_both_scales_have_the_same_experiments() -> None:
    assert names("laptop") == names("paper") == NAMES


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_every_run_composes_and_stands_beside_a_row_where_the_paper_prints_one(name: str, scale: Scale) -> None:
    experiment = find(name, scale)
    found = experiment.runs(OUT)
    parts, rows = len(experiment.about.parts), len(experiment.about.rows)
    assert len(found) == parts * rows * experiment.about.seeds
    assert all(run.printed is not None for run in found) == (experiment.table is not None)
    assert len({tuple(run.place.items()) for run in found}) == parts * rows


@pytest.mark.parametrize("name", TABLES)
def test_every_printed_row_has_a_run_at_the_papers_scale(name: str) -> None:
    table = find(name, "paper").table
    assert table is not None
    assert {run.printed for run in runs(name, "paper")} == set(table.rows)


@pytest.mark.parametrize(
    ("data", "rounds", "alpha", "classes", "samples"),
    [("cifar10", 500, 0.3, 2, 500), ("cifar100", 500, 0.2, 10, 500), ("tiny-imagenet", 300, 0.2, 20, 1000)],
)
def test_the_papers_setting_is_a_hundred_peers_ten_neighbours_and_five_epochs(
    data: str, rounds: int, alpha: float, classes: int, samples: int
) -> None:
    found = [
        run.cell.experiment for name in TABLES for run in runs(name, "paper", seeds=1) if run.place["data"] == data
    ]
    assert len(found) > 30
    for experiment in found:
        assert (experiment.peers, experiment.rounds, experiment.data.augment) == (100, rounds, True)
        assert (experiment.train.epochs, experiment.train.batch, experiment.train.lr) == (5, 128, 0.1)
        assert (experiment.train.decay, experiment.train.weight_decay) == (0.998, 0.0005)
        assert plan_of(experiment).samples == samples
        assert experiment.partition.test_samples == 100
        topology, partition = experiment.topology, experiment.partition
        assert not isinstance(topology, RandomRegular) or topology.degree == 10
        assert isinstance(partition, Dirichlet | Pathological)
        assert (partition.alpha if isinstance(partition, Dirichlet) else partition.classes) in (alpha, classes)


@pytest.mark.parametrize("name", [name for name in TABLES if name.startswith("rounds")])
def test_the_targets_are_the_papers(name: str) -> None:
    for run in runs(name, "paper", seeds=1):
        assert run.printed is not None
        assert [to.target.value for to in run.printed.rounds_to] == list(run.targets)


@pytest.mark.parametrize("name", [name for name in TABLES if not name.startswith("rounds")])
def test_a_round_costs_what_the_paper_prints(name: str) -> None:
    table = find(name, "paper").table
    assert table is not None
    checked = 0
    for run in runs(name, "paper", seeds=1):
        row = run.printed
        assert row is not None
        if row.partition == "pathological":  # its costs are those of the other partition
            continue
        costs = estimate(plan_of(run.cell.experiment), as_printed=True)
        megabytes = costs.mean_mb if table.comm == "mean" else costs.busiest_mb
        figures: list[tuple[CostColumn, paper.Printed | None, float]] = [
            ("comm", row.comm, megabytes),
            ("flops", row.flops, costs.flops_per_peer),
        ]
        for column, printed, ours in figures:
            erratum = next((one for one in paper.errata() if one.concerns(row, column)), None)
            if printed or erratum:
                assert Figure(row, column, printed, ours, erratum).verdict is not Verdict.OFF
                checked += 1
    assert checked >= len(table.rows) / 2


@pytest.mark.parametrize("scale", SCALES)
def test_what_two_tables_share_is_one_run(scale: Scale) -> None:
    main = paths("main", scale)
    assert paths("curves", scale) <= main
    assert all(paths(f"rounds-{data}", scale) <= main for data in ("cifar10", "cifar100", "tiny-imagenet"))
    assert paths("groups", scale) <= paths("heterogeneous", scale)
    seeds = find("main", scale).about.seeds
    assert len(paths("sparsity", scale) & main) == seeds  # density 0.5
    assert len(paths("topologies-cifar10", scale) & main) == 2 * seeds  # Local, on both partitions
    assert len(paths("drop", scale) & paths("topologies-cifar10", scale)) == 2 * seeds  # Local; nobody ever offline


@pytest.mark.parametrize("name", NAMES)
def test_the_file_says_roughly_what_the_papers_scale_costs(name: str) -> None:
    experiment = find(name, "paper")
    flops = sum(dense_flops(run.cell.experiment) for run in experiment.runs(OUT))
    assert experiment.about.flops == pytest.approx(flops, rel=0.1)


def test_an_experiment_is_found_by_its_name_and_by_what_it_shows() -> None:
    assert {find(name, "laptop").name for name in ("topologies-cifar10", "table-2", "Table 2", "table2")} == {
        "topologies-cifar10"
    }
    with pytest.raises(ConfigError, match=r"There is no experiment 'sparsty'. Did you mean sparsity\?"):
        find("sparsty", "laptop")


def test_a_config_for_dispfl_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("rounds = 3\n")
    with pytest.raises(ConfigError, match=r"own.toml has no table \[reproduce\]; a config without it is for dispfl"):
        find(str(tmp_path / "own.toml"), "laptop")


def test_only_chooses_within_a_kind_and_across_kinds() -> None:
    everything = runs("main", "laptop")
    found = chosen(everything, ["dispfl", "local", "dirichlet", "cifar100"])
    assert [(run.place["method"], run.place["partition"], run.place["data"]) for run in found] == [
        ("local", "dirichlet", "cifar100"),
        ("dispfl", "dirichlet", "cifar100"),
    ]
    assert chosen(everything, []) == everything
    with pytest.raises(ConfigError, match=r"'dispf' is nothing that these runs differ in. Did you mean dispfl\?"):
        chosen(everything, ["dispf"])
    with pytest.raises(ConfigError, match="--only ring,local leaves no run"):
        chosen(runs("topologies-cifar10", "laptop"), ["ring", "local"])


def test_a_setting_that_an_experiment_varies_cannot_be_set_for_all_of_it() -> None:
    with pytest.raises(ConfigError, match="sparsity varies method itself, got method=local"):
        runs("sparsity", "laptop", words=["method=local"])
    with pytest.raises(ConfigError, match=r"main varies data itself, got data.name=mnist"):
        runs("main", "paper", words=["data.name=mnist"])
    with pytest.raises(ConfigError, match=r"sparsity varies method.density itself, got method.density=0.1"):
        runs("sparsity", "laptop", words=["method.density=0.1"])
    found = runs("main", "laptop", words=["rounds=3", "partition.samples=8", "method.alpha_0=0.1"])
    assert {(run.cell.experiment.rounds, run.cell.experiment.partition.samples) for run in found} == {(3, 8)}


def test_a_label_that_no_table_has_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('[reproduce]\nshows = "Table 4"\ntitle = "Mine."\nlabel = "tab:spars"\n')
    with pytest.raises(ConfigError, match=r"reproduce.label 'tab:spars' does not exist. Did you mean tab:spa\?"):
        read(tmp_path / "own.toml").runs(OUT)


def test_a_setting_is_for_all_runs_that_have_it_and_refused_where_none_has() -> None:
    found = [run.cell.experiment.topology for run in runs("drop", "laptop", words=["topology.degree=3"])]
    assert [topology.name for topology in found] == ["random", *["full"] * 5]
    assert isinstance(found[0], RandomRegular)
    assert found[0].degree == 3
    with pytest.raises(ConfigError, match=r"Unknown key topology.degre. Did you mean topology.degree\?"):
        runs("drop", "laptop", words=["topology.degre=3"])


def test_threads_and_the_place_of_the_data_leave_a_run_where_it_is_and_other_settings_do_not() -> None:
    [as_it_is, elsewhere, other] = (
        runs("masks", "laptop", words=words)[0].cell.path
        for words in ([], ["threads=7", "data.dir=/elsewhere"], ["train.lr=0.2"])
    )
    assert as_it_is == elsewhere != other
    assert as_it_is.name == "seed-0"
    assert [run.cell.path.name for run in runs("masks", "laptop", seeds=2)] == ["seed-0", "seed-1"]


def samples(*words: str) -> float:
    """Of two rounds of 20 peers with 96 samples, 100 test samples and 5 epochs."""
    return samples_trained(compose({}, ["peers=20", "rounds=2", "topology.degree=4", *words]))


def test_the_samples_of_a_run_are_counted_by_hand() -> None:
    scoring = 2 * 20 * 100 / 3
    assert samples("method=local") == pytest.approx(2 * 20 * 5 * 96 + scoring)
    assert samples("method=fedavg", "method.cohort=4") == pytest.approx(2 * 4 * 5 * 96 + scoring)
    assert samples("method=fedavg", "method.cohort=40") == samples("method=local")
    assert samples("method=ditto", "method.cohort=4", "method.global_epochs=1") == pytest.approx(
        2 * 4 * 4 * 96 + scoring
    )
    assert samples("method=dispfl") == pytest.approx(2 * 20 * (5 * 96 + 32) + 2 * scoring)  # also scored after mixing
    assert samples("method=dispfl", "method.regrow=random") == pytest.approx(2 * 20 * 5 * 96 + 2 * scoring)
    assert samples("method=dpsgd-ft") == pytest.approx(2 * 20 * 5 * 96 + 20 * 5 * 96 + scoring / 2)  # once, at the end
    assert samples("method=local", "partition.samples=all") == pytest.approx(2 * 20 * 5 * 200 + scoring)  # 4,000 / 20


def test_half_a_run_takes_half_the_hours_and_a_finished_one_none(tmp_path: Path) -> None:
    tiny = ["peers=2", "rounds=4", "topology.degree=1", "train.batch=4", "threads=1"]
    cells = {}
    for name in ("local", "dpsgd", "fedavg"):
        experiment = compose({}, [*tiny, f"method={name}"])
        cells[name] = Cell({"method": name}, experiment, tmp_path / name)
    for name, rounds in (("dpsgd", 2), ("fedavg", 4)):
        directory = RunDirectory.create(tmp_path / name, cells[name].experiment.to_toml())
        for t in range(rounds):
            directory.append({"round": t})
        if rounds == 4:
            directory.write_summary({})
        directory.close()
    local, half = hours_left(cells.values())
    assert (local.method, local.runs, half.method, half.runs) == ("local", 1, "dpsgd", 1)
    assert half.hours == pytest.approx(local.hours / 2)
    assert local.hours > 0


def test_the_line_says_in_what_it_is_not_the_papers() -> None:
    def said(name: str, scale: Scale, *words: str) -> str:
        ours = [run.cell.experiment for run in runs(name, scale, words=words)]
        return difference(ours, [run.cell.experiment for run in runs(name, "paper")])

    assert said("sparsity", "laptop") == (
        "Not the paper's experiment: fashion-sample instead of cifar10; cnn instead of resnet18; "
        "20 instead of 100 peers; 4 instead of 10 neighbours; 20 instead of 500 rounds; "
        "96 instead of 500 samples a peer; 32 instead of 128 samples a batch."
    )
    assert "2 instead of 2, 10 or 20 classes a peer" in said("main", "laptop")
    assert said("sparsity", "paper") == ""
    assert said("sparsity", "paper", "rounds=5") == "Not the paper's experiment: 5 instead of 500 rounds."


def test_every_file_begins_with_what_it_is() -> None:
    for scale in SCALES:
        for name in NAMES:
            file = folder() / scale / f"{name}.toml"
            assert file.read_text().startswith(f"# {read(file).about.shows}")
