"""Keeper: the process that outlives the trainers and answers for their memory.

    inbox (unix sockets, other keepers, persister's pipe, finished checks, clock) -> vote, custody, commit -> replies, copies, removal

Ranks write their own slots, and the keeper reads them; it writes only what it holds for other nodes. So it may die at any moment:
ranks keep capturing, and the next keeper adopts the job directory as it finds it. Never imports torch.
"""

from __future__ import annotations

import itertools
import os
import selectors
import shutil
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any

from keepstep.config import Settings, settings_from_text
from keepstep.core.custody import Custody, Finish
from keepstep.core.cut import holding_of
from keepstep.edge.arena import Slot, slot_paths
from keepstep.edge.journal import Journal
from keepstep.edge.mailbox import Mailbox, listen
from keepstep.edge.status import read_status
from keepstep.errors import DamageError, KeeperError, StoreError
from keepstep.model.mesh import LEADER, Mesh, mesh_from_json
from keepstep.model.snapshot import RankStatus, SlotState, Stamp
from keepstep.model.units import S_NS
from keepstep.runtime.election import Election
from keepstep.runtime.mesh.lines import Lines
from keepstep.runtime.mesh.node import Node
from keepstep.runtime.naming import job_hash
from keepstep.runtime.persisting import Persisting

TICK_S = 0.2
BUSY_TICK_S = 0.005
WORKERS = 4  # scrubbing and listing the store take long: copies do not wait for them
LAST_ANSWER_NS = 60 * S_NS  # how long a node that follows waits at the end until the leader says that the last checkpoint is written


class FarAsker:
    """A rank of another node, as persisting sees it."""

    def __init__(self, say: Callable[[int, str, dict[str, Any]], None], node: int) -> None:
        self._say, self._node = say, node

    def send(self, message: dict[str, Any], /) -> bool:
        self._say(self._node, "answer", {name: message[name] for name in ("ticket", "ok", "step", "why")})
        return True


class Keeper:
    """One job's keeper on one machine."""

    def __init__(self, settings: Settings, lock_fd: int) -> None:
        self.settings = settings
        self._lock_fd = lock_fd
        self._job_hash = job_hash(settings.job, os.getuid())
        self.journal = Journal(settings.journal_path, "keeper")
        self.custody = Custody(int(settings.grace_s * S_NS), time.monotonic_ns())
        self.election = Election(self.journal, settings.store is not None, self)
        self._tickets = itertools.count(1)
        self._asked: dict[int, tuple[Mailbox | None, int]] = {}  # of another node's keeper, which leads
        self.lines: Lines | None = None
        self.node: Node | None = None
        self.ranks: dict[int, Mailbox] = {}
        self._attached = False  # ranks that train have found this keeper
        self._failed: set[int] = set()  # ranks whose last life told of an error, until all train again
        self.agent: Mailbox | None = None
        self.selector = selectors.DefaultSelector()
        self.workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="keeper-worker")
        self._checks: list[tuple[Future[Any], str]] = []
        self._scrubbed_at_ns = time.monotonic_ns()
        self._finishing: Finish | None = None
        self._last_ask_ns = 0
        self._leader_gone = ""  # why, while the leading keeper cannot be asked
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
            if self.node is not None:
                self.node.tick()
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
            if self.custody.ended_here and self.node is not None:
                self.node.say_ended()
            if self.agent is not None or not self.custody.ended_here:  # else the connection ends when the memory is gone
                box.send({"kind": "released"})
        elif kind == "loaded":
            self.election.loaded(int(message["rank"]), int(message["round"]))
        elif kind == "failed":
            self.election.failed(int(message["rank"]), int(message["round"]), str(message["why"]))
        elif kind == "changed" and self.node is not None:
            self.node.report()
        elif kind == "count":
            box.send({"kind": "counts", "counts": self.lines.counts() if self.lines is not None else {}})
        elif kind == "listen":
            box.send(self._listen(str(message["host"]), int(message["port"])))
        elif kind == "mesh":
            mesh = mesh_from_json(message)
            self._begin_round(mesh)
            if box is self.agent:  # its ranks may ask now: nothing they say is taken for the round before
                box.send({"kind": "mesh-known", "round": mesh.round})
        elif kind == "persist":
            self._ask_to_persist(box, message.get("step"), str(message["why"]), int(message.get("ticket", 0)))

    def _agent_ended(self, box: Mailbox, ok: bool, why: str) -> None:
        holds_snapshots = any(slot_paths(self.settings.job_dir, rank) for rank in self.statuses())
        if not self.custody.agent_said_end(ok, why, holds_snapshots):
            kept = f"{why}; it never resumed, so the memory it found is kept for {self.settings.grace_s:.0f} s"
            self.journal.record("memory-kept", kept)
            box.send({"kind": "kept", "why": kept})

    def _rank_came(self, box: Mailbox, pid: int, message: dict[str, Any]) -> None:
        rank, world = int(message["rank"]), int(message["world_size"])
        self.ranks[rank] = box
        ok, why = self.custody.last_words.get(rank, (True, ""))
        if not ok and why != "interrupted":
            self._failed.add(rank)
        self.custody.rank_came(rank, self._expected_here(world))
        if message["kind"] == "attach":
            self.custody.resumed = True
            self._attached = True
            self.journal.record("rank-attached", f"rank {rank} (process {pid}) is training and found this keeper", rank=rank, pid=pid)
            if self.node is not None:
                self.node.trains()
            return
        held = ", ".join(str(s) for s in sorted(Stamp(*s) for s in message["holds"])) or "nothing usable"
        self.journal.record(
            "rank-joined",
            f"rank {rank} of {world} (process {pid}) holds {held} in memory",
            rank=rank,
            pid=pid,
            incarnation=message["incarnation"],
        )
        self.election.joined(rank, message)

    def _expected_here(self, world: int) -> int:
        mesh = self.node.mesh if self.node is not None else None
        return world if mesh is None else len(mesh.ranks_of(mesh.node))

    def _gone(self, box: Mailbox, pid: int) -> None:
        self.selector.unregister(box)
        box.close()
        now_ns = time.monotonic_ns()
        self.persisting.forget(box)
        self._asked = {number: (None if who is box else who, ticket) for number, (who, ticket) in self._asked.items()}
        if box is self.agent:
            self.agent = None
            self.custody.agent_left(now_ns)
        for rank, known in list(self.ranks.items()):
            if known is box:
                del self.ranks[rank]
                self.custody.rank_left(rank, now_ns)
                self.election.left(rank)
                self._say_left(rank, pid)

    def _say_left(self, rank: int, pid: int) -> None:
        ok_why = self.custody.last_words.get(rank)
        status = self.statuses().get(rank)
        at = f" in step {status.step}, phase {status.phase.name.lower()}, newest completed step {status.completed_step}" if status else ""
        why = f"rank {rank} (process {pid}) is gone" + ("" if ok_why else f" without goodbye{at}")
        told = {"completed_step": status.completed_step, "stall_ns": status.stall_ns_total} if status else {"completed_step": None}
        self.journal.record("rank-left", why, rank=rank, pid=pid, expected=ok_why is not None, **told)

    # -- other nodes

    def _listen(self, host: str, port: int) -> dict[str, Any]:
        if self.lines is None:
            try:
                self.lines = Lines(self.settings, self._job_hash, host, port, time.time_ns())
            except KeeperError as error:
                return {"kind": "unheard", "why": str(error)}
            self.selector.register(self.lines, selectors.EVENT_READ, lambda: self.node.hear() if self.node is not None else None)
        host, port = self.lines.address
        newest = self.node.mesh.round if self.node is not None and self.node.mesh is not None else -1
        return {"kind": "listening", "host": host, "port": port, "incarnation": self.lines.incarnation, "round": newest}

    def _begin_round(self, mesh: Mesh) -> None:
        if self.lines is None:
            self.journal.record("mesh-refused", "a mesh was told before the keeper was asked to listen")
            return
        first = self.node is None
        if self.node is None:
            self.node = Node(self.settings, self.lines, self._job_hash, self.journal, self.workers, self)
        if self.node.mesh is not None and mesh.round <= self.node.mesh.round:
            return  # every session of a node tells it
        self.custody.round_began(len(mesh.members), mesh.ranks_of(mesh.node))
        self._leader_gone = ""
        self.node.begin(mesh)
        self.election.begin_round(self.node)
        self.persisting.meet(mesh, self._order_persisting)
        if first and self._attached:  # this keeper came in the middle of a round, and its ranks were quicker than the agent
            self.node.trains()

    def vote_word(self, node: int, word: str, body: dict[str, Any]) -> None:
        self.election.heard(node, word, body)

    def inventories_changed(self) -> None:
        self.election.inventories_changed()

    def leader_is_back(self) -> None:
        self._leader_gone = ""
        self.election.leader_is_back()
        if self.custody.ended_here and self.node is not None:
            self.node.say_ended()

    def all_nodes_ended(self) -> None:
        self.custody.all_nodes_ended = True

    def link_is_gone(self, node: int, why: str) -> None:
        self.persisting.node_gone(node, why)
        if node == LEADER:
            self._leader_gone = f"the leading keeper is gone: {why}"
            asked, self._asked = self._asked, {}
            for box, ticket in asked.values():
                self._cannot_persist(box, ticket)

    def peer_is_dead(self, node: int, why: str) -> None:
        self.journal.record("node-lost", f"node {node} does not answer: {why}", node=node)
        self.election.node_is_dead(node)
        assert self.node is not None and self.node.mesh is not None
        if self.agent is not None:
            self.agent.send({"kind": "peer-dead", "round": self.node.mesh.round, "node": node, "why": why})

    # -- checkpoints

    @property
    def _follows(self) -> bool:
        """Whether another node's keeper leads."""
        return self.node is not None and self.node.mesh is not None and not self.node.mesh.leads

    def _ask_to_persist(self, box: Mailbox | None, step: int | None, why: str, ticket: int) -> None:
        if not self._follows or self.settings.store is None:
            self.persisting.ask(box, step, why, ticket)
            return
        if self._leader_gone:
            self._cannot_persist(box, ticket)
            return
        assert self.node is not None
        number = next(self._tickets)
        self._asked[number] = (box, ticket)
        self.node.say_persist(LEADER, "ask", {"ticket": number, "step": step, "why": why[:500]})

    def _cannot_persist(self, box: Mailbox | None, ticket: int) -> None:
        if box is not None:
            box.send({"kind": "persisted", "ticket": ticket, "ok": False, "step": None, "why": self._leader_gone})

    def _order_persisting(self, node: int, act: str, stamp: Stamp, attempt: int) -> None:
        assert self.node is not None
        self.node.say_persist(node, "order", {"act": act, "step": stamp.step, "epoch": stamp.epoch, "attempt": attempt})

    def persist_word(self, node: int, word: str, body: dict[str, Any]) -> None:
        assert self.node is not None
        say = self.node.say_persist
        if word == "ask":
            self.persisting.ask(FarAsker(say, node), body["step"], str(body["why"]), int(body["ticket"]))
        elif word == "answer":
            box, ticket = self._asked.pop(int(body["ticket"]), (None, 0))
            if box is not None:
                box.send({"kind": "persisted", **body, "ticket": ticket})
        elif word == "order":
            about = {"act": body["act"], "attempt": body["attempt"]}

            def answer(ok: bool, why: str) -> None:
                say(node, "done", {**about, "ok": ok, "why": why[:1000]})

            self.persisting.carry_out(str(body["act"]), Stamp(body["step"], body["epoch"]), int(body["attempt"]), answer)
        elif word == "done":
            self.persisting.answered(node, str(body["act"]), int(body["attempt"]), bool(body["ok"]), str(body["why"]))

    # -- what the election needs

    def tell(self, rank: int, message: dict[str, Any]) -> None:
        if rank in self.ranks:
            self.ranks[rank].send(message)

    def here(self) -> list[int]:
        return sorted(self.ranks)

    def newest_epoch(self) -> int:
        return max((s.epoch for s in self.statuses().values()), default=0)

    def completed_step(self, rank: int) -> int | None:
        status = self.statuses().get(rank)
        return None if status is None or status.completed_step < 0 else status.completed_step

    def list_store(self) -> None:
        self._checks.append((self.workers.submit(self._list_store), "store"))

    def has_failed(self, rank: int) -> bool:
        return rank in self._failed

    def went(self, source: str, step: int) -> None:
        self.custody.resumed = True
        self._failed.clear()
        if source == "store":
            self.persisting.resumed_from_store(step)
        if self.node is None:
            self._remove_other_ranks()

    def _remove_other_ranks(self) -> None:
        # All ranks of this world stand on proven state: what a larger world left is of no more use, and its pages would hold back the cut.
        for directory in self.settings.job_dir.glob("rank-*"):
            if int(directory.name.split("-")[1]) >= (self._world_size() or 0):
                shutil.rmtree(directory)

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
            holdings = [holding_of(s) for s in self.statuses().values()] if self.node is None else self.node.holdings()
            self.persisting.step(holdings, self._world_size(), bool(self.ranks))

    def _world_size(self) -> int | None:
        if self.node is not None and self.node.mesh is not None:
            return self.node.mesh.world_size
        return self.custody.world_size or next((s.world_size for s in self.statuses().values()), None)

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
            if kind == "store":
                self.election.store_listed(future.result())
            elif kind == "scrub":
                self._take_findings(future.result())

    def _take_findings(self, findings: list[Finding]) -> None:
        for finding in findings:
            if finding.rank is None:
                if self.node is not None:
                    self.node.damaged_at_rest(finding.path, finding.why)
                continue
            self.journal.record("damaged", f"scrub: {finding.why}", rank=finding.rank, slot=finding.index)
            self._mend(finding.rank, finding.index, finding.why)
        if not findings and self.node is not None:
            self.node.compare()

    def _mend(self, rank: int, index: int, why: str) -> None:
        def give_up(_: str) -> None:
            if rank in self.ranks:
                self.ranks[rank].send({"kind": "damaged", "slot": index, "why": why})

        def mended(failed: str | None) -> None:
            if failed is None:
                self.journal.record(
                    "mended", f"slot {index} of rank {rank} is whole again, from other nodes' memory", rank=rank, slot=index
                )
            else:
                give_up(failed)

        status = self.statuses().get(rank)
        # What the slot held is asked of the rank's page: its header may be what is damaged.
        if self.node is None or status is None or index >= len(status.slots) or status.slots[index].state is not SlotState.SEALED:
            give_up(why)
        else:
            self.node.restoring.mend(rank, index, status.slots[index].stamp, mended)

    def scrub_soon(self) -> None:
        """Something that lies here does not prove."""
        self._scrubbed_at_ns = min(self._scrubbed_at_ns, time.monotonic_ns() - round(self.settings.scrub_every_s * S_NS))

    # -- the end

    def _finish(self) -> bool:
        if self._finishing is None:
            self._finishing = self.custody.decide(time.monotonic_ns())
            if self._finishing is None:
                return False
            self.journal.record("job-over", self._finishing.why, ok=self._finishing.ok)
            if self.settings.store:
                self._ask_to_persist(None, None, self._finishing.why, 0)
                self._persist()
            self._last_ask_ns = time.monotonic_ns()
        if self.persisting.pending or (self._asked and time.monotonic_ns() - self._last_ask_ns < LAST_ANSWER_NS):
            return False
        self._server.close()
        if self.node is not None:
            self.node.close()
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
        self._ask_to_persist(None, None, "the keeper received SIGTERM", 0)


@dataclass(frozen=True, slots=True)
class Finding:
    """A slot that does not prove. `rank` is None for what is held for other nodes."""

    path: Path
    rank: int | None
    index: int
    why: str


def scrub(job_dir: Path) -> list[Finding]:
    """Re-verify every sealed slot: the ranks' own, copies and parities."""
    found = []
    for root in (job_dir, job_dir / "held", job_dir / "parity"):
        for directory in sorted(root.glob("rank-*")):
            rank = int(directory.name.split("-")[1])
            for path in slot_paths(root, rank):
                try:
                    slot = Slot(path)
                    try:
                        slot.verify_bytes()
                    finally:
                        slot.close()
                except DamageError as error:
                    found.append(Finding(path, rank if root == job_dir else None, int(path.name.split("-")[1]), str(error)))
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
