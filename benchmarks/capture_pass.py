"""Is a snapshot copied and hashed faster in one pass than in two?

`two passes` is what a capture does: memcpy tensor by tensor into the slot, then XXH3-64 of each 4
MiB block. `one pass` copies pieces and hashes each where it was written, while it is in the cache.
`memcpy` is the copy alone, as large calls (which write past the cache) and in the same pieces
(which do not). All on one thread, without the GIL, from memory to a mapped file of /dev/shm whose
pages are there. Schemes take turns; CPU time, because other processes share the cores.

    python benchmarks/capture_pass.py
    python benchmarks/capture_pass.py --mib 512 --rounds 30 --json
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from keepstep.coding.checksum import BLOCK_BYTES, block_checksums, running_checksum
from keepstep.edge.shm.memory import MEMORY, MappedFile, copy, copy_all
from keepstep.model.units import GIB, KIB, MIB

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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="capture-pass-", dir="/dev/shm") as room:
        figures = compare(args.mib * MIB, args.rounds, Path(room))
    load = os.getloadavg()[0]
    if args.json:
        print(json.dumps({"mib": args.mib, "cpu_s_per_gib": figures, "load": load}))
        return
    for name, seconds in figures.items():
        share = 100 * seconds / figures["memcpy"]
        print(f"{name:18} {seconds:5.3f} CPU s/GiB  {share:4.0f} % of memcpy  [load {load:.1f}]")


if __name__ == "__main__":
    main()
