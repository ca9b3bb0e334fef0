"""Random streams have names, and nothing but the names decides what they give."""

import os
import subprocess
import sys

import pytest
import torch

from dispfl.core.rng import forked_generators, global_stream, stream, stream_seed


def test_the_same_names_give_the_same_number_in_a_process_with_another_hash_salt() -> None:
    code = "from dispfl.core.rng import stream_seed; print(stream_seed(7, 'regrow', '003', 12))"
    salted = {**os.environ, "PYTHONHASHSEED": "12345"}
    answer = subprocess.run(
        [sys.executable, "-c", code], env=salted, capture_output=True, text=True, check=True
    )
    assert int(answer.stdout) == stream_seed(7, "regrow", "003", 12)


@pytest.mark.parametrize(
    "names",
    [
        (7, "regrow", "003", 13),
        (7, "regrow", "004", 12),
        (7, "evolve", "003", 12),
        (8, "regrow", "003", 12),
    ],
)
def test_changing_any_one_name_gives_another_number(names: tuple[int, str, str, int]) -> None:
    assert stream_seed(*names) != stream_seed(7, "regrow", "003", 12)


def test_names_are_not_concatenated_and_a_number_differs_from_its_text() -> None:
    assert stream_seed(0, "ab", "c") != stream_seed(0, "a", "bc")
    assert stream_seed(0, "astr:b") != stream_seed(0, "a", "b")
    assert stream_seed(0, "1") != stream_seed(0, 1)
    assert stream_seed(0) != stream_seed(0, "")


def test_stream_seeds_fill_the_range_from_0_to_2_to_the_63() -> None:
    numbers = [stream_seed(0, "range", i) for i in range(200)]
    assert all(0 <= number < 2**63 for number in numbers)
    assert min(numbers) < 2**63 // 10
    assert max(numbers) > 9 * (2**63 // 10)


def test_a_stream_restarts_each_time_it_is_requested() -> None:
    first, second = stream(0, "batches", "000", 3), stream(0, "batches", "000", 3)
    assert torch.rand(5, generator=first).equal(torch.rand(5, generator=second))
    assert not torch.rand(5, generator=first).equal(
        torch.rand(5, generator=stream(0, "batches", "001", 3))
    )


def test_global_stream_seeds_the_global_generator_and_restores_the_callers_state() -> None:
    before = torch.get_rng_state()
    with global_stream(0, "model"):
        first = torch.rand(3)
    with global_stream(0, "model"):
        assert torch.rand(3).equal(first)
    assert torch.get_rng_state().equal(before)


def test_global_stream_restores_the_callers_state_after_an_error() -> None:
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="boom"), global_stream(0, "model"):
        raise RuntimeError(f"boom {torch.rand(3)}")
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize(
    ("device", "initialized", "cards"),
    [("cpu", False, []), ("cpu", True, [0, 1]), ("cuda", False, [0, 1])],
)
def test_generators_of_initialized_gpus_are_restored_and_others_not_initialized(
    monkeypatch: pytest.MonkeyPatch, device: str, initialized: bool, cards: list[int]
) -> None:
    """Two cards that are not there: what torch would ask them and tell them."""
    states = {card: torch.full((16,), card, dtype=torch.uint8) for card in (0, 1)}
    restored: dict[int, torch.Tensor] = {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda card: states[card])
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, card: restored.update({card: state})
    )
    with forked_generators(device):
        assert not restored
    assert list(restored) == cards
    assert all(restored[card].equal(states[card]) for card in cards)
