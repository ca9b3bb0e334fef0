"""The runs of a grid, which of them are done, interrupted or missing, and that they are
comparable."""

from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refused

from dispfl.config import read_toml
from dispfl.core.flat_module import FlatModule
from dispfl.errors import ConfigError, RunError
from dispfl.methods.dispfl import DisPFL
from dispfl.runs.directory import read_labels
from dispfl.runs.execute import ExperimentRun
from dispfl.runs.grid import (
    GridCallbacks,
    GridRun,
    RunState,
    check_grid,
    methods_grid,
    reference_names,
    run_missing,
    save_labels,
    sweep_grid,
)
from dispfl.runs.loop import RunObserver

TINY = [
    "peers=3",
    "rounds=1",
    "topology.degree=2",
    "partition.samples_per_peer=8",
    "partition.test_samples_per_peer=4",
    "train.epochs=1",
    "workers=1",
]
OUT = Path("out")


def folders(cells: list[GridRun]) -> list[str]:
    return [str(cell.path.relative_to(OUT)) for cell in cells]


def densities(cells: list[GridRun]) -> list[Any]:
    return [
        cell.experiment.method.density
        for cell in cells
        if isinstance(cell.experiment.method, DisPFL)
    ]


def test_all_methods_at_the_first_seed_come_before_the_next_seed() -> None:
    cells = methods_grid(["dispfl", "local", "seed=5"], {}, 2, OUT)
    assert folders(cells) == ["dispfl/seed-5", "local/seed-5", "dispfl/seed-6", "local/seed-6"]
    assert [cell.experiment.seed for cell in cells] == [5, 5, 6, 6]
    assert [cell.row for cell in cells[:2]] == [{"method": "dispfl"}, {"method": "local"}]
    assert [cell.title for cell in cells[1:3]] == ["local seed 5", "dispfl seed 6"]


def test_a_setting_applies_to_all_and_a_methods_setting_to_those_that_have_it() -> None:
    cells = methods_grid(["dispfl", "rounds=7", "local", "method.density=0.2"], {}, 1, OUT)
    assert [(cell.experiment.method.name, cell.experiment.rounds) for cell in cells] == [
        ("dispfl", 7),
        ("local", 7),
    ]
    assert densities(cells) == [0.2]
    assert [cell.steps for cell in cells] == [7 * 16, 7 * 16]


def test_a_configs_method_table_applies_to_the_method_it_names(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('rounds = 3\n[method]\nname = "dispfl"\ndensity = 0.3\n')
    cells = methods_grid(["local", "dispfl"], read_toml(tmp_path / "c.toml"), 1, OUT)
    assert [cell.experiment.rounds for cell in cells] == [3, 3]
    assert densities(cells) == [0.3]


def test_a_method_named_twice_runs_once() -> None:
    assert folders(methods_grid(["local", "local"], {}, 1, OUT)) == ["local/seed-0"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["dispfl", "locl"], "method 'locl' does not exist. Did you mean local?"),
        (["dispfl", "a.toml"], "method 'a.toml' does not exist. Give a config file with -c."),
        (["rounds=3"], "Name the methods to compare. There are: dispfl, local"),
        (
            ["dispfl", "method=local"],
            "Name the methods to compare without 'method=', got 'method=local'.",
        ),
        (
            ["local", "method.density=0.2"],
            ("None of these methods (local) has the key method.density. Known: method.private."),
        ),
        (
            ["dispfl", "method.densty=0.2"],
            "has the key method.densty. Did you mean method.density?",
        ),
        (["dispfl", "roundz=3"], "Unknown key roundz. Did you mean rounds?"),
    ],
)
def test_an_invalid_comparison_is_refused(arguments: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        methods_grid(arguments, {}, 1, OUT)
    assert sentence in str(caught.value)


def test_a_variant_of_a_method_is_a_row_with_a_folder_of_its_own() -> None:
    variant = "dispfl@method.structure=channels,method.density=[0.2,0.8]"
    cells = methods_grid(["dispfl", variant, "local", "method.alpha_0=0.1", "rounds=3"], {}, 2, OUT)
    assert folders(cells)[:3] == [
        "dispfl/seed-0",
        "dispfl@method.structure=channels,method.density=_0.2,0.8/seed-0",
        "local/seed-0",
    ]
    assert [cell.row["method"] for cell in cells[:3]] == ["dispfl", variant, "local"]
    weights, channels = (cell.experiment.method for cell in cells[:2])
    assert isinstance(weights, DisPFL)
    assert isinstance(channels, DisPFL)
    assert (weights.structure, weights.density, weights.regrow) == ("weights", 0.5, "gradient")
    assert (channels.structure, channels.density, channels.regrow) == (
        "channels",
        (0.2, 0.8),
        "random",
    )
    assert (weights.alpha_0, channels.alpha_0) == (0.1, 0.1)
    assert {cell.experiment.rounds for cell in cells} == {3}


def test_a_variants_own_setting_has_priority_over_that_of_all() -> None:
    assert densities(
        methods_grid(["dispfl", "dispfl@method.density=0.2", "method.density=0.7"], {}, 1, OUT)
    ) == [
        0.7,
        0.2,
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["dispfl@"],
            (
                "'dispfl@' must be METHOD@KEY=VALUE[,KEY=VALUE...], such as"
                " dispfl@method.structure=channels"
            ),
        ),
        (
            ["dispfl@method.density=0.2,0.4"],
            "a value with commas needs brackets, as in method.density=[0.2,0.5].",
        ),
        (["@method.density=0.2"], "'@method.density=0.2' names no method before the @"),
        (
            ["dispfl@method=local"],
            "'dispfl@method=local' changes the method; name the method before the @",
        ),
        (
            ["dispfl@data.name=mnist"],
            "changes data.name, but all rows of a comparison have the same peers and data.",
        ),
        (
            ["dispfl@seed=3"],
            "changes seed, but all rows of a comparison have the same peers and data.",
        ),
        (["dispfl@structure=channels"], "Unknown key structure. Did you mean method.structure?"),
        (["dispfl@method.structure=rows"], "method.structure must be"),
        (["disfl@method.density=0.2"], "method 'disfl' does not exist. Did you mean dispfl?"),
        (["local@method.density=0.2"], "density"),
        (
            ["dispfl", "dispfl@method.structure=weights"],
            "dispfl and dispfl@method.structure=weights have the same settings; omit one of them.",
        ),
        (
            ["dispfl@method.density=[0.2]", "dispfl@method.density={0.2}"],
            "would share the folder dispfl@method.density=_0.2; omit one.",
        ),
    ],
)
def test_an_invalid_variant_is_refused(arguments: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        methods_grid(arguments, {}, 1, OUT)
    assert sentence in str(caught.value)


def test_an_invalid_config_of_a_method_that_is_not_compared_is_refused_too() -> None:
    with refused(ConfigError, key="method.density"):
        methods_grid(["local"], {"method": {"name": "dispfl", "density": 20}}, 1, OUT)


def test_a_sweep_has_a_folder_for_each_value() -> None:
    cells = sweep_grid(["method.density=0.2,0.4", "rounds=3"], {}, 2, OUT)
    assert folders(cells) == [
        f"method.density={d}/seed-{s}" for s in (0, 1) for d in ("0.2", "0.4")
    ]
    assert densities(cells) == [0.2, 0.4, 0.2, 0.4]
    assert {cell.experiment.rounds for cell in cells} == {3}
    assert cells[0].title == "method.density=0.2 seed 0"


def test_several_swept_keys_give_every_combination() -> None:
    cells = sweep_grid(["peers=8,16", "train.lr=0.1,0.2,0.3"], {}, 1, OUT)
    assert [(cell.experiment.peers, cell.experiment.train.lr) for cell in cells] == [
        (peers, lr) for peers in (8, 16) for lr in (0.1, 0.2, 0.3)
    ]
    assert cells[1].row == {"peers": "8", "train.lr": "0.2"}
    assert folders(cells)[1] == "peers=8,train.lr=0.2/seed-0"


def test_lists_in_brackets_are_single_values() -> None:
    cells = sweep_grid(["method.density=[0.2,0.4],[0.5]"], {}, 1, OUT)
    assert densities(cells) == [(0.2, 0.4), (0.5,)]


def test_the_structure_of_masks_can_be_swept() -> None:
    cells = sweep_grid(["method.structure=weights,channels"], {}, 1, OUT)
    assert folders(cells) == ["method.structure=weights/seed-0", "method.structure=channels/seed-0"]
    assert [
        cell.experiment.method.structure
        for cell in cells
        if isinstance(cell.experiment.method, DisPFL)
    ] == [
        "weights",
        "channels",
    ]


def test_structures_and_densities_are_swept_together_with_the_defaults_of_each() -> None:
    cells = sweep_grid(
        ["method.structure=weights,channels", "method.density=0.2,[0.2,0.8]", "rounds=3"],
        {},
        1,
        OUT,
    )
    methods = [cell.experiment.method for cell in cells]
    assert [
        (method.structure, method.density, method.regrow)
        for method in methods
        if isinstance(method, DisPFL)
    ] == [
        ("weights", 0.2, "gradient"),
        ("weights", (0.2, 0.8), "gradient"),
        ("channels", 0.2, "random"),
        ("channels", (0.2, 0.8), "random"),
    ]
    assert folders(cells)[3] == "method.structure=channels,method.density=[0.2,0.8]/seed-0"


def test_methods_can_be_swept_too() -> None:
    cells = sweep_grid(["method=dispfl,local"], {}, 1, OUT)
    assert [cell.experiment.method.name for cell in cells] == ["dispfl", "local"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["method.density=[0.2,0.4]"],
            "Nothing to sweep: give a key several values, such as method.density=0.2,0.5.",
        ),
        (["local"], "Expected key=value, got 'local'. To compare methods use dispfl compare."),
        (
            ["seed=0,1"],
            "For several seeds use --seeds 3, which takes the config's seed and the next two.",
        ),
        (["data.dir='a/b','a_b'"], "Two runs of the sweep would share the folder data.dir='a_b'"),
        (["method.density=0.2,20"], "method.density must be in (0, 1], got 20."),
    ],
)
def test_an_invalid_sweep_is_refused(arguments: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sweep_grid(arguments, {}, 1, OUT)
    assert sentence in str(caught.value)


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> list[GridRun]:
    """Dis-PFL and Local at one seed, both finished; not to be changed."""
    cells = methods_grid(["dispfl", "local", *TINY], {}, 1, tmp_path_factory.mktemp("grid"))
    assert [cell.state for cell in cells] == [RunState.MISSING] * 2
    run_missing(cells)
    return cells


def test_two_methods_with_the_same_seed_have_the_same_split_and_test_data(
    grid: list[GridRun],
) -> None:
    one, other = ((cell.path / "split.safetensors").read_bytes() for cell in grid)
    assert one == other


def test_two_methods_with_the_same_seed_start_from_the_same_weights(
    grid: list[GridRun], tmp_path: Path
) -> None:
    weights = []
    for cell in grid:
        created = ExperimentRun.create(cell.experiment, tmp_path / cell.row["method"])
        created.directory.close()
        weights.append(FlatModule(created.context.module()).read())
    assert weights[0].norm() > 0
    assert torch.equal(*weights)


def test_finished_runs_are_skipped(grid: list[GridRun]) -> None:
    assert [cell.state for cell in grid] == [RunState.DONE] * 2
    watched: list[GridRun] = []

    def watch(cell: GridRun) -> RunObserver:
        watched.append(cell)
        return RunObserver()

    run_missing(grid, GridCallbacks(run=watch))
    assert watched == []


def test_interrupted_runs_are_resumed_and_missing_ones_started(tmp_path: Path) -> None:
    cells = methods_grid(["dispfl", "local", *TINY, "rounds=2"], {}, 1, tmp_path)
    rounds: list[int] = []

    def stop(record: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_missing(cells, GridCallbacks(run=lambda cell: RunObserver(round=stop)))
    assert [cell.state for cell in cells] == [RunState.INTERRUPTED, RunState.MISSING]
    watched = RunObserver(round=lambda record: rounds.append(record["round"]))
    run_missing(cells, GridCallbacks(run=lambda cell: watched))
    assert rounds == [1, 0, 1]  # Dis-PFL's second round, then both of Local's
    assert [cell.state for cell in cells] == [RunState.DONE] * 2


def test_a_directory_of_another_experiment_is_refused_before_anything_runs(
    grid: list[GridRun],
) -> None:
    out = grid[0].path.parents[1]
    check_grid(grid)
    for override, sentence in (
        (
            "train.lr=0.2",
            (
                "dispfl/seed-0 was run with train.lr=0.1, got 0.2. Give the settings that it was"
                " run with"
            ),
        ),
        (
            "rounds=2",
            (
                r"was run with rounds=1, got 2 \(the prune rate depends on it, unless"
                r" method.horizon is set\)"
            ),
        ),
    ):
        with pytest.raises(RunError, match=sentence):
            check_grid(methods_grid(["dispfl", "local", *TINY, override], {}, 1, out))


def test_the_number_of_workers_may_differ(grid: list[GridRun]) -> None:
    check_grid(
        methods_grid(["dispfl", "local", *TINY, "workers=2"], {}, 1, grid[0].path.parents[1])
    )


def test_a_label_names_a_row_and_is_no_setting(tmp_path: Path) -> None:
    variants = ['dispfl@label="ours, sparse",method.density=0.2', "dispfl@label=plain", "local"]
    cells = methods_grid(variants, {}, 1, tmp_path)
    assert [(cell.path.parent.name, cell.label) for cell in cells] == [
        ("dispfl@method.density=0.2", "ours, sparse"),
        ("dispfl", "plain"),
        ("local", ""),
    ]
    assert cells[1].experiment == methods_grid(["dispfl"], {}, 1, tmp_path)[0].experiment

    save_labels(cells, tmp_path)
    assert read_labels(tmp_path) == {"dispfl@method.density=0.2": "ours, sparse", "dispfl": "plain"}
    save_labels(methods_grid(["dispfl"], {}, 1, tmp_path), tmp_path)
    assert read_labels(tmp_path) == {"dispfl@method.density=0.2": "ours, sparse"}
    with refused(ConfigError, key="label"):
        methods_grid(["dispfl@label="], {}, 1, tmp_path)


def test_values_of_a_sweep_have_labels() -> None:
    cells = sweep_grid(["method.density=0.2@label=sparse,0.5", "peers=4,8"], {}, 1, OUT)
    assert [cell.row for cell in cells[:2]] == [
        {"method.density": "sparse", "peers": "4"},
        {"method.density": "sparse", "peers": "8"},
    ]
    assert [cell.label for cell in cells[1:3]] == ["sparse, peers=8", ""]
    assert cells[0].path == OUT / "method.density=0.2,peers=4" / "seed-0"
    assert densities(cells) == [0.2, 0.2, 0.5, 0.5]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("ours", {"method": "dispfl@method.density=0.2"}),
        ("dispfl@method.density=0.2", {"method": "dispfl@method.density=0.2"}),
        ("local", {"method": "local"}),
    ],
)
def test_a_reference_is_a_row_or_its_label(text: str, names: dict[str, str]) -> None:
    cells = methods_grid(["dispfl@method.density=0.2,label=ours", "local"], {}, 1, OUT)
    assert reference_names(cells, text) == names


def test_a_reference_of_a_sweep_is_a_value() -> None:
    cells = sweep_grid(["method=dispfl,local", "data=mnist,fashion-mnist"], {}, 1, OUT)
    assert reference_names(cells, "local") == {"method": "local"}
    assert reference_names(cells, "method=local") == {"method": "local"}
    with refused(ConfigError, key="--against"):
        reference_names(cells, "fedavg")
