"""`python -m tests.fuzz [--inputs N] [--seed S] [NAME ...]`: each decoder, or those of these names,
under N inputs. Fails on an error that a decoder may not raise, on taking what nobody wrote, on
one input that takes more than a few seconds, and on memory beyond a bound."""

from __future__ import annotations

import argparse
import resource
import signal
import sys
import time
from collections.abc import Sequence

from keepstep.model.units import GIB, MIB
from tests.fuzz.decoders import all_decoders
from tests.fuzz.fuzz import fuzz

PATIENCE_S = 20  # of the processor's time, for a batch
BATCH = 1000
MORE_BYTES = 2 * GIB  # of addresses, beyond what it begins with


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args(words)
    bound_memory()
    signal.signal(signal.SIGPROF, _too_long)
    failed = 0
    for name, decoder in all_decoders().items():
        if asked.names and name not in asked.names:
            continue
        began = time.monotonic()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        refused = 0
        try:
            for first in range(0, asked.inputs, BATCH):
                signal.setitimer(signal.ITIMER_PROF, PATIENCE_S)
                count = min(BATCH, asked.inputs - first)
                refused += fuzz(decoder, f"{asked.seed}/{name}/{first}", count)
        except AssertionError as error:
            print(f"{name}: {error}")
            failed += 1
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        took = time.monotonic() - began
        print(
            f"{name}: {asked.inputs} inputs, {refused} refused, {took:.1f} s, "
            f"{grown / MIB:.0f} MiB more",
            flush=True,
        )
    return 1 if failed else 0


def bound_memory() -> None:
    """An allocation beyond it raises MemoryError, which no decoder may."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (used + MORE_BYTES, hard))


def _too_long(*_: object) -> None:
    raise AssertionError(f"no end within {PATIENCE_S} s of computing")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
