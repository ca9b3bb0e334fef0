"""Functions that a run calls after each round (`on_round`), and how they stop it."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from dispfl.core.metric import Measure
from dispfl.core.packed import PackedModel
from dispfl.errors import ConfigError, user_errors
from dispfl.methods.base import PeerState
from dispfl.round.context import Engine, RunContext
from dispfl.round.round import global_model
from dispfl.runs.loop import RunHistory
from dispfl.runs.metrics import Metrics, measure_of
from dispfl.runs.run import RoundRecords, Run


class StopRun(Exception):  # noqa: N818 (not an error, like StopIteration)
    """Raised by a callback to stop the run after this round; the message says why. The run counts as finished."""


OnRound = Callable[[Run], object]
"""Called after each round with the run so far: a view, whose models and states are copies."""


def as_callbacks(given: OnRound | Sequence[OnRound] | None) -> tuple[OnRound, ...]:
    """Return callbacks that are given as one or several."""
    several = () if given is None else tuple(given) if isinstance(given, (list, tuple)) else (given,)
    for callback in several:
        if not callable(callback):
            raise ConfigError(f"`on_round` must be a function of the run, or a list of them, got {callback!r}.")
    return several


def check_callbacks(functions: Sequence[OnRound], has_validation: bool) -> None:
    """Refuse to stop early on validation data that are not there: the test data are never used in their place."""
    for function in functions:
        if isinstance(function, EarlyStopping) and function.metric is None and not has_validation:
            raise ConfigError(
                "EarlyStopping watches validation data, and these peers have none: give them as (training data, "
                "validation data, test data), or partition.validation. Or name a metric that it may watch "
                'instead, such as EarlyStopping(metric="train_loss").'
            )


class UserCallbacks:
    """Calls functions after each round, with a view of the run."""

    def __init__(
        self, functions: Sequence[OnRound], context: RunContext, engine: Engine, config: Mapping[str, Any]
    ) -> None:
        self._functions, self._context, self._engine = functions, context, engine
        self._records = RoundRecords([], context.roster)
        self._config = copy.deepcopy(dict(config))

    def __call__(self, history: RunHistory) -> str | None:
        """Call all functions; return why the run is to be stopped, or None."""
        if not self._functions:
            return None
        self._records += map(copy.deepcopy, history.records[len(self._records) :])
        view = Run(
            config=self._config,
            metrics=self._records,
            states=_Copies(self._engine.states),
            personal=_PersonalCopies(self._context, self._engine.states, history.server),
            network=self._context.module,
            _task=lambda: self._context.task,
        )
        reasons = []
        with user_errors(f"Round {history.records[-1]['round']}, on_round"):
            for function in self._functions:
                try:
                    function(view)
                except StopRun as stop:
                    reasons.append(str(stop))
        return "; ".join(reasons) if reasons else None


class _Copies(Mapping[str, PeerState]):
    """Copies of the peers' states, made on access."""

    def __init__(self, states: Mapping[str, PeerState]) -> None:
        self._states = states

    def __getitem__(self, peer: str) -> PeerState:
        return copy.deepcopy(self._states[peer])

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


class _PersonalCopies(_Copies):
    """Copies of the states that peers are evaluated with; a global model is not fine-tuned for it."""

    def __init__(self, context: RunContext, states: Mapping[str, PeerState], server: PeerState | None) -> None:
        super().__init__(states)
        self._context, self._server = context, server

    def __getitem__(self, peer: str) -> PeerState:
        state = super().__getitem__(peer)
        if not self._context.method.evaluates_global or peer in self._context.liars:
            return state
        model = copy.deepcopy(self._context.method.evaluated_model(state, self._global_model))
        return replace(state, model=model, next_mask=model.mask)

    @cached_property
    def _global_model(self) -> PackedModel:
        return global_model(self._context, self._states, self._server)


@dataclass(frozen=True)
class EarlyStopping:
    """Stops a run whose peers no longer improve: `on_round=EarlyStopping(patience=5)`.

    It depends on the metrics of the rounds alone, so a resumed run stops where the whole run does.
    """

    patience: int = 10
    """Evaluations without an improvement after which the run is stopped."""
    metric: str | None = None
    """What to watch: by default the main metric on validation data, or a metric on test data, or "train_loss"."""
    min_delta: float = 0.0
    """How much better the mean over peers must be to count as an improvement."""

    def __call__(self, run: Run) -> None:
        """Stop the run if it has not improved for too long."""
        measure, means = self._watched(run.metrics)
        best: float | None = None
        since = 0
        for mean in means:
            improved = best is None or measure.gain(mean, best) > self.min_delta
            best, since = (mean, 0) if improved else (best, since + 1)
        if since >= self.patience:
            raise StopRun(f"{measure.name} has not improved on {measure.text(best)} in {since} evaluations")

    def _watched(self, records: Sequence[Metrics]) -> tuple[Measure, list[float]]:
        """Return what is watched, and its mean over peers in each evaluation."""
        key, main = self.metric or "validation", measure_of(records)
        if any(key in record["scores"] for record in records):
            found = [record["scores"][key] for record in records if key in record["scores"]]
            return Measure(key, found[0]["higher_is_better"], found[0]["format"]), [scores["mean"] for scores in found]
        if key not in records[-1] or not isinstance(records[-1][key], dict | None) or key == "scores":
            known = ", ".join([*records[-1]["scores"], "validation", "train_loss", "test_loss"])
            raise ConfigError(f"EarlyStopping(metric={key!r}): there is no such metric; there are {known}.")
        better = main.higher_is_better if key in ("validation", "global_test", "mixed") else not key.endswith("loss")
        return Measure(key, better, main.format), [record[key]["mean"] for record in records if record[key]]
