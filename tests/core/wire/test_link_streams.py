"""A link of several streams: what is spread over them, what a broken one costs, and that two of
them never write to the same place."""

from __future__ import annotations

from random import Random

import pytest

from keepstep.core.wire.link import DETOUR_NS, PeerLink
from keepstep.core.wire.streams import StreamLimits
from keepstep.model.messages.peers import KeeperAddress, LinkStreams
from keepstep.model.units import S_NS
from keepstep.model.wire import MAX_STREAMS, Address
from tests.core.wire.keepers import End, Keeper, World, span_of

BLOCK = 1000
ONE, TWO = (("a0", 1), ("a1", 2)), (("b0", 3), ("b1", 4))


def spread(streams: int, window_bytes: int = 2 * BLOCK) -> tuple[World, Keeper, Keeper]:
    world = World(streams=StreamLimits.of(streams), window_bytes=window_bytes)
    one, two = world.linked()
    return world, one, two


def indices(keeper: Keeper) -> list[int]:
    return sorted(end.endpoint.index for end in keeper.ends)


def end_of(keeper: Keeper, index: int) -> End:
    return next(end for end in keeper.ends if end.endpoint.index == index)


def send(one: Keeper, two: Keeper, count: int, seed: int = 1) -> tuple[bytes, list[str | None]]:
    data = Random(seed).randbytes(count * BLOCK)
    two.memory = bytearray(len(data))
    done: list[str | None] = []
    for at in range(0, len(data), BLOCK):
        source = memoryview(data)[at : at + BLOCK]
        assert one.table.send_block(two.table.me.node, span_of(BLOCK, at), source, done.append)
    return data, done


def test_the_side_that_dials_makes_the_streams_of_both_sides() -> None:
    world, one, two = spread(3)
    assert indices(one) == indices(two) == list(range(7)), "a message channel, three each way"
    world.settle()
    assert indices(one) == list(range(7)), "and no more"


def test_one_stream_each_way_is_what_a_link_begins_with() -> None:
    _, one, two = spread(1)
    assert indices(one) == indices(two) == [0, 1, 2]


@pytest.mark.parametrize("sender", [1, 2])
def test_blocks_are_spread_over_the_streams_of_their_side(sender: int) -> None:
    world, *pair = spread(3)
    here, there = pair[sender - 1], pair[2 - sender]
    data, done = send(here, there, 12)
    carried: dict[int, int] = {}
    for _ in range(100):
        for end in here.ends:
            end.pump()
            nbytes = sum(len(piece) for piece in end.other.coming)
            index = end.endpoint.index
            carried[index] = max(carried.get(index, 0), nbytes)
        world.settle()
    assert done == [None] * 12 and there.memory == data
    used = {index for index, nbytes in carried.items() if nbytes >= BLOCK}
    assert used == ({1, 3, 5} if sender == 1 else {2, 4, 6})


def test_every_stream_has_keys_of_its_own() -> None:
    """From a handshake of its own, with fresh nonces of both sides."""
    _, one, two = spread(4)
    keys = [end.endpoint.wire._derive("a purpose") for end in one.ends]
    assert len(set(keys)) == len(keys) == 9
    assert sorted(keys) == sorted(end.endpoint.wire._derive("a purpose") for end in two.ends)


def test_a_stream_that_stands_still_holds_up_only_what_it_carries() -> None:
    world, one, two = spread(2)
    data, done = send(one, two, 20)
    stuck = end_of(one, 1).other
    held: list[bytes | memoryview] = []
    for _ in range(200):
        for end in one.ends:
            end.pump()
        held += stuck.coming
        stuck.coming.clear()
        for end in (*one.ends, *two.ends):
            if end is not stuck:
                end.deliver(1 << 30, world.now_ns)
        for end in two.ends:
            end.pump()
    assert done == [None] * 18, "all but those in the window of the one that stands still"
    stuck.coming.extend(held)
    world.settle()
    assert done == [None] * 20 and two.memory == data


def test_a_stream_that_breaks_sends_its_own_again_and_no_others() -> None:
    world, one, two = spread(2)
    data, done = send(one, two, 4)
    for end in one.ends:
        end.pump()
    broken = end_of(one, 1)
    for end in two.ends:
        if end is not broken.other:
            end.deliver(1 << 30, world.now_ns)
    for end in (broken.other, broken):
        end.endpoint.cut("reset")
    world.settle()
    assert done == [None] * 4 and two.memory == data and len(two.blocks) == 4
    counts = one.table.counts.snapshot()
    assert counts["blocks sent again"] == 2 and counts["connections lost"] == 1
    assert one.told == [("up", 2)] and two.told == [("up", 1)]
    assert indices(one) == [0, 1, 2, 3, 4], "it was replaced"


def test_the_same_bytes_do_not_come_on_two_streams_at_a_time() -> None:
    """Asked for twice, as after a holder that has begun anew: both would write to one place, the
    second perhaps when the first has been proven and sealed."""
    world, one, two = spread(2, window_bytes=1)
    data = Random(3).randbytes(BLOCK)
    two.memory = bytearray(BLOCK)
    done: list[str | None] = []
    for _ in range(2):
        assert one.table.send_block(2, span_of(BLOCK), memoryview(data), done.append)
    first, second = end_of(one, 1), end_of(one, 3)
    first.pump()
    first.other.deliver(first.other.coming_bytes - 1, world.now_ns)  # all but the last byte
    second.pump()
    assert second.other.coming_bytes > BLOCK
    world.step(second.other)
    second.other.deliver(1 << 30, world.now_ns)
    assert two.blocks == [], "the second is taken and thrown away"
    world.settle()
    assert sorted(done, key=str) == [None, "the other side does not want it"]
    assert two.memory == data and len(two.blocks) == 1


def test_bytes_whose_stream_broke_over_them_are_left_to_it() -> None:
    world, one, two = spread(2, window_bytes=1)
    data = Random(3).randbytes(BLOCK)
    two.memory = bytearray(BLOCK)
    done: list[str | None] = []
    for _ in range(2):
        assert one.table.send_block(2, span_of(BLOCK), memoryview(data), done.append)
    first = end_of(one, 1)
    first.pump()
    first.other.deliver(first.other.coming_bytes - 1, world.now_ns)
    for end in (first.other, first):
        end.endpoint.cut("reset")
    world.settle()
    assert sorted(done, key=str) == [None, "the other side does not want it"]
    assert two.memory == data and len(two.blocks) == 1


def link_of(keeper: Keeper) -> PeerLink:
    return keeper.table._links[3 - keeper.table.me.node]


@pytest.mark.parametrize("sender", [1, 2])
def test_more_streams_are_opened_when_the_sender_needs_them(sender: int) -> None:
    """Whoever sends: the side that is dialled asks for them."""
    world = World()
    pair = world.linked()
    here = pair[sender - 1]
    traffic = link_of(here)._traffic
    traffic.streams.at_least(4)
    traffic.more_streams()
    world.settle()
    wanted = {0, 1, 2, *((3, 5, 7) if sender == 1 else (4, 6, 8))}
    assert set(indices(pair[0])) == set(indices(pair[1])) == wanted
    data, done = send(here, pair[2 - sender], 12)
    world.settle()
    assert done == [None] * 12 and pair[2 - sender].memory == data


def test_a_channel_that_cannot_be_is_refused() -> None:
    world = World()
    one, two = world.linked()
    link = link_of(one)
    with link._traffic.lock:
        link._channel(2 * MAX_STREAMS + 1)
    one.dial(link, 2 * MAX_STREAMS + 1)
    world.settle(redials=1)
    assert two.table.counts.snapshot()["refused not_expected"] == 1
    assert indices(one) == [0, 1, 2]


# several addresses


def with_addresses(
    mine: tuple[Address, ...], theirs: tuple[Address, ...], streams: int = 1
) -> tuple[World, Keeper, Keeper]:
    world = World(streams=StreamLimits.of(streams))
    one, two = world.keeper(1), world.keeper(2)
    one.addresses, two.addresses = mine, theirs
    one.table.connect(2, theirs[0], 1, world.now_ns)
    two.table.connect(1, mine[0], 1, world.now_ns)
    world.settle()
    assert one.told == [("up", 2)] and two.told == [("up", 1)]
    return world, one, two


def roads(keeper: Keeper) -> list[tuple[int, str, Address]]:
    link = link_of(keeper)
    return [(index, link.road(index).source, link.road(index).target) for index in indices(keeper)]


def test_each_pair_of_addresses_has_a_stream_each_way() -> None:
    _, one, two = with_addresses(ONE, TWO)
    assert indices(one) == indices(two) == [0, 1, 2, 3, 4]
    assert roads(one) == [
        (0, "a0", ("b0", 3)),
        (1, "a0", ("b0", 3)),
        (2, "a0", ("b0", 3)),
        (3, "a1", ("b1", 4)),
        (4, "a1", ("b1", 4)),
    ]


@pytest.mark.parametrize(("mine", "theirs"), [(1, 2), (2, 1)])
def test_the_other_side_may_have_fewer(mine: int, theirs: int) -> None:
    _, one, _ = with_addresses(ONE[:mine], TWO[:theirs])
    assert indices(one) == [0, 1, 2, 3, 4]
    assert {road[1:] for road in roads(one)} == {
        ("a0", ("b0", 3)),
        ("a0", ("b1", 4)) if theirs == 2 else ("a1", ("b0", 3)),
    }


def test_a_stream_whose_addresses_carry_nothing_goes_over_the_others_for_a_while() -> None:
    """Without losing anything; later it goes back, when it has nothing to carry."""
    world, one, two = with_addresses(ONE, TWO)
    data, done = send(one, two, 4)
    link = link_of(one)
    broken = end_of(one, 3)
    for end in (broken.other, broken):
        end.endpoint.cut("timed out")
        (two if end is broken.other else one).lose(end)
    assert link.road(3).source == "a1", "it may have been a moment"
    one.to_dial.clear()
    one.table.unreachable(link, 3, "no route to host", world.now_ns)
    assert link.road(3).source == "a0"
    one.dial(link, 3)
    world.settle()
    assert done == [None] * 4 and two.memory == data
    detour = end_of(one, 3)
    for _ in range(DETOUR_NS // S_NS):
        world.now_ns += S_NS
        for keeper in (one, two):
            keeper.table.tick(world.now_ns)
        world.settle()
        assert end_of(one, 3) is detour
    for _ in range(3):
        world.now_ns += S_NS
        for keeper in (one, two):
            keeper.table.tick(world.now_ns)
        world.settle()
    assert end_of(one, 3) is not detour and link.road(3).source == "a1"
    assert one.told == [("up", 2)] and two.told == [("up", 1)]


def test_a_stream_that_carries_something_does_not_leave_its_detour() -> None:
    world, one, two = with_addresses(ONE, TWO)
    link = link_of(one)
    channel = link._channels[3]
    channel.in_vain = 1
    send(one, two, 4)
    end_of(one, 3).pump()
    assert not channel.is_idle  # type: ignore[attr-defined]
    link.leave_detours(world.now_ns + 2 * DETOUR_NS)
    assert end_of(one, 3).endpoint.closing is None


def test_what_the_other_side_says_of_its_streams_is_bounded() -> None:
    addresses = (KeeperAddress("b0", 3),)
    for streams in (0, MAX_STREAMS + 1):
        with pytest.raises(ValueError, match="streams"):
            World().keeper(1).table._options.format.encode(LinkStreams(streams, addresses))
    many = tuple(KeeperAddress(f"b{n}", n) for n in range(17))
    with pytest.raises(ValueError, match="addresses"):
        World().keeper(1).table._options.format.encode(LinkStreams(1, many))
