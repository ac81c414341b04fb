"""Pacing: a keeper's gate over its ranks' real pages, with a clock that is set by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from keepstep.core.pacing.gate import LATE_NS, LATE_STEPS
from keepstep.core.pacing.schedule import Reserve
from keepstep.edge.net.tcp import interface_of
from keepstep.edge.shm.collective_profile_page import (
    COUNT_FILE,
    CollectiveProfileWriter,
    profile_path,
)
from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.edge.shm.memory import MEMORY
from keepstep.model.horizon import Horizon
from keepstep.model.rhythm import NO_STEP
from keepstep.model.snapshot import Stamp
from keepstep.model.units import MIB, MS_NS, S_NS
from keepstep.model.wire import Flow
from keepstep.runtime.replication.pacing import COUNT_NS, Pacing

ELSEWHERE = "198.18.0.9"  # an address of no interface here
RATE = 50_000_000


class Told:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def record(self, kind: str, why: str, /, **data: Any) -> None:
        assert kind == "interleave" and data["interleaved"] == (
            not why.startswith("copies are not interleaved")
        )
        self.lines.append(why)


class World:
    """A node: its clock, its ranks, and the one link of its keeper."""

    def __init__(
        self, job_dir: Path, host: str = ELSEWHERE, ranks: int = 1, interface: str = "", **how: Any
    ) -> None:
        self.now_ns, self.queued, self.told, self.job_dir = S_NS, 0.0, Told(), job_dir
        self.rate = RATE
        self.ranks = [
            CollectiveProfileWriter(
                MEMORY, profile_path(job_dir, rank), self.monotonic_ns, interface
            )
            for rank in range(ranks)
        ]
        self.pacing = Pacing(job_dir, [host], MEMORY, self, self.told, interface_of, **how)
        self.steps = 0

    def monotonic_ns(self) -> int:
        return self.now_ns

    def boot(self) -> str:
        return "b"

    def wall_ns(self) -> int:
        return self.now_ns

    def pass_ns(self, nanoseconds: int) -> None:
        self.now_ns += nanoseconds
        self.queued = max(0.0, self.queued - nanoseconds * self.rate / S_NS)

    def ask(self, nbytes: int) -> int:
        granted, wait_ns = self.pacing.ask(nbytes, Flow(1, int(self.queued), 100_000))
        assert granted or wait_ns
        self.queued += granted
        return granted

    def step(
        self,
        idle_ns: int = 50 * MS_NS,
        busy_ns: int = 150 * MS_NS,
        asking: bool = True,
        last: bool = False,
    ) -> int:
        """Every rank: idle, a collective, idle. What was granted in it."""
        granted = 0
        for rank in self.ranks:
            rank.step(self.steps)
        self.steps += 1
        for part in range(2):
            for _ in range(idle_ns // MS_NS):
                granted += self.ask(MIB) if asking else 0
                self.pass_ns(MS_NS)
            for rank in self.ranks if part == 0 else ():
                rank.began()
            for _ in range(busy_ns // MS_NS if part == 0 else 0):
                assert not asking or not self.ask(MIB) or not self.is_held
                self.pass_ns(MS_NS)
            for rank in self.ranks if part == 0 else ():
                rank.ended()
        return granted

    @property
    def step_ns(self) -> int:
        return self.pacing._step_ns

    @property
    def is_held(self) -> bool:
        return bool(self.told.lines) and not self.told.lines[-1].startswith("copies are not")


def test_without_pages_nothing_is_held_back(tmp_path: Path) -> None:
    world = World(tmp_path, ranks=0)
    assert world.ask(5 * MIB) == 5 * MIB
    assert world.told.lines == ["copies are not interleaved: no rank tells of its collectives"]


@pytest.mark.parametrize(
    ("how", "because"),
    [
        ({"host": "127.0.0.1"}, r"the links are loopback \(127.0.0.1\): no network is shared"),
        (
            {"interface": "ib0"},
            f"the collectives go over ib0, the copies over {ELSEWHERE}, spread over each step",
        ),
    ],
)
def test_where_the_link_is_not_shared_nothing_is_held_back_and_it_is_said(
    tmp_path: Path, how: dict[str, str], because: str
) -> None:
    world = World(tmp_path, **how)
    for _ in range(6):
        world.step()
    world.ranks[0].began()
    assert world.ask(5 * MIB) == 5 * MIB
    assert len(world.told.lines) == 1
    assert re.fullmatch(f"copies are not interleaved: {because}", world.told.lines[0])


def sent_for_a_step(world: World, nbytes: int, step_ns: int) -> list[tuple[int, int]]:
    """Of a step whose copies take so many bytes, each grant: when in it, and how many. A collective
    is under way in all of it but its beginning."""
    world.ranks[0].step(world.steps)
    world.steps += 1
    grants, left = [], nbytes
    for at_ns in range(0, step_ns, MS_NS):
        while left and (granted := world.ask(min(left, MIB))):
            grants.append((at_ns, granted))
            left -= granted
        world.pass_ns(MS_NS)
        if at_ns == 0:
            world.ranks[0].began()
    world.ranks[0].ended()
    return grants


def test_copies_with_a_network_of_their_own_are_spread_over_half_of_each_step(
    tmp_path: Path,
) -> None:
    world, step_ns, nbytes = World(tmp_path, interface="ib0"), 200 * MS_NS, 40 * MIB
    world.rate = 20 * RATE
    page = HorizonPage(MEMORY, tmp_path)
    told = []
    for step in range(16):
        page.write(Horizon(epoch=1, target=Stamp(step, 1)))
        told.append(sent_for_a_step(world, nbytes, step_ns))
    assert all(sum(granted for _, granted in grants) == nbytes for grants in told)
    assert max(granted for at_ns, granted in told[0]) == MIB and told[0][-1][0] == 0, "at once"
    for grants in told[10:]:
        assert 0.45 * step_ns < grants[-1][0] < 0.55 * step_ns
        early = sum(granted for at_ns, granted in grants if at_ns < step_ns // 4)
        assert 0.45 * nbytes < early < 0.6 * nbytes
    world.ranks[0].step(NO_STEP)
    assert [world.ask(MIB) for _ in range(40)] == [MIB] * 40, "nobody trains: nobody is spared"
    page.close()


def test_copies_over_loopback_are_not_spread(tmp_path: Path) -> None:
    """Whatever interface the collectives go over."""
    world = World(tmp_path, host="127.0.0.1", interface="ib0")
    page = HorizonPage(MEMORY, tmp_path)
    for step in range(16):
        page.write(Horizon(epoch=1, target=Stamp(step, 1)))
        grants = sent_for_a_step(world, 40 * MIB, 200 * MS_NS)
    assert {at_ns for at_ns, _ in grants} == {0}
    assert "loopback" in world.told.lines[-1]
    page.close()


def test_copies_with_a_network_of_their_own_go_at_once_when_they_are_late(tmp_path: Path) -> None:
    world = World(tmp_path, interface="ib0")
    page = HorizonPage(MEMORY, tmp_path)
    for step in range(16):
        page.write(Horizon(epoch=1, target=Stamp(step, 1)))
        sent_for_a_step(world, MIB, 200 * MS_NS)
    page.write(Horizon(epoch=1, target=Stamp(15, 1)))
    ages = []
    for step in range(16, 26):  # this target takes a thousand times as much as those before
        gone = sum(granted for _, granted in sent_for_a_step(world, 1000 * MIB, 200 * MS_NS))
        ages += [step - 15] * (gone > 100 * MIB)
    assert ages and min(ages) > LATE_STEPS
    page.close()


def test_copies_go_where_the_network_is_idle_and_the_link_is_learnt(tmp_path: Path) -> None:
    world = World(tmp_path)
    granted = [world.step() for _ in range(40)]
    assert all(
        line.startswith("copies go where the trainers leave the network idle: ")
        for line in world.told.lines
    )
    assert abs(world.pacing._terms().cost.bytes_per_s - RATE) < 0.1 * RATE
    # 100 ms of idle time a step
    assert all(0.6 * RATE / 10 < nbytes <= 0.95 * RATE / 10 for nbytes in granted[25:])


def test_all_ranks_of_the_node_must_be_idle(tmp_path: Path) -> None:
    world = World(tmp_path, ranks=2)
    for _ in range(10):
        world.step()
    world.ranks[0].step(10)
    world.ranks[1].step(10)
    assert world.ask(MIB)
    world.pass_ns(MS_NS)
    world.ranks[1].began()
    assert not world.ask(MIB)
    world.ranks[1].ended()
    world.ranks[0].began()
    assert not world.ask(MIB)


def test_nobody_waits_for_ranks_that_do_not_train(tmp_path: Path) -> None:
    world = World(tmp_path)
    for _ in range(10):
        world.step()
    world.ranks[0].began()
    assert not world.ask(MIB)
    world.ranks[0].step(NO_STEP)
    assert world.ask(MIB) == MIB


@pytest.mark.parametrize("blocks_a_step", [1, 40])
def test_a_target_waits_for_so_many_steps_however_many_blocks_it_has(
    tmp_path: Path, blocks_a_step: int
) -> None:
    """The network is idle again and again, but never for long enough for the profile to count
    on."""
    world = World(tmp_path)
    page = HorizonPage(MEMORY, tmp_path)
    for _ in range(25):
        world.step(asking=False)
    gone = []
    for number in range(25, 60):
        if number % 10 == 5:
            target = number
            page.write(Horizon(epoch=1, target=Stamp(target, 1)))
        world.ranks[0].step(number)
        world.pass_ns(125 * MS_NS)
        world.ranks[0].began()
        for _ in range(blocks_a_step):
            world.pass_ns(125 * MS_NS // blocks_a_step)
            if world.pacing.ask(MIB, Flow(1, 0, 0))[0] == MIB:
                gone.append(number - target)
        world.ranks[0].ended()
    late = [age for age in range(10) if age > LATE_STEPS and age * world.step_ns > LATE_NS]
    assert sorted(set(gone)) == late
    assert len(gone) > 0.8 * blocks_a_step * 3 * len(late)
    assert world.pacing.late == len(gone)
    page.close()


def test_another_rhythm_is_told_and_planned_anew(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.pacing.expects(2 * MIB)
    for _ in range(30):
        world.step()
    assert world.pacing.plan is not None
    before, told = world.pacing.plan.why, json.loads((tmp_path / "interleave.json").read_text())
    for _ in range(30):
        world.step(idle_ns=20 * MS_NS, busy_ns=200 * MS_NS)
    after = world.pacing.plan.why
    assert [line for line in world.told.lines if "the rhythm has changed" in line]
    assert told["open_because"] == "" and told["step_bytes"] == 2 * MIB
    assert (
        "2.0 MiB in" in before
        and "too much" not in before
        and "too much; 2 steps have room" in after
    )


def test_a_plan_comes_as_soon_as_the_link_is_known_and_another_one_when_it_is_another_link(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    world.pacing.expects(2 * MIB)  # when nothing has crossed the link yet
    for _ in range(6):
        world.step(asking=False)
    assert world.pacing.plan is None
    for _ in range(10):
        world.step()
    assert world.pacing.plan is not None
    took_ns = sum(world.pacing.plan.used_ns)
    assert abs(took_ns - 2 * MIB * S_NS // world.rate) < 0.15 * took_ns
    world.rate //= 2
    for _ in range(60):
        world.step()
    took_ns = sum(world.pacing.plan.used_ns)
    assert abs(took_ns - 2 * MIB * S_NS // world.rate) < 0.15 * took_ns


def test_every_byte_is_counted_by_when_it_went(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.pacing.expects(2 * MIB)
    granted = {"idle": sum(world.step() for _ in range(30)), "free": 0}
    world.ranks[0].step(NO_STEP)
    granted["free"] = world.ask(MIB)
    world.pass_ns(COUNT_NS)
    granted["free"] += world.ask(MIB)
    world.pass_ns(COUNT_NS)
    world.pacing.ask(1, Flow(1, 0, 0))
    told, plan = json.loads((tmp_path / COUNT_FILE).read_text()), world.pacing.plan
    assert plan is not None and told["plans"] >= 2
    assert (told["idle_bytes"], told["late_bytes"], told["free_bytes"]) == (
        granted["idle"],
        0,
        granted["free"],
    )
    assert told["idle_ns"] == sum(plan.budget_ns) and told["used_ns"] + told["overflow_ns"] == sum(
        plan.used_ns
    )


def test_too_little_idle_time_is_no_reason_to_lose_protection(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.pacing.expects(500 * MIB)
    for _ in range(30):
        world.step(busy_ns=10 * MS_NS)
    assert world.told.lines[-1].startswith(
        "copies are not interleaved: there is too little idle time: 500.0 MiB in "
    )
    world.ranks[0].began()
    assert world.ask(9 * MIB) == 9 * MIB


def test_what_a_step_takes_is_learnt_from_the_targets(tmp_path: Path) -> None:
    world = World(tmp_path)
    for _ in range(25):
        world.step()
    page = HorizonPage(MEMORY, tmp_path)
    for number in range(10):
        page.write(Horizon(1, target=Stamp(number, 1)))
        world.step(asking=False)
        world.ranks[0].step(world.steps)
        for _ in range(3):
            assert world.ask(20_000) == 20_000
            world.pass_ns(2 * MS_NS)
    told = json.loads((tmp_path / "interleave.json").read_text())
    assert told["step_bytes"] == 60_000
    page.close()


def test_who_looks_for_a_horizon_makes_none(tmp_path: Path) -> None:
    world = World(tmp_path)
    for _ in range(5):
        world.step()
    with pytest.raises(OSError):
        HorizonPage(MEMORY, tmp_path, make=False)


def test_a_rank_that_moved_away_is_forgotten(tmp_path: Path) -> None:
    world = World(tmp_path)
    for _ in range(10):
        world.step()
    world.ranks[0].began()
    assert not world.ask(MIB)
    profile_path(tmp_path, 0).unlink()
    world.pass_ns(LATE_NS)
    assert world.ask(MIB) == MIB


def test_a_reserve_bounds_what_is_under_way(tmp_path: Path) -> None:
    world = World(tmp_path, reserve=Reserve(400_000, 4))
    for _ in range(25):
        world.step()
    world.ranks[0].step(99)
    world.queued = 0
    assert [world.ask(MIB) for _ in range(6)] == [100_000] * 4 + [0, 0]
