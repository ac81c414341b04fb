"""Vote: from which state does everybody resume?

Comes in: each rank's holdings as it joins, what the store has, whether loading worked. Goes out:
one offer to all ranks, then permission to go, each with its reason. Every rank loads, proves and
forgets anything newer *before* anyone may go, so two computations of one step never mix. A source
that fails on one rank is given up by all, and the next is offered; but what was brought to a rank
from another node's memory and does not prove there is brought once more. Where memory goes back
behind a state that some rank could not use, that one stays until all may go: its bytes may be
whole, and another vote may find room for it. A rank that dies meanwhile starts the vote again when
it is back. Whoever was permitted is the proof that all had loaded: who says to the next vote that
it has loaded the same may go, too.

Order of sources: the newest stamp that all ranks hold in memory, or can be given from other nodes'
memory; then checkpoints, newest first; then a fresh start, unless there are checkpoints and none
can be used, or one could not be looked at: a person decides then. Memory that no rank's present
launch has trained on may be a remainder: the job may have gone on elsewhere since. Then the store
is asked first, and a checkpoint of a later epoch, or of a later step of the same one, comes before
memory; where the store does not answer, memory is taken, and the reason says so. With many nodes
nothing is offered before every node has told what it holds. A stamp after which the program failed
twice without completing another step is condemned: its bytes are what was captured, but perhaps
what was captured was already wrong. It is taken only when there is nothing else but a fresh start.
A stamp at which replicas differ, and what was computed from it, is wrong for sure, and never taken.
A stamp that ranks share (model/shares.py) counts only when all parts of it are there, and are of
one snapshot.
What one rank doubts, because a step has wrong numbers, is offered to nobody, and nobody starts
afresh for a doubt alone. The permission to go says which that was, so that no later vote, in which
nobody remembers the doubt, offers it.

A run that is to start over does so when all ranks say so, which is in its first life only: whoever
has begun it says so no more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from keepstep.core.detection.replicas import sound
from keepstep.core.resume.cut import common, is_complete
from keepstep.model.checkpoint import StoreListing
from keepstep.model.shares import Share
from keepstep.model.snapshot import Stamp
from keepstep.model.units import counted, every

STRIKES = 2
CUT_OFF_LOADS = 5  # then the next older checkpoint is offered
NOT_READ = StoreListing(())


@dataclass(frozen=True, slots=True)
class Ballot:
    """What a rank brings: proven stamps, and why others it has are unusable. `group`, `digests`,
    `shares`: of those stamps, as in `core/resume/cut.py`, `Holding`."""

    rank: int
    world_size: int
    holds: frozenset[Stamp]
    foreign_world: int | None = None  # its slots are of a job of that size
    incarnation: int = 0  # which life of the rank asks; 0: nobody said
    fresh: bool = False  # its run is to start over, and has not begun
    group: int = 0
    digests: tuple[tuple[Stamp, int], ...] = ()
    doubted_from: int | None = None  # states of that step and of later ones may be wrong
    goes_on: bool = True  # this launch of the job has trained on what the rank's memory holds
    shares: tuple[tuple[Stamp, Share], ...] = ()


@dataclass(frozen=True, slots=True)
class Offer:
    """Everybody loads this. `number`: of all offers of the job, growing. `source` is memory, store
    or fresh; the stamp's step is -1 for fresh. `keeps_newer`: a newer state in memory was offered
    before, and is forgotten when all may go, not as this one is loaded."""

    number: int
    source: str
    stamp: Stamp
    why: str
    keeps_newer: bool = False


@dataclass(frozen=True, slots=True)
class ListStore:
    """Ask the store which checkpoints it has. `begins_run`: all start over; what it has is to be
    left behind first, so that it is not taken when this run fails. `cut_off`: how many loads the
    store has cut off since all were looked at: the more, the later the question. `memory_waits`:
    all could go on from memory, and only want to know whether the store has gone on since."""

    begins_run: bool = False
    cut_off: int = 0
    memory_waits: bool = False


@dataclass(frozen=True, slots=True)
class Doubted:
    """States of step `first` and of later ones. `elsewhere`: those among them that other nodes
    hold, each with the ranks whose they are."""

    first: int
    elsewhere: tuple[tuple[Stamp, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Go:
    """Everybody has proven the same state: train on, in this epoch. `reached`: a step that the job
    had completed, as the store tells; -1 when it was not asked. `begun`: the same by the names of
    checkpoints that were never finished, too. `doubted`: what was left out because a rank doubts
    it."""

    epoch: int
    offer: Offer
    reached: int = -1
    doubted: Doubted | None = None
    begun: int = -1


@dataclass(frozen=True, slots=True)
class Refuse:
    """Nobody may go on: a person must decide. `is_final`: asked again, the answer is the same."""

    why: str
    is_final: bool = False


Action = Offer | ListStore | Go | Refuse


EPOCHS_OF_MEMORY = 1000


def _epoch_after(epoch: int, source: str) -> int:
    """What all begin when that was the newest. Who goes on from a checkpoint leaves room: who had
    written it may live on somewhere, and begin epochs of its own from its memory, with the next
    numbers. However often it does so, within reason, it stays the older one in the store."""
    if source != "store":
        return epoch + 1
    return (epoch // EPOCHS_OF_MEMORY + 1) * EPOCHS_OF_MEMORY


@dataclass
class Vote:
    """One job's vote, over and over. `epoch` is the newest seen anywhere. `cut_off`: how many loads
    ended because the store did not answer, `unread`: why the last of them, since all were looked
    at."""

    world_size: int
    has_store: bool
    epoch: int = 0
    number: int = 0  # of the newest offer
    offer: Offer | None = None
    ballots: dict[int, Ballot] = field(default_factory=dict)
    # ranks that asked again because what was offered did not prove
    unproven: set[int] = field(default_factory=set)
    loaded: dict[int, int] = field(default_factory=dict)  # by rank: the offer it stands on
    failed: list[tuple[str, Stamp, str]] = field(default_factory=list)
    # what was brought to a rank, did not prove there, and was offered once more
    brought_twice: set[tuple[int, Stamp]] = field(default_factory=set)
    checkpoints: Sequence[int] | None = None
    listing: StoreListing = NOT_READ  # what was in the store, when that is known
    unlisted: str | None = None  # why nobody knows what is in it, where memory does without
    cut_off: int = 0
    unread: str | None = None
    silent_nodes: frozenset[int] = frozenset()  # their inventories are awaited
    # what each rank can be given by other nodes
    elsewhere: Mapping[int, frozenset[Stamp]] = field(default_factory=dict)
    # what other nodes' snapshots of ranks tell of what these share
    shared_elsewhere: Mapping[tuple[int, Stamp], Share] = field(default_factory=dict)
    permitted: Go | None = None  # the last permission
    condemned: frozenset[Stamp] = frozenset()

    def joined(self, ballot: Ballot) -> list[Action]:
        """A rank asks where to resume."""
        if ballot.world_size != self.world_size:
            return [
                Refuse(
                    f"rank {ballot.rank} says the world has "
                    f"{counted(ballot.world_size, 'rank')}, the job has {self.world_size}"
                )
            ]
        if (
            self.offer is not None
            and self.ballots.get(ballot.rank) == ballot
            and ballot.incarnation
        ):
            # said twice, or by its node's next keeper, which has not heard the offer
            return [self.offer]
        before = self.ballots.get(ballot.rank)
        if before is None or before.incarnation != ballot.incarnation:
            self.unproven.discard(ballot.rank)
        elif before.holds - ballot.holds:
            self.unproven.add(ballot.rank)
        self.ballots[ballot.rank] = ballot
        self.loaded.pop(ballot.rank, None)
        self.epoch = max([self.epoch, *(s.epoch for s in ballot.holds)])
        self.offer = None
        return self._decide()

    def left(self, rank: int) -> None:
        """A rank is gone; a vote under way begins again when it is back."""
        self.loaded.pop(rank, None)
        if self.ballots.pop(rank, None):
            self.offer = None

    def restorable(
        self,
        silent_nodes: frozenset[int],
        elsewhere: Mapping[int, frozenset[Stamp]],
        shared: Mapping[tuple[int, Stamp], Share] | None = None,
    ) -> list[Action]:
        """What nodes have told they hold: which ones have not yet, what each rank can be given, and
        what that tells of shares."""
        before = (self.silent_nodes, self.elsewhere, self.shared_elsewhere)
        now = (silent_nodes, elsewhere, shared or {})
        self.silent_nodes, self.elsewhere, self.shared_elsewhere = now
        self.epoch = max([self.epoch, *(s.epoch for stamps in elsewhere.values() for s in stamps)])
        return self._decide() if self.offer is None and before != now else []

    def listed(self, listing: StoreListing) -> list[Action]:
        """What the store has."""
        if not self.ballots or self.offer is not None:
            return []  # all have gone meanwhile, or memory has what was missing
        self.checkpoints = sorted(listing.usable, reverse=True)
        self.listing = listing
        self.epoch = max(self.epoch, listing.epoch)
        return self._decide()

    def unlistable(self, why: str, is_final: bool = False) -> list[Action]:
        """The store has not answered, for as long as anybody waits, or refuses for good. Nobody may
        start afresh over checkpoints that nobody could look at."""
        if not self.has_all or self.offer is not None:
            return []
        if self._is_cold and self.unlisted is None:
            self.unlisted = why
            decided = self._decide()
            if any(isinstance(action, Offer) for action in decided):
                return decided
        wants = all(ballot.fresh for ballot in self.ballots.values())
        first = "a fresh start was asked for" if wants else self._why_not_memory()
        return [Refuse(f"{first}, and the store cannot be read: {why}", is_final)]

    def has_loaded(self, rank: int, number: int) -> list[Action]:
        """A rank has loaded and proven the offer of this number, perhaps an earlier vote's, and
        forgotten what is newer."""
        if rank not in self.ballots:
            return []
        self.loaded[rank] = number
        offer = self.offer
        if offer is None or len(self.loaded) < self.world_size:
            return self._permit_late()
        if any(self.loaded.get(r) != offer.number for r in range(self.world_size)):
            return self._permit_late()
        self.epoch = _epoch_after(self.epoch, offer.source)
        reached = max((*(self.checkpoints or ()), *self._lost()), default=-1)
        begun = max((reached, *self.listing.unfinished))
        self.permitted = Go(self.epoch, offer, reached, self._doubted(), begun)
        self._look_anew()
        self.ballots.clear()
        self.loaded.clear()
        self.offer = None
        return [self.permitted]

    def ranks_train(self, permitted: Go) -> list[Action]:
        """Ranks train, as a vote before this one has permitted."""
        self.epoch = max(self.epoch, permitted.epoch)
        self.permitted = permitted
        return self._permit_late()

    def _permit_late(self) -> list[Action]:
        """Whoever has loaded what was permitted, and had no answer."""
        go = self.permitted
        late = [r for r, number in self.loaded.items() if go and number == go.offer.number]
        if go is None or not late:
            return []
        for rank in late:
            del self.ballots[rank], self.loaded[rank]
        return [go]

    def has_failed(
        self, rank: int, number: int, why: str, unread: bool = False, brought: bool = False
    ) -> list[Action]:
        """A rank could not load the offer: nobody keeps it. `unread`: the store did not say what it
        is, and is asked again, so that nobody goes back further because of one lost answer.
        `brought`: other nodes have it, and what came of it does not prove: it is offered once more,
        for the rank to be given it anew."""
        if self.offer is None or number != self.offer.number:
            return []
        once = (rank, self.offer.stamp)
        if brought and once not in self.brought_twice:
            self.brought_twice.add(once)
            self.offer = None
            return self._decide()
        if unread and self.cut_off < CUT_OFF_LOADS:
            self.cut_off += 1
            self.offer, self.checkpoints = None, None
            return self._decide()
        self.failed.append((self.offer.source, self.offer.stamp, f"rank {rank}: {why}"))
        if unread:
            self.unread = f"rank {rank}: {why}"
        self.offer = None
        return self._decide()

    @property
    def has_all(self) -> bool:
        """Whether every rank has asked."""
        return len(self.ballots) == self.world_size

    def _look_anew(self) -> None:
        """What could not be used once may be, another time."""
        self.failed = []
        self.brought_twice.clear()
        self.checkpoints = None
        self.listing = NOT_READ
        self.unlisted = None
        self.cut_off = 0
        self.unread = None

    def _lost(self) -> list[int]:
        """Steps that the store had, or may have. What was never published proves nothing: anybody
        may have made that directory."""
        return [*self.listing.damaged, *self.listing.unreachable]

    def _not_usable(self) -> list[int]:
        """Steps that the store has, or had begun to have."""
        return [*self._lost(), *self.listing.unfinished]

    def _decide(self) -> list[Action]:
        if not self.has_all or self.silent_nodes:
            return []
        if all(ballot.fresh for ballot in self.ballots.values()):
            return self._start_over()
        bad = {(source, stamp) for source, stamp, _ in self.failed}
        after = f" after {self.failed[-1][2]}" if self.failed else ""
        restorable_stamps = [
            b.holds | self.elsewhere.get(r, frozenset()) for r, b in self.ballots.items()
        ]
        everywhere = common(restorable_stamps)
        reachable = frozenset(s for s in everywhere if is_complete([*self.shares_of(s).values()]))
        if apart := everywhere - reachable:
            after += f"; what ranks share of {max(apart)} is not of one snapshot, or not all there"
        agreed = sound(list(self.ballots.values()), reachable)
        if reachable > agreed:
            after += f"; replicas differ since {min(reachable - agreed)}"
        doubted = self._doubted_from()
        whole = [s for s in agreed if ("memory", s) not in bad]
        shared = [s for s in whole if s.step < doubted]
        trusted = [s for s in shared if s not in self.condemned]
        instead = f"; {max(shared)} is condemned" if shared and max(shared) not in trusted else ""
        if doubted < math.inf:
            instead += f"; states from step {doubted} on are in doubt"
        checkpoints = [
            s for s in self.checkpoints or () if ("store", Stamp(s, 0)) not in bad and s < doubted
        ]
        needs_store = not trusted or (self._is_cold and self.unlisted is None)
        if needs_store and self.has_store and self.checkpoints is None:
            return [ListStore(cut_off=self.cut_off, memory_waits=bool(trusted))]
        is_behind = bool(trusted) and self._is_behind(max(trusted), checkpoints)
        if (trusted and not is_behind) or (shared and not checkpoints):
            return self._offer_memory(max(trusted or shared), instead if trusted else "", after)
        why_not_memory = (
            f"the job has gone on since memory held {max(trusted)} here"
            if is_behind
            else f"all that memory holds is condemned: {max(shared)}"
            if shared
            else self._why_not_memory()
            if agreed or not reachable
            else f"replicas differ at all that memory holds, since {min(reachable)}"
        )
        if checkpoints:
            stamp = Stamp(checkpoints[0], 0)
            return self._make(
                "store",
                stamp,
                f"{why_not_memory}; the newest usable checkpoint is of {stamp}"
                f"{self._passed_over(stamp)}{after}",
            )
        if reachable and not agreed:
            why = f"{why_not_memory}, and there is {self._no_checkpoint()}. Give a store, or start"
            return [Refuse(f"{why} over with KEEPSTEP_FRESH=1 (keepstep run --fresh)", True)]
        return self._without_source(why_not_memory, after, is_for_doubt=bool(whole))

    def shares_of(self, stamp: Stamp) -> dict[int, Share]:
        """What each rank's snapshot of `stamp` tells of what it shares, by rank."""
        found = {}
        for rank, ballot in self.ballots.items():
            told = dict(ballot.shares) if stamp in ballot.holds else {}
            share = told.get(stamp) or self.shared_elsewhere.get((rank, stamp))
            if share is not None:
                found[rank] = share
        return found

    def had_differed(self, stamp: Stamp) -> bool:
        """Whether ranks that share have sealed a later step, and not as one snapshot."""
        held = common([ballot.holds for ballot in self.ballots.values()])
        newer = [s for s in held if s > stamp]
        return any(not is_complete([*self.shares_of(s).values()]) for s in newer)

    def _offer_memory(self, best: Stamp, instead: str, after: str) -> list[Action]:
        """`instead`: of what is newer and not taken; `after`: what has failed before."""
        without = sorted(r for r, b in self.ballots.items() if best not in b.holds)
        verb = "have" if without else "hold"
        if self.world_size == 1:
            verb = "has" if without else "holds"
        given = (
            f", rank{'s' if len(without) > 1 else ''} {_ranks(without)} from other nodes"
            if without
            else ""
        )
        why = (
            f"{best} is the newest state {every(self.world_size, 'rank')} {verb} in "
            f"memory{given}{instead}{after}"
        )
        if self.unlisted is not None:
            why += f"; whether the store has a newer one nobody knows: {self.unlisted}"
        return self._make("memory", best, why)

    @property
    def _is_cold(self) -> bool:
        """Whether the job may have gone on elsewhere since the ranks' memory was written."""
        return not any(ballot.goes_on for ballot in self.ballots.values())

    def _is_behind(self, best: Stamp, checkpoints: Sequence[int]) -> bool:
        """Whether the newest checkpoint that can be used is of a later life of the job than what
        memory holds, or of the same and further."""
        if not self._is_cold or not checkpoints:
            return False
        step = checkpoints[0]
        return (self.listing.epochs.get(step, 0), step) > (best.epoch, best.step)

    def _doubted_from(self) -> float:
        """The first step whose state some rank doubts; infinity when nobody does."""
        return min(
            (b.doubted_from for b in self.ballots.values() if b.doubted_from is not None),
            default=math.inf,
        )

    def _doubted(self) -> Doubted | None:
        first = self._doubted_from()
        if first == math.inf:
            return None
        found: dict[Stamp, list[int]] = {}
        for rank, stamps in sorted(self.elsewhere.items()):
            for stamp in stamps:
                if stamp.step >= first:
                    found.setdefault(stamp, []).append(rank)
        return Doubted(int(first), tuple((s, tuple(ranks)) for s, ranks in sorted(found.items())))

    def _passed_over(self, stamp: Stamp) -> str:
        """Newer checkpoints, by name, and what is wrong with the newest: somebody may have forged
        it to have an older one taken."""
        newer = sorted((step for step in self._not_usable() if step > stamp.step), reverse=True)
        if not newer:
            return ""
        why = self.listing.damaged.get(newer[0])
        return f", for {_steps(newer)} cannot be used " + (
            "(`keepstep inspect` says why)" if why is None else f"({why})"
        )

    def _without_source(self, why_not_memory: str, after: str, is_for_doubt: bool) -> list[Action]:
        """Neither memory nor the store has anything to offer: a fresh start, or nobody goes on when
        something was there. `is_for_doubt`: all could go on from memory, were nothing in doubt."""
        foreign = sorted(
            {b.foreign_world for b in self.ballots.values() if b.foreign_world is not None}
        )
        if foreign:
            ranks = counted(foreign[0], "rank")
            return [
                Refuse(
                    f"memory holds this job's state for {ranks} and the job has "
                    f"{self.world_size} now, and there is {self._no_checkpoint()} that could "
                    "bridge that. "
                    f"Run with {ranks}{'' if self.has_store else ', give a store'}, or "
                    "start over with KEEPSTEP_FRESH=1 (keepstep run --fresh)",
                    is_final=True,
                )
            ]
        if self.unread is not None:
            refusals = self.unlistable(self.unread)
            self._look_anew()
            return refusals
        if unseen := self.listing.unreachable:
            refusals = self.unlistable(unseen[max(unseen)])
            self._look_anew()
            return refusals
        there = sorted({*(self.checkpoints or ()), *self.listing.damaged}, reverse=True)
        if there:
            after = after or self._why_unusable(there[0])
            refusal = Refuse(
                f"{why_not_memory}, and none of the checkpoints ({_steps(there)}) can be "
                f"used{after}. Mend the store, name another one, or start over with "
                "KEEPSTEP_FRESH=1 (keepstep run --fresh)",
                is_final=True,
            )
            self._look_anew()
            return [refusal]
        if is_for_doubt:
            why = (
                f"{why_not_memory} of before step {self._doubted_from()}, from which on states are "
                f"in doubt, and there is {self._no_checkpoint()}{after}. Start over with "
                "KEEPSTEP_FRESH=1 (keepstep run --fresh)"
            )
            self._look_anew()
            return [Refuse(why, is_final=True)]
        why = f"{why_not_memory}, {self._no_checkpoint()}: a fresh start{after}"
        return self._make("fresh", Stamp(-1, 0), why)

    def _why_unusable(self, step: int) -> str:
        """Why a checkpoint that no rank has tried to load cannot be used."""
        damage = self.listing.damaged.get(step)
        if damage is None:
            return f": states from step {self._doubted_from()} on are in doubt"
        return f": {damage}"

    def _no_checkpoint(self) -> str:
        return "no checkpoint in the store" if self.has_store else "no store"

    def _start_over(self) -> list[Action]:
        """A checkpoint of the run before would be taken for one of this run's when that fails: the
        store leaves it behind before anybody begins."""
        if self.has_store and (self.checkpoints is None or self.checkpoints or self._not_usable()):
            return [ListStore(begins_run=True)]
        held = common([ballot.holds for ballot in self.ballots.values()])
        given_up = f", and {max(held)} in memory is given up" if held else ""
        return self._make("fresh", Stamp(-1, 0), f"a fresh start was asked for{given_up}")

    def _why_not_memory(self) -> str:
        if any(b.foreign_world is not None for b in self.ballots.values()):
            return f"memory holds snapshots of another world size than {self.world_size}"
        empty = sorted(r for r, b in self.ballots.items() if not b.holds)
        if len(empty) == self.world_size:
            return "no snapshot in memory proves" if self.unproven else "memory holds nothing"
        lost = self._ranks_without_memory()
        if lost and self.elsewhere:
            return (
                f"no node's memory has anything of rank{'s' if len(lost) > 1 else ''} "
                f"{_ranks(lost)}"
            )
        if empty and not self.elsewhere:
            ranks = counted(self.world_size, "rank")
            return f"memory of rank {empty[0]} holds nothing ({len(empty)} of {ranks})"
        return "no step in memory is usable on every rank"

    def _ranks_without_memory(self) -> list[int]:
        """Ranks of whose states there is nothing in any memory."""
        return sorted(r for r, b in self.ballots.items() if not (b.holds or self.elsewhere.get(r)))

    def _make(self, source: str, stamp: Stamp, why: str) -> list[Action]:
        self.number += 1
        failed = [tried for where, tried, _ in self.failed if where == "memory"]
        keeps_newer = source == "memory" and max(failed, default=stamp) > stamp
        self.offer = Offer(self.number, source, stamp, why, keeps_newer)
        self.loaded.clear()
        return [self.offer]


@dataclass
class Trust:
    """Which stamps to resume from no more: two failures of the program, each before it had
    completed another step."""

    resumed: Stamp | None = None
    strikes: dict[Stamp, int] = field(default_factory=dict)
    struck: bool = False  # since then

    def resumed_from(self, stamp: Stamp | None) -> None:
        """All train on from there; None when it was not from memory."""
        self.resumed, self.struck = stamp, False

    def is_back(self, completed_step: int | None, failed: bool) -> bool:
        """A rank asks where to resume: how far it had come, whether its last life told of an error.
        True if a stamp is condemned now."""
        stamp = self.resumed
        if stamp is None:
            return False
        if completed_step is not None and completed_step > stamp.step:
            self.resumed = None  # it has led to another step
            return False
        if failed and not self.struck:
            self.struck = True
            self.strikes[stamp] = self.strikes.get(stamp, 0) + 1
            return self.strikes[stamp] == STRIKES
        return False

    @property
    def condemned(self) -> frozenset[Stamp]:
        return frozenset(stamp for stamp, count in self.strikes.items() if count >= STRIKES)


def _steps(steps: Sequence[int]) -> str:
    more = f" and {len(steps) - 5} older" if len(steps) > 5 else ""
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps[:5]))}{more}"


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(str(r) for r in ranks[:8]) + (
        f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    )
