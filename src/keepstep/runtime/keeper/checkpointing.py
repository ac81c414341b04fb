"""Checkpointing: the keeper's side of writing checkpoints.

Comes in: requests of ranks, what all ranks hold, the answers of this node's persister and of other
nodes. Goes out: acts for the persister, orders for other nodes, the requests' outcome. A request
waits until the step that it asks for is held by all ranks; then the slots of that cut are pinned
(shared flock: their ranks write elsewhere meanwhile) and an attempt begins. Its acts are those of
`runtime/persister/persister.py`:

    survey (every node)  ->  part (every node)  ->  publish (the leader)

Where ranks share a snapshot over nodes, each node first brings the parts that its ranks lack
(`runtime/replication/share_parts.py`), and gives them back behind its part.

An act begins when all nodes have answered the one before. On one machine there is one node, this
one. On many, the keeper that leads decides about the stamp and orders the acts from the others. One
attempt runs at a time; requests for steps that it covers are answered by it. When the store hung
over one, the next waits for a while: whoever asks meanwhile, and has steps to come, hears that; who
ends waits for it.

Invariant: what nodes say of one attempt counts for that attempt alone; no two attempts of any
leader have the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from keepstep.core.resume.cut import Holding, cut
from keepstep.core.resume.patience import WriteBackoff
from keepstep.edge.shm.slot import Slot
from keepstep.model.checkpoint import Timeline
from keepstep.model.mesh import LEADER, Mesh
from keepstep.model.messages.keeper_rank import CheckpointDone
from keepstep.model.messages.persister import ActDone, ActName, CheckpointAct
from keepstep.model.snapshot import Stamp
from keepstep.model.units import S_NS, human_ns
from keepstep.ports import Clock, Journal, Memory
from keepstep.runtime.keeper.persister_client import PersisterClient
from keepstep.runtime.slot_locks import pin, unpin

# how long a wanted step may take to become common before the newest cut serves instead
WITHIN_NS = 60 * S_NS
OVERWRITTEN = "overwritten"  # how a node's refusal begins when a newer step may do
NO_STORE = "the job has no store: give one with store=... or --store"

# whether it was done, and what was done or why not; whether the store hung over it
Answer = Callable[[bool, str, bool], None]
# node, act, stamp, attempt, whether it is urgent: have that node's keeper `carry_out` this
Order = Callable[[int, ActName, Stamp, int, bool], None]


class SnapshotParts(Protocol):
    """What ranks of other nodes keep for those here: `runtime/replication/share_parts.py`."""

    def bring_to_store(
        self, stamp: Stamp, attempt: int, then: Callable[[str | None], None], /
    ) -> None:
        """`then` hears None, or what cannot be had."""

    def give_back(self, attempt: int, /) -> None:
        """That one needs them no more, and waits no more for them."""


class Asker(Protocol):
    """Who asked: a rank's mailbox, or somebody on another node."""

    def send(self, message: CheckpointDone, /) -> bool:
        """What became of it."""


@dataclass
class CheckpointRequest:
    """One question. `box`: None when nobody waits for the answer any more."""

    box: Asker | None
    ticket: int
    step: int | None
    why: str
    since_ns: int
    steps_follow: bool

    @property
    def is_urgent(self) -> bool:
        """Who asked ends, or waits: the trainer gains nothing from what gives way to it."""
        return not self.steps_follow


@dataclass
class RunningAttempt:
    """The attempt that runs, as its leader knows it. `ranks`: how many each node has; `awaited`:
    the nodes that have not answered the act."""

    stamp: Stamp
    number: int
    ranks: tuple[int, ...]
    requests: list[CheckpointRequest]
    began_ns: int
    act: ActName = "survey"
    awaited: set[int] = field(default_factory=set)

    @property
    def is_urgent(self) -> bool:
        return any(request.is_urgent for request in self.requests)

    @property
    def others(self) -> range:
        """The nodes beside the one that leads."""
        return range(LEADER + 1, len(self.ranks))


@dataclass
class MeshPart:
    """This node's part in the present mesh. `ranks`: of every node; empty in a job of one node.
    `parts`: None where there are none to bring. `surveyed`: stamp and number of an attempt that
    another node leads and that pins slots here."""

    node: int
    ranks: tuple[int, ...]
    order: Order
    parts: SnapshotParts | None = None
    surveyed: tuple[Stamp, int] | None = None
    is_urgent: bool = False  # what that node has ordered last


class Checkpointing:
    """Owns the pins. `persister`: None in a job without a store."""

    def __init__(
        self,
        job_dir: Path,
        memory: Memory,
        clock: Clock,
        journal: Journal,
        persister: PersisterClient | None,
    ) -> None:
        self._job_dir, self._memory, self._clock = job_dir, memory, clock
        self._journal, self._persister = journal, persister
        self._requests: list[CheckpointRequest] = []
        self._running: RunningAttempt | None = None
        self._unanswered = 0  # of what the persister was asked
        self._timeline: Timeline | None = None  # None: this keeper has not heard
        self._newest: int | None = None  # step that is known to be in the store
        self._overwritten: Stamp | None = None
        self._backoff = WriteBackoff()
        self._part = MeshPart(LEADER, (), _no_other_node)
        # takes back what the persister is to be asked once parts are here
        self._withdraw: Callable[[], None] | None = None

    @property
    def pending(self) -> bool:
        """Whether anything is wanted or being done."""
        return bool(self._requests or self._running or self._unanswered)

    def hurry(self) -> None:
        """At every look: the persister computes as others do while somebody waits for it, also for
        what comes behind what it is at; else it lets others compute first."""
        if self._persister is not None:
            running = self._running is not None and self._running.is_urgent
            wanted = any(request.is_urgent for request in self._requests)
            ordered = self._part.is_urgent and bool(self._unanswered)
            self._persister.hurry(running or wanted or ordered)

    # -- what is wanted

    @property
    def stored_step(self) -> int | None:
        """The newest that is known to be in the store."""
        return self._newest

    def ask(
        self,
        box: Asker | None,
        step: int | None,
        why: str,
        ticket: int = 0,
        steps_follow: bool = False,
    ) -> None:
        """Want `step` (None: the newest) in the store; `box` hears the outcome with its ticket.
        `steps_follow`: as in `WantCheckpoint`. On many nodes: ask the leader."""
        now_ns = self._clock.monotonic_ns()
        request = CheckpointRequest(box, ticket, step, why, now_ns, steps_follow)
        if self._persister is None:
            told = f"{why}: nothing is written, the job has no store"
            self._journal.record("persist-impossible", told)
            _answer([request], False, step, NO_STORE)
            return
        self._requests.append(request)
        self._refuse_unless_leading()

    def _refuse_unless_leading(self) -> None:
        node = self._part.node
        if node != LEADER:
            requests, self._requests = self._requests, []
            why = f"expected to be asked on the node that leads, {LEADER}, found node {node}"
            _answer(requests, False, None, why)

    def forget(self, box: Asker) -> None:
        """The asker is gone; what it asked for is still done."""
        running = self._running.requests if self._running is not None else []
        for request in [*self._requests, *running]:
            if request.box is box:
                request.box = None

    def goes_on(self, timeline: Timeline, from_store: bool) -> None:
        """All train in this epoch, from this step. What the store has beyond it is written again;
        a checkpoint on which all stand is not."""
        if self._timeline is not None and timeline.epoch <= self._timeline.epoch:
            return
        self._timeline = timeline
        if from_store:
            self._newest = timeline.step
        elif self._newest is not None and self._newest > timeline.step:
            self._newest = None

    def doubt(self, first: int) -> None:
        """States of that step and of later ones may be wrong: none is being written any more."""
        running = self._running
        if running is not None and running.stamp.step >= first:
            self.give_up(f"states from step {first} on are in doubt")

    # -- leading

    def advance(self, holdings: Sequence[Holding], world_size: int | None, anybody: bool) -> None:
        """Start what can be started. `holdings`: of all ranks of all nodes. `anybody`: whether a
        rank is connected that may still bring a wanted step."""
        if self._running or not self._requests:
            return
        now_ns = self._clock.monotonic_ns()
        newest = cut(holdings, world_size or 1)
        reached = max(_step_of(newest), -1 if self._newest is None else self._newest)
        settled = _settled(holdings, world_size or 1)
        ready = [r for r in self._requests if _is_ready(r, reached, settled, anybody, now_ns)]
        if not ready:
            return
        if newest is None or newest.step <= reached == self._newest:
            self._answer_without_writing(ready)
            return
        if newest == self._overwritten and any(now_ns - r.since_ns <= WITHIN_NS for r in ready):
            return  # a newer cut made room for what overwrote it: it is about to be seen
        if self._backoff.left_ns(now_ns):
            self._answer_while_it_hangs(ready, now_ns)
            return
        ranks = self._part.ranks or (world_size or 1,)
        slots = pin(self._memory, self._job_dir, newest, range(ranks[LEADER]))
        if slots is None:
            self._give_late_ones_up(ready, newest)
            return
        self._requests = [r for r in self._requests if r not in ready]
        self._running = RunningAttempt(newest, self._clock.wall_ns(), ranks, ready, now_ns)
        why = f"writing step {newest.step} to the store: {ready[0].why}"
        self._journal.record("persist-started", why, step=newest.step)
        self._begin_act(self._running, "survey", slots)

    def _answer_without_writing(self, ready: list[CheckpointRequest]) -> None:
        self._requests = [r for r in self._requests if r not in ready]
        known = self._newest is not None
        why = (
            f"step {self._newest} is already in the store"
            if known
            else "no step is held by every rank"
        )
        _answer(ready, known, self._newest, why)

    def _answer_while_it_hangs(self, ready: list[CheckpointRequest], now_ns: int) -> None:
        """Those of which more steps follow: the others may never ask again."""
        hear = [request for request in ready if request.steps_follow]
        self._requests = [r for r in self._requests if r not in hear]
        _answer(hear, False, None, f"the store hung, {self._next_try(now_ns)}")

    def _next_try(self, now_ns: int) -> str:
        return f"next try in {-(-self._backoff.left_ns(now_ns) // S_NS)} s"

    def _give_late_ones_up(self, ready: list[CheckpointRequest], newest: Stamp) -> None:
        """What all hold could not be pinned: overwritten this moment, and then there is a newer cut
        next time; or damaged, and it will never be had."""
        now_ns = self._clock.monotonic_ns()
        late = [r for r in ready if now_ns - r.since_ns > WITHIN_NS]
        self._requests = [r for r in self._requests if r not in late]
        why = f"a rank of this node does not hold {newest} any more, as its page says"
        _answer(late, False, newest.step, why)

    def _begin_act(self, running: RunningAttempt, act: ActName, pins: Sequence[Slot] = ()) -> None:
        """Have every node that takes part in the act carry it out."""
        running.act = act
        running.awaited = {LEADER} if act == "publish" else {LEADER, *running.others}
        if act != "publish":
            self._order_others(running, act)
        heard = partial(self._heard_here, act, running.number)
        self._have_written(act, running.stamp, running.number, running.ranks, heard, pins)

    def _order_others(self, running: RunningAttempt, act: ActName) -> None:
        for node in running.others:
            self._part.order(node, act, running.stamp, running.number, running.is_urgent)

    def _heard_here(self, act: ActName, number: int, answer: ActDone) -> None:
        running = self._running
        if answer.there and running is not None and running.number == number:
            self._order_others(running, "drop")
            self._end(running, True, answer.why)
        else:
            self.answered(LEADER, act, number, answer.ok, answer.why, answer.hung)

    def answered(
        self, node: int, act: ActName, attempt: int, ok: bool, why: str, hung: bool = False
    ) -> None:
        """A node's answer to an act. Answers of other attempts, and of other acts, count for
        nothing. hung: as in `ActDone`."""
        running = self._running
        if running is None or (running.number, running.act) != (attempt, act):
            return
        if node not in running.awaited:
            return
        if hung:
            now_ns = self._clock.monotonic_ns()
            self._backoff.hung(now_ns)
            why += f"; {self._next_try(now_ns)}"
        if not ok:
            self._failed(running, node, why)
            return
        running.awaited.remove(node)
        if act == "publish":
            self._end(running, True, why)
        elif not running.awaited:
            self._begin_act(running, "part" if act == "survey" else "publish")

    def _failed(self, running: RunningAttempt, node: int, why: str) -> None:
        self._order_others(running, "drop")
        if len(running.ranks) > 1:
            why = f"node {node}: {why}"
        if running.act == "survey" and why.startswith(f"node {node}: {OVERWRITTEN}"):
            now_ns = self._clock.monotonic_ns()
            again = [r for r in running.requests if now_ns - r.since_ns <= WITHIN_NS]
            running.requests = [r for r in running.requests if r not in again]
            self._requests = again + self._requests
            self._overwritten = running.stamp
            why += "; a newer step will be tried"
        self.give_up(why)

    def _end(self, running: RunningAttempt, ok: bool, why: str) -> None:
        self._running = None
        took = human_ns(self._clock.monotonic_ns() - running.began_ns)
        step = running.stamp.step
        if ok:
            self._newest = step
            self._backoff.has_succeeded()
        kind = "persisted" if ok else "persist-failed"
        self._journal.record(kind, f"step {step}, after {took}: {why}", step=step)
        _answer(running.requests, ok, step, why)

    # -- many nodes

    def join_mesh(self, mesh: Mesh, order: Order, parts: SnapshotParts | None = None) -> None:
        """A mesh of these nodes begins, and what was under way is over. `order` only sends: answers
        come in by `answered` later."""
        self.give_up(f"mesh {mesh.version} begins")
        self._part = MeshPart(mesh.node, tuple(m.ranks for m in mesh.members), order, parts)
        self._refuse_unless_leading()

    def carry_out(
        self, act: ActName, stamp: Stamp, attempt: int, answer: Answer, is_urgent: bool = False
    ) -> None:
        """What the leader ordered from this node."""
        part = self._part
        part.is_urgent = is_urgent
        pins: Sequence[Slot] = ()
        if act == "survey":
            first = sum(part.ranks[: part.node])
            ranks = range(first, first + part.ranks[part.node])
            pinned = pin(self._memory, self._job_dir, stamp, ranks)
            if pinned is None:
                told = f"{OVERWRITTEN}: a rank of it does not hold {stamp} any more"
                answer(False, told, False)
                return
            pins, part.surveyed = pinned, (stamp, attempt)
        elif part.surveyed == (stamp, attempt):
            part.surveyed = None

        def heard(done: ActDone) -> None:
            answer(done.ok, done.why, done.hung)

        self._have_written(act, stamp, attempt, part.ranks, heard, pins)

    def node_gone(self, node: int, why: str) -> None:
        """Another node is not there any more: what it takes part in, or leads, comes to nothing."""
        if self._running is not None and node < len(self._running.ranks):
            self._failed(self._running, node, why)
        elif node == LEADER:
            self.give_up(why)

    def give_up(self, why: str) -> None:
        """What is being written is not going to be a checkpoint: its requests are answered so, and
        the ranks have their slots back."""
        running, part = self._running, self._part
        if running is not None:
            self._have_written("drop", running.stamp, running.number, running.ranks, _ignore)
            self._end(running, False, why)
        if part.surveyed is not None:
            self._have_written("drop", *part.surveyed, part.ranks, _ignore)
            part.surveyed = None

    # -- the persister

    def _have_written(
        self,
        act: ActName,
        stamp: Stamp,
        number: int,
        ranks: tuple[int, ...],
        heard: Callable[[ActDone], None],
        pins: Sequence[Slot] = (),
    ) -> None:
        """Have this node's persister do its part of an act. `pins`: what must stand still until
        that is answered."""
        node, parts, persister = self._part.node, self._part.parts, self._persister
        asked = CheckpointAct(act, node, stamp.step, stamp.epoch, number, ranks, self._timeline)

        def answered(answer: ActDone) -> None:
            self._unanswered -= 1
            unpin(pins)
            if parts is not None and (act != "survey" or answer.there or not answer.ok):
                parts.give_back(number)
            heard(answer)

        def brought(why: str | None) -> None:
            self._withdraw = None
            if persister is None:
                answered(ActDone(False, NO_STORE))
            elif why is not None:
                answered(ActDone(False, f"{OVERWRITTEN}: {why}"))
            else:
                persister.ask(asked, answered)

        if act == "drop" and self._withdraw is not None:
            self._withdraw()
        self._unanswered += 1
        if act == "survey" and parts is not None and persister is not None:
            self._withdraw = partial(self._take_back, number, pins)
            parts.bring_to_store(stamp, number, brought)
        else:
            brought(None)

    def _take_back(self, number: int, pins: Sequence[Slot]) -> None:
        """Nobody waits for what the persister was to be asked."""
        self._withdraw = None
        self._unanswered -= 1
        unpin(pins)
        if self._part.parts is not None:
            self._part.parts.give_back(number)


def _no_other_node(node: int, act: ActName, stamp: Stamp, attempt: int, is_urgent: bool) -> None:
    """Nobody has anything to do in a job of one node."""


def _ignore(_: ActDone) -> None:
    """Nobody waits for this answer."""


def _step_of(stamp: Stamp | None) -> int:
    return -1 if stamp is None else stamp.step


def _settled(holdings: Sequence[Holding], world_size: int) -> int:
    """The newest step about which all have decided; -1 while anything is being written, or not all
    are known: a mesh has just begun. What is not common by then never will be."""
    if len(holdings) < world_size or any(h.pending is not None for h in holdings):
        return -1
    return min((h.decided_step for h in holdings), default=-1)


def _is_ready(
    request: CheckpointRequest, reached: int, settled: int, anybody: bool, now_ns: int
) -> bool:
    if request.step is None or request.step <= reached or not anybody:
        return True
    is_late = now_ns - request.since_ns > WITHIN_NS
    return is_late or (request.step <= settled and not request.steps_follow)


def _answer(requests: list[CheckpointRequest], ok: bool, step: int | None, why: str) -> None:
    """Tell each what became of it. A step older than the one that was asked for is not it."""
    for request in requests:
        if request.box is None:
            continue
        wanted = -1 if request.step is None else request.step
        if ok and (step is None or step < wanted):
            told = f"not every rank holds step {wanted}; the newest that all hold is {step}: {why}"
            request.box.send(CheckpointDone(request.ticket, False, step, told))
        else:
            request.box.send(CheckpointDone(request.ticket, ok, step, why))
