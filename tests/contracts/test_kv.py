"""What every KV does: the first writer wins, nothing is lost, answers come in order, waiting ends
when it should, and nothing is told after the end. On a TCPStore, on a real etcd and in the
simulation."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from keepstep.edge.os.loop import Loop
from keepstep.edge.torch.tcp_store import open_embedded
from keepstep.model.units import MS_NS, S_NS
from keepstep.ports import KV, Timer
from keepstep.runtime.agent.signed_kv import SignedKV
from keepstep.sim.protocol.world.kv import KVPath, KVPlace
from keepstep.sim.protocol.world.timers import SimTimers
from keepstep.testing.etcd import HOST, MISSING, Members, free_ports
from tests.contracts.simulated import Time

PATIENCE_NS = 60 * S_NS


class Town(Protocol):
    """Agents' clients of one memory, and the loop that they share."""

    def open(self, lost: Callable[[str], None] = ..., job: str = ...) -> KV:
        """A client for the job of this name, once it is there."""

    def begin_to_open(self, told: list[object]) -> Timer:
        """The timer of an opening; what it tells is written there."""

    def lose(self) -> None:
        """The memory, for good."""

    def until(self, holds: Callable[[], bool]) -> None: ...

    def close(self) -> None: ...


def unexpected(why: str) -> None:
    raise AssertionError(why)


class LoopTown:
    """On a real loop."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.loop.after(PATIENCE_NS, lambda: unexpected("it does not come about"))
        self.clients: list[KV] = []

    def _open(
        self, opened: Callable[[KV], None], lost: Callable[[str], None], job: str
    ) -> Timer: ...

    def open(self, lost: Callable[[str], None] = unexpected, job: str = "j") -> KV:
        count = len(self.clients)
        self._open(self.clients.append, lost, job)
        self.until(lambda: len(self.clients) > count)
        return self.clients[-1]

    def begin_to_open(self, told: list[object]) -> Timer:
        return self._open(told.append, told.append, "j")

    def until(self, holds: Callable[[], bool]) -> None:
        self.loop.run(holds)

    def close(self) -> None:
        for client in reversed(self.clients):  # the host last
            client.close()


class EmbeddedTown(LoopTown):
    def __init__(self) -> None:
        super().__init__()
        self._threads = set(threading.enumerate())
        self._endpoint = (HOST, free_ports(1)[0])
        self._host = self.open()
        assert self._host.hosted

    def _open(self, opened: Callable[[KV], None], lost: Callable[[str], None], job: str) -> Timer:
        return open_embedded(self.loop, self._endpoint, f"{job}/", opened, unexpected, lost)

    def lose(self) -> None:
        """Once it answers nobody any more: its thread takes a moment to end."""
        self._host.close()
        self._look()
        self.until(lambda: not self._answers())

    def _answers(self) -> bool:
        with socket.socket() as asking:
            return asking.connect_ex(self._endpoint) == 0

    def close(self) -> None:
        """And leave no thread behind: one in torch's store may abort the interpreter at its
        end."""
        super().close()
        threads = set(threading.enumerate()) - self._threads
        self._look()
        self.until(lambda: not any(thread.is_alive() for thread in threads))
        self.loop.close()

    def _look(self) -> None:
        self.loop.after(10 * MS_NS, self._look)


class EtcdTown(LoopTown):
    def __init__(self, members: Members, outage_s: float = 120.0) -> None:
        super().__init__()
        self._members, self._outage_s, self._name = members, outage_s, secrets.token_hex(4)

    def _open(self, opened: Callable[[KV], None], lost: Callable[[str], None], job: str) -> Timer:
        from keepstep.edge.net.etcd import open_etcd

        return open_etcd(
            self.loop,
            self._members.etcd,
            f"{self._name}-{job}/",
            opened,
            unexpected,
            lost,
            outage_s=self._outage_s,
        )

    def lose(self) -> None:
        self._members.stop()


class SimTown(Time):
    """Each agent on a machine of its own."""

    def __init__(self, unanswered: float, hosted: bool) -> None:
        super().__init__()
        self._machines = 0
        path = KVPath(unanswered=unanswered)
        host = self.machine(0)
        self._host = host.start("agent")
        self._places = {
            job: KVPlace(self.world, path, host if hosted else None) for job in ("j", "other")
        }
        self.clients: list[KV] = []
        if hosted:
            for place in self._places.values():
                place.open(self._host, self.clients.append, unexpected, unexpected)
            self.until(lambda: len(self.clients) == 2)
            assert self.clients[0].hosted

    def _open(self, opened: Callable[[KV], None], lost: Callable[[str], None], job: str) -> Timer:
        self._machines += 1
        process = self.machine(self._machines).start("agent")
        return self._places[job].open(process, opened, unexpected, lost)

    def open(self, lost: Callable[[str], None] = unexpected, job: str = "j") -> KV:
        count = len(self.clients)
        self._open(self.clients.append, lost, job)
        self.until(lambda: len(self.clients) > count)
        return self.clients[-1]

    def begin_to_open(self, told: list[object]) -> Timer:
        return self._open(told.append, told.append, "j")

    def lose(self) -> None:
        self._host.end("killed")
        self._places["j"].lose("lost")

    def close(self) -> None:
        pass


class SignedTown(SimTown):
    """The same, of a job with a secret."""

    def _open(self, opened: Callable[[KV], None], lost: Callable[[str], None], job: str) -> Timer:
        timers = SimTimers(self.machine(100 + self._machines).start("agent"))

        def signed(kv: KV) -> None:
            opened(SignedKV(kv, "a secret of the job", timers, unexpected))

        return super()._open(signed, lost, job)


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Members]:
    if MISSING:
        pytest.skip(MISSING)
    members = Members(tmp_path_factory.mktemp("etcd"))
    yield members
    members.stop()


KINDS = [
    "embedded",
    "etcd",
    "simulated",
    "simulated, hosted",
    "simulated, unreliable",
    "signed",
    "signed, unreliable",
]


@pytest.fixture(params=KINDS)
def town(request: pytest.FixtureRequest) -> Iterator[Town]:
    made: Town
    if request.param == "embedded":
        made = EmbeddedTown()
    elif request.param == "etcd":
        made = EtcdTown(request.getfixturevalue("members"))
    else:
        unreliable = request.param.endswith("unreliable")
        kind = SignedTown if request.param.startswith("signed") else SimTown
        made = kind(0.3 if unreliable else 0.0, request.param.endswith("hosted"))
    yield made
    made.close()


@pytest.fixture(params=KINDS)
def losing_town(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Town]:
    made: Town
    if request.param == "embedded":
        made = EmbeddedTown()
    elif request.param == "etcd":
        if MISSING:
            pytest.skip(MISSING)
        made = EtcdTown(Members(tmp_path), outage_s=0.5)
    else:
        unreliable = request.param.endswith("unreliable")
        kind = SignedTown if request.param.startswith("signed") else SimTown
        made = kind(0.3 if unreliable else 0.0, request.param.endswith("hosted"))
    yield made
    made.close()


def ask(town: Town, question: Callable[[Callable[[Any], None]], object]) -> Any:
    """The answer to it, once it is there."""
    answers: list[Any] = []
    question(answers.append)
    assert answers == [], "not while it is asked"
    town.until(lambda: bool(answers))
    return answers[0]


def swap(town: Town, kv: KV, key: str, expected: str | None, value: str) -> str | None:
    found: str | None = ask(town, lambda then: kv.swap(key, expected, value, then))
    return found


def read(town: Town, kv: KV, *keys: str) -> list[str | None]:
    found: list[str | None] = ask(town, lambda then: kv.read(keys, then))
    return found


# -- swaps


def test_the_first_writer_wins_and_all_are_told(town: Town) -> None:
    clients = [town.open() for _ in range(6)]
    told: list[str | None] = []
    for number, client in enumerate(clients):
        client.swap("seat", None, f"writer {number}", told.append)
    assert told == []
    town.until(lambda: len(told) == 6)
    assert len(set(told)) == 1 and told[0] in {f"writer {n}" for n in range(6)}
    assert read(town, clients[0], "seat") == [told[0]]


def test_who_asks_again_after_a_lost_answer_still_wins(town: Town) -> None:
    kv = town.open()
    assert swap(town, kv, "seat", None, "mine") == "mine"
    assert swap(town, kv, "seat", None, "mine") == "mine"


def test_a_swap_needs_what_it_expects(town: Town) -> None:
    kv = town.open()
    assert swap(town, kv, "k", "a", "b") is None, "nothing is there"
    assert read(town, kv, "k") == [None]
    assert swap(town, kv, "k", None, "a") == "a"
    assert swap(town, kv, "k", "x", "b") == "a"
    assert swap(town, kv, "k", "a", "ä\n1 \N{SNOWMAN}") == "ä\n1 \N{SNOWMAN}"
    assert read(town, kv, "k") == ["ä\n1 \N{SNOWMAN}"]


def test_a_guarded_swap_needs_its_guard_too(town: Town) -> None:
    kv = town.open()
    assert swap(town, kv, "leader", None, "one") == "one"

    def swap_while(guard: tuple[str, str], key: str, expected: str | None, value: str) -> Any:
        return ask(town, lambda then: kv.swap_while(guard, key, expected, value, then))

    assert swap_while(("leader", "other"), "verdict", None, "v") is None
    assert swap_while(("nobody", "one"), "verdict", None, "v") is None
    assert read(town, kv, "verdict") == [None]
    assert swap_while(("leader", "one"), "verdict", "x", "v") is None
    assert swap_while(("leader", "one"), "verdict", None, "v") == "v"
    assert swap_while(("leader", "one"), "verdict", None, "v") == "v", "the answer was lost"
    assert swap_while(("leader", "one"), "verdict", None, "late") == "v"
    assert swap(town, kv, "leader", "one", "two") == "two"
    assert swap_while(("leader", "one"), "verdict", "v", "w") == "v"
    assert swap_while(("leader", "two"), "verdict", "v", "w") == "w"


class Adder:
    """Adds one to what is there, `times` times."""

    def __init__(self, kv: KV, name: str, times: int) -> None:
        self._kv, self._name, self.left = kv, name, times
        kv.swap("count", None, "0 start", self._found)

    def _found(self, there: str | None) -> None:
        assert there is not None
        if there.split()[1:] == [self._name, str(self.left)]:
            self.left -= 1
        if self.left:
            mine = f"{int(there.split()[0]) + 1} {self._name} {self.left}"
            self._kv.swap("count", there, mine, self._found)


def test_no_swap_is_lost_and_none_is_counted_twice_by_whom_it_was_answered(town: Town) -> None:
    adders = [Adder(town.open(), f"adder{number}", 20) for number in range(3)]
    town.until(lambda: not any(adder.left for adder in adders))
    total = int(str(read(town, town.open(), "count")[0]).split()[0])
    # an answer that got lost is asked for again: that swap counted, and its asker does not know
    is_unreliable = isinstance(town, SimTown) and town._places["j"].path.unanswered > 0
    assert total >= 60 if is_unreliable else total == 60


def test_jobs_do_not_see_each_other(town: Town) -> None:
    one, other = town.open(job="j"), town.open(job="other")
    assert swap(town, one, "k", None, "x") == "x"
    assert read(town, other, "k") == [None]
    assert swap(town, other, "k", None, "y") == "y"


# -- order


def test_questions_take_effect_and_are_answered_in_their_order(town: Town) -> None:
    kv = town.open()
    heard: list[object] = []
    before: str | None = None
    for number in range(20):
        kv.swap("k", before, f"v{number}", heard.append)
        kv.read(["k", f"nothing {number}"], heard.append)
        before = f"v{number}"
    town.until(lambda: len(heard) == 40)
    expected: list[object] = []
    for number in range(20):
        expected += [f"v{number}", [f"v{number}", None]]
    assert heard == expected


def test_many_keys_are_read_in_their_order(town: Town) -> None:
    kv = town.open()
    names = [f"k{n}" for n in range(150)]
    written: list[str | None] = []
    for name in names[::3]:
        kv.swap(name, None, f"at {name}", written.append)
    expected = [f"at {name}" if n % 3 == 0 else None for n, name in enumerate(names)]
    assert read(town, kv, *names) == expected
    assert written == [f"at {name}" for name in names[::3]]
    assert read(town, kv) == []


def test_who_hears_may_ask_and_is_answered_later(town: Town) -> None:
    kv = town.open()
    heard: list[object] = []

    def then(found: str | None) -> None:
        kv.read(["k"], heard.append)
        heard.append("asked")

    kv.swap("k", None, "x", then)
    town.until(lambda: len(heard) == 2)
    assert heard == ["asked", ["x"]]


# -- waits


def test_keys_are_waited_for_together_while_others_talk(town: Town) -> None:
    kv, other = town.open(), town.open()
    all_three: list[object] = []
    kv.wait(["a", "b", "c"], PATIENCE_NS, all_three.append)
    assert swap(town, other, "b", None, "2") == "2"
    assert swap(town, kv, "a", None, "1") == "1"
    assert ask(town, lambda then: kv.wait(["b", "a"], PATIENCE_NS, then)) == ["2", "1"]
    assert all_three == []
    other.swap("c", None, "3", lambda _: None)
    town.until(lambda: bool(all_three))
    assert all_three == [["1", "2", "3"]]


def test_a_wait_that_begins_behind_the_write_ends_as_well(town: Town) -> None:
    kv, other = town.open(), town.open()
    assert swap(town, other, "k", None, "x") == "x"
    assert ask(town, lambda then: kv.wait(["k"], None, then)) == ["x"]
    assert ask(town, lambda then: kv.wait([], None, then)) == []


def test_who_waits_without_end_is_woken(town: Town) -> None:
    kv = town.open()
    woken: list[object] = []
    for _ in range(3):
        kv.wait(["k"], None, woken.append)
    kv.swap("k", None, "x", lambda _: None)
    town.until(lambda: len(woken) == 3)
    assert woken == [["x"]] * 3


def test_nothing_is_waited_for_longer_than_asked(town: Town) -> None:
    kv = town.open()
    assert swap(town, kv, "a", None, "1") == "1"
    assert ask(town, lambda then: kv.wait(["a", "b"], 50 * MS_NS, then)) is None
    assert ask(town, lambda then: kv.wait(["a", "b"], 0, then)) is None
    assert ask(town, lambda then: kv.wait(["a"], 0, then)) == ["1"], "what is there is found"
    again: list[object] = []
    kv.wait(["a", "b"], None, again.append)
    assert swap(town, kv, "b", None, "2") == "2"
    town.until(lambda: bool(again))
    assert again == [["1", "2"]]


def test_a_cancelled_wait_hears_nothing(town: Town) -> None:
    kv = town.open()
    heard: list[object] = []
    cancelled = [
        kv.wait(["k"], None, unexpected),
        kv.wait(["k"], 50 * MS_NS, unexpected),
        kv.wait(["never"], 50 * MS_NS, unexpected),
        kv.wait([], None, unexpected),
    ]
    for wait in cancelled:
        wait.cancel()
        wait.cancel()
    assert ask(town, lambda then: kv.wait(["other"], 200 * MS_NS, then)) is None
    last = kv.wait(["k"], None, lambda found: (heard.append(found), last.cancel()))  # type: ignore[arg-type, return-value]
    kv.swap("k", None, "x", heard.append)
    town.until(lambda: len(heard) == 2)
    assert sorted(map(str, heard)) == ["['x']", "x"]


def test_one_answer_may_cancel_another_wait_that_ends_by_the_same_key(town: Town) -> None:
    kv = town.open()
    heard: list[int] = []
    waits: list[Timer] = []

    def then(number: int) -> None:
        heard.append(number)
        for wait in waits:
            wait.cancel()

    for number in range(3):
        waits.append(kv.wait(["k"], None, lambda _, number=number: then(number)))  # type: ignore[misc]
    kv.swap("k", None, "x", lambda _: None)
    town.until(lambda: bool(heard))
    assert swap(town, kv, "other", None, "y") == "y"
    assert len(heard) == 1


# -- the end


def test_nothing_is_answered_after_close(town: Town) -> None:
    kv, other = town.open(), town.open()
    kv.wait(["k"], None, unexpected)  # type: ignore[arg-type]
    kv.wait(["k"], MS_NS, unexpected)  # type: ignore[arg-type]
    kv.swap("k", None, "x", unexpected)  # type: ignore[arg-type]
    kv.read(["k"], unexpected)  # type: ignore[arg-type]
    kv.close()
    kv.close()
    kv.swap("late", None, "x", unexpected)  # type: ignore[arg-type]
    kv.read(["k"], unexpected)  # type: ignore[arg-type]
    kv.wait(["k"], MS_NS, unexpected).cancel()  # type: ignore[arg-type]
    kv.wait([], None, unexpected)  # type: ignore[arg-type]
    assert swap(town, other, "other", None, "y") == "y"
    assert ask(town, lambda then: other.wait(["never"], 100 * MS_NS, then)) is None
    assert read(town, other, "late") == [None]


def test_a_client_may_be_closed_by_an_answer(town: Town) -> None:
    kv, other = town.open(), town.open()
    heard: list[object] = []

    def then(found: object) -> None:
        heard.append(found)
        kv.close()

    for _ in range(3):
        kv.wait(["k"], None, then)
    other.swap("k", None, "x", lambda _: None)
    town.until(lambda: bool(heard))
    assert ask(town, lambda then: other.wait(["never"], 50 * MS_NS, then)) is None
    assert heard == [["x"]]


def test_an_opening_that_is_cancelled_tells_nothing(town: Town) -> None:
    told: list[object] = []
    opening = town.begin_to_open(told)
    assert told == [], "not while it is asked"
    opening.cancel()
    kv = town.open()
    assert ask(town, lambda then: kv.wait(["never"], 50 * MS_NS, then)) is None
    assert told == []


def test_an_opening_that_is_cancelled_too_late_closes_nothing(town: Town) -> None:
    told: list[Any] = []
    opening = town.begin_to_open(told)
    town.until(lambda: bool(told))
    opening.cancel()
    assert swap(town, told[0], "k", None, "x") == "x"
    told[0].close()


def test_a_lost_memory_is_told_once_and_nothing_after(losing_town: Town) -> None:
    town = losing_town
    lost: list[tuple[int, str]] = []
    clients = [
        town.open(lambda why, number=number: lost.append((number, why)))  # type: ignore[misc]
        for number in range(4)
    ]
    assert swap(town, clients[0], "k", None, "x") == "x"
    # its connection is used again: torch tries for long to make one to a host that has just died
    assert ask(town, lambda then: clients[0].wait(["k"], None, then)) == ["x"]
    clients[0].wait(["never"], None, unexpected)  # type: ignore[arg-type]
    clients[3].close()
    town.lose()
    clients[0].wait(["other"], None, unexpected)  # type: ignore[arg-type]
    for _ in range(3):
        clients[1].read(["k"], unexpected)  # type: ignore[arg-type]
        clients[1].swap("k", "x", "y", unexpected)  # type: ignore[arg-type]
    clients[2].wait(["k", "never"], None, unexpected)  # type: ignore[arg-type]
    town.until(lambda: len(lost) == 3)
    for client in clients:
        client.read(["k"], unexpected)  # type: ignore[arg-type]
        client.wait(["k"], MS_NS, unexpected).cancel()  # type: ignore[arg-type]
        client.close()
    assert sorted(number for number, _ in lost) == [0, 1, 2]
    assert all(why for _, why in lost)
