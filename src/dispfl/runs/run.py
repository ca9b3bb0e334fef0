"""A run and its results: models, masks and metrics, in memory or from a run directory."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dispfl.core.device_classes import class_of_each
from dispfl.core.flat_module import loaded_network
from dispfl.core.inputs import forward
from dispfl.core.layout import Layout
from dispfl.core.metric import MetricLike
from dispfl.core.task import Task
from dispfl.core.train import EVALUATION_BATCH
from dispfl.data.batches import DatasetLike, samples_from
from dispfl.data.split import Split
from dispfl.errors import ConfigError
from dispfl.extras import require
from dispfl.methods.base import Method, PeerState
from dispfl.round.context import LazyStates
from dispfl.runs.directory import read_metrics, read_split
from dispfl.runs.metrics import (
    Metrics,
    last,
    last_scores,
    measure_of,
    numbers,
    spreads,
)
from dispfl.runs.saved import ModelFunction, SavedRun

if TYPE_CHECKING:
    from pandas import DataFrame


class RoundRecords(list[Metrics]):
    """The metrics of a run's rounds, one dict for each, as in `metrics.jsonl`."""

    def __init__(
        self,
        records: Iterable[Metrics],
        roster: Iterable[str],
        class_of: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(records)
        self.roster = list(roster)
        """The peers' names, in the order of every `per_peer` list."""
        self.class_of = dict(class_of or {})
        """The name of each peer's class, if the run has classes."""

    def frame(self, *, per_peer: bool = False) -> "DataFrame":
        """Return a pandas DataFrame with a row for each round, or for each round and peer.

        A mean over the peers has the column `accuracy` and its standard deviation `accuracy_std`;
        the number `paper_mb` of the busiest node is `busiest.paper_mb`; `failures` counts them. The
        rows of peers have their names, and their classes if there are any.
        """
        require("pandas", "frame()")
        from pandas import DataFrame

        rows = []
        for record in self:
            if per_peer:
                rows += _rows_of_peers(record, self.roster, self.class_of)
            else:
                rows.append(_row(record))
        return DataFrame(rows)


def _row(record: Metrics) -> Metrics:
    """Return the single numbers of a round."""
    row: Metrics = {"round": record["round"], **numbers(record)}
    for name, values in spreads(record).items():
        row[f"{name}_std"] = values["std"]
    return row


def _rows_of_peers(
    record: Metrics, roster: Sequence[str], class_of: Mapping[str, str]
) -> list[Metrics]:
    """Return what was measured of each peer in a round."""
    rows: list[Metrics] = []
    for peer in roster:
        row = {"round": record["round"], "peer": peer}
        if peer in class_of:
            row["class"] = class_of[peer]
        rows.append(row)
    for name, values in spreads(record).items():
        for row, value in zip(rows, values["per_peer"], strict=True):
            row[name] = value
    return rows


@dataclass(frozen=True, repr=False, eq=False)
class Run:
    """A run: `Federation.run` and `Experiment.run` return it, `Run.load` reads it from disk."""

    config: Mapping[str, Any]
    """The settings, as in `config.toml`."""
    metrics: RoundRecords
    """The metrics of each round, as in `metrics.jsonl`; `metrics.frame()` is a pandas DataFrame."""
    states: Mapping[str, PeerState]
    """Every peer's final state, by name."""
    personal: Mapping[str, PeerState]
    """The state that each peer uses from now on: its own, or one with the global model."""
    network: ModelFunction
    """Builds the network with the weights that all peers started from."""
    split: Split | None = None
    """Which samples each peer has; None where the caller divided the data."""
    out: Path | None = None
    """The run directory, if there is one."""
    _task: Callable[[], Task] = Task
    _summary: Callable[[], Metrics] = dict

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        model: ModelFunction | None = None,
        method: Method | None = None,
        metric: MetricLike | Sequence[MetricLike] | None = None,
        trust: bool = False,
    ) -> "Run":
        """Load a run, finished or not, from its directory or from a site's folder.

        Everything about a run of the command line is in its directory. Of a run made in Python,
        give what was your own: the function that builds the `model`, and your `method` and `metric`
        if you wrote them.

        Code that the config names (`module:name`) is imported only if you made the directory on
        this machine, or if you `trust` its origin, and only when it is needed: for a model, a
        fine-tuned state, or an own metric.
        """
        saved = SavedRun(Path(path), model, method, metric, trust=trust)
        split = read_split(saved.path)
        return cls(
            config=saved.config,
            metrics=RoundRecords(
                read_metrics(saved.path), saved.roster, class_of_each(saved.config)
            ),
            states=saved.states,
            personal=LazyStates(saved.roster, saved.personal_state),
            network=saved.network,
            split=split and split[0],
            out=saved.path,
            _task=saved.task,
            _summary=saved.summary,
        )

    @property
    def summary(self) -> Metrics:
        """The run as one object, as in `summary.json`."""
        return self._summary()

    @property
    def history(self) -> dict[str, list[float | None]]:
        """Every recorded quantity by round, as its mean over the peers: `history["accuracy"]`.

        It has the columns of `metrics.frame()`. A round without evaluation has None.
        """
        rows = [_row(record) for record in self.metrics]
        columns = dict.fromkeys(chain.from_iterable(rows))
        return {column: [row.get(column) for row in rows] for column in columns}

    @property
    def scores(self) -> dict[str, list[float]]:
        """Each metric on every peer's test data at the last evaluation; the main one first.

        The peers are in roster order.
        """
        scores = last(self.metrics, "scores") or {}
        return {name: list(spread["per_peer"]) for name, spread in scores.items()}

    @property
    def accuracy(self) -> list[float]:
        """Every peer's accuracy on its own test data at the last evaluation, in roster order."""
        if self.scores and "accuracy" not in self.scores:
            raise ConfigError(
                f"This run has no accuracy; it has {', '.join(self.scores)}: use run.scores."
            )
        return self.scores.get("accuracy", [])

    def model(self, peer: int | str) -> nn.Module:
        """Return the personal model of one peer, given by position in the roster or by name.

        With masks of channels it is the small network. `states[name].model.unpack()` returns the
        flat weights of the whole network instead, with zeros for the channels that were left out.
        """
        state = self.personal[self._name(peer)]
        return loaded_network(self.network(), state.model, state.buffers)

    def masks(self, peer: int | str) -> dict[str, Tensor]:
        """Return which weights a peer's personal model keeps, as a bool tensor per parameter."""
        mask = self.personal[self._name(peer)].model.mask
        layout = Layout.of(self.network())
        masks = {}
        for name, view in zip(layout.names, layout.views(mask.unpack()), strict=True):
            masks[name] = view.clone()
        return masks

    @torch.no_grad()
    def evaluate(self, peer: int | str, data: DatasetLike) -> float:
        """Return the main metric of a peer's personal model on other data.

        The data are a Dataset or a pair (inputs, labels).
        """
        model = self.model(peer)
        samples = samples_from(data, "The data")
        outputs = []
        labels = []
        for batch_inputs, batch_labels in samples.batches(EVALUATION_BATCH):
            outputs.append(forward(model, batch_inputs))
            labels.append(batch_labels)
        return self._task().metric(torch.cat(outputs), torch.cat(labels))

    def _name(self, peer: int | str) -> str:
        roster = self.metrics.roster
        name = str(peer)
        if isinstance(peer, int) and -len(roster) <= peer < len(roster):
            name = roster[peer]
        if name not in roster:
            raise ConfigError(
                f"There is no peer {peer}; there are {len(roster)}, from {roster[0]} to"
                f" {roster[-1]}."
            )
        return name

    def __repr__(self) -> str:
        rounds = len(self.metrics)
        planned = self.config.get("rounds")
        peers = len(self.metrics.roster)
        parts = [
            str(self.config.get("method", {}).get("name", "")),
            f"{peers} peer{'s' * (peers != 1)}",
        ]
        if planned in (rounds, None):
            parts.append(f"{rounds} round{'s' * (rounds != 1)}")
        else:
            parts.append(f"{rounds} of {planned} rounds")
        spread = last_scores(self.metrics)
        if spread:
            measure = measure_of(self.metrics)
            mean = measure.text(spread["mean"])
            std = measure.text(spread["std"])
            parts.append(f"{measure.name} {mean} ± {std} over peers")
        if self.out:
            parts.append(f"in {self.out}")
        return f"Run({', '.join(parts)})"

    def _repr_html_(self) -> str:
        """Return the run for a notebook: what it is, and its learning curve."""
        from dispfl.report.html import run_markup

        return run_markup(repr(self), self.metrics)
