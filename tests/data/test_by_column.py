"""Natural partitions by a column, of CSV tables and of data sets of Hugging Face `datasets` on the
disk."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import refused
from PIL import Image

from dispfl.config import compose
from dispfl.data.datasets import load_dataset
from dispfl.data.labelled import CustomDataset, ImageDataset
from dispfl.errors import ConfigError, DataError, PartitionError
from dispfl.experiment import Experiment
from dispfl.runs.directory import read_split
from dispfl.runs.prepare import split_dataset

SITES = {"north": 30, "south": 20, "west": 10}
SMALL = [
    "peers=3",
    "rounds=1",
    "topology=full",
    "model=mlp",
    "train.epochs=1",
    "partition=by_column",
]


def rows() -> list[dict[str, Any]]:
    """Samples of three sites; `b` says which site it is: north 0, south 1, west 2."""
    samples = []
    for number, (site, count) in enumerate(SITES.items()):
        for k in range(count):
            samples.append({"a": k / 7, "site": site, "b": float(number), "label": k % 2})
    order = np.random.default_rng(0).permutation(len(samples))
    return [samples[k] for k in order]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    lines = [",".join(map(str, row.values())) for row in rows()]
    (tmp_path / "patients.csv").write_text("\n".join(["a,site,b,label", *lines]))
    return tmp_path / "patients.csv"


def experiment(*changes: str) -> Experiment:
    return compose({}, [*SMALL, *changes])


def sites_of(settings: Experiment) -> list[set[float]]:
    """The values of `b` of each peer's samples, training and test."""
    data = load_dataset(settings.data)
    assert isinstance(data, CustomDataset)
    assert data.columns == ("a", "b")
    split = split_dataset(settings, data)
    values = []
    for train, test in zip(split.train, split.test, strict=True):
        train_inputs, _ = next(data.train.take(train).batches(1000))
        test_inputs, _ = next(data.test.take(test).batches(1000))
        values.append({*train_inputs[:, 1].tolist(), *test_inputs[:, 1].tolist()})
    return values


def test_each_peer_has_the_samples_of_one_site_in_the_order_of_their_names(table: Path) -> None:
    settings = experiment(f"data.path={table}", "partition.column=site")
    split = split_dataset(settings, load_dataset(settings.data))
    assert sites_of(settings) == [{0.0}, {1.0}, {2.0}]
    sizes = [len(train) + len(test) for train, test in zip(split.train, split.test, strict=True)]
    assert sizes == list(SITES.values())


def test_fewer_peers_are_those_with_the_most_samples(table: Path) -> None:
    assert sites_of(experiment(f"data.path={table}", "partition.column=site", "peers=2")) == [
        {0.0},
        {1.0},
    ]


def test_limits_validation_and_unseen_peers_apply(table: Path) -> None:
    settings = experiment(
        f"data.path={table}",
        "partition.column=site",
        "peers=2",
        "unseen_peers=1",
        "partition.samples_per_peer=12",
        "partition.validation=0.25",
    )
    data = load_dataset(settings.data)
    split = split_dataset(settings, data)
    assert [len(peer_rows) for peer_rows in split.train] == [9, 9]
    assert [len(peer_rows) for peer_rows in split.validation] == [3, 3]
    assert split.unseen is not None
    assert data.groups is not None
    [west] = split.unseen.train
    assert len(west) == round(0.75 * list(data.groups[0]).count("west"))


def test_a_run_by_column_can_be_repeated_from_its_config_and_resumed(
    table: Path, tmp_path: Path
) -> None:
    settings = experiment(f"data.path={table}", "partition.column=site")
    first = settings.run(tmp_path / "run")
    assert settings.to_toml() == compose(settings.to_toml()).to_toml()
    assert len(first.accuracy) == 3
    settings.run(tmp_path / "run", resume=True)
    saved = read_split(tmp_path / "run")
    assert saved is not None
    assert saved[1].sum(1).tolist() == list(map(len, saved[0].train))


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        (
            ["partition.column=hospital"],
            DataError,
            "has no column 'hospital', which data.group names.",
        ),
        (
            ["partition.column=site", "peers=4"],
            PartitionError,
            "peers is 4 but the column site has 3 values",
        ),
        (
            ["data.group=site", "peers=4"],
            PartitionError,
            "peers is 4 but the column of data.group has 3 values",
        ),
        (
            ["partition.column=site", "unseen_peers=1"],
            PartitionError,
            (
                "peers is 4 but the column site has 3 values in the training data; use at most 3."
                " These are peers=3 and unseen_peers=1."
            ),
        ),
        (["partition.column=label"], DataError, ""),
        (
            [],
            ConfigError,
            "partition.column is missing: name the column whose values are the peers.",
        ),
        (
            ["partition.column=site", "partition.sizes=dirichlet"],
            ConfigError,
            "by_column has the sizes of the data",
        ),
    ],
)
def test_a_column_that_cannot_be_used_is_refused(
    table: Path, changes: list[str], error: type[Exception], sentence: str
) -> None:
    def divide() -> None:
        settings = experiment(f"data.path={table}", *changes)
        split_dataset(settings, load_dataset(settings.data))

    with pytest.raises(error) as refused:
        divide()
    assert sentence in str(refused.value)


def test_data_without_columns_are_refused() -> None:
    with refused(ConfigError, key="partition"):
        experiment("partition.column=site")


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package, with its cache in the test's own folder."""
    package = pytest.importorskip("datasets")
    monkeypatch.setattr(package.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return package


def test_a_saved_data_set_is_divided_by_a_column(tmp_path: Path, datasets: Any) -> None:
    datasets.Dataset.from_list(rows()).save_to_disk(str(tmp_path / "saved"))
    settings = experiment(f"data.hub={tmp_path / 'saved'}", "partition.column=site")
    assert sites_of(settings) == [{0.0}, {1.0}, {2.0}]
    assert len(settings.run(tmp_path / "run").accuracy) == 3


def test_a_folder_of_parquet_files_has_its_own_test_data_and_names_of_classes(
    tmp_path: Path, datasets: Any
) -> None:
    dataset = datasets.Dataset.from_list(rows())
    classes = datasets.ClassLabel(names=["well", "ill"])
    folder = tmp_path / "parquet"
    folder.mkdir()
    for name, part in (
        ("train", dataset.select(range(40))),
        ("test", dataset.select(range(40, 60))),
    ):
        part.cast_column("label", classes).to_parquet(str(folder / f"{name}.parquet"))
    settings = experiment(f"data.hub={folder}", "partition.column=site")
    data = load_dataset(settings.data)
    assert isinstance(data, CustomDataset)
    assert data.classes == ("ill", "well")
    assert (len(data.train), len(data.test)) == (40, 20)
    split = split_dataset(settings, data)
    expected = Counter(row["site"] for row in rows()[:40])
    assert [len(peer_rows) for peer_rows in split.train] == [expected[site] for site in SITES]


def test_images_and_arrays_of_a_saved_data_set_become_inputs(tmp_path: Path, datasets: Any) -> None:
    images = [Image.fromarray(np.full((12, 10, 3), 20 * k, np.uint8)) for k in range(8)]
    pictures = datasets.Dataset.from_dict({"image": images, "label": [0, 1] * 4})
    signals = datasets.Dataset.from_dict(
        {"signal": [[[k, 0.5], [1.0, 2.0]] for k in range(8)], "label": ["x", "y"] * 4}
    )
    for name, saved in (("pictures", pictures), ("signals", signals)):
        saved.save_to_disk(str(tmp_path / name))
    settings = ["peers=1", "model=mlp", "topology=full"]
    from_folder = load_dataset(
        compose({}, [*settings, f"data.hub={tmp_path / 'pictures'}", "data.size=8"]).data
    )
    received = load_dataset(compose({}, [*settings, f"data.hub={tmp_path / 'signals'}"]).data)
    assert isinstance(from_folder, ImageDataset)
    assert (from_folder.shape, from_folder.train_inputs.dtype, len(from_folder.train_labels)) == (
        (3, 8, 8),
        torch.uint8,
        6,
    )
    assert set(
        torch.cat([from_folder.train_inputs, from_folder.test_inputs])[:, 0, 0, 0].tolist()
    ) == {20 * k for k in range(8)}
    assert (received.shape, received.classes) == ((2, 2), ("x", "y"))


@pytest.mark.parametrize(
    ("content", "changes", "sentence"),
    [
        (
            {"text": ["a", "b"], "label": [0, 1]},
            [],
            "column text, is not numbers of one shape; remove it, or prepare",
        ),
        ({"a": [1.0, 2.0]}, [], "has no column called label; name one in data.label: a."),
        ({"a": [1.0, 2.0], "label": [0, 1]}, ["data.label=lable"], "Did you mean label?"),
        (
            {"a": [1.0, None], "label": [0, 1]},
            [],
            "column a, has values that are missing, infinite or too large",
        ),
        ({"label": [0, 1]}, [], "has no column besides the label"),
    ],
)
def test_a_data_set_that_cannot_be_used_is_refused(
    tmp_path: Path, datasets: Any, content: dict[str, list[Any]], changes: list[str], sentence: str
) -> None:
    datasets.Dataset.from_dict(content).save_to_disk(str(tmp_path / "saved"))
    settings = compose(
        {}, ["peers=1", "model=mlp", "topology=full", f"data.hub={tmp_path / 'saved'}", *changes]
    )
    with pytest.raises(DataError) as refused:
        load_dataset(settings.data)
    assert sentence in str(refused.value)


@pytest.mark.usefixtures("datasets")
def test_a_folder_that_is_no_data_set_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    settings = compose({}, ["peers=1", "topology=full", f"data.hub={tmp_path / 'empty'}"])
    with refused(DataError):
        load_dataset(settings.data)
