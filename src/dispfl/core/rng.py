"""Named random streams, so that results do not depend on the order of draws.

A stream is named by what it is for: `(seed, purpose, peer, round)`. The names are hashed with
blake2b, which is the same on every machine and in every process, unlike Python's salted `hash()`.
"""

import contextlib
import hashlib
from collections.abc import Iterator

import torch


def stream_seed(seed: int, *names: str | int) -> int:
    """Return the 63-bit number that belongs to these names in this order."""
    digest = hashlib.blake2b(digest_size=8)
    for name in (seed, *names):
        text = f"{type(name).__name__}:{name}".encode()
        length = len(text).to_bytes(4, "little")  # keeps ("ab", "c") and ("a", "bc") apart
        digest.update(length + text)
    return int.from_bytes(digest.digest(), "little") >> 1


def stream(seed: int, *names: str | int) -> torch.Generator:
    """Return a fresh generator for one purpose: `stream(seed, "regrow", peer, t)`."""
    generator = torch.Generator()
    generator.manual_seed(stream_seed(seed, *names))
    return generator


@contextlib.contextmanager
def forked_generators(device: str = "cpu") -> Iterator[None]:
    """Restore the states of torch's global generators afterwards: the CPU's and used GPUs'.

    In use are the GPUs of the kind that `device` names, and those that this process has used
    before: seeding torch seeds them too. The code for cuda and mps follows torch's documentation
    and has not been run on such a device.
    """
    with contextlib.ExitStack() as restored:
        restored.enter_context(torch.random.fork_rng(devices=[]))
        if device.startswith("cuda") or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            gpus = range(torch.cuda.device_count())
            restored.enter_context(torch.random.fork_rng(devices=gpus, device_type="cuda"))
        if torch.backends.mps.is_available():
            restored.enter_context(torch.random.fork_rng(devices=[0], device_type="mps"))
        yield


def seed_globally(seed: int, *names: str | int) -> None:
    """Seed torch's global generators from a named stream: the CPU's, and those of GPUs in use.

    `torch.manual_seed` does the same, but takes up to a millisecond where GPUs are not in use,
    which counts in a round of a small model.
    """
    number = stream_seed(seed, *names)
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(number)


@contextlib.contextmanager
def global_stream(seed: int, *names: str | int) -> Iterator[None]:
    """Seed torch's global generator from a named stream, and restore it afterwards.

    For code that takes no generator: a module's constructor, dropout.
    """
    with forked_generators():
        seed_globally(seed, *names)
        yield
