"""keepstep on a real device, one experiment a name.

    python -m benchmarks.gpu.lab env|futures [nccl]|stale|item|graph
    python -m benchmarks.gpu.lab many [COUNT]              a state of many small tensors
    python -m benchmarks.gpu.lab capture [GB] [TOKENS]     none, raw, others and keepstep by turns
    python -m benchmarks.gpu.lab adopt [GB] [TOKENS]       a life, SIGKILL, another life
    python -m benchmarks.gpu.lab rollback [GB] [TOKENS]    a restore into the living tensors
    python -m benchmarks.gpu.lab shares [GB]               1, 2 and 4 replicas of one snapshot
    python -m benchmarks.gpu.lab digests [GB]              how fast the device digests
    python -m benchmarks.gpu.lab frozen [GB]               a base that does not learn

Prints lines of `name: figure=value`. What passes and what does not is in `docs/gpu.md`. Slots lie
in /dev/shm, or in GPU_LAB_SHM. GPU_LAB_STEPS: how many steps `capture` trains (30).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.gpu.frozen import frozen
from benchmarks.gpu.shares import digests, shares
from benchmarks.gpu.workload import GB, SAVERS, Trainer, clock, device_times, mark, say
from keepstep.coding.checksum import block_checksums
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch.cuda_pages import CudaPages
from keepstep.edge.torch.page_locks import PageLocks
from keepstep.model.units import MIB

SHM = os.environ.get("GPU_LAB_SHM", "/dev/shm")
STEPS = int(os.environ.get("GPU_LAB_STEPS", "30"))
SLOW_STEPS = 9  # of what holds the trainer for seconds


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHM, prefix="gpu-lab-") as found:
        yield Path(found)


def locks() -> PageLocks:
    return PageLocks(CudaPages(torch.device("cuda", torch.cuda.current_device())))


def over(slot: Slot, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(slot.payload, dtype=torch.uint8, count=nbytes)


def env(gib: str = "4") -> None:
    """What the machine is, and how fast bytes and hashes go."""
    nbytes = int(float(gib) * 2**30)
    say(
        "device",
        card=torch.cuda.get_device_name().replace(" ", "_"),
        torch=torch.__version__,
        nccl=".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        shm_gb=shutil.disk_usage(SHM).total / GB,
    )
    there = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device="cuda")
    with scratch() as home:
        began = time.perf_counter()
        slot = Slot.create(MEMORY, home / "slot-0", nbytes, MIB)
        made_s = time.perf_counter() - began
        _rates(slot, there, nbytes, made_s)  # what looks into the slot is gone before it is closed
        slot.close()


def _rates(slot: Slot, there: torch.Tensor, nbytes: int, made_s: float) -> None:
    host = over(slot, nbytes)
    rates = [clock(lambda: host.copy_(there)) for _ in range(2)]
    back = clock(lambda: there.copy_(host))
    say(
        "pageable",
        create_gbs=nbytes / made_s / GB,
        d2h_first_gbs=nbytes / rates[0] / GB,
        d2h_gbs=nbytes / rates[1] / GB,
        h2d_gbs=nbytes / back / GB,
    )
    began = time.perf_counter()
    why = locks().lock(slot)
    say(
        "cudaHostRegister",
        refused=str(why).replace(" ", "_"),
        gbs=nbytes / (time.perf_counter() - began) / GB,
        is_pinned=host.is_pinned(),
    )
    down = clock(lambda: host.copy_(there, non_blocking=True))
    up = clock(lambda: there.copy_(host, non_blocking=True))
    say("pinned", d2h_gbs=nbytes / down / GB, h2d_gbs=nbytes / up / GB)
    _hash_rates(slot, host, there, nbytes)


def _hash_rates(slot: Slot, host: torch.Tensor, there: torch.Tensor, nbytes: int) -> None:
    for threads in (1, 2, 4, 8, 12, 16):
        part = nbytes // threads
        each = [
            threading.Thread(
                target=block_checksums, args=(slot.payload[i * part : (i + 1) * part],)
            )
            for i in range(threads)
        ]
        began = time.perf_counter()
        for thread in each:
            thread.start()
        for thread in each:
            thread.join()
        say("xxh3", threads=threads, gbs=nbytes / (time.perf_counter() - began) / GB)
    _hash_beside(slot, host, there, nbytes)


def _hash_beside(slot: Slot, host: torch.Tensor, there: torch.Tensor, nbytes: int) -> None:
    """As a capture does: some threads hash while bytes land elsewhere in the slot."""
    half = nbytes // 2
    for threads in (4, 8):
        is_over = threading.Event()
        hashed = [0] * threads

        def hash_on(number: int, is_over: threading.Event = is_over, into: Any = hashed) -> None:
            part = nbytes // 64
            while not is_over.is_set():
                block_checksums(slot.payload[number * part : (number + 1) * part])
                into[number] += part

        each = [threading.Thread(target=hash_on, args=(number,)) for number in range(threads)]
        began = time.perf_counter()
        for thread in each:
            thread.start()
        landed = clock(lambda: host[half:].copy_(there[half:], non_blocking=True))
        is_over.set()
        for thread in each:
            thread.join()
        say(
            "xxh3_beside_d2h",
            threads=threads,
            xxh3_gbs=sum(hashed) / (time.perf_counter() - began) / GB,
            d2h_gbs=(nbytes - half) / landed / GB,
        )


def futures(backend: str = "keepstep") -> None:
    """Whether a caller sees a collective's result on its own stream. `nccl` is the reference; for
    keepstep KEEPSTEP_UNTESTED_NCCL_GROUPS=1."""
    import torch.distributed as dist

    import keepstep

    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    given: dict[str, Any] = {"rank": 0, "world_size": 1, "store": dist.HashStore()}
    if backend == "keepstep":
        keepstep.init_process_group(device_id=device, **given)
    else:
        dist.init_process_group("nccl", device_id=device, **given)
    count = 1 << 28
    x, out = (torch.zeros(count, device="cuda") for _ in range(2))
    dist.all_gather_into_tensor(out, x)
    torch.cuda.synchronize()
    wrong = {"wait": 0, "future": 0}
    for number in range(1, 21):
        for way in wrong:
            torch.cuda._sleep(50_000_000)
            x.fill_(float(number))
            work = dist.all_gather_into_tensor(out, x, async_op=True)
            assert work is not None
            if way == "wait":
                work.wait()
            else:
                work.get_future().wait()
            seen = out[-1].clone()
            torch.cuda.synchronize()
            wrong[way] += seen.item() != float(number)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    took = statistics.median(clock(lambda: dist.all_reduce(x)) for _ in range(10))
    more = torch.cuda.max_memory_allocated() - before
    say(
        "futures",
        backend=dist.get_backend(),
        wrong_of_20=wrong["wait"] + wrong["future"],
        all_reduce_ms=took * 1e3,
        extra_bytes_per_byte=more / (4 * count),
    )
    small, took_s = torch.zeros(8, device="cuda"), []
    for _ in range(200):
        began = time.perf_counter()
        work = dist.all_reduce(small, async_op=True)
        took_s.append(time.perf_counter() - began)
        assert work is not None
        work.wait()
    say("queued", backend=dist.get_backend(), us=statistics.median(took_s) * 1e6)
    dist.barrier(device_ids=[0])
    say("barrier_device_ids", ok=True)


def stale() -> None:
    """What a copy writes when another file was mapped where a locked slot was."""
    nbytes = 64 << 20
    there = torch.full((nbytes,), 7, dtype=torch.uint8, device="cuda")
    held = locks()
    with scratch() as home:
        slots = [Slot.create(MEMORY, home / f"slot-{i}", nbytes, MIB) for i in range(3)]
        for slot in slots:
            held.lock(slot)
        old = [slot.payload_address for slot in slots]
        brought = Slot.create(MEMORY, home / "brought", nbytes, MIB)
        brought.payload[:] = bytes([85]) * nbytes
        brought.close()
        os.replace(home / "brought", home / "slot-1")
        for slot in slots:
            slot.close()
        slots = [Slot(MEMORY, home / f"slot-{i}") for i in range(3)]
        why = [held.lock(slot) for slot in slots]
        over(slots[1], nbytes).copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        is_right = bool((over(slots[1], nbytes) == 7).all())
        say(
            "stale",
            refused=[w for w in why if w],
            same_address=slots[1].payload_address == old[1],
            verdict="ok" if is_right else "CORRUPT",
        )
        for slot in slots:
            slot.close()
        _bystanders(nbytes, old)


def _bystanders(nbytes: int, old: list[int]) -> None:
    """Other memory that comes to lie where slots were."""
    hit = wrong = 0
    for _ in range(200):
        other = torch.full((nbytes,), 3, dtype=torch.uint8)
        if any(at - nbytes < other.data_ptr() < at + nbytes for at in old):
            hit += 1
            wrong += int((other.cuda() != 3).sum())
    say("bystander", tensors_there=hit, wrong_bytes=wrong)


def capture(gb: str = "10", tokens: str = "32768", mode: str = "all") -> None:
    """The device's step time with nothing, raw copies, what others do, and keepstep."""
    if mode == "all":
        for each in (*SAVERS, "keepstep"):
            command = [sys.executable, "-m", "benchmarks.gpu.lab", "capture", gb, tokens, each]
            subprocess.run(command, check=False)
        return
    trainer = Trainer(float(gb), int(tokens))
    trainer.step()
    trainer.step()
    torch.cuda.synchronize()
    marks: list[Any] = []
    if mode == "keepstep":
        extra = _with_keepstep(trainer, marks)
    else:
        is_slow = mode in ("torch_save", "dcp_async")
        extra = trainer.with_others(mode, SLOW_STEPS if is_slow else STEPS, marks)
    torch.cuda.synchronize()
    times = device_times(marks)
    say(
        "capture",
        mode=mode,
        state_gb=float(gb),
        step_ms_device=statistics.median(times),
        step_ms_max=max(times),
        peak_gib=torch.cuda.max_memory_allocated() / 2**30,
        **extra,
    )


def _with_keepstep(trainer: Trainer, marks: list[Any]) -> dict[str, float]:
    import keepstep

    began = time.perf_counter()
    job = keepstep.protect(model=trainer.model, optimizer=trainer.optimizer)
    extra = {"protect_s": time.perf_counter() - began}
    for _ in job.steps(STEPS):
        trainer.step()
        marks.append(mark())
    extra |= told(job)
    job.close()
    return extra


def told(job: Any) -> dict[str, float]:
    """What the rank's page says."""
    page = job._rank._page.read()
    return {
        "captured": page.captured_steps,
        "skipped": page.skipped_steps,
        "copy_s": page.copy_ns_last / 1e9,
        "seal_s": page.seal_ns_last / 1e9,
        "told_stall_ms": page.stall_ns_total / 1e6 / max(1, page.captured_steps),
    }


def adopt(gb: str = "10", tokens: str = "32768", life: str = "0") -> None:
    """SIGKILL in step 12, then again: are slots locked that are adopted, and what does a restore
    take?"""
    if life == "0":
        for each in ("1", "2"):
            command = [sys.executable, "-m", "benchmarks.gpu.lab", "adopt", gb, tokens, each]
            say("life_ended", life=each, rc=subprocess.run(command, check=False).returncode)
        return
    import keepstep

    trainer = Trainer(float(gb), int(tokens))
    trainer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    began = time.perf_counter()
    config = keepstep.Config(job="gpu-lab-adopt", grace_s=120)
    job = keepstep.protect(config, model=trainer.model, optimizer=trainer.optimizer)
    say(
        "protect",
        life=life,
        seconds=time.perf_counter() - began,
        at_step=job.step,
        peak_ratio=torch.cuda.max_memory_allocated() / before,
    )
    for step in job.steps(20):
        trainer.step()
        torch.cuda.synchronize()
        if life == "1" and step == 12:
            time.sleep(2)
            say("copies", life=life, **told(job))
            os.kill(os.getpid(), signal.SIGKILL)
    say("copies", life=life, **told(job))
    job.close()


def rollback(gb: str = "10", tokens: str = "32768") -> None:
    """A restore into the living tensors of a process that stays: seconds, memory, addresses."""
    from keepstep.config import resolve
    from keepstep.edge.os.machine import proof_threads
    from keepstep.edge.os.threads import run_acts
    from keepstep.edge.torch.live_state import TorchState
    from keepstep.edge.torch.state import Protected

    trainer = Trainer(float(gb), int(tokens))
    trainer.step()
    protected = Protected.of({"model": trainer.model, "optimizer": trainer.optimizer}, lazy=True)
    live = TorchState(protected, 0, 1, resolve(None, {}, "lab"))
    with scratch() as home:
        gathered = live.gather()
        slot = Slot.create(MEMORY, home / "slot-0", gathered.payload_bytes, 16 * MIB)
        live.pin(slot)
        trainer.seal(slot, live.copy(gathered, slot), run_acts)
        addresses = trainer.addresses()
        trainer.step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        began = time.perf_counter()
        header, layout = slot.verify(threads=proof_threads())
        verified = time.perf_counter() - began
        live.load(slot, header, layout)
        loaded, loaded_peak = time.perf_counter() - began, torch.cuda.max_memory_allocated()
        wrong = live.differing(slot, header, layout)
        say(
            "rollback",
            state_gb=header.payload_bytes / GB,
            verify_s=verified,
            load_s=loaded - verified,
            proven_s=time.perf_counter() - began,
            wrong=len(wrong),
            same_addresses=addresses == trainer.addresses(),
            loaded_peak_ratio=loaded_peak / before,
            peak_ratio=torch.cuda.max_memory_allocated() / before,
        )
        slot.close()


def item() -> None:
    """How long a trainer's `loss.item()` waits while a state leaves the device: by the size of the
    pieces, and by how many streams take turns with them."""
    nbytes = 1 << 30
    there = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(8)]
    host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(8)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    x, event = torch.ones(1, device="cuda"), torch.cuda.Event()
    x.item()
    for piece, turns in ((0, 1), (nbytes, 1), (32 << 20, 1), (32 << 20, 2), (8 << 20, 2)):
        torch.cuda.synchronize()
        waits: list[float] = []
        began = time.perf_counter()
        number = 0
        for a, b in zip(there, host, strict=True) if piece else ():
            for at in range(0, nbytes, piece):
                with torch.cuda.stream(streams[number % turns]):
                    if turns > 1:
                        torch.cuda.current_stream().wait_event(event)
                    b[at : at + piece].copy_(a[at : at + piece], non_blocking=True)
                    if turns > 1:
                        event.record()
                number += 1
        ordered_s = time.perf_counter() - began
        while len(waits) < 30 or (piece and not all(stream.query() for stream in streams)):
            asked = time.perf_counter()
            x.item()
            waits.append((time.perf_counter() - asked) * 1e3)
        torch.cuda.synchronize()
        say(
            "item",
            piece_mib=piece / 2**20,
            streams=turns,
            median_ms=statistics.median(waits),
            worst_ms=max(waits),
            asked=len(waits),
            ordered_ms=ordered_s * 1e3,
            gbs=8 * nbytes / (time.perf_counter() - began) / GB,
        )


def graph() -> None:
    """A whole step in a CUDA graph under keepstep: does capturing it still work, and is what is
    sealed one step's state? Every replay changes what is copied."""
    import keepstep

    model = torch.nn.Linear(4096, 4096).cuda()
    optimizer = torch.optim.SGD(
        model.parameters(), 0.1, momentum=0.9
    )  # not capturable: by the hook
    x = torch.randn(64, 4096, device="cuda")

    def one() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            one()
    torch.cuda.current_stream().wait_stream(side)
    job = keepstep.protect(model=model, optimizer=optimizer)
    steps = iter(job.steps(40))
    next(steps)
    one()
    next(steps)
    captured = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(captured):
            one()
    except RuntimeError as error:
        say("graph", captured=False, error=str(error).partition("\n")[0].replace(" ", "_"))
        job.close(ok=False)
        return
    say("graph", captured=True)
    for _ in steps:
        for _ in range(50):
            captured.replay()
    reasons = list(job._protected.unfenced.values())
    say("graph_replays", **told(job), detected=bool(reasons))
    job.close()


def many(count: str = "5000", mode: str = "all") -> None:
    """The host's time for a step of a state of many small tensors: nothing saved, and all of it in
    every step. Each layer brings two tensors, and AdamW four more."""
    if mode == "all":
        for each in ("none", "keepstep", "none", "keepstep"):
            command = [sys.executable, "-m", "benchmarks.gpu.lab", "many", count, each]
            subprocess.run(command, check=False)
        return
    import keepstep

    layers = [torch.nn.Linear(64, 64) for _ in range(int(count) // 6)]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    x = torch.randn(64, 64, device="cuda")
    job = keepstep.protect(model=model, optimizer=optimizer) if mode == "keepstep" else None
    times: list[float] = []
    between: list[float] = []
    ended = 0.0
    for _ in job.steps(60) if job else range(60):
        began = time.perf_counter()
        between.append(began - ended)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()
        ended = time.perf_counter()
        times.append(ended - began)
    extra = {"boundary_ms": statistics.median(between[10:]) * 1e3}
    if job:
        extra |= told(job)
        job.close()
    say("many", mode=mode, tensors=int(count), step_ms=statistics.median(times[10:]) * 1e3, **extra)


EXPERIMENTS: dict[str, Callable[..., None]] = {
    "env": env,
    "futures": futures,
    "stale": stale,
    "capture": capture,
    "adopt": adopt,
    "rollback": rollback,
    "item": item,
    "many": many,
    "graph": graph,
    "shares": shares,
    "digests": digests,
    "frozen": frozen,
}


def main() -> None:
    name, *given = sys.argv[1:] or [""]
    if name not in EXPERIMENTS:
        sys.exit(f"expected one of {', '.join(EXPERIMENTS)}, found {name!r}")
    # memory that a killed experiment has left is another one's state
    os.environ.setdefault("KEEPSTEP_JOB", f"gpu-lab-{name}-{os.getpid()}")
    if not torch.cuda.is_available():
        sys.exit("expected a CUDA device, found none")
    watch = harness.watch()
    EXPERIMENTS[name](*given)
    harness.tell(watch.end())


if __name__ == "__main__":
    main()
