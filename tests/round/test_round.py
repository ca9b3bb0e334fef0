"""One round: who publishes what when, the limits of the algorithm, offline peers and peers that
fail."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import nan
from typing import Any

import pytest
import torch
from rounds import FinishedRound, ReversedEngine, run_from
from torch import Tensor, nn

from dispfl.core.averaging import average_of, gossip_average
from dispfl.core.flat_module import FlatModule
from dispfl.core.metric import Metric
from dispfl.core.packed import PackedModel
from dispfl.core.report import Report
from dispfl.core.samples import PeerData
from dispfl.core.sparsity import prune_and_regrow, prune_rate
from dispfl.core.task import Task
from dispfl.core.train import Trainer
from dispfl.data.batches import ResidentSamples
from dispfl.errors import ConfigError
from dispfl.methods.base import Method, Neighbourhood, PeerState
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.dpsgd import DPSGD
from dispfl.methods.local import Local
from dispfl.round.context import PeerTask, RunContext, StepResult
from dispfl.round.round import initial_states, peer_step
from dispfl.topology import Full, Ring

MakeContext = Callable[..., RunContext]
RunAll = Callable[..., list[FinishedRound]]


def weights_of(steps: Mapping[str, StepResult]) -> list[Tensor]:
    return [steps[peer].next_state.model.unpack()[0] for peer in sorted(steps)]


def test_all_peers_start_from_the_same_weights_each_under_its_own_mask(
    make_context: MakeContext,
) -> None:
    context = make_context(peers=3, method=DisPFL(density=0.5))
    dense = FlatModule(context.module()).read()
    masks = []
    for state in initial_states(context).values():
        weights, mask = state.model.unpack()
        assert weights.equal(dense.where(mask, 0.0))
        assert state.next_mask.unpack().equal(mask)
        masks.append(mask)
    assert not masks[0].equal(masks[1])
    assert not masks[1].equal(masks[2])


def test_a_second_round_done_by_hand_gives_the_same_weights_and_masks(
    make_context: MakeContext, run_all: RunAll
) -> None:
    """Algorithm 1, lines 6-15, on unpacked vectors, in a ring of four."""
    context = make_context(peers=4, topology=Ring(), rounds=5)
    first, second = run_all(context)[:2]
    before = {peer: step.state for peer, step in first.steps.items()}
    network = FlatModule(context.module())
    for k, peer in enumerate(context.roster):
        trainer = Trainer(network, context.data.peers[peer], context.training, peer, t=1)
        neighbourhood = sorted({context.roster[k - 1], peer, context.roster[(k + 1) % 4]})
        weights, masks = zip(*(before[j].model.unpack() for j in neighbourhood), strict=True)
        m_k = before[peer].next_mask.unpack()
        w_half = gossip_average(weights, masks, m_k)
        w_k = trainer.learn(w_half, m_k)
        m_next = prune_and_regrow(
            w_k, m_k, trainer.gradient(w_k), prune_rate(1, 5, 0.5), network.layout
        )
        found = second.steps[peer].state
        assert found.model.unpack()[0].equal(w_k)
        assert found.model.unpack()[1].equal(m_k)
        assert found.next_mask.unpack().equal(m_next)


def test_a_regrown_weight_takes_its_neighbours_value_and_zero_where_nobody_holds_it() -> None:
    ours = PackedModel.pack(torch.tensor([4.0, 0.0, 0.0]), torch.tensor([True, False, False]))
    theirs = PackedModel.pack(torch.tensor([2.0, 6.0, 0.0]), torch.tensor([True, True, False]))
    next_mask = torch.tensor([True, True, True])
    assert average_of([ours, theirs], next_mask).tolist() == [3.0, 6.0, 0.0]


@pytest.mark.parametrize("method", [DisPFL(), Local(), DPSGD()], ids=lambda method: method.name)
def test_a_peers_seconds_are_those_of_its_training_not_of_its_evaluation(
    make_context: MakeContext, run_all: RunAll, monkeypatch: pytest.MonkeyPatch, method: Method
) -> None:
    """By a clock that only learning (1 s) and evaluating (100 s) advance."""
    now = [0.0]

    def taking(seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            now[0] += seconds
            return function(*arguments, **options)

        return timed

    for module in ("dispfl.core.train", "dispfl.round.round"):
        monkeypatch.setattr(f"{module}.step_clock", lambda network: now[0])
    monkeypatch.setattr(Trainer, "learn", taking(1.0, Trainer.learn))
    monkeypatch.setattr(Trainer, "_predict", taking(100.0, Trainer._predict))
    (only,) = run_all(make_context(peers=3, rounds=1, method=method, eval_train=True))
    assert [step.report.seconds for step in only.steps.values()] == [1.0] * 3


def test_the_order_in_which_peers_take_their_step_does_not_matter(
    make_context: MakeContext, run_all: RunAll
) -> None:
    context = make_context(peers=3, rounds=1)
    engine = ReversedEngine(context)
    backwards = run_from(context, initial_states(context), 0, engine)
    assert engine.order == ["002", "001", "000"]
    assert list(backwards.steps) == ["000", "001", "002"]
    for one, other in zip(
        weights_of(backwards.steps), weights_of(run_all(context)[0].steps), strict=True
    ):
        assert one.equal(other)


def test_finished_steps_are_not_repeated(make_context: MakeContext) -> None:
    context = make_context(peers=3)
    states = initial_states(context)
    done = StepResult(Report(train_loss=42.0), state=states["001"])
    engine, reported = ReversedEngine(context), []
    result = run_from(
        context, states, 0, engine, {"001": done}, lambda peer, step: reported.append(peer)
    )
    assert engine.order == ["002", "000"]
    assert sorted(reported) == ["000", "002"]
    assert result.steps["001"].state is done.state
    assert result.steps["001"].report is done.report


def test_in_a_ring_of_four_every_peer_is_charged_for_two_messages_each_way(
    make_context: MakeContext,
) -> None:
    context = make_context(peers=4, topology=Ring())
    states = initial_states(context)
    links = run_from(context, states, 0, ReversedEngine(context)).ledger.paper
    assert sorted(links) == [
        (sender, receiver)
        for sender in context.roster
        for receiver in context.roster
        if (int(sender) - int(receiver)) % 4 in (1, 3)
    ]
    assert all(count == 4 * states[sender].model.mask.kept for (sender, _), count in links.items())


def test_local_sends_nothing(make_context: MakeContext) -> None:
    context = make_context(method=Local())
    assert not run_from(context, initial_states(context), 0, ReversedEngine(context)).ledger.wire


def test_one_peer_at_density_1_is_local_training_bit_for_bit(
    make_context: MakeContext, run_all: RunAll
) -> None:
    dispfl = run_all(make_context(peers=1, method=DisPFL(density=1.0), rounds=3))
    local = run_all(make_context(peers=1, method=Local(), rounds=3))
    for one, other in zip(dispfl, local, strict=True):
        assert weights_of(one.steps)[0].equal(weights_of(other.steps)[0])
        assert one.steps["000"].report.train_loss == other.steps["000"].report.train_loss


def test_at_density_1_the_mask_never_changes(make_context: MakeContext, run_all: RunAll) -> None:
    for round_ in run_all(make_context(method=DisPFL(density=1.0), rounds=3)):
        for step in round_.steps.values():
            assert step.next_state.next_mask.unpack().all()
            assert step.report.mask_change == 0.0


def test_the_mask_changes_less_and_less(make_context: MakeContext, run_all: RunAll) -> None:
    rounds = run_all(make_context(method=DisPFL(density=0.3, regrow="random"), rounds=10))
    changes = [
        sum(step.report.mask_change or 0 for step in round_.steps.values()) / 3 for round_ in rounds
    ]
    assert (
        changes[0] > changes[5] > changes[9] > 0
    )  # alpha_t falls; counts are rounded up, so never to nothing


def test_an_offline_peer_that_skips_keeps_its_state_and_is_still_evaluated(
    make_context: MakeContext,
) -> None:
    context = make_context(topology=Full(offline_prob=1.0, offline="skip"))
    states = initial_states(context)
    result = run_from(context, states, 0, ReversedEngine(context))
    for peer, step in result.steps.items():
        assert step.state is states[peer]
        assert step.report.train_loss is None
        assert step.report.score is not None
    assert not result.ledger.wire


def test_an_offline_peer_that_trains_does_what_it_would_do_alone(make_context: MakeContext) -> None:
    context = make_context(topology=Full(offline_prob=1.0, offline="train"))
    states = initial_states(context)
    result = run_from(context, states, 0, ReversedEngine(context))
    alone = peer_step(context, FlatModule(context.module()), PeerTask("001", 0), states["001"], {})
    assert weights_of(result.steps)[1].equal(alone.next_state.model.unpack()[0])
    assert not result.ledger.wire


def test_only_offline_peers_neither_send_nor_train(make_context: MakeContext) -> None:
    context = make_context(peers=6, topology=Full(offline_prob=0.5, offline="skip"))
    online = context.settings.topology.online(0, 0, context.roster)
    assert 1 < len(online) < 6  # the seed does drop some and leaves some
    result = run_from(context, initial_states(context), 0, ReversedEngine(context))
    assert set(result.ledger.wire) == {(j, k) for j in online for k in online if j != k}
    assert {
        peer for peer, step in result.steps.items() if step.report.train_loss is not None
    } == online


def batch_norm_net() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))


def with_broken_data(context: RunContext, peer: str) -> RunContext:
    """The context in which one peer's training inputs are nan."""
    data = context.data.peers[peer]
    broken = PeerData(
        ResidentSamples(torch.full((20, 4), nan), torch.zeros(20, dtype=torch.int64)), data.test
    )
    return replace(context, data=context.data.with_peers({**context.data.peers, peer: broken}))


def test_a_peer_whose_loss_is_nan_keeps_its_last_good_state_and_reports_it(
    make_context: MakeContext, run_all: RunAll
) -> None:
    context = with_broken_data(make_context(peers=3, rounds=2), "001")
    first = initial_states(context)["001"]
    rounds = run_all(context)
    for t, round_ in enumerate(rounds):
        step = round_.steps["001"]
        assert step.report.failure is not None
        assert step.report.failure.startswith(
            f"Peer 001, round {t}: the training loss became infinite or nan"
        )
        assert step.next_state.model.values.equal(first.model.values)
        assert step.report.train_loss is None
        assert step.report.score is not None


def test_a_failing_peer_keeps_its_last_good_buffers(
    make_context: MakeContext, run_all: RunAll
) -> None:
    context = make_context(peers=2, model=batch_norm_net, rounds=1)
    steps = run_all(with_broken_data(context, "001"))[0].steps
    assert steps["001"].next_state.buffers["0.running_mean"].tolist() == [0.0] * 4
    assert steps["000"].next_state.buffers["0.running_mean"].count_nonzero() == 4


def test_a_peer_that_fails_in_the_mask_search_is_evaluated_with_its_previous_model(
    make_context: MakeContext,
) -> None:
    losses = iter([1.0, 1.0, 1.0, nan])  # three batches to learn from, then the search
    task = Task(
        loss=lambda outputs, _: (
            (next(losses) if outputs.requires_grad else 1) * outputs.square().mean()
        ),
        metrics=(
            Metric(lambda outputs, labels: float(outputs.sum()), "sum", higher_is_better=True),
        ),
    )
    context = make_context(peers=1, model=batch_norm_net, task=task)
    network, state = FlatModule(context.module()), initial_states(context)["000"]
    idle = peer_step(context, network, PeerTask("000", 0, idle=True), state, {})
    failed = peer_step(context, network, PeerTask("000", 0), state, {})
    assert failed.report.failure is not None
    assert "the gradient became infinite or nan" in failed.report.failure
    assert failed.state is state
    assert failed.report.score == idle.report.score


def test_the_others_continue_with_the_failing_peers_last_good_model(
    make_context: MakeContext, run_all: RunAll
) -> None:
    rounds = run_all(with_broken_data(make_context(peers=3, rounds=2), "001"))
    for round_ in rounds:
        for peer in ("000", "002"):
            assert round_.steps[peer].report.failure is None
            assert round_.steps[peer].next_state.model.values.isfinite().all()
    assert not weights_of(rounds[0].steps)[0].equal(weights_of(rounds[1].steps)[0])


def test_the_last_round_is_evaluated_whatever_eval_every_is(
    make_context: MakeContext, run_all: RunAll
) -> None:
    rounds = run_all(make_context(eval_every=2, rounds=5))
    assert [round_.steps["000"].report.score is not None for round_ in rounds] == [
        False,
        True,
        False,
        True,
        True,
    ]
    assert [round_.steps["000"].report.mixed is not None for round_ in rounds] == [
        False,
        True,
        False,
        True,
        True,
    ]


def test_peers_hear_the_states_of_the_previous_round(make_context: MakeContext) -> None:
    """A peer that steps last receives from what the first had published, not what it made of it."""
    context = make_context(peers=2, method=Copycat(), rounds=1)
    states = {
        peer: replace(
            state,
            model=PackedModel.pack(torch.full((67,), float(k)), torch.ones(67, dtype=torch.bool)),
        )
        for k, (peer, state) in enumerate(initial_states(context).items())
    }
    one, other = weights_of(run_from(context, states, 0, ReversedEngine(context)).steps)
    assert (float(one[0]), float(other[0])) == (1.0, 0.0)


def test_a_peer_hears_the_peers_that_its_method_chooses_and_only_they_are_charged(
    make_context: MakeContext,
) -> None:
    context = make_context(peers=4, method=Choosy(), rounds=1)
    result = run_from(context, initial_states(context), 0, ReversedEngine(context))
    assert set(result.ledger.paper) == {
        ("003", "000"),
        ("003", "001"),
        ("003", "002"),
        ("002", "003"),
    }


@pytest.mark.parametrize("place", [0, 1])
def test_a_method_that_chooses_a_sender_twice_or_the_peer_itself_is_refused(
    place: int, make_context: MakeContext
) -> None:
    class Greedy(Choosy):
        def choose(
            self, state: PeerState, neighbourhood: Neighbourhood, *, rng: torch.Generator
        ) -> Sequence[str]:
            unwanted = neighbourhood.neighbours[0] if place else "001"
            return [*neighbourhood.neighbours, unwanted]

    context = make_context(peers=3, method=Greedy(), rounds=1)
    with pytest.raises(ConfigError, match="choose each neighbour once"):
        run_from(context, initial_states(context), 0, ReversedEngine(context))


def test_a_peer_without_online_neighbours_chooses_nobody(
    make_context: MakeContext,
) -> None:
    context = make_context(peers=3, method=Choosy(), topology=Full(offline_prob=0.7), rounds=50)
    alone = next(
        t for t in range(50) if len(context.settings.topology.online(0, t, context.roster)) == 1
    )
    assert not run_from(
        context, initial_states(context), alone, ReversedEngine(context)
    ).ledger.paper


def test_a_global_model_is_evaluated_once_at_the_end_and_not_after_each_step(
    make_context: MakeContext,
) -> None:
    context = make_context(method=DPSGD(), eval_every=2, rounds=3)
    engine, scores = ReversedEngine(context), []
    states = initial_states(context)
    for t, tasks in enumerate(
        [3, 6, 6]
    ):  # three steps, then three evaluations if the round is evaluated
        engine.order = []
        result = run_from(
            context,
            states,
            t,
            engine,
            on_result=lambda peer, result: scores.append(result.report.score),
        )
        assert len(engine.order) == tasks
        assert (result.evaluated is not None) == (tasks == 6)
        assert all(
            (step.report.score is not None) == (tasks == 6) for step in result.steps.values()
        )
        states = result.states
    assert scores == [None] * 9


class Choosy(Local):
    """Hears only the last of its neighbours."""

    communicates = True

    def choose(
        self, state: PeerState, neighbourhood: Neighbourhood, *, rng: torch.Generator
    ) -> Sequence[str]:
        return neighbourhood.neighbours[-1:]


class Copycat(Local):
    """Adopts the model of its only neighbour."""

    communicates = True

    def step(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> PeerState:
        [model] = received.values()
        return PeerState(model, model.mask, state.buffers)
