"""Lab: several "nodes" on one machine, to be lost and replaced on purpose.

Comes in: how many nodes, a directory for what they write, the rate of their links. Goes out: for
each node a network seat, memory and a state directory of its own, the variables that tell its
processes of them, and a meeting point outside of all nodes. Knows nothing of what runs in it.

A lab has a number, which it holds by a lock on a file; so a dead lab is one whose lock can be
taken, and whoever makes the next lab removes what it left. Processes of a node carry a mark in
their environment, and live in its namespace when it has one.

Invariant: when the `with` ends, however it ends, no process of the lab lives and nothing of it is
in memory or in the network.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from keepstep.errors import ConfigError
from keepstep.testing import network
from keepstep.testing.network import LabNetwork, Loopback, Namespaces, Seat
from keepstep.testing.processes import is_dead

MEMORY = Path("/dev/shm")
MARK = "KEEPSTEP_LAB"
MOST_LABS = 254
END_WITHIN_S = 30.0
LOCK = "lock"


class Lab:
    """A context manager. `namespaces` None: when they can be made; a rate needs them."""

    def __init__(
        self,
        nodes: int,
        room: Path,
        rate_bits_per_s: int | None = None,
        namespaces: bool | None = None,
    ) -> None:
        self.nodes, self.room = range(nodes), room.absolute()
        self._rate, self._wants_namespaces = rate_bits_per_s, namespaces
        self._exits = ExitStack()
        self._store: Any = None
        self.number = 0
        self.seats: dict[int, Seat] = {}
        self.network: LabNetwork

    def __enter__(self) -> Lab:
        """Raises ConfigError when it cannot be made."""
        try:
            self._build()
        except BaseException:
            self._tear_down()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tear_down()

    def _build(self) -> None:
        why_not = (
            network.why_no_namespaces()
            if self._wants_namespaces is not False
            else "namespaces=False"
        )
        if why_not and (self._wants_namespaces or self._rate):
            raise ConfigError(
                f"lab: expected network namespaces{' to shape links' if self._rate else ''}, "
                f"found: {why_not}"
            )
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        ):
            # as Ctrl-C: what must be removed is removed
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            self._exits.callback(signal.signal, signal.SIGTERM, signal.SIG_DFL)
        remove_dead()
        self.number, lock = _claim_any()
        self._exits.callback(_give_up, self.number, lock)
        self._exits.callback(_remove, self.number)
        self.directory.mkdir(mode=0o700)
        self.network = Loopback(self.number) if why_not else Namespaces(self.number, self._rate)
        for node in self.nodes:
            self._seat(node)

    def _tear_down(self) -> None:
        # A second Ctrl-C must not leave half of it behind.
        is_main = threading.current_thread() is threading.main_thread()
        before = (
            {s: signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM)}
            if is_main
            else {}
        )
        self._store = None
        try:
            self._exits.close()
        finally:
            for signum, handler in before.items():
                if signal.getsignal(signum) is signal.SIG_IGN:
                    signal.signal(signum, handler)

    # -- places

    @property
    def directory(self) -> Path:
        """In memory."""
        return directory_of(self.number)

    def arena_dir(self, node: int) -> Path:
        return self.directory / f"node-{node}"

    def state_dir(self, node: int) -> Path:
        """Outlives the lab."""
        return self.room / f"node-{node}"

    def environ(self, node: int) -> dict[str, str]:
        """What makes a process one of the node's. Gloo would take the address of the machine's
        name."""
        seat = self.seats[node]
        return {
            MARK: f"{self.number}/{node}",
            "KEEPSTEP_ARENA_DIR": str(self.arena_dir(node)),
            "KEEPSTEP_STATE_DIR": str(self.state_dir(node)),
            "KEEPSTEP_HOST": seat.address,
            "GLOO_SOCKET_IFNAME": seat.interface,
            "TP_SOCKET_IFNAME": seat.interface,
        }

    def endpoint(self) -> str:
        """`host:port` of a meeting point (torch's TCPStore) that no node's loss takes away."""
        if self._store is None:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]  # two seconds, for whoever needs it

            self._store = TCPStore(self.network.host, 0, is_master=True, wait_for_workers=False)
        return f"{self.network.host}:{self._store.port}"

    # -- what happens to nodes

    def start(
        self,
        node: int,
        command: Sequence[str | Path],
        environ: Mapping[str, str] | None = None,
        **how: Any,
    ) -> subprocess.Popen[bytes]:
        """Run a command on the node, in a session of its own. `environ` replaces this process's,
        `how` is Popen's."""
        env = {**(os.environ if environ is None else environ), **self.environ(node)}
        return subprocess.Popen(
            [*self.seats[node].before, *map(str, command)], env=env, start_new_session=True, **how
        )

    def kill(self, *nodes: int) -> list[int]:
        """Machines are lost, all at once: no word to anybody, processes dead, memory gone. The
        processes that were there."""
        for node in nodes:
            self.network.unseat(node)
        killed = end_processes(lambda pid: any(self._lives_on(node, pid) for node in nodes))
        for node in nodes:
            self.network.clear(node)
            self.seats.pop(node, None)
            shutil.rmtree(self.arena_dir(node), ignore_errors=True)
        return killed

    def replace(self, node: int) -> None:
        """A fresh machine in the place of a lost one."""
        assert node not in self.seats, f"node {node} is not lost"
        self._seat(node)

    def _seat(self, node: int) -> None:
        self.seats[node] = self.network.seat(node)
        self.arena_dir(node).mkdir(mode=0o700)
        self.state_dir(node).mkdir(parents=True, exist_ok=True)

    def link_down(self, node: int) -> None:
        """Raises ConfigError without namespaces."""
        self.network.set_link(node, up=False)

    def link_up(self, node: int) -> None:
        self.network.set_link(node, up=True)

    def pids(self, node: int) -> list[int]:
        """The node's living processes."""
        return [pid for pid in living() if self._lives_on(node, pid)]

    def _lives_on(self, node: int, pid: int) -> bool:
        return mark_of(pid) == f"{self.number}/{node}" or self.network.has(node, pid)


# -- processes


def living() -> list[int]:
    """Every process of this user that has not ended."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError):
                is_ours = os.stat(f"/proc/{name}").st_uid == os.getuid()
                if is_ours and not is_dead(int(name)):
                    found.append(int(name))
    return found


def mark_of(pid: int) -> str:
    """`LAB/NODE` of a lab's process; empty for others."""
    with suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(f"{MARK}=".encode()):
                return variable.decode(errors="replace").partition("=")[2]
    return ""


def end_processes(belongs: Callable[[int], bool], within_s: float = END_WITHIN_S) -> list[int]:
    """SIGKILL all that belong, and what they start meanwhile, until none is left; their ids. Raises
    TimeoutError."""
    killed: dict[int, None] = {}
    deadline = time.monotonic() + within_s
    # A process that is just ending has no environment any more: once it belonged, it is waited for.
    while found := [
        pid for pid in living() if pid in killed or (pid != os.getpid() and belongs(pid))
    ]:
        for pid in found:
            killed[pid] = None
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"expected processes {found} to end within {within_s:.0f} s of SIGKILL"
            )
        time.sleep(0.002)
    return list(killed)


# -- numbers


def numbers() -> list[int]:
    """Of all labs that have left a trace, the living ones among them."""
    names = os.listdir(MEMORY)
    found = {
        int(match[1])
        for name in names
        if (match := re.fullmatch(rf"{network.PREFIX}(\d+)(\.lock)?", name))
    }
    return sorted(found | set(network.remains()))


def owner_of(number: int) -> int | None:
    """The process that holds the lab; None when nobody does."""
    lock = _claim(number)
    if lock is not None:
        _give_up(number, lock)
        return None
    with suppress(OSError, ValueError):
        return int(_lock_path(number).read_text())
    return None


def remove_dead() -> None:
    """What labs that were killed have left: processes, memory, network."""
    for number in numbers():
        lock = _claim(number)
        if lock is not None:
            _remove(number)
            _give_up(number, lock)


def directory_of(number: int) -> Path:
    # Not `keepstep-...`: that is what a job's memory is called.
    return MEMORY / f"{network.PREFIX}{number}"


def _lock_path(number: int) -> Path:
    return MEMORY / f"{network.PREFIX}{number}.lock"


def _claim_any() -> tuple[int, int]:
    for number in range(1, MOST_LABS + 1):
        lock = _claim(number)
        if lock is not None:
            return number, lock
    raise ConfigError(f"lab: expected fewer than {MOST_LABS} labs on this machine, found as many")


def _claim(number: int) -> int | None:
    """A descriptor that holds the number; None when somebody else does."""
    path = _lock_path(number)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except PermissionError:
        return None  # another user's
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_ino == path.stat().st_ino:  # else its last holder has just removed it
            os.truncate(fd, 0)
            os.write(fd, str(os.getpid()).encode())
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    return None


def _give_up(number: int, lock: int) -> None:
    _lock_path(number).unlink(missing_ok=True)
    os.close(lock)


def _remove(number: int) -> None:
    """Everything of a lab whose number this process holds."""
    names = network.remains().get(number, [])
    end_processes(
        lambda pid: (
            mark_of(pid).startswith(f"{number}/") or any(network.is_in(name, pid) for name in names)
        )
    )
    network.remove(number)
    shutil.rmtree(directory_of(number), ignore_errors=True)
