"""FedBN: a server averages all but the normalization layers, for peers with shifted features."""

from typing import Literal

from dispfl.methods.base import Patterns
from dispfl.methods.fedavg import FedAvg


class FedBN(FedAvg):
    """FedBN (Li et al., ICLR 2021): FedAvg with private normalization layers, Algorithm 1.

    Their scales and shifts are the peer's own, as running means and variances always are. A peer is
    evaluated with the global model and its own normalization layers.
    """

    name: Literal["fedbn"] = "fedbn"  # type: ignore[assignment]
    private: Patterns = ("norm",)
    """The normalization layers, which never leave a peer."""
