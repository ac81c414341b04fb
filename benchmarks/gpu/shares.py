"""What it saves that replicas on one device share one snapshot, and how fast a device digests.

Started by `lab.py`. Slots lie in /dev/shm, or in GPU_LAB_SHM.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu.share_runs import SHARING, ended, figures, told
from benchmarks.gpu.workload import GB, clock, say
from keepstep.coding.checksum import BLOCK_BYTES
from keepstep.edge.torch.copy_stream import copy_stream
from keepstep.edge.torch.device_digests import BlockDigests, DigestKeys
from keepstep.edge.torch.digests import digest_of

SHM = os.environ.get("GPU_LAB_SHM", "/dev/shm")


def shares(gb: str = "2") -> None:
    """REFT's headline: of n replicas on one device, what each copies, what its slots take and what
    it waits for, whole copies first and then shares, in one run for each n. Means over ranks."""
    width = 4096
    layers = max(1, round(float(gb) * GB / 12 / width / width))
    for ranks in (1, 2, 4):
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=SHM, prefix="gpu-lab-") as home:
            run = ended(
                SHARING,
                Path(home),
                f"lab-{ranks}",
                ranks,
                timeout_s=90,
                KEEPSTEP_SHARE_REPLICAS="node",
                WIDTH=str(width),
                LAYERS=str(layers),
                STEPS="32",
                SHARES_FROM="14",
                PAUSE_S="0.05",
                ALIKE="1",
            )
        found = figures(run)
        is_equal = len(set(told(run, "hash").values())) == 1
        say("shares", ranks=ranks, rc=run.returncode, equal=is_equal, s=time.perf_counter() - began)
        for name in ("whole", "shared"):
            each = [one for one in found.values() if f"{name}_left" in one]
            if each:
                mean = {
                    key: sum(one[f"{name}_{key}"] for one in each) / len(each)
                    for key in ("left", "memory", "stall_us", "step_us")
                }
                say(
                    f"shares_{name}",
                    ranks=ranks,
                    d2h_gb=mean["left"] / GB,
                    slots_gb=mean["memory"] / GB,
                    stall_ms=mean["stall_us"] / 1e3,
                    step_ms=mean["step_us"] / 1e3,
                )
        if run.returncode:
            print(run.stderr[-3000:], flush=True)


def digests(gb: str = "2") -> None:
    """The device's rate, and that it finds what the host does."""
    device = torch.device("cuda", torch.cuda.current_device())
    size = BLOCK_BYTES
    count = int(float(gb) * GB) // size
    there = torch.randint(0, 255, (count * size,), dtype=torch.uint8, device=device)
    keys = DigestKeys(b"lab", size)
    stream = copy_stream(device)
    blocks = BlockDigests(range(count), keys)
    blocks.use(device, stream)
    pieces = list(blocks.pieces(device, there, 0))
    blocks.begin({device: stream})
    torch.cuda.synchronize()
    ordered_s: list[float] = []

    def take() -> None:
        began = time.perf_counter()
        for piece in pieces:
            stream.digest(piece)
        ordered_s.append(time.perf_counter() - began)

    take()
    torch.cuda.synchronize()
    blocks.begin({device: stream})
    took = clock(take)
    blocks.read_back({device: stream})[0].wait()
    found = blocks.found(blocks.host_sums())
    last = bytes(there[-size:].cpu().numpy())
    say(
        "digests",
        gbs=count * size / took / GB,
        ordered_ms=ordered_s[-1] * 1e3,
        pieces=len(pieces),
        as_on_the_host=found[count - 1] == digest_of(last, keys.host),
    )
