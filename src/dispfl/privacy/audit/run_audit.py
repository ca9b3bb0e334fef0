"""The audit of a run: trains what its attacks need, attacks, and collects the results."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dispfl.config import MADE_IN_PYTHON, compose
from dispfl.core.packed import Mask
from dispfl.core.rng import stream, stream_seed
from dispfl.core.samples import Samples
from dispfl.data.batches import ResidentSamples
from dispfl.data.datasets import load_dataset
from dispfl.data.labelled import LabelledDataset
from dispfl.errors import ConfigError, RunError
from dispfl.experiment import Experiment
from dispfl.extras import require
from dispfl.files import RUN, SITES, is_site, plain_disk_errors, write_atomically
from dispfl.privacy.audit.canaries import CONFIDENCE, Guesses, best_guesses, residuals
from dispfl.privacy.audit.label_inference import (
    LabelGuess,
    guess_labels,
    kept_by_class,
    mask_products,
    unit_products,
)
from dispfl.privacy.audit.membership_inference import (
    MembershipResult,
    Scores,
    confidences,
    likelihood_ratios,
    summarize_scores,
)
from dispfl.privacy.audit.shadow_runs import (
    FOLDER,
    AuditRun,
    Candidates,
    TrainedFederation,
    find_candidates,
    trained_again,
)
from dispfl.round.context import RunContext
from dispfl.runs.directory import (
    has_all_rounds,
    read_inputs,
    read_metrics,
    read_split,
    trusted_config,
)
from dispfl.runs.metrics import last
from dispfl.runs.saved import SavedRun, context_of

RESULT = "audit.json"
CANARY_SHARE = 0.25
"""The share of a peer's samples that canaries replace, unless stated."""
FEWEST_PEERS = 4
"""Peers that label histograms are guessed of at least."""


@dataclass(frozen=True)
class AuditResult:
    """The result of an audit."""

    method: str
    peers: int
    rounds: int
    shadows: int
    pairs: int
    """Members of all peers that were attacked, and as many non-members."""
    membership: Sequence[MembershipResult]
    canaries: Guesses | None
    """None without canaries."""
    confidence: float
    accounted_epsilon: float | None
    """What the peer that spent most has spent; None for a run that is not private."""
    delta: float
    labels: Sequence[LabelGuess]
    """Empty where all masks are the same."""

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON can hold it."""
        return asdict(self)


class Audit:
    """The audit of a finished run of the command line."""

    def __init__(
        self,
        path: Path,
        shadows: int = 8,
        canaries: int | None = None,
        overrides: Sequence[str] = (),
        *,
        trust: bool = False,
    ) -> None:
        if shadows < 0 or shadows % 2:
            raise ConfigError(
                f"--shadows must be an even number, because shadows come in twos, got {shadows}.",
                key="--shadows",
            )
        self.path = path
        self.shadows = shadows
        self.experiment = audited_experiment(path, overrides, trust=trust)
        self._canaries = canaries

    @cached_property
    def data(self) -> LabelledDataset:
        """The run's data set."""
        return load_dataset(self.experiment.data, inputs=read_inputs(self.path))

    @cached_property
    def context(self) -> RunContext:
        """The context of the run's rounds."""
        return context_of(self.path, self.experiment, self.data)

    @cached_property
    def candidates(self) -> Mapping[str, Candidates]:
        """The pairs of members and non-members of each peer that has any."""
        saved = read_split(self.path)
        assert saved is not None  # or there were no context
        split, _ = saved
        candidates = {}
        all_candidates = find_candidates(self.experiment, self.data, split)
        for peer, pairs in zip(self.context.roster, all_candidates, strict=True):
            if len(pairs):
                candidates[peer] = pairs
        if not candidates:
            raise RunError(
                f"{self.path} leaves no samples to compare with: its peers train on all of"
                f" {self.experiment.data.name}, and no test sample of theirs has the class of one"
                " of these. Audit a run with a smaller partition.samples_per_peer."
            )
        return candidates

    # what is trained

    @cached_property
    def runs(self) -> list[AuditRun]:
        """The federations to train; those that are finished are not trained again."""
        runs = []
        for number, name in enumerate(self._shadow_names()):
            runs.append(self._run(name, partial(self._shadow_data, number)))
        if self.canary_counts:
            # Another number of canaries makes another federation.
            name = f"canaries-{sum(self.canary_counts.values())}"
            runs.append(self._run(name, self._canary_data))
        for run in runs:
            run.check()
        return runs

    def make_folder(self) -> None:
        """Make the folder of these federations, for this user only.

        Each is trained on the same samples again.
        """
        with plain_disk_errors(self.path):
            (self.path / FOLDER).mkdir(mode=0o700, exist_ok=True)

    def _run(self, name: str, data: Callable[[], Mapping[str, Samples]]) -> AuditRun:
        return trained_again(name, self.path, self.experiment, self.context, data)

    def _shadow_names(self) -> list[str]:
        return [f"shadow-{number}" for number in range(self.shadows)]

    def coins(self, number: int, peer: str) -> Tensor:
        """Return for each pair whether a shadow federation is trained on the member.

        Shadows come in twos: the second has the coins of the first, turned.
        """
        rng = stream(self.experiment.seed, "audit", "shadow", number // 2, peer)
        drawn = torch.rand(len(self.candidates[peer]), generator=rng) < 0.5
        return drawn if number % 2 == 0 else ~drawn

    def _shadow_data(self, number: int) -> dict[str, Samples]:
        samples: dict[str, Samples] = {}
        for peer, pairs in self.candidates.items():
            samples[peer] = pairs.chosen(self.coins(number, peer))
        return samples

    @cached_property
    def canary_counts(self) -> dict[str, int]:
        """The number of canaries of each peer that has any."""
        counts = {}
        for peer, pairs in self.candidates.items():
            count = self._canaries
            if count is None:
                count = int(CANARY_SHARE * len(self.context.data.peers[peer].train))
            count = min(count, len(pairs))
            if count:
                counts[peer] = count
        return counts

    def _canaries_of(self, peer: str) -> tuple[ResidentSamples, Tensor]:
        """Return a peer's canaries, and which of them its federation is trained on."""
        count = self.canary_counts[peer]
        rng = stream(self.experiment.seed, "audit", "canary", peer)
        samples = self.candidates[peer].canaries(count, len(self.data.classes), rng)
        coins = torch.rand(count, generator=rng) < 0.5
        return samples, coins

    def _canary_data(self) -> dict[str, Samples]:
        samples: dict[str, Samples] = {}
        for peer in self.canary_counts:
            canaries, coins = self._canaries_of(peer)
            samples[peer] = self.candidates[peer].with_canaries(canaries, coins)
        return samples

    # what the attacks find

    def result(self) -> AuditResult:
        """Attack; everything must have been trained."""
        spent = last(read_metrics(self.path), "epsilon")
        return AuditResult(
            method=self.experiment.method.name,
            peers=self.experiment.peers,
            rounds=self.experiment.rounds,
            shadows=self.shadows,
            pairs=sum(map(len, self.candidates.values())),
            membership=self._membership(),
            canaries=self._guess_canaries() if self.canary_counts else None,
            confidence=CONFIDENCE,
            accounted_epsilon=max(spent["per_peer"]) if spent else None,
            delta=self.experiment.privacy.delta,
            labels=self._guess_labels(),
        )

    def write(self, result: AuditResult) -> Path:
        """Write the result into the run directory."""
        file = self.path / RESULT
        text = json.dumps(result.to_json(), indent=2, allow_nan=False)
        write_atomically(file, text.encode() + b"\n")
        return file

    def _rng(self, purpose: str) -> np.random.Generator:
        return np.random.default_rng(stream_seed(self.experiment.seed, "audit", purpose))

    def _federation(self, name: str = "") -> TrainedFederation:
        return TrainedFederation(self.path / FOLDER / name if name else self.path, self.context)

    def _membership(self) -> list[MembershipResult]:
        target = self._confidences(self._federation())
        shadows = [self._confidences(self._federation(name)) for name in self._shadow_names()]
        results = []
        for view, observed in target.items():
            shadow_views = [shadow[view] for shadow in shadows]
            scores = {}
            for peer, peer_confidences in observed.items():
                if not all(peer in shadow_view for shadow_view in shadow_views):
                    continue  # the senders that FedFOMO chooses depend on the data
                peer_shadows = [shadow_view[peer] for shadow_view in shadow_views]
                ratios = self._ratios(peer, peer_confidences, peer_shadows)
                members, outsiders = np.split(ratios, 2)
                scores[peer] = (members, outsiders)
            if scores:
                results.append(summarize_scores(view, scores, self._rng("bootstrap")))
        return results

    def _confidences(self, federation: TrainedFederation) -> dict[str, dict[str, Scores]]:
        """Return confidences of members, then of non-members, by view and peer with a model."""
        by_view: dict[str, dict[str, Scores]] = {}
        for view, network_of in federation.views().items():
            by_view[view] = {}
            for peer, pairs in self.candidates.items():
                network = network_of(peer)
                if network is not None:
                    members = confidences(network, pairs.members)
                    outsiders = confidences(network, pairs.outsiders)
                    by_view[view][peer] = np.concatenate([members, outsiders])
        return by_view

    def _ratios(self, peer: str, observed: Scores, shadows: Sequence[Scores]) -> Scores:
        """Return the scores of an attack with these shadows; without any, the confidences."""
        if not shadows:
            return observed
        inside = []
        for number in range(self.shadows):
            coins = self.coins(number, peer)
            inside.append(torch.cat([coins, ~coins]))
        return likelihood_ratios(observed, np.stack(shadows), torch.stack(inside).numpy())

    def _guess_canaries(self) -> Guesses:
        """Guess which canaries a peer was trained on.

        It is more confident of these than federations that never saw them.
        """
        trained = self._federation(self.runs[-1].path.name)
        references = [self._federation(), *map(self._federation, self._shadow_names())]
        scores = []
        expected = []
        inside = []
        for peer in self.canary_counts:
            samples, coins = self._canaries_of(peer)
            without = [confidences(reference.personal(peer), samples) for reference in references]
            scores.append(confidences(trained.personal(peer), samples))
            expected.append(np.mean(without, axis=0))
            inside.append(coins.numpy())
        surprise = residuals(np.concatenate(scores), np.concatenate(expected))
        return best_guesses(surprise, np.concatenate(inside), self.experiment.privacy.delta)

    def _guess_labels(self) -> list[LabelGuess]:
        saved = read_split(self.path)
        masks = [state.model.mask for state in SavedRun(self.path).states.values()]
        if saved is None or len(masks) < FEWEST_PEERS or _all_equal(masks):
            return []
        layout = self.context.layout
        _, label_counts = saved
        counts = label_counts.double().numpy()
        rng = self._rng("labels")
        guesses = [
            guess_labels("similar masks", mask_products(masks), counts, rng),
            guess_labels("kept of each unit", unit_products(masks, layout), counts, rng),
        ]
        by_class = kept_by_class(masks, layout, counts.shape[1])
        if by_class is not None and np.ptp(by_class) > 0:
            guesses.append(guess_labels("last layer", by_class, counts, rng))
        return guesses


def _all_equal(masks: Sequence[Mask]) -> bool:
    contents = {mask.bits.numpy().tobytes() for mask in masks}
    return len(contents) == 1


def audited_experiment(
    path: Path, overrides: Sequence[str] = (), *, trust: bool = False
) -> Experiment:
    """Return the experiment of a finished run; refuse what cannot be audited.

    A run of somebody else whose config names code needs `trust`.
    """
    in_site = is_site(path) or (path.name == RUN and is_site(path.parent))
    if in_site or (path / SITES).is_dir():
        raise RunError(
            f"{path} is a run of real sites, each of which has only its own data and model. Audit"
            " a simulation with the same settings: dispfl run, then dispfl audit."
        )
    config = trusted_config(path, trust=trust)
    if MADE_IN_PYTHON in config:
        raise RunError(
            f"{path} was made in Python, so only its caller has its data and network. Audit a"
            " `dispfl run`."
        )
    experiment = compose(config, overrides)
    if experiment.privacy.enabled:
        require("privacy", "The audit of a private run")
    if not has_all_rounds(path, experiment.rounds):
        raise RunError(f"{path} is not complete yet. Finish it first: dispfl run --resume {path}")
    if experiment.byzantine:
        raise RunError(
            f"{path} has Byzantine peers, which train on or send something else. Audit a run"
            " without them (byzantine=0)."
        )
    if experiment.method.fine_tuning is not None:
        raise RunError(
            f"{path} is a run of {experiment.method.name}, which fine-tunes models to evaluate"
            " them; omit the -ft."
        )
    return experiment
