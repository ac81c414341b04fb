"""What do copies that ride in the network's idle time cost a training, against the ways GEMINI
(SOSP 2023, figure 16) compares?

Two nodes in network namespaces behind links that `tc tbf` shapes. On each a trainer, a small
process without torch: it computes (sleeps), exchanges bytes with the other one as an all-reduce
would, and shows its rhythm as a rank does; and a keeper's links (`edge/net/peers.py`) with the real
planner and gate (`runtime/replication/pacing.py`), which send a state to the other node every
iteration. Idle time is about 13 % of an iteration, the state's copy takes about 10 %. What is
received goes through a reserved buffer of R bytes in p parts, and from there to "host memory" at
the network's own rate. The state stands still for one iteration: one that is not across by its end
is waited for.

    python benchmarks/interleave.py                       # 50 iterations of each scheme, and the
                                                          # rest: less than 20 minutes
    python benchmarks/interleave.py --quick               # 6 of each scheme: about two minutes
    python benchmarks/interleave.py --realtime --json     # on a machine with other work to do

schemes    baseline: no copies. blocking: at the beginning of the iteration, which waits. naive: one
           partition an idle span, however large. one buffer: R in one part. keepstep: R in four.
           They take turns, iteration by iteration.
parts      How long a state takes through R in 1, 2, 4, 8 parts, with nothing else on the link,
           against its bytes over the rate.
overflow   A state of twice the idle time, copied every iteration, every second, every fourth: what
           each adds, against what was planned for the link as it is, and by the keepers, who
           measure it.
ddp        Real ranks of a small DDP model, steps with 150 ms of computing elsewhere, 8 MiB of a
           node and step to be copied over 200 Mbit/s.
change     Another rhythm begins: when it is planned anew, and for how long chunks meet collectives
           before and after.

Medians over iterations; differences of medians; "collectives" and "waited" say where it is spent. A
collective is met for as long as what was granted, at the link's rate and behind what had been
granted before it, lies within it. With --realtime the nodes' processes, which compute next to
nothing, go before all others on the machine: what they emulate does not wait for a core either.
Emulation: two trainers and two keepers share this machine's cores, and a shaped veth pair shows no
contention of NCCL, of PCIe, of a device's memory. Links are slow and iterations long, so that the
milliseconds in which Python wakes up count for little. TCP is Reno's on these links, whatever the
machine prefers: BBR all but stops for 200 ms every 10 s to measure the round trip, and so makes a
collective 150 ms longer now and then, with copies or without.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import harness  # beside this file: it is started as a script

from keepstep.config import job_dir_of
from keepstep.core.pacing.schedule import Cost, Reserve, plan
from keepstep.core.wire.traffic import LinkOptions
from keepstep.edge.net.peers import PeerOptions, Peers
from keepstep.edge.net.tcp import interface_of
from keepstep.edge.os.clock import CLOCK
from keepstep.edge.os.job_directory import claim_job_dir
from keepstep.edge.shm.collective_profile_page import CollectiveProfileWriter, profile_path
from keepstep.edge.shm.memory import MEMORY
from keepstep.model.messages.peers import MeshMessage
from keepstep.model.rhythm import NO_STEP
from keepstep.model.snapshot import Stamp
from keepstep.model.units import KIB, MS_NS, S_NS
from keepstep.model.wire import Identity, Part, Span
from keepstep.runtime.keeper.open_links import HASHING, LockedGate, new_link_table
from keepstep.runtime.replication.pacing import Pacing
from keepstep.testing.lab import Lab
from keepstep.testing.network import parse_rate, why_no_namespaces

SECRET, JOB = b"of the benchmark's keepers only", bytes(16)
TRAINER_PORT, KEEPER_PORT = 47200, 47300
CONGESTION = "reno"  # every kernel has it
# of the shaped links: a larger one would be saved up while the link is idle, which no network does
BURST_S = 0.0005
LEAST_BURST_BYTES = 4 * KIB
HEADERS = 1448 / 1514  # of a shaped rate, what is left for TCP's payload
PAPER = {
    "baseline": "43.5 s",
    "blocking": "+10.1 %",
    "naive": "out of memory",
    "one buffer": "+3.5 %",
    "keepstep": "+0.0 %",
}
MU = 0.95
SLACK_RATIO = 0.25  # of a chunk's time
REALTIME = "INTERLEAVE_REALTIME"
WARM_UP = 24  # iterations, from which the rhythm is learnt


DDP_CASES = {
    "no redundancy": ("none", "auto"),
    "at once": ("copies:2", "off"),
    "interleaved": ("copies:2", "auto"),
}
DDP_RATE = 200_000_000
DDP_SCRIPT = """
import os, statistics, time, torch, keepstep
keepstep.init_process_group()
torch.set_num_threads(1)
rank = int(os.environ["RANK"])
torch.manual_seed(rank)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
own = torch.randn(500_000)  # which no other rank has: 2 MB
ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
optimizer = torch.optim.AdamW(model.parameters())
job = keepstep.protect(model=model, optimizer=optimizer, own=own)
ends = []
for step in job.steps(50):
    with step:
        time.sleep(0.15)
        own.add_(1.0)
        ddp(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    ends.append(time.perf_counter())
if rank == 0:
    with open(os.environ["BENCH_RESULT"], "w") as file:
        file.write(str(statistics.median(b - a for a, b in zip(ends[20:], ends[21:]))))
"""


@dataclass(frozen=True)
class Case:
    """All that a node's processes need to know. `rhythms`: for each the idle milliseconds and
    between them the bytes of a collective."""

    rhythms: list[list[tuple[float, int]]]
    state_bytes: int
    reserve_bytes: int
    bytes_per_s: int

    @property
    def idle_ns(self) -> list[int]:
        return [round(idle * MS_NS) for idle, _ in self.rhythms[0]]

    def planned(self, nbytes: int, reserve: Reserve) -> Any:
        return plan(self.idle_ns, 1, nbytes, reserve, Cost(MS_NS // 5, self.bytes_per_s), MU)


@dataclass(frozen=True)
class Turn:
    """One iteration: which rhythm, which keeper sends how many times the state, and whether the
    iteration waits for it."""

    scheme: str
    rhythm: int = 0
    copy: str = ""
    states: float = 1.0
    waits: str = "end"  # begin, end or never


PARTS = (1, 2, 4, 8)
EVERY = (1, 2, 4)
SCHEMES = {f"in {parts}": (parts, False) for parts in PARTS}  # parts of R, gated
SCHEMES |= {"naive": (1, True), "one buffer": (1, True), "keepstep": (4, True)}


# -- a trainer, a process of its own


def exchange(sock: socket.socket, nbytes: int, source: memoryview, target: bytearray) -> None:
    """As many bytes each way, as in a ring all-reduce of two; over for both when it is over for
    one."""
    sender = threading.Thread(target=sock.sendall, args=(source[:nbytes],))
    sender.start()
    left = nbytes
    while left:
        left -= sock.recv_into(target, min(left, len(target)))
    sender.join()
    sock.sendall(b"!")  # what was sent lies in the kernel's buffer for a while
    assert sock.recv(1) == b"!"


def train(node: int, host: str, other: str, job_dir: Path, case: Case) -> None:
    """Reads turns from standard input, one a line; answers each with what it took."""
    if node == 0:
        with socket.create_server((host, TRAINER_PORT)) as server:
            print("ready", flush=True)
            peer = server.accept()[0]
    else:
        print("ready", flush=True)
        peer = dial((other, TRAINER_PORT), host)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keeper = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keeper.connect(str(job_dir / "bench.sock"))
    page = CollectiveProfileWriter(MEMORY, profile_path(job_dir, node), time.monotonic_ns)
    most = max(nbytes for rhythm in case.rhythms for _, nbytes in rhythm)
    source, target = memoryview(os.urandom(most)), bytearray(256 * KIB)
    for number, line in enumerate(sys.stdin):
        turn = Turn(**json.loads(line))
        exchange(peer, 1, source, target)  # both begin together
        began_ns, collectives, under_way, waited_ns = time.monotonic_ns(), [], False, 0

        def copied() -> int:
            """How long it had to be waited for."""
            page.step(NO_STEP)  # nothing is to be spared now
            since_ns = time.monotonic_ns()
            keeper.recv(1)
            return time.monotonic_ns() - since_ns

        page.step(NO_STEP if turn.waits == "begin" else number)
        if turn.copy:
            keeper.send(f"{turn.copy}/{round(turn.states * case.state_bytes)}/{number}".encode())
            under_way = turn.waits != "never"
            if turn.waits == "begin":
                waited_ns = copied()
                under_way = False
                page.step(number)
        for idle_ms, nbytes in case.rhythms[turn.rhythm]:
            time.sleep(idle_ms / 1000)
            if nbytes:
                page.began()
                at_ns = time.monotonic_ns()
                exchange(peer, nbytes, source, target)
                collectives.append((at_ns, time.monotonic_ns()))
                page.ended()
        if under_way:
            try:
                keeper.recv(1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                waited_ns = copied()
        times = {
            "took_ns": time.monotonic_ns() - began_ns,
            "waited_ns": waited_ns,
            "collectives": collectives,
        }
        print(json.dumps(times), flush=True)
    page.close()


def dial(address: tuple[str, int], host: str) -> socket.socket:
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(address, source_address=(host, 0))
        time.sleep(0.05)


# -- a keeper, likewise


class Receiving:
    """The other end's reserved buffer: what was placed and not yet copied out of it, and the most
    of that there ever was."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self.held_bytes = self.peak_bytes = 0
        self._free_s = 0.0  # when what came last had been copied out
        self.up_event = threading.Event()

    def up(self, node: int) -> None:
        self.up_event.set()

    def message(self, node: int, message: MeshMessage) -> None: ...

    def place(self, node: int, span: Span) -> memoryview | None:
        self.held_bytes += span.length
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return memoryview(bytearray(span.length))

    def block(self, node: int, span: Span, checksum: int) -> None:
        """Answered, and so drained, only when it has been copied out. Meanwhile the next one fills
        the next part: the kernel's buffer."""
        now_s = time.monotonic()
        # A sleep that took too long is no slower memory: the next copy began when the last one
        # should have ended.
        began_s = (
            self._free_s
            if now_s - self._free_s < SLACK_RATIO * span.length / self._bytes_per_s
            else now_s
        )
        self._free_s = began_s + span.length / self._bytes_per_s
        time.sleep(max(0.0, self._free_s - now_s))
        self.held_bytes -= span.length

    def writable(self, node: int) -> None: ...

    def dead(self, node: int, why: str, is_loss: bool) -> None: ...


class Told:
    """A journal that only remembers."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []

    def record(self, kind: str, why: str, /, **data: Any) -> None:
        self.lines.append((time.monotonic_ns(), why))


@dataclass
class Sender:
    peers: Peers
    receiving: Receiving
    pacing: Pacing | None
    told: Told
    parts: int


def keep(node: int, host: str, other: str, job_dir: Path, case: Case) -> None:
    senders = {
        name: make(index, name, node, host, other, job_dir, case)
        for index, name in enumerate(SCHEMES)
    }
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(str(job_dir / "bench.sock"))
    server.listen()
    for sender in senders.values():
        assert sender.receiving.up_event.wait(60)
    print("ready", flush=True)
    trainer = server.accept()[0]
    source = memoryview(os.urandom(max(4 * case.state_bytes, 1)))
    # it has left without hearing of a copy that it does not wait for
    with contextlib.suppress(ConnectionResetError):
        while asked := trainer.recv(100).decode():
            name, nbytes, number = asked.split("/")
            copy(
                senders[name],
                source[: int(nbytes)],
                node,
                int(number),
                sizes(case, name, int(nbytes)),
                trainer,
            )
    report = {
        name: {
            "peak_bytes": s.receiving.peak_bytes,
            "told": s.told.lines,
            "late": s.pacing.late if s.pacing else 0,
            "overflow_ns": s.pacing.plan.overflow_ns if s.pacing and s.pacing.plan else None,
            "trace": [asdict(t) for t in s.pacing.trace] if s.pacing else [],
        }
        for name, s in senders.items()
    }
    print(json.dumps(report), flush=True)
    for sender in senders.values():
        sender.peers.close()


def make(
    index: int, name: str, node: int, host: str, other: str, job_dir: Path, case: Case
) -> Sender:
    parts, gated = SCHEMES[name]
    receiving, told, me = Receiving(case.bytes_per_s), Told(), Identity(JOB, node, 1)
    window_bytes = 1 << 30 if name == "naive" else case.reserve_bytes
    reserve = Reserve(window_bytes, parts)
    pacing = Pacing(job_dir, [host], MEMORY, CLOCK, told, interface_of, reserve) if gated else None
    if pacing is not None:
        pacing.trace = deque()  # all of it
    gate = LockedGate(pacing) if pacing else None
    options = LinkOptions(hashing=HASHING, window_bytes=window_bytes, gate=gate)
    peers = Peers(
        lambda shell: new_link_table(me, SECRET, receiving, shell, options),
        PeerOptions(bind=(host, KEEPER_PORT + index)),
    )
    peers.connect(1 - node, (other, KEEPER_PORT + index))
    return Sender(peers, receiving, pacing, told, parts)


def sizes(case: Case, name: str, nbytes: int) -> Iterator[int]:
    if name == "naive":
        yield from (chunk.nbytes for chunk in case.planned(nbytes, Reserve(1 << 30, 1)).chunks)
        return
    chunk_bytes = case.reserve_bytes // SCHEMES[name][0]
    for at in range(0, nbytes, chunk_bytes):
        yield min(chunk_bytes, nbytes - at)


def copy(
    sender: Sender,
    source: memoryview,
    node: int,
    number: int,
    chunks: Iterator[int],
    trainer: socket.socket,
) -> None:
    """Hand all of it to the link; the trainer hears when the last chunk has been copied out at the
    other end."""
    lock, spans, at = threading.Lock(), [], 0
    for nbytes in chunks:
        spans.append(Span(node, Stamp(number, 1), Part.PAYLOAD, at, nbytes))
        at += nbytes
    left = deque(spans)

    def done(why: str | None) -> None:
        with lock:
            left.pop()
            if not left:
                with contextlib.suppress(OSError):
                    trainer.send(b"d")

    if sender.pacing is not None:
        sender.pacing.expects(at)
    for span in spans:
        assert sender.peers.send_block(
            1 - node, span, source[span.offset : span.offset + span.length], done
        )


# -- all of it together


class Site:
    """Both nodes. `turn` has both do one iteration; `close` gives what the keepers have seen."""

    def __init__(self, lab: Lab, case: Case, rate: int) -> None:
        self.processes: dict[tuple[str, int], Any] = {}
        for node in lab.nodes:
            burst = max(LEAST_BURST_BYTES, int(rate / 8 * BURST_S))
            shape = ["tc", "qdisc", "change", "dev", "eth0", "root", "tbf", "rate", f"{rate}bit"]
            shape += ["burst", str(burst), "limit", str(burst + rate // 8 // 50)]
            # of this namespace alone
            choose = ["sh", "-c", f"echo {CONGESTION} > /proc/sys/net/ipv4/tcp_congestion_control"]
            for words in (shape, choose):
                subprocess.run([*lab.seats[node].before, *words], check=True)
        for what in ("keep", "train"):
            for node in lab.nodes:
                job_dir = job_dir_of(lab.arena_dir(node), "bench")
                claim_job_dir(job_dir)
                hosts = [lab.seats[n].address for n in (node, 1 - node)]
                words = [
                    sys.executable,
                    __file__,
                    f"--{what}",
                    str(node),
                    *hosts,
                    job_dir,
                    json.dumps(asdict(case)),
                ]
                self.processes[what, node] = lab.start(
                    node, words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
                )
            for node in lab.nodes:
                assert self._line(what, node) == "ready"

    def _line(self, what: str, node: int) -> str:
        line = self.processes[what, node].stdout.readline().strip()
        assert line, f"{what} of node {node} has ended"
        return str(line)

    def turn(self, turn: Turn) -> list[dict[str, Any]]:
        for node in (0, 1):
            print(json.dumps(asdict(turn)), file=self.processes["train", node].stdin, flush=True)
        return [json.loads(self._line("train", node)) for node in (0, 1)]

    def close(self) -> list[dict[str, Any]]:
        for node in (0, 1):
            self.processes["train", node].stdin.close()
            self.processes["train", node].wait(60)
        return [json.loads(self._line("keep", node)) for node in (0, 1)]


Seen = list[tuple[Turn, list[dict[str, Any]]]]


def run(lab: Lab, case: Case, rate: int, turns: list[Turn]) -> tuple[Seen, list[dict[str, Any]]]:
    site = Site(lab, case, rate)
    seen = [(turn, site.turn(turn)) for turn in turns]
    return seen, site.close()


def took_s(seen: Seen, scheme: str) -> list[float]:
    return [
        max(node["took_ns"] for node in nodes) / S_NS
        for turn, nodes in seen
        if turn.scheme == scheme
    ]


def collectives_ms(seen: Seen, scheme: str) -> float:
    """The median, of all collectives of an iteration together."""
    return statistics.median(
        sum(b - a for a, b in n["collectives"]) / MS_NS
        for turn, nodes in seen
        if turn.scheme == scheme
        for n in nodes
    )


def waited_ms(seen: Seen, scheme: str) -> float:
    """The median, of what an iteration waits for its copy."""
    return statistics.median(
        max(n["waited_ns"] for n in nodes) / MS_NS for turn, nodes in seen if turn.scheme == scheme
    )


def overlaps_ms(
    seen: Seen, reports: list[dict[str, Any]], scheme: str, case: Case, name: str = "keepstep"
) -> list[float]:
    """Of each collective of that scheme's iterations: for how long what its own node had been
    granted lay on the link beside it."""
    found = []
    for node in (0, 1):
        wire: list[tuple[int, int]] = []
        for sent in reports[node][name]["trace"]:
            first, last = (
                sent["at_ns"] + n * S_NS // case.bytes_per_s
                for n in (0, sent["under_way_bytes"] + sent["nbytes"])
            )
            # what lay before it is counted already
            wire.append((max(first, wire[-1][1]) if wire else first, last))
        for turn, nodes in seen:
            if turn.scheme == scheme:
                for began, ended in nodes[node]["collectives"]:
                    found.append(
                        sum(max(0, min(b, ended) - max(a, began)) for a, b in wire) / MS_NS
                    )
    return found


def schemes(lab: Lab, case: Case, rate: int, rounds: int) -> dict[str, Any]:
    cycle = [
        Turn("baseline"),
        Turn("blocking", copy="in 4", waits="begin"),
        Turn("naive", copy="naive"),
        Turn("one buffer", copy="one buffer"),
        Turn("keepstep", copy="keepstep"),
    ]
    turns = [Turn("warm-up")] * WARM_UP
    for number in range(-2, rounds):  # the first ones learn how fast the link is
        turned = cycle[number % len(cycle) :] + cycle[: number % len(cycle)]
        turns += (
            turned
            if number >= 0
            else [Turn("warm-up", 0, t.copy, t.states, t.waits) for t in cycle]
        )
    seen, reports = run(lab, case, rate, turns)
    base = statistics.median(took_s(seen, "baseline"))
    found: dict[str, Any] = {"baseline_s": base, "idle_ratio": sum(case.idle_ns) / S_NS / base}
    found["copy_ratio"] = case.state_bytes / case.bytes_per_s / base
    found["rounds"], found["reserve_bytes"] = rounds, case.reserve_bytes
    for name in [turn.scheme for turn in cycle]:
        taken = took_s(seen, name)
        keeper = {"blocking": "in 4"}.get(name, name)
        row = {
            "median_s": statistics.median(taken),
            "added_ratio": statistics.median(taken) / base - 1,
            "paper": PAPER[name],
        }
        row |= {"collectives_ms": collectives_ms(seen, name), "waited_ms": waited_ms(seen, name)}
        if keeper in SCHEMES:
            row["peak_bytes"] = max(report[keeper]["peak_bytes"] for report in reports)
            row["late"] = sum(report[keeper]["late"] for report in reports)
            met = overlaps_ms(seen, reports, name, case, keeper)
            row["met_ms"], row["met_most_ms"] = statistics.fmean(met), max(met)
        found[name] = row
    found["told"] = [line for _, line in reports[0]["keepstep"]["told"]][-1:]
    return found


def parts(lab: Lab, case: Case, rate: int, rounds: int) -> dict[str, Any]:
    """How long a state takes that is waited for, through the same R in so many parts."""
    turns = [
        Turn(f"in {parts}", copy=f"in {parts}", waits="begin")
        for _ in range(rounds)
        for parts in PARTS
    ]
    seen, _ = run(
        lab,
        Case([[(1.0, 1000)]], case.state_bytes, case.reserve_bytes, case.bytes_per_s),
        rate,
        turns,
    )
    alone_s = case.state_bytes / case.bytes_per_s
    return {"alone_s": alone_s} | {
        str(n): statistics.median(took_s(seen, f"in {n}")) / alone_s for n in PARTS
    }


def overflow(lab: Lab, case: Case, rate: int, rounds: int) -> dict[str, Any]:
    states = 2 * sum(case.idle_ns) / S_NS * case.bytes_per_s / case.state_bytes
    planned = case.planned(round(states * case.state_bytes), Reserve(case.reserve_bytes, 4))
    turns = [Turn("warm-up")] * WARM_UP + [Turn("warm-up", copy="keepstep", states=states)] * 4
    for _ in range(rounds):
        turns += [Turn("baseline")] * 4
        for every in EVERY:
            turns += [
                Turn(f"every {every}, {n}", copy="" if n % every else "keepstep", states=states)
                for n in range(4)
            ]
    seen, reports = run(lab, case, rate, turns)
    base = statistics.median(took_s(seen, "baseline"))
    found: dict[str, Any] = {
        "baseline_s": base,
        "planned_ms": planned.overflow_ns / MS_NS,
        "spread_steps": planned.spread_steps,
    }
    found["keepers_ms"] = [report["keepstep"]["overflow_ns"] / MS_NS for report in reports]
    for every in EVERY:
        added = (
            statistics.fmean(
                statistics.median(took_s(seen, f"every {every}, {n}")) for n in range(4)
            )
            - base
        )
        found[f"every {every}"] = {
            "added_ms": 1000 * added,
            "planned_ms": planned.added_ns(every) / MS_NS,
        }
    return found


def change(lab: Lab, case: Case, rate: int, steps: int) -> dict[str, Any]:
    """Nobody waits for copies here, as in keepstep; the first four iterations of the other rhythm
    are counted by themselves."""
    turns = [Turn("warm-up")] * WARM_UP + [Turn("warm-up", copy="keepstep")] * 5
    turns += [Turn("before", copy="keepstep", waits="never")] * steps
    turns += [Turn("changing", 1, "keepstep", waits="never")] * 6
    turns += [Turn("after", 1, "keepstep", waits="never")] * steps
    seen, reports = run(lab, case, rate, turns)
    tolerated_ms = Cost(MS_NS // 5, case.bytes_per_s).of(case.reserve_bytes) / MS_NS
    found: dict[str, Any] = {"tolerated_ms": tolerated_ms}
    for scheme in ("before", "changing", "after"):
        met = overlaps_ms(seen, reports, scheme, case)
        found[scheme] = {
            "most_ms": max(met),
            "mean_ms": statistics.fmean(met),
            "collectives": len(met),
        }
    found["told"] = [line for _, line in reports[0]["keepstep"]["told"]]
    return found


def ddp(rate: int, rounds: int) -> dict[str, Any]:
    """Real ranks, keepers, captures: without redundancy, with copies sent at once, with copies
    interleaved. In turns, there and back."""
    taken: dict[str, list[float]] = {name: [] for name in DDP_CASES}
    for number in range(rounds):
        for name in list(DDP_CASES)[:: 1 if number % 2 == 0 else -1]:
            policy, interleave = DDP_CASES[name]
            with tempfile.TemporaryDirectory(prefix="interleave-") as room:
                script = Path(room) / "train.py"
                script.write_text(DDP_SCRIPT)
                words = [
                    "lab",
                    "run",
                    "--nodes",
                    "2",
                    "--policy",
                    policy,
                    "--rate",
                    f"{rate // 1000}kbit",
                    "--work",
                    room,
                    script,
                ]
                env = {
                    **os.environ,
                    "KEEPSTEP_INTERLEAVE": interleave,
                    "BENCH_RESULT": f"{room}/result",
                }
                subprocess.run(
                    [sys.executable, "-m", "keepstep.cli.main", *words],
                    env=env,
                    check=True,
                    capture_output=True,
                )
                taken[name].append(float((Path(room) / "result").read_text()))
    return {name: statistics.median(found) for name, found in taken.items()} | {"rounds": rounds}


def make_case(rate: int, iteration_s: float) -> Case:
    """Idle spans of 13 % of the iteration, copies of 10 %, a buffer of 0.8 % of the link's time."""
    bytes_per_s = round(rate / 8 * HEADERS)
    idle = [0.26, 0.185, 0.185, 0.185, 0.185]
    busy_bytes = round(0.87 * iteration_s * bytes_per_s / (len(idle) - 1))
    usual = [
        (1000 * 0.13 * iteration_s * part, busy_bytes if i < len(idle) - 1 else 0)
        for i, part in enumerate(idle)
    ]
    other_idle = [0.1, 0.2, 0.3, 0.3, 0.3, 0.3]
    other = [
        (
            1000 * 0.13 * iteration_s * part,
            round(1.1 * busy_bytes) if i < len(other_idle) - 1 else 0,
        )
        for i, part in enumerate(other_idle)
    ]
    return Case(
        [usual, other],
        round(0.10 * iteration_s * bytes_per_s),
        round(0.008 * iteration_s * bytes_per_s),
        bytes_per_s,
    )


def show(kind: str, found: dict[str, Any]) -> None:
    if kind == "schemes":
        print(
            f"idle {found['idle_ratio']:.1%} of the iteration, copy "
            f"{found['copy_ratio']:.1%}; medians of {found['rounds']} iterations"
        )
        head = (
            f"{'iteration':>10} {'added':>8} {'collectives':>12} {'waited':>7} {'paper':>14} "
            f"{'buffer':>7} {'met, mean / most':>18}"
        )
        print(f"  {'scheme':11} {head}")
        for name, paper in PAPER.items():
            row = found[name]
            buffer = (
                f"{row['peak_bytes'] / found['reserve_bytes']:.2f} R"
                if "peak_bytes" in row
                else "-"
            )
            met = f"{row['met_ms']:.2f} / {row['met_most_ms']:.1f} ms" if "met_ms" in row else "-"
            where = (
                f"{row['collectives_ms'] - found['baseline']['collectives_ms']:+9.0f} ms "
                f"{row['waited_ms']:4.0f} ms"
            )
            print(
                f"  {name:11} {row['median_s']:8.3f} s {row['added_ratio']:+8.2%} {where} "
                f"{paper:>14} {buffer:>7} {met:>18}"
            )
    elif kind == "parts":
        print(
            "a state through R in so many parts, alone: "
            f"{', '.join(f'p = {n}: {found[str(n)]:.2f}' for n in PARTS)} of the link's time"
        )
    elif kind == "ddp":
        times = ", ".join(f"{name} {1000 * found[name]:.0f} ms" for name in DDP_CASES)
        print(f"a step of a real DDP job: {times} (median of {found['rounds']} runs' medians)")
    elif kind == "overflow":
        own = " and ".join(f"{ms:.1f}" for ms in found["keepers_ms"])
        print(
            f"overflow: {found['planned_ms']:.1f} ms planned, {own} ms by the keepers, who "
            "had to measure the link and the rhythm"
        )
        print(f"  without waiting it would fit into {found['spread_steps']} steps")
        for every in EVERY:
            row = found[f"every {every}"]
            print(
                f"  every {every}: {row['added_ms']:+.1f} ms an iteration, planned "
                f"{row['planned_ms']:+.1f} ms"
            )
    else:
        print(f"another rhythm: a collective may be met for {found['tolerated_ms']:.1f} ms")
        for scheme in ("before", "changing", "after"):
            row = found[scheme]
            print(
                f"  {scheme:9} {row['collectives']} collectives, met for "
                f"{row['mean_ms']:.2f} ms, at most {row['most_ms']:.1f} ms"
            )
    for line in found.get("told", []):
        print(f"  journal: {line}")
    print(
        f"  load of the machine: {found['loads'][0]:.1f} at the beginning, "
        f"{found['loads'][1]:.1f} at the end"
    )


def main() -> None:
    if sys.argv[1:2] in (["--train"], ["--keep"]):
        node, host, other, job_dir, case = sys.argv[2:]
        if os.environ.get(REALTIME):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        act = train if sys.argv[1] == "--train" else keep
        return act(int(node), host, other, Path(job_dir), Case(**json.loads(case)))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--only",
        help="of schemes, parts, overflow, change, ddp, comma separated; all of them, and with "
        "--quick the first",
    )
    parser.add_argument("--rate", default="50mbit", help="of the shaped links")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--iteration-s", type=float, default=2.0)
    parser.add_argument("--realtime", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.realtime:
        os.environ[REALTIME] = "1"
    if why_not := why_no_namespaces():
        sys.exit(f"links must be shaped: {why_not}")
    rate, rounds = parse_rate(args.rate), 6 if args.quick else args.rounds
    case = make_case(rate, args.iteration_s)
    report: dict[str, Any] = {"cores": os.cpu_count(), "rate_bits_per_s": rate}
    watch = harness.watch()
    only = args.only or ("schemes" if args.quick else "schemes,parts,overflow,change,ddp")
    for kind in only.split(","):
        load = os.getloadavg()[0]
        if kind == "ddp":
            found = ddp(DDP_RATE, max(2, rounds // 25))
        else:
            with (
                tempfile.TemporaryDirectory(prefix="interleave-") as room,
                Lab(2, Path(room), rate) as lab,
            ):
                if kind == "schemes":
                    found = schemes(lab, case, rate, rounds)
                elif kind == "parts":
                    found = parts(lab, case, rate, max(3, rounds // 4))
                elif kind == "overflow":
                    found = overflow(lab, case, rate, max(2, rounds // 20))
                else:
                    found = change(lab, case, rate, max(8, rounds // 6))
        report[kind] = found | {"loads": [load, os.getloadavg()[0]]}
        if not args.json:
            show(kind, report[kind])
    harness.tell(watch.end(), report, args.json)


if __name__ == "__main__":
    main()
