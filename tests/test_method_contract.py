"""Every built-in method keeps the contract of `dispfl.testing`, and does what these methods in
particular promise."""

from collections.abc import Callable
from contextlib import closing, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from dispfl.core.metric import accuracy
from dispfl.core.train import Train
from dispfl.errors import ConfigError
from dispfl.federation import Federation
from dispfl.methods.base import SERVER, GossipMethod, Method
from dispfl.registry import METHODS
from dispfl.round.round import initial_states
from dispfl.testing.check_method import check_rule
from dispfl.testing.rounds import (
    FinishedRound,
    PresetEngine,
    all_bits,
    bits,
    labelled_points,
    models_from,
    network_with_buffers,
    round_bits,
    run_all_rounds,
    run_from,
    step_of,
    tiny_context,
    tiny_network,
)
from dispfl.testing.rules import RULES, Rule, check_healthy
from dispfl.topology import Full, Ring

LIVELY: dict[str, dict[str, Any]] = {
    "fedavg": {"cohort": 2},
    "fedavg-ft": {"cohort": 2, "tune_every": 2},
    "ditto": {"cohort": 2},
    "fedfomo": {"models": 2},
    "subfedavg": {"cohort": 2, "prune": 0.3, "min_accuracy": 0.0},
    "dpsgd": {"density": 0.6},
    "dpsgd-ft": {"tune_every": 2},
    "fedprox": {"cohort": 2},
    "scaffold": {"cohort": 2},
    "fedper": {"cohort": 2},
    "fedrep": {"cohort": 2},
    "fedbn": {"cohort": 2, "private": "head"},  # the tiny network has no norm
    "apfl": {"cohort": 2},
    "da-dpfl": {"threshold": 10.0},
    "ssfl": {"score_rounds": 1},
    "dfedpgp alt": {"push_sum": False},
    "fedala": {"cohort": 2},
    "dispfl channels": {"structure": "channels"},
    "dispfl otherwise": {
        "warm_up": False,
        "first_masks": "common",
        "first_weights": "own",
        "regrow": "random",
    },
}
"""Settings under which two rounds of three tiny peers show what a method can do: a peer is idle, a
mask is pruned."""


NAMES = [*METHODS, "dispfl channels", "dispfl otherwise", "dfedpgp alt"]


def lively(name: str, **changes: Any) -> Method:
    return METHODS[name.split()[0]](**{**LIVELY.get(name, {}), **changes})


def takes_a_list_of_densities(name: str) -> bool:
    try:
        lively(name, density=(0.2, 0.8))
    except ConfigError:
        return False
    return True


GOSSIP = [name for name in NAMES if isinstance(lively(name), GossipMethod)]
UNEQUAL = [name for name in NAMES if takes_a_list_of_densities(name)]


@pytest.fixture(params=NAMES)
def method(request: pytest.FixtureRequest) -> Method:
    """Each method of the registry, Dis-PFL also with masks of channels and with other settings than
    the paper's."""
    return lively(request.param)


def at_work(finished_round: FinishedRound) -> set[str]:
    return {
        peer for peer, step in finished_round.steps.items() if step.report.train_loss is not None
    }


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_method_keeps_every_rule(method: Method, rule: Rule) -> None:
    check_rule(rule, method)


def test_every_rule_has_a_name_and_a_sentence_of_its_own() -> None:
    assert len({rule.__name__ for rule in RULES}) == len(RULES) >= 14
    assert all(rule.__doc__ for rule in RULES)


def test_masks_keep_as_many_weights_after_a_round_as_the_model_has(method: Method) -> None:
    for finished_round in run_all_rounds(tiny_context(method, rounds=4)):
        for state in finished_round.states.values():
            kept = state.model.mask.kept
            assert kept == state.model.values.numel()
            if method.name == "da-dpfl":  # it prunes further
                assert state.next_mask.kept <= kept
            else:
                assert state.next_mask.kept == kept


def test_a_step_and_a_round_change_something(method: Method) -> None:
    context = tiny_context(method)
    states = run_all_rounds(context)[0].states
    step = step_of(context, 1, states, models_from(context, states, "000", "001", "002"))
    assert bits(step.next_state) != bits(states["000"])
    first = initial_states(context)
    with closing(PresetEngine(context, 1)) as engine:
        assert all_bits(run_from(context, first, 0, engine).states) != all_bits(first)


def test_another_seed_gives_other_bits(method: Method) -> None:
    one, other = (
        round_bits(run_all_rounds(tiny_context(method, seed=seed))[-1]) for seed in (0, 1)
    )
    assert one != other


@pytest.mark.parametrize("peers", [1, 2])
def test_one_peer_alone_and_two_peers_all_train(method: Method, peers: int) -> None:
    context = tiny_context(method, peers, topology=Ring())
    assert all(
        at_work(finished_round) == set(context.roster) for finished_round in run_all_rounds(context)
    )


@pytest.mark.parametrize("name", GOSSIP)
def test_a_peer_whose_neighbours_are_all_offline_trains(name: str) -> None:
    context = tiny_context(lively(name))
    assert step_of(context, 0, initial_states(context), {}).report.train_loss is not None


def test_the_rules_about_offline_peers_have_offline_peers() -> None:
    for offline_prob in (0.5, 0.9):
        context = tiny_context(METHODS["local"](), 4, topology=Full(offline_prob=offline_prob))
        assert (
            min(len(context.settings.topology.online(0, t, context.roster)) for t in range(3)) < 4
        )
    context = tiny_context(METHODS["local"](), 6, topology=Full(offline_prob=0.5))
    assert 1 < len(context.settings.topology.online(0, 0, context.roster)) < 6


@pytest.mark.parametrize("online", [0, 1])
def test_in_a_round_with_one_peer_online_or_none_only_that_one_works(
    method: Method, online: int
) -> None:
    context = tiny_context(method, topology=Full(offline_prob=0.7, offline="skip"), rounds=50)
    present = [context.settings.topology.online(0, t, context.roster) for t in range(50)]
    t = next(t for t in range(50) if len(present[t]) == online)
    states = initial_states(context)
    with closing(PresetEngine(context, 1)) as engine:
        finished_round = run_from(context, states, t, engine)
    if isinstance(method, GossipMethod):
        assert at_work(finished_round) == (
            present[t] if method.communicates else set(context.roster)
        )
    else:
        assert at_work(finished_round) == present[t]
        assert (bits(finished_round.states[SERVER]) == bits(states[SERVER])) == (online == 0)


@pytest.mark.parametrize("name", UNEQUAL)
def test_peers_of_unequal_densities_work_and_keep_their_own(name: str) -> None:
    context = tiny_context(lively(name, density=(0.2, 0.8)), 4)
    rounds = run_all_rounds(context)
    kept = [step.next_state.model.mask.kept for step in rounds[-1].steps.values()]
    assert kept[0] == kept[1] < 67 * 0.3
    assert kept[2] == kept[3] > 67 * 0.7
    check_healthy(context, rounds)


@pytest.mark.parametrize(
    "model", [tiny_network, network_with_buffers], ids=["plain", "with buffers"]
)
def test_a_peers_model_has_the_accuracy_that_the_run_reports(
    method: Method, model: Callable[[], nn.Module]
) -> None:
    peers = [(labelled_points(20, which), labelled_points(10, 1000 + which)) for which in range(3)]
    federation = Federation(
        model, peers, method, Full(), train=Train(epochs=2, batch_size=8), workers=1, rounds=3
    )
    buffers = model is network_with_buffers
    with pytest.warns(UserWarning, match="The model has buffers") if buffers else nullcontext():
        run = federation.run()
    for k, (_, (inputs, labels)) in enumerate(peers):
        with torch.no_grad():
            assert accuracy(run.model(k)(inputs), labels) == run.accuracy[k]
    assert len(run.accuracy) == 3
