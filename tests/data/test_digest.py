"""The digest of data, by which a resumed run knows them again."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from messages import refused
from torch import Tensor
from torch.utils.data import Dataset

from dispfl import Federation, Full, Local, Train
from dispfl.config import compose
from dispfl.core.samples import Samples
from dispfl.data.batches import DatasetSamples, ResidentSamples, data_digest
from dispfl.errors import ConfigError, RunError
from dispfl.runs.directory import read_data_digest
from dispfl.testing.rounds import tiny_network

Points = Callable[[int, int], tuple[Tensor, Tensor]]


def test_equal_data_have_equal_digests_and_every_value_label_and_order_counts(
    points: Points,
) -> None:
    x, y = points(20, 0)
    same, other, relabelled = x.clone(), x.clone(), y.clone()
    other[7, 2] += 1e-6
    relabelled[3] += 1
    reference = data_digest([ResidentSamples(x, y)])
    assert data_digest([ResidentSamples(same, y.clone())]) == reference
    different = [
        ResidentSamples(other, y),
        ResidentSamples(x, relabelled),
        ResidentSamples(x.flip(0), y.flip(0)),
        ResidentSamples(x.double(), y),
        ResidentSamples(x[:-1], y[:-1]),
    ]
    assert len({reference, *(data_digest([samples]) for samples in different)}) == 6


def test_a_part_of_the_samples_has_the_digest_of_its_own_rows(points: Points) -> None:
    x, y = points(20, 0)
    rows = torch.tensor([1, 5, 6])
    assert data_digest([ResidentSamples(x, y).take(rows)]) == data_digest(
        [ResidentSamples(x[rows], y[rows])]
    )


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise from NumPy-like hidden state: another input each time."""

    def __init__(self, label: int = 0, *, noisy: bool = True) -> None:
        self.reads, self.label, self.noisy = 0, label, noisy

    def __len__(self) -> int:
        return 10

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        self.reads += self.noisy
        return torch.full((2,), float(row + self.reads)) + torch.rand(2), torch.tensor(self.label)


def test_of_a_dataset_three_samples_are_read_and_random_inputs_do_not_count() -> None:
    before = torch.random.get_rng_state()
    noisy, quiet = (data_digest([DatasetSamples(Noisy(noisy=noise))]) for noise in (True, False))
    assert data_digest([DatasetSamples(Noisy())]) == noisy != quiet
    assert data_digest([DatasetSamples(Noisy(noisy=False))]) == quiet
    assert data_digest([DatasetSamples(Noisy(label=1))]) != noisy
    assert torch.equal(torch.random.get_rng_state(), before)


class Streamed:
    """Samples of a class of one's own."""

    def __len__(self) -> int:
        return 2

    def batches(
        self, size: int, *, rng: torch.Generator | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        yield torch.zeros(2, 3), torch.tensor([0, 1])

    def take(self, rows: Tensor) -> Samples:
        raise NotImplementedError


def test_samples_of_an_own_class_are_read_as_batches() -> None:
    assert len(data_digest([Streamed()])) == 64


def test_a_python_resume_with_other_data_is_refused(points: Points, tmp_path: Path) -> None:
    def run(changed: float, *, resume: bool) -> None:
        x, y = points(20, 0)
        x[3, 1] += changed
        peers = [((x, y), points(10, 1)), (points(20, 2), points(10, 3))]
        federation = Federation(
            tiny_network, peers, Local(), Full(), train=Train(epochs=1), rounds=1
        )
        federation.run(out=tmp_path / "run", resume=resume)

    run(0.0, resume=False)
    run(0.0, resume=True)
    with refused(ConfigError, key="peers"):
        run(0.5, resume=True)


def test_the_command_line_refuses_other_inputs_with_the_same_labels(tmp_path: Path) -> None:
    def table(shift: float, count: int = 60) -> None:
        rows = "".join(f"{k % 3 + shift},{k},{k % 3}\n" for k in range(count))
        (tmp_path / "points.csv").write_text(f"a,b,label\n{rows}")

    experiment = compose(
        {},
        [
            f"data.path={tmp_path / 'points.csv'}",
            f"data.test_path={tmp_path / 'points.csv'}",
            "model=mlp",
            "peers=2",
            "rounds=1",
            "topology=full",
            "partition.samples_per_peer=12",
            "train.epochs=1",
        ],
    )
    table(0.0)
    experiment.run(tmp_path / "run")
    experiment.run(tmp_path / "run", resume=True)
    table(1.0)
    with refused(RunError):
        experiment.run(tmp_path / "run", resume=True)
    table(0.0, 30)
    with refused(RunError):
        experiment.run(tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    "part", ["global_test", "unseen/train/000", "unseen/test/000", "validation/000"]
)
def test_data_without_the_rows_of_any_part_of_the_split_are_refused(
    part: str, tmp_path: Path
) -> None:
    settings = [
        "peers=2",
        "rounds=1",
        "topology=full",
        "unseen_peers=1",
        "train.epochs=1",
        "unseen_steps=1",
    ]
    division = [
        "partition.samples_per_peer=12",
        "partition.validation=0.5",
        "partition.global_test_samples=5",
    ]
    experiment = compose({}, [*settings, *division])
    experiment.run(tmp_path / "run")
    file = tmp_path / "run" / "split.safetensors"
    split, metadata = (
        safetensors.torch.load_file(file),
        {"data_sha256": read_data_digest(tmp_path / "run")},
    )
    split[part][-1] = (
        4000  # the bundled sample has 4,000 training samples, and half as many test samples
    )
    safetensors.torch.save_file(split, file, metadata)
    with refused(RunError):
        experiment.run(tmp_path / "run", resume=True)
