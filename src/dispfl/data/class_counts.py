"""How many samples of each class a peer gets: whole numbers within the supply of each class."""

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]

_FITTING_STEPS = 1000
"""Enough for alpha = 0.01 with every sample in use; rounding corrects the small excess that may
remain."""


def log_priors(
    alpha: float, rows: int, classes: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Draw logarithms of Dirichlet(alpha) samples, each row up to a constant.

    A Dirichlet draw is a row of Gamma(alpha) draws, normalised. Most of them underflow when alpha
    is small, so they are drawn as logarithms: Gamma(alpha) is distributed as Gamma(alpha + 1) *
    U^(1/alpha).
    """
    shape = (rows, classes)
    return np.log(rng.standard_gamma(alpha + 1, shape)) + np.log1p(-rng.random(shape)) / alpha


def fit_to_supply(log_x: NDArray[np.float64], row_sums: Counts, supply: Counts) -> Counts:
    """Fit the priors to the supply and round: rows sum to `row_sums`, columns to at most `supply`.

    Sinkhorn's iteration with columns that are capped instead of matched: scale each row to its sum,
    scale down each column that is over its supply, repeat. The limit is the nearest such matrix to
    the priors (in Kullback-Leibler divergence); priors that fit the supply stay as drawn. Rows are
    kept as logarithms, because with a small alpha entries differ by a thousand orders of magnitude.
    """
    for _ in range(_FITTING_STEPS):
        log_x = log_x - log_x.max(axis=1, keepdims=True)
        x = np.exp(log_x)
        x *= (row_sums / x.sum(axis=1))[:, None]
        columns = x.sum(axis=0)
        excess = np.maximum(columns / supply, 1.0)
        if (columns - supply).max() < 0.5:
            break
        log_x -= np.log(excess)
    return _round(x / excess, log_x, row_sums, supply)


def _round(
    x: NDArray[np.float64], preference: NDArray[np.float64], row_sums: Counts, supply: Counts
) -> Counts:
    """Round x to integers with rows that sum to `row_sums` and columns to at most `supply`.

    No row or column of x may exceed its sum. Each cell is rounded down; the largest remainders are
    rounded up while their row needs more and their column has room. A row that still needs more
    takes it from the columns with room, in the order of its preference.
    """
    counts = np.floor(x).astype(np.int64)
    need = row_sums - counts.sum(axis=1)
    room = supply - counts.sum(axis=0)

    remainders = x - counts
    rounds_up = remainders > 1e-3  # smaller ones are rounding errors
    largest_first = np.argsort(-remainders[rounds_up], kind="stable")
    for row, column in np.argwhere(rounds_up)[largest_first]:
        if need[row] and room[column]:
            counts[row, column] += 1
            need[row] -= 1
            room[column] -= 1

    for row in np.flatnonzero(need):
        order = np.argsort(-preference[row], kind="stable")
        taken = np.diff(np.minimum(np.cumsum(room[order]), need[row]), prepend=0)
        counts[row, order] += taken
        room[order] -= taken
    return counts


def unequal_sizes(weights: NDArray[np.float64], total: int, least: int) -> Counts:
    """Divide a total in proportion to the weights, into whole numbers of at least `least`.

    A peer whose share is too small gets `least`, and the others divide what remains; each
    repetition settles at least one more peer. The total must be large enough for all, so the
    largest share always is.
    """
    settled = np.zeros(len(weights), np.bool_)
    while True:
        remaining = total - least * settled.sum()
        shares = np.where(settled, least, remaining * weights / weights[~settled].sum())
        small = ~settled & (shares < least)
        if not small.any() or (settled | small).all():
            break
        settled |= small
    counts = np.maximum(np.floor(shares).astype(np.int64), least)
    remainders = np.where(settled, -1.0, shares - counts)
    counts[np.argsort(-remainders, kind="stable")[: total - counts.sum()]] += 1
    return counts


def split_totals(totals: Counts, sizes: Counts) -> Counts:
    """Divide class totals among peers of these sizes, in equal label proportions, rounded."""
    if (sizes == sizes[0]).all():
        return split_evenly(totals, len(sizes))
    exact = sizes[:, None] * totals / totals.sum()
    return _round(exact, exact, sizes, totals)


def split_evenly(totals: Counts, members: int) -> Counts:
    """Divide class totals among members: counts and row sums differ by at most one.

    Round robin: of the samples sorted by class, member m takes every members-th, starting with the
    m-th.
    """
    edges = np.cumsum([0, *totals])
    taken_before: Counts = -((np.arange(members)[:, None] - edges) // members)
    return np.diff(taken_before, axis=1)


def proportional(counts: Counts, total: int) -> Counts:
    """Scale each row of counts to sum to `total`, by the method of largest remainders."""
    scaled, remainders = np.divmod(counts * total, counts.sum(axis=1, keepdims=True))
    rank = np.argsort(np.argsort(-remainders, axis=1, kind="stable"), axis=1)
    rounded_up: NDArray[np.bool_] = rank < total - scaled.sum(axis=1, keepdims=True)
    return scaled + rounded_up


def assign_classes(
    supply: Counts, peers: int, per_peer: int, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Assign distinct classes to every peer, as (peers, classes), each equally often up to one.

    A peer takes the classes with the most free places, ties at random. So free places never differ
    by more than one between classes, and never run out early.
    """
    classes = len(supply)
    places, remaining = divmod(peers * per_peer, classes)
    free = np.full(classes, places)
    free[np.lexsort((rng.random(classes), -supply))[:remaining]] += 1
    held = np.zeros((peers, classes), np.bool_)
    for peer in range(peers):
        taken = np.lexsort((rng.random(classes), -free))[:per_peer]
        held[peer, taken] = True
        free[taken] -= 1
    return held


def fill_evenly(held: NDArray[np.bool_], supply: Counts, n: int) -> Counts:
    """Give each peer n samples of its classes; the counts of its classes differ by at most one.

    If the supply is too small, n is lowered to the largest possible number; 0 if some class has too
    few for one each.
    """
    per_peer = int(held[0].sum())
    holders = held.sum(axis=0)
    even, more = divmod(n, per_peer)
    limit = int((supply[holders > 0] // holders[holders > 0]).min())
    if even > limit:
        even = limit
        more = per_peer - 1
    if even == 0:
        return np.zeros(held.shape, np.int64)

    extra = np.zeros_like(held)
    for _ in range(more):
        grown = one_more_each(held, extra, supply - even * holders)
        if grown is None:
            break
        extra = grown
    return held * np.int64(even) + extra


def fill_unevenly(held: NDArray[np.bool_], supply: Counts, sizes: Counts) -> Counts:
    """Give each peer its number of samples; the counts of its classes differ by at most one.

    Where a class is too small, the peers that hold it get less, in proportion to their sizes.
    """
    per_peer = int(held[0].sum())
    demand = (held * sizes[:, None]).sum(axis=0) / per_peer
    supplied = np.minimum(1.0, supply / np.maximum(demand, 1.0))
    resolved = np.floor(sizes * np.where(held, supplied, 1.0).min(axis=1) + 1e-9).astype(np.int64)
    even, more = np.divmod(resolved, per_peer)

    counts: Counts = held * even[:, None]
    room = supply - counts.sum(axis=0)
    for peer, needed in enumerate(more):
        labels = np.flatnonzero(held[peer] & (room > 0))
        taken = labels[np.argsort(-room[labels], kind="stable")][:needed]
        counts[peer, taken] += 1
        room[taken] -= 1
    return counts


def one_more_each(
    held: NDArray[np.bool_], extra: NDArray[np.bool_], room: Counts
) -> NDArray[np.bool_] | None:
    """Give every peer one more extra sample, of a class it holds and has no extra of.

    None if that is impossible. Where a peer's classes have no room left, other peers swap: we
    search chains of "a peer with an extra of this class could have an extra of that class instead"
    for one that ends at a class with room. These are the augmenting paths of bipartite matching, so
    an assignment is found whenever there is one.
    """
    extra = extra.copy()
    room = room - extra.sum(axis=0)
    for peer in range(len(held)):
        labels = np.flatnonzero(held[peer] & ~extra[peer])
        queue: list[int] = labels[np.argsort(-room[labels], kind="stable")].tolist()
        takers: dict[int, tuple[int, int | None]] = dict.fromkeys(queue, (peer, None))
        for label in queue:  # grows during the loop
            if room[label]:
                break
            owners = np.flatnonzero(extra[:, label])
            could_take = held[owners] & ~extra[owners]
            for instead in np.flatnonzero(could_take.any(axis=0)).tolist():
                if instead not in takers:
                    taker = int(owners[could_take[:, instead].argmax()])
                    takers[instead] = (taker, label)
                    queue.append(instead)
        else:
            return None

        room[label] -= 1
        taker, given_up = takers[label]
        while given_up is not None:
            extra[taker, label] = True
            extra[taker, given_up] = False
            label = given_up
            taker, given_up = takers[label]
        extra[peer, label] = True
    return extra
