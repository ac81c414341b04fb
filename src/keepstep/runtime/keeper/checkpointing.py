"""Persisting: the keeper's side of writing checkpoints.

Requests wait here until the step they ask for is held by all ranks; then the slots of that cut are
pinned (shared flock: their ranks write elsewhere meanwhile) and an attempt begins. Its acts are
those of `runtime/persister/process.py`, which this keeper's `Writer` carries out:

    survey (every node)  ->  part (every node)  ->  publish (the leader)

An act begins when all nodes have answered the one before. On one machine there is one node, this
one. On many, the keeper that leads decides about the stamp and orders the acts from the others;
whoever carries the words to them is given to `meet`. One attempt at a time; requests for steps that
the running one covers are answered by it.

Invariant: what one attempt's nodes say counts for that attempt alone; no two attempts of any leader
have the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from keepstep.config import Settings
from keepstep.core.resume.cut import Holding, cut
from keepstep.edge.shm.slot import Slot
from keepstep.model.mesh import LEADER, Mesh
from keepstep.model.messages.keeper_rank import CheckpointDone
from keepstep.model.messages.persister import ActName
from keepstep.model.snapshot import Stamp
from keepstep.model.units import S_NS, human_ns
from keepstep.ports import Clock, Journal, Memory, Writer
from keepstep.runtime.slot_locks import pin, unpin

# how long a wanted step may take to become common before the newest cut serves instead
PATIENCE_NS = 60 * S_NS
OVERWRITTEN = "overwritten"  # how a node's refusal begins when a newer step may do

Answer = Callable[[bool, str], None]  # whether it was done, and what was done or why not
# node, act, stamp, attempt: have that node's keeper `carry_out` this
Order = Callable[[int, ActName, Stamp, int], None]


class Asker(Protocol):
    """Who asked: a rank's mailbox, or somebody far away."""

    def send(self, message: CheckpointDone, /) -> bool: ...


@dataclass
class Request:
    box: Asker | None
    ticket: int
    step: int | None
    why: str
    since_ns: int


@dataclass
class Running:
    """The attempt that runs, as its leader knows it. `awaited`: the nodes that have not answered
    the act."""

    stamp: Stamp
    number: int
    ranks: tuple[int, ...]
    requests: list[Request]
    began_ns: int
    act: str = ""
    awaited: set[int] = field(default_factory=set)


class Persisting:
    """Owns the pins. `writer`: None in a job without a store."""

    def __init__(
        self,
        settings: Settings,
        memory: Memory,
        clock: Clock,
        journal: Journal,
        writer: Writer | None,
    ) -> None:
        self._settings, self._memory, self._clock, self._journal, self._writer = (
            settings,
            memory,
            clock,
            journal,
            writer,
        )
        self._requests: list[Request] = []
        self._running: Running | None = None
        self._unanswered = 0  # of what the writer was asked
        self._newest: int | None = None
        self._overwritten: Stamp | None = None
        self._node = LEADER
        self._ranks: tuple[int, ...] = ()  # of every node, while the job has several
        self._order: Order | None = None
        self._surveyed: tuple[Stamp, int] | None = None  # for another node, which leads

    @property
    def pending(self) -> bool:
        return bool(self._requests or self._running or self._unanswered)

    # -- what is wanted

    def ask(self, box: Asker | None, step: int | None, why: str, ticket: int = 0) -> None:
        """Want `step` (None: the newest) in the store; `box` hears the outcome with its ticket. On
        many nodes: ask the leader."""
        if self._writer is None:
            self._journal.record(
                "persist-impossible", f"{why}: nothing is written, the job has no store"
            )
            _answer(
                [Request(box, ticket, step, why, 0)],
                False,
                step,
                "the job has no store: give one with store=... or --store",
            )
            return
        self._requests.append(Request(box, ticket, step, why, self._clock.monotonic_ns()))
        self._refuse_unless_leading()

    def _refuse_unless_leading(self) -> None:
        if self._node != LEADER:
            requests, self._requests = self._requests, []
            _answer(
                requests,
                False,
                None,
                f"expected to be asked on the node that leads, {LEADER}, found node {self._node}",
            )

    def forget(self, box: Asker) -> None:
        """The asker is gone; what it asked for is still done."""
        for request in [*self._requests, *(self._running.requests if self._running else ())]:
            if request.box is box:
                request.box = None

    def resumed_from_store(self, step: int) -> None:
        """Everybody stands on this checkpoint: it need not be written again."""
        self._newest = step

    # -- leading

    def step(self, holdings: Sequence[Holding], world_size: int | None, anybody: bool) -> None:
        """Start what can be started. `holdings`: of all ranks of all nodes. `anybody`: whether a
        rank is connected that may still bring a wanted step."""
        if self._running or not self._requests:
            return
        now_ns = self._clock.monotonic_ns()
        newest = cut(holdings, world_size or 1)
        reached = max(
            -1 if newest is None else newest.step, -1 if self._newest is None else self._newest
        )
        # Nothing is being written and all have decided about it: what is not common by now never
        # will be.
        settled = (
            min((h.decided_step for h in holdings), default=-1)
            if all(h.pending is None for h in holdings)
            else -1
        )
        ready = [r for r in self._requests if _is_ready(r, reached, settled, anybody, now_ns)]
        if not ready:
            return
        if newest is None or newest.step <= reached == self._newest:
            self._requests = [r for r in self._requests if r not in ready]
            known = self._newest is not None
            word = (
                f"step {self._newest} is already in the store"
                if known
                else "no step is held by every rank"
            )
            _answer(ready, known, self._newest, word)
            return
        if newest == self._overwritten and any(now_ns - r.since_ns <= PATIENCE_NS for r in ready):
            return  # a newer cut made room for what overwrote it: it is about to be seen
        ranks = self._ranks or (world_size or 1,)
        slots = pin(self._memory, self._settings.job_dir, newest, range(ranks[LEADER]))
        # overwritten this moment: then the next round has a newer cut; or damaged, and it will
        # never be had
        if slots is None:
            late = [r for r in ready if now_ns - r.since_ns > PATIENCE_NS]
            self._requests = [r for r in self._requests if r not in late]
            _answer(
                late,
                False,
                newest.step,
                f"a rank of this node does not hold {newest} any more, as its page says",
            )
            return
        self._requests = [r for r in self._requests if r not in ready]
        self._running = Running(newest, self._clock.wall_ns(), ranks, ready, now_ns)
        self._journal.record(
            "persist-started",
            f"writing step {newest.step} to the store: {ready[0].why}",
            step=newest.step,
        )
        self._begin("survey", slots)

    def _begin(self, act: ActName, pins: Sequence[Slot] = ()) -> None:
        """Have every node that takes part in the act carry it out."""
        running = self._running
        assert running is not None
        running.act = act
        running.awaited = {LEADER} if act == "publish" else set(range(len(running.ranks)))
        if act != "publish":
            self._order_others(act)
        self._tell(
            act, running.stamp, running.number, partial(self._heard_here, act, running.number), pins
        )

    def _order_others(self, act: ActName) -> None:
        running = self._running
        assert running is not None
        for node in range(1, len(running.ranks)):
            assert self._order is not None
            self._order(node, act, running.stamp, running.number)

    def _heard_here(self, act: ActName, number: int, answer: dict[str, Any]) -> None:
        if answer["there"] and self._running is not None and self._running.number == number:
            self._order_others("drop")
            self._done(True, answer["why"])
        else:
            self.answered(LEADER, act, number, answer["ok"], answer["why"])

    def answered(self, node: int, act: ActName, attempt: int, ok: bool, why: str) -> None:
        """A node's answer to an act. Answers of other attempts, and of other acts, count for
        nothing."""
        running = self._running
        if (
            running is None
            or (running.number, running.act) != (attempt, act)
            or node not in running.awaited
        ):
            return
        if not ok:
            self._failed(node, why)
            return
        running.awaited.remove(node)
        if act == "publish":
            self._done(True, why)
        elif not running.awaited:
            self._begin("part" if act == "survey" else "publish")

    def _failed(self, node: int, why: str) -> None:
        running = self._running
        assert running is not None
        self._order_others("drop")
        if len(running.ranks) > 1:
            why = f"node {node}: {why}"
        if running.act == "survey" and why.startswith(f"node {node}: {OVERWRITTEN}"):
            now_ns = self._clock.monotonic_ns()
            again = [r for r in running.requests if now_ns - r.since_ns <= PATIENCE_NS]
            running.requests = [r for r in running.requests if r not in again]
            self._requests = again + self._requests
            self._overwritten = running.stamp
            why += "; a newer step is going to be tried"
        self.give_up(why)

    def _done(self, ok: bool, why: str) -> None:
        assert self._running is not None
        running, self._running = self._running, None
        took = human_ns(self._clock.monotonic_ns() - running.began_ns)
        step = running.stamp.step
        if ok:
            self._newest = step
        self._journal.record(
            "persisted" if ok else "persist-failed", f"step {step}, after {took}: {why}", step=step
        )
        _answer(running.requests, ok, step, why)

    # -- many nodes

    def meet(self, mesh: Mesh, order: Order) -> None:
        """A round of these nodes begins, and what was under way is over. `order` only sends:
        answers come in by `answered` later."""
        self.give_up(f"round {mesh.version} begins")
        self._node, self._ranks, self._order = (
            mesh.node,
            tuple(m.ranks for m in mesh.members),
            order,
        )
        self._refuse_unless_leading()

    def carry_out(self, act: ActName, stamp: Stamp, attempt: int, answer: Answer) -> None:
        """What the leader ordered from this node."""
        pins: Sequence[Slot] = ()
        if act == "survey":
            first = sum(self._ranks[: self._node])
            pinned = pin(
                self._memory,
                self._settings.job_dir,
                stamp,
                range(first, first + self._ranks[self._node]),
            )
            if pinned is None:
                answer(False, f"{OVERWRITTEN}: a rank of it does not hold {stamp} any more")
                return
            pins, self._surveyed = pinned, (stamp, attempt)
        elif self._surveyed == (stamp, attempt):
            self._surveyed = None
        self._tell(act, stamp, attempt, lambda heard: answer(heard["ok"], heard["why"]), pins)

    def node_gone(self, node: int, why: str) -> None:
        """Another node is not there any more: what it takes part in, or leads, comes to nothing."""
        if self._running is not None and node < len(self._running.ranks):
            self._failed(node, why)
        elif node == LEADER:
            self.give_up(why)

    def give_up(self, why: str) -> None:
        """What is being written is not going to be a checkpoint: its requests are answered so, and
        the ranks have their slots back."""
        if self._running is not None:
            self._tell("drop", self._running.stamp, self._running.number, _nobody)
            self._done(False, why)
        if self._surveyed is not None:
            self._tell("drop", *self._surveyed, _nobody)
            self._surveyed = None

    # -- the persister

    def _tell(
        self,
        act: ActName,
        stamp: Stamp,
        number: int,
        heard: Callable[[dict[str, Any]], None],
        pins: Sequence[Slot] = (),
    ) -> None:
        """`pins`: what must stand still until this is answered."""
        assert self._writer is not None
        ranks = self._running.ranks if self._running is not None else self._ranks
        request = {
            "act": act,
            "node": self._node,
            "step": stamp.step,
            "epoch": stamp.epoch,
            "attempt": number,
            "ranks": ranks,
        }

        def answered(answer: dict[str, Any]) -> None:
            self._unanswered -= 1
            unpin(pins)
            heard(answer)

        self._unanswered += 1
        self._writer.ask(request, answered)


def _nobody(_: dict[str, Any]) -> None:
    """Whose answer nobody waits for."""


def _is_ready(request: Request, reached: int, settled: int, anybody: bool, now_ns: int) -> bool:
    if request.step is None or request.step <= reached or not anybody:
        return True
    return request.step <= settled or now_ns - request.since_ns > PATIENCE_NS


def _answer(requests: list[Request], ok: bool, step: int | None, why: str) -> None:
    for request in requests:
        if request.box is not None:
            request.box.send(CheckpointDone(request.ticket, ok, step, why))
