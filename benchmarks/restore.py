"""How long a restarted program waits for its own memory.

    python benchmarks/restore.py [--mib 1024] [--rounds 3]

Each round starts a program that saves a state of that size and dies, and then another one that
restores it: the time of `protect()` in the second one, and of the same with nothing to restore in
the first. Beside them, in the same process, what importing `keepstep.protect` took, a memcpy of as
many bytes between two warm buffers, and one into memory that is touched for the first time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import harness  # beside this file: it is started as a script

PROGRAM = """
import json, os, signal, sys, time
import torch
import keepstep
from keepstep.edge.shm import memory

mib, mode = int(sys.argv[1]), sys.argv[2]
width = 1024
layers = max(1, mib // 12)  # 4 MiB of weights each, and twice as much of AdamW's
model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
optimizer = torch.optim.AdamW(model.parameters())
began = time.perf_counter()
protect = keepstep.protect  # is imported here
took = {"import": time.perf_counter() - began}
began = time.perf_counter()
job = protect(model=model, optimizer=optimizer)
took |= {"protect": time.perf_counter() - began, "step": job.step}
if mode == "save":
    for step in job.steps(2):
        with step:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    job.close(ok=False)
else:
    source = torch.ones(mib << 20, dtype=torch.uint8)
    warm = torch.ones_like(source)
    for name in ("memcpy", "memcpy_fresh"):
        target = warm if name == "memcpy" else torch.empty_like(source)
        began = time.perf_counter()
        memory.copy(target.data_ptr(), source.data_ptr(), source.nbytes)
        took[name] = time.perf_counter() - began
    job.close(ok=True)
print(json.dumps(took), flush=True)
"""


def once(mib: int, mode: str, places: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, "-c", PROGRAM, str(mib), mode]
    run = subprocess.run(
        command, env={**os.environ, **places}, stdout=subprocess.PIPE, text=True, check=True
    )
    told: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    found: dict[str, list[float]] = {}
    watch = harness.watch()
    for number in range(given.rounds):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as arena:
            places = {
                "KEEPSTEP_ARENA_DIR": arena,
                "KEEPSTEP_STATE_DIR": str(Path(arena) / "state"),
                "KEEPSTEP_JOB": f"restore-{number}",
                "KEEPSTEP_GRACE_S": "60",
            }
            saved, restored = (once(given.mib, mode, places) for mode in ("save", "restore"))
        assert restored["step"] >= 0, "nothing was restored"
        took = {
            "nothing to restore": saved["protect"],
            "restore": restored["protect"],
            "import of keepstep": restored["import"],
            "memcpy": restored["memcpy"],
            "memcpy into fresh memory": restored["memcpy_fresh"],
        }
        for name, value in took.items():
            found.setdefault(name, []).append(value)
        load = os.getloadavg()[0]
        print({k: round(v, 3) for k, v in took.items()}, f"load {load:.1f}", flush=True)
    words = [f"{k} {statistics.median(v):.3f} ({min(v):.3f})" for k, v in found.items()]
    print(f"{given.mib} MiB, s, median (least): {'; '.join(words)}")
    harness.tell(watch.end())


if __name__ == "__main__":
    main()
