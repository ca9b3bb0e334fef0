"""The published models of a peer: how long they are kept."""

import asyncio

import torch

from dispfl.core.packed import PackedModel
from dispfl.peer.node_context import PublishedModels


def model(number: float) -> PackedModel:
    return PackedModel.pack(torch.full((3,), float(number)), torch.ones(3, dtype=torch.bool))


def rounds(published: PublishedModels, up_to: int) -> list[int]:
    async def there(t: int) -> bool:
        return await published.wait_for(t, 0) is not None

    return [t for t in range(up_to) if asyncio.run(there(t))]


def test_two_rounds_are_always_kept() -> None:
    published = PublishedModels()
    for t in range(5):
        published.publish(t, model(t), [], silent=[])
    assert rounds(published, 6) == [3, 4]
    assert published.is_past(2)
    assert not published.is_past(5)


def test_an_older_round_is_kept_until_all_receivers_have_fetched_it() -> None:
    published = PublishedModels()
    published.publish(0, model(0), ["bob", "carol"], silent=[])
    published.mark_fetched(0, "bob")
    for t in range(1, 5):
        published.publish(t, model(t), [], silent=[])
    assert rounds(published, 5) == [0, 3, 4]
    assert published.pending() == {"carol"}
    published.mark_fetched(0, "carol")
    published.publish(5, model(5), [], silent=[])
    assert rounds(published, 6) == [4, 5]


def test_no_model_is_kept_for_absent_peers_and_at_most_eight_rounds_are_kept() -> None:
    published = PublishedModels()
    for t in range(5):
        published.publish(t, model(t), ["carol"], silent=["carol"])
    assert rounds(published, 5) == [3, 4]
    for t in range(5, 30):
        published.publish(t, model(t), ["carol"], silent=[])
    assert rounds(published, 30) == list(range(22, 30))


def test_wait_for_returns_once_the_model_is_published() -> None:
    async def wait_early() -> float:
        published = PublishedModels()
        waiting = asyncio.create_task(published.wait_for(1, 60))
        for t in range(2):
            await asyncio.sleep(0)
            published.publish(t, model(t), [], silent=[])
        found = await waiting
        assert found is not None
        return float(found.values[0])

    assert asyncio.run(wait_early()) == 1.0


def test_whom_we_choose_may_change_until_all_have_answered() -> None:
    async def wait_for_answers() -> list[int | None]:
        published = PublishedModels()
        published.publish(0, model(0), [], silent=[], chosen=["bob", "carol"])
        assert published.chooses(0, "bob")
        counts = [await published.wait_for_agreed(0, 0.0)]
        waiting = asyncio.create_task(published.wait_for_agreed(0, 60))
        await asyncio.sleep(0)
        published.agree(0, ["carol"])
        assert not published.chooses(0, "bob")  # it did not answer, and was given up
        assert published.chooses(0, "carol")
        counts.append(await waiting)
        published.publish(1, model(1), ["bob"], silent=[])
        counts.append(await published.wait_for_agreed(1, 0.0))  # there was nobody to ask
        return counts

    assert asyncio.run(wait_for_answers()) == [None, 1, 0]


def test_skipped_rounds_are_past() -> None:
    published = PublishedModels()
    published.publish(2, model(2), [], silent=[])
    published.publish(7, model(7), [], silent=[])
    assert published.is_past(5)
    assert rounds(published, 9) == [7]
