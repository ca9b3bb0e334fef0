"""What others may still ask for."""

import asyncio

import torch

from dispfl.core.packed import PackedModel
from dispfl.peer.shelf import Shelf


def model(number: float) -> PackedModel:
    return PackedModel.pack(torch.full((3,), float(number)), torch.ones(3, dtype=torch.bool))


def gone(*names: str):  # type: ignore[no-untyped-def]
    return lambda name: name in names


def rounds(shelf: Shelf, up_to: int) -> list[int]:
    async def there(t: int) -> bool:
        return await shelf.wait_for(t, 0) is not None

    return [t for t in range(up_to) if asyncio.run(there(t))]


def test_two_rounds_are_kept_for_those_who_are_slower() -> None:
    shelf = Shelf()
    for t in range(5):
        shelf.publish(t, model(t), [], gone())
    assert rounds(shelf, 6) == [3, 4]
    assert shelf.is_past(2)
    assert not shelf.is_past(5)


def test_an_older_round_stays_while_somebody_waits_for_it() -> None:
    shelf = Shelf()
    shelf.publish(0, model(0), ["bob", "carol"], gone())
    shelf.fetched(0, "bob")
    for t in range(1, 5):
        shelf.publish(t, model(t), [], gone())
    assert rounds(shelf, 5) == [0, 3, 4]
    assert shelf.awaited() == {"carol"}
    shelf.fetched(0, "carol")
    shelf.publish(5, model(5), [], gone())
    assert rounds(shelf, 6) == [4, 5]


def test_nobody_keeps_a_model_for_somebody_who_is_gone_and_eight_rounds_are_the_most() -> None:
    shelf = Shelf()
    for t in range(5):
        shelf.publish(t, model(t), ["carol"], gone("carol"))
    assert rounds(shelf, 5) == [3, 4]
    for t in range(5, 30):
        shelf.publish(t, model(t), ["carol"], gone())
    assert rounds(shelf, 30) == list(range(22, 30))


def test_who_asks_early_waits_until_the_model_is_there() -> None:
    async def ask_early() -> float:
        shelf = Shelf()
        asking = asyncio.create_task(shelf.wait_for(1, 60))
        for t in range(2):
            await asyncio.sleep(0)
            shelf.publish(t, model(t), [], gone())
        found = await asking
        assert found is not None
        return float(found.values[0])

    assert asyncio.run(ask_early()) == 1.0


def test_after_a_jump_skipped_rounds_are_past() -> None:
    shelf = Shelf()
    shelf.publish(2, model(2), [], gone())
    shelf.publish(7, model(7), [], gone())
    assert shelf.is_past(5)
    assert rounds(shelf, 9) == [7]
