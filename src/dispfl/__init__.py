"""Decentralized, personalized, sparse federated learning.

    from dispfl import Federation, DisPFL, RandomRegular

The names below are imported when they are first used, so `import dispfl` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dispfl.config import Experiment as Experiment
    from dispfl.core.erk import erk_densities as erk_densities
    from dispfl.core.evolve import prune_and_regrow as prune_and_regrow
    from dispfl.core.evolve import prune_rate as prune_rate
    from dispfl.core.gossip import gossip_average as gossip_average
    from dispfl.core.layout import Layout as Layout
    from dispfl.core.masks import hamming as hamming
    from dispfl.core.train import Train as Train
    from dispfl.errors import DispflError as DispflError
    from dispfl.federation import Federation as Federation
    from dispfl.federation import Run as Run
    from dispfl.methods.dispfl import DisPFL as DisPFL
    from dispfl.methods.local import Local as Local
    from dispfl.topology import Full as Full
    from dispfl.topology import RandomRegular as RandomRegular
    from dispfl.topology import Ring as Ring
    from dispfl.wire.codec import Wire as Wire

    __version__: str

_WHERE = {
    "DisPFL": "methods.dispfl",
    "DispflError": "errors",
    "Experiment": "config",
    "Federation": "federation",
    "Full": "topology",
    "Layout": "core.layout",
    "Local": "methods.local",
    "RandomRegular": "topology",
    "Ring": "topology",
    "Run": "federation",
    "Train": "core.train",
    "Wire": "wire.codec",
    "erk_densities": "core.erk",
    "gossip_average": "core.gossip",
    "hamming": "core.masks",
    "prune_and_regrow": "core.evolve",
    "prune_rate": "core.evolve",
}
__all__ = [*_WHERE, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":  # importlib.metadata takes longer to import than all of this
        return import_module("importlib.metadata").version("dispfl")
    if name not in _WHERE:
        raise AttributeError(f"module 'dispfl' has no attribute {name!r}")
    return getattr(import_module(f"dispfl.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
