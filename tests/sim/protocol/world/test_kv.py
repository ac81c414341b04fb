"""What may happen to the simulated memory of the agents and its clients, beyond
`tests/contracts/test_kv.py`."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.model.units import GIB, MS_NS, S_NS
from keepstep.ports import KV
from keepstep.sim.protocol.world.kv import KVPath, KVPlace
from keepstep.sim.protocol.world.machine import Machine
from keepstep.sim.protocol.world.world import Crash, PortFault, Process, World

SURE = KVPath(unanswered=0.0)


class Town:
    """A memory, and agents that use it, each on a machine of its own."""

    def __init__(
        self,
        path: KVPath = SURE,
        seed: int = 1,
        hosted: bool = False,
        fault: PortFault | None = None,
    ) -> None:
        self.world = World(seed, fault)
        self.crashes: list[Crash] = []
        self.world.on_crash = self.crashes.append
        self.machines: list[Machine] = []
        self.host = self.machine()
        self.place = KVPlace(self.world, path, self.host if hosted else None)
        self.writes: list[tuple[int, str, str]] = []
        self.place.on_write = lambda key, value: self.writes.append((self.world.now_ns, key, value))
        self.failed: list[str] = []
        self.lost: list[tuple[int, str]] = []

    def machine(self) -> Machine:
        self.machines.append(Machine(self.world, len(self.machines), None, GIB))
        return self.machines[-1]

    def begin(self, process: Process, opened: list[KV]) -> None:
        self.place.open(process, opened.append, self.failed.append, self._lost)

    def _lost(self, why: str) -> None:
        self.lost.append((self.world.now_ns, why))

    def open(self, machine: Machine | None = None) -> tuple[Process, KV]:
        opened: list[KV] = []
        process = (machine or self.machine()).start("agent")
        self.begin(process, opened)
        self.run(S_NS)
        return process, opened[0]

    def run(self, for_ns: int) -> None:
        self.world.run(self.world.now_ns + for_ns)

    @property
    def values(self) -> list[str]:
        return [value for _, _, value in self.writes]


def test_a_question_takes_effect_after_its_asker_has_died() -> None:
    town = Town()
    process, kv = town.open()
    heard: list[Any] = []
    kv.swap("k", None, "x", heard.append)
    process.end("killed")
    town.run(S_NS)
    assert town.values == ["x"]
    assert heard == []


def test_a_process_may_be_killed_at_each_question() -> None:
    for number in range(1, 4):
        town = Town()
        process, kv = town.open()
        process.dies_at_call = number

        def ask(kv: KV = kv) -> None:
            kv.read(["k"], lambda _: None)
            kv.wait(["k"], None, lambda _: None)
            kv.swap("k", None, "x", lambda _: None)

        town.world.carry_out(process, ask)
        assert not process.alive
        town.run(S_NS)
        assert town.values == []
        assert town.crashes == []


def test_while_it_is_away_questions_wait_and_take_effect_in_their_order() -> None:
    town = Town()
    _, kv = town.open()
    heard: list[Any] = []
    kv.swap("k", None, "first", heard.append)
    town.place.go_away(5 * S_NS)
    back_ns = town.world.now_ns + 5 * S_NS
    for number in range(5):
        kv.swap("k", "first" if number == 0 else str(number - 1), str(number), heard.append)
    kv.wait(["k"], None, heard.append)
    town.run(4 * S_NS)
    assert town.values == heard == []
    town.run(2 * S_NS)
    assert town.values == ["first", "0", "1", "2", "3", "4"]
    assert all(at_ns >= back_ns for at_ns, _, _ in town.writes)
    assert [found for found in heard if isinstance(found, str)] == town.values
    assert len(heard) == 7


def test_nobody_opens_it_while_it_is_away() -> None:
    town = Town()
    town.place.go_away(5 * S_NS)
    opened: list[KV] = []
    town.begin(town.machine().start("agent"), opened)
    town.run(4 * S_NS)
    assert opened == []
    town.run(2 * S_NS)
    assert len(opened) == 1


def test_a_question_whose_answer_gets_lost_is_asked_again() -> None:
    for call in range(2, 8):  # the first opens it
        town = Town(fault=PortFault("agent", call, is_deadly=False))
        _, kv = town.open()
        heard: list[Any] = []
        for number in range(3):
            before = None if number == 0 else str(number - 1)
            kv.swap("k", before, str(number), heard.append)
            kv.read(["k"], heard.append)
        town.run(S_NS)
        assert town.values == ["0", "1", "2"]
        reads = [found for found in heard if isinstance(found, list)]
        assert reads == [["0"], ["1"], ["2"]]
        assert [found for found in heard if isinstance(found, str)] == ["0", "1", "2"]


@pytest.mark.parametrize("seed", range(20))
def test_questions_that_are_late_or_asked_twice_change_nothing(seed: int) -> None:
    town = Town(KVPath(unanswered=0.5), seed)
    clients = [town.open()[1] for _ in range(3)]
    town.run(60 * S_NS)
    told: list[str | None] = []
    for number, kv in enumerate(clients):
        kv.swap("seat", None, f"writer {number}", told.append)
        kv.swap(f"own {number}", None, "a", lambda _: None)
        kv.swap(f"own {number}", "a", "b", lambda _: None)
        kv.swap(f"own {number}", "b", "c", lambda _: None)
    town.run(60 * S_NS)
    assert len(told) == 3
    assert len(set(told)) == 1
    for number in range(3):
        values = [value for _, key, value in town.writes if key == f"own {number}"]
        assert values == ["a", "b", "c"]
    assert town.crashes == []


def test_a_seed_is_a_run() -> None:
    def story(seed: int) -> list[tuple[int, str, str]]:
        town = Town(KVPath(unanswered=0.5), seed)
        for number in range(3):
            town.open()[1].swap("k", None, f"{number}", lambda _: None)
        town.run(10 * S_NS)
        return town.writes

    assert story(3) == story(3)
    assert len({tuple(story(seed)) for seed in range(5)}) > 1


def test_who_writes_a_value_again_ends_by_it() -> None:
    town = Town()
    process, kv = town.open()
    for expected, value in ((None, "a"), ("a", "b"), ("b", "a")):
        kv.swap("k", expected, value, lambda _: None)
    town.run(S_NS)
    assert town.values == ["a", "b"]
    assert not process.alive
    assert [type(crash.error) for crash in town.crashes] == [AssertionError]


# -- the host


def test_others_wait_for_the_host_and_not_for_ever() -> None:
    town = Town(hosted=True)
    opened: list[KV] = []
    town.begin(town.machine().start("agent"), opened)
    town.run(30 * S_NS)
    assert opened == []
    _, hosting = town.open(town.host)
    assert hosting.hosted
    town.run(S_NS)
    assert len(opened) == 1
    assert not opened[0].hosted
    late = Town(hosted=True)
    late.begin(late.machine().start("agent"), opened)
    late.run(70 * S_NS)
    assert len(late.failed) == 1
    assert len(opened) == 1


def test_the_memory_is_lost_with_its_host_and_the_next_host_has_another() -> None:
    town = Town(hosted=True)
    process, hosting = town.open(town.host)
    _, second = town.open(town.host)
    assert hosting.hosted and not second.hosted
    _, kv = town.open()
    heard: list[Any] = []
    hosting.swap("k", None, "x", heard.append)
    kv.wait(["k"], None, heard.append)
    kv.wait(["never"], None, lambda _: pytest.fail("answered"))
    town.run(S_NS)
    assert sorted(map(str, heard)) == ["['x']", "x"]
    process.end("killed")
    town.run(S_NS)
    assert len(town.lost) == 1
    second.read(["k"], lambda _: pytest.fail("answered"))
    town.run(S_NS)
    assert len(town.lost) == 2
    _, hosting = town.open(town.host)
    assert hosting.hosted
    hosting.read(["k"], heard.append)
    town.run(S_NS)
    assert heard[-1] == [None]


def test_that_the_hosts_machine_has_vanished_is_noticed_late() -> None:
    town = Town(KVPath(unanswered=0.0, vanished_ns=100 * S_NS), hosted=True)
    town.open(town.host)
    _, kv = town.open()
    kv.wait(["k"], None, lambda _: pytest.fail("answered"))
    lost_ns = town.world.now_ns
    town.host.lose("fire")
    kv.read(["k"], lambda _: pytest.fail("answered"))
    town.run(99 * S_NS)
    assert town.lost == []
    town.run(10 * S_NS)
    assert len(town.lost) == 1
    assert town.lost[0][0] >= lost_ns + 100 * S_NS


def test_an_idle_client_does_not_notice_the_loss_before_it_asks() -> None:
    town = Town()
    _, kv = town.open()
    town.place.lose("gone")
    town.run(10 * S_NS)
    assert town.lost == []
    kv.wait(["k"], 5 * MS_NS, lambda _: pytest.fail("answered"))
    town.run(S_NS)
    assert len(town.lost) == 1
