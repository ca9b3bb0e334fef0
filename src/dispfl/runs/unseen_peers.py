"""Peers that did not take part in a run: how good a model they get from it in a few steps."""

from collections.abc import Mapping

import torch

from dispfl.core.report import Report
from dispfl.core.rng import stream
from dispfl.engines.base import fetch_here, simulated_step
from dispfl.methods.base import SERVER, FineTuning, PeerState, ServerMethod
from dispfl.round.context import PeerTask, RunContext
from dispfl.round.exchange import exchange_graph, gossip_senders, task_senders
from dispfl.round.round import global_model, initial_states, peer_step, task_state
from dispfl.runs.metrics import Metrics, logged, spread


def evaluate_newcomers(
    context: RunContext, states: Mapping[str, PeerState], server: PeerState | None
) -> Metrics | None:
    """Return the scores of the unseen peers after the run, for `summary.json`; None without any."""
    if not context.data.unseen:
        return None
    reports = []
    failures = []
    for name in sorted(context.data.unseen):
        report = personalize(context, states, server, name)
        reports.append(report)
        if report.failure:
            failures.append(report.failure)
    return {
        "peers": len(reports),
        "steps": context.simulation.unseen_steps,
        "score": spread([report.score for report in reports]),
        "logged": logged(reports),
        "failures": failures,
    }


def personalize(
    context: RunContext, states: Mapping[str, PeerState], server: PeerState | None, name: str
) -> Report:
    """Let an unseen peer join after the last round, for `unseen_steps` local steps.

    The learning rate is the initial one. The peer takes one step of the method: it starts as a peer
    of round 0 and receives from as many random peers as the topology gives a peer, or from the
    server. Where peers are evaluated with a global model, it fine-tunes that model.
    """
    steps = context.simulation.unseen_steps
    last = context.settings.rounds - 1
    joined = context.joined_by(name)
    state = initial_states(joined, [name])[name]
    network = joined.network()
    method = joined.method
    if method.evaluates_global:
        model = global_model(context, states, server)
        tuning = FineTuning(epochs=1, rate="initial", every=1, steps=steps)
        task = PeerTask(name, last, global_model=model, idle=True, fine_tuning=tuning)
        return peer_step(joined, network, task, task_state(joined, task, {name: state}), {}).report
    if isinstance(method, ServerMethod):
        task = PeerTask(name, last, server=server)
    else:
        task = PeerTask(name, last, _senders(joined, name, state))
    readable = {}
    for sender in task_senders(task):
        if sender != SERVER:
            readable[sender] = states[sender]
    readable[name] = state
    fetch = fetch_here(joined, joined.codec, task, readable)
    return simulated_step(joined, joined.codec, network, task, state, fetch).report


def _senders(joined: RunContext, name: str, state: PeerState) -> list[str]:
    """Draw as many peers as the most connected one has neighbours in the last round.

    Whom the method would choose beyond them does not know the unseen peer.
    """
    last = joined.settings.rounds - 1
    participants = joined.data.participants
    degrees = exchange_graph(joined, last, participants).values()
    degree = max(map(len, degrees), default=0)
    rng = stream(joined.settings.seed, "newcomer", name)
    order = torch.randperm(len(participants), generator=rng)
    graph: dict[str, list[str]] = {peer: [] for peer in participants}
    graph[name] = sorted(participants[k] for k in order[:degree].tolist())
    choices = gossip_senders(joined, graph, name, last, state)
    return [sender for sender in choices if sender in graph[name]]
