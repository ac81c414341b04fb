"""Decides who is measured when, on which cores, and whether the machine was quiet enough for a
verdict.

In come names, rounds, and what the kernel says of load and CPU; out come an order of turns, a
`Noise` for each span that was watched, and a sentence that says why there is no verdict; a job
under `keepstep run`, run to its end; and runs of several ways in turn, printed as they end. It
measures no contender. Every benchmark calls `watch` before it measures and `tell` at its end.

Invariant: a span in which other processes took more than `OTHERS_CORES_LIMIT` cores, or a run that
began above `LOAD_LIMIT`, never gives a verdict. The load average alone would not do: within a run
it counts what is measured. So CPU time is compared: all that the machine spent, less our own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

LOAD_LIMIT = 0.5  # of the last minute, when a run begins
OTHERS_CORES_LIMIT = 0.15  # of one core, on average over a span: what an idle desktop takes
MARK = "BENCHMARK_RUN"  # in the environment of all that a run starts
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def turns(names: Sequence[str], rounds: int) -> list[list[str]]:
    """Each round has everyone once. The order is turned from round to round and begins one further
    on every second time, so that nobody keeps a place or a neighbour."""
    order = []
    for number in range(rounds):
        first = (number // 2) % max(1, len(names))
        row = [*names[first:], *names[:first]]
        order.append(row[::-1] if number % 2 else row)
    return order


def in_turn(
    ways: Sequence[str],
    args: argparse.Namespace,
    one: Callable[[str, int], dict[str, Any]],
) -> dict[str, Any]:
    """A report of what `one` finds of each way with a seed, the same for all ways of a round.
    args: `rounds`, the first `seed`, and `json`, without which each run is printed as it ends."""
    report: dict[str, Any] = {"runs": []}
    for seed, row in enumerate(turns(ways, args.rounds), start=args.seed):
        for way in row:
            report["runs"].append(one(way, seed))
            if not args.json:
                print(f"  {report['runs'][-1]}", flush=True)
    return report


def tell(
    noise: Noise,
    report: Mapping[str, Any] = MappingProxyType({}),
    as_json: bool = False,
    show: Callable[[dict[str, Any]], None] = lambda told: None,
) -> None:
    """Print it: for programs, or as `show` does (which may have been done while it was measured);
    with the machine, its load, and why there is no verdict, if there is none."""
    told = {
        **report,
        "machine": machine(),
        "noise": asdict(noise),
        "no_verdict": why_no_verdict([noise]),
    }
    if as_json:
        json.dump(told, sys.stdout)
        return
    show(told)
    print(
        f"{told['machine']}; load {noise.load_before:.1f} before, {noise.load_after:.1f} after, "
        f"its own among it; other processes took {noise.others_cores:.2f} cores"
    )
    if told["no_verdict"]:
        print(told["no_verdict"])


def median(values: Iterable[float | None]) -> float | None:
    """Of those that were measured; None when none was."""
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def cores(count: int) -> list[int]:
    """The first cores that this process may use: for all contenders the same ones."""
    return sorted(os.sched_getaffinity(0))[:count]


@contextlib.contextmanager
def trained(
    job: str,
    nproc: int,
    command: Callable[[Path], Sequence[str]],
    within_s: float,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Path]:
    """A job to its end, in a directory of its own in memory, which is there for as long as the
    body. command: what `keepstep run` starts, given that directory. Raises
    subprocess.CalledProcessError, subprocess.TimeoutExpired."""
    home = Path(tempfile.mkdtemp(prefix=f"keepstep-{job}-", dir="/dev/shm"))
    run = [sys.executable, "-m", "keepstep.cli.main", "run", "--nproc-per-node", str(nproc)]
    try:
        subprocess.run(
            [*run, *command(home)],
            env={
                **os.environ,
                "KEEPSTEP_JOB": job,
                "KEEPSTEP_ARENA_DIR": str(home),
                "KEEPSTEP_STATE_DIR": str(home / "state"),
                "KEEPSTEP_GRACE_S": "0",
                "KEEPSTEP_LOG": "quiet",
                **(environ or {}),
            },
            check=True,
            timeout=within_s,
            stdout=subprocess.DEVNULL,
        )
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


def marked(mark: str) -> list[int]:
    """Processes that carry this run's mark, however far down the tree or on their own."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # ended meanwhile, or somebody else's
                continue
    return found


def end_all(mark: str) -> None:
    """SIGKILL for what carries this mark, until nothing does. Not for ourselves."""
    for _ in range(100):
        left = [pid for pid in marked(mark) if pid != os.getpid()]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return
        time.sleep(0.05)


def cpu_s(pids: Iterable[int]) -> float:
    """CPU time of these and of the children they have waited for."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(int(field) for field in fields[11:15])  # user, system, children's of both
    return total / TICKS_PER_S


def machine_cpu_s() -> float:
    """CPU time that anyone has had so far, and what a hypervisor kept from us."""
    fields = Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields[:8])
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


def machine() -> str:
    """What a table of figures names: cores, processor, memory, kernel."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (
        f"{os.cpu_count()} x {' and '.join(sorted(models)) or platform.machine()}, "
        f"{memory_bytes / 2**30:.0f} GiB, Linux {platform.release()}"
    )


@dataclass(frozen=True)
class Noise:
    """What a span was measured in. `others_cores`: how many cores strangers took on average."""

    load_before: float
    load_after: float
    others_cores: float


class Watch:
    """Tells a span's noise. What it reads can be replaced, for tests."""

    def __init__(
        self,
        own_cpu_s: Callable[[], float],
        all_cpu_s: Callable[[], float] = machine_cpu_s,
        load: Callable[[], float] = lambda: os.getloadavg()[0],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own, self._all, self._load, self._clock = own_cpu_s, all_cpu_s, load, clock
        self._began = (clock(), all_cpu_s(), own_cpu_s(), load())

    def end(self) -> Noise:
        began_s, all_before, own_before, load_before = self._began
        took_s = max(self._clock() - began_s, 1e-9)
        others = (self._all() - all_before) - (self._own() - own_before)
        return Noise(load_before, self._load(), max(0.0, others / took_s))


def watch() -> Watch:
    """From here on. Our own are this process, what it starts from now on, and what they start."""
    os.environ[MARK] = mark = uuid.uuid4().hex
    return Watch(lambda: cpu_s({os.getpid(), *marked(mark)}))


def why_no_verdict(noises: Sequence[Noise]) -> str | None:
    """None when the machine was quiet. The first span's load counts, since only that one has
    nothing of ours in it."""
    if not noises:
        return "no verdict: nothing was measured"
    load = noises[0].load_before
    if load > LOAD_LIMIT:
        return f"no verdict: the load was {load:.1f} before the run (limit {LOAD_LIMIT})"
    worst = max(noise.others_cores for noise in noises)
    if worst > OTHERS_CORES_LIMIT:
        return (
            f"no verdict: other processes took up to {worst:.2f} cores within the run "
            f"(limit {OTHERS_CORES_LIMIT})"
        )
    return None
