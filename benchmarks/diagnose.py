"""How long `keepstep diagnose` takes for 100 MB of logs of eight ranks.

    python benchmarks/diagnose.py

Three kinds of logs: of steps alone; with one line in ten of different words, as programs that print
samples have; and one in which every line is an error of its own.
"""

from __future__ import annotations

import random
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import harness  # beside this file: it is started as a script

from keepstep.cli.log_reading import read_verdict

TOTAL_BYTES = 100_000_000
RANKS = 8
CULPRIT = 5
CAUSE = f"[rank{CULPRIT}]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def step(number: int, draw: random.Random) -> str:
    return (
        f"2026-03-14 10:{number % 60:02d}:17,123 INFO trainer: step {number} | "
        f"loss {draw.random():.4f} | lr 1.0e-04 | grad norm {draw.random():.3f} | "
        "tokens/s 123456 | mem 63.4 GiB\n"
    )


def step_or_sample(number: int, draw: random.Random) -> str:
    if number % 10:
        return step(number, draw)
    words = ("".join(draw.choices(LETTERS, k=draw.randrange(2, 9))) for _ in range(30))
    return f"sample {number}: {' '.join(words)}\n"


def error(number: int, draw: random.Random) -> str:
    word = draw.choice(["Error", "CUDA out of memory", "exitcode  :", "Broken pipe", " nranks "])
    return f"RuntimeError: {word} {''.join(draw.choices(LETTERS, k=40))} {word}\n"


KINDS: dict[str, Callable[[int, random.Random], str]] = {
    "steps alone": step,
    "one line in ten of different words": step_or_sample,
    "every line an error": error,
}


def write(folder: Path, line: Callable[[int, random.Random], str]) -> None:
    draw = random.Random(1)
    for rank in range(RANKS):
        size, number = 0, 0
        with open(folder / f"rank{rank}.log", "w") as file:
            while size < TOTAL_BYTES // RANKS:
                size += file.write(line(number, draw))
                number += 1
            if rank == CULPRIT:
                file.write(CAUSE)


def main() -> None:
    watch = harness.watch()
    for name, line in KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), line)
            began_s, cpu_s = time.perf_counter(), time.process_time()
            verdict, *_ = read_verdict(Path(folder))
            took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        assert verdict is not None
        said = f"{verdict.cause.name}, rank {verdict.rank}"
        print(f"{name}: {took_s:.2f} s, {cpu_s:.2f} s of a core; {said}")
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"memory at most: {peak_kib / 1024:.0f} MiB")
    harness.tell(watch.end())


if __name__ == "__main__":
    main()
