"""Multi-node rendezvous: the agents of several nodes, which meet in a KV.

`core/recovery/rendezvous.py` says who is which node, `meeting_record.py` carries the words.

An attempt takes N arrivals. An agent that comes when it is full is a spare and waits for the next
one, which begins when somebody says `again`. There the nodes of the attempt before come first; a
spare takes at once the place of one that is said to be vacant, any other when nobody has come to it
in time, and so does a node that left its own because its hardware is suspect. An attempt is formed
once all N have answered to their place in it, so that an agent that died while it waited leaves
nobody with half a job: `coordinator.py` ends such an attempt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keepstep.core.recovery.rendezvous import (
    assign,
    disagreement,
    has_seat,
    members_of,
    mesh_version,
    present,
)
from keepstep.errors import ConfigError, KeeperError, KeepstepError, MeetingError
from keepstep.model.attempts import Arrival, Opening, Verdict
from keepstep.model.events import WARNING
from keepstep.model.launch import Launch, RankAssignment
from keepstep.model.mesh import Mesh
from keepstep.model.messages.keeper_rank import Listening
from keepstep.model.units import MS_NS, S_NS, human_ns
from keepstep.ports import KV
from keepstep.runtime.agent.coordinator import Coordinator, Presence
from keepstep.runtime.agent.evidence_board import EvidenceBoard
from keepstep.runtime.agent.meeting_record import CALLED_OFF, MeetingRecord
from keepstep.runtime.agent.rendezvous import Formed, JoinRequest, RendezvousHearer
from keepstep.runtime.agent.signed_kv import SignedKV
from keepstep.runtime.agent.tasks import Answer, Task, sleep
from keepstep.runtime.agent.world import AgentOptions, AgentWorld

# How long the one who hosts the meeting point waits for the others to hear the last word.
FAREWELL_NS = 10 * S_NS
LOOK_AGAIN_NS = 20 * MS_NS
# So long the nodes of the attempt before may take their places before others do.
FIRST_NS = 2 * S_NS
# So long at least all nodes have to come to the first attempt.
BEGINS_NS = 60 * S_NS
# So long a node that would leave waits for one that comes instead.
LEAVES_NS = 5 * S_NS
KINDS = {"again": "attempt-wanted", "stop": "job-stopped", "done": "job-done"}  # of journal events


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
        self.follows = -1  # the attempt in which this node's agent was killed
        self._meeting: _Meeting | None = None
        self._strange_keys: set[str] = set()
        self._is_closed = False
        self._opening = world.open_kv(self._opened, self._lost, self._lost)

    def follow(self, attempt: int) -> None:
        self.follows = attempt

    def join(self, request: JoinRequest) -> None:
        if self._wanted is not None:
            wanted, self._wanted = self._wanted, None
            wanted.give(request)
        else:
            self._requests.append(request)

    def next_request(self) -> Answer[JoinRequest]:
        """The next `join`; each is answered once."""
        wanted: Answer[JoinRequest] = Answer()
        if self._requests:
            wanted.give(self._requests.popleft())
        else:
            self._wanted = wanted
        return wanted

    def board(self, attempt: int) -> EvidenceBoard | None:
        meeting = self._meeting
        nodes = self._launch.nodes
        return None if meeting is None else EvidenceBoard(meeting.kv, attempt, nodes)

    def say(self, attempt: int, verdict: Verdict) -> None:
        if self._meeting is not None:
            self._meeting.speak(self._meeting.say(attempt, verdict))

    def ended_well(self, attempt: int, why: str) -> None:
        if self._meeting is not None:
            self._meeting.ended_well(attempt)

    def close(self, last: Verdict | None, within_ns: int) -> Answer[None]:
        self._is_closed = True
        closed: Answer[None] = Answer()
        if self._meeting is None:
            self._opening.cancel()
            closed.give(None)
        else:
            self._meeting.close(last, min(within_ns, FAREWELL_NS), closed)
        return closed

    # -- what the meeting brings

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
            kv = SignedKV(kv, secret, self._world.timers, self._refused)
        self._meeting = _Meeting(self._world, self._options, self._launch, kv, self)

    def _refused(self, key: str) -> None:
        if key not in self._strange_keys:
            self._strange_keys.add(key)
            why = (
                f"what stands at {key} where the nodes meet does not count: it was not written "
                "with this job's secret"
            )
            self._world.journal.record("stranger-refused", why, WARNING)

    def _lost(self, why: str) -> None:
        self.failed(MeetingError(why))

    def failed(self, error: KeepstepError) -> None:
        if self._meeting is not None:
            self._meeting.abandon()
        if not self._is_closed:
            self._hearer.meeting_lost(str(error))

    def formed(self, formed: Formed) -> None:
        if not self._is_closed:
            self._hearer.formed(formed)

    def ended(self, verdict: Verdict) -> None:
        if not self._is_closed:
            self._hearer.ended(verdict)


@dataclass(slots=True)
class _Attempt:
    """The one that is being formed or lived. `place`: this agent's, -1 for none; `places`: those
    that nodes have taken."""

    number: int
    place: int
    places: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Before:
    """What the verdict about the attempt before said."""

    keep: bool = False
    vacant: tuple[int, ...] = ()


class _Meeting:
    """From when there is a place to meet until there is none any more."""

    def __init__(
        self,
        world: AgentWorld,
        options: AgentOptions,
        launch: Launch,
        kv: KV,
        owner: MultiNode,
    ) -> None:
        self.kv = kv
        self._world = world
        self._options = options
        self._launch = launch
        self._owner = owner
        self._record = MeetingRecord(kv)
        self._attempt = _Attempt(-1, -1, range(launch.nodes))
        self._mine = Arrival(
            token=world.token(),
            host="",
            port=0,
            incarnation=0,
            ranks=launch.ranks,
            nodes=launch.nodes,
            min_nodes=launch.min_nodes,
            rack=options.rack,
            node_rank=launch.node_rank,
        )
        self._words: deque[Coroutine[Answer[Any], None, None]] = deque()
        self._speaking: Task[None] | None = None
        self._coordinator: Coordinator | None = None
        self._living = Task(self._live(), self._lived, owner.failed)

    def abandon(self) -> None:
        """There is nobody to talk to any more."""
        self._living.cancel()
        if self._coordinator is not None:
            self._coordinator.close()
        if self._speaking is not None:
            self._speaking.cancel()
        for word in self._words:
            word.close()
        self._words.clear()

    # -- what is to be said, one word after the other

    def speak(self, word: Coroutine[Answer[Any], None, None]) -> None:
        self._words.append(word)
        if self._speaking is None:
            self._next_word()

    def _next_word(self) -> None:
        self._speaking = None
        if self._words:
            self._speaking = Task(self._words.popleft(), self._spoken, self._not_spoken)

    def _spoken(self, _: None) -> None:
        self._next_word()

    def _not_spoken(self, error: KeepstepError) -> None:
        why = f"could not tell the other nodes: {error}"
        self._world.journal.record("meeting-lost", why)
        self._next_word()

    async def say(self, attempt: int, verdict: Verdict) -> None:
        if await self._record.say(attempt, verdict) == verdict:
            why = f"told the other nodes about attempt {attempt}: {verdict.why}"
            self._world.journal.record(KINDS[verdict.outcome], why, attempt=attempt)

    def ended_well(self, attempt: int) -> None:
        self.speak(self._say_ended_well(attempt, self._attempt.place, self._attempt.places))

    async def _say_ended_well(self, attempt: int, place: int, places: Sequence[int]) -> None:
        await self._record.mark(attempt, "well", place)
        marks = await self._record.marks(attempt, "well", places)
        if None not in marks:  # whoever comes last sees all
            why = f"the ranks of all {len(places)} nodes ended well in attempt {attempt}"
            await self.say(attempt, Verdict("done", why))

    def close(self, last: Verdict | None, within_ns: int, closed: Answer[None]) -> None:
        """The last word, within that time; then nothing is said any more."""
        self._living.cancel()
        if self._coordinator is not None:
            self._coordinator.close()
        late = self._world.timers.after(within_ns, lambda: self._hang_up(closed))

        async def say_last() -> None:
            await self._say_last(last)
            late.cancel()
            self._world.timers.after(0, lambda: self._hang_up(closed))

        self.speak(say_last())

    def _hang_up(self, closed: Answer[None]) -> None:
        self.abandon()
        self.kv.close()
        self._world.meeting_places.close()
        closed.give(None)

    async def _say_last(self, last: Verdict | None) -> None:
        # Who has just taken over for one that was killed has a part in what that one left.
        number = self._attempt.number if self._attempt.number >= 0 else self._owner.follows
        nodes = self._launch.nodes
        if number < 0:
            return
        if last is not None:
            while (await self._record.say(number, last)).outcome == "again":
                number += 1  # the others are on their way to the next
            await self._record.call_off(number, nodes)  # they may be waiting for more to come
        if self.kv.hosted:
            seats = await self._record.seats(number, nodes)
            others = [place for place in present(seats) if place != self._attempt.place]
            while None in await self._record.marks(number, "heard", others):
                await sleep(self._world.timers, LOOK_AGAIN_NS)

    # -- one attempt after the other

    def _lived(self, last: Verdict) -> None:
        self._owner.ended(last)

    async def _live(self) -> Verdict:
        """The last word about the job."""
        await self._open()
        request = await self._owner.next_request()
        newest = await self._newest(await self._end_left_attempt(request))
        if isinstance(newest, Verdict):
            return newest
        number, before = newest
        waits_ns = FIRST_NS if number and self._owner.follows < 0 else 0
        while True:
            self._come_from(_keeper_of(request))
            if waits_ns and not await self._may_go_first(number, before.vacant):
                await self._record.wait_for_marks(number, "full", within_ns=waits_ns)
            place = await self._take_seat(number)
            if place >= 0:  # whoever follows this agent ends an attempt that waits for it
                self._world.take_part(number)
            self._attempt = _Attempt(number, place, range(self._launch.nodes))
            formed = await self._form(before.keep) if place >= 0 else None
            if formed is not None:
                self._owner.formed(formed)
            verdict = await self._record.wait_for_verdict(number)
            if place >= 0:
                await self._record.mark(number, "heard", place)
            if verdict.outcome != "again":
                return verdict
            number, before = number + 1, _Before(verdict.keep, verdict.vacant)
            waits_ns = 0 if place >= 0 else FIRST_NS
            if formed is not None:
                self._owner.ended(verdict)
                request = await self._owner.next_request()
                if request.failure is not None:
                    # Before this agent takes its place: when the attempt is formed all are told.
                    await self._record.tell_failure(number - 1, place, request.failure)
                if request.leave:
                    waits_ns, before = LEAVES_NS, _Before(verdict.keep)

    async def _open(self) -> None:
        options, world = self._options, self._world
        own = None if options.secret is not None else world.token() + world.token()
        opening = await self._record.open(Opening(own, world.clock.wall_ns() // MS_NS))
        self._first_version = opening.first_version
        secret = options.secret or opening.secret
        if secret is None:
            raise ConfigError("secret: expected one, as on the node that came first, found none")
        self._secret = secret
        self._coordinator = Coordinator(
            world.clock,
            world.timers,
            world.journal,
            self._record,
            self._mine.token,
            options.link_dead_s,
            self._launch.nodes,
            self._presence,
        )

    def _presence(self) -> Presence:
        node, host = self._mine.node, self._mine.host
        name = f"an agent on {host}" if node is None else f"node {node} on {host}"
        return Presence(self._attempt.number, self._attempt.place, name)

    def _come_from(self, keeper: Listening) -> None:
        newest = max(self._mine.newest_version, keeper.mesh_version)
        self._mine = replace(
            self._mine,
            host=keeper.host,
            port=keeper.port,
            incarnation=keeper.incarnation,
            newest_version=newest,
        )

    async def _end_left_attempt(self, request: JoinRequest) -> int:
        """An agent of this node that was killed has left an attempt that only this agent can end.

        Returns the attempt since which this node has a part in the job, -1 when it has none.
        """
        follows = self._owner.follows
        newest = await self._newest(follows)
        if isinstance(newest, Verdict):
            return follows
        number, _ = newest
        keeper = _keeper_of(request)
        seats = await self._record.seats(number, self._launch.nodes)
        was_killed_there = has_seat(seats, keeper.host, keeper.port, keeper.incarnation)
        if follows != number and not was_killed_there:
            return follows
        why = "the agent of a node was killed, and another one has taken over"
        await self.say(number, Verdict("again", why, keep=True))
        return number

    async def _newest(self, since: int) -> tuple[int, _Before] | Verdict:
        """The attempt that is to come or under way, and what was said about the one before it.

        Or the last word about the job, when it has ended in attempt `since` or a later one. To who
        comes newly (-1) an end is that of an earlier run.
        """
        number, before = 0, _Before()
        while (verdict := await self._record.verdict(number)) is not None:
            if 0 <= since <= number and verdict.outcome != "again":
                return verdict
            number, before = number + 1, _Before(verdict.keep, verdict.vacant)
        return number, before

    async def _may_go_first(self, number: int, vacant: Sequence[int]) -> bool:
        """Whether one of the vacant places is this agent's: there is one for each, and more agents
        may want it."""
        for at in range(len(vacant)):
            if await self._record.mark(number, "instead", at, self._mine.token) == self._mine.token:
                return True
        return False

    async def _take_seat(self, number: int) -> int:
        """This agent's place in the attempt, -1 when it is full. Raises ConfigError when it cannot
        meet those who are there."""
        nodes = self._launch.nodes
        for place in range(nodes):
            there = await self._record.take_seat(number, place, self._mine)
            if there == self._mine:
                await self._is_seated(number, place)
                return place
            if not there.is_vacant and (why := disagreement(self._mine, there)):
                raise ConfigError(why)
        here = len(present(await self._record.seats(number, nodes)))
        why = f"attempt {number} has its {here} nodes already: waiting for the next one"
        self._world.journal.record("nodes-awaited", why, attempt=number, here=here, nodes=nodes)
        await self._record.mark(number, "full")  # who took the last place may have died before
        self._mine = replace(self._mine, node=None)
        return -1

    async def _is_seated(self, number: int, place: int) -> None:
        nodes = self._launch.nodes
        if place == nodes - 1:
            await self._record.mark(number, "full")
            return
        here = place + 1
        why = f"attempt {number}: {here} of {nodes} nodes are here, waiting for the others"
        self._world.journal.record("nodes-awaited", why, attempt=number, here=here, nodes=nodes)

    # -- forming one

    async def _form(self, keep: bool) -> Formed | None:
        """The attempt, once all have answered; None when there is a verdict before that."""
        began_ns = self._world.clock.monotonic_ns()
        attempt, record = self._attempt, self._record
        number, nodes_wanted = attempt.number, self._launch.nodes
        await self._wait_until_full(number)
        seats = await record.seats(number, nodes_wanted)
        if await record.verdict(number) is not None or None in seats:
            return None
        attempt.places = present(seats)
        arrivals = [arrival for arrival in seats if arrival is not None and not arrival.is_vacant]
        nodes = assign(arrivals)
        node = nodes[attempt.places.index(attempt.place)]
        self._mine = replace(self._mine, node=node)
        answer = str(self._open_place()) if node == 0 else "yes"
        await record.mark(number, "ready", attempt.place, answer)
        texts = await record.wait_for_marks(number, "ready", attempt.places)
        if texts is None or CALLED_OFF in texts:
            return None
        version = mesh_version(number, self._first_version, arrivals)
        mesh = Mesh(version, node, members_of(arrivals), self._secret)
        self._mine = replace(self._mine, newest_version=version)
        place = self._assignment(mesh, int(texts[nodes.index(0)]))
        self._tell_formed(place, mesh, began_ns)
        failures = await record.failures(number - 1, nodes_wanted) if number else ()
        before = len(present(await record.seats(number - 1, nodes_wanted))) if number else 0
        is_as_large = not number or before == len(mesh.members)
        return Formed(place, mesh, keep and is_as_large, failures)

    def _open_place(self) -> int:
        """A fresh place for the ranks each time: no key of a dead rank can be read by a living
        one."""
        return self._world.meeting_places.open(self._mine.host, self._launch.master_port)

    def _assignment(self, mesh: Mesh, port: int) -> RankAssignment:
        return RankAssignment(
            attempt=self._attempt.number,
            node=mesh.node,
            nodes=len(mesh.members),
            first_rank=mesh.ranks_of(mesh.node).start,
            world_size=mesh.world_size,
            master_addr=mesh.members[0].host,
            master_port=port,
        )

    def _tell_formed(self, place: RankAssignment, mesh: Mesh, began_ns: int) -> None:
        took_ns = self._world.clock.monotonic_ns() - began_ns
        last = place.first_rank + self._launch.ranks - 1
        why = (
            f"attempt {place.attempt}: all {place.nodes} nodes are here after {human_ns(took_ns)}; "
            f"this is node {place.node} with ranks {place.first_rank} to {last} of "
            f"{place.world_size}"
        )
        self._world.journal.record(
            "attempt-formed",
            why,
            attempt=place.attempt,
            node=place.node,
            hosts=[f"{m.host}:{m.port}" for m in mesh.members],
            world_size=place.world_size,
            waited_ns=took_ns,
        )

    async def _wait_until_full(self, number: int) -> None:
        """Until all nodes are there, or the attempt is closed with fewer because the time for more
        is over."""
        nodes, least = self._launch.nodes, self._launch.min_nodes
        within_ns = None
        if least < nodes:
            patience_ns = round(self._options.shrink_after_s * S_NS)
            within_ns = max(patience_ns, 0 if number else BEGINS_NS)
        while await self._record.wait_for_marks(number, "full", within_ns=within_ns) is None:
            here = len(present(await self._record.seats(number, nodes)))
            if here >= least:
                waited = human_ns(within_ns or 0)
                why = (
                    f"attempt {number}: {here} of {nodes} nodes are here after {waited}, enough "
                    f"for --nnodes {least}:{nodes}"
                )
                self._world.journal.record(
                    "attempt-closed", why, WARNING, attempt=number, here=here, nodes=nodes
                )
                await self._record.close_seats(number, nodes)


def _keeper_of(request: JoinRequest) -> Listening:
    """Where it listens. Raises KeeperError when nobody has asked it to."""
    if request.keeper is None:
        raise KeeperError("this node's keeper does not listen to the keepers of other nodes")
    return request.keeper
