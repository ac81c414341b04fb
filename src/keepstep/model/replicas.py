"""Replicas: which tensors of a rank's state other ranks have, too, and where they were found to
differ. `core/detection/replicas.py` decides about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from keepstep.model.bounds import Rank
from keepstep.model.layout import Layout
from keepstep.model.shares import runs_of
from keepstep.model.snapshot import Stamp

NAMED = 8  # ranks or tensors in a sentence
_IN_BLOCKS = 0x626C6F636B73  # a digest of blocks is another one than that of the same tensors


@dataclass(frozen=True, slots=True)
class Replicas:
    """Tensors of a rank's state that are the same on all `ranks`.

    group: equal on ranks that have the same tensors in the same places, never 0.
    segments: the numbers of the tensors in the layout.
    spans: where they lie in a payload, offset and bytes.
    is_claimed: somebody says that they are replicated; else only that they may be. `why`: who.
    """

    ranks: tuple[int, ...]
    group: int
    segments: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    is_claimed: bool
    why: str

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.spans)

    def in_blocks(self, layout: Layout, block_bytes: int) -> Replicas | None:
        """The same, as far as it can be told from the checksums of whole blocks: those that hold
        nothing but these tensors. None when there is no such block."""
        theirs: set[int] = set()
        others: set[int] = set()
        chosen = set(self.segments)
        for index, segment in enumerate(layout.segments):
            if segment.spec.nbytes:
                blocks = range(segment.offset // block_bytes, (segment.end - 1) // block_bytes + 1)
                (theirs if index in chosen else others).update(blocks)
        others.add(layout.objects_offset // block_bytes)  # where each rank's pickles begin
        runs = runs_of(theirs - others)
        spans = tuple((first * block_bytes, count * block_bytes) for first, count in runs)
        return replace(self, group=self.group ^ _IN_BLOCKS | 1, spans=spans) if spans else None


@dataclass(frozen=True, slots=True)
class ReplicaDifference:
    """The ranks of a group differ from `stamp` on. `ranks`: those that have not what most have;
    where nobody can say who is wrong, all of them. `of`: so many ranks are in the group."""

    stamp: Stamp
    ranks: tuple[Rank, ...]
    of: Rank
    is_certain: bool
    condemns: bool

    def is_condemned(self, stamp: Stamp) -> bool:
        """Whether that stamp is of the computation that went wrong, and not from before."""
        return self.condemns and stamp.epoch == self.stamp.epoch and stamp.step >= self.stamp.step

    def sentence(self, tensors: str = "") -> str:
        """What happened, in one. `tensors`: where, if that is known."""
        where = f" in {tensors}" if tensors else ""
        if self.is_certain:
            one = len(self.ranks) == 1
            who = f"rank{'' if one else 's'} {ranks_in_words(self.ranks)}"
            rest = self.of - len(self.ranks)
            differs = f"differ{'s' if one else ''}"
            told = f"{who} {differs} from the {rest} other replicas{where}"
        else:
            who = ranks_in_words(self.ranks)
            told = f"the replicas on ranks {who} differ{where}, and none of them has a majority"
        return f"silent corruption: {told}, since {self.stamp}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """The first of them, and how many more."""
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    return ", ".join(map(str, ranks[:NAMED])) + more
