"""Do affinities find the groups of peers, how fast, and how do they compare with masks?

    python scripts/affinity_groups.py --data-dir DATA

Runs the federation of the paper's Figure 5 (20 peers of CIFAR-10 in four groups of similar labels)
with affinities, and clusters the peers after each round: by their mean similarity so far, and by
the distances of their masks. Prints the adjusted Rand index of both against the true groups: 1 if
they are found, about 0 if they are guessed.
"""

import argparse
from math import comb
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

import dispfl
from dispfl import Run
from dispfl.runs.links import decode_links, decode_numbers

PEERS = 20
GROUPS = 4
SHOWN = (1, 2, 3, 5, 10, 20, 30)

Matrix = NDArray[np.float64]


class Recorder:
    """Clusters the peers after every round."""

    def __init__(self) -> None:
        self.sums: Matrix = np.zeros((PEERS, PEERS))
        self.counts: Matrix = np.zeros((PEERS, PEERS))
        self.by_similarity: list[float] = []
        self.by_masks: list[float] = []

    def __call__(self, run: Run) -> None:
        peers = sorted(run.states)
        positions = {peer: k for k, peer in enumerate(peers)}
        truth = [k * GROUPS // PEERS for k in range(PEERS)]
        record = run.metrics[-1]
        senders = decode_links(record["links"], peers)
        for peer, similarities in decode_numbers(record["similarities"], senders).items():
            for sender, similarity in similarities.items():
                self.sums[positions[peer], positions[sender]] += similarity
                self.counts[positions[peer], positions[sender]] += 1
        sums = self.sums + self.sums.T
        counts = self.counts + self.counts.T
        distances = 1 - np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
        self.by_similarity.append(adjusted_rand(truth, clusters(distances)))

        masks = [run.states[peer].next_mask for peer in positions]
        hamming = np.zeros((PEERS, PEERS))
        for k, mask in enumerate(masks):
            for j, other in enumerate(masks):
                hamming[k, j] = mask.kept + other.kept - 2 * mask.overlap(other)
        self.by_masks.append(adjusted_rand(truth, clusters(hamming)))


def clusters(distances: Matrix) -> list[int]:
    """Return the cluster of each peer: average linkage until `GROUPS` clusters are left."""
    members = [[k] for k in range(len(distances))]
    while len(members) > GROUPS:
        nearest = (0, 1)
        smallest = np.inf
        for a in range(len(members)):
            for b in range(a + 1, len(members)):
                mean = distances[np.ix_(members[a], members[b])].mean()
                if mean < smallest:
                    smallest = mean
                    nearest = (a, b)
        a, b = nearest
        members[a] += members.pop(b)
    labels = [0] * len(distances)
    for label, cluster in enumerate(members):
        for k in cluster:
            labels[k] = label
    return labels


def adjusted_rand(truth: list[int], labels: list[int]) -> float:
    """Return the adjusted Rand index of two partitions (Hubert and Arabie, 1985)."""
    table = np.zeros((max(truth) + 1, max(labels) + 1), dtype=int)
    for one, other in zip(truth, labels, strict=True):
        table[one, other] += 1
    pairs = sum(comb(int(count), 2) for count in table.flat)
    rows = sum(comb(int(count), 2) for count in table.sum(1))
    columns = sum(comb(int(count), 2) for count in table.sum(0))
    expected = rows * columns / comb(len(truth), 2)
    return (pairs - expected) / ((rows + columns) / 2 - expected)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    recorders = []
    for seed in range(arguments.seeds):
        recorder = Recorder()
        dispfl.run(
            seed=seed,
            peers=PEERS,
            rounds=max(SHOWN),
            eval_every=max(SHOWN),
            data={"name": "cifar10", "dir": arguments.data_dir, "augment": True},
            partition={"name": "grouped", "groups": GROUPS, "samples_per_peer": 100},
            method={
                "name": "dispfl",
                "affinity": "head",
                "affinity_strength": 2.5,
                "affinity_chosen": 0.5,
            },
            topology={"name": "random", "degree": 5},
            callbacks=[recorder],
            progress=False,
        )
        recorders.append(recorder)
    print("| round |", " | ".join(map(str, SHOWN)), "|")
    print("| --- |", " | ".join("---" for _ in SHOWN), "|")
    for name, attribute in (("similarity", "by_similarity"), ("masks", "by_masks")):
        means = []
        for t in SHOWN:
            means.append(fmean(getattr(recorder, attribute)[t - 1] for recorder in recorders))
        print(f"| {name} |", " | ".join(f"{mean:.2f}" for mean in means), "|")


if __name__ == "__main__":
    main()
