"""Shares: how many of a step's micro-batches each rank computes, and which ones.

Comes in: how many there are, and what one takes each rank. Goes out: shares whose slowest rank is
as early as can be, and who computes which. The global batch stays the same: each micro-batch is
computed once.

Every micro-batch has a *home*, the rank that would compute it if all did equally many; its gradient
is part of that rank's sum. A rank that has more than its share gives away the ones in front of its
last (the last one's backward pass starts the reduction). Who takes them is in rank order, so that a
job in which nobody changes moves nothing.

Invariant: all ranks find the same from the same numbers: whole ones only, ties by rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from keepstep.model.micro_batches import SharedMicroBatch

LEAST_SHARE = 2  # one before the last, which alone is measured where collectives are under way


def equal_shares(total: int, ranks: int) -> tuple[int, ...]:
    """As equal as can be, the first ranks one more."""
    least, more = divmod(total, ranks)
    return tuple(least + (rank < more) for rank in range(ranks))


def best_shares(total: int, costs_ns: Sequence[int]) -> tuple[int, ...]:
    """costs_ns: of one micro-batch, by rank, each more than 0. Of those shares of at least
    `LEAST_SHARE` whose slowest rank is done first.

    Each next one goes to the rank that would have it done first: for equal pieces of work that is
    optimal (Ibaraki and Katoh, Resource Allocation Problems, 1988, chapter 5)."""
    ranks = len(costs_ns)
    assert total >= LEAST_SHARE * ranks and min(costs_ns) > 0
    shares = [LEAST_SHARE] * ranks
    done = [((LEAST_SHARE + 1) * cost, rank) for rank, cost in enumerate(costs_ns)]
    heapq.heapify(done)
    for _ in range(total - LEAST_SHARE * ranks):
        _, rank = done[0]
        shares[rank] += 1
        heapq.heapreplace(done, ((shares[rank] + 1) * costs_ns[rank], rank))
    return tuple(shares)


def step_ns(shares: Sequence[int], costs_ns: Sequence[int]) -> int:
    """When the slowest has computed its share."""
    return max(share * cost for share, cost in zip(shares, costs_ns, strict=True))


def work_of(shares: Sequence[int]) -> tuple[tuple[SharedMicroBatch, ...], ...]:
    """By rank, what it computes, in that order: what it took over first, so that it is on its way
    home meanwhile; then its own, without what it gave away."""
    homes = _homes(equal_shares(sum(shares), len(shares)))
    given: list[SharedMicroBatch] = []
    own: list[tuple[SharedMicroBatch, ...]] = []
    for share, home in zip(shares, homes, strict=True):
        kept = min(share, len(home))
        own.append((*home[: kept - 1], home[-1]))
        given += home[kept - 1 : -1]
    taken = iter(given)
    work = []
    for share, mine in zip(shares, own, strict=True):
        others = tuple(next(taken) for _ in range(share - len(mine)))
        work.append(others + mine)
    return tuple(work)


def _homes(shares: Sequence[int]) -> list[tuple[SharedMicroBatch, ...]]:
    homes, begins = [], 0
    for rank, share in enumerate(shares):
        homes.append(
            tuple(SharedMicroBatch(index, rank) for index in range(begins, begins + share))
        )
        begins += share
    return homes
