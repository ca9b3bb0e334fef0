"""Attacks: each lie by hand, which peers lie, poisoned data, and attacked runs."""

from dataclasses import replace
from math import sqrt
from statistics import NormalDist

import numpy as np
import pytest
import torch
from tests.channels.test_block_average import TINY, tiny

from dispfl.channels.channel_mask import ChannelMask
from dispfl.config import compose
from dispfl.core.averaging import average_of
from dispfl.core.packed import PackedModel, WeightMask
from dispfl.data.batches import ResidentSamples
from dispfl.errors import ConfigError
from dispfl.methods.dispfl import DisPFL
from dispfl.registry import METHODS
from dispfl.robust.attacks import (
    ATTACK_FUNCTIONS,
    ATTACKS,
    Attack,
    Poisoned,
    Target,
    backdoor_success,
    with_trigger,
)
from dispfl.robust.rules import robust_average_of
from dispfl.round.context import PeerTask, RunContext
from dispfl.round.exchange import accepted_models, check_answer
from dispfl.round.round import initial_states
from dispfl.testing.rounds import round_bits, run_all_rounds, tiny_context
from dispfl.wire.refusals import Refusal


def model(*weights: float | None) -> PackedModel:
    """A model of these weights; None is one that it does not hold."""
    held = torch.tensor([weight is not None for weight in weights])
    return PackedModel.pack(torch.tensor([float(weight or 0.0) for weight in weights]), held)


OWN, SENT = model(1, 2, None, None), model(3, None, 5, None)
HONEST = [model(1, 2, 4, None), model(3, None, 6, None)]
REQUEST = WeightMask.pack(torch.tensor([True, True, True, False]))


def target(fits: bool = True, byzantine: int = 1) -> Target:
    return Target("000", OWN, REQUEST, HONEST, byzantine, lambda attacker, mask: fits, 0, 3)


def attack_model(name: str, **knowledge: bool | int) -> list[float | None]:
    weights, mask = ATTACK_FUNCTIONS[name]("001", SENT, target(**knowledge)).unpack()  # type: ignore[index, arg-type]
    return [round(float(w), 4) if held else None for w, held in zip(weights, mask, strict=True)]


MEANS = [(1 + 1 + 3) / 3, 2.0, 5.0]
"""Of the target's and the honest models, over the holders of each weight."""


def test_the_published_lies_by_hand() -> None:
    assert attack_model("sign-flip") == [-3, None, -5, None]
    assert attack_model("ipm") == [round(-0.1 * MEANS[0], 4), None, -0.5, None]
    assert attack_model("mimic") == [1, 2, 4, None]
    # x_i - 1.5 / 2 Byzantine peers * the sum of the differences: 0 + 2 of the first weight; the
    # third is not the target's
    assert attack_model("dissensus", byzantine=2) == [1 - 0.75 * 2, 2, 0, None]
    assert attack_model("dissensus", byzantine=2, fits=False) == [
        1 - 0.75 * 2,
        None,
        0,
        None,
    ]  # it announced fewer weights


def test_dissensus_reverses_half_of_the_pull_also_where_a_liar_holds_no_weight() -> None:
    """One honest neighbour pulls both weights from 1 to 3: without lies by 2 / 2, with one lie by
    -0.5 * 2 / 3."""
    own, honest, sent = model(1, 1), model(3, 3), model(2, None)
    told = ATTACK_FUNCTIONS["dissensus"](
        "001", sent, replace(target(), own=own, honest=[honest], request=own.mask)
    )
    assert average_of([own, honest, told], torch.tensor([True, True])).tolist() == pytest.approx(
        [1 - 1 / 3] * 2
    )


def test_a_backdoored_model_replaces_the_plain_average_unless_that_is_too_large() -> None:
    """The first weight: mean 5/3 of three holders, so 5/3 + 4 (3 - 5/3) = 7, and (1 + 1 + 3 + 7) /
    4 = 3."""
    told = ATTACK_FUNCTIONS["backdoor"]("001", SENT, target())
    assert average_of([OWN, *HONEST, told], REQUEST.unpack())[[0, 2]].tolist() == pytest.approx(
        [3, 5]
    )
    huge = ATTACK_FUNCTIONS["backdoor"]("001", model(300, None, 5, None), target())
    assert float(huge.values.norm()) == pytest.approx(9 * sqrt(5))


def test_a_little_is_enough_by_hand() -> None:
    """Four models with one Byzantine peer: s = floor(4/2 + 1) - 1 = 2 supporters, z = Phi^-1((4 - 1
    - 2) / 3), at least 0."""
    assert attack_model("alie") == [round(MEANS[0], 4), None, 5, None]
    seven = replace(target(), honest=HONEST * 4, byzantine=3)  # 12 models: s = 4, z = Phi^-1(5/9)
    weights, _ = ATTACK_FUNCTIONS["alie"]("001", SENT, seven).unpack()
    values = np.array([4, 6] * 4)
    assert float(weights[2]) == pytest.approx(
        5 - NormalDist().inv_cdf(5 / 9) * values.std(), abs=1e-5
    )


def test_noise_is_three_times_as_large_as_weights_and_another_for_each_victim_and_round() -> None:
    big = PackedModel(torch.ones(20_000), WeightMask.pack(torch.ones(20_000, dtype=torch.bool)))
    one, again, other = (
        ATTACK_FUNCTIONS["noise"](attacker, big, target()).values
        for attacker in ("001", "001", "002")
    )
    assert one.equal(again)
    assert not one.equal(other)
    assert float(one.std()) == pytest.approx(3, rel=0.05)


def test_lies_about_masks_by_hand() -> None:
    negative = [-round(mean, 4) for mean in MEANS]
    assert attack_model("hold-all") == [*negative, None]  # all that was requested
    assert attack_model("hold-all", fits=False) == [
        negative[0],
        None,
        negative[2],
        None,
    ]  # more than announced: its true mask
    assert attack_model("false-density") == [*negative, 0]  # everything
    # ours where the target has any, and minus 10 root mean squares of the target's weights where it
    # has none
    assert attack_model("sole-holder") == [1, 2, round(-10 * sqrt((1 + 4) / 2), 4), None]


def test_a_copied_head_is_the_targets_own_and_the_rest_is_the_opposite_of_the_mean() -> None:
    """The last layer are the weights from the second on; the third of them the target regrows."""
    known = replace(target(), head=slice(1, 4))
    told = ATTACK_FUNCTIONS["copy-head"]("001", SENT, known)
    weights, mask = told.unpack()
    assert mask.tolist() == REQUEST.unpack().tolist()
    assert weights[:3].tolist() == pytest.approx([-MEANS[0], 2, -MEANS[2]], abs=1e-4)


def test_meeting_the_victim_makes_its_plain_average_the_opposite_unless_that_is_too_large() -> None:
    crowd = target(byzantine=3)
    told = ATTACK_FUNCTIONS["meet-target"]("001", SENT, crowd)
    average = average_of([OWN, *HONEST, told, told, told], REQUEST.unpack())
    assert average[:3].tolist() == pytest.approx([-mean for mean in MEANS], abs=1e-4)
    alone = ATTACK_FUNCTIONS["meet-target"]("001", SENT, target(byzantine=1)).values
    assert float(alone.norm()) <= 9.01 * sqrt(5)  # peers refuse 10 times their own norm


def test_unlearning_goes_back_as_far_as_clip_takes_it_and_poisons_the_rest() -> None:
    """Honest neighbours at the distances 4, 3, 2 and 1, two Byzantine peers, two assumed: the
    (2b+1-m)-th largest is 2.

    So Byzantine peers go 2 from (1, -1) towards the first weights (4, 4), as seen from the mean (3,
    -3): along (1, 7). The third weight is regrown: Byzantine peers are scaled to 1, the size of the
    honest ones, and of three near senders two lie.
    """
    own, first = model(1, -1, None), torch.tensor([4.0, 4.0, 0.0])
    honest = [model(1 + d, -1 - d, 1) for d in (1.0, 4.0, 2.0, 3.0)]
    request = WeightMask.pack(torch.tensor([True, True, True]))
    known = Target(
        "000",
        own,
        request,
        honest,
        2,
        lambda attacker, mask: True,
        0,
        0,
        assumed=2,
        first=lambda: first,
    )
    told = ATTACK_FUNCTIONS["unlearn"]("001", SENT, known)
    assert told.unpack()[0].tolist() == pytest.approx([1 + 2 / 5, -1 + 2 * 7 / 5, -10], abs=5e-3)
    average, trust = robust_average_of([own, *honest, told, told], 0, request, "clip", 2)
    assert trust.near.tolist() == [0, 1, 0, 0, 0, 1, 1]
    assert trust.scale[5:].tolist() == [1, 1]
    assert float(average[2]) == pytest.approx((1 - 1 - 1) / 3)


def test_an_adaptive_backdoor_goes_as_far_as_clip_takes_it_towards_what_was_trained() -> None:
    """The same neighbours: Byzantine peers go 2 from (1, -1) along (6, 1) - (3, -3) = (3, 4), whose
    root mean square is sqrt(12.5).

    What the trained model does not hold stays, and the regrown weight is its own.
    """
    own = model(1, -1, None)
    honest = [model(1 + d, -1 - d, 1) for d in (1.0, 4.0, 2.0, 3.0)]
    request = WeightMask.pack(torch.tensor([True, True, True]))
    known = Target("000", own, request, honest, 2, lambda attacker, mask: True, 0, 0, assumed=2)
    told = ATTACK_FUNCTIONS["adaptive-backdoor"]("001", model(6, 1, 7), known)
    towards = [1 + 2 * 3 / sqrt(12.5), -1 + 2 * 4 / sqrt(12.5), 7]
    assert told.unpack()[0].tolist() == pytest.approx(towards, abs=5e-3)
    _, trust = robust_average_of([own, *honest, told, told], 0, request, "clip", 2)
    assert trust.near[5:].tolist() == [1, 1]
    assert trust.scale[5:].tolist() == [1, 1]

    sparse = ATTACK_FUNCTIONS["adaptive-backdoor"]("001", model(6, None, 7), known)
    assert sparse.unpack()[0].tolist() == pytest.approx([1 + 2 * sqrt(2), -1, 7], abs=5e-3)


def test_an_adaptive_backdoor_hides_from_nnm_in_the_middle_of_all() -> None:
    """Around the mean (3, -3), from which the nearest honest model is at a distance of 1."""
    own = model(1, -1, None)
    honest = [model(1 + d, -1 - d, 1) for d in (1.0, 5.0)]
    request = WeightMask.pack(torch.tensor([True, True, True]))
    known = Target(
        "000", own, request, honest, 1, lambda attacker, mask: True, 0, 0, rule="nnm", assumed=1
    )
    told = ATTACK_FUNCTIONS["adaptive-backdoor"]("001", model(6, 1, 7), known)
    towards = [3 + 3 / sqrt(12.5), -3 + 4 / sqrt(12.5), 7]
    assert told.unpack()[0].tolist() == pytest.approx(towards, abs=1e-5)


def with_attack(context: RunContext, attack: Attack) -> RunContext:
    """The same run with Byzantine peers of our choice."""
    attacked = replace(context)
    attacked.__dict__["attack"] = attack
    return attacked


def test_liars_know_how_many_of_them_the_victim_assumes() -> None:
    seen: list[tuple[str, int, bool]] = []

    def spy(attacker: str, sent: PackedModel, target: Target) -> PackedModel:
        seen.append((target.rule, target.assumed, target.first().equal(context.first_weights)))
        return sent

    for method, rule, assumed in (
        (DisPFL(), "none", 0),
        (DisPFL(robust="clip", byzantine=2), "clip", 2),
    ):
        context = with_attack(tiny_context(method, 6), Attack("noise", frozenset({"001"})))
        states = initial_states(context)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(ATTACK_FUNCTIONS, "noise", spy)  # type: ignore[arg-type]
            received = {peer: states[peer].model for peer in context.roster[1:]}
            accepted_models(context, PeerTask("000", 0), states["000"], received)
        assert seen.pop() == (rule, assumed, True)


def test_units_are_lied_about_as_a_whole() -> None:
    ours = tiny([True, False, True], *range(1, 13))
    sent = tiny([True, True, False], *range(1, 13))
    assert isinstance(ours.mask, ChannelMask)
    known = Target("000", ours, ours.mask, [ours], 1, lambda attacker, mask: True, 0, 0)
    for name in ATTACK_FUNCTIONS:
        told = ATTACK_FUNCTIONS[name]("001", sent, known)
        assert isinstance(told.mask, ChannelMask)
        assert told.values.numel() == told.mask.kept
    assert ATTACK_FUNCTIONS["false-density"]("001", sent, known).mask.kept == TINY.size


def test_a_share_of_the_peers_lies_the_same_ones_for_every_attack() -> None:
    roster = [f"{k:03d}" for k in range(20)]
    found = {name: Attack.of(name, 0.2, roster, 0) for name in ATTACKS}
    assert all(attack is not None and len(attack.byzantine) == 4 for attack in found.values())
    assert len({attack.byzantine for attack in found.values() if attack}) == 1
    assert Attack.of("noise", 0.0, roster, 0) is None


# poisoned data


def samples() -> ResidentSamples:
    return ResidentSamples(torch.arange(32.0).view(2, 1, 4, 4), torch.tensor([0, 2]))


def test_flipped_labels_are_counted_from_the_other_end() -> None:
    (_, labels), *_ = Poisoned(samples(), "label-flip", 10).batches(2)
    assert labels.tolist() == [9, 7]


def test_every_second_sample_has_the_trigger_and_the_target_class() -> None:
    ((x, y),) = Poisoned(samples().take(torch.tensor([1, 1])), "backdoor", 10).batches(2)
    assert y.tolist() == [0, 2]
    assert x[0, 0, 1:, 1:].eq(31.0).all()
    assert x[1].equal(samples().take(torch.tensor([1])).batches(1).__next__()[0][0])


def test_the_success_of_a_backdoor_counts_inputs_of_other_classes_only() -> None:
    outputs = torch.tensor([[9.0, 0], [9, 0], [0, 9], [9, 0]])
    assert backdoor_success(outputs, torch.tensor([0, 1, 1, 1])) == pytest.approx(2 / 3)


def test_a_trigger_in_a_table_is_in_its_last_columns() -> None:
    assert with_trigger(torch.tensor([[1.0, 2, 3, 4, 5]])).tolist() == [[1, 2, 5, 5, 5]]


# attacked runs


@pytest.mark.parametrize("name", [name for name in ATTACKS if name in ATTACK_FUNCTIONS])
@pytest.mark.parametrize("method", ["dispfl", "dpsgd", "fedavg"])
def test_lies_change_the_models_of_honest_peers_whose_accuracies_alone_are_reported(
    name: str, method: str
) -> None:
    context = tiny_context(METHODS[method](), 6)
    attack = Attack.of(name, 0.34, context.roster, 0)  # type: ignore[arg-type]
    assert attack is not None
    assert len(attack.byzantine) == 2
    lied = run_all_rounds(with_attack(context, attack))[-1]
    again = run_all_rounds(with_attack(context, attack), workers=3)[-1]
    assert round_bits(lied) == round_bits(again)
    scored = {peer for peer, step in lied.steps.items() if step.report.score is not None}
    assert scored == set(context.roster) - attack.byzantine
    honest = run_all_rounds(context)[-1]
    who = "server" if method == "fedavg" else sorted(scored)[0]
    assert not lied.states[who].model.values.equal(honest.states[who].model.values)


def test_a_mask_that_holds_more_than_announced_is_refused() -> None:
    context = tiny_context(DisPFL(), 3)
    layout, counts = context.layout, context.announced["000"]
    full = WeightMask.pack(torch.ones(layout.size, dtype=torch.bool))
    check_answer(initial_states(context)["000"].model.mask, counts, "000", layout)
    with pytest.raises(
        Exception, match="000's model holds more weights of a layer than it announced"
    ) as refused:
        check_answer(full, counts, "000", layout)
    assert refused.value.refusal == Refusal.DENSITY  # type: ignore[attr-defined]


def test_a_density_lie_is_refused_in_the_simulation_as_real_peers_would() -> None:
    """Peer 001 announces a density of 0.3; the target, of 0.9, would notice that it holds
    everything."""
    context = tiny_context(DisPFL(density=(0.9, 0.3, 0.9)), 3)
    states = initial_states(context)
    received = {peer: states[peer].model for peer in ("001", "002")}
    task = PeerTask("000", 0)
    for name, expected in (("false-density", {"002"}), ("hold-all", {"001", "002"})):
        byzantine_peers = with_attack(context, Attack(name, frozenset({"001"})))  # type: ignore[arg-type]
        assert set(accepted_models(byzantine_peers, task, states["000"], received)) == expected


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["byzantine=0.2"],
            "byzantine is 0.2, but attack is none; name what these peers do: attack=sign-flip.",
        ),
        (
            ["attack=noise"],
            "attack is noise, but byzantine is 0;"
            " give the share of Byzantine peers: byzantine=0.2.",
        ),
        (["attack=sing-flip", "byzantine=0.2"], "attack must be"),
        (["attack=noise", "byzantine=1.5"], "byzantine must be in [0, 1), got 1.5"),
    ],
)
def test_wrong_attacks_are_refused_in_a_sentence(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose({}, overrides)
    assert sentence in str(refused.value)
