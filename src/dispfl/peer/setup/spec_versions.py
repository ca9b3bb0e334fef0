"""The versions of a federation's spec: which settings each round has at a site.

The settings in site.toml are version 1. Every signed change of the spec
(`membership/spec_change.py`) makes the next version from the settings of the last one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dispfl.config import compose_values
from dispfl.errors import ConfigError, DispflError, RunError
from dispfl.peer.membership.spec_change import FIRST_VERSION, SpecChange
from dispfl.peer.membership.spec_changes import SpecChanges, SpecChangesFile
from dispfl.peer.setup.local_setup import LocalSetup
from dispfl.peer.setup.site_config import SiteConfig
from dispfl.peer.setup.spec import FederationSpec, is_changeable, spec_digest
from dispfl.peer.site import Site
from dispfl.peer.transport.base import JSON
from dispfl.robust.averages import check_byzantine
from dispfl.round.context import RunContext
from dispfl.trust import check_site

NO_CHANGES = SpecChanges()


@dataclass(frozen=True)
class SpecVersion:
    """One version of the spec, and the context of the rounds that follow it."""

    number: int
    run: RunContext
    spec: FederationSpec

    @cached_property
    def digest(self) -> str:
        """What model requests name, so that only equal versions exchange models."""
        return spec_digest(self.spec)


class SpecVersions:
    """The versions that a node knows. Without a file of changes there is one, for all rounds."""

    def __init__(
        self,
        first: SpecVersion,
        file: SpecChangesFile | None = None,
        apply: Callable[[SpecVersion, SpecChange], SpecVersion] | None = None,
    ) -> None:
        self._first = first
        self._file = file
        self._apply = apply
        self._applied: dict[str, SpecVersion] = {}

    @classmethod
    def single(cls, run: RunContext, spec: FederationSpec) -> "SpecVersions":
        """One version, for all rounds."""
        return cls(SpecVersion(FIRST_VERSION, run, spec))

    def changes(self) -> SpecChanges:
        """The known changes; the same object until they change."""
        return self._file.current() if self._file else NO_CHANGES

    def merge(self, documents: Sequence[JSON]) -> None:
        """Verify and store changes from another member, on any thread. May raise `MessageError`."""
        if self._file:
            self._file.merge(documents)

    def at(self, t: int) -> SpecVersion:
        """Return the version that is in force in round t."""
        version = self._first
        for change in self.changes().in_force:
            if change.from_round > t:
                break
            version = self._after(version, change)
        return version

    @property
    def latest(self) -> SpecVersion:
        """The newest version, from whichever round on it is in force."""
        version = self._first
        for change in self.changes().in_force:
            version = self._after(version, change)
        return version

    def _after(self, version: SpecVersion, change: SpecChange) -> SpecVersion:
        assert self._apply is not None, "changes need a function that applies them"
        if change.digest not in self._applied:
            self._applied[change.digest] = self._apply(version, change)
        return self._applied[change.digest]


def site_versions(site: Site, setup: LocalSetup) -> SpecVersions:
    """Return the versions of a site with this setup."""

    def apply(version: SpecVersion, change: SpecChange) -> SpecVersion:
        assert isinstance(version.run.settings, SiteConfig)
        try:
            config = changed_config(version.run.settings, change.settings, site.folder)
            run = replace(version.run, settings=config, known_layout=setup.layout)
            check_byzantine(run.method, config.topology, len(run.roster))
            _check_tensors(run, setup.run)
        except DispflError as problem:
            raise RunError(
                f"Version {change.version} of the federation's spec cannot be applied at"
                f" {setup.name}: {problem}"
            ) from problem
        return SpecVersion(change.version, run, replace(setup, run=run).spec)

    return SpecVersions(SpecVersion(FIRST_VERSION, setup.run, setup.spec), site.spec_changes, apply)


def _check_tensors(run: RunContext, first_run: RunContext) -> None:
    """Refuse a change of what peers send beside their models: messages have one format."""
    if run.tensors != first_run.tensors:
        raise ConfigError(
            f"it would change the tensors that {run.method.name} sends beside a model, which stay"
            " the same in a federation.",
            key="method",
        )


def changed_config(config: SiteConfig, settings: Mapping[str, Any], folder: Path) -> SiteConfig:
    """Return a site's settings with those of a change, by dotted key; refuse fixed ones."""
    tables: dict[str, Any] = {}
    for key, value in settings.items():
        if not is_changeable(key):
            raise ConfigError(
                f"{key} cannot be changed in a running federation; rounds, [topology], [train],"
                " [deadlines], and of [method] what does not decide which weights a model keeps,"
                " can. For anything else begin a new federation: dispfl peer init --warm-start.",
                key=key,
            )
        table, dot, field = key.partition(".")
        if not dot:
            tables[table] = value
        elif isinstance(tables.setdefault(table, {}), dict):
            tables[table][field] = value
    values = compose_values(SiteConfig, config.to_toml(), tables)
    check_site(folder, values)  # a change comes from others, and may name code
    return SiteConfig.from_values(values, folder)
