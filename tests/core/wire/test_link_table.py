"""Links that are made anew: one after the other, with whom they are expected, and with the reason
why the last one ended."""

from __future__ import annotations

import pytest

from keepstep.core.wire.link_table import FINAL_TIMES
from keepstep.core.wire.message_channel import MAX_UNCONFIRMED
from keepstep.model.units import S_NS
from tests.core.wire.keepers import TIMEOUTS, End, Keeper, World, note


def carrying(keeper: Keeper) -> End:
    """Its end of the connection that carries messages."""
    return next(end for end in keeper.ends if end.endpoint.index == 0)


def test_who_ended_a_connection_knows_why_better_than_the_socket() -> None:
    world = World()
    one, _ = world.linked()
    end = carrying(one)
    end.endpoint.cut("a frame is damaged")
    one.lose(end, "connection reset")
    for _ in range(TIMEOUTS.dead_ns // S_NS + 1):
        world.now_ns += S_NS
        one.table.tick(world.now_ns)
    world.settle(redials=0)
    dead = one.told[-1]
    assert dead[0] == "dead" and "a frame is damaged" in dead[2]
    assert "connection reset" not in dead[2]


def test_a_new_link_is_dialled_once_nothing_carries_the_older_one_any_more() -> None:
    world = World()
    one, _ = world.linked()
    older = list(one.ends)

    def dialled() -> list[int]:
        return [index for link, index in one.to_dial if link.incarnation == 2]

    one.table.connect(2, ("host", 2), 2, world.now_ns)
    assert not one.table.is_open(2)
    for end in older:
        assert end.endpoint.closing is not None and dialled() == []
        one.lose(end)
    assert dialled() == [0]


@pytest.mark.parametrize("between", [False, True], ids=["in a row", "with a loss between"])
def test_a_link_ends_when_its_other_side_has_refused_it_for_good_so_often(between: bool) -> None:
    """Whether somebody else's life counts as gone is not for one answer to say."""
    world = World()
    one, two = world.keeper(1, incarnation=3), world.keeper(2)
    two.table.connect(1, ("host", 1), 4, world.now_ns)  # the next life of node 1
    one.connect(two)
    for _ in range(FINAL_TIMES - 1):
        world.settle(redials=1)
    assert one.told == []
    if between:
        end = world.dial(one, two)
        assert end is not None
        one.lose(end, "connection reset")
        world.settle(redials=1)
        assert one.told == []
    else:
        world.settle(redials=1)
        assert [(kind, node) for kind, node, _ in one.told] == [("dead", 2)]


def test_a_life_that_is_too_old_is_told_so_whichever_side_dials() -> None:
    for node, other in ((1, 2), (2, 1)):
        world = World()
        young, old = world.keeper(node), world.keeper(other, incarnation=3)
        young.connect(old, incarnation=4)
        old.connect(young)
        world.settle(redials=1)
        assert young.table.counts.snapshot()["refused old_incarnation"] == 1
        assert old.table.counts.snapshot()["refused by peer old_incarnation"] == 1
        assert young.told == []


@pytest.mark.parametrize("count", [MAX_UNCONFIRMED, MAX_UNCONFIRMED + 1])
def test_many_messages_that_come_at_once_are_confirmed_at_once(count: int) -> None:
    world = World()
    one, two = world.linked()
    for number in range(count):
        assert one.table.send(2, note(number))
    link = one.table._links[2]
    assert not link.is_flushed
    world.settle()
    assert two.heard == list(range(count))
    assert link.is_flushed


@pytest.mark.parametrize("fence", ["999", "1000", "1001"])
def test_a_fence_ends_the_links_of_older_lives_alone(fence: str) -> None:
    world = World()
    one, two = world.keeper(1), world.keeper(2, incarnation=1000)
    one.connect(two, incarnation=1000)
    two.connect(one)
    world.settle()
    ended = one.table.fence(2, int(fence))
    world.settle()
    if fence == "1001":
        assert ended is not None and not one.table.is_open(2)
        assert one.told[1:] == [("dead", 2, "fenced: incarnation 1000 is older than 1001")]
    else:
        assert ended is None and one.table.is_open(2) and one.told == [("up", 2)]


def renumbered(former: int, successor: int) -> tuple[World, Keeper, Keeper, Keeper]:
    """Node 2 has a link with node 1 of incarnation `former`; then another machine, with incarnation
    `successor`, is node 1, and the former one has not heard of it. Both dial node 2."""
    world = World()
    late, one, two = world.keeper(1, former), world.keeper(1, successor), world.keeper(2)
    late.connect(two)
    two.connect(late, former)
    while late.to_dial:
        world.dial(late, two)
    world.settle()
    assert two.told == [("up", 1)]
    two.table.begin_mesh()
    two.connect(one, successor)
    world.settle()
    assert late.told[-1][:2] == ("dead", 2)
    late.connect(two)
    return world, late, one, two


@pytest.mark.parametrize(("former", "successor"), [(9, 5), (5, 9)])
def test_who_had_a_number_before_is_not_taken_for_a_later_life_of_who_has_it_now(
    former: int, successor: int
) -> None:
    """A node that has lost its number and does not know it dials on, and its keeper may have begun
    later than that of the node that has it now."""
    world, late, one, two = renumbered(former, successor)
    while late.to_dial:
        world.dial(late, two)
    world.settle(redials=1)
    assert two.table._least[1][0] == successor
    one.connect(two)
    world.settle()
    assert two.table.is_open(1) and two.table._links[1].incarnation == successor


def test_another_mesh_says_who_a_node_is_whatever_life_has_come_by_itself() -> None:
    world = World()
    stranger, one, two = world.keeper(1, incarnation=9), world.keeper(1, 5), world.keeper(2)
    two.connect(one, 5)
    stranger.connect(two)  # node 2 cannot know that it is no later life
    world.dial(stranger, two)
    world.settle()
    assert two.table._links[1].incarnation == 9
    two.connect(one, 5)
    assert two.table._links[1].incarnation == 9, "the same mesh: the keeper may have begun again"
    two.table.begin_mesh()
    two.connect(one, 5)
    one.connect(two)
    while one.to_dial:
        world.dial(one, two)
    world.settle(redials=0)
    assert two.table.is_open(1) and two.table._links[1].incarnation == 5
