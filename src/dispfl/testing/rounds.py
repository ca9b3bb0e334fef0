"""Tiny federations whose rounds start from given states and return every peer's next state."""

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from dispfl.core.flat_module import FlatModule
from dispfl.core.optimizers import OptimizerFactory
from dispfl.core.packed import PackedModel
from dispfl.core.report import Report
from dispfl.core.samples import PeerData, Samples
from dispfl.core.task import Task
from dispfl.core.train import Train
from dispfl.data.batches import ResidentSamples
from dispfl.engines.base import PeerStates
from dispfl.engines.inprocess import InProcess
from dispfl.experiment import Simulation
from dispfl.methods.base import SERVER, Method, PeerState, ServerMethod
from dispfl.round.context import Engine, PeerTask, RunContext, RunData, StepResult
from dispfl.round.exchange import published_model, sent_model
from dispfl.round.round import (
    OnResult,
    Round,
    evaluate_round,
    initial_states,
    peer_step,
    train_round,
)
from dispfl.topology import Full, peer_names


@dataclass(frozen=True)
class FinishedRound(Round):
    """A round with every peer's next state."""

    steps: Mapping[str, StepResult] = field(default_factory=dict)
    evaluated: Mapping[str, PeerState] | None = None

    @property
    def states(self) -> dict[str, PeerState]:
        """Every peer's next state, and the server's."""
        states = {peer: step.next_state for peer, step in self.steps.items()}
        if self.server is not None:
            states[SERVER] = self.server
        return states


class PresetEngine(InProcess):
    """The in-process engine with states that a test gives it."""

    def set_states(self, states: Mapping[str, PeerState]) -> "PresetEngine":
        """Set every peer's state."""
        self._states = PeerStates(self.context, self._states.checkpoints)
        for peer, state in states.items():
            if peer == SERVER:
                continue
            if state.upload is not None:
                state = replace(state, upload=None)
            self._states.current[peer] = state
        return self

    def add_finished(self, steps: Mapping[str, StepResult]) -> dict[str, StepResult]:
        """Add steps that are done already; return them without their states."""
        results = {}
        for peer, step in steps.items():
            self._states.next[peer] = step.next_state
            results[peer] = step.without_state()
        return results


def run_round(
    context: RunContext,
    server: PeerState | None,
    t: int,
    engine: Engine,
    finished: Mapping[str, StepResult] | None = None,
    on_result: OnResult = lambda peer, result: None,
) -> Round:
    """Run round t of either kind and evaluate its models where that is due."""
    trained = train_round(context, server, t, engine, finished or {}, on_result)
    return evaluate_round(context, trained, t, engine)


def run_from(
    context: RunContext,
    states: Mapping[str, PeerState],
    t: int,
    engine: PresetEngine,
    finished: Mapping[str, StepResult] | None = None,
    on_result: OnResult = lambda peer, result: None,
) -> FinishedRound:
    """Run round t from these states."""
    engine.set_states(states)
    done = engine.add_finished(finished or {})
    result = run_round(context, states.get(SERVER), t, engine, done, on_result)
    steps = {}
    for peer, step in result.results.items():
        steps[peer] = replace(step, state=engine.states[peer])
    return FinishedRound(result.results, result.server, steps, dict(engine.evaluated) or None)


def run_all_rounds(context: RunContext, workers: int = 1) -> list[FinishedRound]:
    """Run all rounds, one after another."""
    rounds = []
    states = initial_states(context)
    with closing(PresetEngine(context, workers)) as engine:
        for t in range(context.settings.rounds):
            finished_round = run_from(context, states, t, engine)
            states = finished_round.states
            rounds.append(finished_round)
    return rounds


def labelled_points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return points in four dimensions, labelled by the largest of their first three coordinates.

    The labels are 0, 1 and 2.
    """
    points = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return points, points[:, :3].argmax(1)


def tiny_network() -> nn.Module:
    """Return a network of 4 x 8 + 8 + 8 x 3 + 3 = 67 parameters."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def network_with_buffers() -> nn.Module:
    """Return a network whose buffers stay with each peer."""
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def tiny_peers(count: int) -> dict[str, PeerData]:
    """Return peers with 20 training and 10 test points each."""
    peers = {}
    for k, name in enumerate(peer_names(count)):
        train = ResidentSamples(*labelled_points(20, k))
        test = ResidentSamples(*labelled_points(10, 1000 + k))
        peers[name] = PeerData(train, test)
    return peers


def tiny_context(
    method: Method, peers: int | Mapping[str, PeerData] = 3, **changes: Any
) -> RunContext:
    """Return the context of two rounds of peers with 20 training and 10 test points each.

    They train for two epochs, because some methods compare one epoch with the next.
    """
    train = Train(epochs=2, batch_size=8)
    return simulated_context(peers, **{"method": method, "train": train, **changes})


def simulated_context(
    peers: int | Mapping[str, PeerData],
    *,
    unseen: Mapping[str, PeerData] | None = None,
    global_test: Samples | None = None,
    model: Callable[[], nn.Module] = tiny_network,
    task: Task | None = None,
    optimizer: OptimizerFactory | None = None,
    **settings: Any,
) -> RunContext:
    """Return the context of a simulation; all other keywords are its settings."""
    data = tiny_peers(peers) if isinstance(peers, int) else peers
    unseen = unseen or {}
    values: dict[str, Any] = {
        "topology": Full(),
        "rounds": 2,
        "peers": len(data),
        "unseen_peers": len(unseen),
    }
    return RunContext(
        settings=Simulation(**values | settings),
        data=RunData(data, unseen=unseen, global_test=global_test),
        model=model,
        task=task or Task(),
        optimizer=optimizer,
    )


def bits(state: PeerState) -> dict[str, bytes]:
    """Return every bit of a state, by name."""
    tensors = {
        "values": state.model.values,
        "mask": state.model.mask.bits,
        "next_mask": state.next_mask.bits,
    }
    for name, buffer in state.buffers.items():
        tensors[f"buffers/{name}"] = buffer
    for name, remembered in state.memory.items():
        tensors[f"memory/{name}"] = remembered
    for kept_as, model in (("upload", state.upload), ("private", state.private)):
        if model is not None:
            tensors[f"{kept_as}/values"] = model.values
            tensors[f"{kept_as}/mask"] = model.mask.bits
            for name, beside in model.tensors.items():
                tensors[f"{kept_as}/tensors/{name}"] = beside
    for name, beside in state.model.tensors.items():
        tensors[f"tensors/{name}"] = beside
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def all_bits(states: Mapping[str, PeerState]) -> dict[str, dict[str, bytes]]:
    """Return every bit of several states."""
    return {name: bits(state) for name, state in states.items()}


def round_bits(finished_round: FinishedRound) -> dict[str, tuple[dict[str, bytes], Report | None]]:
    """Return every bit of everyone's next state, the server's too, with the peers' reports."""
    results = {}
    for name, state in finished_round.states.items():
        step = finished_round.steps.get(name)
        results[name] = (bits(state), step.report if step else None)
    return results


def models_from(
    context: RunContext, states: Mapping[str, PeerState], peer: str, *senders: str
) -> dict[str, PackedModel]:
    """Return what a peer receives from these peers, or from the server where there is one."""
    if isinstance(context.method, ServerMethod):
        task = PeerTask(peer, 0, server=states[SERVER])
        return {SERVER: sent_model(context, task, SERVER, states)}
    return {sender: published_model(context, states[sender]) for sender in senders}


def step_of(
    context: RunContext,
    t: int,
    states: Mapping[str, PeerState],
    received: Mapping[str, PackedModel],
    requested: int = 0,
) -> StepResult:
    """Take the step of the first peer, which requested so many models or as many as it received."""
    peer = context.roster[0]
    network = FlatModule(context.module())
    task = PeerTask(peer, t, requested=requested)
    return peer_step(context, network, task, states[peer], received)


def uploads_of(
    context: RunContext, states: Mapping[str, PeerState], t: int = 0
) -> dict[str, PackedModel]:
    """Return what all peers would upload in a round."""
    network = FlatModule(context.module())
    uploads = {}
    for peer in context.roster:
        task = PeerTask(peer, t, server=states[SERVER])
        received = models_from(context, states, peer)
        step = peer_step(context, network, task, states[peer], received)
        upload = step.next_state.upload
        if upload is not None:
            uploads[peer] = upload
    return uploads
