"""NIXL process: a keeper's child that has registered memory and reads that of other nodes, by NIXL
(https://github.com/ai-dynamo/nixl), which has UCX inside.

    python -m keepstep.edge.net.nixl_process FD     (of the memory; stdin is a socket)

Comes in: orders (`buffer_orders.py`); the end of its stdin, when the keeper is gone. Goes out:
answers, and whatever others read here.

It is a process of its own because UCX asks nobody who they are: over TCP whoever reaches its port
can read and write all memory of its process, registered or not (docs/security.md). So it holds
nothing but buffers: what is in them is what would cross a socket, and is believed no more than
that. It knows no secret and no slot. A fault in UCX ends this process alone; the keeper goes on
over TCP.

NIXL's own progress thread never sleeps (two thirds of a core with nothing to do), so there is none:
UCX gets its time from the loop below, while something is read here or there.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import mmap
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from keepstep.edge.net.buffer_orders import (
    MEMORY_BYTES,
    PACKET_BYTES,
    BufferOrder,
    OrderAnswer,
    OrderKind,
)
from keepstep.edge.os.needs import NIXL_MODULES, has_package
from keepstep.model.buffers import BUFFER_BYTES
from keepstep.model.units import MS_NS

# of Landlock: the same on every architecture; the rights of its first version
CREATE_RULESET, ADD_RULE, RESTRICT_SELF, PR_SET_NO_NEW_PRIVS = 444, 445, 446, 38
ALL_OF_FILES, WRITE_FILE, READ_FILE, READ_DIR = (1 << 13) - 1, 1 << 1, 1 << 2, 1 << 3
OF_NETWORK_CARDS = {  # what UCX opens as it connects
    "/sys": READ_FILE | READ_DIR,
    "/proc/sys": READ_FILE | READ_DIR,
    "/proc/self/net": READ_FILE | READ_DIR,
    "/dev/infiniband": READ_FILE | READ_DIR | WRITE_FILE,
}
Raised = tuple[type[Exception], ...]
BUSY_NS = 2 * MS_NS  # so long after something has happened it does not sleep
PAUSE_MS = 1  # between two looks while others may read here
IDLE_MS = 1000  # UCX looks after its connections now and then


class NixlLoop:
    """Does what it is told until nobody is there to tell it."""

    def __init__(self, orders: socket.socket, memory: int, nixl: Any, errors: Raised) -> None:
        """`errors`: what NIXL raises. Raises one of them when there is no way to others' memory."""
        self._errors = errors
        config = nixl.nixl_agent_config(
            enable_prog_thread=False, enable_listen_thread=False, backends=["UCX"]
        )
        self._agent = nixl.nixl_agent(os.urandom(16).hex(), config)
        self._orders = orders
        self._map = mmap.mmap(memory, MEMORY_BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._agent.register_memory([(self.address, MEMORY_BYTES, 0, "")], "DRAM")
        self._peers: dict[int, bytes] = {}  # the agents' descriptions
        self._names: dict[bytes, Any] = {}  # and what NIXL calls those
        self._reads: dict[int, tuple[Any, bytes]] = {}  # handle and agent, by the order's number
        self._awake = False
        self._busy_until_ns = 0
        self._poll = select.poll()
        self._poll.register(orders, select.POLLIN)

    def run(self) -> None:
        """See above."""
        self._answer(OrderAnswer(0, False, self.address, self._agent.get_agent_metadata()))
        while True:
            while self._poll.poll(self._pause_ms()):
                packet = self._orders.recv(PACKET_BYTES)
                if not packet:
                    return
                self._obey(BufferOrder.from_bytes(packet))
            self._progress()

    def _pause_ms(self) -> int:
        if not self._awake and not self._reads:
            return IDLE_MS
        return 0 if time.monotonic_ns() < self._busy_until_ns else PAUSE_MS

    def _obey(self, order: BufferOrder) -> None:
        self._busy_until_ns = time.monotonic_ns() + BUSY_NS
        match order.kind:
            case OrderKind.LOAD:
                self._try(order, self._load)
            case OrderKind.UNLOAD:
                self._unload(order.peer)
            case OrderKind.READ:
                self._try(order, self._read)
            case OrderKind.AWAKE:
                self._awake = True
            case OrderKind.REST:
                self._awake = False

    def _try(self, order: BufferOrder, act: Callable[[BufferOrder], bool]) -> None:
        """Answers at once where it fails, or is over."""
        raised: Raised = (*self._errors, OSError, LookupError)
        try:
            if act(order):
                self._answer(OrderAnswer(order.number))
        except raised as error:
            self._answer(_failed(order.number, error))

    def _load(self, order: BufferOrder) -> bool:
        """An agent once, however many connections read from it."""
        if order.agent not in self._names:
            self._names[order.agent] = self._agent.add_remote_agent(order.agent)
        self._peers[order.peer] = order.agent
        return True

    def _unload(self, peer: int) -> None:
        agent = self._peers.pop(peer, None)
        if agent is not None:
            self._forget(agent)

    def _forget(self, agent: bytes) -> None:
        """Once nobody needs it, and nothing is read from there: else NIXL says of a read that it
        has failed, while UCX may still write where it is read to."""
        is_read = any(agent == source for _, source in self._reads.values())
        if not is_read and agent not in self._peers.values() and agent in self._names:
            with contextlib.suppress(*self._errors):
                self._agent.remove_remote_agent(self._names.pop(agent))

    def _read(self, order: BufferOrder) -> bool:
        agent, source = self._agent, self._peers[order.peer]
        here = self.address + order.buffer * BUFFER_BYTES
        handle = agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs([(here, order.nbytes, 0)], "DRAM"),
            agent.get_xfer_descs([(order.address, order.nbytes, 0)], "DRAM"),
            self._names[source],
        )
        state = agent.transfer(handle)
        if state == "ERR":
            raise ConnectionError("the read could not begin")
        self._reads[order.number] = handle, source
        return False

    def _progress(self) -> None:
        """UCX gets its time, and who waits an answer."""
        agent = self._agent
        if not self._reads:
            agent.get_new_notifs()  # nobody sends any: this is what lets UCX answer
            return
        for number, (handle, source) in list(self._reads.items()):
            try:
                state = agent.check_xfer_state(handle)
            except self._errors as error:
                state = f"{type(error).__name__}: {error}"
            if state == "PROC":
                continue
            # only now nothing writes into that buffer any more
            del self._reads[number]
            with contextlib.suppress(*self._errors):
                agent.release_xfer_handle(handle)
            self._forget(source)
            failed = state != "DONE"
            self._answer(OrderAnswer(number, failed, 0, state.encode()[:1000] if failed else b""))
            self._busy_until_ns = time.monotonic_ns() + BUSY_NS

    def _answer(self, answer: OrderAnswer) -> None:
        self._orders.send(answer.to_bytes())


def _nixl() -> tuple[Any, Raised]:
    """The module, and what it raises, which has no class in common. Raises ImportError."""
    for name in NIXL_MODULES:
        if has_package(name):
            found = importlib.import_module(name)
            logging.getLogger("nixl").setLevel(logging.WARNING)
            bindings = vars(importlib.import_module(f"{name}._bindings")).values()
            kinds = [each for each in bindings if isinstance(each, type)]
            return found, tuple(kind for kind in kinds if issubclass(kind, Exception))
    raise ImportError(f"none of {', '.join(NIXL_MODULES)} is here")


def confine() -> bool:
    """From now on this process opens no file but what the kernel says of network cards, starts no
    program and looks into no other process, whoever has come to rule it: Landlock (Linux 5.13), for
    good. False: the kernel has none. What is open, and the network, stay."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    rights = struct.pack("=Q", ALL_OF_FILES)
    rules = libc.syscall(CREATE_RULESET, rights, ctypes.c_size_t(len(rights)), 0)
    if rules < 0:
        return False
    for place, granted in OF_NETWORK_CARDS.items():
        with contextlib.suppress(OSError):
            opened = os.open(place, os.O_PATH | os.O_CLOEXEC)
            libc.syscall(ADD_RULE, rules, 1, struct.pack("=Qi", granted, opened), 0)
            os.close(opened)
    done = libc.syscall(RESTRICT_SELF, rules, 0)
    os.close(rules)
    return bool(done == 0)


def _failed(number: int, error: Exception) -> OrderAnswer:
    return OrderAnswer(number, True, 0, f"{type(error).__name__}: {error}".encode()[:1000])


def main(memory: int) -> None:
    """Until the keeper is gone, or says so."""
    with socket.socket(fileno=os.dup(0)) as orders:
        try:
            nixl, errors = _nixl()
        except ImportError as error:
            orders.send(_failed(0, error).to_bytes())
            return
        raised: Raised = (*errors, RuntimeError, OSError)
        try:
            loop = NixlLoop(orders, memory, nixl, errors)
        except raised as error:
            orders.send(_failed(0, error).to_bytes())
            return
        confine()
        with contextlib.suppress(ConnectionError):
            loop.run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
