"""Flower's side: its simulation, with one processor for each client."""

import logging
from collections.abc import Iterable

from flower_client import app, work
from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from work import end_of_round

server = ServerApp()
logging.getLogger("flwr").setLevel(logging.ERROR)


class Reporting(FedAvg):  # type: ignore[misc]
    """FedAvg that reports its rounds."""

    steps = 0

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        aggregated: tuple[ArrayRecord | None, MetricRecord | None]
        aggregated = super().aggregate_train(server_round, replies)
        self.steps += sum(int(reply.content["metrics"]["steps"]) for reply in replies)
        end_of_round(self.steps)
        return aggregated


@server.main()
def main(grid: Grid, context: Context) -> None:
    strategy = Reporting(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=work.peers)
    strategy.start(grid, ArrayRecord(work.network().state_dict()), num_rounds=work.rounds)


if __name__ == "__main__":
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, app, num_supernodes=work.peers, backend_config=resources)
