"""Replica watch: what a rank does so that silent corruption of its state is found, and what it does
when some was.

Comes in: gathered states, sealed payloads, what `commit_view.py` sees of the others. Goes out: the
digests on this rank's page, a line in the journal, and the error with which a rank ends whose state
is wrong. What is decided, `core/detection/replicas.py` decides.

Invariant: nothing here changes a state or waits for anybody. A rank that is told to go back has
given up its own snapshots of the wrong computation before it says so: then nobody can resume from
them.
"""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.core.detection.replicas import Agreed, differing, marked, tensors_in_words
from keepstep.edge.shm.replica_digest import block_sums, replica_digest, tensor_sums
from keepstep.edge.shm.slot import Slot, slot_paths
from keepstep.edge.shm.status_page import StatusPage
from keepstep.errors import CorruptionError, DamageError, StoppedError
from keepstep.model.events import WARNING
from keepstep.model.replicas import ReplicaDifference, Replicas
from keepstep.model.snapshot import SlotHeader, SlotState, Stamp
from keepstep.ports import Gathered
from keepstep.runtime.rank.commit_view import CommitLook
from keepstep.runtime.rank.world import RankIdentity, RankOptions, RankWorld

TELL, STOP = "tell", "stop"


class ReplicaWatch:
    """One rank's. `by_blocks`: other ranks keep blocks of its snapshots (`sharing.py`), so that
    only the checksums of whole blocks are there for every step."""

    def __init__(
        self,
        world: RankWorld,
        options: RankOptions,
        who: RankIdentity,
        page: StatusPage,
        by_blocks: bool = False,
    ) -> None:
        self._by_blocks = by_blocks
        self._found: Replicas | None = None
        self._in_blocks: Replicas | None = None  # of what was found
        self._world, self._options, self._who, self._page = world, options, who, page
        self._epoch = -1
        self._is_shown = False  # the group's ranks have held the same, as they should
        self._is_told = False  # that they do not any more
        self._replicas: Replicas | None = None
        self._coming: Replicas | None = None  # of the snapshot that is being taken
        self.difference: ReplicaDifference | None = None  # the first of this epoch

    @property
    def is_condemned(self) -> bool:
        """Whether nothing of this epoch is to be captured any more."""
        return self.difference is not None and self.difference.condemns

    def look(self, epoch: int, seen: CommitLook, slots: Sequence[Slot]) -> None:
        """At a boundary: what all ranks' digests have shown by now. `slots`: this rank's own."""
        if epoch != self._epoch:
            self._epoch, self.difference = epoch, None
            self._is_shown = self._is_told = False
        replicas = self._replicas
        if replicas is not None and not self._is_shown:
            self._is_shown = Agreed(seen.agreed_steps, replicas.is_claimed).is_shown
            if self._is_shown and self._who.rank == replicas.ranks[0]:
                why = f"{replicas.why}, and they are: a difference from now on is a fault"
                self._world.journal.record("replicas-agree", why, nbytes=replicas.nbytes)
        if self.difference is None:
            self.difference = seen.difference
        if self.difference is not None and not self._is_told:
            self._is_told = True
            self._tell(self.difference, slots)

    def gathered(self, step: int, state: Gathered, is_on_device: bool = False) -> None:
        """This is about to be captured: on the trainer's thread. `is_on_device`: some of it is."""
        every = self._options.digest_every_steps
        is_due = self._who.world_size > 1 and every > 0 and step % every == 0
        # Where ranks share what is on a device, some have the checksum of a block and some its
        # digest: `sharing.py` compares digests of all that is shared, at every step.
        is_shared = self._by_blocks and is_on_device
        self._coming = self._of(state) if is_due and not is_shared else None
        if is_due and self._coming != self._replicas:
            self._replicas, self._is_shown = self._coming, False
            group = 0 if self._replicas is None else self._replicas.group
            self._page.publish(replica_group=group)

    def _of(self, state: Gathered) -> Replicas | None:
        found = self._world.live.replicas(state)
        if found is None or not self._by_blocks:
            return found
        if found is not self._found:
            size = self._world.memory.block_bytes
            self._found, self._in_blocks = found, found.in_blocks(state.layout, size)
        return self._in_blocks

    def digest(self, slot: Slot, header: SlotHeader) -> tuple[int, int]:
        """Of a payload that was hashed, with its group: in the background. Zeros where none is to
        be taken."""
        replicas = self._coming
        if replicas is None:
            return 0, 0
        found = replica_digest(slot, header, replicas.spans)
        # nobody has said that unclaimed ones stay equal: they may be averaged now and then
        condemns = self._options.on_difference != TELL and replicas.is_claimed
        return replicas.group, marked(found, self._is_shown, condemns)

    def _tell(self, wrong: ReplicaDifference, slots: Sequence[Slot]) -> None:
        """One of those that have another state than most says so for all."""
        if self._who.rank != wrong.ranks[0]:
            return
        self._world.journal.record(
            "replicas-differ",
            wrong.sentence(self._tensors(wrong, slots)),
            WARNING,
            step=wrong.stamp.step,
            ranks=list(wrong.ranks),
            certain=wrong.is_certain,
            condemned=wrong.condemns,
        )

    def error(self) -> CorruptionError | None:
        """With which this process ends; None when it may stay: it is not the one that is wrong."""
        wrong = self.difference
        if wrong is None or not wrong.condemns or self._who.rank not in wrong.ranks:
            return None
        if self._options.on_difference == STOP:
            return StoppedError(f"{wrong.sentence()}; on_difference is {STOP}: a person decides")
        return CorruptionError(
            f"{wrong.sentence()}; all go back to the last step at which they agreed"
        )

    def _tensors(self, wrong: ReplicaDifference, slots: Sequence[Slot]) -> str:
        """In which they differ, as far as this node's memory tells."""
        replicas = self._replicas
        mine = _find(slots, wrong.stamp)
        if replicas is None or mine is None:
            return ""
        others = [r for r in replicas.ranks if r not in wrong.ranks] or wrong.ranks[1:]
        for rank in others:
            if tensors := self._differing(replicas, mine, rank, wrong.stamp):
                return tensors
        return ""

    def _differing(self, replicas: Replicas, mine: Slot, rank: int, stamp: Stamp) -> str:
        memory, job_dir = self._world.memory, self._options.job_dir
        slots = []
        try:
            slots = [Slot(memory, path) for path in slot_paths(memory, job_dir, rank)]
            theirs = _find(slots, stamp)
            if theirs is None:
                return ""
            headers = [(slot, slot.header()) for slot in (mine, theirs)]
            layout, other = (slot.manifest(header) for slot, header in headers)
            if other != layout:
                return ""
            chosen = replicas.segments
            sums = [
                block_sums(slot, header, layout, chosen)
                if self._by_blocks
                else tensor_sums(slot, layout, chosen)
                for slot, header in headers
            ]
        except (DamageError, OSError):
            return ""
        finally:
            for slot in slots:
                slot.close()
        names = [layout.segments[index].spec.name for index in replicas.segments]
        found = differing(names, *sums)
        blocks = "blocks of " if self._by_blocks else ""
        return blocks + tensors_in_words(found, len(names)) if found else ""


def _find(slots: Sequence[Slot], stamp: Stamp) -> Slot | None:
    """The one that holds the snapshot of that stamp."""
    for slot in slots:
        try:
            header = slot.header()
        except DamageError:
            continue
        if header.state is SlotState.SEALED and header.stamp == stamp:
            return slot
    return None
