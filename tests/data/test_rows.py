"""Which rows are test data: each row's own content decides, so that no other row can move it."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from messages import refused
from PIL import Image

from dispfl.data.custom import load_custom
from dispfl.data.datasets import CustomData
from dispfl.data.labelled import LabelledDataset
from dispfl.data.rows import are_test_rows, are_validation_rows, input_ids
from dispfl.errors import DataError

Row = tuple[float, ...]
POINTS = torch.rand(400, 3, generator=torch.Generator().manual_seed(0))


def write_table(path: Path, points: torch.Tensor, label: int = 0) -> Path:
    lines = ["a,b,c,label"]
    for point in points.tolist():
        cells = [f"{value:.4f}" for value in point]
        lines.append(",".join([*cells, str((int(10 * point[0]) + label) % 2)]))
    path.write_text("\n".join(lines) + "\n")
    return path


def divided(data: LabelledDataset) -> tuple[set[Row], set[Row]]:
    """The training rows and the test rows."""
    parts = []
    for samples in data.samples():
        inputs, _ = next(samples.batches(10_000))
        parts.append({tuple(row) for row in inputs.flatten(1).tolist()})
    return parts[0], parts[1]


def table_rows(path: Path, test_share: float | None = None) -> tuple[set[Row], set[Row]]:
    return divided(load_custom(CustomData(path=str(path), test_share=test_share)))


def test_an_appended_row_moves_no_other_row(tmp_path: Path) -> None:
    """Two tables that differ in one row give training sets that differ in at most that row."""
    path = write_table(tmp_path / "a.csv", POINTS[:-1])
    train, test = table_rows(path)
    with path.open("a") as file:
        file.write("0.5,0.6,0.7,1\n")
    train_after, test_after = table_rows(path)
    assert train <= train_after
    assert test <= test_after
    assert len(train_after) + len(test_after) == len(train) + len(test) + 1


def test_a_fifth_of_the_rows_on_average_are_test_rows(tmp_path: Path) -> None:
    """400 draws with probability 0.2: 80, and 8 is the standard deviation."""
    train, test = table_rows(write_table(tmp_path / "a.csv", POINTS))
    assert len(train) + len(test) == 400
    assert 56 <= len(test) <= 104


def test_removed_and_reordered_rows_move_no_other_row(tmp_path: Path) -> None:
    train, test = table_rows(write_table(tmp_path / "a.csv", POINTS))
    kept = POINTS.flip(0)[:250]
    train_after, test_after = table_rows(write_table(tmp_path / "b.csv", kept))
    assert train_after < train
    assert test_after < test


def test_equal_rows_are_on_the_same_side_whatever_their_labels(tmp_path: Path) -> None:
    """A patient who is entered twice, or whose diagnosis is corrected."""
    path = write_table(tmp_path / "a.csv", POINTS)
    lines = write_table(tmp_path / "b.csv", POINTS, label=1).read_text().splitlines()
    with path.open("a") as file:
        file.write("\n".join(lines[1:]) + "\n")
    data = load_custom(CustomData(path=str(path)))
    train, test = divided(data)
    assert not train & test
    assert len(data.train_labels) == 2 * len(train)


def test_the_same_rows_are_test_rows_at_every_site_and_with_every_seed(tmp_path: Path) -> None:
    """What was tried in a simulation is what a site runs, and a patient of two hospitals is not
    trained on at one and tested with at the other."""
    settings = CustomData(path=str(write_table(tmp_path / "a.csv", POINTS)))
    simulated = divided(load_custom(settings))
    assert divided(load_custom(settings, site="alice", seed=7)) == simulated


def test_a_larger_share_has_the_test_rows_of_a_smaller_one(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.csv", POINTS)
    _, few = table_rows(path, test_share=0.1)
    _, many = table_rows(path, test_share=0.4)
    assert few < many


def test_numbers_that_are_equal_have_equal_ids() -> None:
    zeros = torch.tensor([[0.0, 1.0], [-0.0, 1.0]])
    ids = input_ids(zeros)
    assert ids[0] == ids[1]


def test_ids_are_the_same_on_every_machine() -> None:
    """BLAKE2b with 8 bytes of the float32 numbers 1 and 2, little-endian."""
    import hashlib

    content = np.array([1, 2], "<f4").tobytes()
    digest = hashlib.blake2b(content, digest_size=8, person=b"dispfl row").digest()
    expected = int.from_bytes(digest, "little", signed=True)
    assert input_ids(torch.tensor([[1.0, 2.0]])).tolist() == [expected]


def test_validation_rows_do_not_depend_on_which_rows_are_test_rows() -> None:
    ids = input_ids(torch.rand(20_000, 2, generator=torch.Generator().manual_seed(1)))
    is_test = are_test_rows(ids, 0.2)
    is_validation = are_validation_rows(ids, 0.1)
    assert is_test.float().mean() == pytest.approx(0.2, abs=0.02)
    assert is_validation[is_test].float().mean() == pytest.approx(0.1, abs=0.02)
    assert is_validation[~is_test].float().mean() == pytest.approx(0.1, abs=0.02)


def test_an_image_is_known_by_its_file_whatever_the_size_it_is_read_in(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for k in range(20):
            pixels = rng.integers(0, 255, (12, 12, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{k}.png")
    small = load_custom(CustomData(path=str(tmp_path), size=8))
    large = load_custom(CustomData(path=str(tmp_path), size=16))
    assert small.row_ids is not None
    assert large.row_ids is not None
    assert small.row_ids.test.equal(large.row_ids.test)
    (tmp_path / "dog" / "0.png").rename(tmp_path / "dog" / "renamed.png")
    renamed = load_custom(CustomData(path=str(tmp_path), size=8))
    assert renamed.row_ids is not None
    assert set(renamed.row_ids.test.tolist()) == set(small.row_ids.test.tolist())


def test_rows_of_arrays_are_known_by_their_content(tmp_path: Path) -> None:
    signals = POINTS.reshape(100, 3, 4).numpy()
    labels = np.arange(100) % 2
    np.savez(tmp_path / "all.npz", x=signals, y=labels)
    np.savez(tmp_path / "most.npz", x=signals[10:], y=labels[10:])
    train, test = table_rows(tmp_path / "all.npz")
    train_after, test_after = table_rows(tmp_path / "most.npz")
    assert train_after < train
    assert test_after < test


def test_a_class_without_test_samples_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.csv"
    lines = [f"{k},often" for k in range(60)]
    path.write_text("\n".join(["x,label", *lines, "-8,once"]) + "\n")
    with caplog.at_level(logging.WARNING, "dispfl.data"):
        data = load_custom(CustomData(path=str(path)))
    assert data.classes == ("often", "once")
    side = "test" if 1 in data.train_labels.tolist() else "training"
    assert caplog.messages == [
        f"{path} has no {side} sample of the class once; with more samples, or with"
        " data.test_path, it has some."
    ]


def test_data_without_a_training_or_test_row_are_refused(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.csv", POINTS[:8])
    for share in (0.0001, 0.9999):
        with refused(DataError):
            load_custom(CustomData(path=str(path), test_share=share))
