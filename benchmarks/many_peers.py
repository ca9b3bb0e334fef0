"""A round of 1,000 peers in one process: time a peer against that with 100 peers.

Small CNN, 10 neighbours. One batch of 32 images a peer and an evaluation on 20; mixing, evolving
and the ledger are part of it.
"""

import torch

from dispfl import DisPFL, Federation, RandomRegular, Train
from dispfl.models.settings import Model
from dispfl.runs.metrics import peak_rss_mb
from measure import report

LIMIT = 1.2
TRAIN_IMAGES = 32
TEST_IMAGES = 20


def seconds_a_peer(peers: int, rounds: int) -> float:
    """Return the time a peer of the shortest round."""
    rng = torch.Generator().manual_seed(0)
    data = []
    for _ in range(peers):
        images = torch.randn(TRAIN_IMAGES + TEST_IMAGES, 1, 28, 28, generator=rng)
        labels = torch.randint(10, (len(images),), generator=rng)
        train_data = (images[:TRAIN_IMAGES], labels[:TRAIN_IMAGES])
        test_data = (images[TRAIN_IMAGES:], labels[TRAIN_IMAGES:])
        data.append((train_data, test_data))
    model = Model(name="cnn")
    federation = Federation(
        lambda: model.build(1, 10, 28),
        data,
        DisPFL(),
        RandomRegular(degree=10),
        train=Train(epochs=1, batch_size=32),
        rounds=rounds,
    )
    seconds: list[float] = [record["seconds"] for record in federation.run().metrics]
    return min(seconds) / peers


def main() -> None:
    """The small federation comes first: what a machine needs to warm up counts for it."""
    hundred = seconds_a_peer(100, rounds=5)
    thousand = seconds_a_peer(1000, rounds=2)
    report(
        "many_peers",
        thousand / hundred,
        LIMIT,
        ms_a_peer=round(1000 * thousand, 1),
        peak_rss_mb=round(peak_rss_mb()),
    )


if __name__ == "__main__":
    main()
