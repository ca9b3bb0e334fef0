"""The numbers of many peers take little space in a line, and are read as they were."""

import json

import pytest

from dispfl.runs.compact import compact, expanded
from dispfl.runs.directory import json_line

MANY = [0.1 * k for k in range(1001)]


def a_record(numbers: list[float | None]) -> dict[str, object]:
    spread = {"mean": 1.0, "std": 0.5, "per_peer": numbers}
    return {
        "round": 3,
        "train_loss": spread,
        "scores": {"accuracy": {"format": "percent", **spread}},
        "logged": {"per_peer": spread},
        "traffic": {"000": [1, 2]},
        "mixed": None,
    }


def test_numbers_of_up_to_a_thousand_peers_stay_a_list() -> None:
    record = a_record([1.5, None, *MANY[:998]])
    assert compact(record) == record
    assert expanded(record) == record


def test_numbers_of_more_peers_become_texts_with_the_same_numbers() -> None:
    record = a_record([None, *MANY])
    line = compact(record)
    texts = [line["train_loss"]["per_peer"], line["scores"]["accuracy"]["per_peer"]]
    texts.append(line["logged"]["per_peer"]["per_peer"])
    assert all(text.startswith("f8 ") for text in texts)
    assert expanded(json.loads(json_line(record))) == record


def test_a_share_that_many_peers_have_in_common_takes_a_hundredth_of_its_list() -> None:
    numbers: list[float | None] = [0.9, 0.8, None, 0.7] * 1000
    assert 100 * len(compact(a_record(numbers))["train_loss"]["per_peer"]) < len(
        json.dumps(numbers)
    )


@pytest.mark.parametrize("text", ["f8 ?", "f8 AAAA", "f8 eJwBBQD6/wAAAAAAAAUAAQ==", "many"])
def test_a_damaged_text_stays_as_it_is_and_is_refused_by_its_shape(text: str) -> None:
    record = {"train_loss": {"mean": 1.0, "std": 0.0, "per_peer": text}}
    assert expanded(record) == record
