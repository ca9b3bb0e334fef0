"""The measurements of one peer in one round."""

from dataclasses import dataclass, field, replace


@dataclass
class Report:
    """Measurements of one peer in one round. `None` means not measured."""

    scores: dict[str, float] = field(default_factory=dict)
    """The metrics on the peer's test data after the step, by name, the main one first."""
    test_loss: float | None = None
    """The loss on the same data."""
    train_score: float | None = None
    """The main metric on the peer's training data after the step, if these are evaluated too."""
    validation: float | None = None
    """The main metric on the peer's validation data, if it has any."""
    global_score: float | None = None
    """The main metric on the global test data, if there are any."""
    mixed: float | None = None
    """The main metric on the test data after mixing and before training."""
    loss: float | None = None
    """Mean training loss over the steps of the round's last call of `learn`."""
    mask_change: float | None = None
    """The share of kept weights that the evolved mask replaces."""
    overlap: float | None = None
    """The share of the peer's kept weights that a neighbour holds too, on average over the received
    models."""
    backdoor: float | None = None
    """In a simulated backdoor attack: the share of inputs with the trigger that are taken for the
    target class."""
    distances: dict[str, float | None] | None = None
    """With a robust rule: the root mean square difference of each received model to the peer's own,
    on the weights that both hold; None without any.
    """
    far: list[str] | None = None
    """The senders among them that are farther than the rule's threshold: their differences are
    clipped, or they do not decide weights that few hold.
    """
    failure: str | None = None
    """Why the peer's step was abandoned, as a sentence."""
    epsilon: float | None = None
    """With privacy: what the peer has spent of its budget, this round included."""
    exhausted: bool = False
    """With privacy: the budget did not last for this round, so that the peer did not train."""
    seconds: float = field(default=0.0, compare=False)
    """The time that mixing, training and the mask search took, as `step_clock` measures it;
    evaluation is left out."""
    passes: list[tuple[int, list[int]]] = field(default_factory=list)
    """The training done: samples passed forward and backward, and the weights kept in each layer
    meanwhile."""

    def __post_init__(self) -> None:
        self.passes = [
            (samples, list(kept)) for samples, kept in self.passes
        ]  # JSON gives lists for tuples

    @property
    def score(self) -> float | None:
        """The main metric."""
        return next(iter(self.scores.values()), None)

    def without_evaluation(self) -> "Report":
        """Return the report of the same step in a round without evaluation."""
        return replace(
            self,
            scores={},
            test_loss=None,
            train_score=None,
            validation=None,
            global_score=None,
            mixed=None,
            backdoor=None,
        )
