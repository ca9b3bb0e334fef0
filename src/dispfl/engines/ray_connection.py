"""This process's one connection to Ray: to a cluster, or to a Ray that is started here.

Import it before `ray`, which reads some of its settings from the environment when it is imported.
"""

import logging
import os
import socket
from typing import Any

from dispfl.errors import ConfigError

WORKER_DIED = "^A worker died or was killed while executing a task by an unexpected system error"
"""How a paragraph of Ray's begins; we say in a line that a worker was lost, and what becomes of it."""
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", WORKER_DIED)

import ray  # noqa: E402  after its environment

_made_here = False
"""Whether the connection is ours to end. Ray knows only one a process, which may have been there before us."""


def cluster_address(given: str | None) -> str | None:
    """Where a cluster is said to be, if anywhere."""
    return given or os.environ.get("RAY_ADDRESS")


def connect(given: str | None, workers: int) -> None:
    """See that there is a Ray to work with: what is there already, the cluster, or one here for so many workers."""
    global _made_here
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody
    address = cluster_address(given)
    here: dict[str, Any] = {"num_cpus": workers, "include_dashboard": False}
    try:
        _knock(address)
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **({"address": address} if address else here))
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else None
        raise ConfigError(
            f"No Ray cluster at {address} lets us in: {reason or str(problem).splitlines()[0]}. Is it running, and "
            "are RAY_AUTH_MODE and the token here what they are there?"
        ) from None
    _made_here = True


def disconnect() -> None:
    """End the connection, if it was made here."""
    global _made_here
    if _made_here:
        ray.shutdown()
    _made_here = False


def _knock(address: str | None) -> None:
    """See at once that somebody listens there; Ray would try for minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=10).close()
