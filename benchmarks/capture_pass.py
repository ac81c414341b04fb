"""Is a snapshot copied and hashed faster in one pass than in two?

`two passes` is what a capture does: memcpy tensor by tensor into the slot, then XXH3-64 of each 4
MiB block. `one pass` copies pieces and hashes each where it was written, while it is in the cache.
`memcpy` is the copy alone, as large calls (which write past the cache) and in the same pieces
(which do not). All on one thread, without the GIL, from memory to a mapped file of /dev/shm whose
pages are there. Schemes take turns; CPU time, because other processes share the cores.

    python benchmarks/capture_pass.py
    python benchmarks/capture_pass.py --mib 512 --rounds 30 --json

And what a small tensor costs beside its bytes: `tensor by tensor` copies each by a memcpy of its
own, from a list that is made each time, as it was; `table` is what a capture does now; `compared`
reads tensor and slot, and writes and hashes nothing, as if all were found unchanged.

    python benchmarks/capture_pass.py --tensors 300 5000 --bytes 256
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness  # beside this file: it is started as a script

from keepstep.coding.checksum import BLOCK_BYTES, block_checksums, running_checksum
from keepstep.edge.shm.copy_table import WINDOW_BYTES, CopyTable, SlotCopy
from keepstep.edge.shm.memory import MEMORY, MappedFile, copy, copy_all, equal
from keepstep.edge.shm.one_pass import copy_and_hash
from keepstep.edge.shm.slot import Slot
from keepstep.model.layout import ALIGN_BYTES
from keepstep.model.units import GIB, KIB, MIB, round_up

TENSOR_BYTES = 2 * MIB + 64  # no multiple of a block


def in_pieces(source: int, target: MappedFile, nbytes: int, piece_bytes: int) -> None:
    for at in range(0, nbytes, piece_bytes):
        copy(target.address + at, source + at, min(piece_bytes, nbytes - at))


def one_pass(source: int, target: MappedFile, nbytes: int, piece_bytes: int) -> list[int]:
    """The blocks' checksums."""
    sums = []
    for block in range(0, nbytes, BLOCK_BYTES):
        running = running_checksum()
        end = min(block + BLOCK_BYTES, nbytes)
        for at in range(block, end, piece_bytes):
            stop = min(at + piece_bytes, end)
            copy(target.address + at, source + at, stop - at)
            running.update(target.view[at:stop])
        sums.append(running.intdigest())
    return sums


def by_tensors(source: int, target: MappedFile, nbytes: int) -> None:
    copy_all(
        (target.address + at, source + at, min(TENSOR_BYTES, nbytes - at))
        for at in range(0, nbytes, TENSOR_BYTES)
    )


def compare(nbytes: int, rounds: int, directory: Path) -> dict[str, float]:
    """CPU seconds for each GiB, medians."""
    source = (ctypes.c_char * nbytes)()
    memoryview(source).cast("B")[:] = os.urandom(MIB) * (nbytes // MIB)
    begin = ctypes.addressof(source)
    target = MEMORY.ensure(directory / "slot", nbytes)
    target.prefault()

    def two_passes() -> list[int]:
        by_tensors(begin, target, nbytes)
        return block_checksums(target.view)

    schemes: dict[str, Callable[[], object]] = {
        "memcpy": lambda: by_tensors(begin, target, nbytes),
        "two passes": two_passes,
    }
    for piece_bytes in (256 * KIB, MIB, 4 * MIB):
        name = f"{piece_bytes // KIB} KiB"
        schemes[f"memcpy {name}"] = lambda p=piece_bytes: in_pieces(begin, target, nbytes, p)  # type: ignore[misc]
        schemes[f"one pass {name}"] = lambda p=piece_bytes: one_pass(begin, target, nbytes, p)  # type: ignore[misc]
    assert one_pass(begin, target, nbytes, 256 * KIB) == two_passes()
    taken: dict[str, list[float]] = {name: [] for name in schemes}
    names = list(schemes)
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began = time.process_time()
            schemes[name]()
            if turn:
                taken[name].append((time.process_time() - began) * GIB / nbytes)
    target.close()
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def tensor_by_tensor(slot: Slot, places: Sequence[tuple[int, int, int]], end: int) -> list[int]:
    """Small copies as they were until there was a table. Returns the blocks' checksums."""
    rest = sorted(SlotCopy(*place) for place in places)
    sums, done, base = [], 0, slot.payload_address
    for block in range(0, end, slot.block_bytes):
        running = running_checksum()
        for at in range(block, min(block + slot.block_bytes, end), WINDOW_BYTES):
            stop = min(at + WINDOW_BYTES, block + slot.block_bytes, end)
            first = done
            while done < len(rest) and rest[done].offset < stop:
                done += 1
            copy_all((base + o, source, nbytes) for o, source, nbytes in rest[first:done])
            running.update(slot.payload[at:stop])
        sums.append(running.intdigest())
    return sums


def compare_small(tensors: int, nbytes: int, rounds: int, directory: Path) -> dict[str, float]:
    """CPU microseconds for each tensor, medians."""
    stride = round_up(nbytes, ALIGN_BYTES)
    end = tensors * stride
    made = [ctypes.create_string_buffer(os.urandom(nbytes), nbytes) for _ in range(tensors)]
    places = [(i * stride, ctypes.addressof(one), nbytes) for i, one in enumerate(made)]
    slot = Slot.create(MEMORY, directory / "small", end, 1)
    base = slot.payload_address
    table = CopyTable(SlotCopy(*place) for place in places)
    schemes: dict[str, Callable[[], object]] = {
        "tensor by tensor": lambda: tensor_by_tensor(slot, places, end),
        "table": lambda: copy_and_hash(slot, [table], end, (), lambda: False),
        "compared": lambda: all(equal(base + at, source, size) for at, source, size in places),
    }
    assert list(copy_and_hash(slot, [table], end, (), lambda: False).values()) == tensor_by_tensor(
        slot, places, end
    )
    taken: dict[str, list[float]] = {name: [] for name in schemes}
    other = ctypes.create_string_buffer(8 * MIB)  # what training does to the cache
    for _ in range(rounds):
        for name, scheme in schemes.items():
            ctypes.memset(other, 0, len(other))
            began = time.thread_time()
            scheme()
            taken[name].append((time.thread_time() - began) * 1e6 / tensors)
    slot.close()
    return {name: statistics.median(times) for name, times in taken.items()}


def tell_small(args: argparse.Namespace, room: Path) -> None:
    for tensors in args.tensors:
        figures = compare_small(tensors, args.bytes, args.rounds, room)
        words = ", ".join(f"{name} {us:.3f}" for name, us in figures.items())
        load = os.getloadavg()[0]
        print(f"{tensors:6} tensors of {args.bytes} bytes, us each: {words}  [load {load:.1f}]")


def show(report: dict[str, Any]) -> None:
    figures, load = report["cpu_s_per_gib"], report["load"]
    for name, seconds in figures.items():
        share = 100 * seconds / figures["memcpy"]
        print(f"{name:18} {seconds:5.3f} CPU s/GiB  {share:4.0f} % of memcpy  [load {load:.1f}]")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tensors", type=int, nargs="+", help="compare small tensors")
    parser.add_argument("--bytes", type=int, default=256, help="of each small tensor")
    args = parser.parse_args()
    watch = harness.watch()
    with tempfile.TemporaryDirectory(prefix="capture-pass-", dir="/dev/shm") as room:
        if args.tensors:
            tell_small(args, Path(room))
            harness.tell(watch.end())
            return
        figures = compare(args.mib * MIB, args.rounds, Path(room))
    report = {"mib": args.mib, "cpu_s_per_gib": figures, "load": os.getloadavg()[0]}
    harness.tell(watch.end(), report, args.json, show)


if __name__ == "__main__":
    main()
