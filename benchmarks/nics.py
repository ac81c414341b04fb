"""How much of two network interfaces do two keepers use, and what happens when one of them fails?

Two network namespaces with two veth pairs between them, each shaped by `tc tbf` to a rate, each a
subnet of its own: two nodes with two NICs. Needs root. A keeper in one sends blocks to one in the
other:

    one NIC              its address alone, one stream
    one NIC, 4 streams   the same with four streams (`link_streams`)
    one NIC, growing     the same with as many streams as help, which is the default
    two NICs             both addresses (`host: A,B`), one stream on each
    two NICs, 4 streams  the same with four streams
    bare, two NICs       `sendall` over one socket on each: what the links give

Rounds alternate; figures are medians over rounds, of the payload's bits. At the end the second pair
goes down in the middle of a round and comes back: how long all blocks take, whether each came once,
and when it carries again is told.

    python benchmarks/nics.py                       # 400 Mbit/s each
    python benchmarks/nics.py --mbit 1000 --rounds 5
    python benchmarks/nics.py --stream-mbit 100     # and each connection no faster than that

`--stream-mbit` stands for what one core can move: each connection of the keepers is paced to it by
the kernel (SO_MAX_PACING_RATE), so a link needs several for one interface.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import queue
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import harness  # beside this file: it is started as a script

from keepstep.core.wire.streams import StreamLimits
from keepstep.core.wire.traffic import LinkOptions
from keepstep.edge.net.peers import PeerOptions, Peers
from keepstep.edge.net.tcp import TcpOptions
from keepstep.model.messages.peers import MeshMessage
from keepstep.model.snapshot import Stamp
from keepstep.model.units import MIB
from keepstep.model.wire import Identity, Part, Span
from keepstep.runtime.keeper.open_links import HASHING, new_link_table

NAMESPACES = ("keepstep-nics-a", "keepstep-nics-b")
SECRET, JOB = b"s" * 32, b"j" * 16
HOSTS = (("198.18.201.1", "198.18.202.1"), ("198.18.201.2", "198.18.202.2"))
PORTS = (4301, 4302)
BLOCK_BYTES = 4 * MIB
WAYS: dict[str, tuple[int, int]] = {  # interfaces; streams, 0: as many as help
    "one NIC": (1, 1),
    "one NIC, 4 streams": (1, 4),
    "one NIC, growing": (1, 0),
    "two NICs": (2, 1),
    "two NICs, 4 streams": (2, 4),
}
BARE = "bare, two NICs"
PACED = "NICS_STREAM_MBIT"  # for the processes in the namespaces


def do(*words: str) -> None:
    subprocess.run(words, check=True)


@contextmanager
def two_nodes(mbit: int) -> Iterator[None]:
    """The namespaces, with two pairs between them."""
    remove()
    try:
        for name in NAMESPACES:
            do("ip", "netns", "add", name)
            do("ip", "-n", name, "link", "set", "lo", "up")
        for nic in range(2):
            here, there = NAMESPACES
            pair = ("type", "veth", "peer", "name", f"eth{nic}", "netns", there)
            do("ip", "-n", here, "link", "add", f"eth{nic}", *pair)
            for node, name in enumerate(NAMESPACES):
                device = f"eth{nic}"
                do("ip", "-n", name, "address", "add", f"{HOSTS[node][nic]}/24", "dev", device)
                do("ip", "-n", name, "link", "set", device, "up")
                shape(name, device, mbit)
        yield
    finally:
        remove()


def shape(name: str, device: str, mbit: int) -> None:
    queue_bytes = max(512_000, int(mbit * 1e6 / 8 * 0.02))
    tbf = ("tbf", "rate", f"{mbit}mbit", "burst", "256kb", "limit", str(queue_bytes))
    do("tc", "-n", name, "qdisc", "add", "dev", device, "root", *tbf)


def remove() -> None:
    for name in NAMESPACES:
        subprocess.run(("ip", "netns", "del", name), capture_output=True)


# one node's process


class Keeper:
    """A receiver with room for one round."""

    def __init__(self, memory: memoryview | None) -> None:
        self.memory = memory
        self.opened, self.room = threading.Event(), threading.Event()
        self.times: dict[int, int] = {}  # how often a block came, by its offset

    def up(self, node: int) -> None:
        self.opened.set()

    def message(self, node: int, message: MeshMessage) -> None: ...

    def place(self, node: int, span: Span) -> memoryview | None:
        assert self.memory is not None
        at = span.offset % len(self.memory)
        return self.memory[at : at + span.length]

    def block(self, node: int, span: Span, checksum: int) -> None:
        self.times[span.offset] = self.times.get(span.offset, 0) + 1

    def writable(self, node: int) -> None:
        self.room.set()

    def dead(self, node: int, why: str, is_loss: bool) -> None:
        if is_loss:
            print(f"node {node} is lost: {why}", file=sys.stderr)


def tcp() -> TcpOptions:
    paced = int(os.environ.get(PACED, "0")) * 10**6 // 8
    return TcpOptions(unacked_s=3.5, max_pacing_bytes_per_s=paced or None)


def links(node: int, keeper: Keeper, interfaces: int, streams: int, port: int) -> Peers:
    options = LinkOptions(HASHING, streams=StreamLimits.of(streams or None))
    me = Identity(JOB, node + 1, 1)
    addresses = [(host, port) for host in HOSTS[node][:interfaces]]
    return Peers(
        lambda shell: new_link_table(me, SECRET, keeper, shell, options),
        PeerOptions(addresses[0], tuple(addresses[1:]), tcp()),
    )


def receive(interfaces: int, streams: int, nbytes: int) -> None:
    """Until its standard input ends; says then whether each block came once."""
    keeper = Keeper(memoryview(mmap.mmap(-1, nbytes)))
    peers = links(1, keeper, interfaces, streams, PORTS[1])
    peers.connect(1, (HOSTS[0][0], PORTS[0]))
    print("ready", flush=True)
    sys.stdin.read()
    print(json.dumps({"most": max(keeper.times.values(), default=0), "blocks": len(keeper.times)}))
    peers.close()


def send(interfaces: int, streams: int, nbytes: int) -> None:
    """A round for each line of its standard input; how long each took, in seconds."""
    data = memoryview(mmap.mmap(-1, nbytes))
    data[:] = os.urandom(MIB) * (nbytes // MIB)
    keeper = Keeper(None)
    peers = links(0, keeper, interfaces, streams, PORTS[0])
    peers.connect(2, (HOSTS[1][0], PORTS[1]))
    keeper.opened.wait()
    time.sleep(0.5)  # the other streams, too
    print("ready", flush=True)
    done: queue.Queue[str | None] = queue.Queue()
    for turn, _ in enumerate(sys.stdin):
        began = time.monotonic()
        for at in range(0, nbytes, BLOCK_BYTES):
            span = Span(0, Stamp(1, 1), Part.PAYLOAD, turn * nbytes + at, BLOCK_BYTES)
            keeper.room.clear()
            while not peers.send_block(2, span, data[at : at + BLOCK_BYTES], done.put):
                keeper.room.wait()
                keeper.room.clear()
        for _ in range(nbytes // BLOCK_BYTES):
            why = done.get()
            assert why is None, why
        print(time.monotonic() - began, flush=True)
    print(json.dumps(peers.counts()))
    peers.close()


def receive_bare(nbytes: int) -> None:
    listeners = [socket.create_server((host, PORTS[1])) for host in HOSTS[1]]
    print("ready", flush=True)
    socks = [listener.accept()[0] for listener in listeners]

    def run(sock: socket.socket) -> None:
        place = memoryview(bytearray(nbytes))
        while True:
            at = 0
            while at < nbytes // 2:
                got = sock.recv_into(place[: nbytes // 2 - at])
                if not got:
                    return
                at += got
            sock.sendall(b"!")

    threads = [threading.Thread(target=run, args=(sock,)) for sock in socks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def send_bare(nbytes: int) -> None:
    socks = [
        socket.create_connection((there, PORTS[1]), source_address=(here, 0))
        for here, there in zip(*HOSTS, strict=True)
    ]
    data = memoryview(bytearray(os.urandom(MIB) * (nbytes // MIB)))[: nbytes // 2]
    print("ready", flush=True)

    def run(sock: socket.socket) -> None:
        sock.sendall(data)
        assert sock.recv(1) == b"!"

    for _ in sys.stdin:
        began = time.monotonic()
        threads = [threading.Thread(target=run, args=(sock,)) for sock in socks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(time.monotonic() - began, flush=True)


# the benchmark


class Node:
    """A process in a namespace, asked by lines."""

    def __init__(self, node: int, *role: str) -> None:
        command = [sys.executable, __file__, "--role", *role]
        before = ("ip", "netns", "exec", NAMESPACES[node])
        self.process = subprocess.Popen(
            (*before, *command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def round_s(self) -> float:
        self.ask()
        return float(self.line())

    def end(self) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        said = self.process.stdout.read()
        self.process.wait()
        return json.loads(said) if said.strip() else None


def pair(way: str, nbytes: int) -> tuple[Node, Node]:
    if way == BARE:
        roles = [("receive-bare", str(nbytes)), ("send-bare", str(nbytes))]
    else:
        size = [*map(str, WAYS[way]), str(nbytes)]
        roles = [("receive", *size), ("send", *size)]
    there = Node(1, *roles[0])
    return Node(0, *roles[1]), there


def measure(way: str, nbytes: int, rounds: int) -> float:
    """Mbit/s in the median; the first round warms."""
    here, there = pair(way, nbytes)
    took = [here.round_s() for _ in range(rounds + 1)][1:]
    here.end()
    said = there.end()
    if said is not None:
        blocks = (rounds + 1) * nbytes // BLOCK_BYTES
        assert said == {"most": 1, "blocks": blocks}, said
    return nbytes * 8 / 1e6 / statistics.median(took)


def failure(nbytes: int) -> dict[str, float]:
    """Seconds of a round, of one in whose middle the second pair fails, of the next one, and of one
    some time after it is back."""
    here, there = pair("two NICs", nbytes)
    here.round_s()
    usual_s = here.round_s()
    here.ask()
    time.sleep(usual_s / 3)
    do("ip", "-n", NAMESPACES[1], "link", "set", "eth1", "down")
    failing_s = float(here.line())
    after_s = here.round_s()
    do("ip", "-n", NAMESPACES[1], "link", "set", "eth1", "up")
    time.sleep(65)
    back_s = here.round_s()
    here.end()
    said = there.end()
    return {
        "usual_s": usual_s,
        "failing_s": failing_s,
        "after_s": after_s,
        "back_s": back_s,
        "most_times": said["most"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=int, default=400, help="of each pair")
    parser.add_argument("--stream-mbit", type=int, default=0, help="of each connection")
    parser.add_argument("--round-mib", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-failure", action="store_true")
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role:
        name, *numbers = given.role
        roles = {
            "receive": receive,
            "send": send,
            "receive-bare": receive_bare,
            "send-bare": send_bare,
        }
        roles[name](*map(int, numbers))
        return
    nbytes, watch = given.round_mib * MIB, harness.watch()
    if given.stream_mbit:
        os.environ[PACED] = str(given.stream_mbit)
    with two_nodes(given.mbit):
        each = f", each connection of {given.stream_mbit} Mbit/s" if given.stream_mbit else ""
        print(f"two pairs of {given.mbit} Mbit/s{each}")
        for way in (*WAYS, BARE):
            mbit = measure(way, nbytes, given.rounds)
            share = mbit / given.mbit
            print(f"  {way:20} {mbit:7.0f} Mbit/s, {share:.2f} of one pair", flush=True)
        if not given.no_failure:
            took = failure(nbytes)
            print(
                f"  a round takes {took['usual_s']:.1f} s; {took['failing_s']:.1f} s when the "
                f"second pair fails in its middle, {took['after_s']:.1f} s while it is away, "
                f"{took['back_s']:.1f} s a minute after it is back; no block came more than "
                f"{took['most_times']:.0f} time"
            )
    harness.tell(watch.end())


if __name__ == "__main__":
    main()
