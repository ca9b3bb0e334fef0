"""Network namespaces: hosts of a test on this machine, with cables between them."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence

import pytest


def ip(*arguments: str) -> str:
    """Run the command `ip`."""
    return run("ip", *arguments)


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def require_programs(*programs: str) -> None:
    """Skip the test if a program is missing."""
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"there is no `{program}` command (Debian: iproute2, iptables, tinyproxy)")


@contextlib.contextmanager
def hosts(
    names: Sequence[str], connect: Callable[[dict[str, str]], None]
) -> Iterator[dict[str, str]]:
    """Make hosts, connect them, and remove them at the end; skip the test where that is not
    allowed.

    `connect` gets the namespaces by the hosts' names.
    """
    namespaces = {name: f"dispfl-{os.getpid()}-{name}" for name in names}
    try:
        try:
            for namespace in namespaces.values():
                ip("netns", "add", namespace)
                ip("-n", namespace, "link", "set", "lo", "up")
            connect(namespaces)
        except subprocess.CalledProcessError as problem:
            pytest.skip(f"network namespaces cannot be made here: {problem.stderr.strip()}")
        yield namespaces
    finally:
        for namespace in namespaces.values():
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", namespace)


def cable(one: str, address: str, other: str, other_address: str) -> None:
    """Connect two namespaces."""
    end = f"v{address.replace('.', '')}"[:15]
    other_end = f"v{other_address.replace('.', '')}"[:15]
    veth = ("type", "veth", "peer", "name", other_end, "netns", other)
    ip("link", "add", end, "netns", one, *veth)
    for namespace, name, place in ((one, end, address), (other, other_end, other_address)):
        ip("-n", namespace, "address", "add", f"{place}/24", "dev", name)
        ip("-n", namespace, "link", "set", name, "up")
