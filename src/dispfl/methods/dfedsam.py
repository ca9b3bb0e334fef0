"""DFedSAM: DFedAvgM whose peers look for flat minima, by sharpness-aware minimization."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from dispfl.methods.dfedavgm import DFedAvgM


class DFedSAM(DFedAvgM):
    """DFedSAM (Shi et al., ICML 2023), Algorithm 1, with one gossip step in a round.

    A local step takes the gradient at the worst nearby weights, at the cost of a second pass:

        g_1 = g(x),   g_2 = g(x + rho g_1 / |g_1|),   v <- theta v + g_2,   x <- x - eta v

    with rho = `train.sam_rho`, by default 0.01, and theta = `train.momentum`, by default 0.9.
    """

    train_defaults: ClassVar[Mapping[str, Any]] = {"momentum": 0.9, "sam_rho": 0.01}
    name: Literal["dfedsam"] = "dfedsam"  # type: ignore[assignment]
