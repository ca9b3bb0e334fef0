"""`dispfl costs`: what a round costs, without training. The paper's figures beside ours are in `costs_paper.py`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dispfl.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dispfl.config import Experiment
    from dispfl.costs.estimate import Costs, Plan, WireCosts

THE_PAPERS: Mapping[str, Any] = {
    "peers": 100,
    "data": "cifar10",
    "partition": {"samples": "all"},  # 500 a peer on CIFAR, 1,000 on Tiny-ImageNet
    "model": "resnet18",
    "topology": {"name": "random", "degree": 10},
    "train": {"epochs": 5, "batch": 128},
}
"""The setting of the paper's main experiments; the method is Dis-PFL at density 0.5 by default in any case."""


def costs(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings, as for dispfl run.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="A config file, over the defaults of dispfl run, not the paper's."),
    ] = None,
    paper: Annotated[bool, typer.Option("--paper", help="Print every cost of the paper beside ours.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what a round costs in bytes and FLOPs, layer by layer, without training and without data files.

    What is not set is as in the paper: Dis-PFL at density 0.5, ResNet-18,
    CIFAR-10, 100 peers with 500 samples each (all training samples, shared
    out), 10 random neighbours, 5 epochs, batch 128.
    With --paper, every cost figure in the paper's tables is found anew. The
    exit code is 1 if one deviates by more than 0.5 % and by more than one of
    its last digit.

    Example: dispfl costs model=vgg11 method.density=0.2 topology=ring
    """
    from rich.console import Console

    if paper:
        from dispfl.cli.costs_paper import compare_with_the_paper

        if words or config:
            raise ConfigError("--paper has its own settings, those of the tables; leave the others away.")
        compare_with_the_paper(Console(), as_json)
        return

    from dispfl.config import compose, read_toml
    from dispfl.costs.estimate import estimate, wire_costs
    from dispfl.runs.directory import MADE_IN_PYTHON

    base = read_toml(config) if config else THE_PAPERS
    if MADE_IN_PYTHON in base:
        raise ConfigError(f"{config} is of a run made in Python; costs need a model and a data set by name.")
    plan = _plan(compose(base, words or []))
    found, wire = estimate(plan), wire_costs(plan)
    if as_json:
        typer.echo(json.dumps(_as_json(plan, found, wire), indent=2))
    else:
        _print(Console(), plan, found, wire)


def _plan(experiment: "Experiment") -> "Plan":
    from dispfl.data.catalogue import describe
    from dispfl.reproduce.work import plan_of

    spec, asked = describe(experiment.data.name), experiment.partition.samples
    most = spec.train // experiment.peers
    if most == 0 or (asked != "all" and asked > most):
        raise ConfigError(
            f"partition.samples is {asked} but {spec.train} training samples give each of {experiment.peers} peers "
            f"at most {most}; lower partition.samples or peers."
        )
    return plan_of(experiment)


def _as_json(plan: "Plan", found: "Costs", wire: "WireCosts") -> dict[str, Any]:
    return {
        "setting": {
            "model": plan.model.name,
            "data": plan.data.name,
            "method": plan.method.model_dump(mode="json"),
            "topology": plan.topology.model_dump(mode="json"),
            "wire": plan.wire.model_dump(mode="json"),
            "peers": plan.peers,
            "samples": plan.samples,
            "epochs": plan.train.epochs,
            "batch": plan.train.batch,
        },
        "parameters": found.parameters,
        "kept": _whole(found.kept),
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
            {"density": group.density, "peers": group.peers, "kept": group.kept, "flops_per_peer_round": group.flops}
            for group in found.groups
        ],
        "layers": [
            {
                "name": layer.name,
                "shape": layer.shape,
                "density": layer.kept / layer.size,
                "kept": _whole(layer.kept),
                "forward_flops": _whole(layer.flops),
            }
            for layer in found.layers
        ],
    }


def _whole(mean: float) -> float:
    """A mean over peers that all have the same number, as that whole number."""
    return int(mean) if mean.is_integer() else mean


def _print(console: "Console", plan: "Plan", found: "Costs", wire: "WireCosts") -> None:
    layers = table_of("layer", "shape", "density", "kept", "MFLOPs")
    for layer in found.layers:
        shape = "x".join(str(side) for side in layer.shape)
        flops = f"{layer.flops / 1e6:,.2f}" if layer.flops else "–"
        layers.add_row(layer.name, shape, f"{layer.kept / layer.size:.3f}", f"{layer.kept:,.0f}", flops)
    layers.add_section()
    forward = sum(layer.flops for layer in found.layers) / 1e6
    share = found.kept / found.parameters
    layers.add_row("all", f"{found.parameters:,}", f"{share:.3f}", f"{found.kept:,.0f}", f"{forward:,.2f}")
    totals = table_of(
        "\na round", "busiest node\nMB up", "busiest node\nMB down", "mean peer\nMB down", "a peer\nFLOPs"
    )
    paper = [f"{value:,.2f}" for value in (found.busiest_mb, found.mean_mb)]
    totals.add_row("paper's currency", "–", *paper, _flops(found.flops_per_peer))
    sent = [f"{value:,.2f}" for value in (wire.busiest_up_mb, wire.busiest_down_mb, wire.mean_mb)]
    totals.add_row("on the wire", *sent, "")
    console.print(_headline(plan), soft_wrap=True, highlight=False, markup=False)
    console.print("", layers, "", totals, "", sep="\n")
    if len(found.groups) > 1:
        groups = table_of("density", "peers", "kept", "FLOPs a peer")
        for group in found.groups:
            groups.add_row(f"{group.density:g}", str(group.peers), f"{group.kept:,}", _flops(group.flops))
        console.print(groups, "", sep="\n")
    for sentence in _legend(plan, wire, len(found.groups) > 1):
        console.print(sentence, style="dim", soft_wrap=True, highlight=False, markup=False)


def _flops(count: float) -> str:
    digits, _, power = f"{count:.3e}".partition("e")
    return f"{digits}e{int(power)}"


def _headline(plan: "Plan") -> str:
    shape = "x".join(str(side) for side in plan.data.shape)
    return (
        f"{plan.model.name} on {plan.data.name} ({shape}, {plan.data.classes} classes), {plan.method.name}, "
        f"{plan.topology.name}; {plan.peers} peers with {plan.samples} samples, {plan.train.epochs} epochs, "
        f"batch {plan.train.batch}"
    )


def _legend(plan: "Plan", wire: "WireCosts", several: bool) -> list[str]:
    from dispfl.methods.base import ServerMethod

    over = ", mean over peers" if several else ""
    drawn = f"masks of {wire.peers_drawn} peers drawn" if wire.peers_drawn < plan.peers else "all peers' masks drawn"
    said = [
        f"MFLOPs: one sample, forward{over}. FLOPs: a peer's local phase. They are counted, not saved.",
        "MB: 1e6 bytes. The paper's currency is 4 bytes a kept value; on the wire are masks, headers and requests too.",
        f"Round 0, its graph from seed {plan.seed}; {drawn}.",
    ]
    if isinstance(plan.method, ServerMethod):
        said.append("The busiest node is the server. Peers outside its cohort neither send nor train.")
    if plan.method.tuning:
        said.append("Fine-tuning before a model is judged is not charged, as in the paper.")
    if plan.method.name == "subfedavg":
        said.append("subfedavg prunes as it trains: later rounds cost less; how much less depends on the training.")
    return said


def table_of(*headings: str) -> "Table":
    """An empty table with these headings; all columns but the first are numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return table
