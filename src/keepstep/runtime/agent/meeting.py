"""Meeting: the agents of several nodes form attempts in a KV, as long as that is there.

`core/recovery/rendezvous.py` says who is which node, `meeting_record.py` carries the words, and
`multi_node.py` finds the next KV when this one is lost.

An attempt takes N arrivals. An agent that comes when it is full is a spare and waits for the next
one, which begins when somebody says `again`. There the nodes of the attempt before come first; a
spare takes at once the place of one that is said to be vacant, any other when nobody has come to it
in time, and so does a node that left its own because its hardware is suspect. An attempt is formed
once all N have answered to their place in it, so that an agent that died while it waited leaves
nobody with half a job: `coordinator.py` ends such an attempt.

Who comes to a KV that knows nothing of the attempt it lives in writes there what all nodes of the
attempt have seen: its seats and answers, and that those before it are over. If somebody has begun
anew there meanwhile, or this agent was about to form an attempt, that attempt ends and all meet in
the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol

from keepstep.core.recovery.rendezvous import (
    assign,
    disagreement,
    has_seat,
    members_of,
    mesh_version,
    present,
)
from keepstep.errors import ConfigError, KeepstepError, MeetingError
from keepstep.model.attempts import Opening, Verdict
from keepstep.model.events import DEBUG, WARNING
from keepstep.model.launch import Launch, RankAssignment
from keepstep.model.mesh import Mesh
from keepstep.model.messages.keeper_rank import Listening
from keepstep.model.units import MS_NS, S_NS, human_ns
from keepstep.ports import KV, Timer
from keepstep.runtime.agent.coordinator import SILENT_NS, Coordinator, Presence
from keepstep.runtime.agent.meeting_record import CALLED_OFF, MeetingRecord
from keepstep.runtime.agent.opening import agree_on_opening, say_opening_again
from keepstep.runtime.agent.rendezvous import Formed, JoinRequest
from keepstep.runtime.agent.standing import FIRST_NS, NONE_BEFORE, Lived, Standing, TakenSeat
from keepstep.runtime.agent.tasks import Answer, Task, sleep
from keepstep.runtime.agent.world import AgentOptions, AgentWorld

LOOK_AGAIN_NS = 20 * MS_NS
# So long at least all nodes have to come to the first attempt.
BEGINS_NS = 60 * S_NS
# So long a node that would leave waits for one that comes instead.
LEAVES_NS = 5 * S_NS
# So long the nodes of an attempt have to come to the KV of the one that follows its killed host.
ALONE_NS = 300 * S_NS
# Whoever waits looks so often whether what it has said still stands.
STANDS_NS = 5 * S_NS
WELL_AGAIN_NS = 30 * S_NS  # likewise, who has ended well and waits for the others
WHO_SAYS_AGAIN = (0, 1)  # the opening, where somebody took it away: whose places these are
KINDS = {"again": "attempt-wanted", "stop": "job-stopped", "done": "job-done"}  # of journal events


class MeetingHearer(Protocol):
    """Who has the meeting: `multi_node.py`."""

    def next_request(self) -> Answer[JoinRequest]:
        """The next one; each is answered once."""

    def met(self, epoch: int) -> None:
        """It is that of the meeting: before anything else is said there."""

    def heard_of(self, epoch: int) -> None:
        """Something was said in it: where it is a newer one, all meet anew."""

    def formed(self, formed: Formed) -> None: ...

    def ended(self, verdict: Verdict) -> None: ...

    def lost(self, why: str) -> None:
        """There is no KV any more."""

    def failed(self, error: KeepstepError) -> None: ...


Word = Callable[["Meeting"], Coroutine[Answer[Any], None, None]]


class Meeting:
    """From when there is a KV to meet in until it is lost."""

    def __init__(
        self,
        world: AgentWorld,
        options: AgentOptions,
        launch: Launch,
        kv: KV,
        owner: MeetingHearer,
        standing: Standing,
    ) -> None:
        self.kv = kv
        self._standing = standing
        self._world = world
        self._options = options
        self._launch = launch
        self._owner = owner
        self._record = MeetingRecord(kv)
        self._opening: Opening | None = None
        self._is_speaking = False
        self._speaking: Task[None] | None = None
        self._coordinator: Coordinator | None = None
        self._alone: Timer | None = None
        if kv.hosted:
            give_up = Meeting.give_up_if_alone
            self._alone = world.timers.after(ALONE_NS, lambda: self.speak(give_up))
        self._living = Task(self._live(), owner.ended, owner.failed)
        self._next_word()

    def abandon(self) -> None:
        """There is nobody to talk to any more."""
        self._living.cancel()
        if self._alone is not None:
            self._alone.cancel()
        if self._coordinator is not None:
            self._coordinator.close()
        if self._speaking is not None:
            self._speaking.cancel()

    # -- what is to be said, one word after the other

    def speak(self, word: Word) -> None:
        self._standing.words.append(word)
        if not self._is_speaking:
            self._next_word()

    def _next_word(self) -> None:
        words = self._standing.words
        if words:
            self._is_speaking = True
            speaking = Task(self._say_in_it(words[0]), self._spoken, self._not_spoken)
            if not speaking.is_over:  # else others may have been begun already
                self._speaking = speaking

    async def _say_in_it(self, word: Word) -> None:
        await self._meet()  # else it would be signed as of no meeting
        await word(self)

    def _spoken(self, _: None) -> None:
        self._standing.words.popleft()
        self._is_speaking = False
        self._next_word()

    def _not_spoken(self, error: KeepstepError) -> None:
        why = f"could not tell the other nodes: {error}"
        self._world.journal.record("meeting-lost", why)
        self._spoken(None)

    async def say(self, attempt: int, verdict: Verdict) -> None:
        found = await self._record.say(attempt, verdict)
        self._standing.judged = (attempt, found)
        if found == verdict:
            why = f"told the other nodes about attempt {attempt}: {verdict.why}"
            self._world.journal.record(KINDS[verdict.outcome], why, DEBUG, attempt=attempt)

    async def say_ended_well(self) -> None:
        seat = self._standing.seat
        await self._record.mark(seat.attempt, "well", seat.place)
        marks = await self._record.marks(seat.attempt, "well", seat.places)
        if None not in marks:  # whoever comes last sees all
            why = f"the ranks of all {len(seat.places)} nodes ended well in attempt {seat.attempt}"
            await self.say(seat.attempt, Verdict("done", why))

    async def give_up_if_alone(self) -> None:
        """Whoever has a KV of its own in place of a killed host's, or since its ranks ended well,
        and whom nobody joins."""
        standing = self._standing
        if standing.lived is not None or not (standing.follows >= 0 or standing.was_well):
            return
        seats = await self._record.seats(standing.number, self._launch.nodes)
        if set(present(seats)) <= {standing.seat.place}:
            self._owner.failed(
                MeetingError(
                    "none of the other nodes has come to the new meeting point within "
                    f"{human_ns(ALONE_NS)}: they have ended, or cannot reach it"
                )
            )

    def close(self, last: Verdict | None, within_ns: int, closed: Answer[None]) -> None:
        """The last word, within that time; then nothing is said any more."""
        self._living.cancel()
        if self._coordinator is not None:
            self._coordinator.close()
        late = self._world.timers.after(within_ns, lambda: self._hang_up(closed))

        async def say_last(meeting: Meeting) -> None:
            await meeting._say_last(last)
            late.cancel()
            self._world.timers.after(0, lambda: self._hang_up(closed))

        self.speak(say_last)

    def _hang_up(self, closed: Answer[None]) -> None:
        self.abandon()
        self.kv.close()
        self._world.meeting_places.close()
        closed.give(None)

    async def _say_last(self, last: Verdict | None) -> None:
        # Who has just taken over for one that was killed has a part in what that one left.
        seat = self._standing.seat
        number = seat.attempt if seat.attempt >= 0 else self._standing.follows
        nodes = self._launch.nodes
        if number < 0:
            return
        if last is not None:
            while (await self._record.say(number, last)).outcome == "again":
                number += 1  # the others are on their way to the next
            await self._record.call_off(number, nodes)  # they may be waiting for more to come
        if self.kv.hosted:
            lived = self._standing.lived
            # As all have seen it: what stands there now somebody may have taken away.
            seats = lived.seats if lived else await self._record.seats(number, nodes)
            others = [place for place in present(seats) if place != seat.place]
            while None in await self._record.marks(number, "heard", others):
                await sleep(self._world.timers, LOOK_AGAIN_NS)

    # -- one attempt after the other

    async def _live(self) -> Verdict:
        """The last word about the job."""
        standing, record = self._standing, self._record
        await self._open()
        last = await (self._begin() if standing.number < 0 else self._come_back())
        if last is not None:
            return last
        while True:
            if standing.lived is None:
                await self._take_part()
            verdict = await self._verdict()
            if verdict.outcome != "again":
                standing.last = verdict
            if standing.seat.place >= 0:
                await record.mark(standing.number, "heard", standing.seat.place)
            if verdict.outcome != "again":
                return verdict
            was_formed = standing.lived is not None
            standing.go_on(verdict)
            standing.not_before_ns = self._world.clock.monotonic_ns() + verdict.wait_ns
            if was_formed:
                self._owner.ended(verdict)

    async def _verdict(self) -> Verdict:
        """About the attempt this node lives in. Who has ended well says so again while it waits."""
        standing = self._standing
        while True:
            found = await self._record.wait_for_verdict(standing.number, WELL_AGAIN_NS)
            if found is not None:
                return found
            says = self._options.secret is not None and standing.seat.place in WHO_SAYS_AGAIN
            if says and self._opening is not None:
                self._owner.heard_of(await say_opening_again(self._record, self._opening))
            if standing.is_well and not self._is_speaking:
                self.speak(Meeting.say_ended_well)

    async def _begin(self) -> Verdict | None:
        """Find the attempt that is to come; the last word about the job, if there is one."""
        standing = self._standing
        request = await self._request()
        newest = await self._newest(await self._end_left_attempt(request))
        if isinstance(newest, Verdict):
            return newest
        standing.number, standing.before = newest
        standing.first = standing.number
        standing.waits_ns = FIRST_NS if standing.number and standing.follows < 0 else 0
        return None

    async def _request(self) -> JoinRequest:
        if self._standing.request is None:
            self._standing.request = await self._owner.next_request()
        return self._standing.request

    async def _take_part(self) -> None:
        """In the attempt that is to come, as one of its nodes or as a spare."""
        standing, record = self._standing, self._record
        request, number = await self._request(), standing.number
        pause_ns = standing.not_before_ns - self._world.clock.monotonic_ns()
        await sleep(self._world.timers, max(pause_ns, 0))
        if request.failure is not None:
            # Before this agent takes its place: when the attempt is formed all are told.
            await record.tell_failure(number - 1, standing.seat.place, request.failure)
        if request.leave:
            standing.waits_ns, standing.before = LEAVES_NS, replace(standing.before, vacant=())
        standing.request = JoinRequest(request.keeper, stays=request.stays)
        self._come_from(request.listening, request.stays)
        waits_ns = standing.waits_ns
        if waits_ns and not await self._may_go_first(number, standing.before.vacant):
            await record.wait_for_marks(number, "full", within_ns=waits_ns)
        await self._sit_down(number)
        found = await self._form(standing.before.keep) if standing.seat.place >= 0 else None
        if found is not None:
            formed, standing.lived = found
            standing.request = None
            self._owner.formed(formed)

    async def _sit_down(self, number: int) -> None:
        place = await self._take_seat(number)
        if place >= 0:  # whoever follows this agent ends an attempt that waits for it
            self._world.take_part(number)
        self._standing.seat = TakenSeat(number, place, range(self._launch.nodes))

    # -- a KV that knows nothing, or not all

    async def _come_back(self) -> Verdict | None:
        """What this node knows is known here from now on; the last word about the job, if there is
        one."""
        standing, record, number = self._standing, self._record, self._standing.number
        lived = standing.lived
        is_same = lived is not None and await record.restore(number, lived.seats, lived.answers)
        await self._end_before(number)
        if standing.judged is not None and standing.judged[0] >= number:
            await record.say(*standing.judged)
        is_forming = lived is None and standing.seat.attempt == number and standing.seat.place >= 0
        if is_forming or (lived is not None and not is_same):
            # Some nodes may have formed it and others not, or others have begun anew here.
            before = standing.before if is_forming else replace(NONE_BEFORE, keep=True)
            await self._begin_anew(number, before, "the nodes had to find a new place to meet")
        newest = await self._newest(standing.first, max(0, standing.first - 1))
        if isinstance(newest, Verdict):
            return newest
        if lived is None:
            standing.number, standing.before = newest
        elif standing.is_well:
            self.speak(Meeting.say_ended_well)
        return None

    async def _end_before(self, number: int) -> None:
        """The attempts before this one are over, also for who has come to one of them meanwhile."""
        verdict, nodes = self._standing.verdict, self._launch.nodes
        for earlier in range(number):
            if await self._record.verdict(earlier) is None:
                known = verdict if earlier == number - 1 else None
                why = f"it ended before attempt {number}"
                await self._record.say(earlier, known or Verdict("again", why))
                if present(await self._record.seats(earlier, nodes)):
                    await self._record.call_off(earlier, nodes)
            # Somebody may have seen no verdict there, and take a seat yet.
            await self._record.mark(earlier, "full")

    async def _meet(self) -> None:
        """Under the opening: nothing else is said before."""
        if self._opening is None:
            self._opening = await agree_on_opening(
                self._record, self._standing, self._options, self._world, self.kv.hosted
            )
            self._owner.met(self._opening.first_version)

    async def _open(self) -> None:
        world = self._world
        await self._meet()
        self._coordinator = Coordinator(
            world.clock,
            world.timers,
            world.journal,
            self._record,
            self._standing.mine.token,
            self._options.link_dead_s,
            self._launch.nodes,
            self._presence,
            self._silent,
        )

    def _silent(self) -> None:
        self.kv.close()
        self._owner.lost(f"where the nodes meet nothing has answered for {human_ns(SILENT_NS)}")

    def _presence(self) -> Presence:
        node, host = self._standing.mine.node, self._standing.mine.host
        name = f"an agent on {host}" if node is None else f"node {node} on {host}"
        return Presence(self._standing.seat.attempt, self._standing.seat.place, name)

    def _come_from(self, keeper: Listening, stays: bool) -> None:
        standing = self._standing
        newest = max(standing.mine.newest_version, keeper.mesh_version)
        # Whoever follows a killed agent is the node whose memory lies here.
        is_new = standing.follows >= 0 and standing.seat.attempt < 0
        standing.mine = replace(
            standing.mine,
            node=keeper.node if is_new else standing.mine.node,
            host=keeper.host,
            port=keeper.port,
            incarnation=keeper.incarnation,
            newest_version=newest,
            stays=stays,
        )

    async def _end_left_attempt(self, request: JoinRequest) -> int:
        """An agent of this node that was killed has left an attempt that only this agent can end.

        Returns the attempt since which this node has a part in the job, -1 when it has none.
        """
        follows = self._standing.follows
        newest = await self._newest(follows)
        if isinstance(newest, Verdict):
            return follows
        number, _ = newest
        if number < follows:  # the KV was lost with the agent
            await self._end_before(follows)
            number = follows
        keeper = request.listening
        seats = await self._record.seats(number, self._launch.nodes)
        was_killed_there = has_seat(seats, keeper.host, keeper.port, keeper.incarnation)
        if follows != number and not was_killed_there:
            return follows
        why = "the agent of a node was killed, and another one has taken over"
        await self._begin_anew(number, replace(NONE_BEFORE, keep=True), why)
        return number

    async def _newest(self, since: int, number: int = 0) -> tuple[int, Verdict] | Verdict:
        """The attempt that is to come or under way, and what was said about the one before it.

        Or the last word about the job, when it has ended in attempt `since` or a later one. To who
        comes newly (-1) an end is that of an earlier run.
        """
        before = NONE_BEFORE
        while (verdict := await self._record.verdict(number)) is not None:
            if 0 <= since <= number and verdict.outcome != "again":
                return verdict
            number, before = number + 1, verdict
        return number, before

    async def _may_go_first(self, number: int, vacant: Sequence[int]) -> bool:
        """Whether one of the vacant places is this agent's: there is one for each, and more agents
        may want it."""
        for at in range(len(vacant)):
            if (
                await self._record.mark(number, "instead", at, self._standing.mine.token)
                == self._standing.mine.token
            ):
                return True
        return False

    async def _take_seat(self, number: int) -> int:
        """This agent's place in it, -1 when it is full. Raises ConfigError when it meets nobody."""
        nodes = self._launch.nodes
        for place in range(nodes):
            there = await self._record.take_seat(number, place, self._standing.mine)
            if there == self._standing.mine:
                await self._is_seated(number, place)
                return place
            if not there.is_vacant and (why := disagreement(self._standing.mine, there)):
                raise ConfigError(why)
        here = len(present(await self._record.seats(number, nodes)))
        why = f"attempt {number} has its {here} nodes already: waiting for the next one"
        self._world.journal.record("nodes-awaited", why, attempt=number, here=here, nodes=nodes)
        await self._record.mark(number, "full")  # who took the last place may have died before
        self._standing.mine = replace(self._standing.mine, node=None)
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

    async def _form(self, keep: bool) -> tuple[Formed, Lived] | None:
        """The attempt, once all have answered; None when there is a verdict before that."""
        began_ns = self._world.clock.monotonic_ns()
        record = self._record
        number, nodes_wanted = self._standing.seat.attempt, self._launch.nodes
        if not await self._wait_until_full(number):
            return None
        seat = self._standing.seat
        seats = await record.seats(number, nodes_wanted)
        if await record.verdict(number) is not None:
            return None
        own = seats[seat.place]
        if None in seats or own is None or own.token != self._standing.mine.token:
            why = "where the nodes meet somebody has taken a node's place away"
            await self._begin_anew(number, self._standing.before, why)
            return None
        seat.places = present(seats)
        arrivals = [arrival for arrival in seats if arrival is not None and not arrival.is_vacant]
        nodes = assign(arrivals)
        node = nodes[seat.places.index(seat.place)]
        self._standing.mine = replace(self._standing.mine, node=node)
        answer = str(self._open_place()) if node == 0 else "yes"
        await record.mark(number, "ready", seat.place, answer)
        while (
            texts := await record.wait_for_marks(number, "ready", seat.places, STANDS_NS)
        ) is None:
            await record.mark(number, "full")
            await record.mark(number, "ready", seat.place, answer)
            await self._still_stands(number)
        if CALLED_OFF in texts:
            return None
        secret, opening = self._standing.secret, self._opening
        assert secret is not None and opening is not None, "the nodes have met"
        version = mesh_version(number, opening.first_version, arrivals)
        mesh = Mesh(version, node, members_of(arrivals), secret, self._options.encrypt)
        self._standing.mine = replace(self._standing.mine, newest_version=version)
        place = self._assignment(mesh, int(texts[nodes.index(0)]))
        self._tell_formed(place, mesh, began_ns)
        failures = await record.failures(number - 1, nodes_wanted) if number else ()
        before = len(present(await record.seats(number - 1, nodes_wanted))) if number else 0
        is_as_large = not number or before == len(mesh.members)
        taken = tuple(arrival for arrival in seats if arrival is not None)
        lived = Lived(taken, dict(zip(seat.places, texts, strict=True)))
        # Where nobody stays there is nobody to come back to: a program that is still beginning is
        # begun anew by all.
        keep = keep and is_as_large and any(arrival.stays for arrival in arrivals)
        return Formed(place, mesh, keep, failures), lived

    def _open_place(self) -> int:
        """A fresh place for the ranks each time: no key of a dead rank can be read by a living
        one."""
        return self._world.meeting_places.open(self._standing.mine.host, self._launch.master_port)

    def _assignment(self, mesh: Mesh, port: int) -> RankAssignment:
        return RankAssignment(
            attempt=self._standing.seat.attempt,
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

    async def _wait_until_full(self, number: int) -> bool:
        """Until all nodes are there, or the attempt is closed with fewer because the time for more
        is over. False: another one has this node's place, and none is left for it."""
        nodes = self._launch.nodes
        least = max(self._launch.min_nodes, self._standing.before.least)
        within_ns = None
        if least < nodes:
            patience_ns = round(self._options.shrink_after_s * S_NS)
            within_ns = max(patience_ns, 0 if number else BEGINS_NS)
        clock, began_ns = self._world.clock, self._world.clock.monotonic_ns()
        while True:
            left_ns = None if within_ns is None else within_ns - clock.monotonic_ns() + began_ns
            look_ns = STANDS_NS if left_ns is None else max(0, min(STANDS_NS, left_ns))
            if await self._record.wait_for_marks(number, "full", within_ns=look_ns) is not None:
                return True
            if not await self._still_stands(number):
                await self._sit_down(number)
                if self._standing.seat.place < 0:
                    return False
            if left_ns is None or left_ns > STANDS_NS:
                continue
            here = len(present(await self._record.seats(number, nodes)))
            if here >= least:
                waited = human_ns(within_ns or 0)
                why = (
                    f"attempt {number}: {here} of {nodes} nodes are here after {waited}, enough "
                    f"for --nnodes {self._launch.min_nodes}:{nodes}"
                )
                self._world.journal.record(
                    "attempt-closed", why, WARNING, attempt=number, here=here, nodes=nodes
                )
                await self._record.close_seats(number, nodes)
            began_ns = clock.monotonic_ns()

    async def _still_stands(self, number: int) -> bool:
        """What this node has said is said again where somebody took it away; whether its place in
        the attempt is still its own."""
        standing, record = self._standing, self._record
        if await record.verdict(number) is not None:  # who gave it may have died before this
            await record.call_off(number, self._launch.nodes)
        if standing.verdict is not None and number > 0:
            await record.say(number - 1, standing.verdict)
        there = await record.take_seat(number, standing.seat.place, standing.mine)
        return there.token == standing.mine.token

    async def _begin_anew(self, number: int, before: Verdict, why: str) -> None:
        """All are to meet in the next attempt."""
        verdict = Verdict("again", why, keep=before.keep, vacant=before.vacant, least=before.least)
        await self.say(number, verdict)
        await self._record.call_off(number, self._launch.nodes)
