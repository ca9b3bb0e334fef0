"""The audit of a run: trains what its attacks need, attacks, and collects the results."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dispfl.config import MADE_IN_PYTHON, compose
from dispfl.core.rng import stream, stream_seed
from dispfl.core.samples import Samples
from dispfl.data.batches import ResidentSamples
from dispfl.data.datasets import load_dataset
from dispfl.data.labelled import LabelledDataset
from dispfl.errors import ConfigError, RunError
from dispfl.experiment import Experiment
from dispfl.extras import require
from dispfl.files import RUN, SITES, is_site, plain_disk_errors, write_atomically
from dispfl.privacy.audit.attacker_views import TrainedFederation
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
    find_candidates,
    trained_again,
)
from dispfl.round.context import RunContext
from dispfl.runs.directory import (
    has_all_rounds,
    read_config,
    read_data_digest,
    read_metrics,
    read_split,
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
    """What an audit has found."""

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
    ) -> None:
        if shadows < 0 or shadows % 2:
            raise ConfigError(
                f"--shadows must be an even number, because shadows come in twos, got {shadows}.",
                key="--shadows",
            )
        self.path, self.shadows = path, shadows
        self.experiment = audited_experiment(path, overrides)
        self._canaries = canaries

    @cached_property
    def data(self) -> LabelledDataset:
        """The run's data set."""
        return load_dataset(self.experiment.data)

    @cached_property
    def context(self) -> RunContext:
        """The context of the run's rounds."""
        context = context_of(self.path, self.experiment, self.data)
        if read_data_digest(self.path) not in ("", context.data_digest()):
            raise RunError(
                f"The data set {self.experiment.data.name} is not the one that {self.path} was run"
                " with: its samples differ."
            )
        return context

    @cached_property
    def candidates(self) -> Mapping[str, Candidates]:
        """The pairs of members and non-members of each peer that has any."""
        saved = read_split(self.path)
        assert saved is not None  # or there were no context
        found = find_candidates(self.experiment, self.data, saved[0])
        named = {
            name: own for name, own in zip(self.context.roster, found, strict=True) if len(own)
        }
        if not named:
            raise RunError(
                f"{self.path} leaves no samples to compare with: its peers train on all of"
                f" {self.experiment.data.name}, and no test sample of theirs has the class of one"
                " of these. Audit a run with a smaller partition.samples_per_peer."
            )
        return named

    # what is trained

    @cached_property
    def runs(self) -> list[AuditRun]:
        """The federations to train; those that are finished are not trained again."""
        runs = []
        for number, name in enumerate(self._shadow_names()):
            runs.append(self._run(name, partial(self._shadow_data, number)))
        if self.canary_counts:
            # Another number of canaries makes another federation.
            runs.append(
                self._run(f"canaries-{sum(self.canary_counts.values())}", self._canary_data)
            )
        for run in runs:
            run.check()
        return runs

    def make_folder(self) -> None:
        """Make the folder of these federations, for this user only: each is trained on the same
        samples again."""
        with plain_disk_errors(self.path):
            (self.path / FOLDER).mkdir(mode=0o700, exist_ok=True)

    def _run(self, name: str, data: Callable[[], Mapping[str, Samples]]) -> AuditRun:
        return trained_again(name, self.path, self.experiment, self.context, data)

    def _shadow_names(self) -> list[str]:
        return [f"shadow-{number}" for number in range(self.shadows)]

    def coins(self, number: int, peer: str) -> Tensor:
        """Return for each pair whether a shadow federation is trained on the member; the next one
        has the others."""
        rng = stream(self.experiment.seed, "audit", "shadow", number // 2, peer)
        drawn = torch.rand(len(self.candidates[peer]), generator=rng) < 0.5
        return drawn if number % 2 == 0 else ~drawn

    def _shadow_data(self, number: int) -> dict[str, Samples]:
        return {peer: own.chosen(self.coins(number, peer)) for peer, own in self.candidates.items()}

    @cached_property
    def canary_counts(self) -> dict[str, int]:
        """The canaries of each peer."""
        counts = {}
        for peer, own in self.candidates.items():
            wanted = self._canaries
            if wanted is None:
                wanted = int(CANARY_SHARE * len(self.context.peers[peer].train))
            counts[peer] = min(wanted, len(own))
        return {peer: count for peer, count in counts.items() if count}

    def _canaries_of(self, peer: str) -> tuple[ResidentSamples, Tensor]:
        """Return a peer's canaries, and which of them the federation with canaries is trained
        on."""
        count, classes = self.canary_counts[peer], len(self.data.classes)
        rng = stream(self.experiment.seed, "audit", "canary", peer)
        samples = self.candidates[peer].canaries(count, classes, rng)
        return samples, torch.rand(count, generator=rng) < 0.5

    def _canary_data(self) -> dict[str, Samples]:
        return {
            peer: self.candidates[peer].with_canaries(*self._canaries_of(peer))
            for peer in self.canary_counts
        }

    # what is found

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
        write_atomically(
            file, json.dumps(result.to_json(), indent=2, allow_nan=False).encode() + b"\n"
        )
        return file

    def _rng(self, purpose: str) -> np.random.Generator:
        return np.random.default_rng(stream_seed(self.experiment.seed, "audit", purpose))

    def _federation(self, name: str = "") -> TrainedFederation:
        return TrainedFederation(self.path / FOLDER / name if name else self.path, self.context)

    def _membership(self) -> list[MembershipResult]:
        target = self._confidences(self._federation())
        shadows = [self._confidences(self._federation(name)) for name in self._shadow_names()]
        found = []
        for view, observed in target.items():
            scores = {}
            for peer, own in observed.items():
                if all(
                    peer in shadow[view] for shadow in shadows
                ):  # whom FedFOMO receives from depends on data
                    ratios = self._ratios(peer, own, [shadow[view][peer] for shadow in shadows])
                    scores[peer] = (ratios[: len(ratios) // 2], ratios[len(ratios) // 2 :])
            if scores:
                found.append(summarize_scores(view, scores, self._rng("bootstrap")))
        return found

    def _confidences(self, federation: TrainedFederation) -> dict[str, dict[str, Scores]]:
        """Return by view and peer, where there is a model, its confidences of members, then of
        non-members."""
        found: dict[str, dict[str, Scores]] = {}
        for view, network_of in federation.views().items():
            networks = ((peer, network_of(peer)) for peer in self.candidates)
            found[view] = {
                peer: self._confidence(peer, network)
                for peer, network in networks
                if network is not None
            }
        return found

    def _confidence(self, peer: str, network: nn.Module) -> Scores:
        own = self.candidates[peer]
        return np.concatenate(
            [confidences(network, own.members), confidences(network, own.outsiders)]
        )

    def _ratios(self, peer: str, observed: Scores, shadows: Sequence[Scores]) -> Scores:
        """Return the scores of an attack with these shadows; without any, the confidences
        themselves."""
        if not shadows:
            return observed
        coins = [self.coins(number, peer) for number in range(self.shadows)]
        inside = torch.stack([torch.cat([drawn, ~drawn]) for drawn in coins]).numpy()
        return likelihood_ratios(observed, np.stack(shadows), inside)

    def _guess_canaries(self) -> Guesses:
        """Guess which canaries a peer is more confident of than federations are that never saw
        them."""
        trained, *without = [
            self._federation(name) for name in (self.runs[-1].path.name, "", *self._shadow_names())
        ]
        scores, expected, inside = [], [], []
        for peer in self.canary_counts:
            samples, coins = self._canaries_of(peer)
            scores.append(confidences(trained.personal(peer), samples))
            expected.append(
                np.mean([confidences(one.personal(peer), samples) for one in without], axis=0)
            )
            inside.append(coins.numpy())
        surprise = residuals(np.concatenate(scores), np.concatenate(expected))
        return best_guesses(surprise, np.concatenate(inside), self.experiment.privacy.delta)

    def _guess_labels(self) -> list[LabelGuess]:
        saved = read_split(self.path)
        masks = [state.model.mask for state in SavedRun(self.path).states.values()]
        if (
            saved is None
            or len(masks) < FEWEST_PEERS
            or len({mask.bits.numpy().tobytes() for mask in masks}) == 1
        ):
            return []
        counts, rng = saved[1].double().numpy(), self._rng("labels")
        found = [
            guess_labels("similar masks", mask_products(masks), counts, rng),
            guess_labels(
                "kept of each unit", unit_products(masks, self.context.layout), counts, rng
            ),
        ]
        by_class = kept_by_class(masks, self.context.layout, counts.shape[1])
        if by_class is not None and np.ptp(by_class) > 0:
            found.append(guess_labels("last layer", by_class, counts, rng))
        return found


def audited_experiment(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Return the experiment of a finished run; refuse what cannot be audited."""
    if is_site(path) or (path.name == RUN and is_site(path.parent)) or (path / SITES).is_dir():
        raise RunError(
            f"{path} is of real sites, each of which has only its own data and model. Audit a"
            " simulation with the same settings: dispfl run, then dispfl audit."
        )
    config = read_config(path)
    if MADE_IN_PYTHON in config:
        raise RunError(
            f"{path} was made in Python, so only its caller has its data and network. Audit a"
            " `dispfl run`."
        )
    experiment = compose(config, overrides)
    if experiment.privacy.enabled:
        require("privacy", "The audit of a private run")
    if not has_all_rounds(path, experiment.rounds):
        raise RunError(
            f"{path} has not all its rounds yet. Finish it first: dispfl run --resume {path}"
        )
    if experiment.byzantine:
        raise RunError(
            f"{path} has Byzantine peers, which train or send other things. Audit a run without"
            " (byzantine=0)."
        )
    if experiment.method.fine_tuning is not None:
        raise RunError(
            f"{path} is of {experiment.method.name}, which fine-tunes models to evaluate them; omit"
            " the -ft."
        )
    return experiment
