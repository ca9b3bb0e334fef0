"""`data.factory`: what a user's function may return, and the errors for anything else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from messages import refused

from dispfl.data.custom import load_custom
from dispfl.data.datasets import CustomData
from dispfl.data.labelled import CustomDataset
from dispfl.errors import ConfigError, DataError

Code = Callable[[str], None]

PAIRS = """
import torch
def load():
    return (torch.ones(4, 2), torch.tensor([0, 1, 2, 1])), (torch.zeros(2, 2), torch.tensor([0, 1]))
"""
DATASET = """
import torch
class Points(torch.utils.data.Dataset):
    def __init__(self, size): self.size = size
    def __len__(self): return self.size
    def __getitem__(self, k): return torch.full((3,), float(k)), k % 2
def load(): return Points(6), Points(4)
"""


def loaded(site: Path, name: str = "", **settings: Any) -> CustomDataset:
    data = load_custom(CustomData(factory="mine:load", **settings), folder=site, site=name)
    assert isinstance(data, CustomDataset)
    return data


def refusal(site: Path, name: str = "", factory: str = "mine:load", **settings: Any) -> str:
    with pytest.raises((DataError, ConfigError)) as caught:
        load_custom(CustomData(factory=factory, **settings), folder=site, site=name)
    return str(caught.value).replace(str(site), "SITE")


def test_pairs_of_tensors_count_their_classes_by_the_largest_label(site: Path, code: Code) -> None:
    code(PAIRS)
    data = loaded(site)
    assert (data.shape, data.classes) == ((2,), ("0", "1", "2"))
    assert data.train_labels.tolist() == [0, 1, 2, 1]
    assert loaded(site, classes=["a", "b", "c", "d"]).classes == ("a", "b", "c", "d")


def test_a_dataset_is_read_completely_for_its_labels_and_can_be_partitioned(
    site: Path, code: Code
) -> None:
    code(DATASET)
    data = loaded(site)
    assert data.train_labels.tolist() == [0, 1, 0, 1, 0, 1]
    train, _ = data.samples()
    [(inputs, labels)] = train.take(data.train_labels.nonzero().squeeze(1)).batches(9)
    assert inputs[:, 0].tolist() == [1, 3, 5]
    assert labels.tolist() == [1, 1, 1]


def test_the_sites_name_is_passed_to_a_function_with_that_parameter(site: Path, code: Code) -> None:
    code(
        PAIRS.replace("load():", "load(site):").replace(
            "torch.ones(4, 2)", "torch.full((4, 2), float(len(site)))"
        )
    )
    assert next(loaded(site, "alice").train.batches(1))[0].tolist() == [[5, 5]]
    assert (
        refusal(site)
        == "data.factory mine:load requires site, but it is called without arguments. Give site a"
        " default."
    )


def test_random_draws_are_reproducible_and_do_not_touch_the_callers_generator(
    site: Path, code: Code
) -> None:
    code(PAIRS.replace("torch.ones(4, 2)", "torch.rand(4, 2)"))
    first, again, different = (
        next(loaded(site, name).train.batches(4))[0] for name in ("alice", "alice", "bob")
    )
    assert first.equal(again)
    assert not first.equal(different)


def test_float64_inputs_and_small_integer_labels_are_converted(site: Path, code: Code) -> None:
    code(
        PAIRS.replace("torch.ones(4, 2)", "torch.ones(4, 2).double()").replace(
            "1, 2, 1])", "1, 2, 1]).byte()"
        )
    )
    inputs, labels = next(loaded(site).train.batches(1))
    assert (str(inputs.dtype), str(labels.dtype)) == ("torch.float32", "torch.int64")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            "return 3",
            (
                "data.factory mine:load must return (training data, test data), each a Dataset or a"
                " pair (inputs, labels) of tensors; it returned int."
            ),
        ),
        (
            "return torch.ones(4, 2), torch.ones(4)",
            (
                "data.factory mine:load must return (training data, test data), each a Dataset or a"
                " pair (inputs, labels) of tensors; it returned (Tensor, Tensor)."
            ),
        ),
        (
            "return (torch.ones(4, 2), torch.ones(3)), None",
            (
                "The training data of data.factory mine:load has 4 inputs but 3 labels; give as"
                " many of each."
            ),
        ),
        (
            "return (torch.ones(4, 2), torch.ones(4)), None",
            (
                "The training data of data.factory mine:load must have one integer as the label of"
                " a sample, got torch.float32 of shape []. To learn numbers, set task=regression."
            ),
        ),
        (
            "raise KeyError('ward 7')",
            "data.factory mine:load raised KeyError: 'ward 7' (mine.py, line 3).",
        ),
        (
            "import nowhere",
            (
                "data.factory mine:load raised ModuleNotFoundError: No module named 'nowhere'"
                " (mine.py, line 3)."
            ),
        ),
    ],
)
def test_an_invalid_return_value_is_refused_with_one_sentence(
    site: Path, code: Code, body: str, sentence: str
) -> None:
    code(f"import torch\ndef load():\n    {body}\n")
    assert refusal(site) == sentence


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        (
            "torch.ones(3), 'a'",
            "must be samples of (input, label), both numbers; batched, they are (Tensor, tuple).",
        ),
        ("torch.ones(3).double(), 1", "have inputs of type torch.float64; return them as float32."),
        (
            "torch.ones(3), torch.tensor(1).int()",
            "have labels of type torch.int32; return them as int(label).",
        ),
    ],
)
def test_a_datasets_samples_must_have_the_right_types(
    site: Path, code: Code, item: str, sentence: str
) -> None:
    code(DATASET.replace("torch.full((3,), float(k)), k % 2", item))
    assert refusal(site) == f"The training data of data.factory mine:load {sentence}"


def test_a_dataset_that_fails_is_named_with_the_line_of_its_code(site: Path, code: Code) -> None:
    code(DATASET.replace("torch.full((3,), float(k))", "1 / 0"))
    assert (
        refusal(site) == "The training data of data.factory mine:load cannot return a sample: "
        "ZeroDivisionError: division by zero (mine.py, line 6)."
    )


@pytest.mark.parametrize(
    ("label", "sentence"),
    [
        ("3", "The training data have the label 3, but data.classes lists 3 classes, from 0."),
        ("-1", "The training data have the label -1; labels count from 0."),
    ],
)
def test_a_label_without_a_class_is_refused(
    site: Path, code: Code, label: str, sentence: str
) -> None:
    code(PAIRS.replace("[0, 1, 2, 1]", f"[0, 1, 2, {label}]"))
    assert refusal(site, classes=["a", "b", "c"]) == sentence


def test_a_dataset_is_not_read_completely_before_its_labels_are_needed(
    site: Path, code: Code
) -> None:
    code(DATASET.replace("k % 2", "k"))
    data = loaded(site, classes=["a", "b", "c"])
    with refused(DataError):
        _ = data.train_labels


@pytest.mark.parametrize(
    ("text", "factory", "sentence"),
    [
        (
            "",
            "theirs:load",
            "data.factory names the module theirs, which is neither in SITE nor on PYTHONPATH.",
        ),
        (
            "",
            "mine.sub:load",
            "data.factory names the module mine.sub, which is neither in SITE nor on PYTHONPATH.",
        ),
        (
            "def lode(): pass",
            "mine:load",
            "data.factory is mine:load, but mine has no load. Did you mean lode?",
        ),
        ("", "mine:load", "data.factory is mine:load, but mine has no load."),
        ("load = 3", "mine:load", "data.factory is mine:load, which is not a function but a int."),
        (
            "import nowhere",
            "mine:load",
            (
                "data.factory: importing mine raised ModuleNotFoundError: No module named 'nowhere'"
                " (mine.py, line 1)."
            ),
        ),
        (
            "\n1 / 0",
            "mine:load",
            (
                "data.factory: importing mine raised ZeroDivisionError: division by zero (mine.py,"
                " line 2)."
            ),
        ),
        (
            "def",
            "mine:load",
            "data.factory: importing mine raised SyntaxError: invalid syntax (mine.py, line 1).",
        ),
    ],
)
def test_missing_or_failing_code_is_refused_with_one_sentence(
    site: Path, code: Code, text: str, factory: str, sentence: str
) -> None:
    code(text or "pass")
    assert refusal(site, factory=factory) == sentence


def test_another_loaded_module_of_the_same_name_is_refused(site: Path) -> None:
    (site / "json.py").write_text("def load(): pass")
    message = refusal(site, factory="json:load")
    assert message.startswith(
        "data.factory refers to SITE/json.py, but another module json is already loaded from "
    )
    assert message.endswith(". Rename yours.")


def test_code_on_pythonpath_is_found_too(
    site: Path, code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    code(PAIRS)
    monkeypatch.syspath_prepend(str(site))
    elsewhere = site / "site-folder"
    elsewhere.mkdir()
    assert loaded(elsewhere).shape == (2,)
