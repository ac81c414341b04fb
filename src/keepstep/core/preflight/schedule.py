"""Schedule: who measures a link with whom, and when.

Comes in: how many nodes there are, and later who is suspected. Goes out: rounds of pairs. In a
round nobody has two partners: a link that is shared measures its users.

All pairs by the circle method: one node stands still, the others walk around it; n - 1 rounds for
an even n, n for an odd one, in which one node rests each time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

Pair = tuple[int, int]  # the lower number dials
Rounds = tuple[tuple[Pair, ...], ...]
MOST_ALONE = 8  # a measurement takes some half a second (`link_probe.py`)


def all_pairs(nodes: Sequence[int]) -> Rounds:
    """Every pair once."""
    seats: list[int | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        found = []
        for one, other in zip(seats[:half], reversed(seats[half:]), strict=True):
            if one is not None and other is not None:
                found.append(pair(one, other))
        rounds.append(tuple(sorted(found)))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return tuple(rounds)


def confirming(
    suspects: Sequence[int], good: Sequence[int], pairs: Iterable[Pair], turn: int
) -> Rounds:
    """Each suspect with a partner that is known to be good, another one in each turn, and the pairs
    that were slow themselves, once more. Where these are few each has a round of its own: two that
    are slow together may share something, an uplink or a host's processors, and then neither is."""
    wanted = [
        pair(suspect, good[(place + turn) % len(good)])
        for place, suspect in enumerate(sorted(suspects))
        if good
    ]
    slow = sorted(set(pairs) - set(wanted))
    if len(slow) > MOST_ALONE:
        return packed([*wanted, *slow])
    return (*packed(wanted), *((each,) for each in slow))


def packed(pairs: Iterable[Pair]) -> Rounds:
    """Into few rounds: each pair in the first one where both are free. Every pair once."""
    rounds: list[list[Pair]] = []
    for each in dict.fromkeys(pairs):
        for taken in rounds:
            if not busy(taken) & set(each):
                taken.append(each)
                break
        else:
            rounds.append([each])
    return tuple(tuple(sorted(taken)) for taken in rounds)


def busy(pairs: Collection[Pair]) -> set[int]:
    """Who has a partner."""
    return {node for each in pairs for node in each}


def pair(one: int, other: int) -> Pair:
    return (min(one, other), max(one, other))
