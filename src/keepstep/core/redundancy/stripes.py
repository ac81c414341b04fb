"""Parity: decides which byte ranges of which members are combined, where the result lies, and what
a lost member is rebuilt from.

Comes in: the members of a group, how many losses it tolerates (t), and how many bytes each has.
Goes out: plans, lists of `Combine`: "these targets are the code's sum of these sources". Never
touches a byte and knows no coefficients: a piece carries its position in its codeword, and
`coding.reed_solomon.solve` knows how positions depend on each other.

The layout, for G members, t of them lost at most, k = G - t:

* Each member's bytes are cut into k blocks of one size, a multiple of 64; what is missing at the
  end counts as zeros. Long ones are a multiple of what shares a checksum in a slot: then every
  piece that crosses has one in its owner's table already, and every piece of a parity in its own.
* There are G codewords, each with one block of every member: codeword c has its parity rows 0..t-1
  on members c, c+1, .., c+t-1 (cyclically) and data on the others. So each member keeps t parity
  blocks beside its k data blocks, and any t members may be lost.
* With t = 1 this is REFT's rotating parity: the parity over everybody's block but s's lies on s.

Invariant: every data byte is in exactly one codeword, and a codeword never has two blocks on one
member.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from keepstep.model.layout import ALIGN_BYTES
from keepstep.model.units import round_up

LONG = 8  # checksums in a block: from here on it is worth one more, of which part is empty


class StripeRegion(Enum):
    """Of a member: its own snapshot, or the parity it keeps for the others."""

    DATA = "data"
    PARITY = "parity"


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes start to stop of a member's region, and their place in the codeword: 0..k-1 data, k..
    parity."""

    member: int
    region: StripeRegion
    start: int
    stop: int
    position: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Combine:
    """Write the targets, computed from the k sources. A source shorter than a target (even empty)
    continues as zeros."""

    codeword: int
    sources: tuple[Piece, ...]
    targets: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Stripes:
    """The layout. `data_bytes[i]` belongs to `members[i]`."""

    members: tuple[int, ...]
    tolerates: int
    block_bytes: int
    data_bytes: tuple[int, ...]

    @property
    def k(self) -> int:
        """Data blocks of a codeword, and of a member."""
        return len(self.members) - self.tolerates

    @property
    def parity_bytes(self) -> int:
        """What each member keeps beside its data."""
        return self.tolerates * self.block_bytes

    def piece(self, codeword: int, index: int) -> Piece:
        """The block that `members[index]` has in this codeword."""
        size, t = len(self.members), self.tolerates
        row = (index - codeword) % size
        if row < t:
            return Piece(
                self.members[index],
                StripeRegion.PARITY,
                row * self.block_bytes,
                (row + 1) * self.block_bytes,
                self.k + row,
            )
        # Data blocks in the order of their codewords, without those in which this member keeps
        # parity.
        block = codeword - sum((index - r) % size < codeword for r in range(t))
        start = min(block * self.block_bytes, self.data_bytes[index])
        stop = min(start + self.block_bytes, self.data_bytes[index])
        return Piece(self.members[index], StripeRegion.DATA, start, stop, row - t)


def stripes_of_snapshots(
    members: Sequence[int],
    tolerates: int,
    data_bytes: Sequence[int],
    checked_bytes: int = ALIGN_BYTES,
) -> Stripes:
    """The layout where every member has bytes of its own, not necessarily equally many.
    `checked_bytes`: so many share a checksum (`Memory.block_bytes`); all members must name the
    same."""
    assert len(members) == len(data_bytes) > tolerates > 0, (
        f"{len(members)} members, {len(data_bytes)} sizes, {tolerates} tolerated"
    )
    block_bytes = _block_bytes(max(data_bytes), len(members) - tolerates, checked_bytes)
    return Stripes(tuple(members), tolerates, block_bytes, tuple(data_bytes))


def _block_bytes(total_bytes: int, blocks: int, checked_bytes: int) -> int:
    least_bytes = -(-total_bytes // blocks)
    is_long = least_bytes >= LONG * checked_bytes
    return round_up(least_bytes, checked_bytes if is_long else ALIGN_BYTES)


def contribution(stripes: Stripes, owner: int, keeper: int) -> list[Piece]:
    """The pieces of `owner`'s data that go into the parity `keeper` keeps."""
    index, size = stripes.members.index(owner), len(stripes.members)
    codewords = [(stripes.members.index(keeper) - row) % size for row in range(stripes.tolerates)]
    pieces = [stripes.piece(codeword, index) for codeword in codewords]
    return [p for p in pieces if p.region is StripeRegion.DATA and p.nbytes]


def decode_plan(stripes: Stripes, lost: Collection[int], member: int) -> list[Combine]:
    """Everything that rebuilds `member`, data and parity, from the members that are not lost; the
    reading is spread evenly."""
    assert member in lost and len(set(lost)) <= stripes.tolerates, (
        f"{sorted(lost)} lost, {stripes.tolerates} tolerated, {member} wanted"
    )
    index, size = stripes.members.index(member), len(stripes.members)
    read_bytes = {i: 0 for i in range(size) if stripes.members[i] not in lost}
    plan = []
    for codeword in range(size):
        target = stripes.piece(codeword, index)
        if target.nbytes == 0:
            continue
        have = [(i, _cut(stripes.piece(codeword, i), 0, target.nbytes)) for i in read_bytes]
        chosen = sorted(
            have,
            key=lambda pair: (read_bytes[pair[0]] + pair[1].nbytes, (pair[0] - codeword) % size),
        )[: stripes.k]
        for i, piece in chosen:
            read_bytes[i] += piece.nbytes
        sources = sorted((piece for _, piece in chosen), key=lambda p: p.position)
        plan.append(Combine(codeword, tuple(sources), (target,)))
    return plan


def chunks(combine: Combine, chunk_bytes: int) -> Iterator[Combine]:
    """The same work in steps of at most `chunk_bytes` a piece, so that it can follow the
    network."""
    for at in range(0, max(p.nbytes for p in combine.targets), chunk_bytes):
        sources = tuple(_cut(p, at, chunk_bytes) for p in combine.sources)
        targets = tuple(cut for p in combine.targets if (cut := _cut(p, at, chunk_bytes)).nbytes)
        yield Combine(combine.codeword, sources, targets)


def _cut(piece: Piece, at: int, nbytes: int) -> Piece:
    start = min(piece.start + at, piece.stop)
    return replace(piece, start=start, stop=min(start + nbytes, piece.stop))
