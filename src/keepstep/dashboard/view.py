"""View: what a job directory and a journal say, as values a screen can show.

Comes in: status pages, slot headers, locks, the journal, the time. Goes out: frozen values, which
`as_json` turns into what `--json` prints. Never writes, never proves payloads (`keepstep inspect`
does), never waits for anybody.

Invariant: a field that could not be read is None or says `unknown`; nothing shown is a guess.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from keepstep.core.economics.goodput import Account, Tempo, account
from keepstep.core.resume.cut import common, cut, holding_of
from keepstep.dashboard.finding import SHELVES, FoundJob
from keepstep.dashboard.nodes import NodesView, leaders_word, nodes_view
from keepstep.dashboard.timeline import Recovery, Story, stories
from keepstep.edge.os.flock import is_held
from keepstep.edge.os.journal import read_journal
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot, slot_paths
from keepstep.edge.shm.status_page import BLANK
from keepstep.edge.shm.status_pages import TRIES, TRY_EVERY_S, read_pages
from keepstep.errors import DamageError
from keepstep.model.events import Event
from keepstep.model.snapshot import Phase, RankStatus, SlotHeader, SlotState, Stamp
from keepstep.model.units import S_NS


@dataclass(frozen=True, slots=True)
class Now:
    """The two clocks at one moment."""

    wall_ns: int
    mono_ns: int

    @classmethod
    def read(cls) -> Now:
        return cls(time.time_ns(), time.monotonic_ns())


@dataclass(frozen=True, slots=True)
class SlotRow:
    """A slot by its header. `state` is sealed, writing, empty or damaged; `why` says what is
    damaged. `kind` is own, copy (of another node's rank) or parity (of the row of ranks that `rank`
    of this node is in)."""

    kind: str
    rank: int
    slot: int
    path: Path
    state: str
    step: int | None = None
    epoch: int | None = None
    incarnation: int | None = None
    payload_bytes: int = 0
    blocks: int = 0
    sealed_wall_ns: int | None = None
    age_ns: int | None = None
    loss: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class RankRow:
    """A rank by its status page. The page of a dead rank tells what it was doing last."""

    rank: int
    alive: bool
    pid: int
    incarnation: int
    epoch: int
    phase: str
    step: int
    completed_step: int
    newest_step: int | None
    newest_age_ns: int | None
    captured_steps: int
    skipped_steps: int
    torn_steps: int
    stall_ns_last: int
    stall_ns_total: int
    step_ns_last: int
    copy_bytes_per_s: float | None
    seal_ns_last: int
    payload_bytes: int
    loss: float | None
    silent_ns: int | None


@dataclass(frozen=True, slots=True)
class Protection:
    """What would survive `against`: `step`, `age_ns` old; None when nothing would, or, unless
    `is_known`, when nobody can tell here. `why` says where from."""

    against: str
    step: int | None
    age_ns: int | None
    why: str
    is_known: bool = True


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The newest checkpoint the journal tells of."""

    step: int
    age_ns: int


@dataclass(frozen=True, slots=True)
class JobView:
    """Everything `keepstep status` knows of a job. `state` is training, restoring, broken, waiting,
    left-over or ended; an ended job has neither `job_dir` nor `protection`, at most a checkpoint.

    `incident` is the failure from which the job has not come back yet; `account` where the time of
    this run went.

    In a job of several nodes `horizon` is the leader's word and `nodes` what else it told; `ranks`,
    `slots` and what is `held` for other nodes are this node's alone. In a job of one node `nodes`
    is None.
    """

    job: str
    state: str
    why: str
    job_dir: Path | None
    journal: Path
    keeper_alive: bool
    world_size: int | None
    horizon: Stamp | None
    horizon_age_ns: int | None
    checkpoint: Checkpoint | None
    protection: tuple[Protection, ...]
    ranks: tuple[RankRow, ...]
    slots: tuple[SlotRow, ...]
    held: tuple[SlotRow, ...]
    nodes: NodesView | None
    incident: Recovery | None
    account: Account | None


def job_view(job: FoundJob, now: Now, told: Sequence[Event] | None = None) -> JobView:
    """The job as it is at this moment. `told`: its journal, for who has read it already."""
    pages = read_pages(job.job_dir)
    statuses = {rank: status for rank, (_, status) in pages.items() if status}
    slots = slot_rows(job.job_dir, now)
    world_size = max((s.world_size for s in statuses.values()), default=None)
    events = list(read_journal(job.journal_path)) if told is None else told
    keeper_alive = is_held(job.job_dir / "keeper.lock")
    checkpoint = _newest_checkpoint(events, now)
    living = [rank for rank, (alive, _) in pages.items() if alive]
    word = leaders_word(job.job_dir, max((s.epoch for s in statuses.values()), default=-1))
    nodes = None
    # one node sees only its own ranks' pages
    if word is not None and (world_size or 0) > len(living or pages):
        horizon = word.floor
        nodes = nodes_view(job.job_dir, living or pages, keeper_alive, events, now.wall_ns)
    else:
        horizon = cut([holding_of(s) for s in statuses.values()], world_size or 1)
    state, why = _state(job, pages, keeper_alive, events)
    runs = stories(events)
    age_ns = _held_for_ns(slots, horizon)
    if not job.has_memory:
        protection: tuple[Protection, ...] = ()
    elif nodes is not None:
        protection = _protection_by_nodes(nodes, horizon, age_ns, checkpoint)
    else:
        protection = _protection(statuses.values(), horizon, age_ns, checkpoint)
    return JobView(
        job=job.name,
        state=state,
        why=why,
        job_dir=job.job_dir if job.has_memory else None,
        journal=job.journal_path,
        keeper_alive=keeper_alive,
        world_size=world_size,
        horizon=horizon,
        horizon_age_ns=age_ns,
        checkpoint=checkpoint,
        protection=protection,
        ranks=tuple(
            _rank_row(rank, alive, status, slots, now) for rank, (alive, status) in pages.items()
        ),
        slots=slots,
        held=held_rows(job.job_dir, now),
        nodes=nodes,
        incident=incident(runs[-1]) if runs else None,
        account=run_account(runs[-1], pages, now) if runs else None,
    )


def incident(run: Story) -> Recovery | None:
    """The one that is not over."""
    return (
        run.recoveries[-1] if run.recoveries and run.recoveries[-1].outcome == "pending" else None
    )


def run_account(
    run: Story, pages: Mapping[int, tuple[bool, RankStatus | None]], now: Now
) -> Account:
    """Where the run's time went: until now when ranks live, and else until its last event. `pages`:
    the ranks', of the last run."""
    living = [status for alive, status in pages.values() if alive and status is not None]
    tempos = [
        Tempo(s.rank, s.pid, s.completed_step, s.step_ns_last, s.stall_ns_total) for s in living
    ]
    return account(run.events, tempos, (now.wall_ns, now.mono_ns) if living else None)


def slot_rows(directory: Path, now: Now, kind: str = "own") -> tuple[SlotRow, ...]:
    """Every slot of the ranks below that directory, rank by rank."""
    rows = []
    for rank in sorted(int(d.name.split("-")[1]) for d in directory.glob("rank-*")):
        for path in slot_paths(MEMORY, directory, rank):
            try:
                rows.append(slot_row(path, rank, now, kind))
            except FileNotFoundError:  # the job ended while we looked
                continue
    return tuple(rows)


def held_rows(job_dir: Path, now: Now) -> tuple[SlotRow, ...]:
    """What the keeper here holds for other nodes: copies, then parities."""
    return tuple(
        row for kind, below in SHELVES.items() for row in slot_rows(job_dir / below, now, kind)
    )


def slot_row(path: Path, rank: int, now: Now, kind: str = "own") -> SlotRow:
    """What a slot's header says. Its payload is not looked at. Raises OSError when there is no
    slot."""
    index = int(path.name.split("-")[1])
    try:
        header = read_header(path)
    except DamageError as error:
        return SlotRow(kind, rank, index, path, "damaged", why=str(error))
    if header.state is SlotState.EMPTY:
        return SlotRow(kind, rank, index, path, "empty")
    row = SlotRow(
        kind,
        rank,
        index,
        path,
        header.state.name.lower(),
        header.stamp.step,
        header.stamp.epoch,
        header.incarnation,
    )
    if header.state is SlotState.WRITING:
        return row
    return SlotRow(
        *(row.kind, row.rank, row.slot, row.path, row.state, row.step, row.epoch, row.incarnation),
        payload_bytes=header.payload_bytes,
        blocks=header.block_count,
        sealed_wall_ns=header.sealed_wall_ns,
        age_ns=max(0, now.wall_ns - header.sealed_wall_ns),
        loss=_number(header.loss),
    )


def read_header(path: Path) -> SlotHeader:
    """Raises DamageError when the header is not as written, OSError when there is no slot."""
    slot = Slot(MEMORY, path)
    try:
        for _ in range(TRIES - 1):
            try:
                return slot.header()
            except DamageError:
                time.sleep(TRY_EVERY_S)
        return slot.header()
    finally:
        slot.close()


def _rank_row(
    rank: int, alive: bool, read: RankStatus | None, slots: Sequence[SlotRow], now: Now
) -> RankRow:
    status = read or BLANK
    sealed = [
        (s.epoch or 0, s.step, s.age_ns)
        for s in slots
        if s.rank == rank and s.state == "sealed" and s.step is not None
    ]
    _, newest_step, age_ns = max(sealed, default=(0, None, None))
    return RankRow(
        rank=rank,
        alive=alive,
        pid=status.pid,
        incarnation=status.incarnation,
        epoch=status.epoch,
        phase=status.phase.name.lower() if read else "unknown",
        step=status.step,
        completed_step=status.completed_step,
        newest_step=newest_step,
        newest_age_ns=age_ns,
        captured_steps=status.captured_steps,
        skipped_steps=status.skipped_steps,
        torn_steps=status.torn_steps,
        stall_ns_last=status.stall_ns_last,
        stall_ns_total=status.stall_ns_total,
        step_ns_last=status.step_ns_last,
        copy_bytes_per_s=status.payload_bytes * S_NS / status.copy_ns_last
        if status.copy_ns_last
        else None,
        seal_ns_last=status.seal_ns_last,
        payload_bytes=status.payload_bytes,
        loss=_number(status.loss),
        silent_ns=max(0, now.mono_ns - status.updated_mono_ns) if read else None,
    )


def _held_for_ns(slots: Iterable[SlotRow], stamp: Stamp | None) -> int | None:
    """How long every rank has held `stamp`: since the last of them sealed it."""
    ages = [
        s.age_ns
        for s in slots
        if stamp and s.state == "sealed" and (s.step, s.epoch) == (stamp.step, stamp.epoch)
    ]
    return min((age for age in ages if age is not None), default=None)


def _newest_checkpoint(events: Iterable[Event], now: Now) -> Checkpoint | None:
    written: dict[int, int] = {}
    for event in events:
        if event.kind in ("persisted", "checkpoint-damaged"):
            step = int(event.data["step"])
            written.pop(step, None)  # also so that the newest is the last in order
            if event.kind == "persisted":
                written[step] = event.wall_ns
    if not written:
        return None
    step, wall_ns = list(written.items())[-1]
    return Checkpoint(step, max(0, now.wall_ns - wall_ns))


def _protection(
    statuses: Iterable[RankStatus],
    horizon: Stamp | None,
    age_ns: int | None,
    checkpoint: Checkpoint | None,
) -> tuple[Protection, ...]:
    stored = (
        Protection("", checkpoint.step, checkpoint.age_ns, "checkpoint in the store")
        if checkpoint
        else None
    )
    nothing = Protection("", None, None, "no checkpoint in the store")
    if horizon is None:
        killed = stored or Protection(
            "", None, None, "no step is held by every rank, and no checkpoint is in the store"
        )
        damaged = killed
    else:
        killed = Protection("", horizon.step, age_ns, "every rank holds it in memory")
        older = max(
            (s for s in common([holding_of(s).sealed for s in statuses]) if s != horizon),
            default=None,
        )
        damaged = (
            Protection("", older.step, None, "every rank holds it in memory too")
            if older
            else stored or nothing
        )
    return _named(
        {
            "a killed process": killed,
            "a damaged snapshot": damaged,
            "a lost machine": stored or nothing,
        }
    )


def _protection_by_nodes(
    nodes: NodesView, horizon: Stamp | None, age_ns: int | None, checkpoint: Checkpoint | None
) -> tuple[Protection, ...]:
    """Of a job of several nodes. Whoever can miss a node can miss one snapshot of it: both come
    back in the same way."""
    store = "checkpoint in the store" if checkpoint else "no checkpoint in the store"
    stored = Protection(
        "",
        checkpoint.step if checkpoint else None,
        checkpoint.age_ns if checkpoint else None,
        store,
    )
    is_sure, is_mended = not nodes.doubt, (nodes.any_nodes or 0) > 0
    if horizon is not None:
        killed = Protection(
            "",
            horizon.step,
            age_ns,
            "it is committed: every rank holds it in memory, or is given it by other nodes",
        )
    elif is_sure and nodes.step is not None:
        killed = Protection("", nodes.step, None, "every rank of every node holds it in memory")
    else:
        killed = (
            stored
            if checkpoint
            else Protection(
                "", None, None, "nothing is committed yet that is known here", is_known=False
            )
        )
    if not is_sure:
        lost = damaged = Protection("", None, None, nodes.doubt, is_known=False)
    elif nodes.step is None:
        lost = damaged = replace(stored, why=f"no step is held by every rank yet; {store}")
    else:
        same_age_ns = age_ns if horizon is not None and horizon.step == nodes.step else None
        lost = (
            Protection("", nodes.step, same_age_ns, nodes.why)
            if is_mended
            else replace(stored, why=f"not every node may be lost; {store}")
        )
        whole = Protection(
            "", nodes.step, same_age_ns, f"the other nodes give it back ({nodes.policy})"
        )
        damaged = (
            whole
            if is_mended
            else replace(
                stored,
                why=f"not every snapshot has a part on another node ({nodes.policy}); {store}",
            )
        )
    return _named(
        {
            "a killed process": killed,
            "a damaged snapshot": damaged,
            "a lost node": lost,
            "all nodes lost": stored,
        }
    )


def _named(found: Mapping[str, Protection]) -> tuple[Protection, ...]:
    return tuple(replace(p, against=against) for against, p in found.items())


def _state(
    job: FoundJob,
    pages: Mapping[int, tuple[bool, RankStatus | None]],
    keeper_alive: bool,
    events: Sequence[Event],
) -> tuple[str, str]:
    if not job.has_memory:
        over = next((e for e in reversed(events) if e.kind == "job-over"), None)
        return "ended", over.why if over else "its memory is gone, and nobody said why"
    living = [status for alive, status in pages.values() if alive]
    gone = sorted(rank for rank, (alive, _) in pages.items() if not alive)
    if living and gone:
        return (
            "broken",
            f"rank {', '.join(map(str, gone))} is gone; {len(living)} of {len(pages)} ranks live",
        )
    if living:
        early = [s for s in living if s is None or s.phase in (Phase.STARTING, Phase.RESTORE)]
        words = f"{len(living)} ranks live"
        return (
            ("restoring", f"{words}, {len(early)} of them before their first step")
            if early
            else ("training", words)
        )
    if keeper_alive:
        return "waiting", "no rank lives; the keeper holds their memory for a restart"
    return (
        "left-over",
        "neither ranks nor keeper live: the same command resumes from it, `keepstep clean` "
        "removes it",
    )


# -- as JSON


def as_json(value: Any) -> Any:
    """As JSON has them: dataclasses and named tuples as objects, enums by their name in small
    letters, paths as text, NaN as null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return as_json(value._asdict())
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): as_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(v) for v in value]
    return _number(value) if isinstance(value, float) else value


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
