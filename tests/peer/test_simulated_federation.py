"""Federations on a virtual clock: an unreliable network and crashes (simulated_world.py), and
whatever members and operators may do (site_world.py).
"""

import asyncio
import itertools
import os
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

import fuzz
import torch
from simulated_world import (
    DEGREE,
    LIMIT,
    ROUNDS,
    Pairing,
    World,
    check,
    check_async,
    check_choices,
    reliable,
    simulate,
)
from site_world import check_sites

from dispfl.peer.setup.spec import federation_spec, spec_difference
from dispfl.processes import training_processes
from dispfl.round.exchange import agreed_choices, choices_of, exchange_graph, round_senders
from dispfl.testing.virtual_time import run

CORES = os.cpu_count() or 1


def failures(
    check_seed: Callable[[int], str], least: int, share: float = 1.0
) -> dict[int, BaseException]:
    """Check seeds on all cores; return the exceptions by seed. `make fuzz` checks more of them."""
    running: dict[Future[str], int] = {}
    failed = {}
    with ProcessPoolExecutor(
        mp_context=training_processes(), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        for seed in itertools.chain(fuzz.seeds(least, share), [None]):
            if seed is not None:
                running[pool.submit(check_seed, seed)] = seed
            while running and (seed is None or len(running) > 2 * CORES):
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    number = running.pop(done)
                    if problem := done.exception():
                        failed[number] = problem
    return failed


def shown(failed: dict[int, BaseException]) -> str:
    return f"seeds {sorted(failed)}" + "".join(
        f"\n{seed}: {failed[seed]!r}" for seed in sorted(failed)
    )


def test_all_peers_finish_and_never_mix_rounds_or_count_a_model_twice() -> None:
    """Also: finite weights, exact densities, no round beyond twice its deadline, fast recovery
    after a restart."""
    failed = failures(check, 5, 0.5)
    assert not failed, shown(failed)


def test_peers_that_choose_each_other_never_receive_more_models_than_the_degree() -> None:
    """Also: all of the above. Those that choose each other negotiate in every round."""
    failed = failures(check_choices, 3, 0.25)
    assert not failed, shown(failed)


def test_no_member_operator_disk_or_clock_brings_an_honest_site_down() -> None:
    failed = failures(check_sites, 10, 0.5)
    assert not failed, shown(failed)


def test_peers_that_do_not_wait_take_the_last_step_whatever_happens_to_others() -> None:
    """Also: a step lasts as long as its training, nobody skips one that most others have not begun,
    and no model is averaged twice, or after a newer one of its sender."""
    failed = failures(check_async, 6, 0.25)
    assert not failed, shown(failed)


def test_a_late_peer_that_does_not_wait_begins_with_the_average_of_what_others_have() -> None:
    world = World(1, delivery_model=reliable, mode="async")

    async def late() -> None:
        *early, last = world.names
        running = [asyncio.create_task(world.live(name)) for name in early]
        await asyncio.sleep(20.0)
        assert min(store.rounds[-1] for store in world.stores.values() if store.rounds) >= 5
        await asyncio.gather(*running, world.live(last))

    run(late(), LIMIT)
    store = world.stores[world.names[-1]]
    assert 5 <= store.rounds[0] < ROUNDS - 1
    assert store.rounds[-1] == ROUNDS - 1
    assert len(store.received[store.rounds[0]]) == DEGREE


def test_waiting_for_nobody_is_a_term_of_the_federation() -> None:
    specs = []
    for mode in ("sync", "async"):
        context = World(1, mode=mode).context
        specs.append(federation_spec("f", context, context.layout, context.first_weights, 0.5))
    difference = spec_difference(specs[0], specs[1])
    assert difference is not None
    assert "schedule is not given here and async there" in difference


def test_the_seed_alone_determines_the_trace() -> None:
    assert check(3) == check(3) != check(14)


def test_without_faults_peers_that_choose_each_other_hear_whom_the_simulator_says() -> None:
    world = simulate(1, faulty=False, delivery_model=reliable, method=Pairing(density=0.5))
    context = world.context
    agreed_rounds = 0
    for t in range(ROUNDS):
        graph = exchange_graph(context, t)
        choices = choices_of(context, t, graph, world.start)
        senders = round_senders(context, t, graph, choices)
        for name, store in world.stores.items():
            assert store.received[t] == senders[name]
            assert store.missed[t] == []
            agreed_rounds += bool(agreed_choices(graph, choices, name))
    assert 0 < agreed_rounds < ROUNDS * len(world.names)
    # Nobody waits at the end for requests that never come.
    assert not any(event == "stopped serving" for _, _, event, _ in world.trace)


def test_without_faults_every_peer_hears_every_neighbour_in_every_round() -> None:
    for seed in range(2):
        world = simulate(seed, faulty=False, delivery_model=reliable)
        for name, store in world.stores.items():
            assert store.rounds == list(range(ROUNDS))
            for t in range(ROUNDS):
                graph = world.context.settings.topology.online_neighbours(seed, t, world.names)
                assert store.received[t] == graph[name]
        assert not any(
            event in ("late", "behind", "refused request") for _, _, event, _ in world.trace
        )
