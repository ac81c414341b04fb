"""How fast do blocks cross between two keepers, against bare sockets? And how soon is a message
answered?

Two processes on loopback. Both move the same blocks of the same memory over as many connections
with the same socket options: bare ones by `sendall` and `recv_into`, keepers with handshake, signed
headers, checksums computed on both sides, places and answers. Rounds alternate, so that the
machine's noise hits both alike; figures are medians over rounds, ratios medians of each round's
ratio.

    python benchmarks/wire.py                     # a table
    python benchmarks/wire.py --json --rounds 30  # one JSON document
    python benchmarks/wire.py --gbit 1 --gbit 4   # also: the share of a paced rate that is reached

`known` is the keepers' figure when the sender names a checksum it has already (a slot's table),
instead of computing one; `signed` is the same with a MAC for every block (`block_mac`), and
`encrypted` with all of it encrypted (`encrypt`). CPU seconds per GiB are those of both processes
together. A round trip is a message that the other keeper's
handler sends back, confirmed both ways, over an idle link and while blocks cross it.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import queue
import socket
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from typing import Any

import harness  # beside this file: it is started as a script

from keepstep.coding.checksum import checksum
from keepstep.core.wire.streams import StreamLimits
from keepstep.core.wire.traffic import LinkOptions
from keepstep.edge.net import tcp
from keepstep.edge.net.peers import PeerOptions, Peers
from keepstep.model.messages.peers import MeshMessage, RanksEnded
from keepstep.model.snapshot import Stamp
from keepstep.model.units import GIB, MIB
from keepstep.model.wire import Identity, Part, Span
from keepstep.runtime.keeper.open_links import HASHING, new_link_table, wire_format

SECRET, JOB = os.urandom(32), os.urandom(16)
FORMATS = {
    "off": wire_format("off"),
    "signed": wire_format("on"),
    "encrypted": wire_format("on", encrypt=True),
}
RING_BLOCKS = 16  # of memory at each end: larger than the caches, small enough for any machine


def memory(block_bytes: int, fill: bool) -> memoryview:
    view = memoryview(mmap.mmap(-1, RING_BLOCKS * block_bytes))
    for at in range(0, len(view), MIB):
        view[at : at + MIB] = os.urandom(MIB) if fill else b"\1" * MIB
    return view


def slot(view: memoryview, index: int, block_bytes: int) -> memoryview:
    at = index % RING_BLOCKS * block_bytes
    return view[at : at + block_bytes]


class Keeper:
    """A receiver that places every block in the ring, and sends messages back if it `echoes`."""

    def __init__(self, ring: memoryview) -> None:
        self.ring = ring
        self.echoes: Peers | None = None
        self.heard: queue.SimpleQueue[MeshMessage] = queue.SimpleQueue()
        self.opened, self.room = threading.Event(), threading.Event()

    def up(self, node: int) -> None:
        self.opened.set()

    def message(self, node: int, message: MeshMessage) -> None:
        if self.echoes:
            self.echoes.send(node, message)
        else:
            self.heard.put(message)

    def place(self, node: int, span: Span) -> memoryview | None:
        return slot(self.ring, span.offset // span.length, span.length)

    def block(self, node: int, span: Span, checksum: int) -> None: ...

    def writable(self, node: int) -> None:
        self.room.set()

    def dead(self, node: int, why: str, is_loss: bool) -> None: ...


def keepers(
    node: int,
    ring: memoryview,
    streams: int,
    secret: bytes,
    job: bytes,
    pacer: tcp.Pacer | None = None,
    secured: str = "off",
) -> tuple[Peers, Keeper]:
    keeper = Keeper(ring)
    me = Identity(job, node, 1)
    options = LinkOptions(
        hashing=HASHING, streams=StreamLimits.of(streams), format=FORMATS[secured]
    )
    peers = Peers(
        lambda shell: new_link_table(me, secret, keeper, shell, options),
        PeerOptions(pacer=pacer),
    )
    return peers, keeper


def receiver(pipe: Pipe, streams: int, block_bytes: int, secret: bytes, job: bytes) -> None:
    """The other process: bare sockets that receive rounds of blocks, and a keeper. Answers with its
    CPU seconds when asked."""
    ring = memory(block_bytes, fill=False)
    listener = tcp.listen(("127.0.0.1", 0), tcp.TcpOptions())
    all_peers = []
    for secured in FORMATS:
        peers, keeper = keepers(2, ring, streams, secret, job, secured=secured)
        keeper.echoes = peers
        all_peers.append(peers)
    pipe.send((listener.getsockname(), [peers.address for peers in all_peers]))
    for peers in all_peers:
        peers.connect(1, ("", 0))
    socks = [listener.accept()[0] for _ in range(streams)]
    for index, sock in enumerate(socks):
        threading.Thread(
            target=receive_bare, args=(sock, ring, index, streams, block_bytes), daemon=True
        ).start()
    while pipe.recv() == "cpu":
        pipe.send(time.process_time())
    for peers in all_peers:
        peers.close()


def receive_bare(
    sock: socket.socket, ring: memoryview, first: int, streams: int, block_bytes: int
) -> None:
    while count := int.from_bytes(sock.recv(4, socket.MSG_WAITALL), "little"):
        for index in range(count):
            block, at = slot(ring, first + index * streams, block_bytes), 0
            while at < block_bytes:
                at += sock.recv_into(block[at:])
        sock.sendall(b"!")


def send_bare(socks: list[socket.socket], ring: memoryview, blocks: int, block_bytes: int) -> None:
    def run(sock: socket.socket, first: int) -> None:
        share = range(first, blocks, len(socks))
        sock.sendall(len(share).to_bytes(4, "little"))
        for index in share:
            sock.sendall(slot(ring, index, block_bytes))
        assert sock.recv(1) == b"!"

    threads = [threading.Thread(target=run, args=(sock, index)) for index, sock in enumerate(socks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def send_keeper(
    peers: Peers,
    keeper: Keeper,
    ring: memoryview,
    blocks: int,
    block_bytes: int,
    sums: list[int] | None,
) -> None:
    done: queue.Queue[str | None] = queue.Queue()
    for index in range(blocks):
        span = Span(0, Stamp(1, 1), Part.PAYLOAD, index * block_bytes, block_bytes)
        source, known = slot(ring, index, block_bytes), sums[index % RING_BLOCKS] if sums else None
        keeper.room.clear()
        while not peers.send_block(2, span, source, done.put, known):
            keeper.room.wait()
            keeper.room.clear()
    for _ in range(blocks):
        why = done.get()
        assert why is None, why


def round_trips(peers: Peers, keeper: Keeper, until: Callable[[int], bool]) -> dict[str, float]:
    """Of one message at a time, until there were enough."""
    taken: list[float] = []
    while not until(len(taken)):
        began = time.perf_counter()
        assert peers.send(2, RanksEnded(1))
        keeper.heard.get()
        taken.append(1e6 * (time.perf_counter() - began))
    taken.sort()
    return {
        "median_us": taken[len(taken) // 2],
        "p99_us": taken[len(taken) * 99 // 100],
        "count": len(taken),
    }


def round_trips_meanwhile(
    peers: Peers, keeper: Keeper, send: Callable[[], None]
) -> dict[str, float]:
    sender = threading.Thread(target=send)
    sender.start()
    return round_trips(peers, keeper, lambda count: count > 0 and not sender.is_alive())


def measure(work: Callable[[], None], nbytes: int, cpu: Callable[[], float]) -> dict[str, float]:
    cpu_before, began = cpu(), time.perf_counter()
    work()
    took = time.perf_counter() - began
    return {
        "gib_per_s": nbytes / GIB / took,
        "cpu_s_per_gib": (cpu() - cpu_before) / (nbytes / GIB),
    }


def compare(
    streams: int, block_bytes: int, round_bytes: int, rounds: int, gbit: list[float]
) -> dict[str, Any]:
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(
        target=receiver, args=(there, streams, block_bytes, SECRET, JOB), daemon=True
    )
    process.start()
    ring = memory(block_bytes, fill=True)
    bare_at, keepers_at = here.recv()
    socks = [tcp.dial(bare_at, "127.0.0.1", tcp.TcpOptions()) for _ in range(streams)]
    for sock in socks:
        sock.settimeout(None)

    def cpu() -> float:
        here.send("cpu")
        return time.process_time() + float(here.recv())

    linked = {
        secured: keepers(1, ring, streams, SECRET, JOB, secured=secured) for secured in FORMATS
    }
    for (peers, keeper), address in zip(linked.values(), keepers_at, strict=True):
        peers.connect(2, address)
        keeper.opened.wait()
    blocks = round_bytes // block_bytes
    sums = [checksum(slot(ring, index, block_bytes)) for index in range(RING_BLOCKS)]

    def send(secured: str, sums: list[int] | None) -> Callable[[], None]:
        return lambda: send_keeper(*linked[secured], ring, blocks, block_bytes, sums)

    schemes: dict[str, Callable[[], None]] = {
        "bare": lambda: send_bare(socks, ring, blocks, block_bytes),
        "keepers": send("off", None),
        "known": send("off", sums),
        "signed": send("signed", sums),
        "encrypted": send("encrypted", sums),
    }
    names = list(schemes)
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in schemes}
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            figures = measure(schemes[name], blocks * block_bytes, cpu)
            if turn:  # the first round warms
                taken[name].append(figures)
    result: dict[str, Any] = {"streams": streams, "block_bytes": block_bytes, "rounds": rounds}
    for secured, scheme in (("off", "known"), ("encrypted", "encrypted")):
        result[f"round_trips_{secured}"] = {
            "idle": round_trips(*linked[secured], lambda count: count == 3000),
            "busy": round_trips_meanwhile(*linked[secured], schemes[scheme]),
        }
    for peers, _ in linked.values():
        peers.close()
    for name, all_figures in taken.items():
        result[name] = {
            key: statistics.median(f[key] for f in all_figures) for key in all_figures[0]
        }
        ratios = [
            f["gib_per_s"] / bare["gib_per_s"]
            for f, bare in zip(all_figures, taken["bare"], strict=True)
        ]
        result[name]["ratio"] = statistics.median(ratios)
    for one, other in (("signed", "known"), ("encrypted", "signed")):
        result[f"{one}_to_{other}"] = statistics.median(
            ours["gib_per_s"] / theirs["gib_per_s"]
            for ours, theirs in zip(taken[one], taken[other], strict=True)
        )
    result["load"] = os.getloadavg()[0]
    result["paced"] = [paced(rate, ring, keepers_at[0], streams, block_bytes) for rate in gbit]
    here.send("end")
    process.join()
    return result


def paced(
    gbit: float, ring: memoryview, keeper_at: tcp.Address, streams: int, block_bytes: int
) -> dict[str, float]:
    """Two seconds' worth of blocks at that rate: which share of it is reached?"""
    rate = gbit * 1e9 / 8
    peers, keeper = keepers(1, ring, streams, SECRET, JOB, tcp.Pacer(rate))
    peers.connect(2, keeper_at)
    keeper.opened.wait()
    blocks = max(1, round(2 * rate / block_bytes))
    began = time.perf_counter()
    send_keeper(peers, keeper, ring, blocks, block_bytes, None)
    reached = blocks * block_bytes / (time.perf_counter() - began)
    peers.close()
    return {"gbit_per_s": gbit, "share": reached / rate}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--streams", type=int, action="append", help="connections for blocks (default: 1 and 2)"
    )
    parser.add_argument("--block-mib", type=int, default=4)
    parser.add_argument("--round-mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--gbit", type=float, action="append", default=[])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    watch = harness.watch()
    results = [
        compare(streams, args.block_mib * MIB, args.round_mib * MIB, args.rounds, args.gbit)
        for streams in args.streams or [1, 2]
    ]
    report = {"cpus": os.cpu_count(), "results": results}
    harness.tell(watch.end(), report, args.json, lambda _: show(results, args))


def show(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    for result in results:
        print(
            f"{result['streams']} streams, blocks of {args.block_mib} MiB, medians of "
            f"{args.rounds} rounds of {args.round_mib} MiB"
        )
        for name in ("bare", "keepers", "known", "signed", "encrypted"):
            f = result[name]
            print(
                f"  {name:9} {f['gib_per_s']:6.2f} GiB/s  {100 * f['ratio']:5.1f} % of bare  "
                f"{f['cpu_s_per_gib']:5.2f} CPU s/GiB"
            )
        print(
            f"  signed against known: {100 * result['signed_to_known']:.1f} %, encrypted against "
            f"signed: {100 * result['encrypted_to_signed']:.1f} %; load average "
            f"{result['load']:.1f}"
        )
        for name in ("off", "encrypted"):
            for when, f in result[f"round_trips_{name}"].items():
                how = "encrypted" if name == "encrypted" else "as it is"
                print(
                    f"  round trip of a message, {how}, {when}: {f['median_us']:.0f} us, 99 % "
                    f"within {f['p99_us']:.0f} us"
                )
        for f in result["paced"]:
            print(f"  paced to {f['gbit_per_s']:g} Gbit/s: {100 * f['share']:.1f} % of it reached")


if __name__ == "__main__":
    main()
