"""Theorem 1: by hand, against the printed formula in 60 digits, and with extreme values.

By hand: with one sample, a batch of one, delta = e^-2 and s = beta D_g / (tau sigma), epsilon~ = x
= s + s^2 / 2. With 32 steps and delta~ = 1/e, epsilon' = epsilon~ (8 + 32 tanh(epsilon~ / 2)); for
epsilon~ = ln 3 that is 24 ln 3.
"""

import json
import math
from dataclasses import replace
from decimal import Decimal, localcontext
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from messages import refused
from PIL import Image

from dispfl.core.packed import PackedModel, WeightMask
from dispfl.core.report import Report
from dispfl.core.train import batch_count
from dispfl.errors import ConfigError, RunError
from dispfl.methods.base import PeerState
from dispfl.paper.generalization_bound import (
    GeneralizationBound,
    Premises,
    composed_log_delta,
    plot_bound,
    premises_of_run,
    step_epsilon,
    theorem_1,
)
from dispfl.round.context import StepResult
from dispfl.runs.directory import RunDirectory

LN3 = math.log(3)
S_OF_LN3 = math.sqrt(1 + 2 * LN3) - 1  # s + s^2 / 2 = ln 3
BY_HAND = Premises(
    samples=1,
    batch=1,
    steps=32,
    noise=1,
    diameter=S_OF_LN3,
    union_density=1,
    delta=math.exp(-2),
    delta_tilde=math.exp(-1),
)
USEFUL = Premises(samples=50_000, batch=50, steps=1000, noise=1, diameter=4, union_density=0.9)


def test_epsilon_of_a_step_on_all_samples_is_s_plus_half_its_square() -> None:
    assert step_epsilon(replace(BY_HAND, diameter=2)) == pytest.approx(2 + 2)
    assert step_epsilon(replace(BY_HAND, diameter=2), corrected=True) == pytest.approx(2 * 2 + 2)
    assert step_epsilon(replace(BY_HAND, diameter=8, union_density=0.5, noise=2)) == pytest.approx(
        2 + 2
    )  # s = 2 again


def test_epsilon_of_a_step_on_one_of_two_samples_is_the_log_of_the_mean_of_1_and_exp_x() -> None:
    assert step_epsilon(replace(BY_HAND, samples=2, diameter=2)) == pytest.approx(
        math.log((1 + math.exp(4)) / 2)
    )


def test_the_whole_theorem_by_hand() -> None:
    found = theorem_1(BY_HAND)
    a, b = 3 / 4 * math.exp(-2), 1 / 4 * math.exp(-2)
    delta = 3.0**-28 * 2.0**32 * 7.0**-28 + 2 - (1 - a) ** 24 * (1 - b) ** 8 - (1 - b) ** 32
    assert found.epsilon_step == pytest.approx(LN3)
    assert found.epsilon == pytest.approx(24 * LN3)
    assert found.delta == pytest.approx(delta)
    assert found.bound == pytest.approx(216 * LN3)
    assert found.probability == 1.0  # 1 - exp(-e') d'/e' ln(2 / 26.4) is above 1
    assert found.vacuous


def test_the_printed_tail_is_3_to_the_minus_28_and_the_corrected_one_3_to_the_28() -> None:
    tiny_delta = replace(BY_HAND, delta=1e-300)
    printed, corrected = (composed_log_delta(tiny_delta, LN3, 24, c) for c in (False, True))
    assert printed == pytest.approx(math.log(2**32 / 7**28 / 3**28))
    assert corrected == pytest.approx(math.log(2**32 / 7**28 * 3**28))


def test_only_the_corrected_tail_bounds_32_coin_flips() -> None:
    """T steps with a privacy loss of exactly epsilon~ are coin flips with odds 3 to 1, whose delta
    can be counted."""
    exact = sum(
        math.comb(32, heads) * max(0, 3**heads - 3 ** (24 + 32 - heads)) / 4**32
        for heads in range(33)
    )  # p(heads) - exp(e') q(heads)
    tiny_delta = replace(BY_HAND, delta=1e-300)
    printed, corrected = (
        math.exp(composed_log_delta(tiny_delta, LN3, 24, c)) for c in (False, True)
    )
    assert printed < 1e-20 < exact < corrected < BY_HAND.delta_tilde


def test_sub_sampling_scales_the_corrected_delta_by_tau_over_n() -> None:
    far = replace(BY_HAND, samples=4, steps=1_000_000, delta=1e-9)  # the tail is below exp(-1000)
    e, ratio = 0.4, 900_000
    printed, corrected = (math.exp(composed_log_delta(far, e, ratio, c)) for c in (False, True))
    assert printed / corrected == pytest.approx(4, rel=1e-3)


def in_60_digits(p: Premises) -> tuple[Decimal, Decimal, Decimal]:
    """Return epsilon~, epsilon' and delta' exactly as printed in the theorem."""
    with localcontext(prec=60):
        N, tau, T, sigma, D, beta, d, d_tilde = (
            Decimal(x)
            for x in (
                p.samples,
                p.batch,
                p.steps,
                p.noise,
                p.diameter,
                p.union_density,
                p.delta,
                p.delta_tilde,
            )
        )
        two, one = Decimal(2), Decimal(1)
        x = (
            two.sqrt() * beta * D * sigma / tau * (one / d).ln().sqrt() + (beta * D / tau) ** 2
        ) / (2 * sigma**2)
        e = ((N - tau) / N + tau / N * x.exp()).ln()
        e_all = (2 * T * (one / d_tilde).ln() * e**2).sqrt() + T * e * (e.exp() - 1) / (e.exp() + 1)
        over = T * e - e_all
        tail = (-(e_all + T * e) / 2).exp() * (1 / (1 + e.exp()) * (2 * T * e / over)) ** T
        tail *= ((T * e + e_all) / over) ** (-(e_all + T * e) / (2 * e))
        k = (e_all / e).to_integral_value("ROUND_CEILING")
        stays = 1 - d / (1 + e.exp())
        return (
            e,
            e_all,
            tail + 2 - (1 - e.exp() * d / (1 + e.exp())) ** k * stays ** (T - k) - stays**T,
        )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"samples": 50},
        {"steps": 1_000_000},
        {"steps": 1_000_000, "diameter": 1e-6},
        {"steps": 1_000_000, "diameter": 150, "delta": 1e-3},
        {"noise": 1e6, "delta_tilde": 0.5},
        {"steps": 30, "delta": 0.5},
        {"union_density": 1e-4},
    ],
)
def test_the_numbers_agree_with_the_printed_formulas(changes: dict[str, float]) -> None:
    premises = replace(USEFUL, **changes)
    found, (e, e_all, delta) = theorem_1(premises), in_60_digits(premises)
    assert found.epsilon_step == pytest.approx(float(e), rel=1e-12)
    assert found.epsilon == pytest.approx(float(e_all), rel=1e-12)
    assert found.delta == pytest.approx(float(delta), rel=1e-8)


def test_premises_with_a_useful_bound() -> None:
    found = theorem_1(USEFUL)
    assert found.conditions_hold
    assert not found.vacuous
    assert found.notes == ()
    assert found.bound == pytest.approx(0.382749, rel=1e-5)
    assert found.epsilon is not None
    assert found.delta is not None
    failure = math.exp(-found.epsilon) * found.delta / found.epsilon * math.log(2 / found.epsilon)
    assert found.probability == pytest.approx(1 - failure)


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("changes", [{}, {"noise": 1e-3}, {"steps": 1_000_000}, {"samples": 50}])
def test_the_bound_grows_with_the_union_density(changes: dict[str, float], corrected: bool) -> None:
    bounds = [
        theorem_1(replace(USEFUL, union_density=n / 50, **changes), corrected).bound
        for n in range(51)
    ]
    heights = [bound for bound in bounds if bound is not None]
    assert len(heights) == 51
    assert all(low < high for low, high in pairwise(heights))


def test_the_corrected_bound_is_never_smaller() -> None:
    for beta in (0.001, 0.1, 1.0):
        premises = replace(USEFUL, union_density=beta)
        printed, corrected = theorem_1(premises).bound, theorem_1(premises, corrected=True).bound
        assert printed is not None
        assert corrected is not None
        assert corrected > printed


def test_a_note_says_how_many_samples_the_theorem_needs() -> None:
    found = theorem_1(replace(USEFUL, diameter=0.5))
    assert found.epsilon is not None
    assert found.delta is not None
    needed = 2 / found.epsilon**2 * math.log(16 * math.exp(found.epsilon) / found.delta)
    assert not found.conditions_hold
    assert not found.vacuous
    assert found.notes == (
        (
            "The theorem's conditions do not hold: a bound this small needs "
            f"{math.ceil(needed):,} samples or more, and a peer has 50,000."
        ),
    )


def test_delta_does_not_exist_with_too_few_steps_or_too_little_noise() -> None:
    """sqrt(2 T ln(1e5)) is below T where T is above 2 ln(1e5) = 23.03; for 23 steps it is
    23.0129."""
    few = theorem_1(replace(USEFUL, steps=23, diameter=1e-3))
    assert (few.delta, few.probability, few.conditions_hold) == (None, None, False)
    assert (
        "(23.0129) is below the number of steps (23). More --steps or a larger --delta-tilde"
        in few.notes[0]
    )
    assert theorem_1(replace(USEFUL, steps=24, diameter=1e-3)).delta is not None
    quiet = theorem_1(replace(USEFUL, noise=1e-3))
    assert (quiet.delta, quiet.conditions_hold, quiet.vacuous) == (None, False, True)
    assert "More --noise would help." in quiet.notes[0]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"diameter": 10}, "it allows a gap of 1.194, and a gap between errors cannot exceed 1."),
        ({"noise": 1e-200}, "it allows a gap of more than can be computed"),
        ({"noise": 10, "delta": 1e-3}, "the probability with which it holds may be 0."),
    ],
)
def test_a_note_says_why_a_bound_is_vacuous(changes: dict[str, float], sentence: str) -> None:
    found = theorem_1(replace(USEFUL, **changes))
    assert found.vacuous
    assert sentence in found.notes[-1]


@pytest.mark.parametrize("nothing", [{"union_density": 0.0}, {"noise": 1e300, "diameter": 1e-300}])
def test_without_privacy_loss_the_bound_is_0_and_the_conditions_do_not_hold(
    nothing: dict[str, float],
) -> None:
    found = theorem_1(replace(USEFUL, **nothing))
    assert found == GeneralizationBound(0.0, 0.0, None, 0.0, None, False, False, found.notes)
    assert "epsilon' is 0" in found.notes[0]


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("steps", [1, 1_000_000])
@pytest.mark.parametrize("samples", [50, 1e15])
@pytest.mark.parametrize("delta", [5e-324, 1 - 1e-16])
def test_no_premises_cause_overflow(
    samples: float, steps: int, delta: float, corrected: bool
) -> None:
    for noise in (5e-324, 1e-160, 1e-3, 1.0, 1e160, 1e308):
        for diameter in (5e-324, 1.0, 1e308):
            for beta in (0.0, 5e-324, 1.0):
                premises = Premises(
                    samples, 50, steps, noise, diameter, beta, delta, delta_tilde=delta
                )
                found = theorem_1(premises, corrected)
                json.dumps(found.as_json(), allow_nan=False)
                assert found.probability is None or 0 <= found.probability <= 1
                assert found.delta is None or 0 <= found.delta < 3 + 1e-6
                assert found.conditions_hold or found.notes
                assert not any("inf" in note or "nan" in note for note in found.notes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"samples": 0}, "--samples must be a whole number of at least 1, got 0."),
        ({"steps": 2.5}, "--steps must be a whole number of at least 1, got 2.5."),
        ({"steps": math.inf}, "--steps must be a whole number of at least 1, got inf."),
        ({"batch": 50_001}, "--batch must be at most --samples, got 50001. A batch cannot exceed"),
        (
            {"noise": 0},
            "--noise must be above 0 and finite, got 0. The theorem assumes noise in every step.",
        ),
        ({"noise": math.nan}, "--noise must be above 0 and finite, got nan."),
        ({"diameter": -1}, "--diameter must be above 0 and finite, got -1."),
        (
            {"union_density": 90},
            "--union-density must be in [0, 1], got 90. For 90% of the weights write 0.9.",
        ),
        ({"union_density": -0.1}, "--union-density must be in [0, 1], got -0.1."),
        (
            {"delta": 1},
            "--delta must be in (0, 1), got 1. It is a small probability, such as 1e-5.",
        ),
        ({"delta_tilde": 0}, "--delta-tilde must be in (0, 1), got 0."),
    ],
)
def test_invalid_premises_are_refused_with_the_name_of_their_option(
    changes: dict[str, float], sentence: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        replace(USEFUL, **changes)
    assert str(refused.value).startswith(sentence)


def test_a_last_batch_of_one_sample_is_merged() -> None:
    assert [batch_count(n, 32) for n in (1, 32, 33, 34, 64, 65, 66)] == [1, 1, 1, 2, 2, 2, 3]
    assert [batch_count(n, 1) for n in (1, 2, 3)] == [1, 2, 3]


def saved_run(
    path: Path, masks: list[list[int]], samples: list[int], rounds: int = 2, **train: float
) -> Path:
    """Create a run from Python of 3 planned rounds, 2 epochs and batches of 8, with these kept ones
    of 10 weights."""
    config = {
        "made_in_python": True,
        "rounds": 3,
        "peers": len(masks),
        "samples": samples,
        "method": {"name": "dispfl"},
        "train": {"epochs": 2, "batch_size": 8, **train},
    }
    directory = RunDirectory.create(path, config)
    for number, kept in enumerate(masks):
        mask = torch.zeros(10, dtype=torch.bool)
        mask[kept] = True
        model = PackedModel.pack(torch.ones(10), mask)
        everything = WeightMask.pack(torch.ones(10, dtype=torch.bool))
        directory.checkpoints.add(
            rounds - 1, f"{number:03d}", StepResult(Report(), state=PeerState(model, everything))
        )
    directory.checkpoints.complete(rounds - 1)
    directory.close()
    return path


def test_a_run_determines_the_union_of_masks_samples_and_steps(tmp_path: Path) -> None:
    """Peers of 20 and 33 samples have 3 and 4 batches of 8; two rounds of two epochs are at most 16
    steps."""
    path = saved_run(tmp_path / "run", [[0, 1, 2], [2, 3], [0, 9]], [20, 33, 20])
    found, notes = premises_of_run(path)
    assert found == {"samples": 20, "batch": 8, "steps": 16, "union_density": 0.5}
    assert notes == [
        f"{path} has finished 2 of 3 rounds; the steps are those of the finished ones."
    ]


def test_the_noise_of_a_run_is_used_if_it_has_any(tmp_path: Path) -> None:
    found, notes = premises_of_run(
        saved_run(tmp_path / "run", [[0]], [5], rounds=3, noise_std=0.25)
    )
    assert found == {
        "samples": 5,
        "batch": 5,
        "steps": 6,
        "union_density": 0.1,
        "noise": 0.25,
    }  # one batch of all
    assert notes == []
    assert (
        "noise" not in premises_of_run(saved_run(tmp_path / "silent", [[0]], [5], noise_std=0.0))[0]
    )


def test_a_folder_without_a_run_or_without_a_finished_round_is_refused(tmp_path: Path) -> None:
    with refused(RunError):
        premises_of_run(tmp_path)
    RunDirectory.create(tmp_path / "begun", {"rounds": 3, "made_in_python": True}).close()
    with refused(RunError):
        premises_of_run(tmp_path / "begun")


def test_the_figure_has_the_curve_the_point_and_the_shaded_vacuous_region(tmp_path: Path) -> None:
    plot_bound(replace(USEFUL, diameter=8), tmp_path / "bound.png")
    with Image.open(tmp_path / "bound.png") as image:
        pixels = np.asarray(image.convert("RGB"))
    assert pixels.shape == (630, 1050, 3)
    blue, orange, grey = (
        np.asarray((pixels == colour).all(axis=2))
        for colour in ((31, 119, 180), (255, 127, 14), (236, 236, 236))
    )
    assert blue.sum() > 1000
    assert orange.sum() > 100
    assert np.flatnonzero(grey.any(axis=1)).min() < 100  # at the top
    columns = [int(np.flatnonzero(blue[:, x])[0]) for x in (420, 620, 820)]
    assert columns == sorted(columns, reverse=True)  # it grows to the right


def test_the_axes_are_labelled(tmp_path: Path) -> None:
    plot_bound(USEFUL, tmp_path / "bound.svg")
    text = (tmp_path / "bound.svg").read_text()
    assert "union density β: fraction of the weights that at least one peer keeps" in text
    assert "bound on the generalization gap, 9ε′" in text
    assert "conditions do not hold" in text


def test_invalid_figures_are_refused(tmp_path: Path) -> None:
    with refused(ConfigError, key="--plot"):
        plot_bound(USEFUL, tmp_path / "bound.gif")
    with refused(ConfigError, key="--plot"):
        plot_bound(replace(USEFUL, noise=1e-300), tmp_path / "bound.png")
    assert not list(tmp_path.iterdir())
