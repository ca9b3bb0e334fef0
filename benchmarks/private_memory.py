"""Peak memory of a private step of ResNet-18 at batch 128 against that of a plain one.

Memory is counted beyond what both have before the step. The ratio is against the limit, 1.5 times
the plain step's and the gradients of one chunk of single samples.
"""

import json
import resource
import subprocess
import sys

import torch
from torch.nn import functional

from dispfl.core.flat_module import FlatModule
from dispfl.models.settings import Model
from dispfl.privacy.steps import (
    CHUNK_SAMPLES,
    CHUNK_VALUES,
    PrivateSteps,
    SecretStream,
    sum_clipped_,
)
from measure import report

BATCH = 128


def peak_bytes() -> int:
    """Return the largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def step(kind: str) -> None:
    """Compute the gradient of one batch, and print the memory that it took."""
    torch.manual_seed(0)
    network = FlatModule(Model(name="resnet18").build(3, 10, 32))
    network.module.train()
    x = torch.randn(BATCH, 3, 32, 32)
    y = torch.randint(10, (BATCH,))
    flags = torch.rand(network.layout.size) < 0.5

    before = peak_bytes()
    if kind == "private":
        sum_clipped_(network, functional.cross_entropy, x, y, flags, 1.0)
        private = PrivateSteps(SecretStream(b"benchmark"), ("000", 0), 1.0, 1.0, 1.0, BATCH)
        private.add_noise_(network.grad, flags)
    else:
        loss = functional.cross_entropy(network(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
    step_bytes = peak_bytes() - before

    chunk_samples = max(CHUNK_SAMPLES, CHUNK_VALUES // network.layout.size)
    chunk_bytes = 4 * chunk_samples * network.layout.size
    print(json.dumps({"bytes": step_bytes, "chunk": chunk_bytes}))


def measure(kind: str) -> dict[str, int]:
    """Take a step in a process of its own, whose peak is the step's."""
    command = [sys.executable, __file__, kind]
    process = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    memory: dict[str, int] = json.loads(process.stdout)
    return memory


def main() -> bool | None:
    """Return whether the limit is held."""
    plain = measure("plain")["bytes"]
    private = measure("private")
    chunk = private["chunk"]
    return report(
        "private_memory",
        private["bytes"] / (1.5 * plain + chunk),
        1.0,
        model="resnet18",
        batch=BATCH,
        plain_mb=round(plain / 1e6),
        private_mb=round(private["bytes"] / 1e6),
        chunk_mb=round(chunk / 1e6),
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        step(sys.argv[1])
    else:
        sys.exit(main() is False)
