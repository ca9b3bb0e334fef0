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

work = Work.given()


class Splitter:
    """Gives each client its data."""

    def assign(self, n_clients: int, batch_size: int) -> Any:
        loaders = [
            FastDataLoader(*work.data(peer), num_labels=10, batch_size=batch_size, shuffle=True)
            for peer in range(n_clients)
        ]
        return (loaders, [None] * n_clients), None


class Rounds(FederationObserver):  # type: ignore[misc]
    """Reports the rounds."""

    def end_round(self, *args: object, **more: object) -> None:
        end_of_round()


def settings() -> Any:
    """The settings of a client: with Ditto `tau` are the epochs of the personal model."""
    of_global, of_personal = work.ditto_epochs
    client: dict[str, Any] = {
        "batch_size": work.batch,
        "local_epochs": work.epochs,
        "loss": "CrossEntropyLoss",
        "optimizer": {"name": "SGD", "lr": LR, "weight_decay": WEIGHT_DECAY},
        "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1.0},
    }
    if work.method == "ditto":
        client |= {
            "model": work.network(),
            "local_epochs": of_global,
            "tau": of_personal,
            "lam": PROX,
        }
    if work.method == "gossip":
        client |= {"policy": "aggregate"}
    return DDict({"client": client, "server": {"weighted": True}, "model": work.network()})


if __name__ == "__main__":
    environment = FlukeENV()
    environment.set_device("cpu")
    environment.set_inmemory(True)
    environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    algorithm = {"fedavg": FedAVG, "ditto": Ditto, "gossip": GossipDFL}[work.method](
        work.peers, Splitter(), settings()
    )
    algorithm.set_callbacks([Rounds()])
    algorithm.run(work.rounds, 1.0)
