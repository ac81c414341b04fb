"""How fast a state comes into a peer's memory: one of two ranks, or the one that starts both.

In comes a contender's name, a room and a kind; out come bytes a second and rank, from the call of a
save until its copy is whole on the other side, over loopback. The two ranks send at once. A module
that can do it has a class `Pair`: `copy(step)` returns when the copy is whole. keepstep's keepers
copy without the trainer; `benchmarks/redundancy.py` starts two nodes' keepers, and its figure, with
the captures in it, is taken.

Invariant: the first copy, in which memory is touched for the first time, is not in the median.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import harness

ROOT = Path(__file__).parents[2]
PATIENCE_S = 150.0
COPIES = 4
OURS = """
import json, sys
sys.path.insert(0, "benchmarks")  # as when it is started
from benchmarks.redundancy import copies
found = copies("copies:2", 2, int(sys.argv[1]), None, 3, 4)
print(json.dumps({"bytes_per_s": found["run_with_captures_gbit"] / 8e-9}))
"""


def serve(name: str, room: Path, kind: str, rank: int) -> None:
    """One rank, of two."""
    import torch.distributed as dist

    from benchmarks.peers.workload import Workload

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    dist.init_process_group("gloo", init_method=f"file://{room}/meeting", rank=rank, world_size=2)
    workload = Workload(kind)
    pair = importlib.import_module(f"benchmarks.peers.contenders.{name}").Pair(workload, room)
    took = []
    for step in range(1, COPIES + 1):
        workload.stamp(step)
        dist.barrier()
        began = time.perf_counter()
        pair.copy(step)
        dist.barrier()  # whole on both sides
        took.append(time.perf_counter() - began)
    found = {"bytes_per_s": workload.state_bytes / statistics.median(took[1:])}
    out.write(json.dumps(found) + "\n")
    out.flush()
    os._exit(0)


def copy_bytes_per_s(
    name: str, python: Path, room: Path, kind: str, state_bytes: int, cores: list[int]
) -> tuple[float | None, str | None]:
    """The figure, or why there is none. Leaves no process behind."""
    on = ["taskset", "-c", ",".join(map(str, cores)), str(python)]
    if name == "keepstep":
        commands = [[*on, "-c", OURS, str(state_bytes)]]
    else:
        words = ["-m", "benchmarks.peers.pair", name, str(room), kind]
        commands = [[*on, *words, str(rank)] for rank in range(2)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        harness.MARK: f"pair-{room.name}",
    }
    log = room.parent / f"{room.name}.log"
    with open(log, "ab") as errors:
        ranks = [
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, env=environment, cwd=ROOT
            )
            for command in commands
        ]
        until_s = time.monotonic() + PATIENCE_S
        try:
            said = [rank.communicate(timeout=until_s - time.monotonic())[0] for rank in ranks]
        except subprocess.TimeoutExpired:
            return None, f"copy: not whole within {PATIENCE_S:.0f} s"
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
            harness.end_all(f"pair-{room.name}")
    if any(rank.returncode for rank in ranks):
        lines = log.read_text(errors="replace").strip().splitlines()
        return None, f"copy: {(lines or ['it said nothing'])[-1][:160]}"
    found: list[dict[str, Any]] = [json.loads(word.splitlines()[-1]) for word in said]
    return min(one["bytes_per_s"] for one in found), None


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
