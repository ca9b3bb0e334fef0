"""Custom data of every format: the test share, the paths, and the partition over simulated
peers."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from messages import refused

from dispfl.config import compose
from dispfl.core.rng import stream
from dispfl.data.custom import load_custom, train_test_rows
from dispfl.data.datasets import CustomData, load_dataset
from dispfl.data.labelled import CustomDataset
from dispfl.errors import ConfigError, DataError
from dispfl.runs.execute import execute
from dispfl.runs.prepare import experiment_context, split_dataset


def write_points(folder: Path, samples: int = 60) -> Path:
    """Three columns; the label is the number of the largest."""
    points = torch.rand(samples, 3, generator=torch.Generator().manual_seed(0))
    lines = (f"{','.join(f'{x:.4f}' for x in row)},{int(row.argmax())}\n" for row in points)
    path = folder / "points.csv"
    path.write_text("a,b,c,label\n" + "".join(lines))
    return path


def test_a_fifth_of_each_class_rounded_but_at_least_one_is_held_out() -> None:
    """20 -> 4, 7 -> 1 (1.4), 2 -> 1 (0.4, but one of two), 1 -> 0: the only one is for training."""
    labels = torch.tensor([0] * 20 + [1] * 7 + [2] * 2 + [3])
    train, test = train_test_rows(labels, 0.2, stream(0, "test"))
    assert Counter(labels[test].tolist()) == {0: 4, 1: 1, 2: 1}
    assert Counter(labels[train].tolist()) == {0: 16, 1: 6, 2: 1, 3: 1}
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(30))


def test_a_share_near_one_leaves_one_training_sample_of_each_class() -> None:
    labels = torch.tensor([0] * 10 + [1] * 10)
    train, _ = train_test_rows(labels, 0.99, stream(0, "test"))
    assert labels[train].tolist() == [0, 1]


def test_the_seed_and_the_sites_name_determine_the_test_data(tmp_path: Path) -> None:
    settings = CustomData(path=str(write_points(tmp_path)))

    def tested(site: str, seed: int) -> list[list[float]]:
        data = load_custom(settings, site=site, seed=seed)
        assert isinstance(data, CustomDataset)
        rows: list[list[float]] = next(data.test.batches(99))[0].tolist()
        return rows

    assert tested("alice", 0) == tested("alice", 0)
    assert tested("alice", 0) != tested("bob", 0)
    assert tested("alice", 0) != tested("alice", 1)


def test_relative_paths_are_looked_up_in_data_dir_the_sites_folder_or_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_points(tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    name = "points.csv"
    assert load_custom(CustomData(path=name), folder=tmp_path).shape == (3,)
    assert load_custom(
        CustomData(path=name, dir=str(tmp_path)), folder=Path("/elsewhere")
    ).shape == (3,)
    with pytest.raises(DataError) as caught:
        load_custom(CustomData(path=name))
    missing = tmp_path.parent / name
    assert (
        str(caught.value)
        == f"data.path is {missing}, which does not exist; data.dir sets another folder to look in."
    )
    with pytest.raises(DataError) as caught:
        load_custom(CustomData(path=str(missing)))
    assert str(caught.value) == f"data.path is {missing}, which does not exist."
    monkeypatch.chdir(tmp_path)
    assert load_custom(CustomData(path=name)).shape == (3,)
    with refused(DataError):
        load_custom(CustomData(path=name, test_path="none.csv"))


def test_other_formats_are_refused_with_a_list_of_the_supported_ones(tmp_path: Path) -> None:
    path = tmp_path / "table.xlsx"
    path.write_bytes(b"PK")
    with pytest.raises(ConfigError) as caught:
        load_custom(CustomData(path=str(path)))
    assert (
        str(caught.value)
        == f"data.path must be a .csv file, an .npz file or a folder of images, got {str(path)!r}."
    )


def test_simulated_peers_partition_a_custom_table_and_learn_from_it(tmp_path: Path) -> None:
    path = write_points(tmp_path, 400)
    words = [
        "peers=4",
        "rounds=3",
        "topology=full",
        "partition.samples_per_peer=60",
        "workers=1",
        "model=mlp",
    ]
    experiment = compose({}, [*words, f"data.path={path}"])
    data = load_dataset(experiment.data)
    split = split_dataset(experiment, data)
    assert len({int(row) for rows in split.train for row in rows}) == 4 * 60
    run = execute(experiment_context(experiment, data, split))
    assert min(run.accuracy) > 0.6  # three classes: guessing gives a third
