"""Driver: the rank is called by one thread at a time, and who waits hears of every change."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.model.units import MS_NS
from keepstep.ports import Acts
from keepstep.runtime.rank.driver import Driver

PATIENCE_S = 30.0


class Guarded:
    """What must be called by one thread at a time."""

    def __init__(self) -> None:
        self._inside = threading.Lock()
        self.calls: list[object] = []

    def call(self, what: object) -> object:
        assert self._inside.acquire(blocking=False), "two threads at once"
        self.calls.append(what)
        self._inside.release()
        return what


@pytest.fixture
def driver() -> Iterator[Driver]:
    found = Driver(lambda: None)
    yield found
    found.close()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(["call", "loop", "trainer", "background"]), max_size=30))
def test_whoever_calls_the_rank_is_alone_and_no_call_is_lost(story: list[str]) -> None:
    driver, rank = Driver(lambda: None), Guarded()
    for number, what in enumerate(story):
        if what == "call":
            assert driver.call(rank.call, number) == number
        elif what == "loop":
            driver.loop.post(lambda number=number: rank.call(number))  # type: ignore[misc]
        else:
            executor = driver.trainer if what == "trainer" else driver.background
            executor.submit(lambda number=number: number, rank.call)  # type: ignore[misc]
    assert driver.wait(lambda: len(rank.calls) == len(story), PATIENCE_S)
    assert sorted(map(int, rank.calls)) == list(range(len(story)))  # type: ignore[call-overload]
    driver.close()


def test_work_runs_on_the_thread_it_is_for(driver: Driver) -> None:
    found: dict[str, int] = {}
    driver.trainer.submit(threading.get_ident, lambda at: found.update(trainer=at))
    driver.background.submit(threading.get_ident, lambda at: found.update(background=at))
    driver.loop.post(lambda: found.update(loop=threading.get_ident()))
    assert driver.wait(lambda: len(found) == 3, PATIENCE_S)
    assert found["trainer"] == threading.get_ident() and len(set(found.values())) == 3


def test_work_in_pieces_gives_its_result(driver: Driver) -> None:
    def acts() -> Acts[str]:
        yield
        yield
        return "done"

    found: list[str] = []
    driver.trainer.act(acts(), found.append)
    driver.background.act(acts(), found.append)
    assert driver.wait(lambda: found == ["done", "done"], PATIENCE_S)


def test_who_waits_gives_up_in_time_and_is_woken_by_a_notice(driver: Driver) -> None:
    assert not driver.wait(lambda: False, within_s=0.05)
    seen: list[bool] = []
    driver.loop.after(20 * MS_NS, lambda: seen.append(True))
    assert driver.wait(lambda: bool(seen), PATIENCE_S)
    done = threading.Event()

    def elsewhere() -> None:
        done.set()
        driver.notify()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    assert driver.wait(done.is_set, PATIENCE_S)
    thread.join()


def test_what_the_trainers_work_raises_reaches_the_trainer(driver: Driver) -> None:
    def fail() -> None:
        raise ValueError("shape")

    driver.trainer.submit(fail, lambda _: None)
    with pytest.raises(ValueError, match="shape"):
        driver.wait(lambda: False, 1.0)


def test_the_background_begins_with_what_it_is_told_and_finishes_what_it_has() -> None:
    began: list[int] = []
    driver = Driver(lambda: began.append(threading.get_ident()))
    found: list[int] = []
    for number in range(20):
        driver.background.submit(lambda number=number: number, found.append)  # type: ignore[misc]
    driver.close()
    assert found == list(range(20)) and len(began) == 1


def test_timers_run_on_after_work_aside_and_the_loop_is_closed_once_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(lambda: None)
    found: list[str] = []
    close = driver.loop.close
    monkeypatch.setattr(driver.loop, "close", lambda: (found.append("closed"), close()))
    driver.aside.submit(lambda: "done", found.append)
    assert driver.wait(lambda: found == ["done"], PATIENCE_S)
    driver.call(driver.loop.after, MS_NS, lambda: found.append("rings"))
    assert driver.wait(lambda: found == ["done", "rings"], PATIENCE_S)
    driver.close()
    assert found == ["done", "rings", "closed"]
