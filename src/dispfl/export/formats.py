"""The file formats of exported models, by suffix: how a model is written, verified and read back.

ONNX and .pt2 files contain the graph of a `DeployedModel`, and the card as metadata.
`torch.export.load` unpickles whatever an archive marks as pickled and evaluates strings in it as
sizes, so opening a .pt2 from an untrusted source runs its code. The archives written here contain
no pickle: weights are raw bytes, and the example inputs, which torch would pickle, are removed. A
safetensors file contains the weights alone, for a network that dispfl can build: of a network with
fewer channels, the tensors tell the sizes, and the header has the groups of its group norms.
"""

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, NamedTuple

import safetensors.torch
import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from dispfl.core.inputs import take_rows
from dispfl.core.layout import Layout
from dispfl.errors import ConfigError, DataError, DispflError
from dispfl.export.card import Card
from dispfl.export.predictor import DeployedModel, Predictor
from dispfl.extras import require
from dispfl.files import read_regular, write_atomically

TOLERANCE = 1e-4
"""The largest accepted difference from torch's probabilities, and from targets divided by their
standard deviation; other kernels sum in another order."""

PT2_CARD = "card.json"
NORM_GROUPS = "norm_groups"
"""In a safetensors header, where the network has fewer channels: the number of groups of every
group norm, as JSON."""
NormGroups = TypeAdapter(dict[str, Annotated[int, Field(ge=1)]])
OTHER_TENSORS = "Its tensors are not those of the network that its card names."


class SavedModel(NamedTuple):
    """A file that was written."""

    size: int
    """In bytes."""
    difference: float
    """The largest difference between its outputs and torch's, on random inputs."""


def save_model(network: nn.Module, card: Card, path: Path) -> SavedModel:
    """Write a network, which is on the CPU, as one file.

    What is to be written is first read back and compared with torch.
    """
    model_format = check_writable(path)
    deployed = DeployedModel(network, card)
    content = model_format.encode(deployed, card)
    reread = model_format.decode(content)
    difference = _largest_difference(reread, Predictor.of(deployed, card))
    if not difference <= TOLERANCE:
        raise DataError(
            f"{path} was not written: its {card.output} would differ from torch's by"
            f" {difference:.2g}."
        )
    write_atomically(path, content)
    return SavedModel(len(content), difference)


def _largest_difference(saved: Predictor, reference: Predictor) -> float:
    """The largest difference in the outputs of two models, on batches of one and three."""
    card = reference.card
    inputs = dict(
        zip(card.input_names, card.example(3, torch.Generator().manual_seed(0)), strict=True)
    )
    largest = 0.0
    for batch in (take_rows(inputs, slice(1)), inputs):
        difference = saved.outputs(batch) - reference.outputs(batch)
        if card.target_std is not None:
            difference = difference / torch.tensor(card.target_std)
        largest = max(largest, float(difference.abs().max()))
    return largest


def load_model(path: Path, *, trust: bool = False) -> Predictor:
    """Read a model that `save_model` wrote.

    A .pt2 can contain code that runs when it is read, so it needs `trust`.
    """
    model_format = _format(path)
    _check_installed(path, model_format.to_read)
    if not model_format.safe and not trust:
        raise DataError(
            f"{path} was not opened: loading a {path.suffix} runs any code hidden in it. If you"
            " trust its origin, add --trust (in Python, trust=True); .safetensors and .onnx do not"
            " need it."
        )
    try:
        return replace(model_format.decode(read_regular(path)), trust=trust)
    except FileNotFoundError:
        raise DataError(f"The model {path} does not exist; `dispfl export` writes one.") from None
    except DispflError as problem:
        raise DataError(f"{path} is not a model that dispfl can run. {problem}") from problem
    except Exception as problem:  # a damaged file can raise anything
        reason = str(problem).strip().partition("\n")[0]
        raise DataError(f"{path} is not a model, or is damaged ({reason}).") from problem


def _encode_onnx(deployed: DeployedModel, card: Card) -> bytes:
    """Encode as ONNX, weights included.

    The input is called `images` or `rows`, the output `probabilities` or `values`.
    """
    with _quiet():
        program = torch.onnx.export(
            _graph_of(deployed, card),
            dynamo=True,
            verbose=False,
            input_names=card.input_names,
            output_names=[card.output],
            dynamic_shapes=_dynamic(card),  # again, so that the free dimension is called "batch"
        )
    assert program is not None  # always the case with dynamo=True
    proto = program.model_proto
    for key, value in card.to_strings().items():
        proto.metadata_props.add(key=key, value=value)
    content: bytes = proto.SerializeToString()
    return content


def _decode_onnx(content: bytes) -> Predictor:
    """Open an ONNX model with onnxruntime, on the CPU."""
    onnxruntime = import_module("onnxruntime")  # an optional dependency
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors, which are raised as well
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    card = Card.from_strings(session.get_modelmeta().custom_metadata_map)

    def run(*inputs: Tensor) -> Tensor:
        arrays = {}
        for name, tensor in zip(card.input_names, inputs, strict=True):
            arrays[name] = tensor.numpy()
        return torch.from_numpy(session.run([card.output], arrays)[0])

    return Predictor(card, run)


def _encode_pt2(deployed: DeployedModel, card: Card) -> bytes:
    """Encode as an archive for `torch.export.load`, with the card as the extra file `card.json`."""
    program = _graph_of(deployed, card)
    program.example_inputs = None
    extra_files = {PT2_CARD: json.dumps(card.to_strings(), ensure_ascii=False)}
    archive = io.BytesIO()
    with _quiet():
        torch.export.save(program, archive, extra_files=extra_files)
    return archive.getvalue()


def _decode_pt2(content: bytes) -> Predictor:
    """Open an archive with torch. Only for trusted archives, see above."""
    extra = {PT2_CARD: ""}
    with _quiet():
        program = torch.export.load(io.BytesIO(content), extra_files=extra)
    card = Card.from_strings(json.loads(extra[PT2_CARD]))
    return Predictor(card, torch.no_grad()(program.module()))


def _encode_safetensors(deployed: DeployedModel, card: Card) -> bytes:
    """Encode parameters and buffers by name; pruned weights are zeros, the card is the header."""
    full_network = card.network()  # refuses a network that could not be built again
    header = card.to_strings()
    if Layout.of(deployed.network) != Layout.of(full_network):
        counts = {name: norm.num_groups for name, norm in _group_norms(deployed.network).items()}
        header[NORM_GROUPS] = NormGroups.dump_json(counts).decode()
    tensors = {}
    for name, tensor in deployed.network.state_dict().items():
        tensors[name] = tensor.contiguous().clone()
    return safetensors.torch.save(tensors, header)


def _decode_safetensors(content: bytes) -> Predictor:
    """Build the network that the card names and load the weights."""
    tensors = safetensors.torch.load(content)
    header_size = int.from_bytes(content[:8], "little")  # safetensors has just checked the header
    header = json.loads(content[8 : 8 + header_size]).get("__metadata__", {})
    card = Card.from_strings(header)
    network = card.network()
    if NORM_GROUPS in header:
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        _cut(network, shapes, header[NORM_GROUPS], card)
    try:
        network.load_state_dict(tensors, assign=True)
    except RuntimeError:
        raise DataError(OTHER_TENSORS) from None
    return Predictor.of(DeployedModel(network.float(), card), card)


def _cut(
    network: nn.Module, shapes: Mapping[str, Sequence[int]], norm_groups: str, card: Card
) -> None:
    """Cut a network to the shapes of a small one and try it, on the meta device, without memory."""
    for name, parameter in list(network.named_parameters()):
        small = shapes.get(name, ())
        if not _fits_into(small, parameter.shape):
            raise DataError(OTHER_TENSORS)
        layer, _, key = name.rpartition(".")
        setattr(network.get_submodule(layer), key, nn.Parameter(parameter.new_empty(small)))
    _cut_norms(network, norm_groups)
    try:
        meta = [tensor.to("meta") for tensor in card.example(2, torch.Generator())]
        DeployedModel(network, card).to("meta")(*meta)
    except (RuntimeError, ValueError) as problem:
        reason = str(problem).strip().partition("\n")[0]
        raise DataError(f"Its layers do not fit together: {reason}") from None


def _fits_into(small: Sequence[int], large: Sequence[int]) -> bool:
    if len(small) != len(large):
        return False
    return all(1 <= few <= many for few, many in zip(small, large, strict=True))


def _cut_norms(network: nn.Module, norm_groups: str) -> None:
    """Set the numbers of groups and channels of every group norm, as a header says."""
    try:
        counts = NormGroups.validate_json(norm_groups)
    except ValidationError:
        raise DataError(
            f"{NORM_GROUPS} must be JSON with a positive number for each layer, got"
            f" {norm_groups[:40]!r}."
        ) from None
    norms = _group_norms(network)
    message = f"Its {NORM_GROUPS} are not those of the network that its card names."
    if counts.keys() != norms.keys():
        raise DataError(message)
    for name, norm in norms.items():
        if counts[name] > norm.num_groups:
            raise DataError(message)
        norm.num_groups = counts[name]
        norm.num_channels = len(norm.weight)


def _group_norms(network: nn.Module) -> dict[str, nn.GroupNorm]:
    norms = {}
    for name, layer in network.named_modules():
        if isinstance(layer, nn.GroupNorm):
            norms[name] = layer
    return norms


def _graph_of(deployed: DeployedModel, card: Card) -> ExportedProgram:
    """Trace the model for any batch size, without paths of this machine."""
    with _quiet():
        # Torch would treat a batch size of 1 as a constant.
        two = tuple(card.example(2, torch.Generator().manual_seed(0)))
        program = torch.export.export(deployed, two, dynamic_shapes=_dynamic(card), strict=False)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # contains paths of our source files
    return program


def _dynamic(card: Card) -> tuple[tuple[dict[int, Dim], ...], ...]:
    """The batch size of every input is free."""
    batch = {0: Dim("batch")}
    return ((batch,) * len(card.input_names),)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide torch's warnings about its internals."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class ModelFormat(NamedTuple):
    """How one kind of file is written and read, and which optional packages that needs."""

    encode: Callable[[DeployedModel, Card], bytes]
    decode: Callable[[bytes], Predictor]
    to_write: tuple[str, ...] = ()
    to_read: tuple[str, ...] = ()
    safe: bool = True
    """Whether a file from an untrusted source may be read."""


FORMATS = {
    ".safetensors": ModelFormat(_encode_safetensors, _decode_safetensors),
    ".onnx": ModelFormat(
        _encode_onnx,
        _decode_onnx,
        to_write=("onnx", "onnxscript", "onnxruntime"),
        to_read=("onnxruntime",),
    ),
    ".pt2": ModelFormat(_encode_pt2, _decode_pt2, safe=False),
}


def check_writable(path: Path) -> ModelFormat:
    """Return the format of a path's suffix; an unknown suffix or a missing package is refused."""
    model_format = _format(path)
    _check_installed(path, model_format.to_write)
    return model_format


def _format(path: Path) -> ModelFormat:
    if path.suffix.lower() not in FORMATS:
        *suffixes, last = FORMATS
        raise ConfigError(f"{path} must end in {', '.join(suffixes)} or {last}.")
    return FORMATS[path.suffix.lower()]


def _check_installed(path: Path, packages: tuple[str, ...]) -> None:
    if packages:
        require("export", f"A {path.suffix} file", *packages)
