"""CSV files: how they are read, and the error for each invalid file."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refused

from dispfl.data.custom import load_custom
from dispfl.data.datasets import CustomData
from dispfl.data.labelled import CustomDataset
from dispfl.data.readers.table import read_table
from dispfl.errors import ConfigError, DataError

FOUR = "age,label,weight\n30,ill,70.5\n40,well,80\n50,ill,60\n60,well,90\n"


def write(folder: Path, text: str, name: str = "site.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def loaded(path: Path, **settings: Any) -> CustomDataset:
    data = load_custom(CustomData(path=str(path), **settings))
    assert isinstance(data, CustomDataset)
    return data


def refusal(path: Path, **settings: Any) -> str:
    with pytest.raises((DataError, ConfigError)) as caught:
        loaded(path, **settings)
    return str(caught.value).replace(str(path), "FILE")


def test_columns_become_float32_inputs_without_the_label(tmp_path: Path) -> None:
    samples = read_table(write(tmp_path, FOUR))
    assert samples.inputs.tolist() == [[30, 70.5], [40, 80], [50, 60], [60, 90]]
    assert samples.inputs.dtype == torch.float32
    assert samples.labels == ["ill", "well", "ill", "well"]
    assert samples.columns == ("age", "weight")


def test_labels_are_numbered_in_the_order_of_their_names(tmp_path: Path) -> None:
    path = write(tmp_path, FOUR)
    data = loaded(path, test_path=str(path))
    assert data.classes == ("ill", "well")
    assert data.train_labels.tolist() == data.test_labels.tolist() == [0, 1, 0, 1]
    assert data.shape == (2,)


def test_whole_numbers_are_ordered_as_numbers(tmp_path: Path) -> None:
    lines = "".join(f"{k},{label}\n" for k, label in enumerate([10, 2, 10, 2, 2]))
    assert loaded(write(tmp_path, f"x,label\n{lines}")).classes == ("2", "10")


def test_listed_classes_give_the_order_and_some_may_be_missing(tmp_path: Path) -> None:
    path = write(tmp_path, FOUR)
    data = loaded(path, test_path=str(path), classes=["well", "unknown", "ill"])
    assert data.classes == ("well", "unknown", "ill")
    assert set(data.train_labels.tolist()) == {0, 2}


def test_numbers_may_stand_for_listed_names(tmp_path: Path) -> None:
    path = write(tmp_path, "x,label\n5,0\n6,1\n7,0\n8,1\n")
    data = loaded(path, test_path=str(path), classes=["ill", "well"])
    assert data.train_labels.tolist() == [0, 1, 0, 1]


def test_a_label_that_is_not_listed_is_refused(tmp_path: Path) -> None:
    assert (
        refusal(write(tmp_path, FOUR), classes=["ill", "healthy"])
        == "FILE has the label well, which data.classes does not list: ill, healthy."
    )


def test_without_a_column_called_label_the_last_is_used_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, "age,kind\n30,a\n40,b\n50,a\n60,b\n")
    with caplog.at_level(logging.WARNING, "dispfl.data"):
        assert loaded(path, test_path=str(path)).columns == ("age",)
    assert caplog.messages == [
        f"{path} has no column called label, so its last column, kind, is used; set data.label to"
        " use another."
    ]


def test_the_label_may_be_any_column_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, "kind,age,label\na,30,1\nb,40,2\na,50,3\nb,60,4\n")
    data = loaded(path, test_path=str(path), label="kind")
    assert data.columns == ("age", "label")
    assert data.classes == ("a", "b")
    assert not caplog.messages


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_all_separators_byte_order_marks_quotes_and_empty_lines_are_read(
    tmp_path: Path, separator: str
) -> None:
    text = FOUR.replace(",", separator).replace("ill", '"ill"').replace("\n", "\r\n") + "\r\n"
    path = tmp_path / "site.csv"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_table(path).columns == ("age", "weight")
    assert read_table(path).labels == ["ill", "well", "ill", "well"]


def test_standardized_columns_have_mean_0_and_deviation_1_over_the_training_data(
    tmp_path: Path,
) -> None:
    """Training column 1, 3: mean 2, deviation 1, so they become -1, 1; and 7 in the test data
    becomes 5."""
    train = write(tmp_path, "x,same,label\n1,4,a\n3,4,b\n")
    test = write(tmp_path, "x,same,label\n7,9,a\n", "test.csv")
    data = loaded(train, test_path=str(test), standardize=True)
    assert next(data.train.batches(2))[0].tolist() == [
        [-1, 4],
        [1, 4],
    ]  # a constant column is unchanged
    assert next(data.test.batches(2))[0].tolist() == [[5, 9]]
    assert data.scaling is not None
    assert data.scaling.mean.tolist() == [2, 0]
    assert data.scaling.std.tolist() == [1, 1]


def test_a_constant_column_of_large_numbers_is_unchanged(tmp_path: Path) -> None:
    """Its computed deviation is a rounding error, not 0: dividing by it would give nonsense."""
    rows = "".join(f"0.1,{k},{'ab'[k % 2]}\n" for k in range(10))
    data = loaded(write(tmp_path, f"same,x,label\n{rows}"), standardize=True)
    assert set(next(data.train.batches(20))[0][:, 0].tolist()) == {torch.tensor(0.1).item()}


def test_separate_test_data_may_have_their_columns_in_another_order(tmp_path: Path) -> None:
    test = write(tmp_path, "weight,label,age\n65,ill,35\n", "test.csv")
    data = loaded(write(tmp_path, FOUR), test_path=str(test))
    assert len(data.train) == 4
    assert next(data.test.batches(9))[0].tolist() == [[35, 65]]
    assert data.test_labels.tolist() == [0]


def test_test_data_with_other_columns_are_refused(tmp_path: Path) -> None:
    test = write(tmp_path, "age,label,height\n35,ill,180\n", "test.csv")
    assert refusal(write(tmp_path, FOUR), test_path=str(test)).endswith(
        "test.csv and the training data must have the same columns; the training data lack height."
    )
    test = write(tmp_path, "age,label\n35,ill\n", "test.csv")
    assert "only the training data have weight." in refusal(
        write(tmp_path, FOUR), test_path=str(test)
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "FILE is empty; its first line must name the columns."),
        ("1,2,3\n4,5,6\n", "FILE begins with numbers; its first line must name the columns."),
        (
            ",age,label\n0,41,a\n",
            (
                "FILE has no name for column 1. If it is the index of a pandas table, write it with"
                " to_csv(index=False); otherwise name it."
            ),
        ),
        ("a,b,a\n1,2,3\n", "FILE has 2 columns called 'a'; give each a different name."),
        ("label\nx\n", "FILE has only one column, label; it needs a label and at least one more."),
        ("x,label\n", "FILE has a header but no samples."),
        ("x,label\n\n1,a\n2\n", "FILE, line 4, has 1 cells; its header has 2."),
        ("x,label\n1,a\n2, \n", "FILE, line 3, has no label in column label."),
        (
            "x,label\n1,a\n ,b\n",
            "FILE, line 3, column x: the value is missing; fill it in or remove the line.",
        ),
        (
            "x,sex,label\n1,2,a\n2,M,b\n",
            (
                "FILE, line 3, column sex: 'M' is not a number; write it as one, such as 3.5, or"
                " remove the column."
            ),
        ),
        (
            "x,label\n1,a\n\nnan,b\n",
            (
                "FILE, line 4, column x: the value is missing, infinite or too large; fill it in or"
                " remove the line."
            ),
        ),
        (
            "x,label\n1e39,a\n2,b\n",
            (
                "FILE, line 2, column x: the value is missing, infinite or too large; fill it in or"
                " remove the line."
            ),
        ),
        (
            "x,label\n1,a\n2,a\n",
            "FILE has one class only, a; list all of the federation's in data.classes.",
        ),
        (
            "x,label\n1,a\n2,\x1b[2J\n",
            r"FILE has the label '\x1b[2J', which cannot be printed; rename the class.",
        ),
        (
            "x,label\n1,a\n1,b\n",
            "None of the 2 samples of FILE is a training sample: their content decides, and equal"
            " ones go together. Add samples, give a smaller data.test_share, or name the test data"
            " in data.test_path.",
        ),
    ],
)
def test_an_invalid_table_is_refused_with_one_sentence(
    tmp_path: Path, text: str, sentence: str
) -> None:
    assert refusal(write(tmp_path, text)) == sentence


def test_a_measurement_as_label_is_refused(tmp_path: Path) -> None:
    rows = "".join(f"{k},{k / 7}\n" for k in range(30))
    assert (
        refusal(write(tmp_path, f"x,price\n{rows}"), label="price")
        == "FILE has 30 different labels for 30 samples; a label must be a class. To learn"
        " numbers, set task=regression."
    )


def test_a_repeated_measurement_is_refused_unless_classes_lists_it(tmp_path: Path) -> None:
    """25 different prices for 100 samples: as names these would be classes."""
    rows = "".join(f"{k},{k % 25 / 2}\n" for k in range(100))
    path = write(tmp_path, f"x,price\n{rows}")
    assert (
        refusal(path, label="price")
        == "FILE has 25 different labels for 100 samples; a label must be a class. To learn"
        " numbers, set task=regression."
    )
    assert len(loaded(path, label="price", classes=[k / 2 for k in range(25)]).classes) == 25
    names = write(tmp_path, f"x,price\n{rows.replace(',', ',lot ')}", "names.csv")
    assert len(loaded(names, label="price").classes) == 25


def test_a_missing_label_column_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    assert (
        refusal(write(tmp_path, FOUR), label="wieght")
        == "FILE has no column 'wieght', which data.label names. Did you mean weight?"
    )


def test_a_file_that_is_not_text_or_has_an_endless_cell_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "site.csv"
    path.write_bytes(b"x,label\n\xff\xfe,a\n")
    assert refusal(path) == "FILE is not UTF-8 text; save it as CSV in UTF-8."
    path.write_text(f'x,label\n1,"{"a" * 200_000}\n')
    assert refusal(path) == "FILE cannot be read as CSV: field larger than field limit (131072)."


def test_keys_of_images_do_not_apply_to_a_table(tmp_path: Path) -> None:
    path = write(tmp_path, FOUR)
    assert (
        refusal(path, size=64)
        == "data.size does not apply: FILE is not a folder of images. Omit it."
    )
    assert (
        refusal(path, colour=False)
        == "data.colour does not apply: FILE is not a folder of images. Omit it."
    )
    with refused(ConfigError, key="data.augment"):
        loaded(path, test_path=str(path)).samples(augment=True)
