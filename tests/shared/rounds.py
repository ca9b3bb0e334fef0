"""Rounds seen from everywhere: a round's outcomes beside all peers' states, for tests that start from given states."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from dispfl.engines.inprocess import InProcess
from dispfl.engines.states import States
from dispfl.methods.base import SERVER, PeerState
from dispfl.round import OnOutcome, Round, play_round, start
from dispfl.work import Outcome, Part, Setting, Step


@dataclass(frozen=True)
class Played(Round):
    """A round, and what everyone has become."""

    steps: Mapping[str, Step] = field(default_factory=dict)
    judged: Mapping[str, PeerState] | None = None

    @property
    def states(self) -> dict[str, PeerState]:
        """Everyone's next state."""
        states = {peer: step.state for peer, step in self.steps.items()}
        return states if self.server is None else {**states, SERVER: self.server}


class OneByOne(InProcess):
    """The in-process engine with states that a test gives it."""

    def given(self, states: Mapping[str, PeerState]) -> "OneByOne":
        """These are everyone's states."""
        self._states = States(self.setting, self._states.checkpoints)
        self._states.now = {
            peer: replace(state, sent=None) if state.sent else state for peer, state in states.items() if peer != SERVER
        }
        return self

    def take_up(self, steps: Mapping[str, Step]) -> dict[str, Outcome]:
        """These steps are done already."""
        self._states.next |= {peer: step.state for peer, step in steps.items()}
        return {peer: Outcome.of(step) for peer, step in steps.items()}


class Backwards(OneByOne):
    """Takes the steps in the wrong order."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, 1)
        self.worked: list[str] = []

    def steps(self, parts: Iterable[Part]):  # type: ignore[no-untyped-def]
        parts = list(parts)[::-1]
        self.worked += [part.peer for part in parts]
        yield from super().steps(parts)


def play_from(
    setting: Setting,
    states: Mapping[str, PeerState],
    t: int,
    engine: OneByOne,
    finished: Mapping[str, Step] | None = None,
    on_outcome: OnOutcome = lambda peer, outcome: None,
) -> Played:
    """Round t from these states on."""
    engine.given(states)
    done = engine.take_up(finished or {})
    result = play_round(setting, states.get(SERVER), t, engine, done, on_outcome)
    outcomes = result.outcomes
    steps = {peer: Step(engine.states[peer], outcomes[peer].report, outcomes[peer].carried) for peer in outcomes}
    return Played(outcomes, result.server, steps, dict(engine.judged) or None)


def play_all(setting: Setting, threads: int = 1) -> list[Played]:
    """All rounds of a run, one after another."""
    done: list[Played] = []
    states = start(setting)
    engine = OneByOne(setting, threads)
    try:
        for t in range(setting.rounds):
            done.append(play_from(setting, states, t, engine))
            states = done[-1].states
    finally:
        engine.close()
    return done
