"""Texts: tokens of words and of a tokenizer, tables, data sets of the hub, and exported models."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refused

from dispfl.config import compose
from dispfl.data.custom import load_custom
from dispfl.data.datasets import CustomData
from dispfl.data.labelled import InputFormat
from dispfl.data.text import HASHES, tokenize
from dispfl.errors import ConfigError, DataError
from dispfl.export.card import Card
from dispfl.export.formats import load_model, save_model
from dispfl.export.personal import personal_model
from dispfl.models.networks import TextNet

GOOD = ["warm", "soft"]
BAD = ["cold", "late"]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "reviews.csv"
    lines = []
    for number in range(60):
        words = GOOD if number % 2 else BAD
        lines.append(f"{number},it is {words[number % 4 // 2]} {number},{number % 2},{number}\n")
    path.write_text(f"id,review,kept,stars\n{''.join(lines)}")
    return path


def test_words_are_numbered_by_their_hash_cut_and_padded() -> None:
    tokens = tokenize(["Warm, warm!", "one two three four five", ""], "words", 4)
    ids, mask = tokens["input_ids"], tokens["attention_mask"]
    assert ids.shape == mask.shape == (3, 4)
    assert ids[0, 0] == ids[0, 2]  # Warm and warm
    assert ids[0, 0] != ids[0, 1]
    assert mask.tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]]
    assert 0 < int(ids[0, 0]) <= HASHES
    assert ids[2].tolist() == [0, 0, 0, 0]
    assert torch.equal(tokenize(["warm"], "words", 4)["input_ids"][0, :1], ids[0, :1])


def test_padding_does_not_change_the_outputs_of_the_text_network() -> None:
    network = TextNet(3)
    short = network(**tokenize(["soft and warm"], "words", 3))
    padded = network(**tokenize(["soft and warm"], "words", 9))
    assert torch.allclose(short, padded)


def test_a_table_of_texts_has_tokens_as_inputs_whatever_the_label(table: Path) -> None:
    settings = CustomData(path=str(table), text="review", label="kept", tokens=6)
    data = load_custom(settings)
    assert (data.kind, data.classes, data.shape, data.columns) == ("texts", ("0", "1"), (6,), ())
    inputs, _ = next(data.samples()[0].batches(2))
    assert set(inputs) == {"input_ids", "attention_mask"}
    form = InputFormat.of(data)
    assert InputFormat.from_json(form.to_json()) == form
    stars = load_custom(settings.model_copy(update={"label": "stars"}), "regression")
    assert stars.classes == ("stars",)
    assert stars.train_labels.shape[1] == 1
    with refused(DataError):
        load_custom(settings.model_copy(update={"text": "revue"}))
    with refused(ConfigError, key="data.tokens"):
        CustomData(path=str(table), tokens=6)
    with refused(ConfigError, key="data.standardize"):
        CustomData(path=str(table), text="review", standardize=True)


class WordLengths:
    """A tokenizer with the interface of transformers: the length of each word."""

    @classmethod
    def from_pretrained(cls, name: str) -> "WordLengths":
        if name != "lengths":
            raise OSError(f"{name} is not a tokenizer")
        return cls()

    def __call__(self, texts: list[str], **options: Any) -> dict[str, torch.Tensor]:
        length = options["max_length"]
        ids = torch.zeros(len(texts), length, dtype=torch.int64)
        for row, text in enumerate(texts):
            numbers = [len(word) for word in text.split()][:length]
            ids[row, : len(numbers)] = torch.tensor(numbers)
        segments = torch.zeros_like(ids)  # as BERT's tokenizers return them
        mask = (ids > 0).long()
        return {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask}


def test_a_tokenizer_of_transformers_is_loaded_by_name(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = CustomData(path=str(table), text="review", label="kept", tokenizer="lengths")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with refused(ConfigError, key="data.tokenizer"):
        load_custom(settings)
    library = types.SimpleNamespace(AutoTokenizer=WordLengths)
    monkeypatch.setitem(sys.modules, "transformers", library)
    inputs, _ = next(load_custom(settings).samples()[0].batches(1))
    assert inputs["input_ids"][0, :3].tolist() == [2, 2, 4]  # it is cold
    assert inputs.keys() == {"input_ids", "attention_mask"}  # all that a network must take
    with refused(DataError):
        load_custom(settings.model_copy(update={"tokenizer": "none"}))


def test_a_data_set_of_the_hub_has_a_column_of_texts(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"text": f"{GOOD[k % 2]} {k}", "label": k % 2} for k in range(40)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    data = load_custom(CustomData(hub=str(tmp_path / "saved"), text="text", tokens=4))
    assert data.kind == "texts"
    assert data.shape == (4,)
    assert data.classes == ("0", "1")


@pytest.fixture
def run(table: Path, tmp_path: Path) -> Path:
    words = ["data.text=review", "data.label=kept", "data.tokens=6", "model=text", "peers=2"]
    few = ["rounds=1", "topology=full", "partition=iid", "train.epochs=1"]
    compose({}, [f"data.path={table}", *words, *few]).run(tmp_path / "run", progress=False)
    return tmp_path / "run"


@pytest.mark.parametrize("ending", [".safetensors", ".onnx", ".pt2"])
def test_an_exported_model_takes_tokens_by_name_in_batches_of_any_size(
    run: Path, table: Path, ending: str
) -> None:
    personal = personal_model(run, "0")
    path = run / f"model{ending}"
    assert save_model(personal.network, personal.card, path).difference < 1e-5
    model = load_model(path, trust=True)
    assert model.card == personal.card
    assert model.card.input_names == ["input_ids", "attention_mask"]
    for texts in (["it is warm"], ["late", "soft and warm", ""]):
        tokens = tokenize(texts, "words", 6)
        expected = personal.network(**tokens).softmax(1)
        assert torch.allclose(model.outputs(tokens), expected, atol=1e-5)
    predictions = model.predict([table])
    assert len(predictions) == 60
    assert {name for name, _ in predictions[0].guesses} == {"0", "1"}


def test_a_model_file_does_not_choose_a_tokenizer_that_is_loaded(run: Path, table: Path) -> None:
    personal = personal_model(run, "0")
    card = Card.from_strings(personal.card.to_strings() | {"tokenizer": "somebody/elses"})
    save_model(personal.network, card, run / "model.safetensors")
    [prediction] = load_model(run / "model.safetensors").predict([table])
    assert prediction.problem is not None
    assert "add --trust" in prediction.problem


FACTORY = """import torch
from torch import nn
def load():
    tokens = torch.arange(40 * 5).view(40, 5) % 7
    return (tokens, tokens[:, 0] % 2), (tokens, tokens[:, 0] % 2)
def build():
    return nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(20, 2))
"""


def test_integer_arrays_of_a_function_are_exported_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own_tokens.py").write_text(FACTORY)
    words = ["data.factory=own_tokens:load", "model.factory=own_tokens:build", "peers=2"]
    few = ["rounds=1", "topology=full", "partition=iid", "train.epochs=1"]
    compose({}, [*words, *few]).run(tmp_path / "run", progress=False)
    personal = personal_model(tmp_path / "run", "0")
    save_model(personal.network, personal.card, tmp_path / "model.onnx")
    model = load_model(tmp_path / "model.onnx")
    tokens = torch.arange(15).view(3, 5) % 7
    assert torch.allclose(model.outputs(tokens), personal.network(tokens).softmax(1), atol=1e-5)
    assert model.card.input_names == ["inputs"]
    [prediction] = model.predict([tmp_path / "any.csv"])
    assert "run the model with your own code" in str(prediction.problem)
