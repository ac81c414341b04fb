"""Agent meeting: the agent's line to the agents of the other nodes.

Comes in: that this node's ranks wait or are dead and its keeper listens (`join`), and what is to be
said about the present round. Goes out, from a thread of its own: `Formed`, when all nodes are there
and their ranks may start; `Heard`, the round's verdict; `MeetingLost`.
`core/recovery/rendezvous.py` says who is which node, `edge/torch/rendezvous.py` carries the words
over a KV that one of them hosts, or etcd. Never waits on the agent's loop.

A round takes N arrivals; an agent that comes when it is full is a spare and waits for the next one,
which begins when somebody says `again`. There the nodes of the round before come first; a spare
takes at once the place of one that is said to be vacant, any other when nobody has come to it in
time, and so does a node that left its own because its hardware is suspect. A round is formed once
all N have answered to their place in it, so that an agent that died while it waited leaves nobody
with half a job: `coordinator.py` ends such a round.

Invariant: for one round `Formed` comes before `Heard`, and that before the `Formed` of the next.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, Protocol

from keepstep.config import Settings
from keepstep.core.recovery.rendezvous import (
    assign,
    disagreement,
    keepers_round,
    members_of,
    present,
    sat_there,
)
from keepstep.edge.os.journal import Journal
from keepstep.edge.torch.rendezvous import CALLED_OFF, Rendezvous, open_store
from keepstep.edge.torch.tcp_store import EmbeddedKV, in_words, meet_embedded
from keepstep.errors import ConfigError, MeetingError
from keepstep.model.failure import Failure, failure_from_json
from keepstep.model.launch import Launch, Place
from keepstep.model.mesh import Mesh
from keepstep.model.messages.keeper_rank import Listening
from keepstep.model.restarts import MeetingLost
from keepstep.model.rounds import Arrival, Verdict
from keepstep.model.units import MS_NS, human_ns
from keepstep.ports import BlockingKV
from keepstep.runtime.agent.coordinator import Coordinator, Present
from keepstep.runtime.agent.evidence_board import RoundBoard

# how long the one who hosts the meeting point waits for the others to hear the last word
FAREWELL_S = 10.0
LOOK_AGAIN_S = 0.02
FIRST_S = 2.0  # so long the nodes of the round before may take their places before others do
BEGINS_S = 60.0  # so long at least all nodes have to come to the first round
LEAVES_S = 5.0  # so long a node that would leave waits for one that comes instead
TOLD = {"again": "round-wanted", "stop": "round-stopped", "done": "round-done"}  # the events' kinds


@dataclass(frozen=True, slots=True)
class Formed:
    """All nodes are there. `mesh` is for the keeper; None when there is one node. `keep`: ranks
    that can stay in their process do. `failures`: what the nodes have told of the life before."""

    place: Place
    mesh: Mesh | None
    keep: bool = False
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class Heard:
    verdict: Verdict


Post = Callable[[Formed | Heard | MeetingLost], None]


class Meeting(Protocol):
    def join(
        self, keeper: Listening | None, leave: bool = False, failure: Failure | None = None
    ) -> None:
        """This node's ranks wait for the next round or are dead, its keeper listens there: take
        part in it. `leave`: as a spare, if another one comes in its place. `failure`: what the
        other nodes are to know of the life before."""

    def follow(self, attempt: int) -> None:
        """Another agent was here, and its ranks, in that life of them, are dead: before the first
        `join`."""

    def board(self, attempt: int) -> RoundBoard | None:
        """Where the nodes of that round show each other what they see; None when there are no
        others."""

    def say(self, attempt: int, verdict: Verdict) -> None: ...

    def ended_well(self, attempt: int, why: str) -> None: ...

    def end(self, last: Verdict | None) -> None:
        """Nothing comes any more; `last` is for the others."""

    def close(self, within_s: float) -> None:
        """Wait until it is said, and, if they meet here, until the others have heard it."""


class Alone:
    """One node: nobody to wait for."""

    def __init__(self, launch: Launch, post: Post) -> None:
        self._launch, self._post, self._attempt = launch, post, 0
        self._keep = False
        self._store: Any = None

    def join(
        self, keeper: Listening | None, leave: bool = False, failure: Failure | None = None
    ) -> None:
        # A fresh store each time: no key of a dead rank can be read by a living one.
        self._store = None
        host = self._launch.master_addr
        self._store = open_store(host, self._launch.master_port)
        self._post(
            Formed(
                Place(self._attempt, 0, 1, 0, self._launch.ranks, host, self._store.port),
                None,
                self._keep,
            )
        )
        self._attempt += 1

    def follow(self, attempt: int) -> None:
        self._attempt = attempt + 1

    def board(self, attempt: int) -> RoundBoard | None:
        return None

    def say(self, attempt: int, verdict: Verdict) -> None:
        self._keep = verdict.keep

    def ended_well(self, attempt: int, why: str) -> None:
        self._post(Heard(Verdict("done", why)))

    def end(self, last: Verdict | None) -> None:
        self._store = None

    def close(self, within_s: float) -> None:
        pass


class Several:
    """Several nodes. One thread lives the rounds, one speaks: a word never waits behind a wait."""

    def __init__(self, launch: Launch, settings: Settings, journal: Journal, post: Post) -> None:
        assert launch.endpoint is not None
        self._launch, self._settings, self._journal, self._post = launch, settings, journal, post
        self._endpoint = launch.endpoint
        nodes, own_secret = (launch.nodes, launch.least_nodes), settings.secret is not None
        self._mine = Arrival(
            secrets.token_hex(8),
            "",
            0,
            0,
            launch.ranks,
            *nodes,
            own_secret,
            settings.rack,
            None,
            launch.node_rank,
        )
        self._joins: SimpleQueue[tuple[Listening | None, bool, Failure | None]] = SimpleQueue()
        self._words: SimpleQueue[Callable[[Rendezvous], None] | None] = SimpleQueue()
        self._over = threading.Event()
        self._number = -1  # of the round that is being formed or lived
        self._place = -1  # this agent's in it
        self._places: Sequence[int] = range(launch.nodes)  # that are taken
        self._keep = False  # as the verdict about the round before said
        self._kv: BlockingKV | None = None
        self._follows = -1  # the round in which this node's agent was killed
        self._hosts: EmbeddedKV | None = None  # when they meet here
        self._ranks_store: Any = None  # when the ranks do
        self._speaker: threading.Thread | None = None
        self._thread = threading.Thread(target=self._live, name="keepstep-meeting", daemon=True)
        self._thread.start()

    # -- the agent's side

    def join(
        self, keeper: Listening | None, leave: bool = False, failure: Failure | None = None
    ) -> None:
        assert keeper is not None
        self._joins.put((keeper, leave, failure))

    def follow(self, attempt: int) -> None:
        self._follows = attempt

    def board(self, attempt: int) -> RoundBoard | None:
        assert self._kv is not None, "the round is formed"
        return RoundBoard(self._kv.another, attempt, self._launch.nodes)

    def say(self, attempt: int, verdict: Verdict) -> None:
        self._words.put(lambda point: self._say(point, attempt, verdict))

    def ended_well(self, attempt: int, why: str) -> None:
        place, places = self._place, self._places
        self._words.put(lambda point: self._say_well(point, attempt, place, places))

    def end(self, last: Verdict | None) -> None:
        self._over.set()
        self._joins.put((None, False, None))
        self._words.put(lambda point: self._say_last(point, last))
        self._words.put(None)

    def close(self, within_s: float) -> None:
        if self._speaker is not None:
            self._speaker.join(min(within_s, FAREWELL_S))

    # -- the speaker

    def _speak(self, point: Rendezvous) -> None:
        try:
            while (word := self._words.get()) is not None:
                word(point)
        except MeetingError as error:
            self._journal.record(
                "meeting-lost", f"what was to be said to the other nodes was not: {error}"
            )

    def _say(self, point: Rendezvous, number: int, verdict: Verdict) -> None:
        if point.say(number, verdict) == verdict:
            self._journal.record(
                TOLD[verdict.kind],
                f"told the other nodes about round {number}: {verdict.why}",
                round=number,
            )

    def _say_well(self, point: Rendezvous, number: int, place: int, places: Sequence[int]) -> None:
        point.mark(number, "well", place)
        if None not in point.marks(number, "well", places):  # whoever comes last sees all
            self._say(
                point,
                number,
                Verdict(
                    "done", f"the ranks of all {len(places)} nodes ended well in round {number}"
                ),
            )

    def _say_last(self, point: Rendezvous, last: Verdict | None) -> None:
        number, nodes = self._number, self._launch.nodes
        if last is not None and number >= 0:
            # the others are on their way to the next
            while point.say(number, last).kind == "again":
                number += 1
            point.call_off(number, nodes)  # they may be waiting for more to come
        if self._hosts is not None and number >= 0:
            others = [
                place for place in present(point.seats(number, nodes)) if place != self._place
            ]
            deadline = time.monotonic() + FAREWELL_S
            while None in point.marks(number, "heard", others) and time.monotonic() < deadline:
                time.sleep(LOOK_AGAIN_S)

    # -- the rounds

    def _live(self) -> None:
        try:
            point = self._meet()
            last = self._rounds(point)
        except (MeetingError, ConfigError) as error:
            if not self._over.is_set():
                self._post(MeetingLost(str(error)))
        else:
            if last is not None:
                self._post(Heard(last))

    def _meet(self) -> Rendezvous:
        self._kv = kv = self._open_kv()
        point = Rendezvous(kv.another())
        self._speaker = threading.Thread(
            target=self._speak, args=(point.another(),), name="keepstep-speaker", daemon=True
        )
        self._speaker.start()
        own = None if self._settings.secret else secrets.token_hex(32)
        opening = json.loads(
            point.opening(json.dumps({"secret": own, "first_round": time.time_ns() // MS_NS}))
        )
        self._first_round = int(opening["first_round"])
        self._secret = self._settings.secret or opening["secret"]
        if self._secret is None:
            raise ConfigError("secret: expected one, as the node has that came first, found none")
        lease_s, nodes = self._settings.link_dead_s, self._launch.nodes
        Coordinator(kv, self._mine.token, lease_s, nodes, self._present, self._journal, self._over)
        return point

    def _open_kv(self) -> BlockingKV:
        # an etcd may have jobs of many users
        launch, prefix = self._launch, f"keepstep/{os.getuid()}/{self._settings.job}/"
        where = launch.etcd.in_words() if launch.etcd else in_words(self._endpoint)
        self._journal.record(
            "meeting",
            f"job {self._settings.job}: {launch.nodes} nodes meet at {where}",
            endpoint=where,
        )
        if launch.etcd:
            from keepstep.edge.net.etcd import EtcdKV  # an extra

            return EtcdKV(launch.etcd, prefix, self._etcd_says)
        kv = meet_embedded(self._endpoint, prefix, given_up=self._over.is_set)
        self._hosts = kv if kv.hosted else None
        return kv

    def _etcd_says(self, why: str) -> None:
        self._journal.record("meeting-away", why, logging.WARNING)

    def _present(self) -> Present:
        node, host = self._mine.node, self._mine.host
        name = f"an agent on {host}" if node is None else f"node {node} on {host}"
        return Present(self._number, self._place, name)

    def _rounds(self, point: Rendezvous) -> Verdict | None:
        """The last word about the job; None when this agent's own end comes first."""
        keeper, _, _ = self._joins.get()
        number, vacant = self._catch_up(point)
        if keeper is not None and (
            self._follows == number or self._sat_there(point, number, keeper)
        ):
            self._say(
                point,
                number,
                Verdict(
                    "again",
                    "the agent of a node was killed, and another one has taken over",
                    keep=True,
                ),
            )
            number, vacant = self._catch_up(point)
        waits_s = FIRST_S if number and self._follows < 0 else 0.0
        while keeper is not None:
            newest = max(self._mine.newest_round, keeper.mesh_version)
            self._mine = replace(
                self._mine,
                host=keeper.host,
                port=keeper.port,
                incarnation=keeper.incarnation,
                newest_round=newest,
            )
            if waits_s and not self._may_go_first(point, number, vacant):
                point.wait_for_marks(number, "full", within_s=waits_s)
            self._number, self._place = number, self._take_seat(point, number)
            formed = self._form(point, number) if self._place >= 0 else None
            if formed is not None:
                self._post(formed)
            verdict = point.wait_for_verdict(number)
            if self._place >= 0:
                point.mark(number, "heard", self._place)
            if verdict.kind != "again":
                return verdict
            number, self._keep, vacant = number + 1, verdict.keep, verdict.vacant
            waits_s = 0.0 if self._place >= 0 else FIRST_S
            if formed is not None:
                self._post(Heard(verdict))
                keeper, leave, failure = self._joins.get()
                # before this agent takes its place: when the round is formed all are told
                if failure is not None:
                    point.mark(number - 1, "failed", self._place, json.dumps(failure.to_json()))
                if leave:
                    waits_s, vacant = LEAVES_S, ()
        return None

    def _sat_there(self, point: Rendezvous, number: int, keeper: Listening) -> bool:
        """Whether an agent of this node has a seat in the round and was killed before its ranks
        were started."""
        return sat_there(
            point.seats(number, self._launch.nodes), keeper.host, keeper.port, keeper.incarnation
        )

    def _catch_up(self, point: Rendezvous) -> tuple[int, tuple[int, ...]]:
        """The round that is to come or under way, whatever became of those before, and whose places
        are vacant there."""
        number, vacant = 0, tuple[int, ...]()
        while (before := point.verdict(number)) is not None:
            number, self._keep, vacant = number + 1, before.keep, before.vacant
        return number, vacant

    def _may_go_first(self, point: Rendezvous, number: int, vacant: tuple[int, ...]) -> bool:
        """Whether one of the vacant places is this agent's: there is one for each, and more agents
        may want it."""
        return any(
            point.mark(number, "instead", at, self._mine.token) == self._mine.token
            for at in range(len(vacant))
        )

    def _take_seat(self, point: Rendezvous, number: int) -> int:
        """This agent's place in the round, -1 when it is full. Raises ConfigError when it cannot
        meet those who are there."""
        nodes = self._launch.nodes
        for place in range(nodes):
            there = point.seat(number, place, self._mine)
            if there != self._mine:
                if not there.is_nobody and (why := disagreement(self._mine, there)):
                    raise ConfigError(why)
                continue
            if place == nodes - 1:
                point.mark(number, "full")
            else:
                why = (
                    f"round {number}: {place + 1} of {nodes} nodes are here, waiting for the others"
                )
                self._journal.record(
                    "round-waiting", why, round=number, here=place + 1, nodes=nodes
                )
            return place
        here = len(present(point.seats(number, nodes)))
        why = f"round {number} has its {here} nodes already: waiting for the next one"
        self._journal.record("round-waiting", why, round=number, here=here, nodes=nodes)
        point.mark(number, "full")  # whoever took the last place may have died before it could
        self._mine = replace(self._mine, node=None)
        return -1

    def _form(self, point: Rendezvous, number: int) -> Formed | None:
        """The round, once all have answered; None when there is a verdict before that."""
        began_ns = time.monotonic_ns()
        self._wait_until_full(point, number)
        seats = point.seats(number, self._launch.nodes)
        if point.verdict(number) is not None or None in seats:
            return None
        self._places = places = present(seats)
        arrivals = [a for a in seats if a is not None and not a.is_nobody]
        nodes = assign(arrivals)
        node = nodes[places.index(self._place)]
        self._mine = replace(self._mine, node=node)
        self._ranks_store = None
        if node == 0:  # a fresh store each time: no key of a dead rank can be read by a living one
            self._ranks_store = open_store(self._mine.host, self._launch.master_port)
        point.mark(
            number, "ready", self._place, str(self._ranks_store.port) if node == 0 else "yes"
        )
        texts = point.wait_for_marks(number, "ready", places)
        assert texts is not None
        if CALLED_OFF in texts:
            return None
        members = members_of(arrivals)
        mesh = Mesh(keepers_round(number, self._first_round, arrivals), node, members, self._secret)
        self._mine = replace(self._mine, newest_round=mesh.version)
        first, port = mesh.ranks_of(node).start, int(texts[nodes.index(0)])
        place = Place(number, node, len(members), first, mesh.world_size, members[0].host, port)
        took_ns = time.monotonic_ns() - began_ns
        why = (
            f"round {number}: all {len(members)} nodes are here after {human_ns(took_ns)}; this "
            f"is node {node} with ranks "
        )
        why += f"{first} to {first + self._launch.ranks - 1} of {mesh.world_size}"
        hosts = [f"{m.host}:{m.port}" for m in members]
        self._journal.record(
            "round-formed",
            why,
            round=number,
            node=node,
            hosts=hosts,
            world_size=mesh.world_size,
            waited_ns=took_ns,
        )
        everywhere = range(self._launch.nodes)
        told = point.marks(number - 1, "failed", everywhere) if number else []
        failures = tuple(failure_from_json(json.loads(text)) for text in told if text is not None)
        before = (
            len(present(point.seats(number - 1, self._launch.nodes))) if number else len(members)
        )
        return Formed(place, mesh, self._keep and len(members) == before, failures)

    def _wait_until_full(self, point: Rendezvous, number: int) -> None:
        """Until all nodes are there, or the round is closed with fewer because the time for more is
        over."""
        nodes, least = self._launch.nodes, self._launch.least_nodes
        within_s = (
            max(self._settings.shrink_after_s, 0 if number else BEGINS_S) if least < nodes else None
        )
        while point.wait_for_marks(number, "full", within_s=within_s) is None:
            here = len(present(point.seats(number, nodes)))
            if here >= least:
                why = (
                    f"round {number}: {here} of {nodes} nodes are here after {within_s:g} s, "
                    f"enough for --nnodes {least}:{nodes}"
                )
                self._journal.record(
                    "round-closed", why, logging.WARNING, round=number, here=here, nodes=nodes
                )
                point.close(number, nodes)
