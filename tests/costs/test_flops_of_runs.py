"""FLOPs in the metrics of runs: recurrent and attention networks, a method's own loop, and what is
not counted."""

import logging
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dispfl import Federation, GossipMethod, Local, PackedModel, PeerState, Ring, Train, Trainer

TRAIN = Train(epochs=2, batch_size=8, lr=0.1)
PEERS = 3
SAMPLES = 12


class TokenGRU(nn.Module):
    """Classifies sequences of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.gru = nn.GRU(4, 3, batch_first=True)
        self.head = nn.Linear(3, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        _, last = self.gru(self.embedding(tokens))
        outputs: Tensor = self.head(last[0])
        return outputs


class TokenTransformer(nn.Module):
    """The same with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.position = nn.Parameter(torch.zeros(6, 4))
        self.layer = nn.TransformerEncoderLayer(
            4, 2, dim_feedforward=8, dropout=0.0, batch_first=True
        )
        self.head = nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.layer(self.embedding(tokens) + self.position).mean(1))
        return outputs


def sentences(which: int) -> tuple[Tensor, Tensor]:
    """Six tokens of ten; the class is whether the first one is large."""
    tokens = torch.randint(10, (SAMPLES, 6), generator=torch.Generator().manual_seed(which))
    return tokens, (tokens[:, 0] > 4).long()


def flops(model: type[nn.Module], method: GossipMethod) -> list[float]:
    peers = [(sentences(k), sentences(100 + k)) for k in range(PEERS)]
    run = Federation(model, peers, method, Ring(), train=TRAIN, rounds=2).run()
    return [record["flops_per_peer"] for record in run.metrics]


def test_a_federation_of_grus_is_charged_by_hand() -> None:
    """Six tokens: 24 looked-up values; three gates of 3 x 4 and 3 x 3 weights and two biases; the
    head once."""
    forward = 24 + 6 * 3 * (2 * 12 + 2 * 9 + 3 + 3) + (2 * 6 + 2)
    assert flops(TokenGRU, Local()) == [3 * 2 * SAMPLES * forward] * 2


def test_a_federation_of_small_transformers_is_charged_by_hand() -> None:
    """Projections of 4 x 4 weights, four of them; two products over 6 x 6 pairs; the two linear
    layers; the head."""
    attention = 6 * 4 * (2 * 16 + 4) + 2 * (6 * 6 * 4) * 2
    linear = 6 * (2 * 32 + 8) + 6 * (2 * 32 + 4)
    forward = 24 + 24 + attention + linear + (2 * 8 + 2)
    assert flops(TokenTransformer, Local()) == [3 * 2 * SAMPLES * forward] * 2


class OwnLoop(GossipMethod):
    """Trains through the network alone, without any of the trainer's functions."""

    def step(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> PeerState:
        weights, mask = state.model.unpack()
        trainer.network.load(weights, {})
        for _ in range(2):
            for x, y in trainer.train.batches(8, rng=trainer.batch_rng):
                trainer.network.grad.zero_()
                functional.cross_entropy(trainer.network(x), y).backward()
                trainer.network.weights.sub_(trainer.network.grad, alpha=0.1)
        model = PackedModel.pack(trainer.network.read(), mask)
        return PeerState(model, model.mask)


class HalfOwnLoop(GossipMethod):
    """Trains with the trainer first, and then on its own."""

    def step(
        self, trainer: Trainer, state: PeerState, received: Mapping[str, PackedModel]
    ) -> PeerState:
        weights, mask = state.model.unpack()
        learned = PackedModel.pack(trainer.learn(weights, mask, epochs=1), mask)
        trainer.network.load(learned.unpack()[0], {})
        for x, y in trainer.train.batches(8, rng=trainer.batch_rng):
            functional.cross_entropy(trainer.network(x), y).backward()
        return PeerState(learned, learned.mask)


@pytest.mark.parametrize("method", [OwnLoop(), HalfOwnLoop()], ids=["whole", "half"])
def test_a_method_with_a_loop_of_its_own_is_charged_as_much_as_one_that_learns(
    method: GossipMethod,
) -> None:
    assert flops(TokenGRU, method) == flops(TokenGRU, Local())


class Pairs(nn.Module):
    """A network with a layer that has no formula."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Bilinear(6, 6, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs: Tensor = self.pair(tokens.float(), tokens.float())
        return outputs


def test_a_run_names_once_what_it_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dispfl"):
        flops(Pairs, Local())
    said = [record.getMessage() for record in caplog.records if "FLOPs" in record.getMessage()]
    assert said == [
        "FLOPs do not include pair (Bilinear), trilinear (an operation): there is no formula for"
        " these operations."
    ]
