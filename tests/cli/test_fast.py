"""`--fast` of run, compare, sweep and reproduce, as a user types it.

Which format is the fastest depends on the machine; it must be the one in every config.toml.
"""

from pathlib import Path

import pytest
from program import CommandResult, Dispfl

from dispfl.runs.directory import read_config, read_summary

TINY = [
    "peers=3",
    "rounds=2",
    "topology.degree=2",
    "partition.samples_per_peer=8",
    "partition.test_samples_per_peer=4",
    "train.epochs=1",
    "workers=1",
]
SLOW_ROWS = """
from torch import nn, ones, tanh


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.linear = nn.Linear(4 * 28 * 28, 10)

    def forward(self, x):
        if x.stride(1) > 1:  # one channel, row-major
            square = ones(100, 100)
            for _ in range(300):
                square = tanh(square @ square)
        return self.linear(self.conv(x).flatten(1))
"""
REPRODUCED = """
peers = 3
rounds = 2
workers = 1
partition = { samples_per_peer = 8, test_samples_per_peer = 4 }
topology = { degree = 2 }
train = { epochs = 1 }
model = "slow_rows:Net"

[reproduce]
shows = "Table 1"
title = "Two methods."
rows = [{ method = "local" }, { method = "dispfl" }]
"""
CHOICE = "Fastest here: float32, channels_last: 0."


@pytest.fixture(autouse=True)
def _own_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network with much extra work where images are row-major, in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow_rows.py").write_text(SLOW_ROWS)


NETWORK = ["model=slow_rows:Net", "precision=float32"]


def formats(folder: str) -> set[str]:
    configs = [read_config(file.parent) for file in Path(folder).rglob("config.toml")]
    assert configs
    return {config["memory_format"] for config in configs}


def weights(path: str) -> list[str]:
    summary = read_summary(Path(path))
    assert summary is not None
    return list(summary["weights_sha256"])


def test_a_run_says_what_it_takes_and_writes_it_into_its_config(dispfl: Dispfl) -> None:
    result = dispfl("run", *TINY, *NETWORK, "--fast", "--out", "fast")
    assert result.code == 0, result.err
    assert result.out.startswith(CHOICE)
    assert formats("fast") == {"channels_last"}

    assert dispfl("run", "fast/config.toml", "--out", "again").code == 0
    assert weights("again") == weights("fast")


def test_without_fast_a_run_has_the_default(dispfl: Dispfl) -> None:
    result = dispfl("run", *TINY, *NETWORK, "--out", "plain")
    assert result.code == 0, result.err
    assert "Fastest" not in result.out
    assert formats("plain") == {"contiguous"}


def test_what_is_stated_is_kept(dispfl: Dispfl) -> None:
    stated = [*NETWORK, "memory_format=contiguous"]
    result = dispfl("run", *TINY, *stated, "--fast", "--out", "stated")
    assert result.out.startswith("Computing in float32, contiguous: there is nothing else to try")
    assert formats("stated") == {"contiguous"}


def test_a_resumed_run_keeps_its_format(dispfl: Dispfl) -> None:
    assert dispfl("run", *TINY, "--out", "run").code == 0
    assert dispfl("run", "--resume", "run", "--fast") == CommandResult(
        1,
        "",
        "dispfl: --resume continues with the run's own precision and memory_format; omit --fast.\n",
    )


def test_a_comparison_has_one_format_and_keeps_it_when_it_is_repeated(dispfl: Dispfl) -> None:
    arguments = ["local", *TINY, *NETWORK, "--out", "compared"]
    result = dispfl("compare", *arguments, "--fast")
    assert result.code == 0, result.err
    assert result.out.startswith(CHOICE)
    again = dispfl("compare", "dispfl", *arguments, "--fast")
    assert again.code == 0, again.err
    assert again.out.startswith("As in the existing runs: float32, channels_last.\n2 runs: 1 done")
    assert formats("compared") == {"channels_last"}

    without = dispfl("compare", *arguments)
    assert without.code == 1
    assert "was run with memory_format=channels_last, got contiguous" in without.err


def test_jobs_get_the_format_that_was_found(dispfl: Dispfl) -> None:
    swept = ["train.lr=0.1,0.05", *TINY, *NETWORK, "--fast", "--jobs", "2"]
    result = dispfl("sweep", *swept, "--out", "swept")
    assert result.code == 0, result.err
    assert formats("swept") == {"channels_last"}


def test_reproduce_has_one_format_for_all_runs(dispfl: Dispfl) -> None:
    Path("two.toml").write_text(REPRODUCED)
    result = dispfl("reproduce", "two.toml", "precision=float32", "--fast", "--out", "reproduced")
    assert result.code == 0, result.err
    assert result.out.startswith(CHOICE)
    assert formats("reproduced") == {"channels_last"}
