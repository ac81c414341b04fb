"""The commit protocol of many nodes as a model: everything that can happen next, and what must hold
at every instant.

A `World` is one instant of all nodes, a value. A `Move` names something that happens;
`Protocol.apply` gives the instant after it. Who searches (test_commit.py) chooses the moves. All
decisions are the real ones: `slots.choose`, `commit`, `protection`, `sources`. The model does what
keepers do between them: reports, words, offers and acknowledgements travel in order on each wire
with any delay, pieces arrive in any order, and what was lost is asked for again.

Safety: whatever the placement promises to survive may be lost at any instant, and some stamp, not
older than what was ever committed, stays within reach of every rank. Liveness: once everything
under way has ended, one boundary that everybody hears of is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

from keepstep.core.redundancy.protection import Assignment, assignments
from keepstep.core.resume.commit import Commit, RankFacts, first_horizon, newer
from keepstep.core.resume.cut import Holding
from keepstep.core.resume.slots import Skip, Take, choose
from keepstep.core.resume.sources import restorable_stamps, restore_sources
from keepstep.model.horizon import Horizon
from keepstep.model.mesh import LEADER, Member, Mesh
from keepstep.model.restore_sources import HeldParity, Inventory
from keepstep.model.snapshot import SlotState, SlotView, Stamp
from keepstep.model.topology import Copies, Parity, ReedSolomon, Scheme

EMPTY = SlotView(SlotState.EMPTY, Stamp(-1, 0))
BLANK = Horizon(-1)
Slots = tuple[SlotView, ...]
Move = tuple[Any, ...]
Chooser = Callable[[Sequence[SlotView], Stamp | None, Callable[[Stamp], bool]], Take | Skip]


OnlyChooser = Callable[[Sequence[SlotView], Horizon], Take | Skip]


def overwrites_only(slots: Sequence[SlotView], word: Horizon) -> Take | Skip:
    """What a rank with one slot does: all that is committed here has copies."""
    released = replace(word, has_copies=True).released
    return choose(slots, word.floor, word.is_hopeless, released)


class Unsafe(AssertionError):
    """The protocol broke a promise."""


class Stuck(AssertionError):
    """The protocol does not go on."""


class Report(NamedTuple):
    """A keeper to the leader: its ranks, and the last word on its page."""

    facts: tuple[RankFacts, ...]
    heard: Horizon


class Offer(NamedTuple):
    """An owner's keeper to a holder's: keep your part of this."""

    rank: int
    stamp: Stamp
    word: Horizon


class Ack(NamedTuple):
    """A holder's keeper to an owner's: my part of it is whole and proven."""

    rank: int
    stamp: Stamp


Message = Report | Horizon | Offer | Ack


class World(NamedTuple):
    """All nodes at one instant. By rank: own, decided, acked, seen. By place: held, got, asked. By
    node: words. By pair of nodes: wires.

    `facts` and `led` are the leader's. `promised` and `owed` are ghosts: the newest stamp ever
    committed (None while nothing is promised), and what must be committed again before anything is,
    after a node was replaced.
    """

    own: tuple[Slots, ...]
    decided: tuple[int, ...]
    held: tuple[Slots, ...]
    got: tuple[frozenset[int], ...]  # whose pieces have arrived in what is being written there
    asked: tuple[frozenset[Offer], ...]  # offers that wait for the rest of their row
    acked: tuple[frozenset[tuple[int, Stamp]], ...]  # (holder, stamp)
    words: tuple[Horizon, ...]  # what the node's page says
    seen: tuple[Horizon, ...]  # what the rank decides by: the page as it was when it last looked
    wires: tuple[tuple[Message, ...], ...]
    facts: tuple[RankFacts | None, ...]
    led: Horizon
    said: Horizon | None = None  # the leader's last word
    promised: Stamp | None = None
    owed: Stamp | None = None


class Place(NamedTuple):
    """Two slots of a node for others: for copies of `rank`, or for the parity beside the data of
    `rank`. `sources`: who sends pieces."""

    node: int
    rank: int
    sources: tuple[int, ...]


def put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


def sealed(slots: Slots) -> frozenset[Stamp]:
    return frozenset(v.stamp for v in slots if v.state is SlotState.SEALED)


def writing(slots: Slots) -> int | None:
    return next((i for i, v in enumerate(slots) if v.state is SlotState.WRITING), None)


def whole(slots: Slots) -> Slots:
    return tuple(EMPTY if v.state is SlotState.WRITING else v for v in slots)


def up_to(slots: Slots, stamp: Stamp | None) -> Slots:
    return tuple(
        v if v.state is SlotState.SEALED and stamp is not None and v.stamp <= stamp else EMPTY
        for v in slots
    )


@dataclass
class Protocol:
    """One job: its nodes, who protects whom, and which rules are followed (tests plant bugs here).

    `prompt`: messages arrive the moment they are sent, which leaves far fewer instants to visit.
    """

    policy: Scheme
    nodes: int
    ranks_per_node: int = 1
    own_slots: int = 2
    prompt: bool = False
    chooser: Chooser = choose
    only_chooser: OnlyChooser = overwrites_only
    commit_type: type[Commit] = Commit
    _judged: dict[Any, tuple[Stamp | None, ...]] = field(default_factory=dict)
    _decided: dict[Any, tuple[Horizon, Horizon | None]] = field(default_factory=dict)
    _reported: dict[Any, RankFacts] = field(default_factory=dict)

    # ------------------------------------------------------------------------------------------
    # what never changes

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh(
            1,
            LEADER,
            tuple(Member(n, "", 0, 1, self.ranks_per_node) for n in range(self.nodes)),
            "",
        )

    @cached_property
    def ranks(self) -> range:
        return range(self.mesh.world_size)

    @cached_property
    def assignments(self) -> dict[int, Assignment]:
        return assignments(self.policy, self.mesh)

    @cached_property
    def home(self) -> tuple[int, ...]:
        """Each rank's node."""
        return tuple(self.assignments[r].node for r in self.ranks)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        if any(assignment.stripe_group for assignment in self.assignments.values()):
            return tuple(
                Place(w.node, r, tuple(q for q in w.stripe_group if q != r))
                for r, w in self.assignments.items()
            )
        return tuple(
            Place(holder, r, (r,)) for r, w in self.assignments.items() for holder in w.holders
        )

    @cached_property
    def place_for(self) -> dict[tuple[int, int], int]:
        """(owner's rank, holder's node) -> index of the place."""
        return {(rank, p.node): i for i, p in enumerate(self.places) for rank in p.sources}

    @cached_property
    def losses(self) -> tuple[tuple[int, ...], ...]:
        """Every set of nodes that the policy promises to survive. With one slot a rank's own does
        not count."""
        match self.policy:
            case Copies(m):
                most = m - 1 - (self.own_slots == 1)
            case ReedSolomon(_, m):
                most = m
            case Parity():
                most = 1
            case _:
                most = 0
        return tuple(lost for k in range(most + 1) for lost in combinations(range(self.nodes), k))

    def first(self, epoch: int = 1) -> World:
        ranks, places = len(self.ranks), len(self.places)
        return World(
            own=((EMPTY,) * self.own_slots,) * ranks,
            decided=(-1,) * ranks,
            held=((EMPTY,) * 2,) * places,
            got=(frozenset(),) * places,
            asked=(frozenset(),) * places,
            acked=(frozenset(),) * ranks,
            words=(Horizon(epoch),) * self.nodes,
            seen=(Horizon(epoch),) * ranks,
            wires=((),) * (self.nodes * self.nodes),
            facts=(None,) * ranks,
            led=Horizon(epoch),
        )

    def apply(self, world: World, move: Move) -> World:
        name, *arguments = move
        after: World = getattr(self, name)(world, *arguments)
        return after

    # ------------------------------------------------------------------------------------------
    # training

    def boundary(self, world: World, rank: int) -> World:
        """The rank completes its next step and captures it, if there is a slot for it."""
        step, slots, word = world.decided[rank] + 1, world.own[rank], world.seen[rank]
        if self.own_slots == 1:
            decision = self.only_chooser(slots, word)
        else:
            decision = self.chooser(slots, word.floor, word.is_hopeless)
        if isinstance(decision, Take):
            slots = put(
                slots, decision.slot, SlotView(SlotState.WRITING, Stamp(step, world.led.epoch))
            )
        return world._replace(
            own=put(world.own, rank, slots), decided=put(world.decided, rank, step)
        )

    def skip(self, world: World, rank: int) -> World:
        """The same, but a reader came first or there was no room."""
        return world._replace(decided=put(world.decided, rank, world.decided[rank] + 1))

    def seal(self, world: World, rank: int) -> World:
        """The capture is whole."""
        index = writing(world.own[rank])
        assert index is not None
        view = world.own[rank][index]._replace(state=SlotState.SEALED)
        return world._replace(own=put(world.own, rank, put(world.own[rank], index, view)))

    def tear(self, world: World, rank: int) -> World:
        """The capture is torn and dropped."""
        return world._replace(own=put(world.own, rank, whole(world.own[rank])))

    def look(self, world: World, rank: int) -> World:
        """The rank reads its node's page."""
        return world._replace(seen=put(world.seen, rank, world.words[self.home[rank]]))

    # ------------------------------------------------------------------------------------------
    # what is said

    def send(self, world: World, source: int, target: int, message: Message) -> World:
        if self.prompt or source == target:
            return self.receive(world, source, target, message)
        wire = source * self.nodes + target
        return world._replace(wires=put(world.wires, wire, (*world.wires[wire], message)))

    def deliver(self, world: World, wire: int) -> World:
        """The oldest message on a wire arrives."""
        first, *rest = world.wires[wire]
        return self.receive(
            world._replace(wires=put(world.wires, wire, tuple(rest))),
            *divmod(wire, self.nodes),
            first,
        )

    def receive(self, world: World, source: int, target: int, message: Message) -> World:
        match message:
            case Report():
                return self._reported_to_leader(world, message)
            case Horizon():
                return world._replace(
                    words=put(world.words, target, newer(world.words[target], message))
                )
            case Offer():
                return self._offered(world, target, message)
            case Ack(rank, stamp):
                return self._acked(world, source, rank, stamp)

    def waiting(self, world: World, source: int, target: int, kind: type) -> list[Any]:
        return [m for m in world.wires[source * self.nodes + target] if isinstance(m, kind)]

    # -- to the leader and back

    def facts_of(self, world: World, rank: int) -> RankFacts:
        key = (rank, world.own[rank], world.decided[rank], world.acked[rank])
        if key not in self._reported:
            index, holders, acked = (
                writing(world.own[rank]),
                self.assignments[rank].holders,
                world.acked[rank],
            )
            own = Holding(
                sealed(world.own[rank]),
                None if index is None else world.own[rank][index].stamp,
                world.decided[rank],
            )
            proven = (
                frozenset(s for _, s in acked if all((h, s) in acked for h in holders))
                if holders
                else own.sealed
            )
            self._reported[key] = RankFacts(rank, own, proven)
        return self._reported[key]

    def report(self, world: World, node: int) -> World:
        """A keeper tells the leader about its ranks."""
        facts = tuple(self.facts_of(world, rank) for rank in self.mesh.ranks_of(node))
        return self.send(world, node, LEADER, Report(facts, world.words[node]))

    def _reported_to_leader(self, world: World, report: Report) -> World:
        """The leader decides, and its own page says so before anybody else hears it."""
        facts = world.facts
        for f in report.facts:
            facts = put(facts, f.rank, f)
        (led, said), promised = (
            self._decide(facts, world.led, world.said, report.heard),
            world.promised,
        )
        if led.committed is not None and all(
            s is None or led.committed >= s for s in (promised, world.owed)
        ):
            promised = led.committed
        page = world.words[LEADER] if said is None else newer(world.words[LEADER], said)
        return world._replace(
            facts=facts, led=led, said=said, promised=promised, words=put(world.words, LEADER, page)
        )

    def _decide(
        self,
        facts: tuple[RankFacts | None, ...],
        led: Horizon,
        said: Horizon | None,
        heard: Horizon,
    ) -> tuple[Horizon, Horizon | None]:
        key = (facts, led, said, heard)
        if key not in self._decided:
            commit = self.commit_type(len(self.ranks), led.epoch)
            commit.horizon, commit.announced = led, said
            commit.report((f for f in facts if f is not None), heard)
            self._decided[key] = commit.horizon, commit.announced
        return self._decided[key]

    def say(self, world: World, node: int) -> World:
        """The leader's last word to a node."""
        assert world.said is not None
        return self.send(world, LEADER, node, world.said)

    # -- between owners and holders

    def offer(self, world: World, rank: int, holder: int) -> World:
        """An owner's keeper asks a holder's to keep its part of the target."""
        word = world.words[self.home[rank]]
        assert word.target is not None
        return self.send(world, self.home[rank], holder, Offer(rank, word.target, word))

    def _offered(self, world: World, holder: int, offer: Offer) -> World:
        # An offer carries a word too. Of two that are equally old the node keeps its own.
        world = world._replace(
            words=put(world.words, holder, newer(offer.word, world.words[holder]))
        )
        at = self.place_for[offer.rank, holder]
        place, slots, word = self.places[at], world.held[at], world.words[holder]
        if offer.stamp in sealed(slots):
            return self.send(world, holder, self.home[offer.rank], Ack(offer.rank, offer.stamp))
        asked = frozenset(
            o for o in world.asked[at] if o.stamp == offer.stamp and o.rank != offer.rank
        ) | {offer}
        if len(asked) == len(place.sources) and self._may_begin(world, place, offer.stamp):
            # What was half written is given up: an owner sends one snapshot at a time.
            decision = self.chooser(whole(slots), word.floor, word.is_hopeless)
            if isinstance(decision, Take):
                slots = put(whole(slots), decision.slot, SlotView(SlotState.WRITING, offer.stamp))
        return world._replace(
            held=put(world.held, at, slots),
            got=put(world.got, at, frozenset()),
            asked=put(world.asked, at, asked),
        )

    def _may_begin(self, world: World, place: Place, stamp: Stamp) -> bool:
        """A parity lies beside data of the same stamp; a copy needs nothing."""
        return not self.assignments[place.rank].stripe_group or stamp in sealed(
            world.own[place.rank]
        )

    def piece(self, world: World, at: int, rank: int) -> World:
        """A piece arrives; the last one makes the part whole, and whoever sent to it hears of
        that."""
        index, place = writing(world.held[at]), self.places[at]
        assert index is not None
        got, stamp = world.got[at] | {rank}, world.held[at][index].stamp
        if len(got) < len(place.sources):
            return world._replace(got=put(world.got, at, got))
        slots = put(world.held[at], index, SlotView(SlotState.SEALED, stamp))
        world = world._replace(
            held=put(world.held, at, slots),
            got=put(world.got, at, frozenset()),
            asked=put(world.asked, at, frozenset()),
        )
        for source in place.sources:
            world = self.send(world, place.node, self.home[source], Ack(source, stamp))
        return world

    def lose_pieces(self, world: World, at: int) -> World:
        """What is on its way to a place does not arrive whole."""
        slots = put(world.held, at, whole(world.held[at]))
        return world._replace(
            held=slots, got=put(world.got, at, frozenset()), asked=put(world.asked, at, frozenset())
        )

    def _acked(self, world: World, holder: int, rank: int, stamp: Stamp) -> World:
        """Only the answer to what is asked for now counts."""
        word = world.words[self.home[rank]]
        if stamp != word.target:
            return world
        kept = {
            (h, s) for h, s in world.acked[rank] if word.committed is None or s >= word.committed
        }
        return world._replace(acked=put(world.acked, rank, frozenset(kept | {(holder, stamp)})))

    # ------------------------------------------------------------------------------------------
    # failures

    def restart(self, world: World, node: int) -> World:
        """The node's keeper dies and comes back: memory and pages stay, what only it knew is gone,
        its links begin anew."""
        wires = tuple(
            () if node in divmod(i, self.nodes) else wire for i, wire in enumerate(world.wires)
        )
        acked = tuple(
            frozenset() if self.home[r] == node else acks for r, acks in enumerate(world.acked)
        )
        world = world._replace(wires=wires, acked=acked)
        for at, place in enumerate(self.places):
            if place.node == node:
                world = self.lose_pieces(world, at)
        if node == LEADER:
            world = world._replace(
                facts=(None,) * len(self.ranks), led=Horizon(world.led.epoch), said=None
            )
        return world

    def recover(self, world: World, lost: Sequence[int] = ()) -> World:
        """Nodes are lost with their memory, or (none) only ranks died: all go back to the newest
        stamp within reach, in a new epoch."""
        own = tuple(
            whole(s) if self.home[r] not in lost else (EMPTY,) * self.own_slots
            for r, s in enumerate(world.own)
        )
        held = tuple(
            whole(s) if p.node not in lost else (EMPTY, EMPTY)
            for p, s in zip(self.places, world.held, strict=True)
        )
        left = self.inventories(own, held, lost)
        resumed = max(self.reachable(left), default=None)
        own, held = tuple(up_to(s, resumed) for s in own), tuple(up_to(s, resumed) for s in held)
        if resumed is not None:
            without = [r for r in self.ranks if resumed not in sealed(own[r])]
            assert sorted(restore_sources(without, resumed, left)) == without, (
                "what is within reach has a source"
            )
            for rank in without:
                own = put(own, rank, self._fetched(own[rank], resumed))
        epoch = world.led.epoch + 1
        words = []
        for node, word in enumerate(world.words):
            common = frozenset.intersection(*(sealed(own[r]) for r in self.mesh.ranks_of(node)))
            words.append(first_horizon(epoch, resumed, BLANK if node in lost else word, common))
        return self.first(epoch)._replace(
            own=own,
            held=held,
            decided=(-1 if resumed is None else resumed.step,) * len(self.ranks),
            words=tuple(words),
            seen=tuple(words[self.home[r]] for r in self.ranks),
            promised=None if lost else world.promised,
            owed=resumed if lost else world.owed,
        )

    def _fetched(self, slots: Slots, resumed: Stamp) -> Slots:
        decision = choose(slots, resumed, lambda stamp: False)
        assert isinstance(decision, Take)
        return put(slots, decision.slot, SlotView(SlotState.SEALED, resumed))

    def inventories(
        self, own: Sequence[Slots], held: Sequence[Slots], lost: Sequence[int] = ()
    ) -> dict[int, Inventory]:
        snapshots: dict[int, set[tuple[int, Stamp]]] = {
            n: set() for n in range(self.nodes) if n not in lost
        }
        parities: dict[int, set[HeldParity]] = {n: set() for n in snapshots}
        for rank, node in enumerate(self.home):
            if node in snapshots:
                snapshots[node] |= {(rank, s) for s in sealed(own[rank])}
        for place, slots in zip(self.places, held, strict=True):
            assignment = self.assignments[place.rank]
            if place.node in snapshots and assignment.stripe_group:
                parities[place.node] |= {
                    HeldParity(place.rank, s, assignment.stripe_group, assignment.tolerates)
                    for s in sealed(slots)
                }
            elif place.node in snapshots:
                snapshots[place.node] |= {(place.rank, s) for s in sealed(slots)}
        return {n: Inventory(frozenset(snapshots[n]), frozenset(parities[n])) for n in snapshots}

    def reachable(self, left: dict[int, Inventory]) -> frozenset[Stamp]:
        """The stamps every rank can have."""
        return frozenset.intersection(*(restorable_stamps(rank, left) for rank in self.ranks))

    # ------------------------------------------------------------------------------------------
    # what may happen next

    def useful(self, world: World) -> Iterator[Move]:
        """What happens sooner or later when nothing fails. When there is none of it, everything
        under way has ended."""
        yield from (("seal", rank) for rank in self.ranks if writing(world.own[rank]) is not None)
        yield from (("deliver", wire) for wire, messages in enumerate(world.wires) if messages)
        yield from (
            ("piece", at, rank)
            for at in range(len(self.places))
            for rank in self._pieces(world, at)
        )
        for node in range(self.nodes):
            on_way = self.waiting(world, node, LEADER, Report)
            known = (
                on_way[-1].facts
                if on_way
                else tuple(world.facts[r] for r in self.mesh.ranks_of(node))
            )
            if tuple(self.facts_of(world, rank) for rank in self.mesh.ranks_of(node)) != known:
                yield "report", node
        for node in range(self.nodes):
            last = [world.words[node], *self.waiting(world, LEADER, node, Horizon)][-1]
            if world.said is not None and newer(last, world.said) != last:
                yield "say", node
        yield from (
            ("offer", rank, holder)
            for rank, holder in self.place_for
            if self._wants(world, rank, holder)
        )
        yield from (
            ("look", rank)
            for rank in self.ranks
            if world.seen[rank] != world.words[self.home[rank]]
        )

    def _pieces(self, world: World, at: int) -> Iterator[int]:
        index = writing(world.held[at])
        if index is not None:
            stamp = world.held[at][index].stamp
            yield from (
                r
                for r in self.places[at].sources
                if r not in world.got[at] and stamp in sealed(world.own[r])
            )

    def _wants(self, world: World, rank: int, holder: int) -> bool:
        """Whether an offer would change anything. Owners ask again until they are answered; the
        model, only when it matters."""
        node = self.home[rank]
        word, at = world.words[node], self.place_for[rank, holder]
        target = word.target
        if (
            target is None
            or (holder, target) in world.acked[rank]
            or target not in sealed(world.own[rank])
        ):
            return False
        if any(
            m.rank == rank and m.stamp == target for m in self.waiting(world, node, holder, Offer)
        ):
            return False
        if Ack(rank, target) in world.wires[holder * self.nodes + node]:
            return False
        index = writing(world.held[at])
        if index is not None and world.held[at][index].stamp == target:
            return False
        if all((o.rank, o.stamp) != (rank, target) for o in world.asked[at]):
            return True
        after = self._offered(world, holder, Offer(rank, target, word))
        return (after.held, after.wires, after.acked) != (world.held, world.wires, world.acked)

    def harmful(self, world: World) -> Iterator[Move]:
        """What goes wrong without anybody dying."""
        yield from (("tear", rank) for rank in self.ranks if writing(world.own[rank]) is not None)
        yield from (
            ("lose_pieces", at)
            for at in range(len(self.places))
            if writing(world.held[at]) is not None
        )

    def steps(self, world: World, max_step: int = 1 << 40, apart: int = 0) -> Iterator[Move]:
        """Boundaries. Ranks that exchange gradients stay within one step of each other; `apart`
        lets them drift further."""
        most = min(min(world.decided) + apart, max_step - 1)
        yield from (("boundary", rank) for rank in self.ranks if world.decided[rank] <= most)

    def settled(self, world: World) -> World:
        """Everything under way has ended."""
        while (move := next(self.useful(world), None)) is not None:
            world = self.apply(world, move)
        return world

    # ------------------------------------------------------------------------------------------
    # what must hold

    def check_safety(self, world: World) -> None:
        if world.promised is None:
            return
        key = (tuple(map(sealed, world.own)), tuple(map(sealed, world.held)))
        if key not in self._judged:
            self._judged[key] = tuple(
                max(self.reachable(self.inventories(world.own, world.held, lost)), default=None)
                for lost in self.losses
            )
        for lost, newest in zip(self.losses, self._judged[key], strict=True):
            if newest is None or newest < world.promised:
                raise Unsafe(
                    f"{world.promised!r} was committed, and were nodes {lost} lost, the "
                    f"newest within reach would be {newest!r}"
                )

    def check_liveness(self, world: World) -> None:
        """Everything under way ends, laggards reach the newest step, then one boundary passes in
        which nothing is late."""
        world = self.settled(world)
        newest = max(world.decided)
        for step in range(min(world.decided) + 1, newest + 2):
            for rank in self.ranks:
                if world.decided[rank] < step:
                    world = self.boundary(world, rank)
            world = self.settled(world)
            self.check_safety(world)
        expected = Stamp(newest + 1, world.led.epoch)
        if {word.committed for word in world.words} != {expected}:
            raise Stuck(
                f"nothing was late at {expected!r}, and what is committed is "
                f"{world.led.committed!r}: own {world.own}, held {world.held}"
            )
