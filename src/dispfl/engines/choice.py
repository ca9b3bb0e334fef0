"""Which engine does the work."""

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Literal

from dispfl.engines.inprocess import InProcess
from dispfl.errors import ConfigError
from dispfl.runs.checkpoint import Checkpoints
from dispfl.work import Engine, Setting

EngineName = Literal["inprocess", "ray"]


def check_engine(engine: str) -> None:
    """Refuse an engine that cannot be had here."""
    if engine == "ray" and find_spec("ray") is None:
        raise ConfigError("engine is 'ray', but Ray is not installed; install it with: pip install 'dispfl[ray]'.")


def reach(engine: EngineName, ray_address: str | None = None) -> None:
    """Connect to the Ray cluster that is asked for, if one is: before a run directory is made that would stay empty."""
    if engine == "ray":
        from dispfl.engines.ray_connection import cluster_address, connect  # an extra, and slow to import

        if cluster_address(ray_address):
            connect(ray_address, workers=0)


@contextlib.contextmanager
def at_work(
    engine: EngineName,
    setting: Setting,
    threads: int | None,
    checkpoints: Checkpoints | None,
    ray_address: str | None = None,
) -> Iterator[Engine]:
    """An engine, until the run is over."""
    started: Engine
    if engine == "ray":
        from dispfl.engines.ray_engine import RayEngine  # an extra, and slow to import

        assert checkpoints is not None, "a lost worker begins again from the disk"
        started = RayEngine(setting, threads, checkpoints, ray_address)
    else:
        started = InProcess(setting, threads, checkpoints)
    with contextlib.closing(started):
        yield started
