"""Every random draw has a name, so nothing depends on who draws first.

A stream is named by what it is for: `(seed, purpose, peer, round)`. The names are hashed with blake2b, which is
the same on every machine and in every process, unlike Python's salted `hash()`.
"""

import contextlib
import hashlib
from collections.abc import Iterator

import torch


def stream_seed(seed: int, *names: str | int) -> int:
    """A 63-bit number that these names, in this order, always give."""
    digest = hashlib.blake2b(digest_size=8)
    for name in (seed, *names):
        text = f"{type(name).__name__}:{name}".encode()
        digest.update(len(text).to_bytes(4, "little") + text)  # the length keeps ("ab", "c") and ("a", "bc") apart
    return int.from_bytes(digest.digest(), "little") >> 1


def stream(seed: int, *names: str | int) -> torch.Generator:
    """A fresh generator for one purpose: `stream(seed, "regrow", peer, t)`."""
    generator = torch.Generator()
    generator.manual_seed(stream_seed(seed, *names))
    return generator


@contextlib.contextmanager
def forked_generators(device: str = "cpu") -> Iterator[None]:
    """Give the caller's places in torch's global generators back afterwards: the CPU's, and those of GPUs in use.

    In use are the GPUs of the kind that `device` names, and those that this process has used before: seeding torch
    seeds them too. What this does for cuda and mps is written after torch's documentation and has not been run on one.
    """
    with contextlib.ExitStack() as restored:
        restored.enter_context(torch.random.fork_rng(devices=[]))
        if device.startswith("cuda") or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            cards = range(torch.cuda.device_count())
            restored.enter_context(torch.random.fork_rng(devices=cards, device_type="cuda"))
        if torch.backends.mps.is_available():
            restored.enter_context(torch.random.fork_rng(devices=[0], device_type="mps"))
        yield


@contextlib.contextmanager
def global_stream(seed: int, *names: str | int) -> Iterator[None]:
    """Seed torch's global generator from a named stream, and give the caller's back afterwards.

    For the places that know no other generator: a module's constructor, dropout.
    """
    with forked_generators():
        torch.manual_seed(stream_seed(seed, *names))
        yield
