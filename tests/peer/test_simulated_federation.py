"""Federations on a virtual clock: an unreliable network and crashes (simulated_world.py), and
whatever members and operators may do (site_world.py).
"""

import itertools
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

import fuzz
import torch
from simulated_world import ROUNDS, check, reliable, simulate
from site_world import check_sites

CORES = os.cpu_count() or 1


def failures(
    check_seed: Callable[[int], str], least: int, share: float = 1.0
) -> dict[int, BaseException]:
    """Check seeds on all cores; return the exceptions by seed. `make fuzz` checks more of them."""
    running: dict[Future[str], int] = {}
    failed = {}
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(
        mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
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
    failed = failures(check, 10, 0.5)
    assert not failed, shown(failed)


def test_no_member_operator_disk_or_clock_brings_an_honest_site_down() -> None:
    failed = failures(check_sites, 20, 0.5)
    assert not failed, shown(failed)


def test_the_seed_alone_determines_the_trace() -> None:
    assert check(3) == check(3) != check(14)


def test_without_faults_every_peer_hears_every_neighbour_in_every_round() -> None:
    for seed in range(3):
        world = simulate(seed, faulty=False, delivery_model=reliable)
        for name, store in world.stores.items():
            assert store.rounds == list(range(ROUNDS))
            for t in range(ROUNDS):
                graph = world.context.settings.topology.online_neighbours(seed, t, world.names)
                assert store.received[t] == graph[name]
        assert not any(
            event in ("late", "behind", "refused request") for _, _, event, _ in world.trace
        )
