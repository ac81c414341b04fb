"""What a node's keeper is told of the collectives of a device.

    KEEPSTEP_UNTESTED_NCCL_GROUPS=1 python -m benchmarks.gpu.rhythm nodes [ROUNDS]
    python -m benchmarks.gpu.rhythm queues

**`nodes`**: two nodes on this machine, at addresses that are not loopback's, train on the same
device, NCCL over sockets: without redundancy, with copies sent at once, with copies interleaved, in
turns (half a minute each). What the keepers say of when the bytes went. Where copies are
interleaved: idle time of a step as the page tells it, beside timing events of the program's own;
how much of the time the pulse says that the network is busy, asked each millisecond; what telling
costs the thread that orders a collective. Needs root.

**`queues`**: of 40 streams that wait for something that takes long, how many hold up what the
trainer orders next, by their priority.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RANK = int(os.environ.get("RANK", "-1"))
if RANK >= 0:
    # NCCL refuses two ranks on one device, but for those of different hosts, which meet by sockets
    os.environ["NCCL_HOSTID"] = f"h{RANK}"
    os.environ.setdefault("NCCL_IB_DISABLE", "1")

import torch  # noqa: E402  NCCL reads what is set above
import torch.distributed as dist  # noqa: E402

import keepstep  # noqa: E402
from benchmarks import harness  # noqa: E402
from benchmarks.gpu.workload import mark, say  # noqa: E402
from keepstep.edge.os.journal import read_journal  # noqa: E402
from keepstep.edge.shm.collective_profile_page import (  # noqa: E402
    COUNT_FILE,
    CollectiveProfileReader,
    profile_path,
    read_word,
)
from keepstep.edge.shm.memory import MEMORY  # noqa: E402
from keepstep.edge.torch.cuda_runtime import (  # noqa: E402
    LOWEST_PRIORITY,
    SPARED_PRIORITY,
    own_stream,
)
from keepstep.edge.torch.membership import membership  # noqa: E402
from keepstep.model.rhythm import Interleaved  # noqa: E402

STEPS, FROM = 60, 25
WITHIN_S = 60
SIOCSIFADDR, SIOCSIFFLAGS = 0x8916, 0x8914
BEFORE, BEHIND = 60_000_000, 30_000_000  # cycles of the device: some 35 and 17 ms
CASES = {
    "alone": ("none", "off"),
    "at once": ("copies:2", "off"),
    "interleaved": ("copies:2", "auto"),
}


def trained() -> None:
    """A rank of `nodes`."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    keepstep.init_process_group(device_id=device)
    torch.manual_seed(RANK)
    weight = torch.nn.Parameter(torch.zeros(1 << 20, device=device))
    own = torch.randn(50_000_000, device=device)  # 200 MB, which no other rank has
    optimizer = torch.optim.SGD([weight], 1e-3)
    job = keepstep.protect(weight=weight, optimizer=optimizer, own=own)
    gradient = torch.ones(16 << 20, device=device)
    asks = Asks(job._rank._options.job_dir)
    marks: list[list[torch.cuda.Event]] = []
    for _ in job.steps(STEPS):
        at = [mark()]
        torch.cuda._sleep(BEFORE)
        own.add_(1.0)
        at.append(mark())
        work = dist.all_reduce(gradient, async_op=True)
        assert work is not None
        work.wait()
        at.append(mark())
        torch.cuda._sleep(BEHIND)
        optimizer.step()
        marks.append(at)
        if len(marks) > 3:  # a loop that logs what was three steps ago
            marks[-3][0].synchronize()
    torch.cuda.synchronize()
    pulses = asks.end()
    if asks.page is not None:
        _compare(asks.page, marks, pulses)
        _cost(device)
    starts = [at[0] for at in marks[FROM:]]
    times = [began.elapsed_time(ended) for began, ended in itertools.pairwise(starts)]
    if RANK == 0:
        counted = read_word(MEMORY, job._rank._options.job_dir / COUNT_FILE, Interleaved)
        found = {"ms": statistics.median(times), "captured": job._rank._page.read().captured_steps}
        if counted is not None:
            sent = (counted.idle_bytes, counted.late_bytes, counted.free_bytes)
            found |= {"idle_late_free_mb": [round(nbytes / 1e6) for nbytes in sent]}
        Path(os.environ["BENCH_RESULT"]).write_text(json.dumps(found))
    job.close()


class Asks:
    """Whoever asks the page each millisecond whether the network is busy, if there is a page."""

    def __init__(self, job_dir: Path) -> None:
        path = profile_path(job_dir, RANK)
        self.page = CollectiveProfileReader(MEMORY, path) if path.exists() else None
        self._pulses: list[int] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        while self.page is not None and not self._is_over.wait(0.001):
            pulse = self.page.pulse(time.monotonic_ns())
            if pulse is not None and pulse.step >= FROM:
                self._pulses.append(pulse.pending)

    def end(self) -> list[int]:
        self._is_over.set()
        self._thread.join()
        return self._pulses


def _compare(
    page: CollectiveProfileReader, marks: list[list[torch.cuda.Event]], pulses: list[int]
) -> None:
    spans = [
        (
            began.elapsed_time(before),
            before.elapsed_time(behind),
            behind.elapsed_time(following[0]),
        )
        for (began, before, behind), following in itertools.pairwise(marks[FROM:])
    ]
    before_ms, busy_ms, behind_ms = (statistics.mean(some) for some in zip(*spans, strict=True))
    seen = [step for step in page.steps() if step.step >= FROM]
    lengths: dict[int, list[float]] = {}
    for step in seen:
        for gap in step.gaps:
            lengths.setdefault(gap.index, []).append((gap.ended_ns - gap.began_ns) / 1e6)
    say(
        "rhythm",
        rank=RANK,
        steps=len(seen),
        collectives={step.collectives for step in seen},
        own_ms=[round(ms, 2) for ms in (before_ms, busy_ms, behind_ms)],
        told_ms={k: round(statistics.mean(v), 2) for k, v in lengths.items()},
        busy_share=busy_ms / (before_ms + busy_ms + behind_ms),
        pulse_busy_share=statistics.mean(pulses) if pulses else -1.0,
        pulses=len(pulses),
    )


def _cost(device: torch.device) -> None:
    """Of 40 small collectives each, in turns."""
    small = torch.zeros(8, device=device)
    hooks = membership.on_order, membership.on_queued
    took: dict[str, list[float]] = {"told": [], "not_told": []}
    for number in range(20):
        for name in list(took)[:: 1 if number % 2 else -1]:
            if name == "told":
                membership.on_order, membership.on_queued = hooks
            else:
                membership.on_order, membership.on_queued = (lambda: False), (lambda end: None)
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(40):
                dist.all_reduce(small, async_op=True)
            took[name].append((time.perf_counter() - began) / 40 * 1e6)
            torch.cuda.synchronize()
    say("cost_us", **{name: statistics.median(found) for name, found in took.items()})


@contextlib.contextmanager
def another_address(number: int) -> Iterator[str]:
    """Of this machine, none of loopback's own, from the range that is kept for benchmarks."""
    host, name = f"198.18.77.{number}", f"lo:{number}".encode()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        given = struct.pack("16sH2s4s8s", name, socket.AF_INET, b"", socket.inet_aton(host), b"")
        fcntl.ioctl(sock, SIOCSIFADDR, given)
        try:
            yield host
        finally:
            fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sH14s", name, 0, b""))


def nodes(rounds: str = "1") -> None:
    with another_address(1) as one, another_address(2) as two:
        _nodes([one, two], int(rounds))


def _nodes(hosts: list[str], rounds: int) -> None:
    taken: dict[str, list[float]] = {name: [] for name in CASES}
    for number in range(rounds):
        for name in list(CASES)[:: 1 if number % 2 == 0 else -1]:
            with tempfile.TemporaryDirectory(prefix="rhythm-", dir="/dev/shm") as room:
                found = _trained_on_nodes(Path(room), hosts, *CASES[name])
                taken[name].append(found["ms"])
                say("nodes", case=name.replace(" ", "_"), **found)
                for line in sorted(_said(Path(room))):
                    print(line, flush=True)
    say("nodes_median_ms", **{k.replace(" ", "_"): statistics.median(v) for k, v in taken.items()})


def _trained_on_nodes(room: Path, hosts: list[str], policy: str, interleave: str) -> dict[str, Any]:
    agents = []
    for number, host in enumerate(hosts):
        environ = {
            **os.environ,
            "KEEPSTEP_ARENA_DIR": str(room / f"arena-{number}"),
            "KEEPSTEP_STATE_DIR": str(room / f"state-{number}"),
            "KEEPSTEP_REDUNDANCY": policy,
            "KEEPSTEP_INTERLEAVE": interleave,
            "BENCH_RESULT": str(room / "result"),
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
            "NCCL_SOCKET_IFNAME": "lo",
        }
        words = ["run", "--nnodes", "2", "--nproc-per-node", "1", "--host", host, "--job", "rhythm"]
        words += ["--rdzv-endpoint", f"{hosts[0]}:29577", "-m", "benchmarks.gpu.rhythm"]
        (room / f"arena-{number}").mkdir()
        with open(room / f"output-{number}", "w") as output:
            agents.append(
                subprocess.Popen(
                    [sys.executable, "-m", "keepstep.cli.main", *words],
                    env=environ,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        for agent in agents:
            agent.wait(WITHIN_S)
    except subprocess.TimeoutExpired:
        for agent in agents:
            agent.terminate()
    if any(agent.wait(20) for agent in agents):
        for number in range(2):
            print((room / f"output-{number}").read_text()[-2000:], flush=True)
        sys.exit("the nodes have not ended well")
    for number in range(2):
        for line in (room / f"output-{number}").read_text().splitlines():
            if line.startswith(("rhythm:", "cost_us:")):
                print(line, flush=True)
    found: dict[str, Any] = json.loads((room / "result").read_text())
    return found


def _said(room: Path) -> set[str]:
    """What keepers have told of interleaving."""
    found: set[str] = set()
    for path in room.rglob("journal*.jsonl"):
        found |= {f"  {e.why[:300]}" for e in read_journal(path) if e.kind == "interleave"}
    return found


def queues() -> None:
    device = torch.device("cuda", 0)
    x = torch.zeros(8, device=device)
    for priority in (LOWEST_PRIORITY, SPARED_PRIORITY):
        slow = torch.cuda.Stream()
        held = 0
        for _ in range(40):
            waits = own_stream(device, priority)
            torch.cuda.synchronize()
            with torch.cuda.stream(slow):
                torch.cuda._sleep(40_000_000)
                ends = mark()
            waits.wait_event(ends)
            x.add_(1)
            done = mark()
            done.synchronize()
            held += ends.query()
        torch.cuda.synchronize()
        say("queues", priority=priority, streams=40, held_up=held)


def main() -> None:
    watch = harness.watch()
    {"nodes": nodes, "queues": queues}[sys.argv[1]](*sys.argv[2:])
    harness.tell(watch.end())


if __name__ == "__main__":
    if RANK < 0:
        main()
    else:
        trained()
