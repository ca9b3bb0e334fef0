"""Masks of channels through the Python API: users' own networks, their personal models, and what is
refused."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refused
from torch import Tensor, nn

from dispfl import DisPFL, Federation, Full, Metric, Run, Train
from dispfl.channels.channel_mask import ChannelLayout
from dispfl.errors import ConfigError, RunError
from dispfl.testing.rules import confidence

QUICK = Train(epochs=2, batch_size=8)
CONFIDENCE = Metric(confidence, higher_is_better=True)
Data = Callable[[int, int], tuple[Tensor, Tensor]]


def points(count: int, which: int) -> tuple[Tensor, Tensor]:
    return (
        torch.randn(count, 4, generator=torch.Generator().manual_seed(which)),
        torch.arange(count) % 3,
    )


def images(count: int, which: int) -> tuple[Tensor, Tensor]:
    return (
        torch.randn(count, 2, 6, 6, generator=torch.Generator().manual_seed(which)),
        torch.arange(count) % 3,
    )


def signals(count: int, which: int) -> tuple[Tensor, Tensor]:
    return (
        torch.randn(count, 2, 10, generator=torch.Generator().manual_seed(which)),
        torch.arange(count) % 3,
    )


def texts(count: int, which: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(0, 20, (count, 5), generator=torch.Generator().manual_seed(which))
    return words, torch.arange(count) % 3


class Convolutions(nn.Module):
    """A user's network, some of whose layers may be frozen."""

    def __init__(self, *frozen: str) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 16, 3, padding=1)
        self.third = nn.Conv2d(16, 12, 3, padding=1)
        self.out = nn.Linear(12, 3)
        for name in frozen:
            self.get_submodule(name).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        outputs: Tensor = self.out(self.third(self.second(x).relu()).relu().mean((2, 3)))
        return outputs


class Tied(nn.Module):
    """Two layers with one weight, and one more."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            nn.Conv2d(2, 8, 3),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
        )
        self.c.weight = self.b.weight
        self.d, self.out = nn.Conv2d(8, 16, 3), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c(self.b(self.a(x).relu()).relu()).relu()
        outputs: Tensor = self.out(self.d(x).relu().mean((2, 3)))
        return outputs


class Text(nn.Module):
    """Words, their embeddings, and optionally a recurrent layer."""

    def __init__(self, recurrent: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.memory = nn.LSTM(16, 16, batch_first=True) if recurrent else None
        self.hidden, self.out = nn.Linear(16, 240), nn.Linear(240, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        x = x.mean(1) if self.memory is None else self.memory(x)[0][:, -1]
        outputs: Tensor = self.out(self.hidden(x).relu())
        return outputs


class Constant(nn.Module):
    """A forward that only works in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = torch.eye(4).flip(0)  # neither a parameter nor a buffer
        self.hidden, self.out = nn.Linear(4, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.out(self.hidden(x @ self.turn).relu())
        return outputs


def conv1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 8, 3),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Conv1d(8, 8, 3),
        nn.Flatten(),
        nn.Linear(48, 3),
    )


def normalized() -> nn.Module:
    """Layer norm and group norm, whose statistics are over the kept channels."""
    return nn.Sequential(
        nn.Linear(4, 16),
        nn.LayerNorm(16),
        nn.ReLU(),
        nn.Linear(16, 12),
        nn.GroupNorm(3, 12),
        nn.Linear(12, 3),
    )


def run_of(
    model: Callable[[], nn.Module], data: Data, rounds: int = 2, density: float = 0.6, **more: Any
) -> tuple[Run, list[tuple[Tensor, Tensor]]]:
    """Run three peers; return the run and the peers' test data."""
    peers = [(data(20, k), data(10, 100 + k)) for k in range(3)]
    method = DisPFL(structure="channels", density=density)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The model has buffers")
        run = Federation(
            model, peers, method, Full(), train=QUICK, metric=CONFIDENCE, workers=1, rounds=rounds
        ).run(**more)
    return run, [test for _, test in peers]


@pytest.mark.parametrize(
    ("model", "data", "groups"),
    [
        (Convolutions, images, ["first", "second", "third"]),
        (lambda: Convolutions("first"), images, ["second", "third"]),
        (lambda: Convolutions("norm"), images, ["second", "third"]),
        (lambda: Convolutions("second"), images, ["third"]),
        (lambda: Convolutions("first", "norm", "second"), images, ["third"]),
        (Tied, images, ["d"]),
        (Text, texts, ["words", "hidden"]),
        (lambda: Text(recurrent=True), texts, ["hidden"]),
        (Constant, points, ["hidden"]),
        (conv1d, signals, ["0", "3"]),
        (normalized, points, ["0", "3"]),
    ],
    ids=[
        "batch norm",
        "frozen input",
        "frozen norm",
        "frozen middle",
        "frozen backbone",
        "tied weights",
        "text",
        "recurrent",
        "float32 constant",
        "conv1d",
        "layer and group norm",
    ],
)
def test_users_networks_train_small_and_their_models_have_the_reported_metric(
    model: Callable[[], nn.Module], data: Data, groups: list[str]
) -> None:
    run, tests = run_of(model, data)
    layout = run.states["000"].next_mask.layout  # type: ignore[attr-defined]
    assert isinstance(layout, ChannelLayout)
    assert [group.name for group in layout.groups] == groups
    whole = sum(parameter.numel() for parameter in model().parameters() if parameter.requires_grad)
    for k, (inputs, labels) in enumerate(tests):
        personal = run.model(k)
        kept = sum(
            parameter.numel() for parameter in personal.parameters() if parameter.requires_grad
        )
        assert kept == run.states[f"00{k}"].model.mask.kept <= 0.6 * whole
        with torch.no_grad():
            assert confidence(personal(inputs), labels) == pytest.approx(
                run.scores["confidence"][k], abs=1e-6
            )


def test_frozen_layers_keep_their_weights() -> None:
    torch.manual_seed(5)
    pretrained = Convolutions().second.state_dict()

    def model() -> nn.Module:
        network = Convolutions("first", "norm", "second")
        network.second.load_state_dict(pretrained)
        return network

    run, _ = run_of(model, images)
    for name, tensor in pretrained.items():
        assert run.model(0).get_submodule("second").state_dict()[name].equal(tensor)


def test_the_whole_network_with_zeros_computes_the_same_without_norms_over_channels() -> None:
    run, tests = run_of(Convolutions, images)
    state = run.states["000"]
    weights, mask = state.model.unpack()
    assert weights[~mask].count_nonzero() == 0
    whole = Convolutions().eval()
    nn.utils.vector_to_parameters(weights, whole.parameters())
    for name, buffer in state.buffers.items():
        whole.get_buffer(name).copy_(buffer)
    with torch.no_grad():
        torch.testing.assert_close(whole(tests[0][0]), run.model(0)(tests[0][0]))


def test_running_means_of_left_out_channels_are_kept() -> None:
    run, _ = run_of(
        lambda: nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)), points, 1
    )
    for state in run.states.values():
        means = state.buffers["1.running_mean"]
        held = torch.from_numpy(state.model.mask.units)  # type: ignore[attr-defined]
        assert means.shape == (16,)
        assert means[held].count_nonzero() == held.sum()
        assert means[~held].count_nonzero() == 0  # as at the start


class StoppedError(Exception):
    """Stops a run between two batches."""


@pytest.mark.parametrize("stop_after", [5, 17, 30, 41], ids="after {} batches".format)
def test_a_run_with_buffers_and_dropout_that_is_stopped_resumes_to_the_same_bits(
    tmp_path: Path, stop_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round has 3 x 2 x 3 = 18 batches, and every finished step is saved."""
    monkeypatch.setattr("dispfl.engines.checkpoint.SECONDS_BETWEEN_PARTS", 0.0)
    seen = 0

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        nonlocal seen
        seen += outputs.requires_grad  # not in evaluation
        if seen == stop_after and outputs.requires_grad:
            raise StoppedError
        return nn.functional.cross_entropy(outputs, labels)

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.ReLU(), nn.Linear(16, 3)
        )

    def federation(**more: Any) -> Federation:
        peers = [(points(20, k), points(10, 100 + k)) for k in range(3)]
        return Federation(
            model, peers, DisPFL(structure="channels"), Full(), train=QUICK, workers=1, **more
        )

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The model has buffers")
        expected = federation(rounds=3).run()
        with refused(RunError):
            federation(loss=loss, metric="accuracy", rounds=3).run(out=tmp_path / "run")
        resumed = federation(rounds=3).run(out=tmp_path / "run", resume=True)
    for name, state in expected.states.items():
        other = resumed.states[name]
        assert other.model.values.equal(state.model.values)
        assert other.next_mask.bits.equal(state.next_mask.bits)
        assert all(other.buffers[key].equal(buffer) for key, buffer in state.buffers.items())
    assert resumed.scores == expected.scores


class Sized(nn.Module):
    """The size of its features is written into it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(2, 8, 3, padding=1), nn.Linear(288, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.out(self.conv(x).relu().view(-1, 288))
        return outputs


class Untraceable(nn.Module):
    """Raises an exception on the inputs that it is tried with."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < 3:
            raise RuntimeError("Batches must have three samples or more.")
        outputs: Tensor = self.out(self.hidden(x))
        return outputs


@pytest.mark.parametrize(
    ("model", "data", "method", "sentence"),
    [
        (
            Sized,
            images,
            {},
            r"fails with fewer channels of conv .* x\.flatten\(1\) instead of x\.view\(-1, 1600\)",
        ),
        (
            Untraceable,
            points,
            {},
            r"cannot be traced \(RuntimeError: Batches must have three samples or more\.\)",
        ),
        (lambda: nn.Linear(4, 3), points, {}, "this network has no channels that can be left out"),
        (
            Convolutions,
            images,
            {"density": 1e-4},
            r"method\.density 0\.0001 leaves the layer first without channels",
        ),
        (
            Convolutions,
            images,
            {"keep": ("frist",)},
            r"method\.keep names 'frist', .* did you mean first\?",
        ),
    ],
    ids=["sizes", "untraceable", "nothing to cut", "density", "keep"],
)
def test_what_channels_cannot_do_is_one_sentence_and_no_directory_is_left(
    tmp_path: Path,
    model: Callable[[], nn.Module],
    data: Data,
    method: dict[str, Any],
    sentence: str,
) -> None:
    peers = [(data(20, k), data(10, 100 + k)) for k in range(3)]
    federation = Federation(
        model, peers, DisPFL(structure="channels", **method), Full(), train=QUICK, rounds=1
    )
    with pytest.raises(ConfigError, match=sentence) as caught:
        federation.run(out=tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_resumed_with_another_structure(tmp_path: Path) -> None:
    run_of(normalized, points, out=tmp_path / "run")
    peers = [(points(20, k), points(10, 100 + k)) for k in range(3)]
    other = Federation(
        normalized, peers, DisPFL(density=0.6), Full(), train=QUICK, metric=CONFIDENCE, rounds=2
    )
    with refused(ConfigError, key="method"):
        other.run(out=tmp_path / "run", resume=True)
