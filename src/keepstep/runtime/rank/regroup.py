"""Regroup: how a rank goes on in its own process when another one is lost.

    a peer is lost -> every collective ends -> the step's body is given up -> vote and roll back
    -> new groups -> the next step

A body that has all it needs from its peers when one is lost is not given up: it is finished and
captured, and if the lost one had sealed that step too, nobody rolls back.

Comes in: the agent's messages, the bodies of the loop. Goes out: to the groups, that they end and
are built anew; whether a body counts. That a rank can do this it says at the first `with step`
behind a captured step; until then, and without an agent, a lost peer ends the process.

Invariant: between the notice and the end of a regroup nothing is captured, and no optimizer steps,
in a body that a worthless collective has touched.
"""

from __future__ import annotations

from collections.abc import Callable

from keepstep.errors import PeerLost
from keepstep.model.events import WARNING
from keepstep.model.messages.agent_rank import RegroupAt
from keepstep.model.units import S_NS, human_ns
from keepstep.runtime.rank.agent_client import AgentClient
from keepstep.runtime.rank.world import RankWorld

# A lost node is given up first, and its replacement has to come.
ORDER_WITHIN_NS = 120 * S_NS
# Where the connections alone say that a peer is lost, whoever knows more has had his time already.
UNTOLD_WITHIN_NS = 30 * S_NS


class Regroup:
    """One rank's part in it."""

    def __init__(self, world: RankWorld, rank: int, world_size: int, agent: AgentClient) -> None:
        self._world = world
        self._groups = world.groups
        self._rank = rank
        self._world_size = world_size
        self._agent = agent
        self._can_stay = False
        self._in_body = False
        self._why = ""
        self._lost_ns: int | None = None
        self._place: RegroupAt | None = None
        self._waiting: Callable[[RegroupAt | str], None] | None = None
        self._is_meeting = False  # it has been told where, and is not among its peers yet
        self.count = 0  # how often it has met them anew

    # -- bodies of the loop

    @property
    def is_lost(self) -> bool:
        """Whether a peer is lost, and this rank not yet among its peers again."""
        return self._is_told or bool(self._groups.why_lost)

    @property
    def _is_told(self) -> bool:
        """By somebody who knows; else the connections have broken, and nobody has said why."""
        return self._lost_ns is not None

    @property
    def _why_lost(self) -> str:
        return self._why if self._is_told else self._groups.why_lost

    def body_entered(self, step: int) -> None:
        """A body begins that can be given up."""
        self._groups.begin_body()
        self._in_body = True
        # The first step has nothing to go back to. Ranks without groups share their steps alone.
        may = step > 0 and self._world_size > 1 and self._groups.can_be_rebuilt
        if may and not self._can_stay and self._agent.is_connected:
            self._groups.expect_notice()
            self._can_stay = self._agent.can_stay()

    def body_left(self) -> None:
        self._in_body = False

    def counts(self, entered: bool, ended: bool) -> bool:
        """Whether a body that has just been left is a completed step: no peer is lost, or it came
        to its end with what its peers gave, whatever became of them since."""
        return not self.is_lost or (entered and ended and not self._groups.is_worthless)

    def loop_over(self) -> None:
        """No body follows that could be done again: should a peer be lost now, all start anew at
        once. The next `with step`, of another loop, takes it back."""
        if self.is_lost:
            why = (
                f"{self._why_lost}; rank {self._rank} is past its loop, so all ranks start anew "
                "from memory"
            )
            self._world.journal.record("refused", why, WARNING, rung="regroup", why=why)
        if self._can_stay:
            self._can_stay = False
            self._agent.cannot_stay()

    def check_update(self) -> None:
        """Before an optimizer steps. Raises PeerLost."""
        if self.is_lost and (self._groups.is_worthless or not self._in_body):
            raise PeerLost(
                f"{self._why_lost}; without `with step:` around the loop's body this process "
                "cannot go on"
            )

    # -- what the agent says

    def peer_lost(self, why: str) -> bool:
        """A peer is lost; whether that is news. Whatever was ordered before has been overtaken."""
        is_news = not self._is_told
        self._place = None
        self._is_meeting = False
        if is_news:
            self._lost_ns = self._world.clock.monotonic_ns()
            self._why = why
        self._groups.lose(why)
        if is_news:
            told = f"rank {self._rank} hears: {why}"
            self._world.journal.record("lost-notice", told, rank=self._rank)
        return is_news

    @property
    def awaits_order(self) -> bool:
        """Whether a peer is lost and this rank not on its way to the others yet. An order that
        comes when it is not awaited says that a peer is lost: the notice may get lost itself."""
        return self.is_lost and not self._is_meeting

    def regroup_at(self, place: RegroupAt) -> None:
        self._place = place
        self._answer_if_ordered()

    def agent_gone(self) -> None:
        self._answer(f"{self._why_lost}; the agent is gone and did not say where to meet again")

    # -- meeting again

    def wait_for_place(self, then: Callable[[RegroupAt | str], None]) -> None:
        """`then` hears where to meet, or why nobody says. A notice that comes meanwhile does not
        end the waiting."""
        self._waiting = then
        if not self._is_told:
            told = f"rank {self._rank} gives up its step: {self._why_lost}"
            self._world.journal.record("lost-notice", told, WARNING, rank=self._rank)
        within_ns = ORDER_WITHIN_NS if self._is_told else UNTOLD_WITHIN_NS

        def late() -> None:
            if self._waiting is then:
                self._answer(
                    f"{self._why_lost}; the agent did not say within {human_ns(within_ns)} where "
                    "to meet again"
                )

        self._world.timers.after(within_ns, late)
        if not self._agent.is_connected:
            self.agent_gone()
        else:
            self._answer_if_ordered()

    def _answer_if_ordered(self) -> None:
        if self._place is not None and self._waiting is not None:
            place, self._place = self._place, None  # it is for one meeting
            self._is_meeting = True
            self._answer(place)

    def _answer(self, answer: RegroupAt | str) -> None:
        then, self._waiting = self._waiting, None
        if then is not None:
            then(answer)

    def rebuilt(self, attempt: int) -> None:
        """All groups are there again."""
        if self._lost_ns is not None:
            took_ns = self._world.clock.monotonic_ns() - self._lost_ns
            why = (
                f"rank {self._rank} is among its peers again {human_ns(took_ns)} after one was "
                "lost, in the same process"
            )
            self._world.journal.record(
                "regrouped", why, rank=self._rank, attempt=attempt, duration_ns=took_ns
            )
        self._lost_ns = None
        self._is_meeting = False
        self.count += 1
        self._agent.regrouped()

    def cannot(self) -> None:
        """This process ends, and the agent had better start all anew."""
        self._agent.cannot_stay()
