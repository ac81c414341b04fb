"""Keeper: the process that outlives the trainers and answers for their memory.

    inbox (unix sockets, persister's pipe, finished checks, clock) -> vote, custody, cut (pure) -> replies, pins, removal

It moves no training bytes: ranks write their own slots, and the keeper reads them. So it may die at any moment: ranks keep
capturing, and the next keeper adopts the job directory as it finds it. Never imports torch.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any

from keepstep.config import Settings, settings_from_text
from keepstep.core.custody import Custody, Finish
from keepstep.core.cut import holding_of
from keepstep.core.vote import Action, Ballot, Go, ListStore, Offer, Refuse, Vote
from keepstep.edge.arena import Slot, slot_paths
from keepstep.edge.journal import Journal
from keepstep.edge.mailbox import Mailbox, listen
from keepstep.edge.status import read_status
from keepstep.errors import DamageError, StoreError
from keepstep.model.snapshot import RankStatus, Stamp
from keepstep.model.units import S_NS
from keepstep.runtime.persisting import Persisting

TICK_S = 0.2
BUSY_TICK_S = 0.005


class Keeper:
    """One job's keeper on one machine."""

    def __init__(self, settings: Settings, lock_fd: int) -> None:
        self.settings = settings
        self._lock_fd = lock_fd
        self.journal = Journal(settings.journal_path, "keeper")
        self.custody = Custody(int(settings.grace_s * S_NS), time.monotonic_ns())
        self.vote: Vote | None = None
        self.ranks: dict[int, Mailbox] = {}
        self.agent: Mailbox | None = None
        self.selector = selectors.DefaultSelector()
        self.workers = ThreadPoolExecutor(1, thread_name_prefix="keeper-check")
        self._checks: list[tuple[Future[Any], str]] = []
        self._scrubbed_at_ns = time.monotonic_ns()
        self._finishing: Finish | None = None
        self.persisting = Persisting(settings, self.journal)
        self._server = listen(settings.job_dir / "keeper.sock")
        self.selector.register(self._server, selectors.EVENT_READ, self._accept)

    def run(self) -> None:
        slots = sum(len(slot_paths(self.settings.job_dir, rank)) for rank in self.statuses())
        found = f"adopted {slots} slots" if slots else "nothing there yet"
        why = f"keeper {os.getpid()} has {self.settings.job_dir}; {found}"
        self.journal.record("keeper-started", why, pid=os.getpid(), adopted_slots=slots)
        if self.settings.store:
            self.persisting.warm_up(self.selector)
        while True:
            busy = self._checks or self.persisting.pending
            for key, _ in self.selector.select(BUSY_TICK_S if busy else TICK_S):
                key.data()
            self._take_checks()
            self._scrub()
            self._persist()
            if self._finish():
                return

    # -- who comes and goes

    def _accept(self) -> None:
        sock, _ = self._server.accept()
        box = Mailbox(sock)
        pid, uid = box.peer()
        if uid != os.getuid():
            self.journal.record("stranger-refused", f"process {pid} of user {uid} wanted to join the job of user {os.getuid()}")
            box.close()
            return
        self.selector.register(box, selectors.EVENT_READ, lambda: self._hear(box, pid))

    def _hear(self, box: Mailbox, pid: int) -> None:
        message = box.recv()
        if message is None:
            self._gone(box, pid)
            return
        kind = message.get("kind")
        if kind in ("join", "attach"):
            self._rank_came(box, pid, message)
        elif kind == "agent":
            self.agent = box
            self.custody.agent_came()
        elif kind == "end":
            self._agent_ended(box, bool(message["ok"]), str(message["why"]))
        elif kind == "bye":
            self.custody.rank_said_bye(int(message["rank"]), bool(message["ok"]), str(message["why"]))
            self.journal.record(
                "rank-bye", f"rank {message['rank']} says goodbye: {message['why']}", rank=message["rank"], ok=message["ok"]
            )
            if self.custody.decide(time.monotonic_ns()) is None:  # else the connection ends when the memory is gone
                box.send({"kind": "released"})
        elif kind == "loaded" and self.vote:
            self._carry_out(self.vote.has_loaded(int(message["rank"]), int(message["round"])))
        elif kind == "failed" and self.vote:
            self.journal.record(
                "restore-failed", f"rank {message['rank']} cannot use the offered state: {message['why']}", rank=message["rank"]
            )
            self._carry_out(self.vote.has_failed(int(message["rank"]), int(message["round"]), str(message["why"])))
        elif kind == "persist":
            self.persisting.ask(box, message.get("step"), str(message["why"]), int(message.get("ticket", 0)))

    def _agent_ended(self, box: Mailbox, ok: bool, why: str) -> None:
        holds_snapshots = any(slot_paths(self.settings.job_dir, rank) for rank in self.statuses())
        if not self.custody.agent_said_end(ok, why, holds_snapshots):
            kept = f"{why}; it never resumed, so the memory it found is kept for {self.settings.grace_s:.0f} s"
            self.journal.record("memory-kept", kept)
            box.send({"kind": "kept", "why": kept})

    def _rank_came(self, box: Mailbox, pid: int, message: dict[str, Any]) -> None:
        rank, world = int(message["rank"]), int(message["world_size"])
        self.ranks[rank] = box
        self.custody.rank_came(rank, world)
        if message["kind"] == "attach":
            self.custody.resumed = True
            self.journal.record("rank-attached", f"rank {rank} (process {pid}) is training and found this keeper", rank=rank, pid=pid)
            return
        if self.vote is None or self.vote.world_size != world:
            self.vote = Vote(world, self.settings.store is not None, self._newest_epoch())
        stamps = frozenset(Stamp(*s) for s in message["holds"])
        held = ", ".join(str(s) for s in sorted(stamps)) or "nothing usable"
        self.journal.record(
            "rank-joined",
            f"rank {rank} of {world} (process {pid}) holds {held} in memory",
            rank=rank,
            pid=pid,
            incarnation=message["incarnation"],
        )
        self._carry_out(self.vote.joined(Ballot(rank, world, stamps, message.get("foreign_world"))))

    def _gone(self, box: Mailbox, pid: int) -> None:
        self.selector.unregister(box)
        box.close()
        now_ns = time.monotonic_ns()
        self.persisting.forget(box)
        if box is self.agent:
            self.agent = None
            self.custody.agent_left(now_ns)
        for rank, known in list(self.ranks.items()):
            if known is box:
                del self.ranks[rank]
                self.custody.rank_left(rank, now_ns)
                if self.vote:
                    self.vote.left(rank)
                self._say_left(rank, pid)

    def _say_left(self, rank: int, pid: int) -> None:
        ok_why = self.custody.last_words.get(rank)
        status = self.statuses().get(rank)
        at = f" in step {status.step}, phase {status.phase.name.lower()}, newest completed step {status.completed_step}" if status else ""
        why = f"rank {rank} (process {pid}) is gone" + ("" if ok_why else f" without goodbye{at}")
        done = status.completed_step if status else None
        self.journal.record("rank-left", why, rank=rank, pid=pid, expected=ok_why is not None, completed_step=done)

    # -- the vote

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Offer):
                self.journal.record("restore-offered", action.why, source=action.source, step=action.stamp.step, round=action.round)
                stamp = action.stamp
                self._tell(
                    {
                        "kind": "offer",
                        "round": action.round,
                        "source": action.source,
                        "step": stamp.step,
                        "epoch": stamp.epoch,
                        "why": action.why,
                    }
                )
            elif isinstance(action, Go):
                step = action.offer.stamp.step
                completed = [s.completed_step for s in self.statuses().values()]
                lost = max(0, min(completed, default=-1) - step) if len(completed) == self._world_size() else 0
                why = f"every rank has proven step {step} from {action.offer.source}: {lost} completed steps lost, "
                why += f"epoch {action.epoch} begins"
                if action.offer.source == "fresh" and lost == 0:
                    why = f"every rank starts afresh: epoch {action.epoch} begins"
                self.journal.record("resumed", why, step=step, source=action.offer.source, lost_steps=lost, epoch=action.epoch)
                self.custody.resumed = True
                if action.offer.source == "store":
                    self.persisting.resumed_from_store(step)
                self._remove_other_ranks()
                self._tell({"kind": "go", "epoch": action.epoch})
            elif isinstance(action, Refuse):
                self.journal.record("restore-refused", action.why)
                self._tell({"kind": "refused", "why": action.why})
            elif isinstance(action, ListStore):
                self._checks.append((self.workers.submit(self._list_store), "store"))

    def _remove_other_ranks(self) -> None:
        # All ranks of this world stand on proven state: what a larger world left is of no more use, and its pages would hold back the cut.
        for directory in self.settings.job_dir.glob("rank-*"):
            if int(directory.name.split("-")[1]) >= (self._world_size() or 0):
                shutil.rmtree(directory)

    def _tell(self, message: dict[str, Any]) -> None:
        for box in list(self.ranks.values()):
            box.send(message)

    def _list_store(self) -> list[int] | str:
        """Steps of the usable checkpoints, or why the store cannot be read."""
        from keepstep.edge.store import Store

        assert self.settings.store is not None
        try:
            listing = Store(self.settings.store).list_checkpoints()
        except StoreError as error:
            return str(error)
        for step, why in listing.broken.items():
            self.journal.record("checkpoint-damaged", f"the checkpoint of step {step} is not usable: {why}", step=step)
        return [c.step for c in listing.checkpoints]

    # -- the memory

    def statuses(self) -> dict[int, RankStatus]:
        """Every rank's page that can be read."""
        found = {}
        for directory in self.settings.job_dir.glob("rank-*"):
            rank = int(directory.name.split("-")[1])
            status = read_status(self.settings.job_dir, rank)
            if status:
                found[rank] = status
        return found

    def _persist(self) -> None:
        if self.persisting.pending:
            self.persisting.step([holding_of(s) for s in self.statuses().values()], self._world_size(), bool(self.ranks))

    def _world_size(self) -> int | None:
        return self.custody.world_size or next((s.world_size for s in self.statuses().values()), None)

    def _newest_epoch(self) -> int:
        return max((s.epoch for s in self.statuses().values()), default=0)

    def _scrub(self) -> None:
        now_ns = time.monotonic_ns()
        if not self.settings.scrub_every_s or now_ns - self._scrubbed_at_ns < self.settings.scrub_every_s * S_NS:
            return
        if any(kind == "scrub" for _, kind in self._checks):
            return
        self._scrubbed_at_ns = now_ns
        self._checks.append((self.workers.submit(scrub, self.settings.job_dir), "scrub"))

    def _take_checks(self) -> None:
        for check in [c for c in self._checks if c[0].done()]:
            self._checks.remove(check)
            future, kind = check
            if kind == "store" and self.vote:
                found = future.result()
                self._carry_out(self.vote.unlistable(found) if isinstance(found, str) else self.vote.listed(found))
            elif kind == "scrub":
                for rank, index, why in future.result():
                    self.journal.record("damaged", f"scrub: {why}", rank=rank, slot=index)
                    if rank in self.ranks:
                        self.ranks[rank].send({"kind": "damaged", "slot": index, "why": why})

    # -- the end

    def _finish(self) -> bool:
        if self._finishing is None:
            self._finishing = self.custody.decide(time.monotonic_ns())
            if self._finishing is None:
                return False
            self.journal.record("job-over", self._finishing.why, ok=self._finishing.ok)
            if self.settings.store:
                self.persisting.ask(None, None, self._finishing.why)
                self._persist()
        if self.persisting.pending:
            return False
        self._server.close()
        # A new run of the same job may start this very moment: the old directory leaves its name in one step.
        gone = self.settings.job_dir.with_name(f"{self.settings.job_dir.name}.ending-{os.getpid()}")
        os.rename(self.settings.job_dir, gone)
        shutil.rmtree(gone)
        self.persisting.close()
        self.workers.shutdown()
        self.journal.record("keeper-ended", "the job's memory has been removed", ok=self._finishing.ok)
        return True

    def preempted(self) -> None:
        """SIGTERM: the machine is being taken away. Save what is committed and stay while anybody is there."""
        self.persisting.ask(None, None, "the keeper received SIGTERM")


def scrub(job_dir: Path) -> list[tuple[int, int, str]]:
    """Re-verify every sealed slot: (rank, slot, what is wrong)."""
    found = []
    for directory in sorted(job_dir.glob("rank-*")):
        rank = int(directory.name.split("-")[1])
        for index, path in enumerate(slot_paths(job_dir, rank)):
            try:
                slot = Slot(path)
                try:
                    slot.verify()
                finally:
                    slot.close()
            except DamageError as error:
                found.append((rank, index, str(error)))
            except (LookupError, OSError):
                continue
    return found


def main() -> None:
    """`python -m keepstep.runtime.keeper <settings as JSON>`: run until the job is over."""
    settings = settings_from_text(sys.argv[1])
    lock_fd = os.open(settings.job_dir / "keeper.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for _ in range(20):  # an onlooker's question whether a keeper lives holds the lock for a moment
        try:
            flock(lock_fd, LOCK_EX | LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(0.01)
    else:
        return  # another keeper lives
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    keeper = Keeper(settings, lock_fd)
    signal.signal(signal.SIGTERM, lambda *_: keeper.preempted())
    keeper.run()


if __name__ == "__main__":
    main()
