"""Flower's clients, in a module of their own: Ray's processes import it."""

from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from work import LR, PROX, WEIGHT_DECAY, Work, steps_so_far

work = Work.from_environment()
app = ClientApp()
data = cache(work.data)


def train(model: nn.Module, peer: int, epochs: int, anchor: list[Tensor] | None = None) -> None:
    """Train locally as in Flower's tutorials.

    Batches are taken from tensors instead of a DataLoader, which would be slower.
    """
    x, y = data(peer)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(y)).split(work.batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            if anchor is not None:
                for parameter, anchored in zip(model.parameters(), anchor, strict=True):
                    assert parameter.grad is not None
                    parameter.grad += PROX * (parameter.data - anchored)
            optimizer.step()


@app.train()
def train_client(message: Message, context: Context) -> Message:
    """Train the received model.

    With Ditto also train the personal model, which stays in the client's context.
    """
    peer = int(context.node_config["partition-id"])
    steps_before = steps_so_far()
    model = work.network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    epochs = work.epochs
    if work.method == "ditto":
        epochs, personal_epochs = work.ditto_epochs
        personal = work.network()
        if "personal" in context.state:
            personal.load_state_dict(context.state["personal"].to_torch_state_dict())
        anchor = [parameter.detach().clone() for parameter in model.parameters()]
        train(personal, peer, personal_epochs, anchor)
        context.state["personal"] = ArrayRecord(personal.state_dict())
    train(model, peer, epochs)

    steps = steps_so_far() - steps_before
    metrics = MetricRecord({"num-examples": work.samples, "steps": steps})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)
