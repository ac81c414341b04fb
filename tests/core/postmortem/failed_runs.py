"""Failed runs, written from a seed: the files that launchers leave, and what their reader must say.

A run is healthy lines of every rank, one cause, what the peers say because of it, and what the
launcher says as it ends the rest. Each class has wordings of two kinds: `TUNED`, which the table of
patterns was made with, and `HELD_OUT`, written at the same time and not looked at since.
"""

# ruff: noqa: E501 - lines of logs are as long as they are

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta

WORLD = 8
LOCAL = 4  # ranks of a node
BEGIN = datetime(2026, 3, 14, 9, 26, 53)


@dataclass(frozen=True)
class Wording:
    """How one cause reads. `who` says it: the rank itself, the kernel or Slurm; `{rank}`, `{local}`,
    `{host}` and `{pid}` are filled in. `code`: with which the rank ends. `everywhere`: all ranks
    say it."""

    kind: str
    who: str
    lines: tuple[str, ...]
    code: int = 1
    everywhere: bool = False


def said(kind: str, *lines: str, code: int = 1, everywhere: bool = False) -> Wording:
    return Wording(kind, "rank", lines, code, everywhere)


def raised(kind: str, error: str, code: int = 1, everywhere: bool = False) -> Wording:
    lines = (
        "Traceback (most recent call last):",
        '  File "/work/train.py", line 211, in <module>',
        "    main()",
        '  File "/work/train.py", line 164, in main',
        "    step(batch)",
        *error.split("\n"),
    )
    return Wording(kind, "rank", lines, code, everywhere)


def kernel(kind: str, *lines: str, code: int = -6) -> Wording:
    return Wording(kind, "kernel", lines, code)


def slurm(kind: str, *lines: str, code: int = -9) -> Wording:
    return Wording(kind, "slurm", lines, code)


TUNED = [
    raised(
        "gpu-memory",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU {local} has a "
        "total capacity of 79.14 GiB of which 1.12 GiB is free.",
    ),
    kernel(
        "host-memory",
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task=python,pid={pid},uid=1000",
        "Memory cgroup out of memory: Killed process {pid} (python) total-vm:91234567kB, "
        "anon-rss:61234567kB",
        code=-9,
    ),
    raised(
        "host-allocation",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't "
        "allocate memory: you tried to allocate 68719476736 bytes. Error code 12 (Cannot allocate "
        "memory)",
    ),
    kernel("gpu-lost", "NVRM: Xid (PCI:0000:{bus}:00): 79, pid={pid}, GPU has fallen off the bus."),
    kernel(
        "gpu-ecc",
        "NVRM: Xid (PCI:0000:{bus}:00): 94, pid={pid}, Contained: SM (0x1). RST: No, D-RST: No",
    ),
    raised(
        "gpu-access",
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\nCUDA kernel "
        "errors might be asynchronously reported at some other API call.",
    ),
    said(
        "device-assert",
        "../aten/src/ATen/native/cuda/Indexing.cu:1290: indexSelectLargeIndex: block: [3,0,0], "
        'thread: [64,0,0] Assertion "srcIndex < srcSelectDimSize" failed.',
        "Traceback (most recent call last):",
        '  File "/work/train.py", line 90, in <module>',
        "RuntimeError: CUDA error: device-side assert triggered",
    ),
    kernel(
        "nvlink",
        "NVRM: Xid (PCI:0000:{bus}:00): 74, pid={pid}, NVLink: fatal error detected on link 3",
    ),
    kernel(
        "gpu-firmware",
        "NVRM: Xid (PCI:0000:{bus}:00): 119, pid={pid}, Timeout after 6s of waiting for RPC response "
        "from GPU GSP! Expected function 76",
    ),
    raised("gpu-library", "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    raised(
        "gpu-driver",
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
        everywhere=True,
    ),
    said(
        "network",
        "{host}:{pid}:{pid} [{local}] transport/net_ib.cc:1298 NCCL WARN NET/IB : Got completion "
        "from peer 10.0.0.7<51234> with status=12 opcode=0 len=0 vendor err 129 (Recv)",
        "{host}:{pid}:{pid} [{local}] NCCL INFO transport/net.cc:1134 -> 6",
        code=-6,
    ),
    raised(
        "rendezvous",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
        "network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: "
        "address already in use",
    ),
    raised(
        "collective-mismatch",
        "RuntimeError: Detected mismatch between collectives on ranks. Rank {rank} is running "
        "collective: CollectiveFingerPrint(SequenceNumber=77, OpType=ALLREDUCE, TensorShape=[4]), "
        "but Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=77, "
        "OpType=BROADCAST).",
    ),
    raised("import", "ModuleNotFoundError: No module named 'flash_attn'", everywhere=True),
    raised(
        "shape",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x512 and 1024x4096)",
        everywhere=True,
    ),
    raised("code", "KeyError: 'attention_mask'"),
    raised(
        "checkpoint",
        'RuntimeError: Error(s) in loading state_dict for GPT:\n\tMissing key(s) in state_dict: "h.0.w".',
        everywhere=True,
    ),
    raised(
        "numeric",
        "AssertionError: Rank {rank}: found NaN in local grad norm in backward pass before "
        "data-parallel communication collective. Device: {local}, node: {host}",
    ),
    raised(
        "data-worker", "RuntimeError: DataLoader worker (pid {pid}) is killed by signal: Killed. "
    ),
    raised(
        "data",
        "UnicodeDecodeError: Caught UnicodeDecodeError in DataLoader worker process 2.\nOriginal "
        'Traceback (most recent call last):\n  File "/work/data.py", line 31, in __getitem__\n'
        "UnicodeDecodeError: 'utf-8' codec can't decode byte 0x8b in position 1: invalid start byte",
    ),
    raised(
        "disk-full", "OSError: [Errno 28] No space left on device: '/ckpt/step_1200/shard_3.pt'"
    ),
    raised("storage", "OSError: [Errno 116] Stale file handle: '/mnt/nfs/data/shard-00017.tar'"),
    raised(
        "missing-file",
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/tokens/train_17.bin'",
        everywhere=True,
    ),
    said(
        "crash",
        "Fatal Python error: Segmentation fault",
        "",
        "Thread 0x00007f1 (most recent call first):",
        '  File "/work/ops.py", line 12 in fused',
        code=-11,
    ),
    raised(
        "shared-memory",
        "RuntimeError: DataLoader worker (pid {pid}) is killed by signal: Bus error. It is possible "
        "that dataloader's workers are out of shared memory. Please try to raise your shared memory "
        "limit.",
    ),
    Wording("killed", "exit", (), -9),
    slurm(
        "preempted",
        "slurmstepd: error: *** STEP 4711.0 ON {host} CANCELLED AT 2026-03-14T10:00:00 DUE TO TIME "
        "LIMIT ***",
        code=-15,
    ),
    slurm(
        "node-lost",
        "slurmstepd: error: *** JOB 4711 ON {host} CANCELLED AT 2026-03-14T10:00:00 DUE TO NODE "
        "FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***",
        code=-15,
    ),
    raised("limits", "OSError: [Errno 24] Too many open files: '/work/cache/idx.npy'"),
]

HELD_OUT = [
    said(
        "gpu-memory",
        "terminate called after throwing an instance of 'c10::OutOfMemoryError'",
        "  what():  CUDA out of memory. Tried to allocate 20.00 MiB (GPU {local}; 39.39 GiB total)",
        code=-6,
    ),
    slurm(
        "host-memory",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0. Some of the step tasks have "
        "been OOM Killed.",
        "srun: error: {host}: task {rank}: Out Of Memory",
    ),
    said(
        "host-allocation",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "  what():  std::bad_alloc",
        code=-6,
    ),
    raised("gpu-lost", "RuntimeError: No CUDA-capable device is detected"),
    raised("gpu-ecc", "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
    kernel(
        "gpu-access",
        "NVRM: Xid (PCI:0000:{bus}:00): 31, pid={pid}, name=python, Ch 00000008, intr 00000000. MMU "
        "Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f4c_0000",
    ),
    raised("device-assert", "torch.AcceleratorError: CUDA error: device-side assert triggered"),
    raised(
        "nvlink",
        "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution",
    ),
    kernel("gpu-firmware", "NVRM: Xid (PCI:0000:{bus}:00): 62, pid={pid}, 0a7c(2d50) 00000000"),
    raised(
        "gpu-library",
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    ),
    raised(
        "gpu-driver",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        everywhere=True,
    ),
    said(
        "network",
        "{host}:{pid}:{pid} [{local}] misc/ibvwrap.cc:120 NCCL WARN NET/IB : mlx5_{local}:1 Got async "
        "event : port error",
        code=-6,
    ),
    raised(
        "rendezvous",
        "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while "
        "trying to connect to (node1, 29500).",
        everywhere=True,
    ),
    said(
        "collective-mismatch",
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
        "  what():  [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:446] "
        "op.preamble.length <= op.nbytes. 64 vs 32",
        code=-6,
    ),
    raised(
        "import",
        "ImportError: /venv/lib/apex_C.cpython-311.so: undefined symbol: _ZN2at4_ops5zeros4callEv",
        everywhere=True,
    ),
    raised(
        "shape",
        "RuntimeError: The size of tensor a (2048) must match the size of tensor b (1024) at "
        "non-singleton dimension 1",
    ),
    raised(
        "code", "AttributeError: 'NoneType' object has no attribute 'backward'", everywhere=True
    ),
    raised(
        "checkpoint",
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
    ),
    raised(
        "numeric",
        "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
        everywhere=True,
    ),
    raised(
        "data-worker", "RuntimeError: DataLoader worker (pid(s) {pid}, 4243) exited unexpectedly"
    ),
    raised("data", "PIL.UnidentifiedImageError: cannot identify image file '/data/img/00131.jpg'"),
    raised("disk-full", "OSError: [Errno 122] Disk quota exceeded"),
    raised("storage", "OSError: [Errno 5] Input/output error: '/lustre/ckpt/step_40.pt'"),
    raised(
        "missing-file",
        "PermissionError: [Errno 13] Permission denied: '/ckpt/latest'",
        everywhere=True,
    ),
    Wording("crash", "exit", (), -11),
    raised(
        "shared-memory",
        "RuntimeError: unable to write to file </torch_417_2290161738_0>: No space left on device (28)",
    ),
    slurm("killed", "srun: error: {host}: task {rank}: Killed"),
    slurm(
        "preempted",
        "slurmstepd: error: *** JOB 4711 ON {host} CANCELLED AT 2026-03-14T10:00:00 DUE TO PREEMPTION ***",
        code=-15,
    ),
    slurm(
        "node-lost",
        "srun: error: Node failure on {host}",
        "srun: error: Aborting, timeout waiting for task(s) on {host}",
        code=-15,
    ),
    raised("limits", "RuntimeError: can't start new thread"),
]

NAMES_NO_RANK = {"preempted", "node-lost"}  # a node at most


@dataclass
class Run:
    """`files`: what there is to read. `kind`, `rank`: what must be said; rank None: nobody in
    particular."""

    name: str
    kind: str
    rank: int | None
    files: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Said:
    at: datetime
    who: int | str  # a rank, or "launcher", "kernel"
    text: str


def host_of(rank: int) -> str:
    return f"node{rank // LOCAL + 1}"


def pid_of(rank: int) -> int:
    return 41000 + 17 * rank


def filled(text: str, rank: int) -> str:
    values = {
        "{rank}": str(rank),
        "{local}": str(rank % LOCAL),
        "{host}": host_of(rank),
        "{pid}": str(pid_of(rank)),
        "{bus}": f"{0x18 + 0x22 * (rank % LOCAL):x}",
    }
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def later(at: datetime, seconds: float) -> datetime:
    return at + timedelta(seconds=seconds)


def stamp(at: datetime) -> str:
    return at.strftime("%Y-%m-%d %H:%M:%S,") + f"{at.microsecond // 1000:03d}"


def glog(at: datetime, source: str) -> str:
    return f"[E{at.strftime('%m%d %H:%M:%S.%f')}000 {source}]"


def healthy(draw: random.Random, ranks: range, steps: int) -> Iterator[Said]:
    for rank in ranks:
        at = later(BEGIN, draw.random())
        yield Said(at, rank, f"{stamp(at)} INFO trainer: rank {rank} of {WORLD} on {host_of(rank)}")
        comm = f"comm 0x55aa{rank}0 rank {rank} nranks {WORLD} cudaDev {rank % LOCAL} "
        bus = f"{0x18 + 0x22 * (rank % LOCAL):x}000"
        yield Said(
            at,
            rank,
            f"{host_of(rank)}:{pid_of(rank)}:{pid_of(rank) + 3} [{rank % LOCAL}] NCCL INFO {comm}"
            f"nvmlDev {rank % LOCAL} busId {bus} commId 0x1d - Init COMPLETE",
        )
        for step in range(steps):
            at = later(BEGIN, 20 + 2 * step + draw.random() / 10)
            loss = 4 / (step + 1) + draw.random() / 100
            yield Said(
                at, rank, f"{stamp(at)} INFO trainer: step {step} loss {loss:.4f} lr 1.0e-04"
            )


def watchdog(at: datetime, rank: int, seq: int, queued: int, op: str) -> list[str]:
    """As torch's NCCL backend tells of a collective that others did not enter in time."""
    head = f"[rank{rank}]:{glog(at, 'ProcessGroupNCCL.cpp:685')} [Rank {rank}] "
    of_group = f"[rank{rank}]:{glog(at, 'ProcessGroupNCCL.cpp:2252')} [PG ID 0 PG GUID 0(default_pg) Rank {rank}]"
    return [
        f"{head}Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, "
        "NumelIn=4096, NumelOut=4096, Timeout(ms)=600000) ran for 600027 milliseconds before timing out.",
        f"{of_group}  failure detected by watchdog at work sequence id: {seq} PG status: last "
        f"enqueued work: {queued}, last completed work: {seq - 1}",
        f"{head}To avoid data inconsistency, we are taking the entire process down.",
        "terminate called after throwing an instance of 'c10::DistBackendError'",
        f"  what():  [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Process group watchdog thread terminated "
        f"with exception: [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={seq}, OpType={op})",
    ]


def cascade(draw: random.Random, at: datetime, culprit: int, style: str) -> Iterator[Said]:
    """What the peers say because of it."""
    for rank in range(WORLD):
        if rank == culprit:
            continue
        if style == "gloo":
            then = later(at, 0.02 + draw.random() / 5)
            peer = draw.choice([r for r in range(WORLD) if r not in (culprit, rank)])
            words = draw.choice(
                [
                    "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
                    f"[10.0.0.{peer}]:4711",
                    "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Read error "
                    f"[10.0.0.{peer}]:4711: Connection reset by peer",
                ]
            )
            for line in (
                "Traceback (most recent call last):",
                '  File "/work/train.py", line 164, in main',
                f"RuntimeError: {words}",
            ):
                yield Said(then, rank, f"[rank{rank}]: {line}")
        elif style == "remote":
            then = later(at, 1 + draw.random())
            for line in (
                "Traceback (most recent call last):",
                '  File "/work/train.py", line 164, in main',
                "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, remote "
                "process exited or there was a network error, NCCL version 2.26.2",
                "ncclRemoteError: A call failed possibly due to a network error or a remote process "
                "exiting prematurely.",
            ):
                yield Said(then, rank, f"[rank{rank}]: {line}")
        else:
            then = later(at, 600 + draw.random())
            for line in watchdog(then, rank, 1201, 1201 + draw.randrange(4), "ALLREDUCE"):
                yield Said(then, rank, line)


def teardown(at: datetime, rank: int, code: int, named: int) -> Iterator[Said]:
    """The launcher ends the rest and sums up. `named`: whom it saw end first."""
    who = "launcher"
    for other in range(WORLD):
        if other not in (rank, named):
            yield Said(
                at,
                who,
                f"W{at.strftime('%m%d %H:%M:%S.%f')} 400 torch/distributed/elastic/multiprocessing/api.py:900]"
                f" Sending process {pid_of(other)} closing signal SIGTERM",
            )
    end = code if named == rank else -6
    signal = {-6: "SIGABRT", -9: "SIGKILL", -11: "SIGSEGV", -15: "SIGTERM"}
    words = (
        f"Signal {-end} ({signal[end]}) received by PID {pid_of(named)}"
        if end < 0
        else "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
    )
    for line in (
        f"E{at.strftime('%m%d %H:%M:%S.%f')} 400 torch/distributed/elastic/multiprocessing/api.py:874] "
        f"failed (exitcode: {end}) local_rank: {named % LOCAL} (pid: {pid_of(named)}) of binary: /usr/bin/python3",
        "Traceback (most recent call last):",
        '  File "/usr/bin/torchrun", line 8, in <module>',
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "=" * 60,
        "train.py FAILED",
        "-" * 60,
        "Failures:",
        "  <NO_OTHER_FAILURES>",
        "-" * 60,
        "Root Cause (first observed failure):",
        "[0]:",
        f"  time      : {at.strftime('%Y-%m-%d_%H:%M:%S')}",
        f"  host      : {host_of(named)}",
        f"  rank      : {named} (local_rank: {named % LOCAL})",
        f"  exitcode  : {end} (pid: {pid_of(named)})",
        "  error_file: <N/A>",
        f"  traceback : {words}",
        "=" * 60,
    ):
        yield Said(at, who, line)
    yield Said(
        at,
        who,
        "[W314 TCPStore.cpp:125] recvValue failed on SocketImpl(fd=3): Connection reset by peer",
    )


def cause(wording: Wording, rank: int, at: datetime) -> Iterator[Said]:
    ranks = range(WORLD) if wording.everywhere else [rank]
    for each in ranks:
        for line in wording.lines:
            text = filled(line, each)
            if wording.who == "rank":
                tag = "" if " NCCL " in text else f"[rank{each}]: "
                yield Said(at, each, tag + text)
            elif wording.who == "kernel":
                head = f"{at.strftime('%b %d %H:%M:%S')} {host_of(each)} kernel: [99131.{each}42] "
                yield Said(at, "kernel", head + text)
            else:
                yield Said(at, "launcher", text)


# -- how launchers lay it out


def torchrun(parts: list[Said], draw: random.Random) -> dict[str, bytes]:
    """One directory a rank, as `--log-dir` has it, and the launcher's own output beside it."""
    files: dict[str, list[str]] = {}
    for part in parts:
        if isinstance(part.who, int):
            stream = "stdout" if " INFO " in part.text else "stderr"
            place = f"none_ab12cd/attempt_0/{part.who}/{stream}.log"
        else:
            place = {"launcher": "torchrun.log", "kernel": "dmesg.txt"}[part.who]
        files.setdefault(place, []).append(part.text)
    return as_bytes(files)


def labelled(parts: list[Said], draw: random.Random) -> dict[str, bytes]:
    """`srun --label`: one file of all ranks; the kernel's log apart."""
    files: dict[str, list[str]] = {}
    for part in sorted(parts, key=lambda p: p.at):
        label = f"{part.who}: " if isinstance(part.who, int) else ""
        place = "kern.log" if part.who == "kernel" else "slurm-4711.out"
        files.setdefault(place, []).append(label + part.text)
    return as_bytes(files)


def redirected(parts: list[Said], draw: random.Random) -> dict[str, bytes]:
    """`> rank3.log 2>&1`, on nodes whose clocks differ by up to a minute."""
    skew = {host_of(r): timedelta(seconds=draw.uniform(-60, 60)) for r in range(WORLD)}
    files: dict[str, list[str]] = {}
    for part in parts:
        text = part.text
        place = f"{part.who}.log"
        if isinstance(part.who, int):
            there = part.at + skew[host_of(part.who)]
            text = text.replace(stamp(part.at), stamp(there)).replace(
                part.at.strftime("%m%d %H:%M:%S"), there.strftime("%m%d %H:%M:%S")
            )
            place = f"{host_of(part.who)}/rank{part.who}.log"
        files.setdefault(place, []).append(text)
    return as_bytes(files)


def mpi_tagged(parts: list[Said], draw: random.Random) -> dict[str, bytes]:
    """`mpirun --tag-output`."""
    files: dict[str, list[str]] = {}
    for part in sorted(parts, key=lambda p: p.at):
        label = f"[1,{part.who}]<stderr>:" if isinstance(part.who, int) else ""
        place = "messages" if part.who == "kernel" else "job.o4711"
        files.setdefault(place, []).append(label + part.text)
    return as_bytes(files)


def slurm_files(parts: list[Said], draw: random.Random) -> dict[str, bytes]:
    """`--output=train-%j-%t.out`."""
    files: dict[str, list[str]] = {}
    for part in parts:
        place = (
            f"train-4711-{part.who}.out" if isinstance(part.who, int) else f"{part.who}-4711.log"
        )
        files.setdefault(place, []).append(part.text)
    return as_bytes(files)


def as_bytes(files: dict[str, list[str]]) -> dict[str, bytes]:
    return {name: ("\n".join(lines) + "\n").encode() for name, lines in files.items()}


Layout = Callable[[list[Said], random.Random], dict[str, bytes]]


# -- runs


def failed(
    name: str,
    wording: Wording,
    layout: Layout,
    style: str,
    draw: random.Random,
    decoy: Wording | None = None,
    blames_a_peer: bool = False,
) -> Run:
    """A run that ends by this cause, with a decoy among its healthy lines."""
    rank = draw.randrange(1, WORLD)
    at = later(BEGIN, 80 + draw.random())
    parts = list(healthy(draw, range(WORLD), 30))
    if decoy is not None:
        parts += innocent(decoy, draw)
    parts += cause(wording, rank, at)
    if wording.everywhere or wording.kind in NAMES_NO_RANK:
        style = "none"
    else:
        parts += cascade(draw, at, rank, style)
    ended = later(at, 605 if style == "watchdog" else 4)
    is_named = wording.who == "exit" or not blames_a_peer  # of an exit nobody else tells
    named = rank if is_named else (rank + 3) % WORLD
    parts += teardown(ended, rank, wording.code, named)
    parts.sort(key=lambda p: p.at)
    expected = None if wording.everywhere or wording.kind in NAMES_NO_RANK else rank
    return Run(name, wording.kind, expected, layout(parts, draw))


def innocent(wording: Wording, draw: random.Random) -> list[Said]:
    """The same words where they mean nothing: a configuration, a retry that went well, a quotation."""
    rank = draw.randrange(WORLD)
    words = filled(wording.lines[-1] if wording.lines else "Killed", rank).strip()
    begun, midst = later(BEGIN, 5), later(BEGIN, 45)
    return [
        Said(
            begun,
            rank,
            f"{stamp(begun)} INFO trainer: config: {{'retry_on': ['{words}'], 'tries': 3}}",
        ),
        Said(begun, rank, f'  fatal_patterns: "{words}"'),
        Said(midst, rank, f"{stamp(midst)} WARNING trainer: caught {words}; trying again (1 of 3)"),
    ]


def hung(name: str, layout: Layout, draw: random.Random, how: str, decoy: Wording | None) -> Run:
    """One rank does not enter a collective, and nothing says why."""
    rank = draw.randrange(1, WORLD)
    at = later(BEGIN, 80)
    parts = list(healthy(draw, range(WORLD), 30))
    if decoy is not None:
        parts += innocent(decoy, draw)
    parts += cascade(draw, at, rank, "watchdog")
    then = later(at, 601)
    if how == "dump":  # the one that is behind says how far it got
        parts.append(
            Said(
                then,
                rank,
                f"[rank{rank}]:{glog(then, 'ProcessGroupNCCL.cpp:1746')} [PG ID 0 PG GUID 0(default_pg) Rank "
                f"{rank}] Received a dump signal due to a collective timeout from  rank 0 and we will try our "
                "best to dump the debug info. Last enqueued NCCL work: 1200, last completed NCCL work: 1200.",
            )
        )
    parts += teardown(later(at, 605), rank, -6, (rank + 2) % WORLD)
    parts.sort(key=lambda p: p.at)
    return Run(name, "hang", rank, layout(parts, draw))


def clueless(name: str, layout: Layout, draw: random.Random, decoy: Wording) -> Run:
    """Only what everybody says because of something else: nobody can know."""
    parts = [*healthy(draw, range(WORLD), 30), *innocent(decoy, draw)]
    at = later(BEGIN, 90)
    parts += cascade(draw, at, WORLD, "gloo")
    parts += teardown(later(at, 3), 0, -15, 0)
    parts.sort(key=lambda p: p.at)
    return Run(name, "unknown", None, layout(parts, draw))


def runs(wordings: list[Wording], layouts: list[Layout], seed: int) -> list[Run]:
    """Four runs for each class: three that it ended, and one that it did not."""
    found = []
    for i, wording in enumerate(wordings):
        draw = random.Random(seed * 1000 + i)
        decoy = wordings[(i + 7) % len(wordings)]
        a, b, c = (layouts[(i + k) % len(layouts)] for k in range(3))
        found += [
            failed(f"{wording.kind}: alone", wording, a, "gloo", draw),
            failed(f"{wording.kind}: before a watchdog", wording, b, "watchdog", draw, decoy),
            failed(f"{wording.kind}: a peer is blamed", wording, c, "remote", draw, decoy, True),
        ]
        near = [
            lambda n, w=wording, d=draw, at=a: hung(n, at, d, "dump", w),
            lambda n, w=wording, d=draw, at=b: hung(n, at, d, "silent", w),
            lambda n, w=wording, d=draw, at=c: clueless(n, at, d, w),
            lambda n, w=wording, d=draw, o=decoy, at=a: failed(n, o, at, "gloo", d, w),
        ]
        found.append(near[i % 4](f"{wording.kind}: only mentioned"))
    return found


def tuned() -> list[Run]:
    return runs(TUNED, [torchrun, labelled, redirected], seed=1)


def held_out() -> list[Run]:
    return runs(HELD_OUT, [mpi_tagged, slurm_files, redirected, torchrun], seed=2)
