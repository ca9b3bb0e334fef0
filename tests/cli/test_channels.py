"""`method.structure=channels` on the command line: every refusal is one sentence, and nothing is
written before it."""

import sys
from pathlib import Path

import pytest
from program import Dispfl
from tables import small_table

from dispfl.peer.local_federation import free_ports
from dispfl.runs.directory import read_metrics, read_summary

TINY = [
    "peers=3",
    "rounds=1",
    "topology=full",
    "partition.samples_per_peer=20",
    "partition.test_samples_per_peer=10",
]
TINY += ["train.epochs=1", "workers=1"]
CHANNELS = [*TINY, "method.structure=channels"]
NETWORKS = """
from torch import nn


class Sized(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.conv, self.out = nn.Conv2d(shape[0], 8, 3, padding=1), nn.Linear(8 * 28 * 28, classes)

    def forward(self, x):
        return self.out(self.conv(x).relu().view(-1, 6272))


def sized(shape, classes):
    return Sized(shape, classes)


def linear(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, classes))
"""
BAD = {
    "density": (
        ["method.density=0.00001"],
        "method.density 1e-05 leaves the layer conv1 without channels: ",
    ),
    "one of two densities": (
        ["method.density=[0.5,0.00001]"],
        "method.density 1e-05 leaves the layer conv1 without",
    ),
    "keep": (
        ["method.keep=cnv1"],
        "method.keep names 'cnv1', which this network does not have; did you mean conv1?",
    ),
    "regrow": (
        ["method.regrow=gradient"],
        (
            "method.regrow is gradient, which needs method.structure=weights; channels regrow at"
            " random."
        ),
    ),
    "sizes": (
        ["model.factory=mine:sized"],
        (
            "method.structure is channels, but the network's forward fails with fewer channels of"
            " conv ("
        ),
    ),
    "nothing to cut": (
        ["model.factory=mine:linear"],
        (
            "method.structure is channels, but this network has no channels that can be left out."
            " Use structure=weights."
        ),
    ),
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(
        sys.modules, "mine", sys
    )  # so that neither another test's nor this one's stays loaded
    del sys.modules["mine"]
    Path("mine.py").write_text(NETWORKS)


def nothing_written() -> bool:
    return [entry.name for entry in Path().iterdir() if entry.name != "__pycache__"] == ["mine.py"]


@pytest.mark.parametrize(
    "command", [["run"], ["compare", "local", "dispfl"], ["up"]], ids=lambda words: words[0]
)
@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_one_sentence_before_anything_is_trained_or_written(
    dispfl: Dispfl, command: list[str], case: str
) -> None:
    words, sentence = BAD[case]
    result = dispfl(*command, *CHANNELS, *words)
    assert result.code == 1
    assert result.err.startswith(f"dispfl: {sentence}")
    assert result.err.count("\n") == 1
    if case == "sizes":
        assert "x.flatten(1) instead of x.view(-1, 1600)" in result.err
    assert nothing_written()


def test_a_sweep_is_refused_before_its_first_run_if_the_last_one_cannot_run(dispfl: Dispfl) -> None:
    result = dispfl("sweep", "method.density=0.5,0.00001", *CHANNELS)
    assert result.code == 1
    assert result.err.startswith(
        "dispfl: method.density 1e-05 leaves the layer conv1 without channels"
    )
    assert nothing_written()


def test_a_site_is_refused_when_it_starts_and_writes_no_run(dispfl: Dispfl) -> None:
    Path("table.csv").write_text(small_table(8))
    data = [
        "model=mlp",
        "data.path=table.csv",
        "data.label=y",
        "rounds=1",
        "method.structure=channels",
    ]
    for name, words, sentence in (
        ("alice", ["method.density=0.00001"], "method.density 1e-05 leaves the layer"),
        (
            "bob",
            ["method.keep=nothing"],
            "method.keep names 'nothing', which this network does not have",
        ),
    ):
        listen = f"127.0.0.1:{free_ports(1)[0]}"
        assert (
            dispfl("peer", "init", name, "--name", name, "--listen", listen, *data, *words).code
            == 0
        )
        result = dispfl("peer", "run", name, "--alone")
        assert result.code == 1
        assert sentence in result.err
        assert not (Path(name) / "run").exists()


def test_keep_without_channels_is_refused(dispfl: Dispfl) -> None:
    result = dispfl("run", *TINY, "method.keep=conv1")
    assert (result.code, result.err) == (
        1,
        "dispfl: method.keep is conv1, which needs method.structure=channels; omit it.\n",
    )
    assert nothing_written()


@pytest.mark.parametrize(("first", "other"), [("weights", "channels"), ("channels", "weights")])
def test_a_run_is_not_resumed_with_another_structure_and_stays_as_it_is(
    dispfl: Dispfl, first: str, other: str
) -> None:
    assert dispfl("run", *TINY, f"method.structure={first}", "--out", "run").code == 0
    before = read_metrics(Path("run"))
    Path("run/summary.json").unlink()
    result = dispfl("run", "--resume", "run", f"method.structure={other}")
    assert result.code == 1
    assert result.err.startswith(f"dispfl: run was run with method.structure={first}, got {other}.")
    assert dispfl("run", "--resume", "run").code == 0
    assert read_metrics(Path("run")) == before


def test_a_network_with_sizes_in_its_forward_runs_with_masks_of_single_weights(
    dispfl: Dispfl,
) -> None:
    """Also with images of one channel, whose order in memory is ambiguous."""
    result = dispfl("run", *TINY, "model.factory=mine:sized", "--out", "run")
    assert result.code == 0, result.err


@pytest.mark.parametrize(
    "words",
    [
        ["topology=ring"],
        ["topology=grid"],
        ["topology=exponential"],
        [
            "topology=random",
            "topology.degree=2",
            "topology.offline_prob=0.5",
            "topology.offline=skip",
        ],
        ["topology=full", "topology.offline_prob=0.5"],
        ["wire.values=float16", "wire.coding=zstd"],
        ["wire.values=bfloat16", "wire.exchange=push"],
        ["wire.values=int8"],
        ["method.keep=conv1", "method.layers=erk"],
        ["vmap_peers=2"],
        ["precision=bf16"],
        ["memory_format=channels_last"],
    ],
    ids=lambda words: words[0],
)
def test_every_setting_of_a_run_works_with_channels(dispfl: Dispfl, words: list[str]) -> None:
    result = dispfl(
        "run", *CHANNELS, "peers=5", "rounds=2", "method.density=[0.3,0.8]", *words, "--out", "run"
    )
    assert result.code == 0, result.err
    summary = read_summary(Path("run"))
    assert summary is not None
    assert (summary["rounds"], summary["failures"]) == (2, 0)
