"""DFedAvgM: peers average plainly with their neighbours, then train with momentum."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from dispfl.methods.dpsgd import DPSGD


class DFedAvgM(DPSGD):
    """DFedAvgM (Sun, Li, Wang, TPAMI 2022), Algorithm 1.

    A round is D-PSGD's: x_k <- sum_j p_kj x_j over the peer and its neighbours, then local steps
    with heavy-ball momentum, which each round begins without:

        v <- theta v + g(x),   x <- x - eta v,   with theta = `train.momentum`, by default 0.9

    The personal models are evaluated, after training. `wire.values=int8` quantizes what is sent.
    """

    evaluates_global: ClassVar[bool] = False
    train_defaults: ClassVar[Mapping[str, Any]] = {"momentum": 0.9}
    name: Literal["dfedavgm"] = "dfedavgm"  # type: ignore[assignment]
