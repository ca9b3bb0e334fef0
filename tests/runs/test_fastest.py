"""`fast`: the fastest precision and memory format of a run; what decides, and where it is saved.

Which format is faster depends on the machine. So networks here have much extra work in one of them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refused
from torch import Tensor, nn

import dispfl
from dispfl import Federation, Privacy, Run, Train
from dispfl.config import compose
from dispfl.errors import ConfigError
from dispfl.round.context import RunContext
from dispfl.runs.directory import read_config
from dispfl.runs.fastest import (
    ComputeFormat,
    FastestFormat,
    cpu_flags,
    fastest_of,
    find_fastest,
    formats_to_try,
    has_native_bf16,
)
from dispfl.runs.grid import methods_grid, with_fastest_format
from dispfl.runs.prepare import prepare

ROWS = ComputeFormat()
LAST = ComputeFormat("float32", "channels_last")
BF16 = ComputeFormat("bf16", "contiguous")
BOTH = ComputeFormat("bf16", "channels_last")
TINY = [
    "peers=3",
    "rounds=2",
    "topology.degree=2",
    "partition.samples_per_peer=8",
    "partition.test_samples_per_peer=4",
    "train.epochs=1",
    "workers=1",
]


class Net(nn.Module):
    """A convolution, with extra work where images are row-major."""

    slow_order = "rows"

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.linear = nn.Linear(4 * 8 * 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        order = "rows" if x.is_contiguous() else "last"
        if order == self.slow_order:
            square = torch.ones(100, 100)
            for _ in range(100):
                square = torch.tanh(square @ square)
        logits: Tensor = self.linear(self.conv(x).flatten(1))
        return logits


class SlowLast(Net):
    """The same with extra work where channels are last."""

    slow_order = "last"


class Viewing(Net):
    """A network that works in row-major order only."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.conv(x).view(len(x), -1))
        return logits


def images(count: int, which: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(which)
    return torch.randn(count, 3, 8, 8, generator=rng), torch.arange(count) % 3


def federation(model: Callable[[], nn.Module] = Net, **settings: Any) -> Federation:
    peers = [(images(8, k), images(4, 100 + k)) for k in range(3)]
    settings = {"rounds": 2, "train": Train(epochs=1, batch_size=4), **settings}
    return Federation(model, peers, topology="full", **settings)


def context_of(model: Callable[[], nn.Module] = Net, **settings: Any) -> RunContext:
    return federation(model, **settings)._context


def format_of(run: Run) -> ComputeFormat:
    return ComputeFormat(run.config["precision"], run.config["memory_format"])


# What decides


def test_the_shortest_time_decides_and_a_small_gain_does_not() -> None:
    seconds = {ROWS: 1.0, LAST: 0.79, BF16: 0.7, BOTH: 0.45}
    assert fastest_of(seconds, ROWS) == FastestFormat(BOTH, ROWS, 0.45)
    assert fastest_of({ROWS: 1.0, LAST: 0.95}, ROWS) == FastestFormat(LAST, ROWS, 0.95)
    assert fastest_of({ROWS: 1.0, LAST: 0.96}, ROWS) == FastestFormat(ROWS, ROWS, 1.0)
    assert fastest_of({BF16: 2.0, BOTH: 1.0}, BF16) == FastestFormat(BOTH, BF16, 0.5)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            FastestFormat(LAST, ROWS, 0.789),
            "Fastest here: float32, channels_last: 0.79 of the time of the default.",
        ),
        (
            FastestFormat(BOTH, BF16, 0.5),
            "Fastest here: bf16, channels_last: 0.50 of the time of bf16, contiguous.",
        ),
        (FastestFormat(ROWS, ROWS, 1.0), "Fastest here: float32, contiguous, the default."),
        (FastestFormat(BF16, BF16, 1.0), "Fastest here: bf16, contiguous."),
        (
            FastestFormat(ROWS, ROWS, None),
            "Computing in float32, contiguous: there is nothing else to try here.",
        ),
    ],
)
def test_one_sentence_says_what_was_taken_and_what_it_gains(
    found: FastestFormat, sentence: str
) -> None:
    assert found.sentence == sentence


def test_a_network_gets_the_format_in_which_it_has_less_to_compute() -> None:
    fastest = find_fastest(context_of(Net, precision="float32"))
    assert fastest.format == LAST
    assert fastest.ratio is not None
    assert 0 < fastest.ratio < 0.95
    kept = find_fastest(context_of(SlowLast, precision="float32"))
    assert (kept.format, kept.ratio) == (ROWS, 1.0)


# What is tried


def test_only_settings_that_the_user_does_not_state_are_tried() -> None:
    stated: dict[str, Any] = {"precision": "float32"}
    assert formats_to_try(context_of(**stated)) == [ROWS, LAST]
    assert formats_to_try(context_of(precision="bf16")) == [BF16, BOTH]
    assert formats_to_try(context_of(memory_format="channels_last", **stated)) == [LAST]
    assert formats_to_try(context_of(memory_format="contiguous", **stated)) == [ROWS]


def test_bf16_is_tried_only_on_a_processor_that_has_it() -> None:
    expected = [ROWS, LAST]
    if has_native_bf16("cpu"):
        expected = [ROWS, LAST, BF16, BOTH]
    assert formats_to_try(context_of()) == expected


@pytest.mark.parametrize(
    ("cpuinfo", "native"),
    [
        ("processor\t: 0\nflags\t\t: fpu sse2 avx512f avx512_vnni\n", False),
        ("processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16 amx_tile\n", True),
        ("flags\t\t: avx2 amx_bf16 amx_tile amx_int8\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd sve i8mm bf16 dgh\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd\n", False),
        ("", False),
    ],
)
def test_the_flags_of_x86_and_arm_tell_who_has_bf16(cpuinfo: str, native: bool) -> None:
    assert bool({"avx512_bf16", "amx_bf16", "bf16"} & {*cpu_flags(cpuinfo)}) == native


def test_no_bf16_is_offered_for_a_device_of_which_nothing_is_known() -> None:
    assert not has_native_bf16("mps")


def test_tables_have_no_channels(make_context: Callable[..., RunContext]) -> None:
    context = make_context(precision="float32")
    assert formats_to_try(context) == [ROWS]
    assert find_fastest(context) == FastestFormat(ROWS, ROWS, None)


@pytest.mark.parametrize("settings", [{"vmap_peers": 2}, {"privacy": Privacy(epsilon=8)}])
def test_settings_that_forbid_other_formats_are_respected(settings: dict[str, Any]) -> None:
    fastest = find_fastest(context_of(Net, **settings))
    assert fastest == FastestFormat(ROWS, ROWS, None)


def test_a_network_that_fails_in_a_format_is_trained_in_another() -> None:
    assert find_fastest(context_of(Viewing, precision="float32")).format == ROWS
    run = federation(Viewing, precision="float32").run(fast=True)
    assert format_of(run) == ROWS


def test_small_networks_of_channels_are_tried_as_peers_train_them() -> None:
    experiment = compose({}, [*TINY, "method.structure=channels", "precision=float32"])
    _, _, context = prepare(experiment)
    assert find_fastest(context).ratio is not None


def test_trying_draws_nothing_from_the_global_generator_and_keeps_the_threads() -> None:
    before = torch.get_rng_state()
    threads = torch.get_num_threads()
    find_fastest(context_of())
    assert torch.get_rng_state().equal(before)
    assert torch.get_num_threads() == threads


# Where it is saved


def test_a_federation_writes_its_choice_and_resumes_with_it(tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = federation(precision="float32").run(out, fast=True)
    assert format_of(first) == LAST
    assert read_config(out)["memory_format"] == "channels_last"
    now_faster_in_rows = federation(SlowLast, precision="float32")
    assert format_of(now_faster_in_rows.run(out, fast=True, resume=True)) == LAST
    with refused(ConfigError, key="memory_format"):
        federation(precision="float32").run(out, resume=True)


def test_a_run_with_the_chosen_settings_is_the_same_run(tmp_path: Path) -> None:
    fast = federation(precision="float32").run(fast=True)
    stated = federation(precision="float32", memory_format="channels_last").run()
    assert fast.summary["weights_sha256"] == stated.summary["weights_sha256"]
    assert fast.config == stated.config


def test_an_experiment_writes_its_choice_and_resumes_with_it(tmp_path: Path) -> None:
    out = tmp_path / "run"
    experiment = compose({}, TINY)
    run = experiment.run(out, fast=True)
    saved = read_config(out)
    assert format_of(run) == ComputeFormat(saved["precision"], saved["memory_format"])
    resumed = experiment.run(out, fast=True, resume=True)
    assert resumed.summary["weights_sha256"] == run.summary["weights_sha256"]
    assert format_of(dispfl.run(dict(experiment.to_toml()), fast=True)) == ROWS  # all is stated


def test_the_sentence_is_shown_where_progress_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compose({}, TINY).run(tmp_path / "shown", fast=True, progress=True)
    assert "Fastest here: " in capsys.readouterr().err
    compose({}, TINY).run(tmp_path / "hidden", fast=True, progress=False)
    assert capsys.readouterr() == ("", "")


def test_all_rows_of_a_grid_get_one_format_apart_from_what_they_state(tmp_path: Path) -> None:
    stated = "local@precision=float32,memory_format=contiguous"
    runs = methods_grid(["dispfl", "fedavg", stated, *TINY], {}, 1, tmp_path)
    runs[0].experiment.model_copy(update={"memory_format": "channels_last"}).run(runs[0].path)
    fast_runs, _ = with_fastest_format(runs)
    assert [ComputeFormat.of(run.experiment) for run in fast_runs] == [LAST, LAST, ROWS]


@pytest.mark.parametrize("saved", ["contiguous", "channels_last"])
def test_a_grid_that_is_repeated_keeps_the_format_of_its_runs(tmp_path: Path, saved: str) -> None:
    runs = methods_grid(["dispfl", "fedavg", *TINY], {}, 1, tmp_path)
    runs[0].experiment.model_copy(update={"memory_format": saved}).run(runs[0].path)
    fast_runs, sentence = with_fastest_format(runs)
    assert [run.experiment.memory_format for run in fast_runs] == [saved, saved]
    assert sentence == f"As in the existing runs: float32, {saved}."
