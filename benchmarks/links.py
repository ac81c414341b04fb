"""Are a slow sender, receiver and link told apart by what the copies measure, on real TCP?

Nodes in network namespaces on one bridge, every link shaped by `tc tbf`; a process in each holds a
keeper's links to all others and sends them blocks, as copies to everybody go. What each kernel has
counted (`Links.sent_counts`) goes through the keepers' own meter, and through what the leading
keeper decides by. In turn, a node sends slowly, receives slowly, the road between two is slow, or a
node sends slowly through a queue that loses packets; each until it is named and then until it is
over. Needs root.

    python benchmarks/links.py                # 4 nodes, 3 rounds
    python benchmarks/links.py --rounds 10 --factor 2

Prints, of each fault, who was named, and how long after; at last how many were right, which is that
nobody else was named either until it was over, and how often anybody was while nothing was slow.
Emulated: no real switch, no real NIC.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import harness  # beside this file: it is started as a script

from keepstep.core.detection.links import LONG, LinkSide, SlowLink, SlowLinks
from keepstep.core.wire.streams import StreamLimits
from keepstep.core.wire.traffic import LinkOptions
from keepstep.edge.net.peers import PeerOptions, Peers
from keepstep.edge.net.tcp import TcpOptions
from keepstep.model.links import LinkSample
from keepstep.model.messages.peers import MeshMessage
from keepstep.model.snapshot import Stamp
from keepstep.model.units import MIB
from keepstep.model.wire import Identity, Part, Span
from keepstep.runtime.keeper.open_links import HASHING, new_link_table
from keepstep.runtime.replication.link_watch import LinkMeter
from keepstep.testing.network import LinkShape, Namespaces, remove, why_no_namespaces

SECRET, JOB = b"s" * 32, b"j" * 16
PORT = 4401
LAB = 251  # the number of the namespaces
BLOCK_BYTES = MIB
STEP_S = 0.1
SAMPLE_S = 0.6
PAST = 35  # samples of each direction before the first fault
NAMED_WITHIN_S = 60.0


class Receiver:
    """Takes what a node sends into a place of its own: blocks of two nodes that meet in one would
    not prove, and be sent again until all links are full."""

    def __init__(self, nodes: int) -> None:
        self._memory = [memoryview(mmap.mmap(-1, BLOCK_BYTES)) for _ in range(nodes)]

    def up(self, node: int) -> None: ...

    def message(self, node: int, message: MeshMessage) -> None: ...

    def place(self, node: int, span: Span) -> memoryview | None:
        return self._memory[node][: span.length]

    def block(self, node: int, span: Span, checksum: int) -> None: ...

    def writable(self, node: int) -> None: ...

    def dead(self, node: int, why: str, is_loss: bool) -> None:
        if is_loss:
            print(f"node {node} is lost: {why}", file=sys.stderr)


def run_node(me: int, hosts: list[str]) -> None:
    """Until its standard input ends: a line with what the meter would report, now and then."""
    options, places = LinkOptions(HASHING, streams=StreamLimits.of(1)), Receiver(len(hosts))
    peers = Peers(
        lambda shell: new_link_table(Identity(JOB, me, 1), SECRET, places, shell, options),
        PeerOptions((hosts[me], PORT), (), TcpOptions(unacked_s=10)),
    )
    # In turns, so that no two send to the same one at a time while nothing is slow. All have one
    # clock, as the copies of a job have its steps: turns that drift would meet as they did not.
    others = [(me + step) % len(hosts) for step in range(1, len(hosts))]
    for node in others:
        peers.connect(node, (hosts[node], PORT))
    data = memoryview(os.urandom(BLOCK_BYTES))
    is_over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()
    meter, at, next_sample_s = LinkMeter(), 0, time.monotonic() + SAMPLE_S
    under_way = dict.fromkeys(others, 0)
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    while not is_over.wait(STEP_S - time.monotonic() % STEP_S):
        while not ended.empty():
            under_way[ended.get()] -= 1
        node = others[round(time.monotonic() / STEP_S) % len(others)]
        if under_way[node] <= 1:  # else it is late, and skipped as copies of a step are
            at += BLOCK_BYTES
            span = Span(0, Stamp(1, 1), Part.PAYLOAD, at, BLOCK_BYTES)
            done: Callable[[str | None], None] = lambda why, node=node: ended.put(node)  # noqa: E731
            under_way[node] += peers.send_block(node, span, data, done)
        if time.monotonic() >= next_sample_s:
            next_sample_s += SAMPLE_S
            rows = meter.look(peers.sent_counts(), time.monotonic_ns())
            print(json.dumps([me, [(row.node, row.sample) for row in rows]]), flush=True)
            if damaged := peers.damaged():  # then links carry more than was asked of them
                sys.exit(f"node {me}: blocks came damaged, by node: {damaged}")
    peers.close()


@dataclass
class Lab:
    """The nodes, and what they have said so far."""

    network: Namespaces
    links: SlowLinks
    said: queue.SimpleQueue[str]
    samples: int = 0
    false_alarms: int = 0

    def listen(self, for_s: float) -> list[SlowLink]:
        """Whoever is called slow now, after listening for so long."""
        until_s = time.monotonic() + for_s
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                sender, rows = json.loads(self.said.get(timeout=left_s))
            except queue.Empty:
                break
            for node, sample in rows:
                self.links.add(sender, node, LinkSample(*sample))
                self.samples += 1
        self.links.news()
        return self.links.slow


def harm(network: Namespaces, kind: str, rate: int, usual: int) -> Callable[[], None]:
    """Make one thing slow; what takes it back."""
    if kind in ("sender", "receiver"):
        way = "sends" if kind == "sender" else "receives"
        network.shape(1, LinkShape(rate, ways=(way,)))
        return lambda: network.shape(1, None)
    if kind == "loss":
        network.shape(1, LinkShape(rate, loses=True, ways=("sends",)))
        return lambda: network.shape(1, None)
    network.tie(0, 2, rate)
    return lambda: network.tie(0, 2, usual)


EXPECTED = {
    "sender": (LinkSide.SENDER, (1,)),
    "receiver": (LinkSide.RECEIVER, (1,)),
    "link": (LinkSide.LINK, (0, 2)),
    "loss": (LinkSide.SENDER, (1,)),
}


def strike(lab: Lab, kind: str, rate: int, usual: int) -> tuple[bool, str]:
    """Whether the right one was named, and nobody else until it was over; what is to be told."""
    named: dict[tuple[LinkSide, tuple[int, ...]], str] = {}

    def is_anybody_slow(for_s: float) -> bool:
        slow = lab.listen(for_s)
        named.update({(each.side, each.nodes): each.cause for each in slow})
        return bool(slow)

    undo = harm(lab.network, kind, rate, usual)
    began_s = time.monotonic()
    while time.monotonic() - began_s < NAMED_WITHIN_S and EXPECTED[kind] not in named:
        is_anybody_slow(SAMPLE_S)
    took_s = time.monotonic() - began_s
    undo()
    ended_s = time.monotonic()
    while is_anybody_slow(SAMPLE_S) and time.monotonic() - ended_s < 2 * NAMED_WITHIN_S:
        pass
    over_s = time.monotonic() - ended_s
    is_anybody_slow(5)
    told = "; ".join(f"{side.value} {nodes} ({why})" for (side, nodes), why in named.items())
    right = list(named) == [EXPECTED[kind]]
    how = f"{'right' if right else 'WRONG'} after {took_s:4.1f} s, over {over_s:4.1f} s later"
    return right, f"{kind:9} {how}: {told or 'nobody'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--mbit", type=int, default=200)
    parser.add_argument("--factor", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", default="sender,receiver,link,loss")
    parser.add_argument("--node", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.node:
        run_node(*json.loads(options.node))
        return
    if why := why_no_namespaces():
        sys.exit(why)
    usual, watch = options.mbit * 10**6, harness.watch()
    remove(LAB)  # what a killed run has left
    network = Namespaces(LAB, usual)
    children: list[subprocess.Popen[str]] = []
    try:
        seats = [network.seat(node) for node in range(options.nodes)]
        network.tie(0, 2, usual)
        said: queue.SimpleQueue[str] = queue.SimpleQueue()
        for node, seat in enumerate(seats):
            what = json.dumps([node, [each.address for each in seats]])
            command = [*seat.before, sys.executable, __file__, "--node", what]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            child = subprocess.Popen(command, text=True, **pipes)
            children.append(child)
            threading.Thread(
                target=lambda out=child.stdout: [said.put(line) for line in out], daemon=True
            ).start()
        lab = Lab(network, SlowLinks([None] * options.nodes), said)
        pairs = options.nodes * (options.nodes - 1)
        while lab.samples < (PAST + LONG) * pairs:
            lab.false_alarms += bool(lab.listen(5))
        load = os.getloadavg()[0]
        print(f"{lab.samples} samples of {pairs} directions; load {load:.1f}", flush=True)
        right = count = 0
        for _ in range(options.rounds):
            for kind in options.kinds.split(","):
                is_right, told = strike(lab, kind, round(usual / options.factor), usual)
                right, count = right + is_right, count + 1
                print(told, flush=True)
        load = os.getloadavg()[0]
        print(f"{right} of {count} right; {lab.false_alarms} before any fault; load {load:.1f}")
        harness.tell(watch.end())
    finally:
        for child in children:
            child.kill()
            child.wait()
        network.close()


if __name__ == "__main__":
    main()
