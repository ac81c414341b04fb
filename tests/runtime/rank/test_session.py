"""The session in one process with a real keeper: what it restores, what it refuses, what it leaves
behind."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import keepstep
from keepstep.config import job_dir_of, resolve, user_dir
from keepstep.core.wire.conversations import AGENT_WITH_KEEPER, RANK_WITH_KEEPER
from keepstep.edge.net.unix_socket import Mailbox
from keepstep.edge.os.error_file import read_error_file
from keepstep.edge.os.job_directory import claim_job_dir
from keepstep.edge.os.journal import read_journal
from keepstep.edge.os.processes import ensure_keeper
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot, slot_path, slot_paths
from keepstep.edge.shm.status_page import StatusPage
from keepstep.edge.shm.step_work_page import StepWorkReader, work_path
from keepstep.edge.store.store import Store
from keepstep.errors import (
    ConfigError,
    IdentityError,
    KeeperError,
    LayoutError,
    MemoryBudgetError,
    StoreError,
)
from keepstep.model.messages.keeper_agent import AgentHere, JobEnded
from keepstep.model.messages.keeper_rank import JoinVote
from keepstep.model.snapshot import SlotState, SlotView, Stamp
from keepstep.model.step_work import PASSES, Section
from keepstep.model.units import PAGE_BYTES
from keepstep.ports import Acts
from keepstep.runtime.rank import session
from keepstep.runtime.rank.capture import Capture
from keepstep.runtime.rank.holdings import Holdings
from keepstep.runtime.slot_locks import pin_one, unpin
from tests.pidfds import ends

Settings = dict[str, Any]


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    """A configuration with places of its own; when the test is over, every keeper in them is ended
    and has left nothing."""
    arena = tmp_path / "arena"
    arena.mkdir()
    yield {
        "job": "j",
        "arena_dir": arena,
        "state_dir": tmp_path / "state",
        "grace_s": 60.0,
        "scrub_every_s": 0.0,
    }
    if session._current is not None:
        session._current.close(ok=False)  # of a test that failed
    for directory in user_dir(arena).glob("*"):
        box = Mailbox.connect(directory / "keeper.sock", 5, AGENT_WITH_KEEPER)
        pidfd = os.pidfd_open(box.peer()[0])
        box.send(AgentHere(os.getpid()))
        box.send(JobEnded(True, "the test is over"))
        assert ends(pidfd, 20), "the keeper does not go"
        os.close(pidfd)
        box.close()
    assert list(arena.iterdir()) == []


def job_dir(settings: Settings) -> Path:
    return job_dir_of(Path(settings["arena_dir"]), settings["job"])


def kinds(settings: Settings) -> list[str]:
    return [
        e.kind
        for e in read_journal(Path(settings["state_dir"]) / settings["job"] / "journal.jsonl")
    ]


class Training:
    """Everything a small training is made of, from one seed."""

    def __init__(self, width: int = 8, seed: int = 3) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        self.model = nn.Sequential(
            nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.05)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 30)

    @property
    def stateful(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(6, 4) + random.random()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss

    def digest(self) -> list[Any]:
        tensors = [
            *self.model.state_dict().values(),
            *(v for s in self.optimizer.state.values() for v in s.values()),
        ]
        raw = [ctypes.string_at(t.contiguous().data_ptr(), t.nbytes) for t in tensors]
        return [raw, self.schedule.state_dict(), torch.get_rng_state().tolist(), random.getstate()]


def undisturbed(steps: int) -> list[Any]:
    training = Training()
    for _ in range(steps):
        training.step()
    return training.digest()


def run(settings: Settings, training: Training, total: int, leave: bool = False) -> keepstep.Job:
    """Train up to `total` steps; `leave` the memory for the next life, as a program does that ends
    by an error."""
    job = keepstep.protect(settings, **training.stateful)
    for _ in job.steps(total):
        job.report(loss=training.step())
        assert drained(job), "steps as short as these would be skipped now and then"
    job.close(ok=not leave)
    return job


def drained(job: keepstep.Job) -> bool:
    """Whether everything that was being captured is sealed, within a while."""
    return job._drain(job._rank.drain, within_s=20)


def digest_restored(training: Training, job: keepstep.Job) -> Any:
    """As the first step finds it: until then the program has its own random numbers."""
    job._data.loop_begins()
    return training.digest()


def slot_bytes(settings: Settings) -> list[bytes]:
    return [p.read_bytes() for p in slot_paths(MEMORY, job_dir(settings), 0)]


# ---------------------------------------------------------------------------------------------- it
# ends well


def test_a_training_that_ends_well_leaves_nothing_and_is_not_disturbed(settings: Settings) -> None:
    training = Training()
    job = run(settings, training, 12)
    assert job.step == 11 and job.closed
    assert list(settings["arena_dir"].iterdir()) == []
    assert training.digest() == undisturbed(12)
    found = kinds(settings)
    assert [
        k
        for k in found
        if k in ("keeper-started", "resumed", "slots-made", "summary", "job-over", "keeper-ended")
    ] == [*("keeper-started", "resumed", "slots-made", "summary", "job-over", "keeper-ended")]


def test_the_steps_that_were_seen_are_counted_in_the_summary(settings: Settings) -> None:
    run(settings, Training(), 12)
    [summary] = [
        e
        for e in read_journal(settings["state_dir"] / "j" / "journal.jsonl")
        if e.kind == "summary"
    ]
    counts = summary.data
    assert counts["captured_steps"] >= 1 and counts["torn_steps"] == 0
    assert counts["captured_steps"] + counts["skipped_steps"] == 12


def test_closing_inside_the_loop_ends_it(settings: Settings) -> None:
    job = keepstep.protect(settings, **Training().stateful)
    seen = []
    for step in job.steps(5):
        seen.append(step)
        if step == 2:
            job.close()
    assert seen == [0, 1, 2]
    job.close()  # twice is once


def test_one_after_the_other_in_one_process(settings: Settings) -> None:
    for _ in range(3):
        training = Training()
        assert run(settings, training, 3).step == 2
        assert training.digest() == undisturbed(3)


# ---------------------------------------------------------------------------------------------- it
# resumes


def test_a_training_that_was_left_goes_on_bit_for_bit(settings: Settings) -> None:
    run(settings, Training(), 7, leave=True)
    run(settings, Training(seed=99), 14, leave=True)
    training = Training(seed=98)
    job = keepstep.protect(settings, **training.stateful)
    assert job.step == 13
    assert next(iter(job.steps(20))) == 14
    for _ in range(14, 20):
        training.step()
    assert training.digest() == undisturbed(20)
    job.close()


def test_nothing_is_restored_when_there_is_nothing(settings: Settings) -> None:
    training = Training()
    before = training.digest()
    job = keepstep.protect(settings, **training.stateful)
    assert job.step == -1 and training.digest() == before
    job.close()


def test_a_schedule_already_done_runs_no_step(settings: Settings) -> None:
    run(settings, Training(), 5, leave=True)
    job = keepstep.protect(settings, **Training().stateful)
    assert list(job.steps(5)) == []
    job.close()


def test_plain_values_through_the_job(settings: Settings) -> None:
    job = keepstep.protect(settings, best=9.0, seen=[])
    for step in job.steps(3):
        assert drained(job)
        job.state["best"] = 1.0 / (step + 1)
        job.state["seen"].append(step)
    job.close(ok=False)
    seen: list[int] = []
    job = keepstep.protect(settings, best=9.0, seen=seen)
    assert job.state == {"best": 1 / 3, "seen": [0, 1, 2]} and seen == [0, 1, 2]
    job.close()


def test_the_loss_is_kept_with_the_snapshot(settings: Settings) -> None:
    job = keepstep.protect(settings, x=1)
    for step in job.steps(3):
        assert drained(job)
        job.report(loss=torch.tensor([0.5 * step]))
    job.close(ok=False)
    losses = {}
    for path in slot_paths(MEMORY, job_dir(settings), 0):
        slot = Slot(MEMORY, path)
        losses[slot.header().stamp.step] = slot.header().loss
        slot.close()
    assert losses[2] == 1.0 and losses[1] == 0.5


@pytest.mark.parametrize("says_where_its_body_begins", [True, False])
def test_what_each_section_of_a_step_takes_is_on_the_ranks_page(
    settings: Settings, says_where_its_body_begins: bool
) -> None:
    training = Training()
    job = keepstep.protect(settings, **training.stateful)
    data = job.loader([torch.randn(6, 4)] * 50)
    for step in job.steps(9):
        with step if says_where_its_body_begins else contextlib.nullcontext():
            next(data)
            training.step()
            if step % 3 == 1:
                job.enter("evaluate")
            job.report(tokens=100)
    reader = StepWorkReader(MEMORY, work_path(job_dir(settings), 0))
    last = reader.newest()
    assert last is not None and (last.step, last.epoch, last.tokens) == (8, job._rank.epoch, 900)
    assert all(last.own_ns[section] > 0 for section in Section)
    assert all(last.cpu_ns[section] > 0 for section in Section)
    assert 0 < sum(last.own_ns[one] for one in PASSES) < last.own_ns[Section.COMPUTE]
    first = reader.at(2, last)
    assert first is not None and first.tokens == 300
    took_ns = [sum(work.own_ns) - sum(work.own_ns[one] for one in PASSES) for work in (first, last)]
    assert took_ns[1] - took_ns[0] == last.ended_ns - first.ended_ns, "nobody waited"
    with pytest.raises(ConfigError, match="tokens= a whole number, 0 or more, found -1"):
        job.report(tokens=-1)
    with pytest.raises(ConfigError, match=r"found tensor\(3\); call .item\(\) on a tensor"):
        job.report(tokens=torch.tensor(3))
    reader.close()
    job.close()


def test_telling_tokens_alone_leaves_the_loss_as_it_was(settings: Settings) -> None:
    job = keepstep.protect(settings, x=1)
    for _ in job.steps(1):
        job.report(loss=2.5)
        job.report(tokens=7)
        assert job._reports.loss == job._reports.loss_now == 2.5
    job.close()


def test_where_slow_ranks_are_not_looked_for_nothing_is_measured(settings: Settings) -> None:
    job = keepstep.protect({**settings, "slow_ranks": "off"}, x=1)
    for _ in job.steps(2):
        job.report(tokens=7)
    assert not work_path(job_dir(settings), 0).exists()
    job.close()


@pytest.mark.parametrize("slow_ranks", ["tell", "off"])
def test_when_a_job_is_closed_its_modules_have_no_hooks_of_ours(
    settings: Settings, slow_ranks: str
) -> None:
    training = Training()
    modules = [part for part in training.stateful.values() if isinstance(part, nn.Module)]
    job = keepstep.protect({**settings, "slow_ranks": slow_ranks}, **training.stateful)
    hooks = [module._forward_hooks for module in modules]
    assert [len(some) for some in hooks] == [slow_ranks == "tell"] * len(modules) != []
    job.close()
    assert not any(hooks)


def damage(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def newest(settings: Settings) -> tuple[int, Stamp]:
    """(slot, stamp) of the newest snapshot."""
    stamps = {}
    for index, path in enumerate(slot_paths(MEMORY, job_dir(settings), 0)):
        slot = Slot(MEMORY, path)
        stamps[index] = slot.header().stamp
        slot.close()
    index = max(stamps, key=lambda i: stamps[i])
    return index, stamps[index]


@pytest.mark.parametrize("at", [3, 40, PAGE_BYTES + 100], ids=["magic", "header", "payload"])
def test_a_damaged_snapshot_is_named_and_the_one_before_it_serves(
    settings: Settings, at: int
) -> None:
    run(settings, Training(), 9, leave=True)
    index, stamp = newest(settings)
    assert stamp.step == 8
    damage(slot_path(job_dir(settings), 0, index), at)
    training = Training(seed=99)
    job = keepstep.protect(settings, **training.stateful)
    assert -1 < job.step < 8
    assert digest_restored(training, job) == undisturbed(job.step + 1)
    assert "damaged" in kinds(settings)
    before = job.step
    job.close(ok=False)  # nothing was done since: what it stands on must still be there
    again = keepstep.protect(settings, **Training(seed=98).stateful)
    assert again.step == before
    again.close()


def test_a_snapshot_that_is_damaged_after_it_proved_is_asked_for_anew(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else has it here: the one before it serves."""
    run(settings, Training(), 9, leave=True)
    index, stamp = newest(settings)
    prove = Capture.prove

    def then_damaged(self: Capture) -> Acts[Holdings]:
        found = yield from prove(self)
        damage(slot_path(job_dir(settings), 0, index), PAGE_BYTES + 100)
        return found

    monkeypatch.setattr(Capture, "prove", then_damaged)
    training = Training(seed=99)
    job = keepstep.protect(settings, **training.stateful)
    assert -1 < job.step < stamp.step
    assert digest_restored(training, job) == undisturbed(job.step + 1)
    told = read_journal(settings["state_dir"] / settings["job"] / "journal.jsonl")
    assert any(e.kind == "damaged" and e.why.startswith(f"{stamp} proves no more") for e in told)
    job.close()


def test_whoever_hears_that_a_snapshot_is_sealed_can_pin_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the keeper, which does so at once, finds it locked, and its copies are late."""
    found = []
    set_view = Capture._set_view

    def pinned_before(self: Capture, index: int, view: SlotView, **changes: Any) -> None:
        if view.state is SlotState.SEALED:
            slot = pin_one(MEMORY, job_dir(settings), view.stamp, 0)
            found.append(slot is not None)
            unpin([slot] if slot is not None else [])
        set_view(self, index, view, **changes)

    monkeypatch.setattr(Capture, "_set_view", pinned_before)
    run(settings, Training(), 5)
    assert len(found) > 1 and all(found)


def test_a_slot_without_a_header_does_not_move_its_neighbours(settings: Settings) -> None:
    run(settings, Training(), 3, leave=True)
    assert newest(settings) == (2, Stamp(2, 1))
    damage(slot_path(job_dir(settings), 0, 0), at=3)
    for _ in range(2):
        job = keepstep.protect(settings, **Training(seed=99).stateful)
        assert job.step == 2
        job.close(ok=False)


def test_the_memory_of_ranks_that_are_no_more_is_removed(settings: Settings) -> None:
    """Else their old pages would say for ever that they do not hold what the others do, and nothing
    could be persisted."""
    claim_job_dir(job_dir(settings))
    gone = StatusPage.own(MEMORY, job_dir(settings), 1)
    assert gone is not None
    gone.publish(rank=1, world_size=2, decided_step=40)
    gone.close()
    job = keepstep.protect(settings, x=1)
    assert [d.name for d in sorted(job_dir(settings).glob("rank-*"))] == ["rank-00000"]
    job.close()


# ----------------------------------------------------------------------------------------------
# what it refuses


def test_unknown_keys_start_nothing(settings: Settings) -> None:
    with pytest.raises(ConfigError, match="unknown configuration key 'slot'; did you mean 'slots'"):
        keepstep.protect({**settings, "slot": 3}, **Training().stateful)
    assert list(settings["arena_dir"].iterdir()) == []


def test_a_changed_shape_is_named_and_nothing_is_lost(settings: Settings) -> None:
    run(settings, Training(), 7, leave=True)
    before = slot_bytes(settings)
    wide = Training(width=9)
    untouched = wide.digest()
    with pytest.raises(
        LayoutError,
        match=r"model.0.weight: expected float32\[9, 4\], found float32\[8, 4\]"
        "|first difference is number 0",
    ):
        keepstep.protect(settings, **wide.stateful)
    assert slot_bytes(settings) == before and wide.digest() == untouched
    training = Training(seed=99)
    job = keepstep.protect(settings, **training.stateful)  # mended, in the same process
    assert job.step == 6 and digest_restored(training, job) == undisturbed(7)
    job.close()


def test_another_job_s_arena_is_refused_and_not_touched(settings: Settings) -> None:
    run(settings, Training(), 7, leave=True)
    keeper = ensure_keeper_of(settings)
    os.kill(keeper.peer()[0], signal.SIGKILL)
    assert keeper.recv(20) is None
    keeper.close()
    job_dir(settings).rename(job_dir_of(settings["arena_dir"], "other"))
    other = {**settings, "job": "other"}
    before = slot_bytes(other)
    with pytest.raises(
        IdentityError,
        match=r"expected a snapshot of job 'other' \([0-9a-f]{8}\), found one of another job",
    ):
        keepstep.protect(other, **Training().stateful)
    assert slot_bytes(other) == before


def ensure_keeper_of(settings: Settings) -> Mailbox:
    return ensure_keeper(resolve(settings, {}, "unused"), RANK_WITH_KEEPER)


def test_a_living_duplicate_is_refused(settings: Settings) -> None:
    claim_job_dir(job_dir(settings))
    owner = StatusPage.own(MEMORY, job_dir(settings), 0)
    assert owner is not None
    with pytest.raises(
        IdentityError, match="rank 0 of job 'j' is already running in another process"
    ):
        keepstep.protect(settings, **Training().stateful)
    owner.close()
    keepstep.protect(settings, **Training().stateful).close()


def test_twice_in_one_process_is_refused(settings: Settings) -> None:
    job = keepstep.protect(settings, x=1)
    with pytest.raises(ConfigError, match="protect.. was called twice"):
        keepstep.protect(settings, x=1)
    job.close()


def test_another_world_size_without_a_store_is_refused_and_nothing_is_lost(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(settings, Training(), 7, leave=True)
    before = slot_bytes(settings)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    other_rank = ensure_keeper_of(settings)
    other_rank.send(JoinVote(1, 2, 1, ()))
    with pytest.raises(
        KeeperError,
        match=r"state for 1 rank and the job has 2 now, and there is no store .*\. "
        "Run with 1 rank, give a store, or start over",
    ):
        keepstep.protect(settings, **Training().stateful)
    other_rank.close()
    assert slot_bytes(settings) == before
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name)
    training = Training(seed=99)
    job = keepstep.protect(settings, **training.stateful)
    assert job.step == 6 and digest_restored(training, job) == undisturbed(7)
    job.close()


def test_where_no_job_is_a_fork_is_nobodys_business(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails in a hook of a fork is told to nobody but this hook."""
    failed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", failed.append)
    monkeypatch.setattr(session, "_current", None)
    child = os.fork()
    if child == 0:
        os._exit(len(failed))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and failed == []


def test_several_nodes_need_a_process_group(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"init_process_group\(\) before it, found none"):
        keepstep.protect(settings, x=1)


def test_slots_that_do_not_fit_are_refused_with_numbers_and_nothing_is_left(
    settings: Settings,
) -> None:
    """A terabyte that is asked for and never touched."""
    no_reserve = 0x4000  # MAP_NORESERVE has no name in Python
    vast = torch.frombuffer(
        mmap.mmap(-1, 1 << 40, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve),
        dtype=torch.uint8,
    )
    with pytest.raises(
        MemoryBudgetError,
        match=r"the slots do not fit: 2 slots x 1 rank x 1.0 TiB = 2.0 TiB needed",
    ):
        keepstep.protect(settings, vast=vast)
    assert slot_paths(MEMORY, job_dir(settings), 0) == []
    keepstep.protect(settings, small=torch.ones(2)).close()


def test_unknown_metrics_and_phases_are_refused(settings: Settings) -> None:
    job = keepstep.protect(settings, x=1)
    with pytest.raises(
        ConfigError, match=r"report\(\) expected loss, tokens, found \['accuracy'\]"
    ):
        job.report(accuracy=1.0)
    with pytest.raises(
        ConfigError, match=r"enter\(\) expected one of \['starting', .*found 'sleeping'"
    ):
        job.enter("sleeping")
    job.close()


PREEMPTED = """
import os, signal, sys
import keepstep
job = keepstep.protect({settings!r}, x=1)
for step in job.steps(1000):
    assert job._drain(job._rank.drain, 20)
    if step == 3:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
"""


def test_sigterm_persists_the_newest_step_and_ends_as_sigterm_does(
    settings: Settings, tmp_path: Path
) -> None:
    text = {k: str(v) if isinstance(v, Path) else v for k, v in settings.items()}
    script = PREEMPTED.format(settings={**text, "store": str(tmp_path / "store")})
    child = subprocess.run([sys.executable, "-c", script], timeout=100)
    assert child.returncode == -signal.SIGTERM
    assert [c.step for c in Store(tmp_path / "store").list_checkpoints().checkpoints] == [2]


def test_persisting_without_a_store_says_how_to_have_one(settings: Settings) -> None:
    job = keepstep.protect(settings, x=1)
    for _ in job.steps(1):
        pass
    with pytest.raises(
        StoreError,
        match="step 0 could not be persisted: the job has no store: give one with store=...",
    ):
        job.persist(wait=True)
    job.close()


def test_a_store_that_cannot_be_read_is_not_taken_for_an_empty_one(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").write_text("a file, not a directory")
    monkeypatch.setattr(session, "check_needs", lambda settings: None)  # it was one before
    with pytest.raises(KeeperError, match="memory holds nothing, and the store cannot be read"):
        keepstep.protect({**settings, "store": str(tmp_path / "store")}, **Training().stateful)


@pytest.mark.parametrize(
    "wrong",
    [
        {"store": "/proc/nope"},
        {"arena_dir": "/proc"},
        {"arena_dir": "/nope"},
        {"store": __file__},
        {"store": "nowhere://x"},
        {"keep": "best:acc:max:2"},
    ],
    ids=str,
)
def test_what_cannot_be_had_is_refused_before_training(settings: Settings, wrong: Settings) -> None:
    [(option, value)] = wrong.items()
    with pytest.raises(ConfigError, match=f"^{option}: expected .*found.*{value[-5:]}"):
        keepstep.protect({**settings, **wrong}, **Training().stateful)
    assert list(Path(settings["arena_dir"]).iterdir()) == []


def damage_checkpoint(store: Path, step: int) -> None:
    """One bit of its data, in the middle."""
    data = max(Path(Store(store).url(step)).iterdir(), key=lambda path: path.stat().st_size)
    damage(data, data.stat().st_size // 2)


def trained_with_checkpoints(settings: Settings, store: Path) -> None:
    """Steps 4 and 11 are in the store, and memory has ended with the job."""
    stored = {**settings, "store": str(store)}
    run(stored, Training(), 5)
    run(stored, Training(), 12)
    assert [c.step for c in Store(store).list_checkpoints().checkpoints] == [11, 4]


def test_falling_back_to_an_older_checkpoint_has_lost_the_steps_to_the_newer_one_at_least(
    settings: Settings, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    trained_with_checkpoints(settings, store)
    damage_checkpoint(store, 11)
    training = Training(seed=99)
    job = keepstep.protect({**settings, "store": str(store)}, **training.stateful)
    assert job.step == 4 and digest_restored(training, job) == undisturbed(5)
    journal = read_journal(Path(settings["state_dir"]) / "j" / "journal.jsonl")
    last = [e for e in journal if e.kind == "resumed"][-1]
    assert (last.data["lost_steps"], last.data["lost_at_least"]) == (None, 7)
    assert "at least 7 completed steps lost" in last.why
    job.close(ok=False)


@pytest.mark.parametrize("what", ["data", "manifest"])
def test_a_store_whose_checkpoints_are_all_damaged_is_no_empty_store(
    settings: Settings, tmp_path: Path, what: str
) -> None:
    store = tmp_path / "store"
    trained_with_checkpoints(settings, store)
    for step in (4, 11):
        if what == "data":
            damage_checkpoint(store, step)
        else:
            damage(Path(Store(store).url(step)) / "keepstep.json", 40)
    with pytest.raises(KeeperError, match="name another"):
        keepstep.protect({**settings, "store": str(store)}, **Training().stateful)
    assert "resumed" not in kinds(settings)[-5:]


def test_a_load_hook_that_changes_what_is_loaded_is_told_and_nothing_is_lost(
    settings: Settings,
) -> None:
    run(settings, Training(), 9, leave=True)
    before = [Slot(MEMORY, path).header() for path in slot_paths(MEMORY, job_dir(settings), 0)]
    clamping = Training(seed=99)

    def clamp(module: nn.Module, _: Any) -> None:
        with torch.no_grad():
            module.weight.clamp_(-0.01, 0.01)

    hook = clamping.model[0].register_load_state_dict_post_hook(clamp)
    with pytest.raises(LayoutError, match=r"model\.0\.weight: .* of 32 values differ"):
        keepstep.protect(settings, **clamping.stateful)
    after = [Slot(MEMORY, path).header() for path in slot_paths(MEMORY, job_dir(settings), 0)]
    assert after == before, "every snapshot is as it was"
    hook.remove()
    training = Training(seed=98)
    job = keepstep.protect(settings, **training.stateful)
    assert job.step == 8 and digest_restored(training, job) == undisturbed(9)
    job.close()


def test_a_retention_rule_that_cannot_be_is_refused_before_training(settings: Settings) -> None:
    with pytest.raises(
        ConfigError,
        match="keep: expected latest:N, every:N or best:METRIC:min|max:N, found 'latst:2'",
    ):
        keepstep.protect({**settings, "keep": "latst:2"}, **Training().stateful)
    assert list(Path(settings["arena_dir"]).iterdir()) == []


def test_what_cannot_be_pickled_is_named(settings: Settings) -> None:
    with pytest.raises(ConfigError, match="odd: expected something that can be pickled"):
        keepstep.protect(settings, **Training().stateful, odd=lambda: 0)


def test_a_value_that_would_not_be_restored_is_refused(settings: Settings) -> None:
    job = keepstep.protect(settings, **Training().stateful, best=1.0)
    job.state["best"] = 0.5
    attempts: list[Callable[[], Any]] = [
        lambda: job.state.__setitem__("worst", 2.0),
        lambda: job.state.setdefault("worst", 2.0),
        lambda: job.state.update(best=0.1, worst=2.0),
        lambda: job.state.update({"worst": 2.0}),
        lambda: job.state.__ior__({"worst": 2.0}),
    ]
    for attempt in attempts:
        with pytest.raises(ConfigError, match=r"expected one of \['best'\], found 'worst'"):
            attempt()
    assert job.state == {"best": 0.5} and job.state.setdefault("best", 1.0) == 0.5
    job.state.update(best=0.25)
    state = job.state
    state |= {"best": 0.125}
    assert job.state == {"best": 0.125}
    job.close()


def test_a_value_without_which_nothing_could_be_restored_stays(settings: Settings) -> None:
    job = keepstep.protect(settings, **Training().stateful, best=1.0)
    attempts: list[Callable[[], Any]] = [
        lambda: job.state.__delitem__("best"),
        lambda: job.state.pop("best"),
        job.state.popitem,
        job.state.clear,
    ]
    for attempt in attempts:
        with pytest.raises(ConfigError, match=r"expected all of \['best'\] to stay"):
            attempt()
    assert job.state == {"best": 1.0}
    job.close()


def test_a_step_that_came_from_the_store_is_known_to_be_there(
    settings: Settings, tmp_path: Path
) -> None:
    stored = {**settings, "store": str(tmp_path / "store")}
    run(stored, Training(), 5).close()
    job = keepstep.protect(stored, **Training().stateful)
    assert job.step == 4
    outcome = job.persist(wait=True).result()
    assert (outcome.ok, outcome.step) == (True, 4) and "already in the store" in outcome.why
    job.close(ok=False)


@pytest.mark.parametrize(
    "call",
    [
        lambda s, t: keepstep.protect(t.model, t.optimizer),
        lambda s, t: keepstep.protect(t.model),
        lambda s, t: keepstep.protect(s, t.model),
    ],
)
def test_what_has_no_name_is_refused_with_what_to_write(settings: Settings, call: Any) -> None:
    with pytest.raises(ConfigError, match=r"protect\(model=model, optimizer=optimizer\)"):
        call(settings, Training())


def test_settings_by_name_are_refused_with_what_to_write(settings: Settings) -> None:
    with pytest.raises(ConfigError, match=r"protect\(keepstep.Config\(...\), model=model\)"):
        keepstep.protect(config=settings, **Training().stateful)


def test_what_protect_refuses_is_told_to_the_agent_if_the_program_ends_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    with pytest.raises(ConfigError) as caught:
        keepstep.protect({"slots": "many"}, value=1)
    assert not path.exists(), "the program may mend it and go on"
    sys.excepthook(caught.type, caught.value, caught.tb)
    report = read_error_file(str(path))
    assert report.is_refusal and "slots" in report.message
