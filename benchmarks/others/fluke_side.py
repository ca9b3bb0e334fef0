"""fluke's side: its FedAvg, Ditto and gossip, without evaluation.

In its gossip a client sends its model to one random neighbour, and trains only if it has received
one: fewer steps.
"""

from typing import Any

import no_torchvision  # noqa: F401
from fluke import DDict, FlukeENV
from fluke.algorithms.decentralized import GossipDFL
from fluke.algorithms.ditto import Ditto
from fluke.algorithms.fedavg import FedAVG
from fluke.data import FastDataLoader
from fluke.utils import FederationObserver
from work import LR, PROX, WEIGHT_DECAY, Work, end_of_round

ALGORITHMS = {"fedavg": FedAVG, "ditto": Ditto, "gossip": GossipDFL}
work = Work.from_environment()


class Splitter:
    """Gives each client its data."""

    def assign(self, n_clients: int, batch_size: int) -> Any:
        loaders = []
        for peer in range(n_clients):
            x, y = work.data(peer)
            loader = FastDataLoader(x, y, num_labels=10, batch_size=batch_size, shuffle=True)
            loaders.append(loader)
        return (loaders, [None] * n_clients), None


class Rounds(FederationObserver):  # type: ignore[misc]
    """Reports the rounds."""

    def end_round(self, *args: object, **more: object) -> None:
        end_of_round()


def settings() -> Any:
    """Return the settings of clients and server: with Ditto `tau` are the personal epochs."""
    client: dict[str, Any] = {
        "batch_size": work.batch,
        "local_epochs": work.epochs,
        "loss": "CrossEntropyLoss",
        "optimizer": {"name": "SGD", "lr": LR, "weight_decay": WEIGHT_DECAY},
        "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1.0},
    }
    if work.method == "ditto":
        global_epochs, personal_epochs = work.ditto_epochs
        client["model"] = work.network()
        client["local_epochs"] = global_epochs
        client["tau"] = personal_epochs
        client["lam"] = PROX
    if work.method == "gossip":
        client["policy"] = "aggregate"
    return DDict({"client": client, "server": {"weighted": True}, "model": work.network()})


if __name__ == "__main__":
    environment = FlukeENV()
    environment.set_device("cpu")
    environment.set_inmemory(True)
    environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    algorithm = ALGORITHMS[work.method](work.peers, Splitter(), settings())
    algorithm.set_callbacks([Rounds()])
    algorithm.run(work.rounds, 1.0)
