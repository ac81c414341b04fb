"""The loop: every call comes once, in its order, on the loop's thread, whatever calls do to it."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.edge.os.loop import Loop
from keepstep.model.units import MS_NS, S_NS

PATIENCE_NS = 30 * S_NS


def out_of_patience() -> None:
    raise AssertionError("it does not come about")


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    made.after(PATIENCE_NS, out_of_patience)
    yield made
    made.close()


@pytest.fixture
def pipe() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def after_all(count: int, heard: Sequence[object]) -> Callable[[], bool]:
    return lambda: len(heard) == count


# -- timers


def test_a_timer_of_a_year_is_no_longer_sleep_than_poll_takes() -> None:
    loop = Loop()
    loop.after(365 * 24 * 3600 * S_NS, out_of_patience)
    heard: list[object] = []
    waker = threading.Timer(0.05, lambda: loop.post(lambda: heard.append("woken")))
    waker.start()
    loop.run(after_all(1, heard))
    waker.join()
    loop.close()


@given(st.lists(st.integers(-3, 3), max_size=20))
def test_timers_come_in_the_order_in_which_they_are_due(delays_ms: list[int]) -> None:
    loop = Loop()
    heard: list[int] = []
    due_ns = []  # from, to: time passes while they are set
    for number, delay_ms in enumerate(delays_ms):
        delay_ns = max(0, delay_ms) * MS_NS
        set_ns = time.monotonic_ns()
        loop.after(delay_ms * MS_NS, lambda number=number: heard.append(number))  # type: ignore[misc]
        due_ns.append((set_ns + delay_ns, time.monotonic_ns() + delay_ns))
    loop.run(after_all(len(delays_ms), heard))
    loop.close()
    assert sorted(heard) == list(range(len(delays_ms)))
    for place, number in enumerate(heard):
        for later in heard[place + 1 :]:
            assert due_ns[number][0] <= due_ns[later][1]
            assert number < later or max(0, delays_ms[number]) < max(0, delays_ms[later])


def test_a_cancelled_timer_does_not_come(loop: Loop) -> None:
    heard: list[object] = []
    first = loop.after(0, lambda: (heard.append("first"), second.cancel()))  # type: ignore[arg-type, return-value]
    second = loop.after(0, lambda: heard.append("second"))
    loop.after(MS_NS, lambda: heard.append("third"))
    first.cancel()
    first = loop.after(0, lambda: (heard.append("again"), first.cancel(), second.cancel()))  # type: ignore[arg-type, return-value]
    second.cancel()
    loop.run(after_all(2, heard))
    assert heard == ["again", "third"]


def test_a_timer_that_is_set_by_a_timer_waits_for_the_next_turn(loop: Loop) -> None:
    heard: list[object] = []

    def for_ever() -> None:
        loop.after(-S_NS, for_ever)

    loop.after(0, for_ever)
    loop.after(MS_NS, lambda: loop.post(lambda: heard.append("post")))
    loop.run(after_all(1, heard))


# -- posted calls


def test_what_threads_post_comes_once_in_each_ones_order_on_the_loops_thread(loop: Loop) -> None:
    heard: list[tuple[int, int]] = []
    seen: set[threading.Thread] = set()

    def say(thread: int, number: int) -> None:
        seen.add(threading.current_thread())
        heard.append((thread, number))

    def post_all(thread: int) -> None:
        for number in range(200):
            loop.post(lambda number=number: say(thread, number))  # type: ignore[misc]

    threads = [threading.Thread(target=post_all, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    loop.run(lambda: len(heard) == 800)
    for thread in threads:
        thread.join()
        assert [number for who, number in heard if who == threads.index(thread)] == list(range(200))
    assert seen == {threading.current_thread()}


def test_a_post_wakes_a_loop_that_has_nothing_to_do() -> None:
    loop = Loop()
    heard: list[object] = []
    thread = threading.Thread(target=loop.run, args=(after_all(1, heard),), daemon=True)
    thread.start()
    loop.post(lambda: heard.append("woken"))
    thread.join(PATIENCE_NS / S_NS)
    assert not thread.is_alive()
    loop.close()


def test_what_a_posted_call_posts_waits_for_the_next_turn(
    loop: Loop, pipe: tuple[socket.socket, socket.socket]
) -> None:
    heard: list[object] = []

    def for_ever() -> None:
        heard.append("post")
        loop.post(for_ever)

    loop.add_reader(pipe[0].fileno(), lambda: heard.append(pipe[0].recv(9)))
    loop.post(for_ever)
    loop.post(lambda: pipe[1].send(b"x"))  # type: ignore[arg-type, return-value]
    loop.run(lambda: b"x" in heard)


def test_nobody_posts_to_a_loop_that_is_closed() -> None:
    loop = Loop()
    loop.close()
    loop.post(out_of_patience)


# -- descriptors


def test_readers_are_called_in_the_order_in_which_they_were_added(loop: Loop) -> None:
    pairs = [socket.socketpair() for _ in range(10)]
    heard: list[object] = []
    for number in (*range(5, 10), *range(5)):
        loop.add_reader(
            pairs[number][0].fileno(),
            lambda number=number: heard.append((number, pairs[number][0].recv(1))),  # type: ignore[misc]
        )
    for _, other in pairs:
        other.send(b"x")
    loop.run(after_all(10, heard))
    assert [number for number, _ in heard] == [*range(5, 10), *range(5)]  # type: ignore[misc]
    for pair in pairs:
        for end in pair:
            end.close()


def test_a_reader_that_is_removed_by_another_ones_call_is_not_called(
    loop: Loop, pipe: tuple[socket.socket, socket.socket]
) -> None:
    one, other = pipe
    heard: list[object] = []

    def first() -> None:
        heard.append(one.recv(9))
        loop.remove_reader(other.fileno())

    loop.add_reader(one.fileno(), first)
    loop.add_reader(other.fileno(), out_of_patience)
    one.send(b"to the other")
    other.send(b"to one")
    loop.after(MS_NS, lambda: heard.append("later"))
    loop.run(after_all(2, heard))
    assert heard == [b"to one", "later"]


def test_a_descriptor_that_takes_a_closed_ones_number_is_not_taken_for_it(loop: Loop) -> None:
    one, one_peer = socket.socketpair()
    old, old_peer = socket.socketpair()
    heard: list[object] = []
    number = old.fileno()

    def replace() -> None:
        loop.remove_reader(one.fileno())
        loop.remove_reader(number)
        spare, fresh = socket.socketpair()
        os.dup2(fresh.fileno(), number)
        loop.add_reader(number, out_of_patience)  # nothing has come there
        loop.after(MS_NS, lambda: heard.append((spare, fresh)))

    loop.add_reader(one.fileno(), replace)
    loop.add_reader(number, out_of_patience)
    one_peer.send(b"x")
    old_peer.send(b"x")
    loop.run(after_all(1, heard))
    loop.remove_reader(number)
    for sock in (one, one_peer, old, old_peer):
        sock.close()


def test_a_reader_that_is_added_by_a_call_is_called(
    loop: Loop, pipe: tuple[socket.socket, socket.socket]
) -> None:
    heard: list[object] = []
    pipe[1].send(b"x")
    loop.post(lambda: loop.add_reader(pipe[0].fileno(), lambda: heard.append(pipe[0].recv(9))))
    loop.run(after_all(1, heard))
    assert heard == [b"x"]


def test_reading_and_writing_are_two_things(
    loop: Loop, pipe: tuple[socket.socket, socket.socket]
) -> None:
    one, other = pipe
    heard: list[object] = []

    def write() -> None:
        one.send(b"x")
        loop.remove_writer(one.fileno())

    loop.add_reader(one.fileno(), lambda: heard.append(one.recv(9)))
    loop.add_writer(one.fileno(), write)
    loop.add_reader(other.fileno(), lambda: other.send(other.recv(9)))  # type: ignore[arg-type, return-value]
    loop.run(after_all(1, heard))
    loop.remove_reader(one.fileno())
    loop.remove_reader(one.fileno())
    other.send(b"y")
    loop.after(MS_NS, lambda: heard.append("nothing"))
    loop.run(after_all(2, heard))
    assert heard == [b"x", "nothing"]


# -- run


def test_what_a_call_raises_ends_run_and_loses_nothing_else(
    loop: Loop, pipe: tuple[socket.socket, socket.socket]
) -> None:
    heard: list[object] = []

    def fail() -> None:
        raise ZeroDivisionError

    loop.post(fail)
    loop.post(lambda: heard.append("posted"))
    loop.after(0, fail)
    loop.after(0, lambda: heard.append("timer"))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            loop.run(lambda: False)
    loop.run(after_all(2, heard))
    assert heard == ["posted", "timer"]


def test_no_call_is_made_once_it_is_over(loop: Loop) -> None:
    heard: list[object] = []
    for number in range(3):
        loop.post(lambda number=number: heard.append(number))  # type: ignore[misc]
    loop.run(after_all(1, heard))
    assert heard == [0]
    loop.run(after_all(3, heard))
    assert heard == [0, 1, 2]
