"""Reference: the same fixed work on each rank's processors, in a process of its own.

Comes in: ranks and their processes. Goes out: how much processor time it took there, several times;
the ranks by turns, so that what changes meanwhile meets all of them. It takes a quarter of a second
of a core in all, and is killed when it is late: `core/detection/reference.py` says what it means.

    python -m keepstep.edge.probes.reference 0:4711 1:4712
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping

from keepstep.edge.os.own_modules import module_words
from keepstep.model.decoding import an_object, from_json
from keepstep.model.step_work import FixedWork
from keepstep.model.units import MIB, MS_NS, S_NS

TRIES = 5
WORK_BYTES = MIB  # hashed by one thread: it fits into a core's cache
TRY_NS = 8 * MS_NS  # about


def measure(pids: Mapping[int, int], within_ns: int) -> dict[int, FixedWork]:
    """By rank; empty where it could not be done in that time."""
    words = [f"{rank}:{pid}" for rank, pid in pids.items()]
    command = [sys.executable, *module_words(__name__, *words)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=within_ns / S_NS,
            check=True,
        )
        said = an_object(from_json(done.stdout))
        return {
            int(rank): FixedWork(frozenset(processors), tuple(tries_ns))
            for rank, (processors, tries_ns) in said.items()
        }
    except (OSError, subprocess.SubprocessError, ValueError, TypeError):
        return {}


def main() -> None:
    """Writes what `measure` reads."""
    where = {}
    for word in sys.argv[1:]:
        said, _, pid = word.partition(":")
        try:
            where[int(said)] = os.sched_getaffinity(int(pid))
        except OSError:  # it is gone
            continue
    rounds = max(1, TRY_NS // max(1, _hash_ns(1)))
    tries: dict[int, list[int]] = {rank: [] for rank in where}
    for _ in range(TRIES):
        for rank, processors in where.items():
            try:
                os.sched_setaffinity(0, processors)
            except OSError:  # not ours to use
                continue
            tries[rank].append(_hash_ns(rounds))
    print(json.dumps({rank: (sorted(where[rank]), tries[rank]) for rank in where}))


def _hash_ns(rounds: int) -> int:
    """Processor time of so many rounds."""
    text = bytes(WORK_BYTES)
    begun_ns = time.thread_time_ns()
    for _ in range(rounds):
        hashlib.blake2b(text).digest()
    return time.thread_time_ns() - begun_ns


if __name__ == "__main__":
    main()
