"""The side of a usual research code, written in PFLlib's manner: client objects that own deep
copies of the model, a DataLoader over a list of samples, torch's SGD, and a Python loop over the
clients.
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
        self.model, self.personal = copy.deepcopy(model), copy.deepcopy(model)
        self.optimizer, self.personal_optimizer = (
            torch.optim.SGD(owned.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
            for owned in (self.model, self.personal)
        )
        self.loss = nn.CrossEntropyLoss()

    def receive(self, model: nn.Module) -> None:
        for own, new in zip(self.model.parameters(), model.parameters(), strict=True):
            own.data = new.data.clone()

    def train(self) -> None:
        if self.work.method == "ditto":
            anchor = copy.deepcopy(self.model)
            of_global, of_personal = self.work.ditto_epochs
            self.train_model(self.model, self.optimizer, of_global, None)
            self.train_model(self.personal, self.personal_optimizer, of_personal, anchor)
        else:
            self.train_model(self.model, self.optimizer, self.work.epochs, None)

    def train_model(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        epochs: int,
        anchor: nn.Module | None,
    ) -> None:
        loader = DataLoader(self.samples, self.work.batch, shuffle=True)  # type: ignore[arg-type]
        model.train()
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                self.loss(model(x), y).backward()
                if anchor is not None:
                    for own, other in zip(model.parameters(), anchor.parameters(), strict=True):
                        assert own.grad is not None
                        own.grad += PROX * (own.data - other.data)
                optimizer.step()


def aggregate(model: nn.Module, clients: list[Client]) -> nn.Module:
    """Return the mean of the clients' models."""
    uploaded = [copy.deepcopy(client.model) for client in clients]
    mean = copy.deepcopy(model)
    for parameter in mean.parameters():
        parameter.data.zero_()
    for upload in uploaded:
        for parameter, own in zip(mean.parameters(), upload.parameters(), strict=True):
            parameter.data += own.data.clone() / len(uploaded)
    return mean


if __name__ == "__main__":
    work = Work.given()
    model = work.network()
    clients = [Client(work, number, model) for number in range(work.peers)]
    for _ in range(work.rounds):
        for client in clients:
            client.receive(model)
        for client in clients:
            client.train()
        model = aggregate(model, clients)
        end_of_round()
