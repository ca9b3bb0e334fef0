"""How many bytes a message is, in both currencies."""

from dispfl.core.packed import PackedModel

BYTES_PER_VALUE = 4


def paper_bytes(model: PackedModel) -> int:
    """The paper's currency: 4 bytes a kept value; masks are not counted."""
    return BYTES_PER_VALUE * model.values.numel()


def wire_bytes(model: PackedModel) -> int:
    """What a message really needs: its values and its packed mask."""
    return paper_bytes(model) + model.mask.bits.numel()
