"""A private step of ResNet-18 at batch 128 against a plain one: peak memory beyond what both have
before the step.

The ratio is against the limit, 1.5 times the plain step's and the gradients of one chunk of single
samples.
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


def peak() -> int:
    """The largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def step(side: str) -> None:
    """Compute the gradient of one batch, and print the memory that it took."""
    torch.manual_seed(0)
    network = FlatModule(Model(name="resnet18").build(3, 10, 32))
    network.module.train()
    x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))
    flags = torch.rand(network.layout.size) < 0.5
    before = peak()
    if side == "private":
        sum_clipped_(network, functional.cross_entropy, x, y, flags, 1.0)
        PrivateSteps(SecretStream(b"benchmark"), ("000", 0), 1.0, 1.0, 1.0, BATCH).add_noise_(
            network.grad, flags
        )
    else:
        functional.cross_entropy(network(x), y).backward()
    samples = max(CHUNK_SAMPLES, CHUNK_VALUES // network.layout.size)
    print(json.dumps({"bytes": peak() - before, "chunk": 4 * samples * network.layout.size}))


def main() -> bool | None:
    """Each step in a process of its own, whose peak is the step's."""
    found = {}
    for side in ("plain", "private"):
        ended = subprocess.run([sys.executable, __file__, side], stdout=subprocess.PIPE, check=True)
        found[side] = json.loads(ended.stdout)
    chunk = found["private"]["chunk"]
    allowed = 1.5 * found["plain"]["bytes"] + chunk
    more = {
        "plain_mb": found["plain"]["bytes"],
        "private_mb": found["private"]["bytes"],
        "chunk_mb": chunk,
    }
    more = {name: round(value / 1e6) for name, value in more.items()}
    return report(
        "private_memory",
        found["private"]["bytes"] / allowed,
        1.0,
        model="resnet18",
        batch=BATCH,
        **more,
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        step(sys.argv[1])
    else:
        sys.exit(main() is False)
