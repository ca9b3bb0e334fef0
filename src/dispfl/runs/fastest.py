"""The fastest precision and memory format for a run on this machine, found by trying them.

A few training steps of one peer are timed with each format that this processor computes natively
and that the run's settings allow. The formats take turns, so that other work on the machine
disturbs all of them alike, and the shortest time of each counts.
"""

import itertools
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dispfl.core.allocator import keep_heap
from dispfl.core.flat_module import MemoryFormat, Precision
from dispfl.core.inputs import tensors_of
from dispfl.core.rng import forked_generators
from dispfl.core.train import Trainer, step_clock
from dispfl.experiment import RunSettings, Simulation
from dispfl.round.context import RunContext
from dispfl.round.round import initial_states

FAST_ENOUGH = 0.95
"""Another format is taken if it needs at most this share of the time; a smaller gain is noise."""
MAX_SECONDS = 3.0
"""No further turns begin after this time."""
MIN_TURNS = 2
MAX_TURNS = 10
TURN_SECONDS = 0.05
"""A turn has as many steps as take about this time, and at least one."""
MAX_STEPS = 100
NATIVE_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}
"""What processors with bf16 arithmetic have in /proc/cpuinfo: x86 the first two, ARM the last."""


class ComputeFormat(NamedTuple):
    """How a network computes: the settings of these names."""

    precision: Precision = "float32"
    memory_format: MemoryFormat = "contiguous"

    @classmethod
    def of(cls, settings: RunSettings) -> "ComputeFormat":
        """Return the format of a run."""
        return cls(settings.precision, settings.memory_format)

    def __str__(self) -> str:
        return f"{self.precision}, {self.memory_format}"


@dataclass(frozen=True)
class FastestFormat:
    """The format that was found to be the fastest, and what it gains."""

    format: ComputeFormat
    stated: ComputeFormat
    """The format that the run has otherwise: the default, unless the user states another."""
    ratio: float | None
    """Its time for a training step, divided by that of `stated`; None if nothing was tried."""

    @property
    def settings(self) -> dict[str, Any]:
        """The format as settings of a run."""
        return self.format._asdict()

    @property
    def sentence(self) -> str:
        """What was chosen, for the user."""
        is_default = self.stated == ComputeFormat()
        if self.ratio is None:
            return f"Computing in {self.format}: there is nothing else to try here."
        if self.format == self.stated:
            addition = ", the default" if is_default else ""
            return f"Fastest here: {self.format}{addition}."
        reference = "the default" if is_default else str(self.stated)
        return f"Fastest here: {self.format}: {self.ratio:.2f} of the time of {reference}."


def find_fastest(context: RunContext) -> FastestFormat:
    """Try the formats of a run on the data of its first peer; those that fail are left out."""
    stated = ComputeFormat.of(context.settings)
    trials = {}
    with forked_generators(context.settings.device):
        for compute_format in formats_to_try(context):
            trial = _prepared_trial(context, compute_format)
            if trial is not None:
                trials[compute_format] = trial
        if stated not in trials or len(trials) == 1:
            return FastestFormat(stated, stated, None)
        return fastest_of(_seconds_per_step(context, trials), stated)


def fastest_of(seconds: Mapping[ComputeFormat, float], stated: ComputeFormat) -> FastestFormat:
    """Return the format with the shortest time, or the stated one if none is clearly faster."""
    best = min(seconds, key=lambda compute_format: seconds[compute_format])
    ratio = seconds[best] / seconds[stated]
    if ratio > FAST_ENOUGH:
        return FastestFormat(stated, stated, 1.0)
    return FastestFormat(best, stated, ratio)


def formats_to_try(context: RunContext) -> list[ComputeFormat]:
    """Return the stated format, and those that differ in settings that the user has not stated.

    bf16 is tried where the hardware has it, and channels_last where inputs are images. With
    `vmap_peers` and with privacy, gradients are computed in one format only.
    """
    settings = context.settings
    stated = ComputeFormat.of(settings)
    stacks_peers = isinstance(settings, Simulation) and settings.vmap_peers > 1
    if stacks_peers or settings.privacy.enabled:
        return [stated]

    precisions: list[Precision] = [stated.precision]
    if "precision" not in settings.model_fields_set and has_native_bf16(settings.device):
        precisions.append("bf16")
    memory_formats: list[MemoryFormat] = [stated.memory_format]
    has_images = any(tensor.dim() == 4 for tensor in tensors_of(context.example()))
    if "memory_format" not in settings.model_fields_set and has_images:
        memory_formats.append("channels_last")
    return list(itertools.starmap(ComputeFormat, itertools.product(precisions, memory_formats)))


def saved_format(config: Mapping[str, Any], settings: RunSettings) -> dict[str, Any]:
    """Return the format of an existing run, as far as these settings do not state another."""
    unstated = set(ComputeFormat._fields) - settings.model_fields_set
    return {key: config[key] for key in sorted(unstated) if key in config}


def has_native_bf16(device: str) -> bool:
    """Whether a device computes in bf16 itself; elsewhere it is emulated, and much slower."""
    kind = torch.device(device).type
    if kind == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if kind != "cpu":
        return False
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return False
    return not NATIVE_BF16.isdisjoint(cpu_flags(cpuinfo))


def cpu_flags(cpuinfo: str) -> Collection[str]:
    """Return the flags of the first processor in the text of /proc/cpuinfo."""
    for line in cpuinfo.splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):  # x86, ARM
            return flags.split()
    return ()


class _Trial:
    """Training of the first peer's model in one format, always on the same batch."""

    def __init__(self, context: RunContext) -> None:
        context.check()
        peer = next(iter(context.data.peers))
        data = context.data.peers[peer]
        state = initial_states(context, {peer})[peer]
        self._model = state.model
        self._batch = data.train.take(
            torch.arange(min(context.train_of(peer).batch_size, len(data.train)))
        )
        self._trainer = Trainer(
            network=context.network().for_mask(state.model.mask),
            data=data,
            run=context.training_of(peer),
            peer=peer,
            t=0,
            buffers=state.buffers,
        )

    def seconds(self, steps: int) -> float:
        """Train so many steps, and return the time of each."""
        weights = self._model.flat()
        began = step_clock(self._trainer.network)
        self._trainer.learn(weights, self._model.mask, steps=steps, samples=self._batch)
        return (step_clock(self._trainer.network) - began) / steps


def _prepared_trial(context: RunContext, compute_format: ComputeFormat) -> _Trial | None:
    """Return a trial that has trained one step, which allocates memory; None if it fails.

    The run itself reports what is wrong with the format that it has in the end.
    """
    try:
        trial = _Trial(context.changed(**compute_format._asdict()))
        trial.seconds(1)
    except Exception:  # the settings forbid it, or a user's network, loss or optimizer fails
        return None
    return trial


def _seconds_per_step(
    context: RunContext, trials: Mapping[ComputeFormat, _Trial]
) -> dict[ComputeFormat, float]:
    """Return the shortest time of a step in each format, with as many threads as a peer has."""
    keep_heap()
    threads_before = torch.get_num_threads()
    torch.set_num_threads(_threads_of_a_peer(context))
    try:
        step_seconds = min(trial.seconds(1) for trial in trials.values())
        steps = min(MAX_STEPS, max(1, round(TURN_SECONDS / max(step_seconds, 1e-6))))
        best = dict.fromkeys(trials, math.inf)
        began = time.perf_counter()
        for turn in range(MAX_TURNS):
            if turn >= MIN_TURNS and time.perf_counter() - began > MAX_SECONDS:
                break
            for compute_format, trial in trials.items():
                best[compute_format] = min(best[compute_format], trial.seconds(steps))
    finally:
        torch.set_num_threads(threads_before)
    return best


def _threads_of_a_peer(context: RunContext) -> int:
    """Return the threads that a peer trains on: one, unless there are more than peers."""
    return max(1, context.simulation.workers // len(context.roster))
