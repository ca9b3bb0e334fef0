"""`dispfl costs`: what a round costs, without training."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dispfl.errors import ConfigError
from dispfl.terminal import number_table, print_text

if TYPE_CHECKING:
    from rich.console import Console

    from dispfl.costs.estimate import CostInputs, RoundCosts, WireCosts
    from dispfl.experiment import Experiment

PAPER_DEFAULTS: Mapping[str, Any] = {
    "peers": 100,
    "data": "cifar10",
    "partition": {"samples_per_peer": "all"},  # 500 per peer on CIFAR, 1,000 on Tiny-ImageNet
    "model": "resnet18",
    "topology": {"name": "random", "degree": 10},
    "train": {"epochs": 5, "batch_size": 128},
}
"""The settings of the paper's main experiments; the method is Dis-PFL at density 0.5 by default in
any case."""


def costs(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.toml] [KEY=VALUE]...",
            help="A config file, then overrides, as for dispfl run.",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="The config file, given as an option.")
    ] = None,
    paper: Annotated[
        bool, typer.Option("--paper", help="Print every cost of the paper beside ours.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what a round costs in bytes and FLOPs, layer by layer, without training and without
    data files.

    Defaults are the paper's: Dis-PFL at density 0.5, ResNet-18,
    CIFAR-10, 100 peers with 500 samples each (all training samples),
    10 random neighbours, 5 epochs, batch size 128; with a config file they
    are those of dispfl run.
    With --paper, every cost in the paper's tables is computed again. The
    exit code is 1 if one deviates by more than 0.5 % and by more than one of
    its last digit.

    Example: dispfl costs model=vgg11 method.density=0.2 topology=ring
    """
    from rich.console import Console

    if paper:
        from dispfl.paper.printed_costs import (
            CostVerdict,
            compare_costs,
            costs_as_json,
            count_verdicts,
            print_costs,
        )

        if arguments or config:
            raise ConfigError(
                "--paper uses the settings of the paper's tables; omit all other settings.",
                key="--paper",
            )
        compared = compare_costs()
        if as_json:
            typer.echo(json.dumps(costs_as_json(compared), indent=2))
        else:
            print_costs(compared, Console())
        if count_verdicts(compared)[CostVerdict.OFF]:
            raise typer.Exit(1)
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
    inputs = _cost_inputs(compose(base, overrides))
    found, wire = estimate(inputs), wire_costs(inputs)
    if as_json:
        typer.echo(json.dumps(_as_json(inputs, found, wire), indent=2))
    else:
        _print(Console(), inputs, found, wire)


def _cost_inputs(experiment: "Experiment") -> "CostInputs":
    from dispfl.costs.estimate import CostInputs
    from dispfl.data.catalogue import describe

    spec, requested = describe(experiment.data.name), experiment.partition.samples_per_peer
    most = spec.train // experiment.peers
    if most == 0 or (requested != "all" and requested > most):
        raise ConfigError(
            f"partition.samples_per_peer is {requested} but {spec.train} training samples give each"
            f" of {experiment.peers} peers at most {most}; lower partition.samples_per_peer or"
            " peers.",
            key="partition.samples_per_peer",
        )
    return CostInputs.of(experiment)


def _as_json(inputs: "CostInputs", found: "RoundCosts", wire: "WireCosts") -> dict[str, Any]:
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
        "parameters": found.parameters,
        "kept": _whole(found.kept),
        "flops": "saved" if inputs.method.masks_channels else "counted",
        "dense_layers": list(found.dense_layers),
        "fixed_forward_flops": found.fixed_flops,
        "not_counted": found.omission,
        "paper": {
            "busiest_mb": found.busiest_mb,
            "mean_mb": found.mean_mb,
            "flops_per_peer_round": found.flops_per_peer,
        },
        "wire": {
            "busiest_up_mb": wire.busiest_up_mb,
            "busiest_down_mb": wire.busiest_down_mb,
            "mean_mb": wire.mean_mb,
            "peers_drawn": wire.peers_drawn,
        },
        "groups": [
            {
                "density": group.density,
                "peers": group.peers,
                "kept": group.kept,
                "flops_per_peer_round": group.flops,
            }
            for group in found.groups
        ],
        "layers": [
            {
                "name": layer.name,
                "shape": layer.shape,
                **({"small_shape": layer.small_shape} if layer.small_shape else {}),
                "density": layer.kept / layer.size,
                "kept": _whole(layer.kept),
                "forward_flops": _whole(layer.flops),
            }
            for layer in found.layers
        ],
    }


def _whole(mean: float) -> float:
    """Return a mean as an int where it is a whole number."""
    return int(mean) if mean.is_integer() else mean


def _print(
    console: "Console", inputs: "CostInputs", found: "RoundCosts", wire: "WireCosts"
) -> None:
    small = found.layers[0].small_shape is not None  # then shapes say what is kept
    layers = number_table(
        "layer", "shape", *(("small", "density") if small else ("density", "kept")), "MFLOPs"
    )

    def add(name: str, shape: str, kept: str, density: float, flops: str) -> None:
        layers.add_row(
            name, shape, *((kept, f"{density:.3f}") if small else (f"{density:.3f}", kept)), flops
        )

    for layer in found.layers:
        kept = f"{layer.kept:,.0f}" if layer.small_shape is None else _shape(layer.small_shape)
        flops = f"{layer.flops / 1e6:,.2f}" if layer.flops else "–"
        add(layer.name, _shape(layer.shape), kept, layer.kept / layer.size, flops)
    if found.fixed_flops:
        layers.add_row("products of activations", "", "", "", f"{found.fixed_flops / 1e6:,.2f}")
    layers.add_section()
    forward = (found.fixed_flops + sum(layer.flops for layer in found.layers)) / 1e6
    share = found.kept / found.parameters
    add("all", f"{found.parameters:,}", f"{found.kept:,.0f}", share, f"{forward:,.2f}")
    totals = number_table(
        "\nper round",
        "busiest node\nMB up",
        "busiest node\nMB down",
        "mean peer\nMB down",
        "per peer\nFLOPs",
    )
    paper = [f"{value:,.2f}" for value in (found.busiest_mb, found.mean_mb)]
    totals.add_row("as the paper counts", "–", *paper, _flops(found.flops_per_peer))
    sent = [f"{value:,.2f}" for value in (wire.busiest_up_mb, wire.busiest_down_mb, wire.mean_mb)]
    totals.add_row("on the wire", *sent, "")
    print_text(console, _headline(inputs))
    console.print("", layers, "", totals, "", sep="\n")
    if len(found.groups) > 1:
        groups = number_table("density", "peers", "kept", "FLOPs per peer")
        for group in found.groups:
            groups.add_row(
                f"{group.density:g}", str(group.peers), f"{group.kept:,}", _flops(group.flops)
            )
        console.print(groups, "", sep="\n")
    for sentence in _legend(inputs, found, wire):
        print_text(console, sentence, "dim")


def _shape(sides: Sequence[int]) -> str:
    return "x".join(map(str, sides))


def _flops(count: float) -> str:
    digits, _, power = f"{count:.3e}".partition("e")
    return f"{digits}e{int(power)}"


def _headline(inputs: "CostInputs") -> str:
    method = (
        f"{inputs.method.name} with masks of channels"
        if inputs.method.masks_channels
        else inputs.method.name
    )
    images = f"{_shape(inputs.data.shape)}, {inputs.data.classes} classes"
    return (
        f"{inputs.model.name} on {inputs.data.name} ({images}), {method}, {inputs.topology.name}; "
        f"{inputs.peers} peers with {inputs.samples} samples, {inputs.train.duration}, "
        f"batch {inputs.train.batch_size}"
    )


def _legend(inputs: "CostInputs", found: "RoundCosts", wire: "WireCosts") -> list[str]:
    from dispfl.methods.base import ServerMethod

    over = ", mean over peers" if len(found.groups) > 1 else ""
    kind = "counted: dense kernels do the work"
    if inputs.method.masks_channels:
        kind = "saved: a peer trains the small network, which computes only these"
    drawn = (
        f"masks of {wire.peers_drawn} peers drawn"
        if wire.peers_drawn < inputs.peers
        else "all peers' masks drawn"
    )
    notes = [
        f"MFLOPs: one sample, forward{over}. FLOPs: one peer's local training; {kind}.",
        "Normalization, activations and pooling are free, as in the paper.",
        (
            "MB: 1e6 bytes. The paper counts 4 bytes per kept value; on the wire, masks, headers"
            " and requests are added."
        ),
        f"Round 0, its graph from seed {inputs.seed}; {drawn}.",
    ]
    if found.omission:
        notes.append(found.omission)
    if found.dense_layers:
        whole = ", ".join(found.dense_layers)
        notes.append(
            f"Kept whole by every peer, because none of their units may be left out: {whole}."
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
