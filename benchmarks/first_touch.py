"""What the first touch of a slot costs who reads it, and what a map that was filled before saves:

    python benchmarks/first_touch.py --mib 1024 --rounds 7

By turns, each in a process of its own: a file in memory is mapped and hashed, as a restore proves a
slot; `filled`: after the kernel was asked for all of its pages (MADV_POPULATE_READ), which is told
apart. CPU seconds, and the faults that the reading took.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import harness  # beside this file: it is started as a script

from keepstep.coding.checksum import block_checksums
from keepstep.edge.shm.memory import MEMORY
from keepstep.model.units import MIB

POPULATE_READ = 22
WAYS = ("new", "filled")


def spent(work: Callable[[], object]) -> tuple[float, int]:
    """CPU seconds and minor faults."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    work()
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu_s, after.ru_minflt - before.ru_minflt


def read(path: Path, way: str) -> None:
    slot, libc = MEMORY.open(path), ctypes.CDLL(None, use_errno=True)
    place = ctypes.c_void_p(slot.address), ctypes.c_size_t(slot.nbytes)
    filling_s = 0.0
    if way == "filled":
        filling_s, _ = spent(lambda: libc.madvise(*place, POPULATE_READ))
    reading_s, faults = spent(lambda: block_checksums(slot.view))
    print(json.dumps({"filling_s": filling_s, "reading_s": reading_s, "faults": faults}))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--read", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read:
        read(Path(given.read[0]), given.read[1])
        return
    watch = harness.watch()
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as room:
        path = Path(room, "slot")
        with open(path, "wb") as file:
            for _ in range(given.mib):
                file.write(os.urandom(MIB))
        for row in harness.turns(WAYS, given.rounds):
            for way in row:
                command = [sys.executable, __file__, "--read", str(path), way]
                done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
                found[way].append(json.loads(done.stdout))
    for way, rows in found.items():
        one = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        print(
            f"{given.mib} MiB, {way:6}: read in {one['reading_s']:.3f} CPU s, {one['faults']:.0f} "
            f"faults; filled in {one['filling_s']:.3f}"
        )
    harness.tell(watch.end())


if __name__ == "__main__":
    main()
