"""torch's own archive of a graph, with normalization and softmax inside, and the card as the extra file `card.json`.

`torch.export.load` unpickles whatever an archive marks as pickled, and evaluates the sizes that it holds as texts, so
opening an archive from elsewhere is running a program from elsewhere. What is written here holds no pickle: weights
are raw bytes, and the example inputs, which torch would pickle, are left out.
"""

import io
import json

import torch

from dispfl.export.card import Card
from dispfl.export.classifier import Classifier
from dispfl.export.deployed import Deployed, graph_of, quiet

CARD = "card.json"


def encode(deployed: Deployed, card: Card) -> bytes:
    """An archive that `torch.export.load` opens."""
    program = graph_of(deployed, card)
    program.example_inputs = None
    archive = io.BytesIO()
    with quiet():
        torch.export.save(program, archive, extra_files={CARD: json.dumps(card.to_strings(), ensure_ascii=False)})
    return archive.getvalue()


def decode(content: bytes) -> Classifier:
    """Run it by torch. Only for archives that can be trusted, see above."""
    extra = {CARD: ""}
    with quiet():
        program = torch.export.load(io.BytesIO(content), extra_files=extra)
    card = Card.from_strings(json.loads(extra[CARD]))
    return Classifier(card, torch.no_grad()(program.module()))
