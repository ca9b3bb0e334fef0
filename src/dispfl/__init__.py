"""Decentralized, personalized, sparse federated learning.

    from dispfl import Federation, DisPFL, RandomRegular

The names below are imported when they are first used, so `import dispfl` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dispfl.core.averaging import average_of as average_of
    from dispfl.core.averaging import gossip_average as gossip_average
    from dispfl.core.layout import Layout as Layout
    from dispfl.core.masks import hamming as hamming
    from dispfl.core.masks import random_mask as random_mask
    from dispfl.core.metric import Metric as Metric
    from dispfl.core.packed import Mask as Mask
    from dispfl.core.packed import PackedModel as PackedModel
    from dispfl.core.packed import WeightMask as WeightMask
    from dispfl.core.rng import stream as stream
    from dispfl.core.sparsity import erk_densities as erk_densities
    from dispfl.core.sparsity import prune_and_regrow as prune_and_regrow
    from dispfl.core.sparsity import prune_rate as prune_rate
    from dispfl.core.tensors import TensorSpec as TensorSpec
    from dispfl.core.train import Train as Train
    from dispfl.core.train import Trainer as Trainer
    from dispfl.data.datasets import load_dataset as load_dataset
    from dispfl.data.partition import IID as IID
    from dispfl.data.partition import ByColumn as ByColumn
    from dispfl.data.partition import Dirichlet as Dirichlet
    from dispfl.data.partition import Grouped as Grouped
    from dispfl.data.partition import Partition as Partition
    from dispfl.data.partition import Pathological as Pathological
    from dispfl.data.split import Split as Split
    from dispfl.errors import ConfigError as ConfigError
    from dispfl.errors import DispflError as DispflError
    from dispfl.experiment import Experiment as Experiment
    from dispfl.federation import Federation as Federation
    from dispfl.federation import run as run
    from dispfl.methods.apfl import APFL as APFL
    from dispfl.methods.base import Density as Density
    from dispfl.methods.base import GossipMethod as GossipMethod
    from dispfl.methods.base import Method as Method
    from dispfl.methods.base import Neighbourhood as Neighbourhood
    from dispfl.methods.base import PeerState as PeerState
    from dispfl.methods.base import ServerMethod as ServerMethod
    from dispfl.methods.base import initial_state as initial_state
    from dispfl.methods.base import spread_densities as spread_densities
    from dispfl.methods.da_dpfl import DADPFL as DADPFL
    from dispfl.methods.dfedavgm import DFedAvgM as DFedAvgM
    from dispfl.methods.dfedpgp import DFedPGP as DFedPGP
    from dispfl.methods.dfedsam import DFedSAM as DFedSAM
    from dispfl.methods.dispfl import DisPFL as DisPFL
    from dispfl.methods.ditto import Ditto as Ditto
    from dispfl.methods.dpsgd import DPSGD as DPSGD
    from dispfl.methods.fedala import FedALA as FedALA
    from dispfl.methods.fedavg import FedAvg as FedAvg
    from dispfl.methods.fedbn import FedBN as FedBN
    from dispfl.methods.fedfomo import FedFOMO as FedFOMO
    from dispfl.methods.fedprox import FedProx as FedProx
    from dispfl.methods.fedrep import FedPer as FedPer
    from dispfl.methods.fedrep import FedRep as FedRep
    from dispfl.methods.finetuned import DPSGDFT as DPSGDFT
    from dispfl.methods.finetuned import FedAvgFT as FedAvgFT
    from dispfl.methods.local import Local as Local
    from dispfl.methods.scaffold import SCAFFOLD as SCAFFOLD
    from dispfl.methods.ssfl import SSFL as SSFL
    from dispfl.methods.subfedavg import SubFedAvg as SubFedAvg
    from dispfl.models.networks import MLP as MLP
    from dispfl.models.networks import VGG11 as VGG11
    from dispfl.models.networks import ResNet18 as ResNet18
    from dispfl.models.networks import SmallCNN as SmallCNN
    from dispfl.peer.peer import Peer as Peer
    from dispfl.privacy.steps import Privacy as Privacy
    from dispfl.runs.callbacks import EarlyStopping as EarlyStopping
    from dispfl.runs.callbacks import StopRun as StopRun
    from dispfl.runs.run import Run as Run
    from dispfl.topology import Exponential as Exponential
    from dispfl.topology import Full as Full
    from dispfl.topology import GraphTopology as GraphTopology
    from dispfl.topology import Grid as Grid
    from dispfl.topology import RandomRegular as RandomRegular
    from dispfl.topology import Ring as Ring
    from dispfl.topology import Topology as Topology
    from dispfl.wire.codec import Wire as Wire

    __version__: str

_MODULES = {
    "APFL": "methods.apfl",
    "ConfigError": "errors",
    "DPSGD": "methods.dpsgd",
    "DPSGDFT": "methods.finetuned",
    "Density": "methods.base",
    "ByColumn": "data.partition",
    "Dirichlet": "data.partition",
    "DFedAvgM": "methods.dfedavgm",
    "DFedSAM": "methods.dfedsam",
    "DADPFL": "methods.da_dpfl",
    "DFedPGP": "methods.dfedpgp",
    "SSFL": "methods.ssfl",
    "DisPFL": "methods.dispfl",
    "DispflError": "errors",
    "Ditto": "methods.ditto",
    "EarlyStopping": "runs.callbacks",
    "Experiment": "experiment",
    "Exponential": "topology",
    "FedALA": "methods.fedala",
    "FedAvg": "methods.fedavg",
    "FedAvgFT": "methods.finetuned",
    "FedBN": "methods.fedbn",
    "FedFOMO": "methods.fedfomo",
    "FedPer": "methods.fedrep",
    "FedProx": "methods.fedprox",
    "FedRep": "methods.fedrep",
    "Federation": "federation",
    "Full": "topology",
    "GossipMethod": "methods.base",
    "GraphTopology": "topology",
    "Grid": "topology",
    "Grouped": "data.partition",
    "IID": "data.partition",
    "Layout": "core.layout",
    "Local": "methods.local",
    "MLP": "models.networks",
    "Mask": "core.packed",
    "Method": "methods.base",
    "Metric": "core.metric",
    "Neighbourhood": "methods.base",
    "PackedModel": "core.packed",
    "Partition": "data.partition",
    "Pathological": "data.partition",
    "Peer": "peer.peer",
    "PeerState": "methods.base",
    "Privacy": "privacy.steps",
    "RandomRegular": "topology",
    "ResNet18": "models.networks",
    "Ring": "topology",
    "Run": "runs.run",
    "ServerMethod": "methods.base",
    "SmallCNN": "models.networks",
    "Split": "data.split",
    "StopRun": "runs.callbacks",
    "SCAFFOLD": "methods.scaffold",
    "SubFedAvg": "methods.subfedavg",
    "TensorSpec": "core.tensors",
    "Topology": "topology",
    "Train": "core.train",
    "Trainer": "core.train",
    "VGG11": "models.networks",
    "WeightMask": "core.packed",
    "Wire": "wire.codec",
    "average_of": "core.averaging",
    "erk_densities": "core.sparsity",
    "initial_state": "methods.base",
    "gossip_average": "core.averaging",
    "hamming": "core.masks",
    "load_dataset": "data.datasets",
    "prune_and_regrow": "core.sparsity",
    "prune_rate": "core.sparsity",
    "random_mask": "core.masks",
    "run": "federation",
    "spread_densities": "methods.base",
    "stream": "core.rng",
}
__all__ = [*_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":  # importlib.metadata takes longer to import than all of this
        return import_module("importlib.metadata").version("dispfl")
    if name not in _MODULES:
        raise AttributeError(f"module 'dispfl' has no attribute {name!r}")
    return getattr(import_module(f"dispfl.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
