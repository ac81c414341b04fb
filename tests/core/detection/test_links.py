"""Slow links: sender, receiver and link are told apart, and a link that is well is not accused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.detection.links import LinkSide, SlowLink, SlowLinkOver, SlowLinks, explain
from keepstep.model.links import LinkSample
from keepstep.model.units import MS_NS
from tests.core.lab_links import AFTER, BEFORE, LinkLab, all_pairs, faults, next_two

RUNS = 30
KINDS = ["sender", "receiver", "node", "link, one way", "link, both ways", "switch"]


@pytest.mark.parametrize("kind", KINDS)
def test_who_is_slow_is_named_30_of_30(kind: str) -> None:
    """Half the speed, 5 % of noise, four nodes that all send to each other: right, and nobody
    else."""
    is_slow, expected = faults(4)[kind]
    for seed in range(RUNS):
        lab = LinkLab(seed, all_pairs(4))
        lab.run(BEFORE)
        lab.run(AFTER, is_slow, 2.0)
        assert [(slow.side, slow.nodes) for slow in lab.links.slow] == [expected], seed
        lab.run(2 * AFTER)
        # neither as it began, cell by cell, nor as it ended was anybody else named
        assert lab.named() == [expected] and lab.links.slow == [], (seed, lab.named())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "switch"])
def test_what_the_slow_one_does_to_others_hides_it_not(kind: str) -> None:
    """Copies to and from it take longer, so they meet others that they did not meet before, and
    all are a little slower than they were."""
    is_slow, expected = faults(4)[kind]
    for seed in range(RUNS):
        lab = LinkLab(seed, all_pairs(4))
        lab.run(BEFORE)
        lab.run(AFTER, is_slow, 3.0, others=1.25)
        assert [(slow.side, slow.nodes) for slow in lab.links.slow] == [expected], seed
        lab.run(2 * AFTER)
        assert lab.named() == [expected] and lab.links.slow == [], (seed, lab.named())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("samples", [11, 12, 14])
def test_a_short_fault_leaves_no_other_word_behind(kind: str, samples: int) -> None:
    """Of so few the long window half knows, and some cells' longer than others'."""
    is_slow, expected = faults(4)[kind]
    for seed in range(10):
        lab = LinkLab(seed, all_pairs(4))
        lab.run(BEFORE)
        lab.run(samples, is_slow, 3.0)
        lab.run(2 * AFTER)
        assert lab.named() in ([], [expected]) and lab.links.slow == [], (seed, lab.named())


def test_the_lesser_of_two_is_told_once_the_greater_is_over() -> None:
    lab = LinkLab(1, all_pairs(4))
    lab.run(BEFORE)
    lab.run(AFTER, lambda a, b: a == 1, 4.0, others=1.0)
    lab.run(AFTER, lambda a, b: True, 4.0)
    assert lab.links.slow[0].side is LinkSide.SWITCH


def test_nobody_is_named_where_nothing_changes() -> None:
    for seed in range(10):
        lab = LinkLab(seed, all_pairs(4))
        lab.run(300)
        assert lab.told == [], seed


@pytest.mark.parametrize("kind", ["sender", "receiver", "link, one way"])
def test_with_two_partners_each_it_can_be_told_as_well(kind: str) -> None:
    is_slow, expected = faults(5)[kind]
    for seed in range(10):
        lab = LinkLab(seed, next_two(5))
        lab.run(BEFORE)
        lab.run(AFTER, is_slow, 3.0)
        assert lab.named()[-1] == expected, seed


def test_with_one_partner_nobody_can_tell_and_that_is_said() -> None:
    lab = LinkLab(1, [(0, 1), (1, 0), (2, 3), (3, 2)])
    lab.run(BEFORE)
    lab.run(AFTER, lambda a, b: (a, b) == (0, 1), 3.0)
    assert lab.named() == [(LinkSide.UNCLEAR, (0, 1))]
    [slow] = lab.links.slow
    assert "nobody can tell without another partner" in slow.why


def test_the_switch_between_racks() -> None:
    racks = ["a", "a", "b", "b"]
    lab = LinkLab(3, all_pairs(4), racks=racks)
    lab.run(BEFORE)
    lab.run(AFTER, lambda a, b: racks[a] != racks[b], 2.0)
    assert lab.named()[-1] == (LinkSide.SWITCH, (0, 1, 2, 3))
    assert len(lab.links.slow[0].cells) == 8


def test_it_is_over_when_it_is_as_fast_as_before() -> None:
    is_slow, expected = faults(4)["sender"]
    lab = LinkLab(5, all_pairs(4))
    lab.run(BEFORE)
    lab.run(AFTER, is_slow, 2.0)
    lab.run(AFTER)
    last = lab.told[-1]
    assert isinstance(last, SlowLinkOver) and lab.links.slow == []
    assert (last.slow.side, last.slow.nodes) == expected


def test_what_was_slow_does_not_become_its_past() -> None:
    """Ten times for a while: the eleventh is named as the first one was, and its past says what
    is usual."""
    is_slow, expected = faults(4)["sender"]
    lab = LinkLab(9, all_pairs(4))
    lab.run(BEFORE)
    for _ in range(11):
        lab.run(15, is_slow, 2.0)
        assert [(slow.side, slow.nodes) for slow in lab.links.slow] == [expected]
        assert lab.links.slow[0].ratio == pytest.approx(2.0, rel=0.1)
        lab.run(30)
        assert lab.links.slow == []


def test_nobody_gets_used_to_it() -> None:
    is_slow, expected = faults(4)["receiver"]
    lab = LinkLab(6, all_pairs(4))
    lab.run(BEFORE)
    lab.run(500, is_slow, 2.0)
    assert [(slow.side, slow.nodes) for slow in lab.links.slow] == [expected]


@pytest.mark.parametrize(
    ("resent", "reader", "cause", "words"),
    [
        (0.03, 0.0, "loss", "of the bytes had to be sent again"),
        (0.0, 0.9, "reader", "the receiver had no room"),
        (0.0, 0.0, "speed", "nothing was lost"),
    ],
)
def test_the_cause_stands_beside(resent: float, reader: float, cause: str, words: str) -> None:
    is_slow, _ = faults(4)["link, one way"]
    lab = LinkLab(7, all_pairs(4))
    lab.run(BEFORE)
    lab.run(AFTER, is_slow, 3.0, resent, reader)
    [slow] = lab.links.slow
    assert slow.cause == cause and words in slow.why and slow.fix
    assert slow.slowest in slow.cells
    assert slow.usual_bytes_per_s / slow.bytes_per_s == pytest.approx(3.0, rel=0.3)
    assert slow.ratio == pytest.approx(3.0, rel=0.2)


def test_too_much_noise_says_nothing() -> None:
    is_slow, _ = faults(4)["sender"]
    for seed in range(10):
        lab = LinkLab(seed, all_pairs(4), noise=0.6)
        lab.run(BEFORE)
        lab.run(AFTER, is_slow, 2.0)
        assert lab.told == []


def test_nothing_is_said_before_there_is_a_past() -> None:
    links = SlowLinks([None] * 3)
    for _ in range(50):
        for pair in all_pairs(3):
            links.add(*pair, LinkSample(1000, 100 * MS_NS))
    for pair in all_pairs(3):
        links.add(*pair, LinkSample(1, 100 * MS_NS))
    assert links.news() == []


# -- the explanation alone

CELLS = st.integers(3, 5).flatmap(
    lambda nodes: st.tuples(st.just(nodes), st.sets(st.sampled_from(all_pairs(nodes))))
)


@given(CELLS)
def test_what_is_explained_is_all_that_is_slow_and_nothing_else(
    case: tuple[int, set[tuple[int, int]]],
) -> None:
    nodes, slow = case
    found = explain(slow, all_pairs(nodes), [None] * nodes)
    assert {cell for _, _, cells in found for cell in cells} == slow
    for side, named, cells in found:
        if side in (LinkSide.SENDER, LinkSide.RECEIVER, LinkSide.NODE):
            assert len(named) == 1 and all(named[0] in cell for cell in cells)
        elif side in (LinkSide.LINK, LinkSide.UNCLEAR):
            assert len(named) == 2 and all(set(cell) == set(named) for cell in cells)


@pytest.mark.parametrize("nodes", [3, 4, 5, 6])
def test_a_fault_of_a_link_accuses_no_node(nodes: int) -> None:
    for pair in all_pairs(nodes):
        [(side, named, _)] = explain({pair}, all_pairs(nodes), [None] * nodes)
        assert (side, named) == (LinkSide.LINK, tuple(sorted(pair)))


@pytest.mark.parametrize("nodes", [3, 4, 5, 6])
def test_two_faults_at_a_time(nodes: int) -> None:
    for one, other in itertools.combinations(range(nodes), 2):
        slow = {(a, b) for a, b in all_pairs(nodes) if a == one or b == other}
        if nodes == 3:
            continue  # three of six cells: more than one pair of causes explains them
        found = {
            (side, named) for side, named, _ in explain(slow, all_pairs(nodes), [None] * nodes)
        }
        assert found == {(LinkSide.SENDER, (one,)), (LinkSide.RECEIVER, (other,))}


@pytest.mark.parametrize("back", [(3, 1), (0, 1)])
def test_what_waits_for_a_slow_senders_acknowledgements_is_no_fault_of_a_link(
    back: tuple[int, int],
) -> None:
    row = {(1, 0), (1, 2), (1, 3)}
    found = explain({*row, back}, all_pairs(4), [None] * 4)
    assert found == [(LinkSide.SENDER, (1,), tuple(sorted({*row, back})))]


def test_a_verdict_is_a_sentence() -> None:
    lab = LinkLab(8, all_pairs(3))
    lab.run(BEFORE)
    lab.run(AFTER, lambda a, b: a == 1, 2.0)
    [slow] = lab.links.slow
    assert isinstance(slow, SlowLink)
    assert slow.why.startswith("node 1 sends slowly: copies move ")
    assert "in 2 of 6 directions" in slow.why and "\n" not in slow.why
