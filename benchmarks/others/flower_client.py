"""Flower's clients, in a module of their own: Ray's processes import it."""

from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from work import LR, PROX, WEIGHT_DECAY, Work, steps_so_far

work = Work.given()
app = ClientApp()
data = cache(work.data)


def train(model: nn.Module, peer: int, epochs: int, anchor: list[Tensor] | None = None) -> None:
    """Local training as Flower's tutorials have it, on tensors instead of a DataLoader, which would
    be slower."""
    x, y = data(peer)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(y)).split(work.batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            if anchor is not None:
                for own, other in zip(model.parameters(), anchor, strict=True):
                    assert own.grad is not None
                    own.grad += PROX * (own.data - other)
            optimizer.step()


@app.train()
def train_client(message: Message, context: Context) -> Message:
    """Train the received model, and with Ditto the personal one, which stays in the client's
    context."""
    peer, before = int(context.node_config["partition-id"]), steps_so_far()
    model = work.network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    epochs = work.epochs
    if work.method == "ditto":
        epochs, of_personal = work.ditto_epochs
        personal = work.network()
        if "personal" in context.state:
            personal.load_state_dict(context.state["personal"].to_torch_state_dict())
        train(
            personal,
            peer,
            of_personal,
            [parameter.detach().clone() for parameter in model.parameters()],
        )
        context.state["personal"] = ArrayRecord(personal.state_dict())
    train(model, peer, epochs)
    metrics = MetricRecord({"num-examples": work.samples, "steps": steps_so_far() - before})
    return Message(
        RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}),
        reply_to=message,
    )
