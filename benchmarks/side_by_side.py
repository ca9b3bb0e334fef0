"""Two peers on two threads, one each, against the two one after the other with both threads; ratio
of times."""

from concurrent.futures import ThreadPoolExecutor

import torch

from dispfl import Experiment, Full
from dispfl.core.flat_module import FlatModule
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
    tasks = [PeerTask(peer, 0) for peer in states]
    networks = [FlatModule(context.module()) for _ in tasks]
    threads = ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,))

    def side_by_side() -> None:
        torch.set_num_threads(1)
        list(threads.map(peer_step, [context] * 2, networks, tasks, states.values(), [{}, {}]))

    def in_turn() -> None:
        torch.set_num_threads(2)
        for network, task in zip(networks, tasks, strict=True):
            peer_step(context, network, task, states[task.peer], {})

    ours, other = best_times(side_by_side, in_turn, repeats=15)
    report("side_by_side", ours / other, LIMIT)


if __name__ == "__main__":
    main()
