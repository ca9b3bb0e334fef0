"""An ONNX graph with normalization and softmax inside, and the card in its metadata."""

from importlib import import_module

import torch
from torch import Tensor

from dispfl.export.card import Card
from dispfl.export.classifier import Classifier
from dispfl.export.deployed import DYNAMIC, OUTPUT, Deployed, graph_of, quiet


def encode(deployed: Deployed, card: Card) -> bytes:
    """One file, weights included; its input is `pictures` or `rows`, its output `probabilities`."""
    with quiet():
        program = torch.onnx.export(
            graph_of(deployed, card),
            dynamo=True,
            verbose=False,
            input_names=[card.input],
            output_names=[OUTPUT],
            dynamic_shapes=DYNAMIC,  # again, so that the free dimension is called "batch"
        )
    assert program is not None  # so it is with dynamo=True
    proto = program.model_proto
    for key, value in card.to_strings().items():
        proto.metadata_props.add(key=key, value=value)
    content: bytes = proto.SerializeToString()
    return content


def decode(content: bytes) -> Classifier:
    """Run it by onnxruntime, on the CPU."""
    onnxruntime = import_module("onnxruntime")  # an extra
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors, which are raised as well
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    card = Card.from_strings(session.get_modelmeta().custom_metadata_map)

    def run(inputs: Tensor) -> Tensor:
        return torch.from_numpy(session.run([OUTPUT], {card.input: inputs.numpy()})[0])

    return Classifier(card, run)
