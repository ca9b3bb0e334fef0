"""Feature shift: each peer's images in a way of its own."""

from pathlib import Path

import pytest
import torch
from messages import refused

from dispfl.config import compose
from dispfl.core.samples import Samples
from dispfl.data.shift import FeatureShift, check_shift
from dispfl.errors import ConfigError
from dispfl.report.peers import labels_section
from dispfl.report.results import read_results
from dispfl.runs.prepare import prepare, shift_texts
from dispfl.runs.saved import saved_context

TINY = ["peers=6", "rounds=1", "partition.samples_per_peer=8", "partition.test_samples_per_peer=4"]
IMAGE = torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).view(1, 2, 2, 1)


@pytest.mark.parametrize(
    ("choice", "pixels", "text"),
    [
        (0, [[1, 2], [3, 4]], "turned by 0°"),
        (1, [[2, 4], [1, 3]], "turned by 90°"),
        (6, [[4, 3], [2, 1]], "turned by 180°"),
    ],
)
def test_images_are_turned(choice: int, pixels: list[list[int]], text: str) -> None:
    shift = FeatureShift("rotate", choice)
    assert shift(IMAGE)[0, :, :, 0].tolist() == pixels
    assert shift.text() == text


def test_colours_are_exchanged_or_inverted() -> None:
    pixel = torch.tensor([10, 20, 30], dtype=torch.uint8).view(1, 1, 1, 3)
    assert FeatureShift("colour", 0)(pixel).flatten().tolist() == [10, 20, 30]
    assert FeatureShift("colour", 1)(pixel).flatten().tolist() == [245, 235, 225]
    assert FeatureShift("colour", 2)(pixel).flatten().tolist() == [10, 30, 20]
    assert FeatureShift("colour", 3).text() == "colours 0-2-1, negative"
    assert FeatureShift("colour", 3)(IMAGE).flatten().tolist() == [254, 253, 252, 251]


def test_a_blurred_pixel_is_the_mean_of_its_surroundings() -> None:
    """Of a 9 in the middle of zeros, 3 x 3 pixels have a ninth each."""
    image = torch.zeros(1, 5, 5, 1, dtype=torch.uint8)
    image[0, 2, 2, 0] = 9
    blurred = FeatureShift("blur", 1)(image)[0, :, :, 0]
    assert blurred[1:4, 1:4].tolist() == [[1] * 3] * 3
    assert blurred.sum() == 9
    assert FeatureShift("blur", 0)(image) is image


def bytes_of(samples: Samples) -> torch.Tensor:
    inputs, _ = next(samples.batches(len(samples)))
    assert isinstance(inputs, torch.Tensor)
    return inputs


def test_a_peers_training_and_test_images_are_shifted_alike() -> None:
    """The samples are those of the run without a shift, turned as the report says."""
    _, _, plain = prepare(compose({}, TINY))
    _, _, turned = prepare(compose({}, [*TINY, "partition.shift=rotate"]))
    texts = shift_texts({"partition": {"shift": "rotate"}, "peers": 6, "seed": 0})
    assert len(set(texts.values())) > 1
    for peer, text in texts.items():
        turns = int(text.removeprefix("turned by ").removesuffix("°")) // 90
        for part in ("train", "test"):
            before = bytes_of(getattr(plain.data.peers[peer], part))
            after = bytes_of(getattr(turned.data.peers[peer], part))
            assert torch.equal(before.rot90(turns, (2, 3)), after)


def test_peers_for_a_federation_are_those_of_the_run() -> None:
    experiment = compose({}, [*TINY, "partition.shift=blur", "seed=3"])
    dataset, _, context = prepare(experiment)
    divided = experiment.partition.peers(dataset, 6, seed=3)
    for (_, test), peer in zip(divided, context.roster, strict=True):
        assert torch.equal(bytes_of(test), bytes_of(context.data.peers[peer].test))


def test_a_run_is_read_again_with_its_shift_which_the_report_shows(tmp_path: Path) -> None:
    experiment = compose({}, [*TINY, "partition.shift=colour", "method=local", "train.epochs=1"])
    experiment.run(tmp_path / "run")
    _, _, context = prepare(experiment)
    _, read = saved_context(tmp_path / "run", experiment)
    for peer in context.roster:
        assert torch.equal(
            bytes_of(context.data.peers[peer].test), bytes_of(read.data.peers[peer].test)
        )
    section = str(labels_section(read_results([tmp_path / "run"])))
    assert "Images of each peer, in training and test (seed 0): colours" in section


def test_what_cannot_be_shifted_is_refused() -> None:
    with refused(ConfigError, key="partition.shift"):
        check_shift("blur", torch.zeros(3, 4), "classification")
    images = torch.zeros(3, 4, 5, 1, dtype=torch.uint8)
    with refused(ConfigError, key="partition.shift"):
        check_shift("rotate", images, "classification")
    with refused(ConfigError, key="partition.shift"):
        check_shift("rotate", images, "segmentation")
    check_shift("blur", images, "segmentation")
