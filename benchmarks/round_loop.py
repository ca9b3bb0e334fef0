"""A whole Dis-PFL round of one peer against the bare training loop; ratio of processor times.

On one thread. The round is `peer_step` with evaluation off: mix with 10 neighbours, 5 epochs over
500 samples in batches of 128, the dense gradient on one more batch, prune and regrow, pack.

The bare loop gets its batches ready-made, in channels-last memory, and does nothing else: forward,
backward, SGD step, mask. No shuffling, no crops and flips, no clipping, no checks, no mixing. Its
parameters are ordinary tensors and its optimizer is `torch.optim.SGD`. The batch of the dense
gradient is work that Algorithm 2 asks for, so the limit is for the bare loop with a forward and
backward pass on one more batch; the ratio without it is printed beside.

ResNet-18 is measured with 1 epoch in place of 5, because a batch takes seconds. That is the harder
case: what mixing and evolving cost is spread over 5 batches instead of 21. Of a few pairs of times
the best scatter by more than the 3 % in question on a shared machine: repeat it before believing
it.

Both sides have the memory settings that an engine makes (`keep_heap`), which help the bare loop as
much.
"""

import sys
import time

import torch
from torch import Tensor, nn

from dispfl import Train
from dispfl.core.allocator import keep_heap
from dispfl.round.round import peer_step
from measure import best_times, report
from synthetic import PAPER_BATCH, PAPER_DEGREE, federation, first_step


def measure(
    model: str, channels: int, size: int, limit: float, *, epochs: int = 5, repeats: int = 21
) -> None:
    """One model on random images."""
    torch.set_num_threads(1)
    keep_heap()
    train = Train(epochs=epochs, batch_size=PAPER_BATCH)
    peers = PAPER_DEGREE + 1
    context = federation(model, channels, size, 500, 1, train, peers=peers, degree=PAPER_DEGREE)
    network = context.network()
    task, state, received = first_step(context, evaluate=False)

    data = context.data.peers[task.peer].train
    rng = torch.Generator().manual_seed(0)
    batches: list[tuple[Tensor, Tensor]] = []
    for _ in range(epochs):
        batches += data.batches(train.batch_size, rng=rng)
    module = context.module()
    first_weights = {name: weights.clone() for name, weights in module.state_dict().items()}
    masks = [view.float() for view in network.layout.views(state.model.mask.unpack())]

    def whole_round() -> None:
        assert peer_step(context, network, task, state, received).report.failure is None

    def backward(x: Tensor, y: Tensor) -> None:
        loss = nn.functional.cross_entropy(module(x), y)
        loss.backward()  # type: ignore[no-untyped-call]

    def bare_loop() -> None:
        module.load_state_dict(first_weights)  # as a round does: each time from the same weights
        optimizer = torch.optim.SGD(
            module.parameters(), lr=train.lr, weight_decay=train.weight_decay
        )
        for x, y in batches:
            optimizer.zero_grad()
            backward(x, y)
            optimizer.step()
            with torch.no_grad():
                for parameter, mask in zip(module.parameters(), masks, strict=True):
                    parameter.mul_(mask)

    def dense_gradient() -> None:
        backward(*batches[0])

    round_time, bare_time, gradient_time = best_times(
        whole_round, bare_loop, dense_gradient, repeats=repeats, clock=time.process_time
    )
    report(
        "round_loop",
        round_time / (bare_time + gradient_time),
        limit,
        model=model,
        channels=channels,
        batches=len(batches),
        ratio_without_the_dense_gradient=round(round_time / bare_time, 3),
        seconds=round(round_time, 3),
    )


if __name__ == "__main__":
    measure("cnn", 1, 28, limit=1.10)
    measure("cnn", 3, 32, limit=1.10)
    if "--quick" not in sys.argv:
        measure("resnet18", 3, 32, limit=1.03, epochs=1, repeats=3)
