"""`dispfl costs`: what a round costs, without training."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dispfl.cli.completion import complete_config_and_settings
from dispfl.errors import ConfigError
from dispfl.report.units import BYTES, FLOPS, axis_unit, common_unit
from dispfl.terminal import SafeConsole, number_table, print_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dispfl.costs.estimate import CostInputs, GroupCost, LayerCost, RoundCosts, WireCosts
    from dispfl.experiment import Experiment

UNKNOWN = "–"
"""A cell without a value."""
PAPER_DEFAULTS: Mapping[str, Any] = {
    "peers": 100,
    "data": "cifar10",
    "partition": {"samples_per_peer": "all"},  # 500 per peer on CIFAR, 1,000 on Tiny-ImageNet
    "model": "resnet18",
    "topology": {"name": "random", "degree": 10},
    "train": {"epochs": 5, "batch_size": 128},
}
"""The settings of the paper's main experiments; the default method is Dis-PFL at density 0.5."""


def costs(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.toml] [KEY=VALUE]...",
            autocompletion=complete_config_and_settings,
            help="A config file, then overrides, as for dispfl run.",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="The config file, given as an option.")
    ] = None,
    paper: Annotated[
        bool, typer.Option("--paper", help="Print every cost of the paper beside ours.")
    ] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Train for some seconds, to measure the speed of this machine as a device.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what a round costs in bytes and FLOPs, without training.

    Data files are not needed, except your own (data.path, data.factory).

    Defaults are the paper's: Dis-PFL at density 0.5, ResNet-18,
    CIFAR-10, 100 peers with 500 samples each (all training samples),
    10 random neighbours, 5 epochs, batch size 128; with a config file they
    are those of dispfl run.
    With --paper, every cost in the paper's tables is computed again. The
    exit code is 1 if one deviates by more than 0.5 % and by more than one of
    its last digit.

    Example: dispfl costs model=vgg11 method.density=0.2 topology=ring
    """

    if paper:
        if arguments or config or measure:
            raise ConfigError(
                "--paper uses the settings of the paper's tables; omit all other settings.",
                key="--paper",
            )
        _compare_with_paper(as_json)
        return

    from dispfl.cli.run import split_config
    from dispfl.config import MADE_IN_PYTHON, compose, read_toml
    from dispfl.costs.estimate import estimate, wire_costs

    file, overrides = split_config(arguments or [])
    if file and config:
        raise ConfigError(f"There are two config files, {file} and {config}; give one of them.")
    file = file or config
    base = read_toml(file) if file else PAPER_DEFAULTS
    if MADE_IN_PYTHON in base:
        raise ConfigError(
            f"{file} belongs to a run made in Python; costs need a model and a data set by name."
        )
    experiment = compose(base, overrides)
    inputs = _cost_inputs(experiment)
    estimated = estimate(inputs)
    wire = wire_costs(inputs)
    speed = _measured_speed(experiment) if measure else None
    if as_json:
        content = _as_json(inputs, estimated, wire)
        if speed is not None:
            content["measured_speed"] = speed
        typer.echo(json.dumps(content, indent=2))
    else:
        console = SafeConsole()
        _print(console, inputs, estimated, wire)
        if speed is not None:
            print_text(console, _speed_sentence(speed))


def _measured_speed(experiment: "Experiment") -> float:
    """Measure the speed of this machine as a device of a clock, in FLOP/s."""
    from dispfl.data.datasets import CustomData
    from dispfl.paper.workload import training_speed

    if isinstance(experiment.data, CustomData):
        raise ConfigError(
            "--measure trains on noise in place of a built-in data set; name one with images of"
            " about your size, such as data=cifar10.",
            key="--measure",
        )
    return training_speed(experiment)


def _speed_sentence(speed: float) -> str:
    """Say how fast this machine is, and how to describe a slower device."""
    return (
        f"Measured: this machine trains with {speed:.2g} FLOP/s, under its present load. Devices"
        f" that are 20 times as slow have speed={speed / 20:.2g} in their class or fleet."
    )


def _compare_with_paper(as_json: bool) -> None:

    from dispfl.paper.printed_costs import (
        CostVerdict,
        compare_costs,
        costs_as_json,
        count_verdicts,
        print_costs,
    )

    compared = compare_costs()
    if as_json:
        typer.echo(json.dumps(costs_as_json(compared), indent=2))
    else:
        print_costs(compared, SafeConsole())
    if count_verdicts(compared)[CostVerdict.OFF]:
        raise typer.Exit(1)


def _cost_inputs(experiment: "Experiment") -> "CostInputs":
    from dispfl.costs.estimate import CostInputs, OwnData
    from dispfl.data.catalogue import describe
    from dispfl.data.datasets import CustomData
    from dispfl.runs.prepare import prepare

    if isinstance(experiment.data, CustomData):
        dataset, _, context = prepare(experiment)
        data = OwnData(dataset.name, dataset.shape, len(dataset.classes))
        return CostInputs.of_run(experiment, context, data)
    spec = describe(experiment.data.name)
    requested = experiment.partition.samples_per_peer
    most = spec.train // experiment.peers
    if most == 0 or (requested != "all" and requested > most):
        raise ConfigError(
            f"partition.samples_per_peer is {requested} but {spec.train} training samples give each"
            f" of {experiment.peers} peers at most {most}; lower partition.samples_per_peer or"
            " peers.",
            key="partition.samples_per_peer",
        )
    return CostInputs.of(experiment)


def _as_json(inputs: "CostInputs", estimated: "RoundCosts", wire: "WireCosts") -> dict[str, Any]:
    return {
        "setting": {
            "model": inputs.model.name,
            "data": inputs.data.name,
            "method": inputs.method.model_dump(mode="json"),
            "topology": inputs.topology.model_dump(mode="json"),
            "wire": inputs.wire.model_dump(mode="json"),
            "peers": inputs.peers,
            "samples": inputs.samples,
            "epochs": None if inputs.train.steps else inputs.train.epochs,
            "steps": inputs.train.local_steps(inputs.samples),
            "batch": inputs.train.batch_size,
        },
        "parameters": estimated.parameters,
        "kept": _whole(estimated.kept),
        "flops": "saved" if inputs.method.masks_channels else "counted",
        "dense_layers": list(estimated.dense_layers),
        "fixed_forward_flops": estimated.fixed_flops,
        "not_counted": estimated.omission,
        "paper": {
            "busiest_mb": estimated.busiest_mb,
            "mean_mb": estimated.mean_mb,
            "flops_per_peer_round": estimated.flops_per_peer,
        },
        "wire": {
            "busiest_up_mb": wire.busiest_up_mb,
            "busiest_down_mb": wire.busiest_down_mb,
            "mean_mb": wire.mean_mb,
            "peers_drawn": wire.peers_drawn,
        },
        "groups": [_group_json(group) for group in estimated.groups],
        "layers": [_layer_json(layer) for layer in estimated.layers],
    }


def _group_json(group: "GroupCost") -> dict[str, Any]:
    return {
        **({"class": group.name} if group.name else {}),
        "density": group.density,
        "peers": group.peers,
        "kept": group.kept,
        "flops_per_peer_round": group.flops,
    }


def _layer_json(layer: "LayerCost") -> dict[str, Any]:
    values: dict[str, Any] = {"name": layer.name, "shape": layer.shape}
    if layer.small_shape:
        values["small_shape"] = layer.small_shape
    return values | {
        "density": layer.kept / layer.size,
        "kept": _whole(layer.kept),
        "forward_flops": _whole(layer.flops),
    }


def _whole(mean: float) -> float:
    """Return a mean as an int where it is a whole number."""
    return int(mean) if mean.is_integer() else mean


def _print(
    console: "Console", inputs: "CostInputs", estimated: "RoundCosts", wire: "WireCosts"
) -> None:
    print_text(console, _headline(inputs))
    console.print("", _layers_table(estimated), "", _totals_table(estimated, wire), "", sep="\n")
    if len(estimated.groups) > 1:
        class_heading = ["class"] if inputs.classes else []
        groups = number_table(*class_heading, "density", "peers", "kept", "FLOPs per peer")
        for group in estimated.groups:
            cells = [f"{group.density:g}", str(group.peers), f"{group.kept:,}", _flops(group.flops)]
            groups.add_row(*([group.name] if inputs.classes else []), *cells)
        console.print(groups, "", sep="\n")
    for sentence in _legend(inputs, estimated, wire):
        print_text(console, sentence, "dim")


def _layers_table(estimated: "RoundCosts") -> "Table":
    """Return the layers; with masks of channels, with the shapes of the small network."""
    small = estimated.layers[0].small_shape is not None
    headings = ("small", "density") if small else ("density", "kept")
    forward = estimated.fixed_flops + sum(layer.flops for layer in estimated.layers)
    unit = axis_unit(forward, FLOPS)
    table = number_table("layer", "shape", *headings, unit.name)

    def add(name: str, shape: str, kept: str, density: float, flops: str) -> None:
        share = f"{density:.3f}"
        cells = (kept, share) if small else (share, kept)
        table.add_row(name, shape, *cells, flops)

    for layer in estimated.layers:
        kept_weights = f"{layer.kept:,.0f}"
        if layer.small_shape is not None:
            kept_weights = _shape(layer.small_shape)
        flops = unit.text(layer.flops) if layer.flops else UNKNOWN
        add(layer.name, _shape(layer.shape), kept_weights, layer.kept / layer.size, flops)
    if estimated.fixed_flops:
        flops = unit.text(estimated.fixed_flops)
        table.add_row("products of activations", "", "", "", flops)
    table.add_section()
    density = estimated.kept / estimated.parameters
    parameters = f"{estimated.parameters:,}"
    kept_weights = f"{estimated.kept:,.0f}"
    add("all", parameters, kept_weights, density, unit.text(forward))
    return table


def _totals_table(estimated: "RoundCosts", wire: "WireCosts") -> "Table":
    counted = [1e6 * estimated.busiest_mb, 1e6 * estimated.mean_mb]
    sent = [1e6 * wire.busiest_up_mb, 1e6 * wire.busiest_down_mb, 1e6 * wire.mean_mb]
    unit = common_unit([*counted, *sent], BYTES)
    table = number_table(
        "\nper round",
        f"busiest node\n{unit.name} up",
        f"busiest node\n{unit.name} down",
        f"mean peer\n{unit.name} down",
        "per peer\nFLOPs",
    )
    flops = _flops(estimated.flops_per_peer)
    table.add_row("as the paper counts", UNKNOWN, *map(unit.text, counted), flops)
    table.add_row("on the wire", *map(unit.text, sent), "")
    return table


def _shape(sides: Sequence[int]) -> str:
    return "x".join(map(str, sides))


def _flops(count: float) -> str:
    digits, _, power = f"{count:.3e}".partition("e")
    return f"{digits}e{int(power)}"


def _headline(inputs: "CostInputs") -> str:
    method = inputs.method.name
    if inputs.method.masks_channels:
        method += " with masks of channels"
    images = f"{_shape(inputs.data.shape)}, {inputs.data.classes} classes"
    return (
        f"{inputs.model.name} on {inputs.data.name} ({images}), {method}, {inputs.topology.name}; "
        f"{inputs.peers} peers with {inputs.samples} samples, {inputs.train.duration}, "
        f"batch {inputs.train.batch_size}"
    )


def _legend(inputs: "CostInputs", estimated: "RoundCosts", wire: "WireCosts") -> list[str]:
    from dispfl.methods.base import ServerMethod

    over = ", mean over peers" if len(estimated.groups) > 1 else ""
    work = "counted: dense kernels do the work"
    if inputs.method.masks_channels:
        work = "saved: a peer trains the small network, which computes only these"
    drawn = "all peers' masks drawn"
    if wire.peers_drawn < inputs.peers:
        drawn = f"masks of {wire.peers_drawn} peers drawn"
    notes = [
        f"By layer: FLOPs of one sample, forward{over}. Per peer: its local training; {work}.",
        "Normalization, activations and pooling are free, as in the paper.",
        (
            "MB: 1e6 bytes. The paper counts 4 bytes per kept value; on the wire, masks, headers"
            " and requests are added."
        ),
        f"Round 0, its graph from seed {inputs.seed}; {drawn}.",
    ]
    if estimated.omission:
        notes.append(estimated.omission)
    if estimated.dense_layers:
        layers = ", ".join(estimated.dense_layers)
        notes.append(
            f"Kept whole by every peer, because none of their units may be left out: {layers}."
        )
    if isinstance(inputs.method, ServerMethod):
        notes.append(
            "The busiest node is the server. Peers outside its cohort neither send nor train."
        )
    if inputs.method.fine_tuning:
        notes.append("Fine-tuning before a model is evaluated is not charged, as in the paper.")
    if inputs.method.name == "subfedavg":
        notes.append(
            "subfedavg prunes as it trains: later rounds cost less; how much less depends on the"
            " training."
        )
    return notes
