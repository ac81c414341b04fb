"""Schedule: which bytes of a copy go in which idle span of the network.

Comes in: the idle spans of one step, what is to be copied, what a chunk costs on the link. Goes
out: a Plan: chunks in order, each with its span, what they leave of every span, by how much they
exceed the last one, and why. Moves nothing and measures nothing.

The algorithm is that of GEMINI (Wang et al., SOSP 2023, section 5, algorithm 2) with what its
printed form lacks put right: a chunk takes its *own* time from the span's budget, one copy less is
sent than there are replicas, a span with less than the start-up time left is left, and each chunk
says in which span it goes.

Invariant: every byte of every copy is in exactly one chunk; no chunk is larger than its sub-buffer;
in every span but the last the chunks take no more than mu of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

from keepstep.model.rhythm import Told
from keepstep.model.units import S_NS, human_bytes, human_ns

TOLERATED_RATIO = 0.01  # of a step: what copies may add to it on average
MOST_STEPS = 4  # a copy that takes longer is not helped by waiting for idle spans


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a chunk on the link: alpha + bytes / bandwidth."""

    alpha_ns: int
    bytes_per_s: int

    def __post_init__(self) -> None:
        assert self.alpha_ns >= 0 and self.bytes_per_s > 0, self

    def of(self, nbytes: int) -> int:
        """Nanoseconds, rounded up."""
        return self.alpha_ns + -(-nbytes * S_NS // self.bytes_per_s)

    def fitting(self, budget_ns: int) -> int:
        """The most bytes that cost no more than that; 0 when not even the start does."""
        return max(0, budget_ns - self.alpha_ns) * self.bytes_per_s // S_NS


@dataclass(frozen=True, slots=True)
class Reserve:
    """Memory at the receiving end (GEMINI's R) in equal parts (p): one is drained while the next
    one is filled."""

    nbytes: int
    parts: int

    def __post_init__(self) -> None:
        assert 1 <= self.parts <= self.nbytes, self

    @property
    def chunk_bytes(self) -> int:
        return self.nbytes // self.parts


@dataclass(frozen=True, slots=True)
class Chunk:
    """`at_ns`: into the span, when all before it took what they should."""

    span: int
    copy: int
    offset_bytes: int
    nbytes: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class Plan:
    """`budget_ns`, `used_ns`: of each span, what chunks may take and what they take. `overflow_ns`:
    by how much they exceed the last one.

    `spread_steps`: in so many steps' idle spans everything fits, if a copy may take longer than a
        step; None when not in MOST_STEPS.
    """

    chunks: tuple[Chunk, ...]
    budget_ns: tuple[int, ...]
    used_ns: tuple[int, ...]
    overflow_ns: int
    spread_steps: int | None
    why: str

    @property
    def left_ns(self) -> int:
        """Of the budgets."""
        return sum(
            max(0, budget - used) for budget, used in zip(self.budget_ns, self.used_ns, strict=True)
        )

    def every_steps(self, step_ns: int, tolerated_ratio: float = TOLERATED_RATIO) -> int:
        """To copy every so many steps keeps what the overflow adds to a step, on average, within
        `tolerated_ratio` of it."""
        return max(1, -(-self.overflow_ns // max(1, int(tolerated_ratio * step_ns))))

    def added_ns(self, every_steps: int) -> float:
        """To a step, on average."""
        return self.overflow_ns / every_steps


def chunk_size(
    budget_ns: int | None, left_bytes: int, chunk_bytes: int, cost: Cost, least_bytes: int = 1
) -> int:
    """The next chunk's bytes under what is left of a span's budget (None: no bound); 0: leave the
    span.

    `least_bytes`: smaller ones are not worth their start, unless they finish the copy.
    """
    size = min(left_bytes, chunk_bytes)
    if budget_ns is not None and cost.of(size) > budget_ns:
        size = cost.fitting(budget_ns)
    return size if size >= min(least_bytes, left_bytes, chunk_bytes) else 0


def plan(
    spans_ns: Sequence[int],
    copies: int,
    nbytes: int,
    reserve: Reserve,
    cost: Cost,
    mu: float,
    least_bytes: int = 1,
    names: str = "step",
) -> Plan:
    """Place `copies` of `nbytes` each into a step's idle spans, the last of which has no bound.

    `mu`, in (0, 1]: the part of a span that is counted on. `names`: what the spans are of, for the
    sentence.
    """
    assert 0 < mu <= 1, mu
    spans_ns = spans_ns or (0,)
    budgets = tuple(int(mu * span) for span in spans_ns)
    laid = _lay(
        chain(budgets[:-1], (None,)), copies, nbytes, reserve.chunk_bytes, cost, least_bytes
    )
    chunks = tuple(laid)
    used = [0] * len(budgets)
    for chunk in chunks:
        used[chunk.span] += cost.of(chunk.nbytes)
    overflow_ns = max(0, used[-1] - budgets[-1])
    steps = (
        1
        if not overflow_ns
        else _steps_to_fit(budgets, copies, nbytes, reserve.chunk_bytes, cost, least_bytes)
    )
    why = _words(chunks, budgets, used, overflow_ns, steps, names)
    return Plan(chunks, budgets, tuple(used), overflow_ns, steps, why)


def plan_of(told: Told, idle: Iterable[tuple[int, int]]) -> Plan:
    """One copy of a step, with what the keeper has measured, in spans (begin, end) that all ranks
    leave idle."""
    reserve = Reserve(told.reserve_bytes, max(1, told.reserve_bytes // told.chunk_bytes))
    cost = Cost(told.alpha_ns, told.bytes_per_s)
    return plan(
        [end - begin for begin, end in idle],
        1,
        told.step_bytes,
        reserve,
        cost,
        told.mu,
        told.least_bytes,
    )


def _lay(
    budgets: Iterable[int | None],
    copies: int,
    nbytes: int,
    chunk_bytes: int,
    cost: Cost,
    least_bytes: int = 1,
) -> Iterator[Chunk]:
    """Chunks in order, until every copy is placed or no span is left."""
    copy, offset = 0, 0
    if not nbytes:
        return
    for span, budget in enumerate(budgets):
        used_ns = 0
        while copy < copies:
            left_ns = None if budget is None else budget - used_ns
            size = chunk_size(left_ns, nbytes - offset, chunk_bytes, cost, least_bytes)
            if not size:
                break
            yield Chunk(span, copy, offset, size, used_ns)
            used_ns += cost.of(size)
            offset += size
            if offset == nbytes:
                copy, offset = copy + 1, 0
        if copy == copies:
            return


def _steps_to_fit(
    budgets: tuple[int, ...],
    copies: int,
    nbytes: int,
    chunk_bytes: int,
    cost: Cost,
    least_bytes: int,
) -> int | None:
    """In how many steps' spans, all bounded, everything fits."""
    placed, last = 0, 0
    for chunk in _lay(
        chain.from_iterable(repeat(budgets, MOST_STEPS)),
        copies,
        nbytes,
        chunk_bytes,
        cost,
        least_bytes,
    ):
        placed, last = placed + chunk.nbytes, chunk.span
    return last // len(budgets) + 1 if placed == copies * nbytes else None


def _words(
    chunks: Sequence[Chunk],
    budgets: Sequence[int],
    used: Sequence[int],
    overflow_ns: int,
    steps: int | None,
    names: str,
) -> str:
    total = human_bytes(sum(chunk.nbytes for chunk in chunks))
    spans = len({chunk.span for chunk in chunks})
    head = (
        f"{total} in {len(chunks)} chunks take {human_ns(sum(used))} of the "
        f"{human_ns(sum(budgets))} that {names}s leave"
    )
    if not overflow_ns:
        return f"{head}, in {spans} of {len(budgets)} idle spans"
    spread = (
        f"{steps} {names}s have room for them"
        if steps
        else f"not even {MOST_STEPS} {names}s have room for them"
    )
    return f"{head}: {human_ns(overflow_ns)} too much; {spread}"
