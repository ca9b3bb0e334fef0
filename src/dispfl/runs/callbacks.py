"""Functions that a run calls after each round (`callbacks`), and how they stop it."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from dispfl.core.metric import Measure
from dispfl.core.packed import PackedModel
from dispfl.errors import ConfigError, user_errors
from dispfl.methods.base import PeerState, evaluated_state
from dispfl.round.context import Engine, LazyStates, RunContext
from dispfl.round.round import global_model
from dispfl.runs.loop import RunHistory
from dispfl.runs.metrics import Metrics, measure_of
from dispfl.runs.run import RoundRecords, Run


class StopRun(Exception):  # noqa: N818 (not an error, like StopIteration)
    """Raised by a callback to stop the run after this round; the message says why.

    The run counts as finished.
    """


Callback = Callable[[Run], object]
"""Called after each round with the run so far: a view, whose models and states are copies."""


def check_callbacks(callbacks: Sequence[Callback], has_validation: bool) -> None:
    """Refuse anything but a list of functions, and early stopping without validation data.

    The test data are never used in place of validation data.
    """
    if not isinstance(callbacks, (list, tuple)) or not all(map(callable, callbacks)):
        raise ConfigError(
            f"callbacks must be a list of functions of the run, got {callbacks!r}.", key="callbacks"
        )
    for callback in callbacks:
        if isinstance(callback, EarlyStopping) and callback.metric is None and not has_validation:
            raise ConfigError(
                "EarlyStopping watches validation data, and these peers have none: give them as"
                " (training data, validation data, test data), or partition.validation. Or name a"
                ' metric that it may watch instead, such as EarlyStopping(metric="train_loss").'
            )


class UserCallbacks:
    """Calls functions after each round, with a view of the run."""

    def __init__(
        self,
        functions: Sequence[Callback],
        context: RunContext,
        engine: Engine,
        config: Mapping[str, Any],
    ) -> None:
        self._functions = functions
        self._context = context
        self._engine = engine
        self._records = RoundRecords([], context.roster, context.class_of)
        self._config = copy.deepcopy(dict(config))

    def __call__(self, history: RunHistory) -> str | None:
        """Call all functions; return why the run is to be stopped, or None."""
        if not self._functions:
            return None
        self._records += map(copy.deepcopy, history.records[len(self._records) :])
        states = self._engine.states
        view = Run(
            config=self._config,
            metrics=self._records,
            states=LazyStates(states, lambda peer: copy.deepcopy(states[peer])),
            personal=_personal_copies(self._context, states, history.server),
            network=self._context.module,
            _task=lambda: self._context.task,
        )
        reasons = []
        with user_errors(f"Round {history.records[-1]['round']}, callbacks"):
            for function in self._functions:
                try:
                    function(view)
                except StopRun as stop:
                    reasons.append(str(stop))
        if not reasons:
            return None
        return "; ".join(reasons)


def _personal_copies(
    context: RunContext, states: Mapping[str, PeerState], server: PeerState | None
) -> LazyStates:
    """Return copies of the states that peers are evaluated with, without fine-tuning."""

    @cache
    def shared_model() -> PackedModel:
        return global_model(context, states, server)

    def personal(peer: str) -> PeerState:
        state = copy.deepcopy(states[peer])
        if not context.method.evaluates_global or peer in context.byzantine:
            return state
        evaluated = evaluated_state(context.method, state, shared_model(), context.private_mask)
        return copy.deepcopy(evaluated)

    return LazyStates(states, personal)


@dataclass(frozen=True)
class EarlyStopping:
    """Stops a run whose peers no longer improve: `callbacks=[EarlyStopping(patience=5)]`.

    It depends on the metrics of the rounds alone, so a resumed run stops where the whole run does.
    """

    patience: int = 10
    """Evaluations without an improvement after which the run is stopped."""
    metric: str | None = None
    """What to watch: by default the main metric on validation data, or a metric on test data, or
    "train_loss"."""
    min_delta: float = 0.0
    """How much better the mean over peers must be to count as an improvement."""

    def __call__(self, run: Run) -> None:
        """Stop the run if it has not improved for too long."""
        measure, means = self._watched(run.metrics)
        best: float | None = None
        since = 0
        for mean in means:
            if best is None or measure.gain(mean, best) > self.min_delta:
                best = mean
                since = 0
            else:
                since += 1
        if since >= self.patience:
            raise StopRun(
                f"{measure.name} has not improved on {measure.text(best)} in {since} evaluations"
            )

    def _watched(self, records: Sequence[Metrics]) -> tuple[Measure, list[float]]:
        """Return what is watched, and its mean over peers in each evaluation."""
        key = self.metric or "validation"
        scores = [record["scores"][key] for record in records if key in record["scores"]]
        if scores:
            measure = Measure(key, scores[0]["higher_is_better"], scores[0]["format"])
            return measure, [score["mean"] for score in scores]

        spreads = [record[key] for record in records if record.get(key) is not None]
        if key not in records[-1] or not all(map(_is_spread, spreads)):
            names = ", ".join([*records[-1]["scores"], "validation", "train_loss", "test_loss"])
            raise ConfigError(
                f"EarlyStopping(metric={key!r}): there is no such metric; there are {names}."
            )
        main = measure_of(records)
        higher_is_better = not key.endswith("loss")
        if key in ("validation", "global_test", "mixed"):  # the main metric on other data
            higher_is_better = main.higher_is_better
        return Measure(key, higher_is_better, main.format), [spread["mean"] for spread in spreads]


def _is_spread(value: object) -> bool:
    """Whether a value of a record is a metric of all peers, unlike `busiest` or `seconds`."""
    return isinstance(value, dict) and "mean" in value
