"""Device copy: what of one snapshot is on devices, ordered in one go at the boundary.

    what may move       ordered first; the trainer's stream waits for it
    what stands still   in buckets, in the order in which the optimizers overwrite them, each with
                        a landing; an optimizer's step waits for its own (REFT's hierarchical
                        snapshot)

Pieces leave the device by turns, so that a `loss.item()` of the trainer's waits for a turn and not
for a tensor. Blocks that replicas share (REFT) are digested where they are, behind the copies of
their bucket, and of what others keep nothing leaves the device. What is to be finite is looked at
there, too. Frozen tensors that the slot has already are digested in place of being copied, behind
everything else; nobody waits for that.

Comes in: buckets, which `copy_plans.py` has worked out, and streams. Goes out: bytes in the slot,
which blocks of it are whole after which landing, digests, suspects. Decides nothing. What it orders
is tried on a fake device that reorders (`tests/edge/torch/test_device_order.py`), and on a real one
in `tests/gpu`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from keepstep.coding.checksum import checksum, in_threads
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch.copy_stream import CopyStream, Landing, TimedWait
from keepstep.edge.torch.device_digests import BlockDigests
from keepstep.edge.torch.digests import DigestPiece
from keepstep.edge.torch.frozen_digests import FrozenDigests
from keepstep.edge.torch.numbers.device_looks import DeviceLooks, Stretch
from keepstep.edge.torch.plan import Pair
from keepstep.edge.torch.tree import AT_BOUNDARY
from keepstep.model.layout import Segment
from keepstep.model.units import MIB

TURN_BYTES = 64 * MIB  # a millisecond of the bus
FIRST = AT_BOUNDARY[0]  # the bucket of what may move

Streams = Mapping[torch.device, CopyStream]


@dataclass(eq=False)
class Run:
    """Small tensors side by side: into `packed`, which is cut in `parts` for them, and from there
    to the host as one, but for what others keep: `hosts` get what is `leaving`."""

    packed: torch.Tensor
    parts: list[torch.Tensor]
    sources: list[torch.Tensor]
    hosts: list[torch.Tensor] = field(default_factory=list)
    leaving: list[torch.Tensor] = field(default_factory=list)
    digested: list[DigestPiece] = field(default_factory=list)
    looks: list[Stretch] = field(default_factory=list)


@dataclass(eq=False)
class BusTurn:
    """Pieces that are ordered in one go, and what else leaves the device waits for."""

    hosts: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    nbytes: int = 0


@dataclass(eq=False)
class Bucket:
    """What leaves one device, or is digested there, under one landing. `optimizer`: whose update
    overwrites it; `blocks`: of the slot, that are whole once it has landed."""

    device: torch.device
    optimizer: int
    turns: list[BusTurn] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    digested: list[DigestPiece] = field(default_factory=list)
    looks: list[Stretch] = field(default_factory=list)

    def order(self, stream: CopyStream) -> Landing:
        for run in self.runs:
            stream.take_turns()
            stream.clear(run.packed)  # what lies between the tensors, too
            stream.copy(run.parts, run.sources)
            if run.hosts:
                stream.copy(run.hosts, run.leaving)
            _read_there(stream, run)
        for pieces in self.turns:
            stream.take_turns()
            stream.copy(pieces.hosts, pieces.sources)
        _read_there(stream, self)
        return stream.mark()

    @property
    def leaving_bytes(self) -> int:
        """That cross the bus."""
        by_runs = sum(part.nbytes for run in self.runs for part in run.leaving)
        return by_runs + sum(turn.nbytes for turn in self.turns)

    def add(self, host: torch.Tensor, source: torch.Tensor) -> None:
        """One more piece."""
        if not self.turns or self.turns[-1].nbytes + host.nbytes > TURN_BYTES:
            self.turns.append(BusTurn())
        turn = self.turns[-1]
        turn.hosts.append(host)
        turn.sources.append(source)
        turn.nbytes += host.nbytes


def _read_there(stream: CopyStream, of: Run | Bucket) -> None:
    """What is digested and looked at where it is, behind what was ordered of it."""
    for piece in of.digested:
        stream.digest(piece)
    for look in of.looks:
        stream.look(look)


class DeviceCopy:
    """One snapshot's. All but `hash_landed` on the trainer's thread; `order_still` on another one
    where the slot's memory is not locked, because it would hold the trainer."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        streams: Streams,
        digests: BlockDigests | None = None,
        looks: DeviceLooks | None = None,
        frozen: FrozenDigests | None = None,
        compared: Sequence[Bucket] = (),
    ) -> None:
        """`compared`: where `frozen` ones are digested alone; else they are in `buckets`."""
        self._buckets = buckets
        self._compared = compared
        self.frozen = frozen
        self._streams = streams
        self._digests = digests
        self._looks = looks
        self._host_sums: torch.Tensor | None = None
        self._read_back: list[Landing] = []
        self._landings: list[tuple[Bucket, Landing]] = []
        self._reached: list[Landing] = []  # the boundary, by each device
        self._led: set[int] = set()  # optimizers whose updates are behind the copies already
        self._waits: list[TimedWait] = []
        self.is_ordered = False

    @property
    def has_any(self) -> bool:
        return bool(self._buckets or self._compared)

    @property
    def compares(self) -> bool:
        """Whether frozen tensors are digested in place of being copied."""
        return bool(self._compared)

    @property
    def is_captured(self) -> bool:
        return any(stream.is_captured for stream in self._streams.values())

    def order_moving(self) -> None:
        """What follows on the device waits for these, and the trainer does not."""
        for stream in self._streams.values():
            stream.follow()
            self._reached.append(stream.mark())
        if self.frozen is not None:
            self.frozen.begin(self._streams)
        for bucket in self._buckets:
            if bucket.optimizer == FIRST:
                self._order(bucket)
        self._lead({FIRST})

    def order_still(self) -> None:
        if self._digests is not None:
            self._digests.begin(self._streams)
        for bucket in self._buckets:
            if bucket.optimizer != FIRST:
                self._order(bucket)
        for bucket in self._compared:
            bucket.order(self._streams[bucket.device])
        for read in (self._digests, self._looks, self.frozen):
            if read is not None:
                self._read_back += read.read_back(self._streams)
        self.is_ordered = True

    @property
    def digested(self) -> Collection[int]:
        """The blocks of which digests are taken."""
        return () if self._digests is None else self._digests.blocks

    @property
    def leaving_bytes(self) -> int:
        """That cross the bus."""
        return sum(bucket.leaving_bytes for bucket in self._buckets)

    @property
    def looks(self) -> bool:
        """Whether devices look at what they give."""
        return self._looks is not None

    def suspects(self) -> list[Pair]:
        """What may not be finite, once all has landed."""
        return [] if self._looks is None else self._looks.suspects()

    def digest_host(self) -> None:
        """What of these blocks lies on the host, before an update moves it."""
        if self._digests is not None:
            self._host_sums = self._digests.host_sums()

    def digests(self) -> dict[int, int]:
        """By block. Waits for the device. Raises RuntimeError when one has failed."""
        if self._digests is None:
            return {}
        assert self._host_sums is not None, "what lies on the host was not digested"
        for landing in self._read_back:
            landing.wait()
        return self._digests.found(self._host_sums)

    def _order(self, bucket: Bucket) -> None:
        landing = bucket.order(self._streams[bucket.device])
        self._landings.append((bucket, landing))

    def lead(self, optimizer: int | None) -> bool:
        """An update of that optimizer, or of any (None), comes next: it waits on the device for
        what it overwrites. Whether every update may come now."""
        theirs = {bucket.optimizer for bucket in self._buckets}
        self._lead(theirs if optimizer is None else {optimizer})
        return theirs <= self._led

    def _lead(self, optimizers: set[int]) -> None:
        wanted = optimizers - self._led
        self._led |= wanted
        last: dict[torch.device, Landing] = {}  # a stream's copies land in the order of ordering
        for bucket, landing in self._landings:
            if bucket.optimizer in wanted:
                last[bucket.device] = landing
        for device, landing in last.items():
            if not landing.is_over():
                self._waits.append(self._streams[device].lead(landing))

    def wait_begun(self) -> None:
        """On the host, until the devices have come to the boundary. Raises RuntimeError when one
        has failed."""
        for reached in self._reached:
            reached.wait()

    def wait(self) -> None:
        """On the host, until all that is ordered has landed. Raises RuntimeError when a device has
        failed."""
        for landing in [*(landing for _, landing in self._landings), *self._read_back]:
            landing.wait()

    def hash_landed(self, slot: Slot, payload_bytes: int, threads: int) -> dict[int, int]:
        """Wait for each bucket in turn, and take the checksums of the blocks that are whole then,
        while the next one comes. Raises RuntimeError when a device has failed."""
        payload, size = slot.payload, slot.block_bytes
        sums: dict[int, int] = {}
        for bucket, landing in self._landings:
            landing.wait()
            blocks = bucket.blocks

            def sum_of(number: int, blocks: Sequence[int] = blocks) -> int:
                at = blocks[number] * size
                return checksum(payload[at : min(at + size, payload_bytes)])

            found = in_threads(sum_of, range(len(blocks)), threads)
            sums.update(zip(blocks, found, strict=True))
        return sums

    def waited_ns(self) -> int | None:
        """How long devices have waited for these copies; None while that is not known."""
        waited = [wait.ns() for wait in self._waits]
        known = [ns for ns in waited if ns is not None]
        return sum(known) if len(known) == len(waited) else None
