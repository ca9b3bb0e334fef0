"""Custom data of every format: the paths, and the partition over simulated peers."""

from pathlib import Path

import pytest
import torch
from messages import refused

from dispfl.config import compose
from dispfl.data.custom import load_custom
from dispfl.data.datasets import CustomData, load_dataset
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
