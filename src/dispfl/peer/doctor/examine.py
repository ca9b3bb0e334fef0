"""All checks of a site, in the order in which they are printed."""

import contextlib
import os
import resource
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from dispfl.core.allocator import keep_heap
from dispfl.core.memory import memory
from dispfl.engines.checkpoint import KEPT_CHECKPOINTS, Checkpoints, checkpoint_bytes
from dispfl.errors import DamagedError, DispflError
from dispfl.files import RUN, SITE, is_site, user_name
from dispfl.peer.doctor.findings import (
    Finding,
    check_certificate,
    duration,
    failure,
    ok,
    size,
    warning,
)
from dispfl.peer.doctor.network import check_network
from dispfl.peer.membership.audit_log import AUDIT
from dispfl.peer.membership.identity import KEY, IdentityError
from dispfl.peer.setup.local_setup import LocalSetup, local_setup
from dispfl.peer.setup.site_config import SiteConfig
from dispfl.peer.site import IDENTITY, MEMBERS, Site
from dispfl.peer.state.store import PrivateRounds, difference_from_start, isolation_problem
from dispfl.robust.averages import FEWEST_PROTECTED, protection_text, withstood
from dispfl.round.context import PeerTask, StepResult
from dispfl.round.exchange import exchange_row
from dispfl.round.round import peer_step


def examine(folder: Path, *, trust: bool = False) -> Iterator[Finding]:
    """Check the site in a folder; findings are yielded as they are made.

    The site's node may be running or not. What a check trains is not kept. A site of somebody else
    whose settings name code needs `trust`.
    """
    yield from check_owner(folder)
    try:
        site = Site.open(folder, trust=trust)
    except DispflError as problem:
        topic = "key" if isinstance(problem, IdentityError) else "site"
        yield failure(topic, str(problem))
        return
    running = site.is_running()
    yield check_key(site)
    rotate = f"dispfl peer rotate {quote(str(folder))}"
    yield check_certificate("certificate", site.identity.certificate, rotate)
    try:
        config = site.config()
        setup = local_setup(site)
    except DispflError as problem:
        yield failure("settings", str(problem), f"Fix {folder / 'site.toml'} or the data.")
        return
    data = setup.run.data.peers[site.name]
    samples = f"{len(data.train)} training and {len(data.test)} test samples"
    yield ok("settings", f"{samples}, {setup.layout.size:,} weights")
    try:
        status = site.status() or {}
    except DispflError as problem:
        status = {}
        yield warning("run", str(problem))
    yield check_run(site, setup, status, running=running)
    if setup.run.settings.privacy.enabled:
        yield check_privacy(site, setup)
    yield from check_protection(setup, status)
    yield from check_training(site, setup, config, running=running)
    yield from check_network(site, setup, config, status, running=running)


def check_owner(folder: Path) -> Iterator[Finding]:
    """Check that what this software writes into the folder belongs to its owner, who runs the
    node."""
    if not is_site(folder):
        return
    owner = folder.stat().st_uid
    foreign = []
    for path in sorted(folder.rglob("*")):
        place = path.relative_to(folder).parts[0]
        is_ours = place in (SITE, IDENTITY, MEMBERS, AUDIT, RUN) or place.startswith(".")
        with contextlib.suppress(FileNotFoundError):  # a running node deletes files
            if is_ours and path.lstat().st_uid != owner:
                foreign.append(path)
    if not foreign:
        return
    text = (
        f"{folder} belongs to {user_name(owner)}, but not {foreign[0].relative_to(folder)}, which"
        " root or another user has created"
    )
    if len(foreign) > 1:
        text += f" ({len(foreign)} such files)"
    chown = f"chown -R -h {user_name(owner)} {quote(str(folder))}"
    yield failure("files", text, f"Run as root: {chown}")


def check_key(site: Site) -> Finding:
    """Check whom the key belongs to; `Site.open` has refused one that others can read."""
    owner = (site.folder / IDENTITY / KEY).stat().st_uid
    if owner != os.geteuid():
        name = user_name(owner)
        text = f"it belongs to the user {name}, and you are {user_name(os.geteuid())}"
        command = f"sudo -u {name} dispfl peer doctor ..."
        return warning("key", text, f"Run every command as the user who runs the node: {command}")
    if site.folder.stat().st_mode & 0o077:
        advice = f"Run: chmod 700 {quote(str(site.folder))}"
        return warning("key", f"other users may enter {site.folder}, which holds models", advice)
    return ok("key", "readable by its owner alone")


def check_run(
    site: Site, setup: LocalSetup, status: Mapping[str, Any], *, running: bool
) -> Finding:
    """Check what an earlier start has saved: its spec, and its checkpoints."""
    folder = site.run_folder
    if not (folder / "config.toml").exists():
        return ok("run", "not started yet")
    if running and status.get("waiting"):
        text = f"it waits in round {status.get('round')}: {status['waiting']}"
        advice = "It continues by itself as soon as others answer: see the members below."
        return failure("run", text, advice)
    try:
        difference = difference_from_start(folder, setup.spec, setup.settings)
        if difference:
            advice = f"Change site.toml back; or delete {folder}, which deletes the model."
            return failure("run", f"it was started {difference}", advice)
        checkpoints = Checkpoints(folder / "checkpoints")
        finished = checkpoints.finished_rounds()
        if not finished:
            return ok("run", "no round is saved yet")
        if not running:  # a running node deletes old ones meanwhile
            checkpoints.load(finished[-1])
    except DamagedError as damage:
        return warning(
            "run", str(damage), "The node keeps it aside, and resumes from an earlier round."
        )
    except DispflError as problem:
        return failure("run", str(problem))
    reason = status.get("save_problem")
    if running and reason:
        text = f"{status.get('unsaved_rounds')} rounds are only in memory: {reason}"
        advice = "Free some space, and do not stop the node: it saves them by itself."
        return failure("run", text, advice)
    isolation = isolation_problem(folder)
    if isolation and not running:
        return failure("run", isolation, f"Run: dispfl peer reopen {quote(str(site.folder))}")
    text = f"{finished[-1]} of {setup.run.settings.rounds} rounds are saved"
    return ok("run", text if running else f"{text}, and can be read")


def check_privacy(site: Site, setup: LocalSetup) -> Finding:
    """Check how much of its privacy budget a site that trains privately has spent."""
    settings = setup.run.settings
    privacy = settings.privacy
    private_rounds = PrivateRounds(site.run_folder)
    try:
        epsilon, is_exhausted = private_rounds.spent(setup.run.privacy_plan(site.name))
        remaining_rounds = settings.rounds - private_rounds.begun.rounds
    except DispflError as problem:
        return failure("privacy", str(problem))
    budget = "no budget" if privacy.epsilon is None else f"a budget of {privacy.epsilon:g}"
    text = f"epsilon {epsilon:.3g} is spent, with {budget} (delta {privacy.delta:g})"
    if is_exhausted and remaining_rounds > 0:
        text += ": not enough for another round, so this site no longer trains"
        advice = (
            "Leave it so: it continues to send its model. A larger privacy.epsilon would weaken"
            " the guarantee."
        )
        return warning("privacy", text, advice)
    return ok("privacy", text)


def check_protection(setup: LocalSetup, status: Mapping[str, Any]) -> Iterator[Finding]:
    """Check whether averages with the present members withstand a Byzantine one."""
    run = setup.run
    try:
        graph, _ = exchange_row(run, 0, run.roster, setup.name)
    except Exception as problem:  # a user's own topology may not fit every set of peers
        yield warning("byzantine", f"no neighbours: {type(problem).__name__}: {problem}")
        return
    requested = len(graph.get(setup.name, ()))
    if not requested:
        return
    text = protection_text(run.method, requested)
    if status.get("discarded"):
        advice = "It continues by itself once more members respond: dispfl peer status."
        yield warning("byzantine", str(status.get("protection")), advice)
    elif not withstood(run.method, requested):
        advice = f"{FEWEST_PROTECTED} neighbours or more and method.robust=clip would protect it."
        yield warning("byzantine", text, advice)
    else:
        yield ok("byzantine", text)


def check_training(
    site: Site, setup: LocalSetup, config: SiteConfig, *, running: bool
) -> Iterator[Finding]:
    """Train a few batches, and check time, memory and the space for what a round saves."""
    try:
        seconds, result = measure_round(setup)
    except DispflError as problem:  # a function of the user's has failed
        yield failure("training", str(problem), "Fix it: every round would fail like this one.")
        return
    except (MemoryError, RuntimeError) as problem:
        yield failure(
            "training", f"a batch failed: {problem}", "A smaller train.batch_size needs less."
        )
        return
    if result.report.failure:
        yield failure("training", result.report.failure)
    yield _time_finding(seconds, config)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    yield _memory_finding(peak, running=running)
    yield disk_finding(site.folder, (KEPT_CHECKPOINTS + 1) * checkpoint_bytes(site.name, result))


def measure_round(setup: LocalSetup) -> tuple[float, StepResult]:
    """Return the estimated seconds of a round's step, and the result of a shorter step.

    They are estimated from one batch and from as many as take a second. The accounting of private
    steps is left out: its time depends on their number, and its results are cached.
    """
    keep_heap()
    torch.set_num_threads(setup.threads)
    run = setup.run
    settings = run.settings
    network = run.network()
    state = setup.initial_state()
    batches_per_round = settings.train.local_steps(len(run.data.peers[setup.name].train))
    privacy = settings.privacy
    if privacy.enabled:
        # The noise of a whole round: fewer steps with the same budget would have another.
        noise = run.privacy_plan(setup.name).noise_multiplier
        privacy = privacy.model_copy(update={"epsilon": None, "noise_multiplier": noise})

    def timed(batches: int) -> tuple[float, StepResult]:
        train = settings.train.model_copy(update={"steps": batches})
        context = run.changed(train=train, privacy=privacy)
        if privacy.enabled:
            plan = context.privacy_plan(setup.name)
            plan.spent(plan.steps_per_round)
        began = time.perf_counter()
        result = peer_step(context, network, PeerTask(setup.name, 0), state, {})
        return time.perf_counter() - began, result

    timed(1)  # the first one allocates memory and chooses kernels
    first_seconds, _ = timed(1)
    batches_per_second = int(1 / max(first_seconds, 1e-3))
    batches = max(3, min(batches_per_round, batches_per_second))
    seconds, result = timed(batches)
    seconds_per_batch = max(0.0, seconds - first_seconds) / (batches - 1)
    return first_seconds + seconds_per_batch * (batches_per_round - 1), result


def _time_finding(seconds: float, config: SiteConfig) -> Finding:
    deadlines = config.deadlines
    text = f"a round trains for about {duration(seconds)}"
    if seconds > deadlines.max:
        text += (
            f", longer than the longest deadline ({duration(deadlines.max)}): the others continue"
            " without this site"
        )
        advice = "Train less in a round (train.steps), or raise deadlines.max at every site."
        return failure("training", text, advice)
    if seconds > deadlines.min:
        text += f"; faster sites may wait only {duration(deadlines.min)} (deadlines.min) for it"
        return warning(
            "training", text, f"Set deadlines.min to {2 * seconds:.0f} or more at every site."
        )
    return ok("training", text)


def _memory_finding(needed: float, *, running: bool) -> Finding:
    total, available = memory()
    text = f"training needs about {size(needed)}; {size(available)} of {size(total)} are available"
    if needed > total:
        advice = "Use a smaller model or train.batch_size, or raise the service's MemoryMax."
        return failure("memory", text, advice)
    if needed > available and not running:
        return warning("memory", text, "End other programs, or use a smaller train.batch_size.")
    return ok("memory", text)


def disk_finding(folder: Path, needed: float) -> Finding:
    """Check the space for the saved checkpoints, and for the next one while it is written."""
    present = 0
    for path, _, names in os.walk(folder / RUN / "checkpoints"):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a running node deletes old ones
                present += Path(path, name).stat().st_size
    free = shutil.disk_usage(folder).free
    missing = max(0.0, needed - present)
    text = f"checkpoints need {size(needed)}; {size(free)} are free in {folder}"
    if not os.access(folder, os.W_OK):
        return failure(
            "disk", f"{folder} cannot be written", "Run doctor as the user who runs the node."
        )
    if free < missing:
        return failure("disk", text, f"Free {size(missing - free)} or more.")
    if free < 2 * missing:
        return warning("disk", text, "Free some space: other files grow, too.")
    return ok("disk", text)
