"""The methods by name: one line each."""

from dispfl.methods.base import Method
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.ditto import Ditto
from dispfl.methods.dpsgd import DPSGD
from dispfl.methods.fedavg import FedAvg
from dispfl.methods.fedfomo import FedFOMO
from dispfl.methods.finetuned import DPSGDFT, FedAvgFT
from dispfl.methods.local import Local
from dispfl.methods.subfedavg import SubFedAvg

METHODS: dict[str, type[Method]] = {
    "dispfl": DisPFL,
    "local": Local,
    "fedavg": FedAvg,
    "fedavg-ft": FedAvgFT,
    "ditto": Ditto,
    "fedfomo": FedFOMO,
    "subfedavg": SubFedAvg,
    "dpsgd": DPSGD,
    "dpsgd-ft": DPSGDFT,
}
