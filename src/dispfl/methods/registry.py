"""The methods by name: one line each."""

from dispfl.methods.base import GossipMethod
from dispfl.methods.dispfl import DisPFL
from dispfl.methods.local import Local

METHODS: dict[str, type[GossipMethod]] = {
    "dispfl": DisPFL,
    "local": Local,
}
