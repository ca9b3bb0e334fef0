"""Byzantine peers are assumed among the neighbours, not among the models that arrive: too few
models leave the own weights, and what does not protect says so."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from messages import refused
from simulated_world import LIMIT, FakeTraining, World, reliable

from dispfl.config import compose
from dispfl.core.packed import PackedModel
from dispfl.errors import ConfigError
from dispfl.methods.base import SERVER, GossipMethod, PeerState
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.dpsgd import DPSGD
from dispfl.methods.fedavg import FedAvg
from dispfl.methods.fedfomo import FedFOMO
from dispfl.peer.node import joining_state
from dispfl.robust.attacks import Attack
from dispfl.robust.averages import protection_text
from dispfl.round.context import PeerTask, StepResult
from dispfl.testing.rounds import bits, run_all_rounds, step_of, tiny_context, uploads_of
from dispfl.testing.virtual_time import run
from dispfl.topology import Full

RULES = ["clip", "trim", "nnm"]
GOSSIP: dict[str, GossipMethod] = {
    "dense": DisPFL(density=1.0),
    "weights": DisPFL(),
    "channels": DisPFL(structure="channels"),
    "dpsgd": DPSGD(),
}


def forged(model: PackedModel) -> PackedModel:
    return PackedModel(-5.0 * model.values, model.mask)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", GOSSIP)
def test_two_of_four_answers_leave_the_own_weights(kind: str, rule: str) -> None:
    """A fifth of four neighbours is one Byzantine peer, and a rule needs three models for it."""
    method = GOSSIP[kind].model_copy(update={"robust": rule})
    context = tiny_context(method, 5)
    states = run_all_rounds(context)[0].states
    received = {"001": states["001"].model, "002": forged(states["002"].model)}

    step = step_of(context, 1, states, received, requested=4)
    alone = step_of(context, 1, states, {}, requested=4)
    assert bits(step.next_state) == bits(alone.next_state)
    assert (step.report.withstands, step.report.discarded) == (1, 2)
    assert (alone.report.withstands, alone.report.discarded) == (1, 0)

    three = received | {"003": states["003"].model}
    protected = step_of(context, 1, states, three, requested=4)
    assert bits(protected.next_state) != bits(alone.next_state)
    assert (protected.report.withstands, protected.report.discarded) == (1, 0)


@pytest.mark.parametrize("rule", RULES)
def test_a_peer_without_a_model_takes_the_first_weights_if_few_answer(rule: str) -> None:
    context = tiny_context(DisPFL(robust=rule), 5)  # type: ignore[arg-type]
    states = run_all_rounds(context)[0].states
    first = states["000"].next_mask
    nothing = PackedModel.pack(torch.zeros(67), torch.zeros(67, dtype=torch.bool))
    joining = {**states, "000": replace(states["000"], model=nothing)}
    beginning = PackedModel.pack(context.first_weights, first)
    begun = {**states, "000": replace(states["000"], model=beginning)}
    received = {"001": forged(states["001"].model)}
    step = step_of(context, 1, joining, received, requested=4)
    expected = step_of(context, 1, begun, {}, requested=4)
    assert bits(step.next_state) == bits(expected.next_state)


def test_a_plain_average_says_that_it_withstands_nothing() -> None:
    context = tiny_context(DisPFL(robust="clip", byzantine=0), 5)
    report = run_all_rounds(context)[-1].steps["000"].report
    assert (report.withstands, report.discarded) == (0, 0)
    plain = run_all_rounds(tiny_context(DisPFL(), 5))[-1].steps["000"].report
    assert (plain.withstands, plain.discarded) == (None, None)


class TwoStop(Full):
    """From round 2 on, the peers 003 and 004 are offline."""

    def online(self, seed: int, t: int, roster: Sequence[str]) -> set[str]:
        return set(roster if t < 2 else roster[:3])


@pytest.mark.parametrize("rule", RULES)
def test_a_byzantine_peer_gains_nothing_when_two_of_five_peers_stop(rule: str) -> None:
    """With masks that never change, the model after mixing is that of the last round."""
    method = DisPFL(robust=rule, alpha_0=0)  # type: ignore[arg-type]
    context = tiny_context(method, 5, rounds=6, topology=TwoStop())
    context.__dict__["attack"] = Attack("sign-flip", frozenset({"002"}))
    rounds = run_all_rounds(context)
    for before, after in pairwise(rounds[1:]):
        for peer in ("000", "001"):
            report = after.steps[peer].report
            assert report.mixed == before.steps[peer].report.score
            assert (report.withstands, report.discarded) == (1, 2)


@pytest.mark.parametrize("rule", RULES)
def test_a_server_keeps_its_model_if_few_of_its_cohort_upload_one(rule: str) -> None:
    context = tiny_context(FedAvg(robust=rule, cohort=5), 5)  # type: ignore[arg-type]
    method = context.method
    assert isinstance(method, FedAvg)
    states = run_all_rounds(context)[0].states
    uploads = uploads_of(context, states, t=1)
    samples = dict.fromkeys(uploads, 1)
    server = states[SERVER]
    few = {"000": uploads["000"], "001": forged(uploads["001"])}
    assert method.aggregate(server, few, samples).model.values.equal(server.model.values)
    enough = few | {"002": uploads["002"]}
    assert not method.aggregate(server, enough, samples).model.values.equal(server.model.values)
    report = run_all_rounds(context)[-1].steps["000"].report
    assert (report.withstands, report.discarded) == (1, 0)


@pytest.mark.parametrize("rule", RULES)
def test_a_late_peer_keeps_the_first_weights_if_few_answer(rule: str) -> None:
    ones = torch.ones(3, dtype=torch.bool)
    first = PackedModel.pack(torch.full((3,), 9.0), ones)
    own = PeerState(first, first.mask)
    received = {}
    for name, value in (("a", 2.0), ("b", 2.0), ("mallory", 100.0)):
        received[name] = PackedModel.pack(torch.full((3,), value), ones)
    method = DPSGD(robust=rule)  # type: ignore[arg-type]
    two = {name: received[name] for name in ("a", "mallory")}
    assert joining_state(method, own, two, 4).model.values.tolist() == [9.0, 9.0, 9.0]
    assert joining_state(method, own, received, 4).model.values.tolist() == [2.0, 2.0, 2.0]


# what is said, and what is refused


def test_what_protects_and_what_does_not_is_said_in_words() -> None:
    clip = DisPFL(robust="clip")
    assert protection_text(clip, 4) == "clip withstands 1 of 4 neighbours"
    assert protection_text(clip, 4, 3) == "clip withstands 1 of 4 neighbours"
    assert protection_text(clip, 4, 2) == (
        "own weights kept: 2 of 4 models arrived, and clip needs 3 to withstand 1"
    )
    assert protection_text(clip, 2) == (
        "clip is off: of 2 neighbours it withstands none, only of 3 or more"
    )
    assert protection_text(DisPFL(robust="nnm", byzantine=0), 4) == (
        "nnm is off: method.byzantine is 0"
    )
    for method in (DisPFL(), FedFOMO()):
        text = protection_text(method, 4)
        assert text == "no robust rule: any neighbour can replace the average"


@pytest.mark.parametrize(
    "overrides",
    [
        ["topology=ring"],
        ["peers=3"],
        ["method=fedavg", "method.cohort=2"],
    ],
)
def test_a_simulation_whose_rule_would_protect_nobody_is_refused(overrides: list[str]) -> None:
    with refused(ConfigError, key="method.robust"):
        compose({}, [*overrides, "method.robust=clip"])
    compose({}, [*overrides, "method.robust=clip", "method.byzantine=0"])


class Recorded(FakeTraining):
    """Records the tasks of all steps."""

    tasks: list[PeerTask]

    async def step(
        self, task: PeerTask, state: PeerState, received: Mapping[str, PackedModel]
    ) -> StepResult:
        self.tasks.append(task)
        return await super().step(task, state, received)


def test_a_node_that_two_of_four_neighbours_leave_logs_and_shows_that_its_rule_cannot_hold() -> (
    None
):
    world = World(1, reliable, peers=5, rounds=8, method=DisPFL(density=0.5, robust="clip"))
    node = world.node("000")
    recorded = node.training = Recorded(world, world.rng)
    recorded.tasks = []

    async def story() -> None:
        running = {name: asyncio.create_task(world.live(name)) for name in world.names[1:]}
        first = asyncio.create_task(node.run(0, world.start["000"]))
        while world.federation_round("000") < 2:
            await asyncio.sleep(0.5)
        for name in ("003", "004"):
            running.pop(name).cancel()
        await asyncio.gather(first, *running.values())
        await node.client.transport.close()

    run(story(), LIMIT)
    details = [
        facts for _, name, event, facts in world.trace if (name, event) == ("000", "protection")
    ]
    assert "clip withstands 1 of 4 neighbours" in details[0]
    assert "own weights kept: 2 of 4 models arrived" in details[-1]
    assert {task.requested for task in recorded.tasks} == {4}
    assert node.ctx.status.as_json()["protection"].startswith("own weights kept: 2 of 4")
