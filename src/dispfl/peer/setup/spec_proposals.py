"""Changes of the spec by operators: proposing, checking and confirming them."""

import time
from collections.abc import Iterable

from dispfl.config import dotted_keys, parse_overrides
from dispfl.errors import ConfigError
from dispfl.peer.membership.spec_change import SpecChange, SpecChangeError
from dispfl.peer.setup.site_config import SiteConfig
from dispfl.peer.setup.spec import is_changeable
from dispfl.peer.setup.spec_versions import changed_config
from dispfl.peer.site import Site


def latest_config(site: Site) -> SiteConfig:
    """Return a site's settings by the newest version of the spec."""
    config = site.config()
    for change in site.spec_changes.current().in_force:
        config = changed_config(config, change.settings, site.folder)
    return config


def shared_settings(config: SiteConfig) -> dict[str, object]:
    """Return the settings that a change of the spec may set, by dotted key."""
    return {
        key: value for key, value in dotted_keys(config.to_toml()).items() if is_changeable(key)
    }


def make_change(site: Site, overrides: Iterable[str], from_round: int | None) -> SpecChange:
    """Return a checked change of the spec, not signed by anybody.

    More rounds are added at the end unless `from_round` says otherwise; any other change names the
    first round in which it is in force.
    """
    config = latest_config(site)
    settings = dotted_keys(parse_overrides(overrides))
    if not settings:
        raise ConfigError("A change of the spec needs a setting, such as rounds=40.")
    changed = changed_config(config, settings, site.folder)
    if shared_settings(changed) == shared_settings(config):
        raise ConfigError("Nothing changes: the spec has these settings already.")

    if from_round is None:
        if settings.keys() != {"rounds"} or changed.rounds < config.rounds:
            raise ConfigError(
                "Name the first round of the change, far enough ahead for every site to hear of it:"
                " --from-round N.",
                key="--from-round",
            )
        from_round = config.rounds
    change = site.spec_changes.next_change(settings, from_round, int(time.time()))
    check_change(site, change)
    return change


def check_change(site: Site, change: SpecChange) -> SiteConfig:
    """Return the settings after a change; refuse one that this site could not follow."""
    config = latest_config(site)
    changed = changed_config(config, change.settings, site.folder)
    first_round = change.from_round
    status = site.status() or {}
    current_round = int(status.get("round", 0))
    earlier_changes = site.spec_changes.current().in_force
    if first_round > config.rounds:
        raise SpecChangeError(
            f"from_round is {first_round}, but the federation ends after {config.rounds} rounds; a"
            f" change begins in round {config.rounds} at the latest."
        )
    if changed.rounds < first_round:
        raise SpecChangeError(
            f"rounds would be {changed.rounds}, but the change begins in round {first_round}."
        )
    if earlier_changes and first_round < earlier_changes[-1].from_round:
        raise SpecChangeError(
            f"from_round is {first_round}, but the change before it begins in round"
            f" {earlier_changes[-1].from_round}; name that round or a later one."
        )
    if first_round < current_round:
        raise SpecChangeError(
            f"from_round is {first_round}, but {site.name} is in round {current_round} already;"
            " name a later one."
        )
    return changed


def proposal_to_confirm(site: Site) -> SpecChange:
    """Return the proposal that this site's operator has not confirmed yet."""
    proposals = site.spec_changes.current().proposed
    open_proposals = [change for change in proposals if site.name not in change.members]
    if not open_proposals:
        raise SpecChangeError(
            f"{site.name} knows no proposal that waits for its confirmation. A running node"
            " receives proposals from other sites; or name a file: dispfl peer spec confirm DIR"
            " FILE"
        )
    if len(open_proposals) > 1:
        summaries = "; ".join(change.summary for change in open_proposals)
        raise SpecChangeError(
            f"{site.name} knows {len(open_proposals)} proposals ({summaries}). Confirm one of them"
            " by the file that its proposer wrote: dispfl peer spec confirm DIR FILE"
        )
    return open_proposals[0]
