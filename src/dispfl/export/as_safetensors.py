"""The weights under their parameters' names, and the card in the header: for a network that dispfl can build again."""

import json

import safetensors.torch

from dispfl.errors import DataError
from dispfl.export.card import Card
from dispfl.export.classifier import Classifier
from dispfl.export.deployed import Deployed


def encode(deployed: Deployed, card: Card) -> bytes:
    """Parameters and buffers, dense: weights that the peer does not keep are zeros."""
    card.network()  # refused if it could not be built again
    state = deployed.network.state_dict()
    return safetensors.torch.save(
        {name: tensor.contiguous().clone() for name, tensor in state.items()}, card.to_strings()
    )


def decode(content: bytes) -> Classifier:
    """Build the network again and give it its weights."""
    tensors = safetensors.torch.load(content)
    length = int.from_bytes(content[:8], "little")  # of the header, which safetensors has just checked
    card = Card.from_strings(json.loads(content[8 : 8 + length]).get("__metadata__", {}))
    network = card.network()
    try:
        network.load_state_dict(tensors, assign=True)
    except RuntimeError:
        raise DataError("Its tensors are not those of the network that its card names.") from None
    return Classifier.of(Deployed(network.float(), card), card)
