"""Robust averages: dense ones beside the published rules, written down here by hand, and what masks
add."""

from math import inf, nan

import numpy as np
import pytest
import torch
from tests.channels.test_units import half_of, units_of
from torch import Tensor

from dispfl.core.chunks import CHUNK
from dispfl.core.packed import PackedModel, WeightMask
from dispfl.robust.rules import Rule, robust_average_of, trimmed_mean

RULES: tuple[Rule, ...] = ("clip", "trim", "nnm")


def packed(*rows: str | list[float | None]) -> list[PackedModel]:
    """Models from rows of weights; None is a weight that the model does not hold."""
    models = []
    for row in rows:
        held = torch.tensor([weight is not None for weight in row])
        models.append(
            PackedModel.pack(torch.tensor([float(weight or 0.0) for weight in row]), held)
        )
    return models


def dense_models(
    count: int, size: int, seed: int = 0
) -> tuple[np.ndarray, list[PackedModel], Tensor]:
    """Random models that hold everything, as an array and packed, and the mask that keeps
    everything."""
    weights = (
        torch.randn(count, size, generator=torch.Generator().manual_seed(seed))
        + 0.3 * torch.arange(count)[:, None]
    )
    full = torch.ones(size, dtype=torch.bool)
    return weights.double().numpy(), [PackedModel.pack(row, full) for row in weights], full


def average(
    models: list[PackedModel], own: int, rule: Rule, b: int, keeps: Tensor | None = None
) -> list[float]:
    keeps = torch.ones(models[0].mask.size, dtype=torch.bool) if keeps is None else keeps
    return [
        round(weight, 5)
        for weight in robust_average_of(models, own, WeightMask.pack(keeps), rule, b)[0].tolist()
    ]


# dense models: the published rules


def test_dense_clip_is_clipped_gossip_with_the_threshold_of_cs_plus() -> None:
    """x_i + 1/n sum_j CLIP(x_j - x_i, tau), where tau is the (2b+1)-th largest of the distances
    |x_j - x_i|."""
    weights, models, full = dense_models(7, 500)
    own, b = 2, 2
    differences = weights - weights[own]
    distances = np.sqrt((differences**2).sum(1))
    tau = sorted(np.delete(distances, own))[-(2 * b + 1)]
    clipped = [
        d * min(1.0, tau / size) if size else d
        for d, size in zip(differences, distances, strict=True)
    ]
    expected = weights[own] + sum(clipped) / 7
    found, trust = robust_average_of(models, own, WeightMask.pack(full), "clip", b)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert sum(scale < 1 for k, scale in enumerate(trust.scale.tolist()) if k != own) == 2 * b
    assert trust.distances == pytest.approx((distances / 500**0.5).tolist(), rel=1e-5)


def test_dense_trim_is_the_trimmed_mean() -> None:
    weights, models, full = dense_models(7, 500)
    expected = np.sort(weights, axis=0)[2:-2].mean(0)
    np.testing.assert_allclose(
        robust_average_of(models, 0, WeightMask.pack(full), "trim", 2)[0].numpy(),
        expected,
        rtol=1e-5,
        atol=1e-6,
    )


def test_dense_nnm_averages_the_nearest_models_before_it_trims() -> None:
    """y_i = mean of the n - b models nearest to x_i, itself included; then the trimmed mean of all
    y_i."""
    weights, models, full = dense_models(7, 500)
    b = 2
    pairs = ((weights[:, None] - weights[None]) ** 2).sum(2)
    mixed = np.array([weights[np.argsort(row, kind="stable")[: 7 - b]].mean(0) for row in pairs])
    expected = np.sort(mixed, axis=0)[b:-b].mean(0)
    np.testing.assert_allclose(
        robust_average_of(models, 0, WeightMask.pack(full), "nnm", b)[0].numpy(),
        expected,
        rtol=1e-4,
        atol=1e-5,
    )


def test_trim_and_nnm_of_four_models_by_hand() -> None:
    """One Byzantine peer among (1, 2), (4, 5), (7, 8) and (100, -100).

    trim: the means of 4 and 7, and of 2 and 5. nnm: the three nearest to each of the honest models
    are the honest ones, with the mean (4, 5); those of the Byzantine peer are itself, (7, 8) and
    (4, 5), with the mean (37, -29). Of three times 4 and 37 the middle two are 4; of three times 5
    and -29 they are 5.
    """
    models = packed([1, 2], [4, 5], [7, 8], [100, -100])
    assert average(models, 0, "trim", 1) == [5.5, 3.5]
    assert average(models, 0, "nnm", 1) == [4.0, 5.0]


def test_a_server_clips_around_its_own_model_and_does_not_average_it() -> None:
    """Centred clipping (Karimireddy et al. 2021): v + 1/n sum_k CLIP(x_k - v, tau)."""
    weights, models, full = dense_models(6, 300)
    centre, uploads = weights[5], weights[:5]
    distances = np.sqrt(((uploads - centre) ** 2).sum(1))
    tau = sorted(distances)[-3]
    expected = (
        centre
        + sum((x - centre) * min(1, tau / d) for x, d in zip(uploads, distances, strict=True)) / 5
    )
    found, _ = robust_average_of(models, 5, WeightMask.pack(full), "clip", 1, averages_own=False)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)
    found, _ = robust_average_of(models, 5, WeightMask.pack(full), "trim", 1, averages_own=False)
    np.testing.assert_allclose(
        found.numpy(), np.sort(uploads, axis=0)[1:-1].mean(0), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("b", [1, 2, 3])
def test_the_trimmed_mean_of_holders_is_that_of_a_loop_over_weights(b: int) -> None:
    rng = np.random.default_rng(b)
    values, held = rng.normal(size=(9, 400)), rng.random((9, 400)) < 0.9
    found = trimmed_mean(
        torch.tensor(np.where(held, values, nan)).float(), torch.tensor(held).sum(0), b
    ).numpy()
    enough = held.sum(0) > 2 * b
    assert enough.sum() > 100
    for k in np.flatnonzero(enough):
        assert found[k] == pytest.approx(np.sort(values[held[:, k], k])[b:-b].mean(), abs=1e-5)


def test_a_huge_value_leaves_the_trimmed_mean_exact() -> None:
    values = torch.tensor([[1.0], [2.0], [3.0], [4.0], [3e38]])
    assert trimmed_mean(values, 5, 1).tolist() == [3.0]


# what masks add; in all of these the first model is ours and b is 1


def test_distances_are_compared_a_weight_so_that_overlaps_of_any_size_compare() -> None:
    """All differ by 1 in every common weight, so none is clipped, whether 1, 2 or 4 weights are
    common."""
    models = packed([1, 1, 1, 1], [2, None, None, None], [2, 2, None, None], [2, 2, 2, 2])
    assert average(models, 0, "clip", 1) == [
        1.75,
        1.66667,
        1.5,
        1.5,
    ]  # the plain average of the holders


def test_differences_beyond_the_third_largest_are_clipped_to_it() -> None:
    """Distances 1, 2, 4, 10: tau is 2, so 4 counts as 2 and -10 as -2."""
    models = packed([0.0, 0.0], [1, 1], [-2, 2], [4, 4], [-10, -10])
    assert average(models, 0, "clip", 1) == [(1 - 2 + 2 - 2) / 5, (1 + 2 + 2 - 2) / 5]


def test_senders_that_cannot_be_compared_do_not_let_a_stranger_through() -> None:
    """Three neighbours hold none of our weights, so the stranger is the only one to compare with:
    too few to judge."""
    models = packed([0.0, None], [None, 5], [None, 5], [None, 5], [100, None])
    assert average(models, 0, "clip", 1) == [0.0, 0.0]
    models = packed(
        [0.0, None], [None, 5], [None, 5], [None, 5], [0.0, 9]
    )  # the stranger copies us
    assert average(models, 0, "clip", 1) == [0.0, 0.0]


@pytest.mark.parametrize("rule", RULES)
def test_a_regrown_weight_never_takes_a_sole_strangers_value(rule: Rule) -> None:
    """The last two weights are new to us. The stranger, far from us elsewhere, is the only holder
    of one of them."""
    near = [0.1, 0.1, None, 2], [-0.1, 0.1, None, 2], [0.1, -0.1, None, 2]
    models = packed([0, 0, None, None], *near, [9, 9, 5, None])
    assert average(models, 0, rule, 1)[2:] == [0.0, 2.0]


@pytest.mark.parametrize("rule", RULES)
def test_a_regrown_weight_takes_the_mean_of_near_senders(rule: Rule) -> None:
    """Two near senders hold it, too few to trim; a third, the only holder of another one, makes
    their sizes known."""
    models = packed(
        [0, 0, None, None],
        [0.1, 0.1, 2, None],
        [-0.1, 0.1, 4, None],
        [0.1, -0.1, None, 4],
        [9, 9, None, None],
    )
    assert average(models, 0, rule, 1)[2:] == [
        2.0,
        2.0,
    ]  # sizes 2, 4, 4: all are scaled to the third largest, 2


def test_regrown_weights_of_a_near_sender_are_scaled_to_the_size_of_the_others() -> None:
    """It copies us where it can be compared and sends 100 where it cannot: as much as the next but
    one, 2, counts."""
    models = packed([0, None], [0.0, 100], [0.0, 3], [0.0, 2], [0.0, 1])
    assert average(models, 0, "clip", 1) == [0.0, (2 + 2 + 2 + 1) / 4]


def test_a_weight_with_few_holders_is_averaged_over_ourselves_and_near_senders() -> None:
    """Trim needs three holders. The second weight has two, we and a near one; the third, we and a
    stranger."""
    models = packed(
        [0, 0, 1], [0.2, 0.2, None], [-0.2, None, None], [0.2, None, None], [9, None, 9]
    )
    assert average(models, 0, "trim", 1) == [pytest.approx((0.2 + 0.2 + 0) / 3, abs=1e-5), 0.1, 1.0]


def test_too_few_answers_leave_our_own_weights() -> None:
    models = packed([1, 2, None], [5, 5, 5], [5, 5, 5])
    for rule in ("clip", "trim"):
        assert average(models, 0, rule, 1)[2] == 0.0
    assert average(models, 0, "clip", 1) == [1.0, 2.0, 0.0]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("attack_model", [inf, nan, 1e30])
def test_models_with_numbers_that_are_not_finite_are_ignored(
    rule: Rule, attack_model: float
) -> None:
    honest = packed([0.0, 1, 2], [0.1, 1, 2], [0.0, 1.1, 2], [0.0, 1, 2.1], [0.1, 1.1, 2])
    byzantine_peers = PackedModel(torch.full((3,), attack_model), honest[0].mask)
    found = average([*honest, byzantine_peers], 0, rule, 1)
    assert found == pytest.approx([0.03, 1.03, 2.03], abs=0.05)


@pytest.mark.parametrize("rule", RULES)
def test_a_peer_without_a_model_trims(rule: Rule) -> None:
    models = packed([None, None], [1, 1], [2, None], [3, None], [90, 90])
    assert average(models, 0, rule, 1) == [pytest.approx(2.5 if rule != "nnm" else 2.0), 0.0]


@pytest.mark.parametrize("rule", RULES)
def test_only_what_we_request_counts_so_that_a_simulation_and_real_peers_agree_to_the_bit(
    rule: Rule,
) -> None:
    """A real peer receives models under its next mask alone, in a simulation the whole ones are at
    hand."""
    size, rng = CHUNK + 1000, torch.Generator().manual_seed(0)
    models = []
    for _ in range(7):
        mask = torch.rand(size, generator=rng) < 0.5
        models.append(PackedModel.pack(torch.randn(size, generator=rng), mask))
    keeps = torch.rand(size, generator=rng) < 0.5
    request = PackedModel.pack(torch.zeros(size), keeps).mask
    received = [model if k == 3 else model.restrict(request) for k, model in enumerate(models)]
    whole, restricted = (
        robust_average_of(some, 3, request, rule, 2) for some in (models, received)
    )
    assert whole[0].view(torch.int32).equal(restricted[0].view(torch.int32))
    assert whole[1].distances == restricted[1].distances
    assert not whole[0][~keeps].any()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["cnn", "mlp", "normalized"])
def test_with_masks_of_units_the_average_is_that_of_single_weights(name: str, rule: Rule) -> None:
    layout, models = units_of(name), []
    for seed in range(7):
        mask = half_of(layout, seed)
        models.append(
            PackedModel(torch.randn(mask.kept, generator=torch.Generator().manual_seed(seed)), mask)
        )
    mask = half_of(layout, 9)
    found, trust = robust_average_of(models, 0, mask, rule, 1)
    trusted = [m.mask.units for k, m in enumerate(models) if k == 0 or trust.near[k]]  # type: ignore[attr-defined]
    mask = layout.mask(mask.units & np.logical_or.reduce(trusted))  # without units that start anew
    found, trust = robust_average_of(models, 0, mask, rule, 1)
    single = [PackedModel.pack(*model.unpack()) for model in models]
    expected, of_single = robust_average_of(single, 0, WeightMask.pack(mask.unpack()), rule, 1)
    torch.testing.assert_close(found, expected[mask.unpack()], rtol=1e-4, atol=1e-5)
    assert trust.distances == pytest.approx(of_single.distances, rel=1e-4)


def test_a_unit_that_only_strangers_hold_starts_anew() -> None:
    from tests.channels.test_block_average import TINY, tiny

    def with_units(shift: float, units: list[bool]) -> PackedModel:
        values = torch.linspace(-1, 1, TINY.mask(np.array(units)).kept) + shift
        return tiny(units, *values.tolist())

    two, all_units = [True, True, False], [True, True, True]
    models = [
        with_units(0, two),
        *(with_units(0.01 * k, two) for k in range(1, 4)),
        with_units(50, all_units),
    ]
    mask = TINY.mask(np.array(all_units))
    first = torch.arange(1.0, TINY.size + 1)
    found, trust = robust_average_of(models, 0, mask, "clip", 1)
    trusted = [model.mask for row, model in enumerate(models) if row == 0 or trust.near[row]]
    mask.start_unheld_(found, trusted, lambda: first)
    hidden, bias, linear, _ = TINY.views(found)
    assert hidden[2].tolist() == first[4:6].tolist()
    assert bias[2] == first[8]
    assert linear[:, 2].tolist() == [0.0, 0.0]
