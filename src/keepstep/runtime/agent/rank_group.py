"""Lives: the ranks of this node from one round to the next.

Comes in: that a round is formed, or that the ranks have to find together anew. Goes out: processes
started or killed, the process that stands by made a rank, and to the ranks that stay in their
process that a peer is lost and where all meet again. Whether they may stay, and whether there is
another life at all, `core/recovery/restarts.py` has decided; nothing here waits, but for a killed
process to go.

Invariant: when a life begins every rank of the node is one process, started for it or staying from
the life before.
"""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Collection, Iterator

from keepstep.config import Settings
from keepstep.core.detection.deadlines import Deadlines
from keepstep.edge.os.journal import Journal
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.status_page import read_status
from keepstep.edge.torch.ranks import Ranks
from keepstep.model.launch import Launch, Place
from keepstep.model.restarts import RegroupLate, RestartAll
from keepstep.model.units import S_NS, human_ns
from keepstep.runtime.agent.enforcer import Watching
from keepstep.runtime.agent.monitor import Board
from keepstep.runtime.agent.orphans import write_ranks
from keepstep.runtime.agent.rank_server import RankLines
from keepstep.runtime.rank.agent_client import REJOIN
from keepstep.runtime.rank.standby import can_become

# times what the program takes to begin: the least it has to regroup, where that is longer than the
# deadline
REGROUP_STARTS = 3
# importing torch takes a core for seconds: not while the ranks start or find together
STANDBY_AFTER_NS = 3 * S_NS


class Lives:
    """Registers the ranks' pidfds with `selector` under their local numbers."""

    def __init__(
        self,
        launch: Launch,
        settings: Settings,
        journal: Journal,
        deadlines: Deadlines,
        selector: selectors.BaseSelector,
        ranks: Ranks,
        lines: RankLines,
        watching: Watching,
    ) -> None:
        self._launch, self._settings, self._journal, self._deadlines = (
            launch,
            settings,
            journal,
            deadlines,
        )
        self._selector, self._ranks, self._lines, self._watching = selector, ranks, lines, watching
        # of the newest life; none yet
        self.place = Place(-1, 0, launch.nodes, 0, launch.ranks, "", 0)
        self._staying: set[int] = set()
        self._keeps = False  # ranks that can stay do, in this life
        self._ordered = True  # those that stayed have been told where to meet
        self._standby_wanted = (
            bool(launch.standby) and ranks.may_stand_by and can_become(launch.command)
        )
        self._standby_at_ns: int | None = None
        # why, since when, and until when ranks were killed
        self._restarting: tuple[str, int, int] | None = None
        self._began_regrouping_ns: int | None = None
        self._regrouping_ns: int | None = None  # until when all ranks must have found together
        self._regroup_within_ns = deadlines.regroup_ns
        # when ranks were last started, and the longest that one took until it had its state
        self._started_ns = self._starting_ns = 0

    # -- what is known

    @property
    def able(self) -> bool:
        """Whether the node's ranks, those that have just died among them, can stay in their
        process."""
        return self._lines.are_able(
            [self._ranks.pid(rank) for rank in range(self._launch.ranks)]
            if self.place.attempt >= 0
            else []
        )

    @property
    def completed_step(self) -> int | None:
        """The newest step that any rank of this node has told of on its status page."""
        found = [read_status(MEMORY, self._settings.job_dir, rank) for rank in self._mine]
        return max((status.completed_step for status in found if status), default=None)

    @property
    def _mine(self) -> range:
        return range(self.place.first_rank, self.place.first_rank + self._launch.ranks)

    # -- what happens meanwhile

    @property
    def due_ns(self) -> list[int]:
        """When to look at the clock again."""
        return [at_ns for at_ns in (self._regrouping_ns, self._standby_at_ns) if at_ns is not None]

    def look(self, now_ns: int) -> Iterator[RegroupLate]:
        if self._regrouping_ns is not None and now_ns >= self._regrouping_ns:
            self._regrouping_ns = None
            late = tuple(rank for rank in self._mine if rank not in self._lines.regrouped)
            if late:
                yield RegroupLate(late, self._regroup_within_ns, now_ns)
        if self._standby_at_ns is not None and now_ns >= self._standby_at_ns:
            self._standby_at_ns = None
            self._ranks.start_standby()

    def left_well(self, ranks: Collection[int]) -> Iterator[RegroupLate]:
        """These have ended well. One that had done its last step when the others were told of a
        lost one is not among them again."""
        gone = tuple(rank for rank in ranks if rank not in self._lines.regrouped)
        if gone and self._regrouping_ns is not None:
            self._regrouping_ns = None
            yield RegroupLate(gone, 0, time.monotonic_ns())

    def has_its_state(self) -> None:
        """A rank that was started is through with its beginning."""
        self._starting_ns = max(self._starting_ns, time.monotonic_ns() - self._started_ns)

    def regrouped(self) -> None:
        """One more rank trains on; perhaps the last one."""
        if len(self._lines.regrouped) < self._launch.ranks or self._regrouping_ns is None:
            return
        self._regrouping_ns = None
        self._standby_soon()
        if self._began_regrouping_ns is not None:  # else this node is new here
            took_ns = time.monotonic_ns() - self._began_regrouping_ns
            why = f"all ranks of this node train on {human_ns(took_ns)} after one was lost"
            self._journal.record("recovered", why, duration_ns=took_ns, attempt=self.place.attempt)

    def _standby_soon(self) -> None:
        if self._standby_wanted and self._lines.standby is None:
            self._standby_at_ns = time.monotonic_ns() + STANDBY_AFTER_NS

    # -- one life ends

    def end(self, action: RestartAll) -> list[int]:
        """All ranks are killed, to start anew; those that do not die."""
        began_ns = time.monotonic_ns()
        self._regrouping_ns = None
        if action.refused and self.place.attempt >= 0:
            why = f"the ranks do not stay in their process: {action.refused}"
            self._journal.record("refused", why, rung="regroup", why=action.refused)
        undead = self.kill()
        if not undead:
            self._restarting = (action.why, began_ns, time.monotonic_ns())
        return undead

    def wake(self, action: RestartAll) -> None:
        """The ranks that live are told: gloo tells only a dead one's neighbours."""
        began_ns = time.monotonic_ns()
        self._lines.lost([self._ranks.pid(rank) for rank in self._ranks.pidfds], action.fact)
        self._lines.regrouped.clear()
        self._restarting = (action.why, began_ns, began_ns)
        self._began_regrouping_ns = began_ns
        self._journal.record("plan", f"{action.why}", rung="regroup")

    def kill(self, ranks: Collection[int] | None = None) -> list[int]:
        """SIGKILL at once: what the ranks have to lose lies in memory that outlives them. The
        global ranks that do not die."""
        dying = set(self._ranks.pidfds) if ranks is None else set(ranks)
        for rank in dying:
            fd = self._ranks.pidfds[rank]
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
            self._lines.forget(self._ranks.pid(rank))
        self._watching.forget(dying)
        return [
            self.place.first_rank + rank
            for rank in self._ranks.kill(self._deadlines.kill_ns / S_NS, dying)
        ]

    # -- the next one begins

    def enter(self, place: Place, keep: bool) -> None:
        """The round is formed: whoever cannot stay in its process ends. To be followed by
        `fill`."""
        before, self.place = self.place, place
        self._keeps, self._ordered = keep, False
        living = set(self._ranks.pidfds)
        stays = keep and before.first_rank == place.first_rank
        self._staying = {
            rank for rank in living if stays and self._lines.can_stay(self._ranks.pid(rank))
        }
        self._watching.prepare()
        self.kill(living - self._staying)

    def order_regroup(self) -> None:
        """The keeper knows the round: those that stay may meet there."""
        if not self._ordered:
            self._ordered = True
            self._lines.regroup([self._ranks.pid(rank) for rank in self._ranks.pidfds], self.place)

    def fill(self, board: Board | None, formed_ns: int) -> int:
        """Start what is missing; when that was done."""
        missing = set(range(self._launch.ranks)) - self._staying
        pids = self._start(missing, {REJOIN: "1"} if self._keeps else {})
        for rank in missing:
            self._selector.register(self._ranks.pidfds[rank], selectors.EVENT_READ, rank)
        self._started_ns = started_ns = time.monotonic_ns()
        everyone = {
            self.place.first_rank + rank: self._ranks.pid(rank)
            for rank in range(self._launch.ranks)
        }
        write_ranks(self._settings.job_dir, self.place.attempt, everyone.values())
        self._watching.begin(self.place, everyone, board, started_ns)
        if self._keeps:
            self._lines.joining(pids.values())
            self._regroup_within_ns = max(
                self._deadlines.regroup_ns, REGROUP_STARTS * self._starting_ns
            )
            self._regrouping_ns = started_ns + self._regroup_within_ns
        else:
            self._standby_soon()
        self._tell_restarted(list(pids.values()), formed_ns)
        return started_ns

    def _start(self, missing: set[int], environ: dict[str, str]) -> dict[int, int]:
        """The process that stands by is the first one."""
        pids = {}
        for rank in sorted(missing)[:1] if self.place.attempt > 0 else ():
            whole = {**self._ranks.environ_of(rank, self.place), **environ}
            pid = self._lines.become(self._launch.command, whole)
            if pid is not None:
                pids[rank] = self._ranks.standby_became(rank)
                why = f"process {pid}, which stood by, is rank {self.place.first_rank + rank} now"
                self._journal.record(
                    "rank-respawned", why, rank=self.place.first_rank + rank, pid=pid
                )
        return pids | self._ranks.start(self.place, missing - set(pids), environ)

    def _tell_restarted(self, pids: list[int], formed_ns: int) -> None:
        if self._restarting is None:
            return
        why, began_ns, killed_ns = self._restarting
        why = f"{why}; all running again after {human_ns(self._started_ns - began_ns)}"
        took = {
            "kill_ns": killed_ns - began_ns,
            "meet_ns": formed_ns - killed_ns,
            "start_ns": self._started_ns - formed_ns,
        }
        about = {"attempt": self.place.attempt, "pids": pids, "kept": len(self._staying)}
        self._journal.record("ranks-restarted", why, logging.WARNING, **about, **took)
