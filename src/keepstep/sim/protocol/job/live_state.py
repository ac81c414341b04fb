"""Live state: the state of a simulated training, as `ports.LiveState`: bytes that the oracle knows.

A copy reads the state when its act comes, not when it was asked for: a training that goes on before
the copy's fence shows in the snapshot. An operation that changes the state in place takes a while,
and raises the version behind its last byte, as torch's do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from keepstep.coding.checksum import block_checksums
from keepstep.edge.shm.slot import Slot
from keepstep.errors import LayoutError
from keepstep.model.layout import Layout, TensorSpec, lay_out
from keepstep.model.numbers import NotFinite
from keepstep.model.replicas import Replicas
from keepstep.model.snapshot import SlotHeader
from keepstep.model.units import KIB
from keepstep.ports import Acts, Gathered

MANIFEST_BYTES = 4 * KIB
OBJECTS = b"simulated"  # what a real state has besides tensors

ReadCheckpoint = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class SimGathered:
    """See `ports.Gathered`."""

    layout: Layout
    remark: str = ""

    @property
    def payload_bytes(self) -> int:
        return self.layout.objects_offset + len(OBJECTS)


class SimCopy:
    """See `ports.StateCopy`. `then` is called when it is over."""

    copy_ns = 0

    def __init__(
        self, live: SimState, gathered: SimGathered, slot: Slot, lacking: frozenset[int]
    ) -> None:
        self._live = live
        self._lacking = lacking
        self._gathered = gathered
        self._slot = slot
        self._then: list[Callable[[], None]] = []
        self._is_eager = live.is_eager
        self._version = live.version
        self._is_settled = False
        self.moved: Sequence[str] = ()
        self.sums: Mapping[int, int] = {}
        self.digests: Mapping[int, int] = {}
        self.is_over = False

    def copy_moving(self) -> None:
        at = self._gathered.layout.objects_offset
        self._slot.payload[at : at + len(OBJECTS)] = OBJECTS
        if self._is_eager:
            self._slot.payload[: len(self._live.state)] = self._live.state

    def copy_still(self) -> Acts[None]:
        half = len(self._live.state) // 2
        yield
        if not self._is_eager:
            seen = bytearray(self._live.state)
            self._put(seen, 0, half)
            yield
            seen[half:] = self._live.state[half:]
            self._put(seen, half, len(seen))
            self._take_sums(seen)
        self.end()
        self._compare()

    def _put(self, seen: bytearray, begin: int, end: int) -> None:
        """What of these bytes is not with other ranks."""
        size = self._slot.block_bytes
        if not self._lacking:
            self._slot.payload[begin:end] = seen[begin:end]
            return
        for block in range(begin // size, -(-end // size)):
            if block not in self._lacking:
                at, stop = max(begin, block * size), min(end, (block + 1) * size)
                self._slot.payload[at:stop] = seen[at:stop]

    def _take_sums(self, seen: bytearray) -> None:
        """Of the blocks that hold nothing but the state."""
        size = self._slot.block_bytes
        whole = memoryview(seen)[: len(seen) // size * size]
        self.sums = dict(enumerate(block_checksums(whole, size)))

    def settle(self) -> Acts[None]:
        yield
        while self._live.is_changing and not self._is_settled:
            yield
        self._settle()

    def not_finite(self) -> NotFinite:
        """Bytes are finite."""
        return NotFinite()

    is_on_device = False

    def fence(self, update: object = None) -> bool:
        assert self.is_over, "a simulated program waits for `when_over`"
        self._settle()
        return True

    def waited_ns(self) -> int | None:
        return 0

    def passed(self) -> None:
        if self.is_over:
            self._settle()

    def _settle(self) -> None:
        if not self._is_settled:
            self._is_settled = True
            self._compare()

    def _compare(self) -> None:
        if not self._is_eager and self._live.version != self._version:
            self.moved = ("state",)

    def when_over(self, then: Callable[[], None]) -> None:
        """`then` is called when the state may be overwritten."""
        if self.is_over:
            then()
        else:
            self._then.append(then)

    def end(self) -> None:
        if not self.is_over:
            self.is_over = True
            for then in self._then:
                then()


def payload_of(state: bytes) -> bytes:
    """What a snapshot of that state has as its payload."""
    layout = lay_out([TensorSpec("state", "uint8", (len(state),), len(state))])
    at = layout.objects_offset
    return state.ljust(at, b"\0") + OBJECTS


class SimState:
    """One rank's. `read_checkpoint`: this rank's state after a step, from the store; raises as
    `load_checkpoint` does. `alike`: the ranks that have the same state, this one among them."""

    def __init__(
        self, nbytes: int, read_checkpoint: ReadCheckpoint, alike: tuple[int, ...] = ()
    ) -> None:
        self._nbytes = nbytes
        self._shared: Replicas | None = None
        if len(alike) > 1:
            why = "the simulated program says so"
            spans = ((8, nbytes - 8),)  # as where a block begins with another tensor
            self._shared = Replicas(alike, 1 + alike[0], (0,), spans, True, why)
        self._read_checkpoint = read_checkpoint
        self._layout = lay_out([TensorSpec("state", "uint8", (nbytes,), nbytes)])
        self.state = b""  # before anything was loaded or computed
        self.version = 0
        self.is_changing = False
        self.is_eager = False

    def change_half(self, is_first: bool) -> None:
        """An operation in place, at work. Doing it again takes it back."""
        self.is_changing = True
        half = len(self.state) // 2
        first, second = self.state[:half], self.state[half:]
        if is_first:
            first = bytes(byte ^ 1 for byte in first)
        else:
            second = bytes(byte ^ 1 for byte in second)
        self.state = first + second

    def changed(self) -> None:
        """It is over: now it shows in the version."""
        self.version += 1
        self.is_changing = False

    def gather(self) -> SimGathered:
        return SimGathered(self._layout)

    def copy(
        self,
        gathered: Gathered,
        slot: Slot,
        lacking: frozenset[int] = frozenset(),
        shared: frozenset[int] = frozenset(),
    ) -> SimCopy:
        assert isinstance(gathered, SimGathered)
        return SimCopy(self, gathered, slot, lacking)

    def still_blocks(self, gathered: Gathered, block_bytes: int) -> frozenset[int]:
        return frozenset() if self.is_eager else frozenset(range(self._nbytes // block_bytes))

    def replicas(self, gathered: Gathered) -> Replicas | None:
        return self._shared

    def copy_eagerly(self, names: Sequence[str]) -> None:
        self.is_eager = True

    def coming_bytes(self) -> tuple[int, int, str]:
        return self.gather().payload_bytes, MANIFEST_BYTES, ""

    def device_behind(self) -> None:
        """There is no device."""

    def restoring_bytes(self) -> int:
        return 0

    def pin(self, slot: Slot) -> str | None:
        """There is no device."""

    def load(self, slot: Slot, header: SlotHeader, layout: Layout) -> list[str]:
        if layout != self._layout:
            raise LayoutError(f"{slot.path}: expected {self._layout}, found {layout}")
        self.state = bytes(slot.payload[: self._nbytes])
        return []

    def differing(self, slot: Slot, header: SlotHeader, layout: Layout) -> list[str]:
        slot.verify()
        return [] if bytes(slot.payload[: self._nbytes]) == self.state else ["state"]

    def load_checkpoint(self, step: int) -> list[str]:
        self.state = self._read_checkpoint(step)
        return []

    def caveats(self) -> list[str]:
        return []
