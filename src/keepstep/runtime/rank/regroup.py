"""Peers: how a rank goes on in its own process when another one is lost.

    a peer is lost -> every collective ends -> the step's body is given up -> vote and roll back
        -> new groups -> the next step

A body that has all it needs from its peers when one is lost is not given up: it is finished and
captured, and if the lost one had sealed that step too, nobody rolls back (the commit rule of
undo-free recovery: who has what a step needs rolls forward).

Comes in: the agent's words. Goes out: to the groups, that they end and are built anew; to the loop,
which step is given up. That a rank can do this it says at the first `with step` behind a captured
step; until then, and without an agent, a lost peer ends the process.

Invariant: between the notice and the end of `meet_again` nothing is captured, and no optimizer
steps, in a body that a worthless collective has touched.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from keepstep.edge.os.journal import Journal
from keepstep.edge.shm.collective_profile_page import RhythmWriter
from keepstep.errors import KeeperError, PeerLost
from keepstep.model.rhythm import NO_STEP
from keepstep.model.units import human_ns
from keepstep.runtime.rank.agent_client import REJOIN, AgentLine, MeetAgain

if TYPE_CHECKING:
    from keepstep.edge.torch.membership import Membership

MEET_WITHIN_S = 60.0
ORDER_WITHIN_S = 120.0  # a lost node is given up first, and its replacement comes


class Step(int):
    """A step's number, and its body: `with step:` gives the body up when a peer is lost, and the
    next step is the one to do again."""

    _peers: Peers
    entered: bool
    ended: bool  # its body, without an error

    @classmethod
    def of(cls, number: int, peers: Peers) -> Step:
        step = cls(number)
        step._peers, step.entered, step.ended = peers, False, False
        return step

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)  # wherever it is kept, it is a number

    def __enter__(self) -> Step:
        self.entered = True
        self._peers.entered(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.ended = error is None
        self._peers.left()
        # What goes wrong after a peer was lost is that peer's doing: collectives end with nothing
        # in them.
        return self._peers.lost and isinstance(error, Exception)


class Peers:
    def __init__(self, environ: Mapping[str, str], rank: int, journal: Journal) -> None:
        """Takes hold of the process's membership until `close`."""
        self._rank, self._journal = rank, journal
        self._given_up = threading.Event()
        self._able = False
        self._in_body = False
        self._lost_ns = 0
        self._rhythm: RhythmWriter | None = None
        self._members: Membership = _membership()
        self.newcomer = environ.get(REJOIN) == "1" and self._members.muted
        self._line = AgentLine.find(environ, rank, self._on_lost)

    def tell_collectives(self, tell: Callable[[int], object]) -> None:
        """`tell` hears the number of every collective that is entered, on whichever thread that
        is."""
        self._members.on_enter = tell

    def show_rhythm(self, path: Path) -> None:
        """Let the node's keeper see when collectives use the network
        (`edge/shm/collective_profile_page.py`). Not with CUDA devices: there a collective's future
        ends when it has been queued, and the network is busy later."""
        if _has_cuda():
            return
        named = os.environ.get("NCCL_SOCKET_IFNAME") or os.environ.get("GLOO_SOCKET_IFNAME", "")
        self._rhythm = RhythmWriter(
            path,
            time.monotonic_ns,
            "" if named.startswith("^") else named.lstrip("=").partition(",")[0],
        )
        self._members.on_begin, self._members.on_end = self._rhythm.began, self._rhythm.ended

    def step_begins(self, step: int) -> None:
        """`NO_STEP`: none does, for now."""
        if self._rhythm is not None:
            self._rhythm.step(step)

    @property
    def lost(self) -> bool:
        return self._members.is_lost

    def _on_lost(self, why: str) -> None:
        """On the line's thread."""
        first = not self._members.is_lost
        self._given_up.set()
        if first:
            self._lost_ns = time.monotonic_ns()
        self._members.lose(why)
        if first:
            self._journal.record("lost-notice", f"rank {self._rank} hears: {why}", rank=self._rank)

    def is_genuine(self, step: Step) -> bool:
        """Whether that body has come to its end with what its peers gave, whatever became of them
        since."""
        return step.entered and step.ended and not self._members.is_worthless

    def check(self) -> None:
        """Before an optimizer steps. Raises PeerLost."""
        if self._members.is_lost and (self._members.is_worthless or not self._in_body):
            raise PeerLost(
                f"{self._members.why}; without `with step:` around the loop's body this "
                "process cannot go on"
            )

    def entered(self, step: int) -> None:
        """A body begins that can be given up."""
        self._members.begin_body()
        self._in_body = True
        if self._able or self._line is None or step == 0 or not _all_groups_are_ours():
            return
        self._members.on_error, self._members.watched = self._line.suspect, True
        self._able = self._line.say_able()

    def left(self) -> None:
        self._in_body = False

    def meet_again(self, resume: Callable[[Callable[[], bool]], None]) -> None:
        """Find together with whoever is there now. `resume(given_up)` votes and loads; it returns
        early when `given_up()`.

        Raises KeeperError when there is nobody to say where, or no state to go back to.
        """
        assert self._line is not None
        self.step_begins(NO_STEP)
        while True:
            self._given_up = given_up = threading.Event()
            order = self._line.order(ORDER_WITHIN_S)
            if order is None:
                raise KeeperError(
                    f"{self._members.why}; the agent was to say where to meet again within "
                    f"{ORDER_WITHIN_S:.0f} s and did not"
                )
            if given_up.is_set():
                continue
            resume(given_up.is_set)
            if not given_up.is_set() and self._build(order, given_up):
                break
        took_ns = time.monotonic_ns() - self._lost_ns
        why = (
            f"rank {self._rank} is among its peers again {human_ns(took_ns)} after one was lost, "
            "in the same process"
        )
        self._journal.record(
            "regrouped", why, rank=self._rank, attempt=order.attempt, duration_ns=took_ns
        )
        self._line.say_regrouped()

    def join(self, environ: Mapping[str, str]) -> None:
        """A newcomer has its state: from now on its collectives are real."""
        order = MeetAgain(
            int(environ["KEEPSTEP_ATTEMPT"]), environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        )
        while not self._build(order, self._given_up):
            # another peer is lost: this process is no one's yet, and is ended
            time.sleep(ORDER_WITHIN_S)
        if self._line is not None:
            self._line.say_regrouped()

    def _build(self, order: MeetAgain, given_up: threading.Event) -> bool:
        from keepstep.edge.torch.tcp_store import join_store

        return self._members.regroup(
            join_store((order.host, order.port), MEET_WITHIN_S), order.attempt, given_up
        )

    def unable(self) -> None:
        """This process ends, and the agent had better start all anew."""
        if self._line is not None:
            self._line.say_unable()

    def close(self, ok: bool = False) -> None:
        """`ok`: the training has ended well."""
        self._members.watched, self._members.on_enter = False, lambda sequence: None
        self._hide_rhythm()
        if self._rhythm is not None:
            self._rhythm.close()
        if self._line is not None:
            if ok:
                self._line.say_ended()
            self._line.close()

    def _hide_rhythm(self) -> None:
        self._members.on_begin, self._members.on_end = lambda: None, lambda count: None

    def release(self) -> None:
        """In a forked child."""
        self._hide_rhythm()
        if self._line is not None:
            self._line.release()


def _membership() -> Membership:
    from keepstep.edge.torch.membership import membership

    return membership


def _has_cuda() -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_available())


def _all_groups_are_ours() -> bool:
    """Whether the process can do without every connection it has; one that never made a group has
    none."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        # ranks that share nothing but their steps
        return int(os.environ.get("WORLD_SIZE", "1")) > 1
    from keepstep.edge.torch.groups import Group

    return all(isinstance(group, Group) for group in distributed.distributed_c10d._world.pg_map)
