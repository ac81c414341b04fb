"""Multi-node rendezvous: one agent's part in the meetings of the nodes.

Comes in: that this node wants to take part, what it has to say, and KVs, as they come and go. Goes
out: attempts and verdicts, from `meeting.py`.

The KV may be lost: an embedded one with the agent that hosts it. The ranks train on without it, and
it is looked for again, at the same endpoint, where its host's next agent or another machine of that
name makes a new one. Only a node that needs the others gives up after a while.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from keepstep.errors import ConfigError, KeepstepError, MeetingError
from keepstep.model.attempts import Arrival, Verdict
from keepstep.model.events import WARNING
from keepstep.model.launch import Launch
from keepstep.model.units import S_NS
from keepstep.ports import KV, Timer
from keepstep.runtime.agent.evidence_board import EvidenceBoard
from keepstep.runtime.agent.meeting import Meeting, Word
from keepstep.runtime.agent.rendezvous import Formed, JoinRequest, RendezvousHearer
from keepstep.runtime.agent.signed_kv import SignedKV
from keepstep.runtime.agent.standing import Standing, TakenSeat
from keepstep.runtime.agent.tasks import Answer
from keepstep.runtime.agent.world import AgentOptions, AgentWorld

# How long the one who hosts the meeting point waits for the others to hear the last word.
FAREWELL_NS = 10 * S_NS
# How long a node whose ranks wait for the others waits for the meeting point to come back, and how
# long one whose ranks have ended well.
AWAY_NS = 300 * S_NS
WELL_NS = 20 * S_NS
LOOK_AGAIN_NS = 1 * S_NS


class MultiNode:
    """One agent's part. See `rendezvous.Rendezvous`."""

    def __init__(
        self,
        world: AgentWorld,
        options: AgentOptions,
        launch: Launch,
        hearer: RendezvousHearer,
    ) -> None:
        self._world = world
        self._options = options
        self._launch = launch
        self._hearer = hearer
        self._requests: deque[JoinRequest] = deque()
        self._wanted: Answer[JoinRequest] | None = None
        mine = Arrival(
            token=world.token(),
            host="",
            port=0,
            incarnation=0,
            ranks=launch.ranks,
            nodes=launch.nodes,
            min_nodes=launch.min_nodes,
            rack=options.rack,
            node_rank=launch.node_rank,
            redundancy=options.redundancy,
        )
        self._standing = Standing(mine, TakenSeat(-1, -1, range(launch.nodes)))
        self._meeting: Meeting | None = None
        self._signed: SignedKV | None = None
        self._strange_keys: set[str] = set()
        self._has_told_older = False
        self._is_closed = False
        self._closing: Callable[[Meeting], None] | None = (
            None  # once the nodes have a place to meet
        )
        self._why_away = ""  # where they met until now is lost
        self._late: Timer | None = None  # this node needs the others
        self._opening = self._open()

    def _open(self) -> Timer:
        return self._world.open_kv(self._opened, self._not_found, self.lost)

    def follow(self, attempt: int) -> None:
        self._standing.follows = attempt

    def join(self, request: JoinRequest) -> None:
        if self._wanted is not None:
            wanted, self._wanted = self._wanted, None
            wanted.give(request)
        else:
            self._requests.append(request)
        self._give_up_in_time()

    def next_request(self) -> Answer[JoinRequest]:
        """See `meeting.MeetingHearer`."""
        wanted: Answer[JoinRequest] = Answer()
        if self._requests:
            wanted.give(self._requests.popleft())
        else:
            self._wanted = wanted
        return wanted

    @property
    def kv(self) -> KV | None:
        """Where the nodes meet now."""
        return None if self._meeting is None else self._meeting.kv

    def board(self, attempt: int) -> EvidenceBoard | None:
        has_met = self._meeting is not None or self._why_away
        if not has_met:
            return None

        def kv() -> KV | None:  # what is signed for no meeting nobody would hear
            return None if self._signed is not None and not self._signed.epoch else self.kv

        return EvidenceBoard(kv, attempt, self._launch.nodes)

    def say(self, attempt: int, verdict: Verdict) -> None:
        self._speak(lambda meeting: meeting.say(attempt, verdict))

    def ended_well(self, attempt: int, why: str) -> None:
        self._standing.is_well = True
        if self._meeting is not None:  # else it is said when there is one again
            self._meeting.speak(Meeting.say_ended_well)
        self._give_up_in_time()

    def _speak(self, word: Word) -> None:
        if self._meeting is not None:
            self._meeting.speak(word)
        elif self._why_away:
            self._standing.words.append(word)

    def close(self, last: Verdict | None, within_ns: int) -> Answer[None]:
        self._is_closed = True
        if self._late is not None:
            self._late.cancel()
        closed: Answer[None] = Answer()
        within_ns = min(within_ns, FAREWELL_NS)
        if self._meeting is not None:
            self._meeting.close(last, within_ns, closed)
        elif last is not None and self._standing.follows >= 0 and not self._why_away:
            self._close_when_opened(last, within_ns, closed)
        else:
            self._opening.cancel()
            closed.give(None)
        return closed

    def _close_when_opened(self, last: Verdict, within_ns: int, closed: Answer[None]) -> None:
        """The others wait for the node of an agent that was killed."""

        def give_up() -> None:
            self._closing = None
            self._opening.cancel()
            closed.give(None)

        late = self._world.timers.after(within_ns, give_up)

        def close(meeting: Meeting) -> None:
            late.cancel()
            meeting.close(last, within_ns, closed)

        self._closing = close

    # -- where they meet

    def _opened(self, kv: KV) -> None:
        secret, journal = self._options.secret, self._world.journal
        if secret is None:
            journal.record(
                "no-secret",
                "this job has no secret: whoever reaches its meeting point can read, stop or join "
                "it; set KEEPSTEP_SECRET to the same value on all nodes where others can",
                WARNING,
            )
        else:
            kv = self._signed = SignedKV(
                kv,
                secret,
                self._world.timers,
                self._refused,
                self._options.job,
                self._is_older,
                self.heard_of,
            )
        if self._why_away:
            self._why_away = ""
            if self._late is not None:
                self._late.cancel()
                self._late = None
            journal.record("meeting-found", "the nodes have a place to meet again")
        self._meeting = Meeting(self._world, self._options, self._launch, kv, self, self._standing)
        if self._closing is not None:
            self._closing(self._meeting)

    def _refused(self, key: str) -> None:
        if key not in self._strange_keys:
            self._strange_keys.add(key)
            why = (
                f"what stands at {key} where the nodes meet does not count: it was not written "
                "with this job's secret"
            )
            self._world.journal.record("stranger-refused", why, WARNING)

    def met(self, epoch: int) -> None:
        """See `meeting.MeetingHearer`."""
        if self._signed is not None:
            self._signed.epoch = epoch

    def _is_older(self, key: str) -> None:
        if not self._has_told_older:
            self._has_told_older = True
            why = (
                f"what stands at {key} where the nodes meet does not count, nor what else is of "
                "its time: it was said under this job's secret before the nodes met this time"
            )
            self._world.journal.record("stranger-refused", why, WARNING)

    def heard_of(self, epoch: int) -> None:
        """See `meeting.MeetingHearer`. Other nodes may have met anew, while this one thought that
        the meeting was another."""
        meeting, signed = self._meeting, self._signed
        if meeting is None or signed is None or not signed.epoch or epoch <= self._standing.epoch:
            return
        self._standing.epoch = epoch

        def meet_anew() -> None:
            if self._meeting is not meeting or self._is_closed:
                return
            meeting.abandon()
            self._wanted = None
            why = "the nodes have begun to meet anew, and this one with them"
            self._world.journal.record("meeting-found", why)
            self._meeting = Meeting(
                self._world, self._options, self._launch, signed, self, self._standing
            )

        self._world.timers.after(0, meet_anew)

    def _not_found(self, why: str) -> None:
        if not self._why_away:
            self.failed(MeetingError(why))
            return

        def again() -> None:
            self._opening = self._open()

        self._opening = self._world.timers.after(LOOK_AGAIN_NS, again)

    def lost(self, why: str) -> None:
        """See `meeting.MeetingHearer`."""
        if self._meeting is not None:
            self._meeting.abandon()
            self._meeting = None
        self._wanted = None
        if self._is_closed:
            return
        if self._standing.last is not None:  # there is nothing more to be heard
            self._hearer.ended(self._standing.last)
            return
        self._why_away = why
        told = f"{why}; the ranks train on, and it is looked for again"
        self._world.journal.record("meeting-lost", told, WARNING)
        self._opening = self._open()
        self._give_up_in_time()

    def _give_up_in_time(self) -> None:
        """If this node needs the others, and they have no place to meet."""
        standing = self._standing
        needs = standing.is_well or standing.request is not None or self._requests
        if not self._why_away or not needs or self._late is not None:
            return
        why = self._why_away
        within_ns = WELL_NS if standing.is_well else AWAY_NS
        self._late = self._world.timers.after(within_ns, lambda: self.failed(MeetingError(why)))

    def failed(self, error: KeepstepError) -> None:
        """See `meeting.MeetingHearer`. The job has no place to meet any more."""
        if self._meeting is not None:
            self._meeting.abandon()
        self._opening.cancel()
        if not self._is_closed:
            self._hearer.meeting_lost(str(error), isinstance(error, ConfigError))

    def formed(self, formed: Formed) -> None:
        if not self._is_closed:
            self._hearer.formed(formed)

    def ended(self, verdict: Verdict) -> None:
        if not self._is_closed:
            self._hearer.ended(verdict)
