"""A round of 1,000 peers with the small CNN and 10 neighbours in one process: time a peer against
that with 100 peers.

One batch of 32 images a peer and an evaluation on 20; mixing, evolving and the ledger are part of
it.
"""

import torch

from dispfl import DisPFL, Federation, RandomRegular, Train
from dispfl.models.settings import Model
from dispfl.runs.metrics import peak_rss_mb
from measure import report

LIMIT = 1.2


def seconds_a_peer(peers: int, rounds: int) -> float:
    """The shortest round's."""
    rng = torch.Generator().manual_seed(0)
    data = []
    for _ in range(peers):
        images, labels = (
            torch.randn(52, 1, 28, 28, generator=rng),
            torch.randint(10, (52,), generator=rng),
        )
        data.append(((images[:32], labels[:32]), (images[32:], labels[32:])))
    network = Model(name="cnn")
    federation = Federation(
        lambda: network.build(1, 10, 28),
        data,
        DisPFL(),
        RandomRegular(degree=10),
        train=Train(epochs=1, batch_size=32),
        rounds=rounds,
    )
    return min(record["seconds"] for record in federation.run().metrics) / peers


def main() -> None:
    """Few first: what a machine needs to warm up counts for them."""
    hundred = seconds_a_peer(100, rounds=5)
    thousand = seconds_a_peer(1000, rounds=2)
    more = {"ms_a_peer": round(1000 * thousand, 1), "peak_rss_mb": round(peak_rss_mb())}
    report("many_peers", thousand / hundred, LIMIT, **more)


if __name__ == "__main__":
    main()
