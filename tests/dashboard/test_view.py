"""Views of real pages, slots, locks and journals in a directory."""

from __future__ import annotations

import fcntl
import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from keepstep.config import Settings, resolve
from keepstep.dashboard.finding import FoundJob, find_leftovers
from keepstep.dashboard.links import LinkRows
from keepstep.dashboard.moment import Moment
from keepstep.dashboard.sentences import keeper_words
from keepstep.dashboard.slowness import doubt_words
from keepstep.dashboard.view import JobView, job_view
from keepstep.edge.os.clock import CLOCK
from keepstep.edge.os.journal import FileJournal
from keepstep.edge.shm.beat_files import write_beat
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.parts_file import write_parts
from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.edge.shm.status_page import StatusPage, status_path
from keepstep.model.beats import AgentBeat, KeeperBeat
from keepstep.model.layout import TensorSpec, lay_out
from keepstep.model.parts import PartHealth, PartsReport
from keepstep.model.snapshot import Phase, SlotState, SlotView, Stamp
from keepstep.model.units import MS_NS, S_NS

PAYLOAD_BYTES = 4096


@pytest.fixture
def places(tmp_path: Path) -> Settings:
    (tmp_path / "arena").mkdir()
    return resolve(
        {
            "job": "demo",
            "arena_dir": str(tmp_path / "arena"),
            "state_dir": str(tmp_path / "journals"),
        },
        {},
        "demo",
    )


def make_slot(
    places: Settings,
    rank: int,
    index: int,
    step: int,
    epoch: int = 1,
    sealed: bool = True,
    loss: float = 0.5,
) -> Path:
    path = slot_path(places.job_dir, rank, index)
    path.parent.mkdir(parents=True, exist_ok=True)
    layout = lay_out([TensorSpec("weight", "float32", (PAYLOAD_BYTES // 4,), PAYLOAD_BYTES)])
    slot = Slot.create(MEMORY, path, PAYLOAD_BYTES, 4096)
    slot.begin(bytes(16), rank, 2, 1, Stamp(step, epoch))
    if sealed:
        slot.payload[:PAYLOAD_BYTES] = bytes([step % 256]) * PAYLOAD_BYTES
        slot.seal(
            slot.write_table(PAYLOAD_BYTES, json.dumps(layout.to_json()).encode()),
            layout.hash(),
            loss,
            time.time_ns(),
        )
    slot.close()
    return path


def make_rank(
    places: Settings, rank: int, steps: list[int], writing: int | None = None, **page: Any
) -> StatusPage:
    """A living rank with these steps sealed, in slot order, and one being written. Close the page
    and it is dead."""
    for index, step in enumerate(steps):
        make_slot(places, rank, index, step)
    slots = [SlotView(SlotState.SEALED, Stamp(step, 1)) for step in steps]
    if writing is not None:
        make_slot(places, rank, len(steps), writing, sealed=False)
        slots.append(SlotView(SlotState.WRITING, Stamp(writing, 1)))
    owned = StatusPage.own(MEMORY, places.job_dir, rank)
    assert owned is not None
    facts = {
        "rank": rank,
        "world_size": 2,
        "pid": 100 + rank,
        "epoch": 1,
        "phase": Phase.FORWARD,
        "completed_step": max(steps, default=-1),
    }
    owned.publish(slots=tuple(slots), **{**facts, **page})
    return owned


def hold(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def hold_as_keeper(places: Settings, boot: str = "") -> int:
    """As a keeper does that has just said that it lives."""
    write_beat(MEMORY, places.job_dir, KeeperBeat(CLOCK.monotonic_ns(), boot, 7))
    return hold(places.job_dir / "keeper.lock")


def look(places: Settings, later_s: float = 0.0) -> JobView:
    now = Moment.now()
    later = Moment(now.wall_ns + int(later_s * S_NS), now.mono_ns + int(later_s * S_NS))
    job = FoundJob("demo", places.job_dir, places.journal_path, places.job_dir.is_dir(), 0)
    return job_view(job, later)


def survived(view: JobView) -> dict[str, int | None]:
    return {p.against: p.step for p in view.protection}


def test_while_ranks_prove_their_slots_anew_nothing_is_called_lost(places: Settings) -> None:
    """In a recovery: one rank is gone, the other tells of no slot yet."""
    make_rank(places, 0, [6, 7, 8]).publish(slots=(), phase=Phase.RESTORE)
    make_rank(places, 1, [7, 8], writing=9).close()
    view = look(places)
    assert view.horizon == Stamp(8, 1) and survived(view)["a killed process"] == 8


def test_a_rank_without_any_slot_holds_nothing(places: Settings) -> None:
    make_rank(places, 0, [6, 7, 8])
    make_rank(places, 1, [])
    assert look(places).horizon is None


def test_a_training_job(places: Settings) -> None:
    pages = [
        make_rank(
            places,
            0,
            [6, 7, 8],
            writing=9,
            step=9,
            stall_ns_last=3 * MS_NS,
            payload_bytes=2 * 10**9,
            copy_ns_last=S_NS,
            loss=0.25,
        ),
        make_rank(places, 1, [8, 6, 7], step=9, skipped_steps=2),
    ]
    keeper = hold_as_keeper(places)
    view = look(places, later_s=5)
    assert (view.state, view.keeper_alive, view.world_size, view.horizon) == (
        "training",
        True,
        2,
        Stamp(8, 1),
    )
    assert view.horizon_age_ns is not None and 5 * S_NS <= view.horizon_age_ns < 60 * S_NS
    assert survived(view) == {
        "a killed process": 8,
        "a damaged snapshot": 7,
        "a lost machine": None,
    }
    first, second = view.ranks
    assert (
        first.alive,
        first.pid,
        first.phase,
        first.step,
        first.completed_step,
        first.newest_step,
    ) == (True, 100, "forward", 9, 8, 8)
    assert (first.stall_ns_last, first.copy_bytes_per_s, first.loss) == (3 * MS_NS, 2e9, 0.25)
    assert (second.skipped_steps, second.copy_bytes_per_s, second.loss) == (2, None, None)
    assert first.silent_ns is not None and first.silent_ns >= 5 * S_NS
    assert [(s.rank, s.slot, s.state, s.step) for s in view.slots] == [
        *((0, 0, "sealed", 6), (0, 1, "sealed", 7), (0, 2, "sealed", 8), (0, 3, "writing", 9)),
        *((1, 0, "sealed", 8), (1, 1, "sealed", 6), (1, 2, "sealed", 7)),
    ]
    for page in pages:
        page.close()
    os.close(keeper)


def test_the_horizon_is_what_all_ranks_hold_in_one_epoch(places: Settings) -> None:
    ahead, behind = make_rank(places, 0, [7, 8, 9]), make_rank(places, 1, [6, 7, 8])
    assert look(places).horizon == Stamp(8, 1)
    # the same step of another epoch is another state
    behind.publish(slots=(SlotView(SlotState.SEALED, Stamp(8, 2)),))
    view = look(places)
    assert view.horizon is None
    assert survived(view) == {
        "a killed process": None,
        "a damaged snapshot": None,
        "a lost machine": None,
    }
    ahead.close()
    behind.close()


def test_a_rank_that_nobody_has_seen_means_no_horizon(places: Settings) -> None:
    page = make_rank(places, 0, [7, 8])
    assert look(places).horizon is None
    page.close()


def test_states_from_birth_to_burial(places: Settings) -> None:
    pages = [
        make_rank(places, 0, [], phase=Phase.RESTORE),
        make_rank(places, 1, [], phase=Phase.FORWARD),
    ]
    keeper = hold_as_keeper(places)
    assert look(places).state == "restoring"
    pages[0].publish(phase=Phase.STEP)
    assert look(places).state == "training"
    pages[1].close()
    view = look(places)
    assert (view.state, [r.alive for r in view.ranks]) == ("broken", [True, False])
    assert view.why == "rank 1 is gone; 1 rank alive of 2"
    pages[0].close()
    assert look(places).state == "waiting"
    os.close(keeper)
    assert look(places).state == "left-over"


@pytest.mark.parametrize("kind", ["job-over", "job-ended"])
def test_a_job_that_ended_well_waits_for_nobody_while_its_memory_goes(
    places: Settings, kind: str
) -> None:
    page = make_rank(places, 0, [], phase=Phase.STEP)
    keeper = hold_as_keeper(places)
    page.close()
    journal = FileJournal(places.journal_path, "keeper")
    journal.record("resumed", "begins", step=-1)
    assert look(places).state == "waiting"
    journal.record(kind, "the only rank ended well", ok=True)
    view = look(places)
    told = "the only rank ended well; its memory is being removed"
    assert (view.state, view.why) == ("ended", told)
    journal.record("rank-joined", "rank 0 asks", rank=0)
    assert look(places).state == "waiting", "another life of it has begun"
    journal.record(kind, "gave up", ok=False)
    assert look(places).state == "waiting", "its memory is kept for a restart"
    os.close(keeper)


def test_nobody_is_called_dead_for_memory_that_somebody_has_removed(places: Settings) -> None:
    places.job_dir.mkdir(parents=True)
    (places.job_dir / "horizon").touch()
    journal = FileJournal(places.journal_path, "keeper")
    journal.record("resumed", "begins", step=-1)
    view = look(places)
    assert view.state == "left-over" and "may have been removed while it runs" in view.why
    journal.record("job-ended", "gave up", ok=False)
    assert "neither a rank nor the keeper is alive" in look(places).why
    journal.close()


def test_an_earlier_life_s_end_is_not_the_end_of_one_that_lost_its_memory(
    places: Settings,
) -> None:
    journal = FileJournal(places.journal_path, "keeper")
    journal.record("job-over", "the only rank ended well", ok=True)
    journal.record("rank-joined", "rank 0 asks", rank=0)
    view = look(places)
    assert view.state == "ended"
    assert view.why == "its memory is gone, and its journal does not say why"
    journal.close()


def test_an_ended_job_says_why_and_what_is_stored(places: Settings) -> None:
    journal = FileJournal(places.journal_path, "keeper")
    journal.record("persisted", "step 9", step=9)
    journal.record("job-over", "all 2 ranks ended well", ok=True)
    view = look(places, later_s=3)
    assert (view.state, view.why, view.job_dir, view.protection, view.ranks) == (
        "ended",
        "all 2 ranks ended well",
        None,
        (),
        (),
    )
    assert (
        view.checkpoint is not None
        and view.checkpoint.step == 9
        and 3 * S_NS <= view.checkpoint.age_ns < 60 * S_NS
    )
    journal.close()


def test_a_checkpoint_counts_until_it_is_found_damaged(places: Settings) -> None:
    journal = FileJournal(places.journal_path, "keeper")
    pages = [make_rank(places, rank, [30]) for rank in range(2)]
    journal.record("persist-failed", "step 9: no space", step=9)
    assert survived(look(places)) == {
        "a killed process": 30,
        "a damaged snapshot": None,
        "a lost machine": None,
    }
    journal.record("persisted", "step 19", step=19)
    journal.record("persisted", "step 29", step=29)
    assert survived(look(places)) == {
        "a killed process": 30,
        "a damaged snapshot": 29,
        "a lost machine": 29,
    }
    journal.record("checkpoint-damaged", "step 29: block 0", step=29)
    assert survived(look(places))["a lost machine"] == 19
    journal.close()
    for page in pages:
        page.close()


def test_what_is_not_stored_is_said_until_something_is(places: Settings) -> None:
    journal, page = FileJournal(places.journal_path, "keeper"), make_rank(places, 0, [30])
    other = make_rank(places, 1, [30])
    assert look(places).why == "2 ranks alive"
    journal.record("persister-stuck", "the store does not answer")
    assert look(places).why == "2 ranks alive; not stored: the store does not answer"
    journal.record("persisted", "step 29", step=29)
    assert look(places).why == "2 ranks alive"
    journal.close()
    page.close()
    other.close()


def test_a_flipped_bit_in_a_header_is_named(places: Settings) -> None:
    page = make_rank(places, 0, [7])
    path = slot_path(places.job_dir, 0, 0)
    raw = bytearray(path.read_bytes())
    raw[100] ^= 4
    path.write_bytes(raw)
    [row] = look(places).slots
    assert row.state == "damaged" and str(path) in row.why and "expected" in row.why
    page.close()


def test_a_page_that_was_never_whole(places: Settings) -> None:
    page = make_rank(places, 0, [7])
    status_path(places.job_dir, 0).write_bytes(bytes(4096))
    view = look(places)
    assert [(r.alive, r.phase, r.loss, r.silent_ns) for r in view.ranks] == [
        (True, "unknown", None, None)
    ]
    assert view.world_size is None and view.horizon is None
    page.close()


def test_looking_changes_nothing(places: Settings) -> None:
    make_rank(places, 0, [1, 2], writing=3).close()
    before = {p: p.read_bytes() for p in sorted(places.arena_dir.rglob("*")) if p.is_file()}
    look(places)
    find_leftovers(places.arena_dir)
    assert {p: p.read_bytes() for p in sorted(places.arena_dir.rglob("*")) if p.is_file()} == before


def test_who_is_slow_is_shown_while_the_job_trains(places: Settings) -> None:
    journal = FileJournal(places.journal_path, "agent")
    journal.record(
        *("slow-rank", "rank 1 is slow"), rank=1, section="data", cause="quota", detail="all"
    )
    journal.record("slow-rank", "rank 0 is slow", rank=0, section="compute", cause="compute")
    journal.record("slow-over", "rank 0 is fast", rank=0)
    journal.record("slow-confirmed", "rank 0: slow cores", rank=0, cause="processor")
    journal.record("slow-confirmed", "rank 1: more to do", rank=1, cause="program")
    journal.record("slow-unknown", "a device", doubt="device")
    journal.record("slow-unknown", "learns", doubt="learning")
    journal.close()
    pages = [make_rank(places, rank, [7], step=8) for rank in range(2)]
    [row] = look(places, later_s=5).slow
    assert (row.rank, row.section, row.cause, row.why) == (1, "data", "quota", "rank 1 is slow")
    assert (row.confirmed, row.confirmed_why) == ("program", "rank 1: more to do")
    assert row.detail == "all"
    assert 5 * S_NS <= row.age_ns < 60 * S_NS
    doubt, learning = look(places).doubts
    assert (doubt.of, doubt.doubt, doubt.why) == ("slow ranks", "device", "a device")
    assert (learning.of, learning.doubt) == ("slow ranks", "learning")
    hot = FileJournal(places.journal_path, "agent")
    hot.record("slow-known", "learnt", doubt="learning")
    hot.record("slow-confirmed", "rank 1: heat", rank=1, cause="throttled")
    hot.close()
    assert [doubt.doubt for doubt in look(places).doubts] == ["device"]
    [row] = look(places).slow
    assert (row.cause, row.confirmed, row.confirmed_why) == ("throttled",) * 2 + ("rank 1: heat",)
    pages[1].close()
    broken = look(places)
    assert (broken.slow, broken.doubts) == ((), ()), "it does not train"
    pages[0].close()


def test_slow_links_and_damage_are_shown_while_the_job_trains(places: Settings) -> None:
    journal = FileJournal(places.journal_path, "keeper")
    link = {"side": "link", "nodes": [0, 1], "ratio": 3.0, "cause": "loss"}
    journal.record("slow-link", "the link between nodes 0 and 1 is slow", **link)
    journal.record("link-damages", "12 messages from node 1", node=1, count=12)
    journal.close()
    page = make_rank(places, 0, [7], step=8)
    job = FoundJob("demo", places.job_dir, places.journal_path, True, 0)
    [slow], [damage] = asdict(job_view(job, Moment.now()).links).values()
    assert (slow["side"], slow["nodes"], slow["ratio"], slow["cause"]) == (
        "link",
        (0, 1),
        3,
        "loss",
    )
    assert slow["why"] == "the link between nodes 0 and 1 is slow" and slow["age_ns"] < 60 * S_NS
    assert (damage["node"], damage["count"], damage["why"]) == (1, 12, "12 messages from node 1")
    page.close()
    assert job_view(job, Moment.now()).links == LinkRows(), "it does not train"


def test_parts_are_shown_while_the_job_trains_and_while_they_are_news(places: Settings) -> None:
    page = make_rank(places, 0, [7], step=8)
    assert look(places).parts == ()
    sick = PartHealth("gpu 0000:3b:00", "bad", "it is hot", "cool it", 3, CLOCK.monotonic_ns())
    never = PartHealth("nic", "unknown", "nobody can tell", "", 3, 0)
    report = PartsReport(CLOCK.monotonic_ns(), "", (sick, never))
    write_parts(MEMORY, places.job_dir, report)
    [gpu, nic] = look(places).parts
    assert (gpu.part, gpu.health, gpu.why, gpu.fix) == (*sick[:2], "it is hot", "cool it")
    assert gpu.age_ns is not None and gpu.age_ns < 60 * S_NS and nic.age_ns is None
    later = look(places, later_s=30).parts
    assert {row.health for row in later} == {"unknown"}
    assert "the node's agent has not said anything for" in later[0].why
    page.close()


def test_a_keeper_that_holds_its_lock_and_is_silent_is_unknown(places: Settings) -> None:
    pages = [make_rank(places, rank, [7], step=8) for rank in range(2)]
    assert (look(places).keeper_alive, look(places).doubts) == (False, ()), "there is none"
    lock = hold_as_keeper(places)
    view = look(places, later_s=15)
    assert (view.keeper_alive, view.doubts) == (True, ())
    view = look(places, later_s=22)
    assert view.keeper_alive is None and keeper_words(view.keeper_alive).tone == "warn"
    assert view.keeper_silent_ns is not None and view.keeper_silent_ns >= 22 * S_NS
    [row] = view.doubts
    assert doubt_words(replace(row, age_ns=34 * S_NS)) == (
        "Unknown: the keeper: process 7 holds its lock and has said nothing for 34 s."
    )
    for page in pages:
        page.close()
    view = look(places, later_s=22)
    assert view.state == "waiting" and "nobody can tell" in view.why
    write_beat(MEMORY, places.job_dir, KeeperBeat(CLOCK.monotonic_ns(), "before", 7))
    assert look(places).keeper_alive is None, "of another life of the machine"
    (places.job_dir / "keeper-beat.json").write_text("{")
    [row] = look(places).doubts
    assert "has said nothing yet" in doubt_words(row)
    os.close(lock)
    assert look(places).keeper_alive is False, "killed: its lock says so"


def test_links_of_several_nodes_are_unknown_until_it_is_told_that_they_are_known(
    places: Settings,
) -> None:
    def doubts(later_s: float = 0.0) -> list[str]:
        rows = look(places, later_s).doubts
        return [row.doubt for row in rows if row.of == "slow links"]

    pages = [make_rank(places, rank, [7], step=8) for rank in range(2)]
    lock = hold_as_keeper(places)
    journal = FileJournal(places.journal_path, "keeper")
    journal.record("mesh", "of one node", node=0, nodes=1)
    assert doubts() == [], "it has no links"
    journal.record("mesh", "of two", node=0, nodes=2)
    assert doubts() == ["untold"]
    journal.record("link-unknown", "of 2 of 2 directions too little is known", doubt="learning")
    assert doubts() == ["learning"]
    journal.record("link-known", "enough", doubt="learning")
    assert doubts() == []
    assert doubts(later_s=25) == ["silence"], "its keeper has said nothing for so long"
    journal.record("link-unknown", "it varies", doubt="noise")
    journal.record("link-unknown", "node 1 told nothing", doubt="unheard")
    journal.record("link-known", "it varies less", doubt="noise")
    [row] = look(places).doubts
    assert doubt_words(replace(row, age_ns=34 * S_NS)) == (
        "Unknown, told 34 s ago: slow links: node 1 told nothing."
    )
    journal.record("keeper-started", "the next one")
    assert doubts() == ["untold"], "it has forgotten all"
    journal.record("mesh", "of two", node=1, nodes=2)
    assert doubts() == ["elsewhere"]
    os.close(lock)
    for page in pages:
        page.close()


def test_where_the_agent_is_silent_nobody_says_that_nothing_is_slow_or_hangs(
    places: Settings,
) -> None:
    pages = [make_rank(places, rank, [7], step=8) for rank in range(2)]
    assert look(places).doubts == (), "no agent has ever said anything"
    write_beat(MEMORY, places.job_dir, AgentBeat(CLOCK.monotonic_ns(), "", 3))
    assert look(places, later_s=10).doubts == ()
    [row] = look(places, later_s=30).doubts
    assert (row.of, row.doubt) == ("slow ranks and hangs", "silence")
    assert row.age_ns is not None and 30 * S_NS <= row.age_ns < 60 * S_NS
    assert doubt_words(replace(row, age_ns=34 * S_NS)) == (
        "Unknown: slow ranks and hangs: the agent of node 3 has said nothing for 34 s."
    )
    pages[1].close()
    assert [row.doubt for row in look(places, later_s=30).doubts] == ["silence"], "broken"
    write_beat(MEMORY, places.job_dir, AgentBeat(CLOCK.monotonic_ns(), "before", 3))
    [row] = look(places).doubts
    assert row.age_ns is None and "since this machine started" in row.why
    assert doubt_words(row).endswith("since this machine started.")
    pages[0].close()
    assert look(places, later_s=30).doubts == (), "nobody is there who could be slow"


def test_a_job_in_another_arena_is_not_called_ended(places: Settings) -> None:
    journal = FileJournal(places.journal_path, "keeper")
    there = places.arena_dir.parent / "elsewhere" / places.job_dir.parent.name / places.job
    journal.record("keeper-started", "looks after it", pid=1, job_dir=str(there))
    view = look(places)
    assert view.state == "unknown"
    assert f"KEEPSTEP_ARENA_DIR={places.arena_dir.parent / 'elsewhere'} keepstep" in view.why
    journal.record("keeper-started", "looks after it", pid=1, job_dir=str(places.job_dir))
    assert look(places).state == "ended"
    journal.close()
