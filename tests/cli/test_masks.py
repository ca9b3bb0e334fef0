"""`dispfl masks` on run directories with masks and labels chosen by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from dispfl.channels.channel_mask import ChannelMask
from dispfl.cli.masks import masks
from dispfl.config import compose
from dispfl.core.masks import hamming
from dispfl.core.report import Report
from dispfl.data.split import Split
from dispfl.errors import ConfigError, RunError
from dispfl.federation import Federation
from dispfl.methods.base import initial_state
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.fedavg import FedAvg
from dispfl.paper.generalization_bound import premises_of_run
from dispfl.round.context import StepResult
from dispfl.runs.directory import RunDirectory, personal_states, write_split
from dispfl.runs.execute import ExperimentRun
from dispfl.topology import peer_names

APP = typer.Typer()
APP.command()(masks)
SIZE = 105_962
"""Weights of the small network on 28x28 grey images, of which the first 144 are conv1.weight."""
SHIFTS = [0, 100, 200, 300, 20_000, 20_100, 20_200, 20_300]
BUILT_IN = {
    "rounds": 1,
    "method": {"name": "dispfl"},
    "data": {"name": "fashion-sample"},
    "model": {"name": "cnn"},
    "partition": {"name": "grouped", "groups": 2},
}
PYTHON = {"made_in_python": True, "rounds": 1, "method": {"name": "dispfl"}}


def a_mask(shift: int, kept: int = SIZE // 2) -> torch.Tensor:
    """Keep consecutive weights from `shift` on; two such masks differ in twice the difference of
    their shifts."""
    mask = torch.zeros(SIZE, dtype=torch.bool)
    mask[shift : shift + kept] = True
    return mask


def a_run(
    path: Path,
    peer_masks: list[torch.Tensor],
    labels: list[list[int]] | None = None,
    config: dict[str, Any] | None = None,
    overlap: float | None = None,
) -> Path:
    """Create a run of one round with these masks and label counts."""
    directory = RunDirectory.create(path, config or BUILT_IN)
    for name, mask in zip(peer_names(len(peer_masks)), peer_masks, strict=True):
        state = initial_state(torch.ones(len(mask)), mask)
        directory.checkpoints.add(0, name, StepResult(Report(), state=state))
    directory.append({"round": 0} | ({"overlap": {"mean": overlap, "std": 0.1}} if overlap else {}))
    directory.checkpoints.complete(0)
    directory.close()
    if labels:
        nobody = (torch.zeros(0, dtype=torch.int64),) * len(labels)
        write_split(path, Split(nobody, nobody), torch.tensor(labels))
    return path


def grouped(path: Path, **more: Any) -> Path:
    """Eight peers in two groups; the cosine between the groups' labels is 3/5."""
    return a_run(path, [a_mask(shift) for shift in SHIFTS], [[3, 4]] * 4 + [[6, 0]] * 4, **more)


def call(*arguments: str | Path) -> str:
    result = CliRunner().invoke(APP, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.exception
    return result.stdout


def refusal(*arguments: str | Path) -> Exception:
    problem = CliRunner().invoke(APP, [str(argument) for argument in arguments]).exception
    assert isinstance(problem, Exception)
    return problem


def row(text: str, name: str) -> list[str]:
    [line] = [line for line in text.splitlines() if line.strip().startswith(name)]
    return line.strip().removeprefix(name).split()


def test_json_has_the_matrices_by_hand(tmp_path: Path) -> None:
    """Shifts of 0 and 20,000 make 40,000 of 105,962 weights differ. Two peers keep some of the
    first 144 weights."""
    found = json.loads(call(grouped(tmp_path / "run"), "--json"))
    assert found["peers"] == [f"00{k}" for k in range(8)]
    assert found["distances"][0] == [2 * shift / SIZE for shift in SHIFTS]
    assert found["similarities"][0] == [1] * 4 + [0.6] * 4
    assert found["groups"] == [4, 4]
    assert found["densities"] == [0.5] * 8
    assert found["correlation"]["pairs"] == 28
    assert found["overlap"] == []
    assert found["layers"][0] == {
        "name": "conv1.weight",
        "weights": 144,
        "least": 0,
        "mean": pytest.approx((1 + 44 / 144) / 8),
        "most": 1,
    }
    assert not (tmp_path / "run" / "masks.png").exists()


def test_closer_data_and_closer_masks_are_reported(tmp_path: Path) -> None:
    """Of 28 pairs 12 are within a group: closer in both. Ties bring the correlation to -sqrt(1344 /
    1794) = -0.87.

    One order of the peers in 35 has the same groups, so p is near 0.03.
    """
    text = call(grouped(tmp_path / "run", overlap=0.75))
    assert text.splitlines()[0] == "dispfl, 8 peers in 2 groups, after 1 round"
    assert text.splitlines()[1].startswith(
        "Closer data, closer masks: rank correlation -0.87 over 28 pairs (p = 0.0"
    )
    assert row(text, "within a group") == ["0.002", "0.003", "0.006"]  # 200 / 105,962 and so on
    assert row(text, "between groups") == ["0.372", "0.377", "0.383"]
    assert row(text, "distance of masks") == [
        "0.002",
        "0.217",
        "0.383",
    ]  # (12 x 333.3 + 16 x 40,000) / 28 / 105,962
    assert row(text, "similarity of labels") == ["0.600", "0.771", "1.000"]
    assert "A neighbour keeps 0.750 of a peer's kept weights in round 1, 0.750 in round 1." in text
    assert text.splitlines()[-1] == f"Written: {tmp_path / 'run' / 'masks.png'}"


def test_the_correlation_between_groups_is_reported_separately(tmp_path: Path) -> None:
    """Between groups 0 1, 0 2 and 1 2 the cosines are 0.6, 0 and 0.8, the shifts 1000, 9000 and
    8000.

    Each holds for four pairs, so their ranks are 6.5, 2.5, 10.5 and 2.5, 10.5, 6.5. Around their
    mean, 6.5, these are 0, -4, 4 and -4, 4, 0: a correlation of -16 / 32.
    """
    shifts = [0, 0, 1000, 1000, 9000, 9000]
    labels = [[1, 0]] * 2 + [[3, 4]] * 2 + [[0, 1]] * 2
    config = BUILT_IN | {"partition": {"name": "grouped", "groups": 3}}
    path = a_run(tmp_path / "run", [a_mask(shift) for shift in shifts], labels, config)
    assert "Between groups only, the rank correlation is -0.50 over 12 pairs." in call(path)
    assert json.loads(call(path, "--json"))["between_groups"] == pytest.approx(-0.5)


def test_few_peers_show_no_clear_relation_despite_a_strong_correlation(tmp_path: Path) -> None:
    """Three pairs in perfect order, as one in three shuffles of three peers would have them."""
    path = a_run(
        tmp_path / "run", [a_mask(shift) for shift in (0, 100, 1000)], [[1, 0], [4, 3], [0, 1]]
    )
    sentence = json.loads(call(path, "--json"))["sentence"]
    assert sentence.startswith(
        "No clear relation between data and masks: rank correlation -1.00 over 3 pairs (p = 0.3"
    )


def test_equal_data_have_nothing_to_correlate(tmp_path: Path) -> None:
    path = a_run(tmp_path / "run", [a_mask(shift) for shift in (0, 100, 1000)], [[1, 1]] * 3)
    found = json.loads(call(path, "--json"))
    assert found["correlation"] is None
    assert found["sentence"].startswith("There is nothing to correlate")


def test_a_run_made_in_python_has_distances_only(tmp_path: Path) -> None:
    path = a_run(
        tmp_path / "run",
        [torch.tensor([True, True, False]), torch.tensor([True, False, True])],
        None,
        PYTHON,
    )
    text = call(path)
    assert "The run saved no split" in text
    assert row(text, "distance of masks") == ["0.667"] * 3
    assert "if independent" not in text
    assert "density over peers" not in text
    assert "The run did not record the overlap with neighbours" in text
    assert json.loads(call(path, "--json"))["similarities"] is None


def test_masks_of_custom_data_are_compared_without_their_layers(tmp_path: Path) -> None:
    config = {
        **BUILT_IN,
        "data": {"name": "custom", "path": "patients.csv"},
        "model": {"name": "mlp"},
    }
    text = call(
        a_run(
            tmp_path / "run",
            [a_mask(shift) for shift in SHIFTS[:3]],
            [[3, 4], [6, 0], [0, 6]],
            config,
        )
    )
    assert row(text, "distance of masks")[0] == f"{200 / SIZE:.3f}"
    assert row(text, "similarity of labels")[0] == "0.000"
    assert "density over peers" not in text


def test_different_densities_are_noted(tmp_path: Path) -> None:
    path = a_run(
        tmp_path / "run", [a_mask(0), a_mask(0), a_mask(0, SIZE // 5)], [[1, 0], [1, 1], [0, 1]]
    )
    assert (
        "The peers' densities differ, which increases the distance of masks regardless of the data."
        in call(path)
    )


def test_the_title_of_an_unfinished_run_has_its_finished_rounds(tmp_path: Path) -> None:
    text = call(grouped(tmp_path / "run", config=BUILT_IN | {"rounds": 30}))
    assert text.splitlines()[0].endswith("after 1 of 30 rounds")


def test_the_figure_is_bright_where_peers_are_close(tmp_path: Path) -> None:
    """Left: data; right: masks. In both, the first group's rows are yellow on the left, the
    second's on the right."""
    call(grouped(tmp_path / "run"), "--out", tmp_path / "figure.png")
    with Image.open(tmp_path / "figure.png") as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    yellow = (pixels[..., 0] > 230) & (pixels[..., 1] > 200) & (pixels[..., 2] < 60)
    for half in np.array_split(yellow, 2, axis=1):
        upper, lower = (np.flatnonzero(half[int(height * len(half))]) for height in (0.35, 0.65))
        assert len(upper) > 50
        assert len(lower) > 50
        assert upper.max() < lower.min()
    assert not (tmp_path / "run" / "masks.png").exists()


@pytest.mark.parametrize(("ending", "begins"), [("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_vector_figures(tmp_path: Path, ending: str, begins: bytes) -> None:
    call(grouped(tmp_path / "run", overlap=0.5), "--json", "--out", tmp_path / f"figure.{ending}")
    assert (tmp_path / f"figure.{ending}").read_bytes().startswith(begins)


def test_the_numbers_are_printed_even_if_the_figure_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(
        APP, [str(grouped(tmp_path / "run")), "--out", str(tmp_path / "file" / "masks.png")]
    )
    assert "could not be written" in str(result.exception)
    assert "distance of masks" in result.stdout
    assert "Written" not in result.stdout


def test_an_unknown_figure_format_is_refused_first(tmp_path: Path) -> None:
    problem = refusal(tmp_path / "none", "--out", "masks.jpg")
    assert isinstance(problem, ConfigError)
    assert str(problem) == "--out must end in .png, .pdf or .svg, got masks.jpg."


def test_a_real_run_of_three_peers(
    tmp_path: Path, net: Callable[[], nn.Module], points: Callable[[int, int], Any]
) -> None:
    """67 weights each; the final states tell which of them are kept."""
    peers = [(points(20, k), points(10, 1000 + k)) for k in range(3)]
    run = Federation(net, peers, DisPFL(density=0.5), workers=1, rounds=2).run(out=tmp_path / "run")
    found = json.loads(call(tmp_path / "run", "--json"))
    kept = [state.model.mask.unpack() for state in run.states.values()]
    assert found["distances"] == [[hamming(one, other) / 67 for other in kept] for one in kept]
    assert [entry["round"] for entry in found["overlap"]] == [1, 2]
    assert all(0 < entry["mean"] <= 1 for entry in found["overlap"])


def test_masks_of_channels_are_compared_weight_by_weight(
    tmp_path: Path, net: Callable[[], nn.Module], points: Callable[[int, int], Any]
) -> None:
    peers = [(points(20, k), points(10, 1000 + k)) for k in range(3)]
    run = Federation(
        net, peers, DisPFL(density=0.5, structure="channels"), workers=1, rounds=2
    ).run(out=tmp_path / "run")
    found = json.loads(call(tmp_path / "run", "--json"))
    kept = [state.model.mask.unpack() for state in run.states.values()]
    assert len(kept[0]) == 67
    assert found["distances"] == [[hamming(one, other) / 67 for other in kept] for one in kept]
    assert found["densities"] == [int(mask.sum()) / 67 for mask in kept]
    assert found["channels"]
    text = call(tmp_path / "run")
    assert text.splitlines()[0] == "dispfl with masks of channels, 3 peers, after 2 rounds"
    assert "The masks are of channels; a weight is kept where all of its channels are." in text


def test_a_run_of_a_built_in_model_with_channels_has_the_density_of_each_layer(
    tmp_path: Path,
) -> None:
    """Two of three peers keep the same units; the small network's shapes say how dense each layer
    is."""
    overrides = [
        "method.structure=channels",
        "peers=3",
        "rounds=1",
        "topology.degree=2",
        "workers=1",
    ]
    overrides += [
        "partition.samples_per_peer=8",
        "partition.test_samples_per_peer=4",
        "train.epochs=1",
    ]
    ExperimentRun.create(compose({}, overrides), tmp_path / "run").run()
    found = json.loads(call(tmp_path / "run", "--json"))
    mask = personal_states(tmp_path / "run")["000"].model.mask
    assert isinstance(mask, ChannelMask)
    small = dict(zip(mask.small.names, mask.small.sizes, strict=True))
    assert [layer["mean"] for layer in found["layers"]] == pytest.approx(
        [small[layer["name"]] / layer["weights"] for layer in found["layers"]]
    )
    premises, notes = premises_of_run(tmp_path / "run")
    union = sum(
        state.model.mask.unpack().int() for state in personal_states(tmp_path / "run").values()
    )
    assert isinstance(union, torch.Tensor)
    assert premises["union_density"] == int((union > 0).sum()) / SIZE
    assert notes == [
        "The masks are of channels; the union density is that of the weights that they keep."
    ]


def test_peers_that_share_a_model_have_no_masks_to_compare(
    tmp_path: Path, net: Callable[[], nn.Module], points: Callable[[int, int], Any]
) -> None:
    peers = [(points(20, k), points(10, 1000 + k)) for k in range(3)]
    Federation(net, peers, FedAvg(cohort=2), workers=1, rounds=1).run(out=tmp_path / "run")
    problem = refusal(tmp_path / "run")
    assert isinstance(problem, RunError)
    assert "has no masks to compare: all models of fedavg are dense" in str(problem)


def test_runs_that_cannot_be_compared_are_refused_with_a_sentence(tmp_path: Path) -> None:
    refused = {
        refusal(
            a_run(tmp_path / "a", [a_mask(0)])
        ): "has one peer only; comparing masks needs two or more.",
        refusal(
            a_run(tmp_path / "b", [a_mask(0)] * 2, [[1, 1]] * 3)
        ): "the labels of 3 peers but the masks of 2",
        refusal(
            a_run(tmp_path / "c", [a_mask(0)[:99_999]] * 2)
        ): "a model of 105962 weights, but those in the checkpoint",
        refusal(tmp_path): "is not a run directory: it has no config.toml.",
    }
    for problem, sentence in refused.items():
        assert isinstance(problem, RunError)
        assert sentence in str(problem)
