"""What does redundancy across nodes reach, cost and save?

Real keepers in network namespaces, one a node, behind veth links that `tc tbf` shapes in both
directions; ranks without torch, whose states are windows of a random buffer, so that making one
costs a memcpy. Without root the links are loopback and cannot be shaped: then what needs a rate is
left out and said so. Everything runs on this machine's cores, so N nodes share them: the table
names the load.

    python benchmarks/redundancy.py                       # all of it: half an hour on busy cores
    python benchmarks/redundancy.py --quick               # small: about two minutes
    python benchmarks/redundancy.py --only copies,latency --rates 1gbit --mib 256 --json

copies      Throughput of one step's copies, from the moment its target is announced in the leader's
            horizon page until the page shows it committed. Alternating with it, in the same
            namespaces and at the same time in both directions, one bare TCP connection from each
            node to the next carries as many bytes (`bare`). Shares are of the shaped rate; `ratio`
            is the median over rounds of keepers against bare. `run` is the mean over many steps in
            a row; `with captures` is their wall time, in which this process captures one rank after
            the other (with two slots a capture waits for the commit before it).
            Loopback: against a memcpy of the same bytes in one process.
coding      The same for parity and Reed-Solomon, where the bytes on the wire are counted by the
            keepers (all of a node's pieces), beside XOR or ISA-L alone over blocks of that size in
            memory.
restore     One node (or as many as the policy survives) loses processes and memory; from the start
            of the next round until all ranks may go, and the fetch itself. Beside it as many bytes
            of a plain file, sent by bare TCP through a link of 1/20 of the rate.
memory      Bytes of slot files a node has in /dev/shm after many steps, for each byte of state,
            beside the placement's formula.
failure     Blocks' bytes that cross the network when a rank's process dies and all resume from
            their own memory.
latency     Of a 50 kB snapshot on four nodes: from the last rank's seal until every node's horizon
            page shows it committed. And what all keepers spend on a commit: four nodes share this
            machine's cores here, so that is in the latency too.

Figures are medians over rounds; MiB is 2^20 bytes, Gbit 10^9 bits. Every line names the load
average when it was measured: on busy cores look at ratios. The two schemes of a comparison
alternate in one run, in the order ABBA.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness  # beside this file: it is started as a script

from keepstep.core.redundancy.placement import place
from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.edge.shm.memory import MEMORY
from keepstep.model.mesh import Mesh
from keepstep.model.messages.keeper_rank import StateOffered
from keepstep.model.topology import Auto, Copies, Parity, ReedSolomon, parse_policy
from keepstep.model.units import GIB, MIB
from keepstep.testing.cluster import KeeperCluster, wait_for
from keepstep.testing.lab import Lab
from keepstep.testing.network import parse_rate, why_no_namespaces

POOL = os.urandom(4 * MIB + 65_537)  # no multiple of a block: no two blocks of a state are equal
CHUNK_BYTES = MIB
BARE_PORT = 47100
STORE_SHARE = 20  # a store's share of a node's bandwidth is one in so many
LATENCY_BYTES = 50_000
POLL_S = 0.0003
_states: dict[int, memoryview] = {}


def state(rank: int, step: int, nbytes: int) -> memoryview:
    """Windows of one buffer: another one for each (rank, step)."""
    if nbytes not in _states:
        _states[nbytes] = memoryview(POOL * (nbytes // len(POOL) + 2))
    at = (rank * 1_000_003 + step * 4_099) % len(POOL)
    return _states[nbytes][at : at + nbytes]


# -- one bare TCP connection from each node to the next


def bare_node(host: str, next_host: str, count: str) -> None:
    """A process of its own on a node. For every line it reads: send so many bytes on and receive as
    many; then answer."""
    nbytes = int(count)
    listener = socket.create_server((host, BARE_PORT))
    print("ready", flush=True)
    sys.stdin.readline()
    there = socket.create_connection((next_host, BARE_PORT), source_address=(host, 0))
    here = listener.accept()[0]
    for sock in (there, here):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    source, target = memoryview(bytearray(state(0, 0, nbytes))), memoryview(bytearray(nbytes))

    for _ in sys.stdin:
        sender = threading.Thread(target=there.sendall, args=(source,))
        sender.start()
        at = 0
        while at < nbytes:
            at += here.recv_into(target[at : at + CHUNK_BYTES])
        sender.join()
        print("done", flush=True)


class Bare:
    """A ring of them."""

    def __init__(self, lab: Lab, nbytes: int) -> None:
        self._nbytes = nbytes
        hosts = [lab.seats[node].address for node in lab.nodes]
        self._nodes: list[Any] = []
        for node, host in enumerate(hosts):
            words = [
                sys.executable,
                __file__,
                "--bare-node",
                host,
                hosts[(node + 1) % len(hosts)],
                str(nbytes),
            ]
            self._nodes.append(
                lab.start(
                    node, words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
                )
            )
        self._hear("ready")
        self._say("connect")

    def _say(self, line: str) -> None:
        for node in self._nodes:
            print(line, file=node.stdin, flush=True)

    def _hear(self, word: str) -> None:
        for node in self._nodes:
            assert node.stdout.readline().strip() == word

    def bytes_per_s(self) -> float:
        """Of each node, all at once."""
        began = time.perf_counter()
        self._say("send")
        self._hear("done")
        return self._nbytes / (time.perf_counter() - began)

    def cpu_s(self) -> float:
        return cpu_s([node.pid for node in self._nodes])

    def close(self) -> None:
        for node in self._nodes:
            node.stdin.close()
            node.wait(20)


def cpu_s(pids: list[int]) -> float:
    """What these processes have used so far, their system calls included."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(f[11]) + int(f[12]) for f in fields) / os.sysconf("SC_CLK_TCK")


# -- keepers


@dataclass
class Site:
    """A cluster in a lab."""

    lab: Lab
    cluster: KeeperCluster
    pages: list[HorizonPage]
    rate: int | None
    step: int = -1

    @property
    def nbytes(self) -> int:
        return self.cluster.nbytes

    @property
    def nodes(self) -> int:
        return len(self.cluster.machines)

    def cpu_s(self) -> float:
        """Of all keepers so far."""
        return cpu_s([machine.keeper_pid() for machine in self.cluster.machines])

    def capture(self) -> None:
        """The next step on all ranks."""
        self.step += 1
        for rank in self.cluster.ranks:
            assert rank.step(self.step), "a step was skipped though the one before is committed"

    def protect(self) -> float:
        """Capture a step; how long its copies took, from the announced target to the commit."""
        epoch = self._epoch()
        self.capture()
        while True:  # announced only when the last rank has sealed
            announced, seen = time.perf_counter(), self.pages[0].read(epoch)
            if self.step in [
                stamp.step for stamp in (seen.target, seen.committed) if stamp is not None
            ]:
                break
            time.sleep(POLL_S)
        return self.until_committed(self.step, self.pages[:1]) - announced

    def until_committed(self, step: int, pages: list[HorizonPage]) -> float:
        """When the last of these pages showed it."""
        epoch, waiting, until = self._epoch(), list(pages), time.monotonic() + 300
        while waiting:
            committed = waiting[0].read(epoch).committed
            if committed is not None and committed.step >= step:
                waiting.pop(0)
                continue
            assert time.monotonic() < until, self.cluster.story()
            time.sleep(POLL_S)
        return time.perf_counter()

    def settle(self) -> None:
        """Every node knows what is committed."""
        self.until_committed(self.step, self.pages)

    def run(self, steps: int) -> tuple[float, float]:
        """So many steps, each captured as soon as the one before is committed everywhere: seconds
        that were spent copying, and in all."""
        self.settle()
        copying_s, began = 0.0, time.perf_counter()
        for _ in range(steps):
            copying_s += self.protect()
            self.settle()
        return copying_s, time.perf_counter() - began

    def _epoch(self) -> int:
        epoch = self.cluster.ranks[0].epoch
        assert epoch is not None
        return epoch


@contextmanager
def site(nodes: int, policy: str, nbytes: int, rate: int | None) -> Iterator[Site]:
    with ExitStack() as exits:
        room = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="redundancy-")))
        lab = exits.enter_context(Lab(nodes, room, rate))
        cluster = exits.enter_context(
            KeeperCluster(room, nodes, policy, nbytes=nbytes, lab=lab, state=state)
        )
        cluster.resume()
        pages = [HorizonPage(MEMORY, machine.settings.job_dir) for machine in cluster.machines]
        for page in pages:
            exits.callback(page.close)
        yield Site(lab, cluster, pages, rate)


def median(values: list[float]) -> float:
    return statistics.median(values)


# -- what is measured


def copies(
    policy: str, nodes: int, nbytes: int, rate: int | None, rounds: int, steps: int
) -> dict[str, Any]:
    with site(nodes, policy, nbytes, rate) as here:
        scheme = parse_policy(policy)
        assert isinstance(scheme, Copies)
        wire = nbytes * (scheme.m - 1)  # from each node, and to each
        bare = Bare(here.lab, wire)
        for _ in range(3):  # both slots, and the holders': the first touch of memory
            here.protect()
            here.settle()
        bare.bytes_per_s()
        keepers, tcp, cpu, bare_cpu = [], [], here.cpu_s(), bare.cpu_s()
        for turn in range(2 * rounds):
            if turn % 4 in (0, 3):
                keepers.append(wire / here.protect())
                here.settle()
            else:
                tcp.append(bare.bytes_per_s())
        gib = wire * nodes * rounds / GIB
        cpu, bare_cpu = (here.cpu_s() - cpu) / gib, (bare.cpu_s() - bare_cpu) / gib
        bare.close()
        copying_s, all_s = here.run(steps)
        result = {
            "policy": policy,
            "nodes": nodes,
            "mib": nbytes / MIB,
            "rate_gbit": rate and rate / 1e9,
        }
        result |= {"keepers_gbit": 8e-9 * median(keepers), "bare_gbit": 8e-9 * median(tcp)}
        result |= {
            "ratio": median([k / t for k, t in zip(keepers, tcp, strict=True)]),
            "run_gbit": 8e-9 * wire * steps / copying_s,
        }
        result["run_with_captures_gbit"] = 8e-9 * wire * steps / all_s
        result |= {"cpu_s_per_gib": cpu, "bare_cpu_s_per_gib": bare_cpu}
        if rate is None:
            result["memcpy_gbit"] = 8e-9 * memcpy(nbytes)
        return result


def memcpy(nbytes: int) -> float:
    source, target = state(0, 0, nbytes), memoryview(bytearray(nbytes))
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        target[:] = source
        taken.append(nbytes / (time.perf_counter() - began))
    return median(taken)


def coding(policy: str, nodes: int, nbytes: int, rate: int | None, rounds: int) -> dict[str, Any]:
    with site(nodes, policy, nbytes, rate) as here:
        for _ in range(3):
            here.protect()
            here.settle()
        keepers, wires, cpu = [], [], []
        for _ in range(rounds):
            before, cpu_before = here.cluster.wire_bytes(), here.cpu_s()
            took_s = here.protect()
            here.settle()
            wire = (here.cluster.wire_bytes() - before) / nodes
            keepers.append(nbytes / took_s)
            wires.append(wire / took_s)
            cpu.append((here.cpu_s() - cpu_before) / (wire * nodes / 2**30))
        result = {
            "policy": policy,
            "nodes": nodes,
            "mib": nbytes / MIB,
            "rate_gbit": rate and rate / 1e9,
        }
        result |= {
            "state_gbit": 8e-9 * median(keepers),
            "wire_gbit": 8e-9 * median(wires),
            "memory_gbit": 8e-9 * encode_alone(policy),
        }
        return result | {"cpu_s_per_gib": median(cpu)}


def encode_alone(policy: str) -> float:
    """Bytes a second of pieces added to parities, as they come in: 4 MiB after 4 MiB."""
    from keepstep.coding.reed_solomon import accumulate, solve

    scheme = parse_policy(policy)
    assert isinstance(scheme, Parity | ReedSolomon)
    k, m = (scheme.n - 1, 1) if isinstance(scheme, Parity) else (scheme.k, scheme.m)
    rows = solve(k, m, tuple(range(k)), (k + m - 1,))
    block = 4 * MIB
    source, target = memoryview(bytearray(16 * block)), memoryview(bytearray(16 * block))
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        for at in range(0, len(source), block):
            accumulate(rows, k - 1, source[at : at + block], [target[at : at + block]])
        taken.append(len(source) / (time.perf_counter() - began))
    return median(taken)


def restore(
    policy: str, nodes: int, lost: tuple[int, ...], nbytes: int, rate: int | None, rounds: int
) -> dict[str, Any]:
    with site(nodes, policy, nbytes, rate) as here:
        total, fetches, found = [], [], 0
        for _ in range(rounds):
            here.protect()
            here.settle()
            for machine in here.cluster.machines:
                machine.kill_ranks()
            here.cluster.replace(*lost)
            began = time.perf_counter()
            offer = resume(here.cluster)
            total.append(time.perf_counter() - began)
            assert (offer.source, offer.step) == ("memory", here.step)
            for node in lost:
                here.pages[node].close()
                here.pages[node] = HorizonPage(MEMORY, here.cluster.machines[node].settings.job_dir)
            here.settle()
            events = [e for m in here.cluster.machines for e in m.events() if e.kind == "fetched"]
            fetches += [int(e.data["took_ns"]) / 1e9 for e in events[found:]]
            found = len(events)
        result = {
            "policy": policy,
            "nodes": nodes,
            "lost": len(lost),
            "mib": nbytes / MIB,
            "rate_gbit": rate and rate / 1e9,
        }
        return result | {"until_go_s": median(total), "fetch_s": median(fetches)}


def resume(cluster: KeeperCluster) -> StateOffered:
    """As `KeeperCluster.resume`, until every rank may go and no longer."""
    cluster.begin_mesh()

    def all_go() -> bool:
        cluster.hear()
        return all(rank.epoch is not None for rank in cluster.ranks)

    wait_for(all_go, cluster.story, 300)
    offer = cluster.ranks[0].offer
    assert offer is not None
    return offer


def from_store(nbytes: int, rate: int) -> dict[str, Any]:
    """As many bytes from a plain file, through the store's share of a link."""
    share = rate // STORE_SHARE
    with (
        tempfile.TemporaryDirectory(prefix="redundancy-") as room,
        Lab(2, Path(room), share) as lab,
    ):
        path = Path(room) / "checkpoint"
        path.write_bytes(state(0, 0, nbytes))
        host = lab.seats[0].address
        server = lab.start(
            0, [sys.executable, __file__, "--serve", host, path], stdout=subprocess.PIPE
        )
        assert server.stdout is not None and server.stdout.readline()
        began = time.perf_counter()
        reader = lab.start(
            1,
            [sys.executable, __file__, "--read", host, str(nbytes)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert reader.wait() == 0 and reader.stdout is not None
        took_s = float(reader.stdout.readline())
        server.wait(20)
        return {
            "mib": nbytes / MIB,
            "share_gbit": share / 1e9,
            "took_s": took_s,
            "with_start_s": time.perf_counter() - began,
        }


def serve(host: str, path: str) -> None:
    with socket.create_server((host, BARE_PORT)) as listener, open(path, "rb") as file:
        print("ready", flush=True)
        with listener.accept()[0] as sock:
            sock.sendfile(file)


def read(host: str, count: str) -> None:
    nbytes = int(count)
    target, at, began = memoryview(bytearray(nbytes)), 0, time.perf_counter()
    with socket.create_connection((host, BARE_PORT)) as sock:
        while at < nbytes:
            got = sock.recv_into(target[at : at + CHUNK_BYTES])
            assert got, "the file ended early"
            at += got
    print(time.perf_counter() - began)


def memory(policy: str, nodes: int, nbytes: int) -> dict[str, Any]:
    with site(nodes, policy, nbytes, None) as here:
        for _ in range(6):
            here.capture()
            here.settle()
        used = []
        for machine in here.cluster.machines:
            files = [p for p in machine.settings.job_dir.glob("**/slot-*") if p.is_file()]
            used.append(sum(p.stat().st_blocks * 512 for p in files) / nbytes)
        scheme = parse_policy(policy)
        assert not isinstance(scheme, Auto) and here.cluster.members is not None
        topology = Mesh(
            here.cluster.mesh_version, 0, here.cluster.members, here.cluster.secret
        ).topology
        formula = place(scheme, topology).two_slots_ratio
        return {
            "policy": policy,
            "nodes": nodes,
            "mib": nbytes / MIB,
            "fullest_ratio": max(used),
            "formula_ratio": formula,
        }


def failure(policy: str, nodes: int, nbytes: int) -> dict[str, Any]:
    with site(nodes, policy, nbytes, None) as here:
        for _ in range(3):
            here.capture()
            here.settle()
        before = here.cluster.wire_bytes()
        for machine in here.cluster.machines:
            machine.kill_ranks()
        began = time.perf_counter()
        offer = resume(here.cluster)
        took_s = time.perf_counter() - began
        here.settle()
        moved = here.cluster.wire_bytes() - before
        assert (offer.source, offer.step) == ("memory", here.step)
        return {
            "policy": policy,
            "nodes": nodes,
            "mib": nbytes / MIB,
            "moved_bytes": moved,
            "until_go_s": took_s,
        }


def latency(policy: str, nodes: int, rate: int | None, rounds: int) -> dict[str, Any]:
    with site(nodes, policy, LATENCY_BYTES, rate) as here:
        taken, cpu = [], 0.0
        for turn in range(rounds + 10):
            cpu = here.cpu_s() if turn == 10 else cpu
            here.capture()
            sealed = time.perf_counter()
            done = here.until_committed(here.step, here.pages)
            if turn >= 10:
                taken.append(1e3 * (done - sealed))
            time.sleep(0.002)
        taken.sort()
        result = {
            "policy": policy,
            "nodes": nodes,
            "rate_gbit": rate and rate / 1e9,
            "count": rounds,
        }
        result["cpu_ms"] = 1e3 * (here.cpu_s() - cpu) / rounds
        return result | {
            "median_ms": median(taken),
            "p99_ms": taken[len(taken) * 99 // 100],
            "least_ms": taken[0],
        }


# -- the table


def share(gbit: float, rate_gbit: float | None) -> str:
    return f"{gbit:6.2f} Gbit/s" + (f" ({100 * gbit / rate_gbit:3.0f} %)" if rate_gbit else "")


def where(f: dict[str, Any]) -> str:
    link = f"{f['rate_gbit']:g} Gbit/s" if f.get("rate_gbit") else "loopback"
    return f"{f['policy']:10} {f['nodes']} nodes, {f['mib']:g} MiB, {link}"


def line(kind: str, f: dict[str, Any]) -> str:
    rate = f.get("rate_gbit")
    if kind == "copies":
        text = (
            f"keepers {share(f['keepers_gbit'], rate)}, bare TCP {share(f['bare_gbit'], rate)}, "
            f"ratio {f['ratio']:.2f}"
        )
        text += (
            f"; run {share(f['run_gbit'], rate)}, with captures "
            f"{share(f['run_with_captures_gbit'], rate)}"
        )
        text += f"; CPU s/GiB {f['cpu_s_per_gib']:.2f}, bare {f['bare_cpu_s_per_gib']:.2f}"
        return f"{where(f)}: {text}" + (
            f"; memcpy {f['memcpy_gbit']:.0f} Gbit/s" if "memcpy_gbit" in f else ""
        )
    if kind == "coding":
        text = (
            f"state {share(f['state_gbit'], None)}, wire {share(f['wire_gbit'], rate)}; alone in "
            f"memory {f['memory_gbit']:.0f} Gbit/s"
        )
        return f"{where(f)}: {text}; {f['cpu_s_per_gib']:.2f} CPU s/GiB"
    if kind == "restore" and "policy" in f:
        return (
            f"{where(f)}, {f['lost']} lost: fetched in {f['fetch_s']:.2f} s, all may go after "
            f"{f['until_go_s']:.2f} s"
        )
    if kind == "restore":
        return f"file through {f['share_gbit']:g} Gbit/s, {f['mib']:g} MiB: {f['took_s']:.2f} s"
    if kind == "memory":
        return (
            f"{where(f)}: {f['fullest_ratio']:.3f} bytes a byte of state, formula "
            f"{f['formula_ratio']:.3f}"
        )
    if kind == "failure":
        return (
            f"{where(f)}: {f['moved_bytes']} bytes moved, all may go after {f['until_go_s']:.2f} s"
        )
    link = f"{rate:g} Gbit/s" if rate else "loopback"
    head = (
        f"{f['policy']:10} {f['nodes']} nodes, {link}, {f['cpu_ms']:.1f} CPU ms a commit of all "
        "keepers"
    )
    return (
        f"{head}: median {f['median_ms']:.1f} ms, p99 {f['p99_ms']:.1f} ms, least "
        f"{f['least_ms']:.1f} ms"
    )


def plan(
    args: argparse.Namespace, rates: list[int]
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    nbytes = (32 if args.quick else args.mib) * MIB
    rounds, steps = (3, 5) if args.quick else (args.rounds, 20)
    some_rates: list[int | None] = [*rates, None]
    latency_rates: list[int | None] = [None, *rates[:1]]
    for rate in some_rates:
        yield "copies", lambda rate=rate: copies("copies:2", 2, nbytes, rate, rounds, steps)  # type: ignore[misc]
        if not args.quick:
            yield "copies", lambda rate=rate: copies("copies:2", 4, nbytes, rate, rounds, steps)  # type: ignore[misc]
            yield "copies", lambda rate=rate: copies("copies:3", 3, nbytes, rate, rounds, steps)  # type: ignore[misc]
    for policy, nodes in (
        (("parity:3", 3),)
        if args.quick
        else (("parity:3", 3), ("parity:4", 4), ("rs:2+2", 4), ("rs:4+2", 6))
    ):
        for rate in rates[:1] if args.quick else some_rates:
            yield "coding", lambda p=policy, n=nodes, r=rate: coding(p, n, nbytes, r, rounds)  # type: ignore[misc]
    for rate in some_rates[:1]:
        for policy, nodes, lost in (
            ("copies:2", 2, (1,)),
            ("copies:3", 3, (1,)),
            ("parity:3", 3, (1,)),
            ("parity:4", 4, (1,)),
            ("rs:2+2", 4, (1,)),
            ("rs:2+2", 4, (1, 2)),
        ):
            yield (
                "restore",
                lambda p=policy, n=nodes, q=lost, r=rate: restore(  # type: ignore[misc]
                    p, n, q, nbytes, r, min(rounds, 3)
                ),
            )
        if rate:
            yield "restore", lambda rate=rate: from_store(nbytes, rate)  # type: ignore[misc]
    for policy, nodes in (("copies:2", 2), ("copies:3", 3), ("parity:3", 3), ("rs:2+2", 4)):
        yield "memory", lambda p=policy, n=nodes: memory(p, n, nbytes)  # type: ignore[misc]
    yield "failure", lambda: failure("copies:2", 2, nbytes)
    yield "failure", lambda: failure("parity:3", 3, nbytes)
    for rate in latency_rates:
        yield "latency", lambda rate=rate: latency("copies:2", 4, rate, 50 if args.quick else 300)  # type: ignore[misc]


def main() -> None:
    if sys.argv[1:2] == ["--bare-node"]:
        return bare_node(*sys.argv[2:])
    if sys.argv[1:2] == ["--serve"]:
        return serve(*sys.argv[2:])
    if sys.argv[1:2] == ["--read"]:
        return read(*sys.argv[2:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--only", default="copies,coding,restore,memory,failure,latency", help="comma separated"
    )
    parser.add_argument(
        "--rates", default="1gbit,4gbit", help="of the shaped links, comma separated"
    )
    parser.add_argument("--mib", type=int, default=128, help="of state a rank")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    why_not = why_no_namespaces()
    rates = [] if why_not else [parse_rate(text) for text in args.rates.split(",") if text]
    report: dict[str, Any] = {"cores": os.cpu_count(), "unshaped": why_not}
    watch = harness.watch()
    if why_not:
        print(
            f"links are loopback and not shaped, what needs a rate is left out: {why_not}",
            file=sys.stderr,
        )
    for kind, measure in plan(args, rates):
        if kind not in args.only.split(","):
            continue
        figures = measure() | {"load": os.getloadavg()[0]}
        report.setdefault(kind, []).append(figures)
        if not args.json:
            print(f"{kind:8} {line(kind, figures)}  [load {figures['load']:.1f}]", flush=True)
    harness.tell(watch.end(), report, args.json)


if __name__ == "__main__":
    main()
