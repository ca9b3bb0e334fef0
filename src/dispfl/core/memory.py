"""How much memory this process may have, and how much of it is available."""

from math import inf
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")


def memory() -> tuple[float, float]:
    """Return the bytes of memory that this process may have, and those available now.

    Infinite where the system does not tell.
    """
    try:
        meminfo = _MEMINFO.read_text()
    except OSError:
        return inf, inf
    return memory_limits(meminfo, _cgroup_limit())


def memory_limits(meminfo: str, cgroup: float) -> tuple[float, float]:
    """Return total and available bytes by the content of /proc/meminfo and the cgroup's limit."""
    kilobytes = {}
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            kilobytes[name] = int(value.split()[0])
    total = 1024.0 * kilobytes["MemTotal"]
    available = 1024.0 * kilobytes["MemAvailable"]
    return min(total, cgroup), min(available, cgroup)


def _cgroup_limit() -> float:
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        return float(Path(f"/sys/fs/cgroup{group}/memory.max").read_text())  # "max" is no number
    except (OSError, ValueError):
        return inf
