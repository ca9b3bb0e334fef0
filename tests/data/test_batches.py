"""Batches: normalization, crops and flips against explicit loops, and the data that users may
pass."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from dispfl.core.rng import stream
from dispfl.data.batches import (
    DatasetSamples,
    ImageTransform,
    ResidentSamples,
    random_crop,
    random_flip,
    samples_from,
)
from dispfl.errors import DataError

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def images(count: int, height: int = 5, width: int = 6, channels: int = 3) -> Tensor:
    """Different bytes everywhere, none of them black, channels last."""
    size = (count, height, width, channels)
    return torch.randint(
        1, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


def numbered(count: int) -> ResidentSamples:
    """Samples whose input and label are their own row number."""
    return ResidentSamples(torch.arange(count), torch.arange(count))


def sizes(samples: ResidentSamples | DatasetSamples, size: int) -> list[int]:
    return [len(labels) for _, labels in samples.batches(size)]


def test_normalization_is_the_pixel_over_255_minus_the_mean_over_the_deviation() -> None:
    originals = images(2)
    floats = ImageTransform(MEAN, STD)(originals)
    assert floats.shape == (2, 3, 5, 6)
    assert floats.dtype == torch.float32
    for channel in range(3):
        expected = (originals[..., channel].double() / 255 - MEAN[channel]) / STD[channel]
        torch.testing.assert_close(floats[:, channel].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("training", [True, False])
def test_networks_get_row_major_images(channels: int, training: bool) -> None:
    transform = ImageTransform(MEAN[:channels], STD[:channels], crop=True, flip=True)
    floats = transform(images(4, channels=channels), rng=stream(0, "batches") if training else None)
    assert floats.shape == (4, channels, 5, 6)
    assert floats.stride() == (
        channels * 30,
        30,
        6,
        1,
    )  # of one channel too, whose strides would select other kernels


def test_without_a_generator_nothing_is_random() -> None:
    plain, augmented = ImageTransform(MEAN, STD), ImageTransform(MEAN, STD, crop=True, flip=True)
    assert augmented(images(20)).equal(plain(images(20)))
    assert not augmented(images(20), rng=stream(0, "batches")).equal(plain(images(20)))


def test_transforming_does_not_modify_the_images() -> None:
    originals = images(4)
    ImageTransform(MEAN, STD, crop=True, flip=True)(originals, rng=stream(0, "batches"))
    assert originals.equal(images(4))


def window(image: Tensor, top: int, left: int) -> Tensor:
    """The window of an image padded by 4 black pixels, pixel by pixel."""
    height, width, _ = image.shape
    cut = torch.zeros_like(image)
    for y in range(height):
        for x in range(width):
            from_y, from_x = y + top - 4, x + left - 4
            if 0 <= from_y < height and 0 <= from_x < width:
                cut[y, x] = image[from_y, from_x]
    return cut


def test_each_crop_is_one_of_the_81_windows_of_the_padded_image_and_they_vary() -> None:
    originals = images(12)
    cropped = random_crop(originals, stream(0, "batches"))
    places = set()
    for before, after in zip(originals, cropped, strict=True):
        positions = [
            (top, left)
            for top in range(9)
            for left in range(9)
            if window(before, top, left).equal(after)
        ]
        assert positions, "not a window of the padded image"
        places.add(positions[0])
    assert len(places) > 6


def test_crops_reach_every_offset_from_0_to_8_in_both_directions() -> None:
    dot = torch.zeros(500, 9, 9, 1, dtype=torch.uint8)
    dot[:, 4, 4] = 1  # the middle lands at 8 - top, 8 - left
    _, y, x, _ = random_crop(dot, stream(0, "batches")).nonzero(as_tuple=True)
    assert sorted(set(y.tolist())) == sorted(set(x.tolist())) == list(range(9))


def test_each_flip_is_the_image_or_its_mirror_image_about_half_of_the_time() -> None:
    originals = images(200)
    flipped = random_flip(originals, stream(0, "batches"))
    mirrored = 0
    for before, after in zip(originals, flipped, strict=True):
        mirror = torch.stack([before[:, x] for x in reversed(range(before.shape[1]))], dim=1)
        assert after.equal(before) or after.equal(mirror)
        mirrored += int(after.equal(mirror))
    assert 70 < mirrored < 130  # four standard deviations of 200 coins


def test_without_a_generator_rows_come_in_order_and_with_one_each_comes_once() -> None:
    assert torch.cat([labels for _, labels in numbered(10).batches(4)]).tolist() == list(range(10))
    shuffled = torch.cat(
        [labels for _, labels in numbered(10).batches(4, rng=stream(0, "batches"))]
    ).tolist()
    assert shuffled != list(range(10))
    assert sorted(shuffled) == list(range(10))


def test_the_same_generator_gives_another_order_in_the_next_epoch() -> None:
    rng = stream(0, "batches")
    first, second = ([y.tolist() for _, y in numbered(10).batches(10, rng=rng)] for _ in range(2))
    assert first != second


def test_inputs_and_labels_stay_together() -> None:
    for inputs, labels in numbered(10).batches(3, rng=stream(0, "batches")):
        assert inputs.equal(labels)


@pytest.mark.parametrize(
    ("count", "size", "expected"),
    [
        (9, 4, [4, 5]),
        (10, 4, [4, 4, 2]),
        (8, 4, [4, 4]),
        (1, 4, [1]),
        (5, 4, [5]),
        (3, 1, [1, 1, 1]),
    ],
)
def test_a_last_batch_of_one_is_merged_with_the_previous_one(
    count: int, size: int, expected: list[int]
) -> None:
    assert sizes(numbered(count), size) == expected
    assert sizes(DatasetSamples(Numbered(count)), size) == expected


def test_an_index_selects_the_peers_rows() -> None:
    samples = ResidentSamples(torch.arange(10), torch.arange(10), index=torch.tensor([7, 2, 5]))
    assert len(samples) == 3
    assert [y.tolist() for _, y in samples.batches(10)] == [[7, 2, 5]]


class Numbered(Dataset[tuple[Tensor, Tensor]]):
    """A user's own Dataset, with plain numbers as labels."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> Any:
        return torch.tensor([float(row)]), row


def test_a_users_dataset_is_collated_and_fetched_row_by_row() -> None:
    [(inputs, labels)] = samples_from(Numbered(3), "It").batches(10)
    assert inputs.tolist() == [[0.0], [1.0], [2.0]]
    assert labels.tolist() == [0, 1, 2]


def rows_of(samples: ResidentSamples | DatasetSamples) -> list[list[float]]:
    return [[*inputs.tolist(), *labels.tolist()] for inputs, labels in samples.batches(100)]


def test_take_returns_the_given_rows_in_order() -> None:
    subset = numbered(10).take(torch.tensor([7, 2, 5]))
    assert len(subset) == 3
    assert rows_of(subset) == [[7, 2, 5, 7, 2, 5]]


def test_take_counts_rows_within_the_peers_index() -> None:
    samples = ResidentSamples(torch.arange(10), torch.arange(10), index=torch.tensor([9, 8, 4, 1]))
    assert rows_of(samples.take(torch.tensor([3, 0, 2])).take(torch.tensor([1, 2]))) == [
        [9, 4, 9, 4]
    ]
    assert len(samples) == 4


def test_taking_copies_no_inputs_and_keeps_the_transform() -> None:
    transform = ImageTransform(MEAN, STD)
    samples = ResidentSamples(images(6), torch.arange(6), transform=transform)
    subset = samples.take(torch.tensor([4, 1]))
    assert subset.inputs is samples.inputs
    [(inputs, labels)] = subset.batches(8)
    assert labels.tolist() == [4, 1]
    assert inputs.equal(transform(images(6)[[4, 1]]))


def test_take_from_a_users_dataset_fetches_its_rows() -> None:
    dataset = DatasetSamples(Numbered(10))
    subset = dataset.take(torch.tensor([7, 2, 5])).take(torch.tensor([2, 0]))
    assert len(subset) == 2
    [(whole_inputs, whole_labels)], [(inputs, labels)] = dataset.batches(10), subset.batches(10)
    assert inputs.equal(whole_inputs[[5, 7]])
    assert labels.equal(whole_labels[[5, 7]])


def test_tensors_and_a_tensor_dataset_are_equivalent() -> None:
    inputs, labels = torch.randn(4, 2), torch.arange(4)
    for originals in ((inputs, labels), [inputs, labels], TensorDataset(inputs, labels)):
        samples = samples_from(originals, "It")  # type: ignore[arg-type]
        assert isinstance(samples, ResidentSamples)
        assert samples.inputs is inputs


class Endless(IterableDataset[tuple[Tensor, Tensor]]):
    """A Dataset without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(())


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            (torch.zeros(3, 2), torch.zeros(2)),
            "Peer 3's data has 3 inputs but 2 labels; give as many of each.",
        ),
        (
            (torch.zeros(0, 2), torch.zeros(0)),
            "Peer 3's data is empty; every peer needs at least one sample.",
        ),
        (Numbered(0), "Peer 3's data is empty; every peer needs at least one sample."),
        (
            (torch.zeros(3),),
            "Peer 3's data must be a Dataset or a pair (inputs, labels) of tensors, got (Tensor).",
        ),
        (
            TensorDataset(torch.zeros(3)),
            "Peer 3's data must be a Dataset or a pair (inputs, labels) of tensors, got (Tensor).",
        ),
        (
            ([1, 2], [0, 1]),
            (
                "Peer 3's data must be a Dataset or a pair (inputs, labels) of tensors, got (list,"
                " list)."
            ),
        ),
        (
            (np.zeros(2), np.zeros(2)),
            (
                "Peer 3's data must be a Dataset or a pair (inputs, labels) of tensors, got"
                " (ndarray, ndarray). Convert arrays with torch.from_numpy."
            ),
        ),
        (
            torch.zeros(3, 2),
            "Peer 3's data must be a Dataset with a length or a pair (inputs, labels), got Tensor.",
        ),
        (
            Endless(),
            (
                "Peer 3's data must be a Dataset with a length or a pair (inputs, labels), got"
                " Endless."
            ),
        ),
        (
            None,
            (
                "Peer 3's data must be a Dataset with a length or a pair (inputs, labels), got"
                " NoneType."
            ),
        ),
    ],
)
def test_invalid_samples_are_refused_with_one_sentence(given: Any, sentence: str) -> None:
    with pytest.raises(DataError) as refusal:
        samples_from(given, "Peer 3's data")
    assert str(refusal.value) == sentence
