"""Models at rest: kept values and one bit a parameter."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dispfl.core.packed import PackedModel, WeightMask


def test_a_mask_of_ten_is_two_bytes_least_significant_bit_first() -> None:
    mask = torch.tensor([1, 0, 1, 0, 0, 0, 0, 1, 0, 1], dtype=torch.bool)
    packed = WeightMask.pack(mask)
    assert packed.bits.tolist() == [0b10000101, 0b00000010]
    assert (packed.size, packed.kept) == (10, 4)
    assert packed.unpack().equal(mask)


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_any_mask_round_trips(flags: list[bool]) -> None:
    mask = torch.tensor(flags)
    packed = WeightMask.pack(mask)
    assert packed.unpack().equal(mask)
    assert packed.unpack().dtype == torch.bool
    assert packed.kept == sum(flags)
    assert packed.bits.numel() == -(-len(flags) // 8)


@given(
    st.lists(
        st.tuples(st.floats(width=32, allow_nan=False), st.booleans()), min_size=1, max_size=40
    )
)
def test_any_model_round_trips_and_is_zero_outside_its_mask(
    pairs: list[tuple[float, bool]],
) -> None:
    weights, mask = (
        torch.tensor([value for value, _ in pairs]),
        torch.tensor([kept for _, kept in pairs]),
    )
    values, unpacked = PackedModel.pack(weights, mask).unpack()
    assert unpacked.equal(mask)
    assert values.tolist() == [value if kept else 0.0 for value, kept in pairs]


def test_minus_zero_is_stored_as_zero_so_that_equal_models_have_equal_bytes() -> None:
    weights = torch.tensor([-0.0, -0.0, 1.0])
    model = PackedModel.pack(weights, torch.tensor([True, False, True]))
    assert model.values.view(torch.int32).tolist() == [0, 0x3F800000]
    assert model.unpack()[0].view(torch.int32).tolist() == [0, 0, 0x3F800000]
    assert weights.signbit().tolist() == [True, True, False]  # the caller's vector is as it was


def test_a_packed_model_takes_4_bytes_a_kept_value_and_1_bit_a_parameter() -> None:
    mask = torch.zeros(1000, dtype=torch.bool)
    mask[:250] = True
    model = PackedModel.pack(torch.randn(1000), mask)
    assert model.values.untyped_storage().nbytes() == 4 * 250
    assert model.mask.bits.untyped_storage().nbytes() == 1000 // 8


def test_unpacking_returns_a_new_vector() -> None:
    model = PackedModel.pack(torch.tensor([1.0, 2.0]), torch.tensor([True, True]))
    model.unpack()[0].zero_()
    assert model.unpack()[0].tolist() == [1.0, 2.0]
