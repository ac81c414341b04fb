"""Memory: patterns written to memory of this process and read back, and how fast it is copied.

What is tested is what the kernel gives this process: an anonymous map of so many bytes, larger than
the caches, all of it written before any of it is read. It finds bits that stick, flip or are
coupled, and address lines that lead to the same place; it is no memtest86, which has all of the
machine to itself.
"""

from __future__ import annotations

import hashlib
import mmap
import time
from dataclasses import dataclass

from keepstep.model.units import MIB, S_NS

CHUNK_BYTES = MIB
STRIDE_BYTES = 64  # by which each chunk's pattern is shifted, so that no two neighbours are equal
SHIFTS = 1021  # a prime: chunks that are a power of two apart never have the same shift
UNIFORM = (0x00, 0xFF, 0xAA, 0x55)


@dataclass(frozen=True, slots=True)
class WrongByte:
    """The first byte that came back otherwise. `wrong_bits`: in its chunk."""

    offset: int
    written: int
    read: int
    wrong_bits: int


class Patterns:
    """What is written where. Random bytes that depend on the place, their complement, and bytes
    that are all alike."""

    def __init__(self, seed: int = 0) -> None:
        size = CHUNK_BYTES + STRIDE_BYTES * SHIFTS
        random = hashlib.shake_128(seed.to_bytes(8, "little")).digest(size)
        flipped = bytes(byte ^ 0xFF for byte in range(256))
        self._placed = (random, random.translate(flipped))
        self._uniform = tuple(bytes([byte]) * CHUNK_BYTES for byte in UNIFORM)

    def __len__(self) -> int:
        return len(self._placed) + len(self._uniform)

    def chunk(self, turn: int, index: int) -> bytes:
        """The pattern of a turn for one chunk."""
        if turn < len(self._placed):
            start = index % SHIFTS * STRIDE_BYTES
            return self._placed[turn][start : start + CHUNK_BYTES]
        return self._uniform[turn - len(self._placed)]


def check_memory(total_bytes: int, seed: int = 0) -> WrongByte | None:
    """Write and read back every pattern; the first wrong byte. total_bytes: rounded down to whole
    chunks, at least one."""
    chunks = max(1, total_bytes // CHUNK_BYTES)
    patterns = Patterns(seed)
    with mmap.mmap(-1, chunks * CHUNK_BYTES) as memory:
        for turn in range(len(patterns)):
            for index in range(chunks):
                start = index * CHUNK_BYTES
                memory[start : start + CHUNK_BYTES] = patterns.chunk(turn, index)
            for index in range(chunks):
                start = index * CHUNK_BYTES
                found = first_difference(
                    patterns.chunk(turn, index), memory[start : start + CHUNK_BYTES], start
                )
                if found is not None:
                    return found
    return None


def first_difference(written: bytes, read: bytes, at: int = 0) -> WrongByte | None:
    """Where two chunks of equal size differ. `at`: the offset of the chunk."""
    if written == read:
        return None
    wrong = int.from_bytes(written, "little") ^ int.from_bytes(read, "little")
    place = ((wrong & -wrong).bit_length() - 1) // 8
    return WrongByte(at + place, written[place], read[place], wrong.bit_count())


def can_see() -> bool:
    """The canary: one flipped bit in a chunk is found, and where it is."""
    written = Patterns().chunk(0, 7)
    place = 4321
    read = bytearray(written)
    read[place] ^= 0x10
    found = first_difference(written, bytes(read))
    return (
        found is not None
        and (found.offset, found.wrong_bits) == (place, 1)
        and first_difference(written, bytes(written)) is None
    )


def copy_speeds(size_bytes: int, samples: int) -> list[int]:
    """Bytes copied a second of one thread's processor time, read and written counted once each. So
    what other processes take does not count, and what the memory makes it wait does. The first
    copy, which has the kernel give the memory, is left out."""
    with mmap.mmap(-1, size_bytes) as one, mmap.mmap(-1, size_bytes) as other:
        source, target = memoryview(one), memoryview(other)
        source[:] = Patterns().chunk(0, 0)[:1] * size_bytes
        target[:] = source
        found = []
        for _ in range(samples):
            begun_ns = time.thread_time_ns()
            target[:] = source
            took_ns = max(1, time.thread_time_ns() - begun_ns)
            found.append(2 * size_bytes * S_NS // took_ns)
        source.release()
        target.release()
        return found
