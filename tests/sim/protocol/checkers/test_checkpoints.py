"""The checker of checkpoints finds planted mistakes; a store that goes away at the worst moment is
no empty one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from keepstep.model.checkpoint import StoreListing
from keepstep.model.events import Event
from keepstep.model.units import S_NS
from keepstep.runtime.keeper.store_look import StoreLook
from keepstep.runtime.persister.persister import Persister
from keepstep.sim.protocol.checkers.atlas import Atlas
from keepstep.sim.protocol.checkers.checkpoints import CheckpointsAreWhole
from keepstep.sim.protocol.job.checkpoint_format import SimFormat
from keepstep.sim.protocol.job.job import SimJob, SimOutcome
from keepstep.sim.protocol.job.observer import Observer
from keepstep.sim.protocol.job.plan import RunPlan
from keepstep.sim.protocol.swarm import CHECKERS
from keepstep.sim.protocol.world.machine import Machine
from keepstep.sim.protocol.world.world import World

PLAN = RunPlan(
    nodes=2, steps=12, store=True, persist_every_steps=2, policy="none", limit_ns=300 * S_NS
)


def _run(
    lost_at_ns: int = 0, new_observer: Callable[[SimJob], Observer] | None = None
) -> SimOutcome:
    """With all machines lost at one moment; 0: never."""
    job = SimJob(PLAN, World(1))
    atlas = Atlas(job)
    others = [] if new_observer is None else [new_observer(job)]
    job.watch([atlas, *others, *(new(job, atlas) for new in CHECKERS)])

    def lose() -> None:
        for node in job.living_nodes():
            job.lose_machine(node)
        job.struck("lost all machines")

    if lost_at_ns:
        job.world.after(lost_at_ns, None, lose)
    return job.run()


class AwayAtTheOffer(Observer):
    """The store answers when it is listed, and not when what it has is read."""

    def __init__(self, job: SimJob) -> None:
        self._job = job
        self.times = 0

    def recorded(self, machine: Machine, event: Event) -> None:
        if event.kind == "restore-offered" and event.data["source"] == "store" and not self.times:
            self.times += 1
            disk = self._job.around.disk
            disk.away = 1.0
            self._job.world.after(2 * S_NS, None, disk.heal)
            self._job.struck("the store does not answer")


def test_all_go_on_from_the_store() -> None:
    outcome = _run(8 * S_NS)
    assert outcome.wrong is None and outcome.lost_steps > 0


def test_a_store_that_is_away_when_it_is_read_is_waited_for() -> None:
    made: list[AwayAtTheOffer] = []

    def observer(job: SimJob) -> Observer:
        made.append(AwayAtTheOffer(job))
        return made[0]

    outcome = _run(8 * S_NS, observer)
    assert outcome.wrong is None and made[0].times == 1


def _told(monkeypatch: pytest.MonkeyPatch, where: type, name: str, instead: object) -> str:
    monkeypatch.setattr(where, name, instead)
    outcome = _run()
    assert outcome.wrong is not None
    return outcome.wrong


def test_a_checkpoint_that_is_taken_away_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = _told(
        monkeypatch, Persister, "_not_kept", lambda self, attempt: {attempt.name: "planted"}
    )
    assert wrong.startswith(CheckpointsAreWhole.NAME)


def test_a_wrong_state_that_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: SimFormat, draft: object, name: str, data: bytes) -> None:
        own(self, draft, name, bytes(len(data)) if name.endswith("distcp") else data)  # type: ignore[arg-type]

    own = SimFormat._write
    wrong = _told(monkeypatch, SimFormat, "_write", write)
    assert wrong.startswith(CheckpointsAreWhole.NAME)


class Disk(Observer):
    """That has lied, or whose lists show nothing of what is written, for 20 s from the start."""

    def __init__(self, job: SimJob, has_lied: bool = False, is_behind: bool = False) -> None:
        disk = job.around.disk
        disk.has_lied, disk.is_behind = has_lied, is_behind
        job.world.after(20 * S_NS, None, setattr, disk, "is_behind", False)


@pytest.mark.parametrize("has_lied", [False, True])
def test_a_fresh_start_over_what_the_disk_has_kept(
    has_lied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lie elsewhere is no excuse."""
    monkeypatch.setattr(StoreLook, "_ask_store", lambda self, question: StoreListing([]))
    outcome = _run(8 * S_NS, lambda job: Disk(job, has_lied=has_lied))
    assert outcome.wrong is not None
    assert outcome.wrong.startswith(f"{CheckpointsAreWhole.NAME}: all start afresh")


def test_a_store_that_has_shown_nothing_is_started_afresh_over() -> None:
    outcome = _run(8 * S_NS, lambda job: Disk(job, is_behind=True))
    assert outcome.wrong is None and outcome.lost_steps > 0
