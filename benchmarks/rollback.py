"""What a restore into a process that stays costs: time, memory at its peak, and addresses.

    python benchmarks/rollback.py [--mib 512] [--rounds 5]

A model and its AdamW are trained a step, sealed in a slot, trained another one and restored, again
and again in one process. Told: the time of loading and proving, how much memory of the process's
own was there at the peak for each byte that was there before, and how many tensors kept their
address. Memory is what the kernel counts as the process's own (`RssAnon`), read all the while by a
thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import harness  # beside this file: it is started as a script
import torch

from keepstep.config import resolve
from keepstep.edge.os.threads import run_acts
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch.live_state import TorchState
from keepstep.edge.torch.state import Protected
from keepstep.model.snapshot import Stamp
from keepstep.model.units import MIB

WIDTH = 1024  # 4 MiB of weights a layer, as much of gradients, and twice as much of AdamW's


def own_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon here")


class Peak:
    """The most that is there while a block runs."""

    def __enter__(self) -> Peak:
        self.most = own_bytes()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._is_over.wait(0.001):
            self.most = max(self.most, own_bytes())

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


class Training:
    def __init__(self, mib: int) -> None:
        layers = max(1, mib // 16)
        self.model = torch.nn.Sequential(
            *(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.protected = Protected.of({"model": self.model, "optimizer": self.optimizer}, lazy=True)
        self.optimizer.register_step_post_hook(self.protected.used_gradients.updated)
        self.live = TorchState(self.protected, 0, 1, resolve(None, {}, "rollback"))

    def step(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.fill_(0.5)
        self.optimizer.step()

    def addresses(self) -> list[int]:
        states = [v for s in self.optimizer.state.values() for v in s.values()]
        return [tensor.data_ptr() for tensor in (*self.model.parameters(), *states)]

    def seal(self, home: Path) -> Slot:
        gathered = self.live.gather()
        slot = Slot.create(MEMORY, home / "slot-0", gathered.payload_bytes, 16 * MIB)
        slot.begin(bytes(16), 0, 1, 1, Stamp(0, 1))
        copy: Any = self.live.copy(gathered, slot)
        copy.copy_moving()
        run_acts(copy.copy_still())
        copy.passed()
        text = json.dumps(gathered.layout.to_json()).encode()
        header = slot.write_table(gathered.payload_bytes, text, copy.sums)
        slot.seal(header, gathered.layout.hash(), 0.0, wall_ns=1)
        return slot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    watch = harness.watch()
    training = Training(given.mib)
    training.step()
    loads, proofs, peaks, kept = [], [], [], []
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="keepstep-rollback-") as home:
        slot = training.seal(Path(home))
        for _ in range(given.rounds):
            training.step()
            before, addresses = own_bytes(), training.addresses()
            header, layout = slot.verify()
            with Peak() as peak:
                began = time.perf_counter()
                training.live.load(slot, header, layout)
                loads.append(time.perf_counter() - began)
                assert training.live.differing(slot, header, layout) == []
                proofs.append(time.perf_counter() - began)
            peaks.append(peak.most / before)
            now = training.addresses()
            kept.append(sum(a == b for a, b in zip(addresses, now, strict=True)))
        slot.close()
    print(
        f"{given.mib} MiB: load {statistics.median(loads):.3f} s, with proof "
        f"{statistics.median(proofs):.3f} s; peak {statistics.median(peaks):.3f} x; "
        f"{min(kept)} of {len(training.addresses())} tensors keep their address; "
        f"load {os.getloadavg()[0]:.1f}"
    )
    harness.tell(watch.end())


if __name__ == "__main__":
    main()
