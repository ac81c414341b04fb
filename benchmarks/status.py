"""How long `keepstep status` takes, by the number of ranks on a node.

    python benchmarks/status.py [--ranks 8 1000] [--rounds 5]

Each rank lives (this process has its page), and has three sealed slots of 4 KiB. The command is a
process of its own, its import and its drawing for 80 columns in it: wall and processor time,
medians; `--version` beside it is what starting costs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import harness  # beside this file: it is started as a script

from keepstep.config import Settings, resolve
from keepstep.edge.os.job_directory import claim_job_dir
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.edge.shm.status_page import StatusPage
from keepstep.model.layout import TensorSpec, lay_out
from keepstep.model.snapshot import Phase, SlotState, SlotView, Stamp
from keepstep.runtime.job_name import job_hash

FLOATS = 1024
STEPS = (6, 7, 8)


def make(settings: Settings, ranks: int, held: ExitStack) -> None:
    """A node with a job of so many ranks, which live until `held` is closed."""
    claim_job_dir(settings.job_dir)
    layout = lay_out([TensorSpec("weight", "float32", (FLOATS,), 4 * FLOATS)])
    for rank in range(ranks):
        for index, step in enumerate(STEPS):
            slot = Slot.create(
                MEMORY, slot_path(settings.job_dir, rank, index), layout.objects_offset, 4096
            )
            slot.begin(job_hash(settings.job, os.getuid()), rank, ranks, 1, Stamp(step, 1))
            header = slot.write_table(layout.objects_offset, json.dumps(layout.to_json()).encode())
            slot.seal(header, layout.hash(), 0.0, time.time_ns())
            slot.close()
        page = StatusPage.own(MEMORY, settings.job_dir, rank)
        assert page is not None
        held.callback(page.close)
        page.publish(
            rank=rank,
            world_size=ranks,
            pid=os.getpid(),
            epoch=1,
            phase=Phase.FORWARD,
            completed_step=STEPS[-1],
            slots=tuple(SlotView(SlotState.SEALED, Stamp(step, 1)) for step in STEPS),
        )


def took(words: list[str], environ: dict[str, str]) -> tuple[float, float]:
    """Wall and processor seconds of a command."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "keepstep.cli.main", *words],
        env=environ,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    wall_s = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(ranks: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place, ExitStack() as held:
        environ = {
            **os.environ,
            "KEEPSTEP_ARENA_DIR": place,
            "KEEPSTEP_STATE_DIR": str(Path(place, "state")),
            "COLUMNS": "80",
        }
        make(replace(resolve(None, environ, "status"), job="status"), ranks, held)
        commands = {
            "--version": ["--version"],
            "status": ["status", "--job", "status"],
            "status --json": ["status", "--job", "status", "--json"],
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for _ in range(rounds):
            for name, words in commands.items():
                found[name].append(took(words, environ))
    for name, times in found.items():
        wall_s, cpu_s = (statistics.median(each) for each in zip(*times, strict=True))
        load = os.getloadavg()[0]
        print(f"{ranks:6} ranks: {name:14} {wall_s:.2f} s, CPU {cpu_s:.2f} s; load {load:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 1000])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a page a rank is held open
    watch = harness.watch()
    for ranks in given.ranks:
        measure(ranks, given.rounds)
    harness.tell(watch.end())


if __name__ == "__main__":
    main()
