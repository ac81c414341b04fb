"""Own pages: a report says of every rank what its page says, in as few lines as there are kinds of
ranks; and only pages that are named are looked at."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.resume.cut import holding_of
from keepstep.edge.shm.status_page import BLANK
from keepstep.model.snapshot import RankStatus, SlotState, SlotView, Stamp
from keepstep.runtime.replication.own_pages import OwnPages, reported

RANKS = range(4, 8)

stamps = st.integers(0, 2).map(lambda step: Stamp(step, 1))
views = st.builds(SlotView, st.sampled_from(SlotState), stamps)
pages = st.builds(
    lambda slots, decided, loss: BLANK._replace(
        slots=tuple(slots), decided_step=decided, loss=float(loss)
    ),
    st.lists(views, min_size=1, max_size=2),
    st.integers(0, 2),
    st.integers(0, 9),
)
proofs = st.lists(stamps, max_size=2).map(tuple)


@given(
    st.dictionaries(st.sampled_from(RANKS), pages),
    st.none() | st.dictionaries(st.sampled_from(RANKS), proofs),
)
def test_every_rank_is_told_of_once_and_as_it_is(
    found: dict[int, RankStatus], protected: dict[int, tuple[Stamp, ...]] | None
) -> None:
    rows = reported(found, protected)
    assert sorted(rank for row in rows for rank in row.ranks) == sorted(found)
    for row in rows:
        for rank in row.ranks:
            own = holding_of(found[rank])
            assert frozenset(row.sealed) == own.sealed
            assert (row.pending, row.decided_step) == (own.pending, own.decided_step)
            proven = own.sealed if protected is None else protected.get(rank, ())
            assert frozenset(row.protected) == frozenset(proven)


@given(pages, st.integers(1, 4))
def test_ranks_that_are_alike_share_a_line(page: RankStatus, count: int) -> None:
    ranks = RANKS[:count]
    # what no report tells of does not tell them apart
    found = {rank: page._replace(rank=rank, loss=float(rank)) for rank in ranks}
    (row,) = reported(found, None)
    assert row.ranks == tuple(ranks)


@given(st.lists(st.tuples(st.sampled_from(RANKS), st.none() | pages, st.booleans()), max_size=12))
def test_what_was_named_is_known_and_all_is_what_there_is(
    turns: list[tuple[int, RankStatus | None, bool]],
) -> None:
    there: dict[int, RankStatus | None] = {}
    named: dict[int, RankStatus | None] = {}
    own = OwnPages(RANKS, there.get)
    for rank, page, is_named in turns:
        there[rank] = page
        if is_named:
            named[rank] = page
            own.changed([rank])
            assert own.known() == {r: known for r, known in named.items() if known is not None}
    assert own.all() == {r: page for r, page in there.items() if page is not None}


def test_a_rank_that_lives_elsewhere_is_not_looked_at() -> None:
    own = OwnPages(RANKS, lambda rank: BLANK)
    own.changed([3, 4])
    assert set(own.known()) == {4}
