"""How many samples of each class a peer gets: whole numbers with given row sums, within the supply of each class."""

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]

_FITTING_STEPS = 1000
"""Enough for alpha = 0.01 with every sample in use; what little is over its supply after that, rounding repairs."""


def log_priors(alpha: float, rows: int, classes: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Logarithms of Dirichlet(alpha) draws, each row up to a constant.

    A Dirichlet draw is a row of Gamma(alpha) draws, normalised. Most of them underflow when alpha is small, so they
    are drawn as logarithms: Gamma(alpha) is distributed as Gamma(alpha + 1) * U^(1/alpha).
    """
    shape = (rows, classes)
    return np.log(rng.standard_gamma(alpha + 1, shape)) + np.log1p(-rng.random(shape)) / alpha


def fit_to_supply(log_x: NDArray[np.float64], row_sums: Counts, supply: Counts) -> Counts:
    """Fit the priors to the supply and round: rows sum to `row_sums`, columns to at most `supply`.

    Sinkhorn's iteration with columns that are capped instead of matched: scale each row to its sum, scale down each
    column that is over its supply, repeat. The limit is the nearest such matrix to the priors (in Kullback-Leibler
    divergence); priors that never meet a shortage stay as drawn. Rows are kept as logarithms, because a small
    alpha sets entries apart by a thousand orders of magnitude.
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


def _round(x: NDArray[np.float64], preference: NDArray[np.float64], row_sums: Counts, supply: Counts) -> Counts:
    """Whole numbers near x with rows that sum to `row_sums` and columns to at most `supply`.

    No row or column of x may be over its sum. Each cell is rounded down; the largest remainders are rounded up while
    their row needs it and their column has room. What a row still lacks then, it takes from the columns that have
    room, in the order of its preference.
    """
    counts = np.floor(x).astype(np.int64)
    need, room = row_sums - counts.sum(axis=1), supply - counts.sum(axis=0)
    remainders = x - counts
    rounds_up = remainders > 1e-3  # what is smaller is an accident of the arithmetic and says nothing of preference
    for row, column in np.argwhere(rounds_up)[np.argsort(-remainders[rounds_up], kind="stable")]:
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


def share(totals: Counts, members: int) -> Counts:
    """Share class totals among members, each count equal up to one, each row sum too.

    As one deals cards: the samples lie in a row, sorted by class, and member m takes every members-th from the m-th.
    """
    edges = np.cumsum([0, *totals])
    taken_before: Counts = -((np.arange(members)[:, None] - edges) // members)
    return np.diff(taken_before, axis=1)


def proportional(counts: Counts, total: int) -> Counts:
    """Scale each row of counts to sum to `total`, in proportion, by the method of largest remainders."""
    scaled, remainders = np.divmod(counts * total, counts.sum(axis=1, keepdims=True))
    rank = np.argsort(np.argsort(-remainders, axis=1, kind="stable"), axis=1)
    rounded_up: NDArray[np.bool_] = rank < total - scaled.sum(axis=1, keepdims=True)
    return scaled + rounded_up


def deal_classes(supply: Counts, peers: int, each: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Deal `each` distinct classes to every peer, each class equally often up to one: True where a peer holds a class.

    A peer takes the classes with most free places, ties at random. So free places never differ by more than one
    between classes, and never run out early.
    """
    classes = len(supply)
    places, left_over = divmod(peers * each, classes)
    free = np.full(classes, places)
    free[np.lexsort((rng.random(classes), -supply))[:left_over]] += 1
    held = np.zeros((peers, classes), np.bool_)
    for mine in held:
        taken = np.lexsort((rng.random(classes), -free))[:each]
        mine[taken] = True
        free[taken] -= 1
    return held


def fill_evenly(held: NDArray[np.bool_], supply: Counts, n: int) -> Counts:
    """Give each peer n samples of its classes, equally many of each up to one.

    Where the supply does not reach, the largest number that it does; 0 if not even one of each class.
    """
    each, holders = int(held[0].sum()), held.sum(axis=0)
    even, more = divmod(n, each)
    limit = int((supply[holders > 0] // holders[holders > 0]).min())
    if even > limit:
        even, more = limit, each - 1
    if even == 0:
        return np.zeros(held.shape, np.int64)
    extra = np.zeros_like(held)
    for _ in range(more):
        grown = one_more_each(held, extra, supply - even * holders)
        if grown is None:
            break
        extra = grown
    return held * np.int64(even) + extra


def one_more_each(held: NDArray[np.bool_], extra: NDArray[np.bool_], room: Counts) -> NDArray[np.bool_] | None:
    """Give every peer one more extra sample, of a class it holds and has no extra of; None if there is no way.

    Where a peer's classes have no room left, others make room: we search chains of "whoever has an extra of this
    class could have one of that class instead" for one that ends at a class with room. These are the augmenting
    paths of bipartite matching, so a way is found whenever there is one.
    """
    extra, room = extra.copy(), room - extra.sum(axis=0)
    for peer in range(len(held)):
        mine = np.flatnonzero(held[peer] & ~extra[peer])
        queue: list[int] = mine[np.argsort(-room[mine], kind="stable")].tolist()
        takers: dict[int, tuple[int, int | None]] = dict.fromkeys(queue, (peer, None))
        for label in queue:  # grows as we go
            if room[label]:
                break
            others = np.flatnonzero(extra[:, label])
            could_take = held[others] & ~extra[others]
            for instead in np.flatnonzero(could_take.any(axis=0)).tolist():
                if instead not in takers:
                    takers[instead] = (int(others[could_take[:, instead].argmax()]), label)
                    queue.append(instead)
        else:
            return None
        room[label] -= 1
        taker, given_up = takers[label]
        while given_up is not None:
            extra[taker, label], extra[taker, given_up] = True, False
            label = given_up
            taker, given_up = takers[label]
        extra[peer, label] = True
    return extra
