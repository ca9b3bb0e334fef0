"""The side of typical research code, written in PFLlib's manner.

Client objects own deep copies of the model; a DataLoader over a list of samples, torch's SGD, and a
Python loop over the clients.
"""

import copy

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from work import LR, PROX, WEIGHT_DECAY, Work, end_of_round

Sample = tuple[Tensor, Tensor]


class Client:
    """A client with its own model, and with Ditto a personal one."""

    def __init__(self, work: Work, number: int, model: nn.Module) -> None:
        self.work = work
        self.samples: list[Sample] = list(zip(*work.data(number), strict=True))
        self.model = copy.deepcopy(model)
        self.personal = copy.deepcopy(model)
        self.optimizer = sgd(self.model)
        self.personal_optimizer = sgd(self.personal)
        self.loss = nn.CrossEntropyLoss()

    def receive(self, model: nn.Module) -> None:
        for parameter, received in zip(self.model.parameters(), model.parameters(), strict=True):
            parameter.data = received.data.clone()

    def train(self) -> None:
        if self.work.method == "ditto":
            anchor = copy.deepcopy(self.model)
            global_epochs, personal_epochs = self.work.ditto_epochs
            self.train_model(self.model, self.optimizer, global_epochs, None)
            self.train_model(self.personal, self.personal_optimizer, personal_epochs, anchor)
        else:
            self.train_model(self.model, self.optimizer, self.work.epochs, None)

    def train_model(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        epochs: int,
        anchor: nn.Module | None,
    ) -> None:
        loader = DataLoader[Sample](self.samples, self.work.batch, shuffle=True)  # type: ignore[arg-type]
        model.train()
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                self.loss(model(x), y).backward()
                if anchor is not None:
                    pairs = zip(model.parameters(), anchor.parameters(), strict=True)
                    for parameter, anchored in pairs:
                        assert parameter.grad is not None
                        parameter.grad += PROX * (parameter.data - anchored.data)
                optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a model."""
    return torch.optim.SGD(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)


def aggregate(model: nn.Module, clients: list[Client]) -> nn.Module:
    """Return the mean of the clients' models."""
    uploads = [copy.deepcopy(client.model) for client in clients]
    mean = copy.deepcopy(model)
    for parameter in mean.parameters():
        parameter.data.zero_()
    for upload in uploads:
        for parameter, uploaded in zip(mean.parameters(), upload.parameters(), strict=True):
            parameter.data += uploaded.data.clone() / len(uploads)
    return mean


if __name__ == "__main__":
    work = Work.from_environment()
    model = work.network()
    clients = [Client(work, number, model) for number in range(work.peers)]
    for _ in range(work.rounds):
        for client in clients:
            client.receive(model)
        for client in clients:
            client.train()
        model = aggregate(model, clients)
        end_of_round()
