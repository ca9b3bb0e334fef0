"""How many bytes a model is in the paper's currency; what is really sent, the codec knows."""

from dispfl.core.packed import PackedModel

BYTES_PER_VALUE = 4


def paper_bytes(model: PackedModel) -> int:
    """4 bytes a kept value; masks are not counted."""
    return BYTES_PER_VALUE * model.values.numel()
