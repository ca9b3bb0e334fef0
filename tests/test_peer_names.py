"""Peers with names: in settings, metrics, frames, checkpoints and exports; names from a column."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from messages import refused
from torch import Tensor, nn

from dispfl import DisPFL, Federation, Ring, Run, Train
from dispfl.config import compose
from dispfl.core.names import names_from
from dispfl.data.datasets import load_dataset
from dispfl.data.partition import ByColumn
from dispfl.errors import ConfigError, RunError
from dispfl.experiment import Experiment, Simulation
from dispfl.export.personal import personal_model
from dispfl.peer.local_federation import create_run, setup_of_peer
from dispfl.report.runs import read_run
from dispfl.runs.directory import personal_states, read_config
from dispfl.runs.execute import ExperimentRun
from dispfl.runs.prepare import split_dataset

Points = Callable[[int, int], tuple[Tensor, Tensor]]


def network() -> nn.Module:
    return nn.Linear(4, 3)


def federation(points: Points, names: list[str] | None, **settings: Any) -> Federation:
    data = [(points(20, k), points(10, 9 + k)) for k in range(3)]
    peers: Any = data if names is None else dict(zip(names, data, strict=True))
    made = {"train": Train(epochs=1), "rounds": 2, **settings}
    return Federation(network, peers, DisPFL(), Ring(), **made)


def test_names_are_in_config_metrics_frames_states_and_checkpoints(
    points: Points, tmp_path: Path
) -> None:
    run = federation(points, ["Oslo", "Tromso", "Bergen"]).run(tmp_path / "run")
    roster = ["Bergen", "Oslo", "Tromso"]
    assert run.config["names"] == roster
    assert run.metrics.roster == roster
    assert sorted(run.states) == roster
    assert sorted(run.metrics[0]["traffic"]) == roster
    assert run.metrics[0]["busiest"]["peer"] in roster
    assert run.masks("Oslo").keys() == run.masks(1).keys()
    assert sorted(personal_states(tmp_path / "run")) == roster
    saved = Run.load(tmp_path / "run", model=network)
    assert saved.metrics.roster == roster
    assert read_run(tmp_path / "run").roster == roster
    pytest.importorskip("pandas")
    assert list(saved.metrics.frame(per_peer=True)["peer"]) == roster * 2


def test_peers_named_as_unnamed_ones_learn_the_same_bits_in_any_order(points: Points) -> None:
    unnamed = federation(points, None).run().summary["weights_sha256"]
    named = federation(points, ["000", "001", "002"]).run().summary["weights_sha256"]
    assert named == unnamed
    other_names = federation(points, ["a", "b", "c"]).run().summary["weights_sha256"]
    assert other_names != unnamed  # names are those of random streams


def test_a_failed_step_names_the_peer(points: Points) -> None:
    run = federation(points, ["Oslo", "Tromso", "Bergen"], train=Train(lr=1e30, epochs=2)).run()
    assert set(run.metrics[1]["failures"]) <= {"Bergen", "Oslo", "Tromso"}
    assert "Peer Oslo, round" in run.metrics[1]["failures"]["Oslo"]


@pytest.mark.parametrize(
    "names",
    [["Oslo", "server"], ["Oslo", "St. Olav"], ["Oslo", ""], ["Oslo", "a" * 41], ["Oslo", "../x"]],
    ids=["reserved", "space", "empty", "long", "path"],
)
def test_a_name_that_no_site_could_have_is_refused(points: Points, names: list[str]) -> None:
    with refused(ConfigError, key="peers"):
        federation(points, [*names, "Bergen"])


@pytest.mark.parametrize(
    "settings",
    [
        {"names": ["a", "b", "a"]},
        {"names": ["a", "b"], "peers": 3},
        {"names": ["a", "-b"]},
    ],
    ids=["twice", "too few", "dash"],
)
def test_names_that_do_not_fit_are_refused(settings: dict[str, Any]) -> None:
    with refused(ConfigError, key="names"):
        Simulation(**settings)


def test_named_peers_are_counted_and_sorted() -> None:
    settings = compose({}, ['names=["west","east"]', "topology=full"])
    assert (settings.peers, settings.roster) == (2, ["east", "west"])


def test_a_config_whose_names_were_edited_is_refused(points: Points, tmp_path: Path) -> None:
    federation(points, ["a", "b", "c"]).run(tmp_path / "run")
    file = tmp_path / "run" / "config.toml"
    names_line = file.read_text().partition("names = ")[2].partition("]")[0]
    file.write_text(file.read_text().replace(names_line, '["a", "b"'))
    with refused(RunError):
        _ = read_run(tmp_path / "run").roster


def test_texts_become_names_without_collisions() -> None:
    values = ["Oslo", "Tromsø", "St. Olavs, Trondheim", "a/b", "a b", "=cmd|'x'!A1", "北京", "上海"]
    assert names_from([*values, "server", "x" * 99, "x" * 98, "\u202eevil\x00"]) == [
        "Oslo",
        "Tromso",
        "St-Olavs-Trondheim",
        "a-b",
        "a-b-2",
        "cmd-x-A1",
        "peer",
        "peer-2",
        "peer-server",
        "x" * 40,
        "x" * 38 + "-2",
        "evil",
    ]
    assert names_from(["2", "10", "7"]) == ["02", "10", "07"]


@pytest.fixture
def by_city(tmp_path: Path) -> Experiment:
    """Twenty rows of each of three cities; `b` says which city it is."""
    lines = ["a,city,b,label"]
    for k in range(60):
        city = ["Oslo", "Bergen", "Mo i Rana"][k % 3]
        lines.append(f"{k / 7},{city},{k % 3},{k // 3 % 2}")
    (tmp_path / "patients.csv").write_text("\n".join(lines))
    overrides = ["peers=3", "rounds=1", "topology=full", "model=mlp", "train.epochs=1"]
    overrides += [f"data.path={tmp_path / 'patients.csv'}", "data.classes=[0,1]"]
    return compose({}, [*overrides, "partition=by_column", "partition.column=city"])


def test_the_values_of_a_column_name_the_peers(by_city: Experiment, tmp_path: Path) -> None:
    ExperimentRun.create(by_city, tmp_path / "run").run()
    cities = ["Bergen", "Mo-i-Rana", "Oslo"]
    assert read_config(tmp_path / "run")["names"] == cities
    data = load_dataset(by_city.data)
    split = split_dataset(by_city, data)
    for rows, number in zip(split.train, (1, 2, 0), strict=True):
        inputs, _ = next(data.samples(augment=False)[0].take(rows).batches(100))
        assert len(inputs[:, 1].unique()) == 1, number
    assert isinstance(by_city.partition, ByColumn)
    assert list(by_city.partition.named_peers(data, 3)) == cities
    assert personal_model(tmp_path / "run", "Oslo").card.peer == "Oslo"
    # The same experiment, whose names only the data know, goes on with the same run.
    ExperimentRun.resume_as(by_city, tmp_path / "run").run()
    assert read_config(tmp_path / "run")["names"] == cities
    with refused(ConfigError, key="names"):
        compose(by_city.to_toml(), ['names=["a","b","c"]']).run()


def test_sites_of_up_have_the_names_of_the_column(by_city: Experiment, tmp_path: Path) -> None:
    create_run(by_city, tmp_path / "up")
    sites = sorted(folder.name for folder in (tmp_path / "up" / "sites").iterdir())
    assert sites == ["Bergen", "Mo-i-Rana", "Oslo"]
    setup = setup_of_peer(tmp_path / "up", "Oslo")
    assert (setup.name, setup.run.roster) == ("Oslo", sites)
