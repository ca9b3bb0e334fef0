"""What a run directory says about its network and its models, so that they can be used again."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dispfl.config import MADE_IN_PYTHON, compose
from dispfl.core.layout import Layout
from dispfl.core.metric import METRICS, MetricLike, as_metrics
from dispfl.core.names import roster_of
from dispfl.core.packed import PackedModel, WeightMask
from dispfl.core.rng import forked_generators, global_stream
from dispfl.core.task import Task
from dispfl.data.catalogue import describe
from dispfl.data.contract import FILE as CONTRACT
from dispfl.data.contract import DataContract
from dispfl.data.datasets import DATASETS, CustomData, Data, load_dataset
from dispfl.data.labelled import InputFormat, LabelledDataset, Normalization
from dispfl.data.split import Split
from dispfl.errors import ConfigError, RunError
from dispfl.experiment import Experiment, NamedSettings
from dispfl.files import RUN, is_site, run_folder
from dispfl.methods.base import Method, PeerState, evaluated_state
from dispfl.methods.dispfl import DisPFL
from dispfl.registry import choose
from dispfl.round.context import LazyStates, PeerTask, RunContext
from dispfl.round.round import peer_step
from dispfl.runs.directory import (
    SPLIT,
    read_config,
    read_data_digest,
    read_inputs,
    read_split,
    read_summary,
    saved_rounds,
    saved_states,
    trusted_config,
)
from dispfl.runs.metrics import Metrics, byzantine_of, weights_sha256
from dispfl.runs.prepare import experiment_context
from dispfl.trust import check_site

ModelFunction = Callable[[], nn.Module]


class SavedRun:
    """A run directory, of a simulation or of a real site.

    `model`, `method` and `metric` are what only the caller has of a run made in Python. One of
    somebody else whose config names code needs `trust` where that code is needed.
    """

    def __init__(
        self,
        path: Path,
        model: ModelFunction | None = None,
        method: Method | None = None,
        metric: MetricLike | Sequence[MetricLike] | None = None,
        *,
        trust: bool = False,
    ) -> None:
        if path.name == RUN and is_site(path.parent):
            path = path.parent
        self.path = run_folder(path)
        self.site = path if is_site(path) else None
        """The folder of a real site, where its modules and data are looked up."""
        self.config: Mapping[str, Any] = read_config(self.path)
        self.made_in_python = MADE_IN_PYTHON in self.config
        self._model = model
        self._method = method
        self._metric = metric
        self._trust = trust
        site_name = self.config.get("peer")
        self.roster = [str(site_name)] if site_name else roster_of(self.config)

    @cached_property
    def states(self) -> LazyStates:
        """Every peer's state after the newest complete round."""
        return saved_states(self.path, self.roster)

    @cached_property
    def settings(self) -> NamedSettings:
        """The settings that simulations and sites have in common."""
        self._check_code()
        values = {}
        for key, value in self.config.items():
            if key in NamedSettings.model_fields and key != "topology":  # its file may be gone
                values[key] = value
        return NamedSettings.from_values({**values, "device": "cpu"}, self.site)

    @cached_property
    def inputs(self) -> InputFormat:
        """The format of the models' inputs: the one they are trained with, whatever the data are
        now."""
        if self.site is None:
            return run_inputs(self.path, self.settings.data)
        if "partition" in self.config:  # a site of `up`, whose settings are the run's
            return run_inputs(self.site.parent.parent, self.settings.data)
        return site_inputs(self.path, self.settings.data)

    @cached_property
    def method(self) -> Method:
        """The method: the caller's, or that of the config."""
        if self._method is not None:
            return self._method
        if not self.made_in_python:
            return self.settings.method
        self._check_code()
        try:
            chosen = choose("method", self.config["method"], DisPFL())
        except ConfigError:
            name = self.config["method"]["name"]
            raise RunError(
                f"{self.path} was made in Python with your method {name}: give it too, method=..."
            ) from None
        assert isinstance(chosen, Method)
        return chosen

    def _check_code(self) -> None:
        """Refuse to import code that a directory of somebody else names."""
        if self.site is None:
            trusted_config(self.path, trust=self._trust)
        else:
            check_site(self.site, self.config, trust=self._trust)

    def task(self) -> Task:
        """Return the loss and the metrics."""
        if self._metric is not None:
            return Task(metrics=as_metrics(self._metric))
        if not self.made_in_python:
            task = self.settings.make_task(self.site)
            unit = self.inputs.unit
            return task if unit is None else task.with_unit(unit)
        names = [str(name) for name in self.config["metric"]]
        for name in names:
            if name not in METRICS:
                raise RunError(
                    f"{self.path} was made in Python with your metric {name}: give it too,"
                    " metric=..."
                )
        return Task(metrics=as_metrics(names))

    def summary(self) -> Metrics:
        """Return the summary."""
        summary = read_summary(self.path)
        if summary is None:
            raise RunError(f"{self.path} is not finished, so it has no summary yet.")
        return summary

    def network(self) -> nn.Module:
        """Build the network with the weights that all peers started from.

        Refuse one that does not fit the models.
        """
        build = self._model or self._configured_network
        with global_stream(self.config["seed"], "model"):
            module = build()
        layout = Layout.of(module)
        mask = self.states[self.roster[0]].model.mask
        if layout.size != mask.size:
            raise RunError(
                f"The models in {self.path} have {mask.size:,} weights; the network has"
                f" {layout.size:,}."
            )
        if any(not parameter.requires_grad for parameter in module.parameters()):
            self._check_first_weights(module)
        return module

    def _configured_network(self) -> nn.Module:
        if self.made_in_python:
            raise RunError(
                f"{self.path} was made in Python, so only you have its network: give the function"
                " that builds it, Run.load(..., model=...)."
            )
        model = self.settings.model
        spec = DATASETS.get(self.settings.data.name)
        if spec and self.site:  # it saves no format, and its files may be elsewhere
            return model.network(spec.shape, spec.classes, self.site)
        return model.network(self.inputs.shape, len(self.inputs.classes), self.site)

    def _check_first_weights(self, module: nn.Module) -> None:
        """Refuse frozen parameters, which are not in the checkpoints, that may not be the run's."""
        expected = self.config.get("initial_weights_sha256")
        trainable = [p.detach().reshape(-1) for p in module.parameters() if p.requires_grad]
        weights = torch.cat(trainable)
        dense = torch.ones_like(weights, dtype=torch.bool)
        if expected is not None and expected != weights_sha256(PackedModel.pack(weights, dense)):
            raise RunError(
                f"The network has frozen parameters, which {self.path} does not contain, and it"
                " does not start from the weights of the run: give a function that builds it with"
                " those, model=..."
            )

    def personal_state(self, peer: str) -> PeerState:
        """Return the state that a peer uses: its own, or with the global model; maybe fine-tuned.

        A consensus model (D-PSGD's) needs the models of all sites: a real site uses its own
        instead.
        """
        method = self.method
        state = self.states[peer]
        if peer in self._byzantine:
            return state
        if method.evaluates_global and self.site is None:
            state = evaluated_state(method, state, self._global_model, self._private_mask)
        if method.fine_tuning is None:
            return state
        if self.site or self.made_in_python:
            whose = "a site" if self.site else "a run made in Python"
            raise RunError(
                f"{method.name} fine-tunes on the peer's data, which Run.load does not have for"
                f" {whose}."
            )
        threads = int(self.config.get("workers", 1))
        return fine_tune(self._context, peer, state, saved_rounds(self.path) - 1, threads)[0]

    @cached_property
    def _global_model(self) -> PackedModel:
        if not self._byzantine:
            return self.method.global_model(self.states)
        honest_peers = [peer for peer in self.roster if peer not in self._byzantine]
        return self.method.global_model({peer: self.states[peer] for peer in honest_peers})

    @cached_property
    def _private_mask(self) -> WeightMask | None:
        if not self.method.private:
            return None
        return self.method.private_mask(Layout.of(self.network()))

    @cached_property
    def _byzantine(self) -> frozenset[str]:
        if self.site:
            return frozenset()
        return byzantine_of(self.config)

    @cached_property
    def _context(self) -> RunContext:
        self._check_code()
        return saved_context(self.path, compose(self.config, ["device=cpu"]))[1]


def run_inputs(path: Path, data: Data) -> InputFormat:
    """Return the format of the inputs that the models of a simulated run are trained with."""
    inputs = read_inputs(path)
    if inputs is not None:
        return inputs
    if isinstance(data, CustomData):
        raise _no_format(path / SPLIT)
    return _catalogue_inputs(data)


def site_inputs(run: Path, data: Data) -> InputFormat:
    """Return the format of the inputs that the model in a site's run directory is trained with."""
    if not isinstance(data, CustomData):
        return _catalogue_inputs(data)
    contract = DataContract.load(run)
    if contract is None:
        raise _no_format(run / CONTRACT)
    return contract.inputs


def _catalogue_inputs(data: Data) -> InputFormat:
    """Return the format of a data set; its files are read only if they name the classes."""
    if not data.describes_itself:
        return InputFormat.of(load_dataset(data))
    spec = describe(data.name)
    normalization = Normalization(spec.mean, spec.std)
    return InputFormat("images", spec.class_names, spec.shape, normalization=normalization)


def _no_format(file: Path) -> RunError:
    return RunError(
        f"{file} is missing, which has the classes and the scaling that the models are trained"
        " with. Restore it from a backup."
    )


def saved_context(path: Path, experiment: Experiment) -> tuple[LabelledDataset, RunContext]:
    """Return the data and the context of a saved run; refuse other data than it was run with."""
    data = load_dataset(experiment.data, task=experiment.task, inputs=read_inputs(path))
    return data, context_of(path, experiment, data)


def context_of(path: Path, experiment: Experiment, data: LabelledDataset) -> RunContext:
    """Return the context of a saved run, with the data divided by its split; refuse other data."""
    saved = read_split(path)
    if saved is None:
        raise RunError(
            f"{path} has no split.safetensors with each peer's samples, so the model cannot be"
            " fine-tuned."
        )
    check_data(path, *saved, data)
    context = experiment_context(experiment, data, saved[0])
    if read_data_digest(path) not in ("", context.data.digest()):
        raise other_data(path, data, "samples differ")
    return context


def check_data(path: Path, split: Split, counts: Tensor, data: LabelledDataset) -> None:
    """Refuse data that are not those of a run's split and its label counts."""
    if not split.fits(len(data.train_labels), len(data.test_labels)):
        raise other_data(path, data, "number of samples differs")
    if not split.label_counts(data.train_labels, len(data.classes)).equal(counts):
        raise other_data(path, data, "labels differ")


def other_data(path: Path, data: LabelledDataset, how: str) -> RunError:
    """Return the error for data that a run was not started with."""
    return RunError(f"The data set {data.name} is not the one that {path} was run with: its {how}.")


def fine_tune(
    context: RunContext, name: str, state: PeerState, t: int, threads: int
) -> tuple[PeerState, float | None]:
    """Fine-tune and evaluate as the run does: to the bit, or with `vmap_peers` up to rounding."""
    task = PeerTask(name, t, idle=True, fine_tuning=context.method.fine_tuning)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // len(context.data.peers)))
    try:
        # The caller may be evaluating, without gradients.
        with forked_generators(context.settings.device), torch.enable_grad():
            step = peer_step(context, context.network(), task, state, {})
    finally:
        torch.set_num_threads(threads_before)
    return step.next_state, step.report.score
