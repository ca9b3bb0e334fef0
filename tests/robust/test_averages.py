"""Methods with a robust rule: runs of tiny peers, which methods have it, and what is refused before
anything runs."""

from typing import Any

import pytest
import torch
from messages import refused

from dispfl.config import compose
from dispfl.core.packed import PackedModel
from dispfl.errors import ConfigError
from dispfl.federation import Federation
from dispfl.methods.base import SERVER, Method
from dispfl.registry import METHODS
from dispfl.robust.averages import Robust
from dispfl.testing.rounds import (
    bits,
    labelled_points,
    round_bits,
    run_all_rounds,
    step_of,
    tiny_context,
    tiny_network,
)
from dispfl.topology import Ring

NAMES = [name for name in METHODS if issubclass(METHODS[name], Robust)]
VARIANTS = [*NAMES, "dispfl channels"]
RULES = ["clip", "trim", "nnm"]
ALL_RULES = ["dispfl", "dispfl channels", "dpsgd", "fedavg"]
"""With weights and channels under masks, without masks, and at a server; the others call the same
averages and take the rules in turn."""
CASES = [
    (name, rule)
    for place, name in enumerate(VARIANTS)
    for rule in (RULES if name in ALL_RULES else [RULES[place % 3]])
]


def robust(name: str, **changes: Any) -> Method:
    extra: dict[str, Any] = {"structure": "channels"} if "channels" in name else {}
    if name == "fedbn":  # the tiny network has no normalization layer
        extra = {"private": "head"}
    return METHODS[name.split()[0]](**{**extra, **changes})


def test_every_method_that_averages_plainly_has_a_rule() -> None:
    assert set(METHODS) - set(NAMES) == {"local", "fedfomo", "scaffold", "dfedpgp"}
    with refused(ConfigError, key="method.robust"):
        robust("fedfomo", robust="clip")


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_no_assumed_liars_give_the_plain_average_to_the_bit(name: str, rule: str) -> None:
    plain, zero = (
        run_all_rounds(tiny_context(method, 6))[-1]
        for method in (robust(name), robust(name, robust=rule, byzantine=0))
    )
    assert {peer: bits(state) for peer, state in plain.states.items()} == {
        peer: bits(state) for peer, state in zero.states.items()
    }


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_runs_are_finite_and_do_not_depend_on_the_number_of_workers(name: str, rule: str) -> None:
    context = tiny_context(robust(name, robust=rule, byzantine=1), 6, rounds=3)
    one, two = (run_all_rounds(context, workers)[-1] for workers in (1, 3))
    assert round_bits(one) == round_bits(two)
    assert all(state.model.values.isfinite().all() for state in one.states.values())
    plain = run_all_rounds(tiny_context(robust(name), 6, rounds=3))[-1]
    changed = SERVER if one.server is not None else "000"
    assert not one.states[changed].model.values.equal(plain.states[changed].model.values)


@pytest.mark.parametrize("name", ["dispfl", "dpsgd", "dispfl channels"])
def test_distances_of_the_neighbours_are_reported(name: str) -> None:
    context = tiny_context(robust(name, robust="clip", byzantine=1), 6)
    first, second = run_all_rounds(context)
    assert first.steps["000"].report.distances == {
        f"00{k}": 0.0 for k in range(1, 6)
    }  # all start from one model
    found = second.steps["000"].report.distances
    assert found is not None
    assert all(distance and distance > 0 for distance in found.values())
    assert run_all_rounds(tiny_context(robust(name), 6))[-1].steps["000"].report.distances is None


@pytest.mark.parametrize("rule", ["clip", "trim", "nnm"])
def test_a_liar_that_replaces_the_plain_average_cannot_move_a_robust_one(rule: str) -> None:
    """The fifth neighbour sends what makes the plain mean a model of hundreds."""
    context = tiny_context(robust("dispfl", density=1.0, robust=rule, byzantine=1), 6)
    states = run_all_rounds(context)[0].states
    received = {peer: states[peer].model for peer in ("001", "002", "003", "004")}
    attack_model = PackedModel(
        torch.full_like(states["005"].model.values, 600.0), states["005"].model.mask
    )
    honest = step_of(
        context, 1, states, {**received, "005": states["005"].model}
    ).next_state.model.values
    misled = step_of(context, 1, states, {**received, "005": attack_model}).next_state.model.values
    assert (misled - honest).abs().max() < 0.5


def test_a_share_of_liars_is_rounded_up_but_stays_below_half() -> None:
    method = robust("dispfl", robust="clip", byzantine=0.2)
    assert isinstance(method, Robust)
    assert [method.assumed_byzantine(received) for received in (0, 1, 2, 3, 4, 5, 6, 10, 19)] == [
        0,
        0,
        0,
        1,
        1,
        1,
        2,
        2,
        4,
    ]
    assert (
        Robust(robust="clip", byzantine=0.28).assumed_byzantine(25) == 7
    )  # 0.28 * 25 is 7.000...01


@pytest.mark.parametrize(
    ("byzantine", "sentence"),
    [
        (True, "method.byzantine must be a number, got true."),
        (-1, "method.byzantine must be a number of Byzantine peers"),
        (0.5, "method.byzantine must be a whole number or a share below 0.5, got 0.5."),
        (2.0, "For 2 Byzantine peers write 2."),
        ("many", "method.byzantine must be a number of Byzantine peers"),
    ],
)
def test_a_wrong_number_of_liars_is_refused_in_a_sentence(byzantine: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        robust("dispfl", robust="clip", byzantine=byzantine)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["topology.degree=4", "method.byzantine=2"],
            "method.byzantine is 2, but a peer receives 4 models in a round",
        ),
        (
            ["topology=ring", "method.byzantine=1"],
            "a peer receives 2 models in a round, and a rule withstands less than half",
        ),
        (
            ["method=fedavg", "method.cohort=5", "method.byzantine=3"],
            "the server averages 5 models in a round",
        ),
    ],
)
def test_more_liars_than_the_neighbourhood_can_bear_are_refused_before_anything_runs(
    overrides: list[str], sentence: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        compose({}, [*overrides, "method.robust=trim"])
    assert sentence in str(refused.value)
    compose({}, overrides)  # without a rule the number has no effect


def test_the_python_api_refuses_too_many_liars_too() -> None:
    peers = [(labelled_points(8, k), labelled_points(4, k)) for k in range(4)]
    method = robust("dispfl", robust="clip", byzantine=1)
    with refused(ConfigError, key="method.byzantine"):
        Federation(tiny_network, peers, method, Ring())


def test_the_rule_is_part_of_what_sites_agree_on() -> None:
    from dispfl.peer.setup.local_setup import LocalSetup
    from dispfl.peer.setup.spec import spec_difference

    specs = []
    for rule in ("none", "clip"):
        context = tiny_context(robust("dispfl", robust=rule), 4)
        specs.append(LocalSetup.of("000", "f", context, 0.5, 0.5).spec)
    difference = spec_difference(specs[0], specs[1])
    assert difference is not None
    assert "method.robust is not given here and clip there" in difference
