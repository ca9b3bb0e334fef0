"""Two peers on two threads, one each, against one after the other with both threads."""

from concurrent.futures import ThreadPoolExecutor

import torch

from dispfl import Experiment, Full
from dispfl.data.datasets import load_dataset
from dispfl.round.context import PeerTask
from dispfl.round.round import initial_states, peer_step
from dispfl.runs.prepare import experiment_context, split_dataset
from measure import best_times, report

LIMIT = 0.85


def main() -> None:
    """A step of the demo's model."""
    experiment = Experiment(peers=2, topology=Full())
    images = load_dataset(experiment.data)
    context = experiment_context(experiment, images, split_dataset(experiment, images))
    states = initial_states(context)
    networks = {peer: context.network() for peer in states}

    def step(peer: str) -> None:
        peer_step(context, networks[peer], PeerTask(peer, 0), states[peer], {})

    def side_by_side() -> None:
        torch.set_num_threads(1)
        list(threads.map(step, states))

    def in_turn() -> None:
        torch.set_num_threads(2)
        for peer in states:
            step(peer)

    with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        side_by_side_time, in_turn_time = best_times(side_by_side, in_turn, repeats=15)
    report("side_by_side", side_by_side_time / in_turn_time, LIMIT)


if __name__ == "__main__":
    main()
