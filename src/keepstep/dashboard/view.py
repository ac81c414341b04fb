"""View: what a job directory and a journal say of a job, as values that a screen can show.

Comes in: status pages, slot headers, locks, the journal, the time. Goes out: frozen values. Never
writes, never proves payloads (`keepstep inspect` does), never waits for anybody.

Invariant: a field that could not be read is None or says `unknown`; nothing shown is a guess.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.core.detection.links_now import LinksNow
from keepstep.core.detection.slow_now import SlowNow
from keepstep.core.economics.goodput import Account, StepTempo, account
from keepstep.core.resume.cut import common, cut, holding_of
from keepstep.dashboard.document import finite
from keepstep.dashboard.finding import FoundJob
from keepstep.dashboard.links import LinkRows, link_rows
from keepstep.dashboard.moment import Moment
from keepstep.dashboard.nodes import NodesView, leaders_word, nodes_view
from keepstep.dashboard.parts import PartRow, part_rows
from keepstep.dashboard.protection import (
    CheckpointView,
    ProtectionRow,
    newest_checkpoint,
    of_one_node,
    of_several_nodes,
)
from keepstep.dashboard.slots import SlotRow, held_rows, slot_rows
from keepstep.dashboard.slowness import (
    DoubtRow,
    SlowRow,
    doubt_rows,
    keeper_rows,
    link_doubt_rows,
    silence_rows,
    slow_rows,
)
from keepstep.dashboard.timeline import ENDS, JobRun, RecoveryChain, runs_of
from keepstep.edge.os.journal import read_journal
from keepstep.edge.shm.keeper_look import KeeperLook, keeper_look
from keepstep.edge.shm.status_page import BLANK
from keepstep.edge.shm.status_pages import read_pages
from keepstep.model.events import Event
from keepstep.model.snapshot import Phase, RankStatus, Stamp
from keepstep.model.units import S_NS

WITH_RANKS = ("training", "restoring", "broken")  # states

# By rank: whether it lives, and its page.
Pages = Mapping[int, tuple[bool, RankStatus | None]]


@dataclass(frozen=True, slots=True)
class RankRow:
    """A rank by its status page. The page of a dead rank tells what it was doing last.

    kept_bytes: of its newest snapshot, what is not with other ranks of the node.
    """

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
    kept_bytes: int
    loss: float | None
    silent_ns: int | None


@dataclass(frozen=True, slots=True)
class JobView:
    """Everything `keepstep status` knows of a job.

    state: training, restoring, broken, waiting, left-over or ended. An ended job has neither
        `job_dir` nor `protection`, at most a checkpoint, when its keeper has removed the memory.
    horizon: the newest step that every rank can be given; of several nodes as the leading keeper
        said.
    period_steps: which steps are captured: multiples of it (core/resume/cadence.py).
    ranks, slots, held: this node's alone; `held` is what it keeps for other nodes.
    nodes: None for a job of one node.
    incident: the failure from which the job has not come back yet.
    slow: ranks of this node that are slow now. doubts: what nobody can tell of that or of hangs.
    links: that are slow or damage what crosses them now, as this node's journal tells.
    parts: of this node's machine, while the job trains.
    account: where the time of this run went.
    keeper_alive: None where nobody can tell: it holds its lock and says nothing. keeper_silent_ns:
        since it last said something; None where it has not.
    """

    job: str
    state: str
    why: str
    job_dir: Path | None
    journal: Path
    keeper_alive: bool | None
    keeper_silent_ns: int | None
    world_size: int | None
    horizon: Stamp | None
    horizon_age_ns: int | None
    period_steps: int
    checkpoint: CheckpointView | None
    protection: tuple[ProtectionRow, ...]
    ranks: tuple[RankRow, ...]
    slots: tuple[SlotRow, ...]
    held: tuple[SlotRow, ...]
    nodes: NodesView | None
    incident: RecoveryChain | None
    account: Account | None
    slow: tuple[SlowRow, ...] = ()
    doubts: tuple[DoubtRow, ...] = ()
    parts: tuple[PartRow, ...] = ()
    links: LinkRows = field(default_factory=LinkRows)


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What was read of a job at one moment; a view is made of it.

    events: its journal. slots, held: by their headers. incident, account: of its last run.
    """

    job: FoundJob
    events: Sequence[Event]
    pages: Pages
    slots: tuple[SlotRow, ...]
    held: tuple[SlotRow, ...]
    keeper: KeeperLook
    incident: RecoveryChain | None
    account: Account | None


def job_view(job: FoundJob, now: Moment, events: Sequence[Event] | None = None) -> JobView:
    """The job as it is now. `events`: its journal, if it has been read already."""
    if events is None:
        events = list(read_journal(job.journal_path, job.owner))
    pages = read_pages(job.job_dir)
    runs = runs_of(events)
    looked = JobFacts(
        job=job,
        events=events,
        pages=pages,
        slots=slot_rows(job.job_dir, now),
        held=held_rows(job.job_dir, now),
        keeper=keeper_look(job.job_dir, now.mono_ns, now.boot),
        incident=pending(runs[-1]) if runs else None,
        account=run_account(runs[-1], pages, now) if runs else None,
    )
    return view_of(looked, now)


def view_of(looked: JobFacts, now: Moment) -> JobView:
    """The view of what was read. Of several nodes it reads what the leading keeper has told."""
    job, events, pages = looked.job, looked.events, looked.pages
    statuses = [status for _, status in pages.values() if status]
    world_size = max((status.world_size for status in statuses), default=None)
    checkpoint = newest_checkpoint(events, now)
    nodes, horizon, period_steps = _nodes_and_horizon(
        job.job_dir, pages, looked.keeper, events, looked.slots, now
    )
    age_ns = _held_for_ns(looked.slots, horizon)
    state, why = _state(job, pages, looked.keeper, events)
    newest = _newest_sealed(looked.slots)
    known, links = SlowNow(events), LinksNow(events)
    return JobView(
        job=job.name,
        state=state,
        why=why,
        job_dir=job.job_dir if job.has_memory else None,
        journal=job.journal_path,
        keeper_alive=looked.keeper.alive,
        keeper_silent_ns=looked.keeper.silent_ns,
        world_size=world_size,
        horizon=horizon,
        horizon_age_ns=age_ns,
        period_steps=period_steps,
        checkpoint=checkpoint,
        protection=_protection(job, nodes, statuses, horizon, age_ns, checkpoint),
        ranks=tuple(
            _rank_row(rank, alive, status, newest.get(rank), now)
            for rank, (alive, status) in pages.items()
        ),
        slots=looked.slots,
        held=looked.held,
        nodes=nodes,
        incident=looked.incident,
        account=looked.account,
        slow=slow_rows(known, now) if state == "training" else (),
        doubts=_doubts(known, links, looked, state, now),
        parts=part_rows(job.job_dir, now) if state == "training" else (),
        links=link_rows(links, now) if state == "training" else LinkRows(),
    )


def _doubts(
    known: SlowNow, links: LinksNow, looked: JobFacts, state: str, now: Moment
) -> tuple[DoubtRow, ...]:
    """While ranks live somebody is to look at them."""
    silence = silence_rows(looked.job.job_dir, now) if state in WITH_RANKS else ()
    silence = keeper_rows(looked.keeper) + silence
    if state != "training":
        return silence
    return silence + doubt_rows(known, now) + link_doubt_rows(links, looked.keeper, now)


def _nodes_and_horizon(
    job_dir: Path,
    pages: Pages,
    keeper: KeeperLook,
    events: Sequence[Event],
    slots: Sequence[SlotRow],
    now: Moment,
) -> tuple[NodesView | None, Stamp | None, int]:
    """The nodes, the horizon and the period of captures: of several nodes what the leading keeper
    last told; of one node None, and what its ranks hold and tell. A rank that proves its slots anew
    tells of none meanwhile; they are there all the same."""
    statuses = [status for _, status in pages.values() if status]
    living = [rank for rank, (alive, _) in pages.items() if alive]
    here: Collection[int] = living or list(pages)
    world_size = max((status.world_size for status in statuses), default=0)
    told = leaders_word(job_dir, max((status.epoch for status in statuses), default=-1))
    if told is not None and world_size > len(here):  # not all ranks have their pages here
        nodes = nodes_view(job_dir, here, keeper, events, now.wall_ns)
        return nodes, told.floor, told.period_steps
    period_steps = max((status.span_steps for status in statuses), default=1)
    holdings = [holding_of(status) for status in statuses]
    horizon = cut(holdings, world_size or 1)
    if horizon is None and any(not holding.sealed for holding in holdings):
        horizon = _newest_common(slots, world_size)
    return None, horizon, period_steps


def _newest_common(slots: Sequence[SlotRow], world_size: int) -> Stamp | None:
    """By the slots themselves."""
    held: dict[int, set[Stamp]] = {}
    for slot in slots:
        if slot.kind == "own" and slot.state == "sealed" and slot.step is not None:
            assert slot.epoch is not None
            held.setdefault(slot.rank, set()).add(Stamp(slot.step, slot.epoch))
    return max(common(list(held.values())), default=None) if len(held) == world_size else None


def _protection(
    job: FoundJob,
    nodes: NodesView | None,
    statuses: Sequence[RankStatus],
    horizon: Stamp | None,
    age_ns: int | None,
    checkpoint: CheckpointView | None,
) -> tuple[ProtectionRow, ...]:
    if not job.has_memory:
        return ()
    if nodes is not None:
        return of_several_nodes(nodes, horizon, age_ns, checkpoint)
    return of_one_node(statuses, horizon, age_ns, checkpoint)


def pending(run: JobRun) -> RecoveryChain | None:
    """The failure from which the run has not come back yet."""
    last = run.recoveries[-1] if run.recoveries else None
    return last if last is not None and last.outcome == "pending" else None


def run_account(run: JobRun, pages: Pages, now: Moment) -> Account:
    """Where the run's time went: until now when ranks live, and else until its last event. `pages`:
    the ranks', if it is the last run."""
    tempos = tempos_of(pages)
    return account(run.events, tempos, (now.wall_ns, now.mono_ns, now.boot) if tempos else None)


def tempos_of(pages: Pages) -> list[StepTempo]:
    """What the living ranks say of their steps."""
    living = [status for alive, status in pages.values() if alive and status is not None]
    return [
        StepTempo(s.rank, s.pid, s.completed_step, s.step_ns_last, s.stall_ns_total) for s in living
    ]


def _newest_sealed(slots: Iterable[SlotRow]) -> dict[int, SlotRow]:
    """By rank."""
    newest: dict[int, SlotRow] = {}
    for row in slots:
        if row.state != "sealed" or row.step is None:
            continue
        known = newest.get(row.rank)
        if known is None or (row.epoch or 0, row.step) > (known.epoch or 0, known.step or 0):
            newest[row.rank] = row
    return newest


def _rank_row(
    rank: int, alive: bool, read: RankStatus | None, newest: SlotRow | None, now: Moment
) -> RankRow:
    status = read or BLANK
    return RankRow(
        rank=rank,
        alive=alive,
        pid=status.pid,
        incarnation=status.incarnation,
        epoch=status.epoch,
        phase=status.phase.name.lower() if read else "unknown",
        step=status.step,
        completed_step=status.completed_step,
        newest_step=newest.step if newest else None,
        newest_age_ns=newest.age_ns if newest else None,
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
        kept_bytes=status.kept_bytes,
        loss=finite(status.loss),
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


def _without_end(job: FoundJob, events: Sequence[Event]) -> tuple[str, str]:
    """Of a job whose memory is not where it is looked for, and whose journal tells of no end."""
    started = next((e for e in reversed(events) if e.kind == "keeper-started"), None)
    kept_in = Path(str(started.data.get("job_dir", job.job_dir))) if started else job.job_dir
    if kept_in == job.job_dir:
        return "ended", "its memory is gone, and its journal does not say why"
    arena = kept_in.parent.parent
    return "unknown", (
        f"its memory was in {kept_in}, and {job.job_dir.parent.parent} was looked at: see "
        f"KEEPSTEP_ARENA_DIR={arena} keepstep status --job {job.name}"
    )


# Of these the last says whether a job is over. The keeper's `job-over` is the word of a job without
# an agent; a rank that joins begins another life of it.
_BEGINS_OR_ENDS = {"job-started", "rank-joined", "resumed", "go"} | ENDS


def _state(
    job: FoundJob, pages: Pages, keeper: KeeperLook, events: Sequence[Event]
) -> tuple[str, str]:
    """The state and why it is that."""
    if not job.has_memory:
        last = next((e for e in reversed(events) if e.kind in _BEGINS_OR_ENDS), None)
        if last is not None and last.kind in ENDS:
            return "ended", last.why
        return _without_end(job, events)
    living = [status for alive, status in pages.values() if alive]
    gone = sorted(rank for rank, (alive, _) in pages.items() if not alive)
    end = next((e for e in reversed(events) if e.kind in _BEGINS_OR_ENDS), None)
    if not living and end is not None and end.data.get("ok") is True:
        return "ended", f"{end.why}; its memory is being removed"
    if not living and keeper.alive:
        return "waiting", "no rank is alive; the keeper keeps the memory for a restart"
    if not living and keeper.alive is None:
        said = "no rank is alive; nobody can tell whether the keeper still looks after the memory"
        return "waiting", said
    if not pages and end is not None and end.kind not in ENDS:
        return "left-over", (
            "no page of a rank is there, and the journal does not say that the job has ended: its "
            "memory may have been removed while it runs, so look whether its processes live"
        )
    if not living:
        return "left-over", (
            "neither a rank nor the keeper is alive; start the job again to resume, or remove its "
            "memory with `keepstep clean`"
        )
    alive = f"{len(living)} rank{'' if len(living) == 1 else 's'} alive"
    if gone:
        return "broken", f"rank {', '.join(map(str, gone))} is gone; {alive} of {len(pages)}"
    early = [s for s in living if s is None or s.phase in (Phase.STARTING, Phase.RESTORE)]
    if early:
        why = f"{alive}, {len(early)} of them before their first step"
        return "restoring", why + _waiting_for(events)
    return "training", alive + _not_stored(events)


def _not_stored(events: Sequence[Event]) -> str:
    """What keeps checkpoints from the store, as a keeper last said; empty when one was written
    since."""
    kinds = ("persister-stuck", "persist-failed", "persisted")
    last = next((e for e in reversed(events) if e.kind in kinds), None)
    return f"; not stored: {last.why}" if last is not None and last.kind != "persisted" else ""


def _waiting_for(events: Sequence[Event]) -> str:
    """What keeps all from going on, as a keeper last said; empty when something was offered
    since."""
    kinds = ("store-unreachable", "restore-offered", "offer", "restore-refused", "resumed", "go")
    last = next((e for e in reversed(events) if e.kind in kinds), None)
    return f"; {last.why}" if last is not None and last.kind == "store-unreachable" else ""
