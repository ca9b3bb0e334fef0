"""The measurements of one peer in one round, and the list of all quantities that a run records."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from dispfl.core.quantities import (
    QUANTITY,
    ROUND_QUANTITIES,
    Quantity,
    ReportFigure,
    ResultColumn,
    Shape,
    per_peer,
)

SHARE_OF_KEPT = "share of kept weights"


class Passes(NamedTuple):
    """Training that was done: samples passed forward and backward, and what they trained."""

    samples: int
    kept: list[int]
    """The weights kept in each layer meanwhile."""
    trained: list[int] | None = None
    """Those of them that were trained; None: all of them."""


@dataclass
class Report:
    """Measurements of one peer in one round. `None` means not measured.

    To record another quantity of peers, declare it here with `per_peer`, and set it where it is
    measured: `trainer.report.NAME = value`.
    """

    scores: dict[str, float] = field(default_factory=dict)
    """The metrics on the peer's test data after the step, by name, the main one first."""
    test_loss: float | None = per_peer(
        "the loss on the same test data",
        higher_is_better=False,
        evaluation=True,
        summarized=True,
        column=ResultColumn("test loss", ("test loss", ""), 0),
    )
    train_score: float | None = per_peer(
        "the main metric on the peer's training data, without augmentation, after the round; with"
        " `eval_train` only",
        evaluation=True,
        summarized=True,
        column=ResultColumn("train {metric}", ("train", "{metric}"), 8),
    )
    validation: float | None = per_peer(
        "the main metric on the peer's validation data, if it has any (`partition.validation`)",
        evaluation=True,
        summarized=True,
        column=ResultColumn("validation", ("validation", "{metric}"), 8),
    )
    global_test: float | None = per_peer(
        "the main metric of the peer's model on the global test data, if there are any",
        evaluation=True,
        summarized=True,
    )
    mixed: float | None = per_peer(
        "the main metric after mixing and before training, where a method reports it (Dis-PFL)",
        evaluation=True,
    )
    backdoor: float | None = per_peer(
        "in a backdoor attack, the share of inputs with the trigger that it misclassifies",
        unit="share",
        higher_is_better=False,
        evaluation=True,
    )
    train_loss: float | None = per_peer(
        "the mean loss over the round's last call of `learn`; null for a peer that did not train",
        higher_is_better=False,
    )
    mask_change: float | None = per_peer(
        "the share of kept weights that the mask search replaces",
        unit="share",
        figure=ReportFigure("masks", "Weights pruned and regrown per round", SHARE_OF_KEPT),
    )
    overlap: float | None = per_peer(
        "the share of a peer's kept weights that a neighbour holds too, mean over received models",
        unit="share",
        figure=ReportFigure("masks", "Kept weights that the neighbours keep too", SHARE_OF_KEPT),
    )
    affinity: float | None = per_peer(
        "with [affinities](../affinity.md), how much a received model counts, mean over received"
        " models; the peer's own counts 1",
        unit="share",
        figure=ReportFigure("masks", "How much received models count", "share of our own"),
    )
    epsilon: float | None = per_peer(
        "with [privacy](../privacy.md), what the peer has spent so far",
        higher_is_better=False,
    )
    steps: int | None = per_peer(
        'with [`schedule = "async"`](../time.md#gossip-that-does-not-wait), how many steps the peer'
        " has finished in the round",
    )
    staleness: float | None = per_peer(
        "with the same, how many steps the peer has begun since a received model was finished, mean"
        " over the models that it averaged",
        unit="steps",
    )
    withstands: int | None = per_peer(
        "with a [robust rule](../robust.md): how many Byzantine models the average withstands; 0"
        " where too few are requested for any protection",
    )
    discarded: int | None = per_peer(
        "with a robust rule: the received models that are not averaged because too few arrived for"
        " the rule; the peer keeps its own weights",
        higher_is_better=False,
    )
    logged: dict[str, float] = field(default_factory=dict)
    """What the method logged (`Trainer.log`), by name."""
    distances: dict[str, float | None] | None = None
    """With a robust rule: the root mean square difference of each received model to the peer's own,
    on the weights that both hold; None without any.
    """
    similarities: dict[str, float] | None = None
    """With [affinities](../affinity.md): how similar each sender is to the peer, at most 1; a
    sender that cannot be compared is left out.
    """
    affinities: dict[str, float] | None = None
    """How much each received model counts in the average, between 0 and 1; our own counts 1."""
    far: list[str] | None = None
    """The senders among them that are farther than the rule's threshold: their differences are
    clipped, or they do not decide weights that few hold.
    """
    received: list[str] | None = None
    """The nodes whose models the step used, by name; None if the peer took no part in the
    exchange."""
    missed: list[str] = field(default_factory=list)
    """The nodes whose models it requested in vain, or refused."""
    failure: str | None = None
    """Why the peer's step was abandoned, as a sentence."""
    exhausted: bool = False
    """With privacy: the budget did not last for this round, so that the peer did not train."""
    seconds: float = field(default=0.0, compare=False)
    """The time that mixing, training and the mask search took, as `step_clock` measures it;
    evaluation is left out."""
    passes: list[Passes] = field(default_factory=list)
    """The training done."""
    computed: list[int] = field(default_factory=list)
    """The weights of each layer of the network that trains: with masks of single weights, those
    that are left out are multiplied too. Empty: the kept ones."""
    scored: list[Passes] = field(default_factory=list)
    """The samples passed forward only, by a method that compares models."""
    evaluations: list[Passes] = field(default_factory=list)
    """The samples passed forward only, to evaluate the round."""

    def __post_init__(self) -> None:
        # JSON gives lists for tuples.
        self.passes = [Passes(*entry) for entry in self.passes]
        self.scored = [Passes(*entry) for entry in self.scored]
        self.evaluations = [Passes(*entry) for entry in self.evaluations]

    @property
    def score(self) -> float | None:
        """The main metric."""
        return next(iter(self.scores.values()), None)

    @property
    def peer_seconds(self) -> float | None:
        """The seconds of the step, if the peer trained."""
        return round(self.seconds, 4) if self.passes else None

    def without_evaluation(self) -> "Report":
        """Return the report of the same step in a round without evaluation."""
        unmeasured: dict[str, Any] = {quantity.name: None for quantity in EVALUATIONS}
        return replace(self, scores={}, evaluations=[], **unmeasured)

    def with_evaluation(self, evaluation: "Report") -> "Report":
        """Return the report of the same step with what the evaluation of another model measured."""
        measured: dict[str, Any] = {}
        for quantity in EVALUATIONS:
            value = getattr(evaluation, quantity.name)
            if value is not None:
                measured[quantity.name] = value
        failure = self.failure or evaluation.failure
        return replace(self, scores=evaluation.scores, failure=failure, **measured)


def _declared_in_report() -> tuple[Quantity, ...]:
    declared = []
    for report_field in fields(Report):
        quantity = report_field.metadata.get(QUANTITY)
        if quantity:
            declared.append(replace(quantity, name=report_field.name))
    return tuple(declared)


SCORES = Quantity(
    "scores",
    Shape.METRICS,
    "on the peers' own test data, by metric, with its `higher_is_better` and `format`; empty"
    " without evaluation (`eval_every`)",
    evaluation=True,
    summarized=True,
)
PEER_QUANTITIES = (
    *_declared_in_report(),
    Quantity(
        "peer_seconds",
        Shape.PEERS,
        "the seconds that the peer's step computes; null for a peer that did not train",
        unit="s",
        higher_is_better=False,
    ),
)
"""The attributes of a report that are recorded as spreads over peers."""
LOGGED = Quantity(
    "logged",
    Shape.LOGGED,
    "what the method logs with `trainer.log`, by name; only peers and rounds that log it have it",
    summarized=True,
)
EVALUATIONS = tuple(quantity for quantity in PEER_QUANTITIES if quantity.evaluation)
QUANTITIES = (SCORES, *PEER_QUANTITIES, LOGGED, *ROUND_QUANTITIES)
"""All quantities of a line of `metrics.jsonl`."""
TAKEN_NAMES = {quantity.name for quantity in QUANTITIES} | {"round", "peer", "class", "metric"}
"""Names that methods cannot log, besides those of the task's metrics."""
