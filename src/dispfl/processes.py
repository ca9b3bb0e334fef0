"""Processes that train."""

import multiprocessing
import sys
from multiprocessing.context import ForkServerContext, SpawnContext

PRELOADED = ["dispfl.runs.execute", "dispfl.peer.local_federation"]
"""What the server imports; the second needs the extra `peer`, and is left out without it."""


def training_processes() -> ForkServerContext | SpawnContext:
    """Return the context in which to start processes that need torch.

    They are forked from a server that has imported it, which takes a core several seconds, once,
    and share its memory. Where torch does not support that, each imports it by itself. A fork of
    this process itself may hang, because it has threads.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
