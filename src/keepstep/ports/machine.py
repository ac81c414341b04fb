"""A machine as a process sees it: time, memory, a journal, and who does work."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from keepstep.model.events import INFO

if TYPE_CHECKING:  # a format laid over a Memory, which these ports only hand on
    pass

T = TypeVar("T")
Acts = Generator[None, None, T]  # work in pieces, its result at the end


class Clock(Protocol):
    """What time it is here. Machines do not agree about it."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since some moment of this machine's life; never goes back."""

    def wall_ns(self) -> int:
        """Nanoseconds since 1970, as far as this machine knows: it may jump."""

    def boot(self) -> str:
        """Names that life of this machine, and with it its monotonic clock; empty: nobody knows."""


class Timer(Protocol):
    """A call that is to come later and can be called off."""

    def cancel(self) -> None:
        """It does not come. Nothing happens when it has come already, is just being made, or was
        cancelled before."""


class Timers(Protocol):
    """The timers of a loop, for the calls that this loop makes."""

    def after(self, delay_ns: int, call: Callable[[], None]) -> Timer:
        """Have the loop make `call` once, when `delay_ns` nanoseconds have passed on this machine's
        clock, or a little later, but never before this method has returned; less than 0 is 0.
        Timers come in the order in which they are due, and those of one instant in the order of
        their asking."""


class Region(Protocol):
    """A file of a node's memory, mapped."""

    path: Path
    view: memoryview
    address: int  # of the first byte; 0 where there is none to give to native code

    def prefault(self, at: int = 0, nbytes: int | None = None) -> None:
        """Touch every page of a stretch now, or all: a first touch later costs twenty times the
        copy."""

    def punch(self, at: int, nbytes: int) -> None:
        """Give up the memory of a stretch: it reads as zeros from now on. Whole pages only; what
        else it touches is zeroed, and stays. Nothing is to be written there any more: there might
        be no memory for it."""

    def has_holes(self) -> bool:
        """Whether some of the file's memory was given up."""

    def lock(self, exclusive: bool) -> bool:
        """Try to lock the file for this mapping of it, shared or exclusively; False when others
        hold it. Ends with the process."""

    def unlock(self) -> None: ...

    def put(self, at: int, data: bytes) -> None:
        """Write a page. Who reads meanwhile may find a part of it, and so may everybody when the
        writer dies meanwhile."""

    def gather(self, at: int, ranges: int, count: int) -> int:
        """Write what lies at `count` places of this process's memory, one behind the other, from
        `at` on. `ranges`: the address of so many `struct iovec`. Returns how many bytes were
        written: fewer where some of the places cannot be read. Raises OSError, EFAULT when none of
        them can."""

    def is_there(self) -> bool:
        """Whether `path` still leads to this file."""

    def close(self) -> None:
        """Give up the mapping, and with it the lock. Views that others still have stay readable."""


class Memory(Protocol):
    """A node's memory: files that outlive the processes which map them, and are lost with the
    node."""

    @property
    def block_bytes(self) -> int:
        """Of a snapshot's payload, how many bytes share a checksum. The same on all nodes."""

    def open(self, path: Path) -> Region:
        """Raises OSError when there is none, ValueError when it is empty or no file."""

    def create(self, path: Path, nbytes: int) -> Region:
        """A file of zeros with every page reserved, and the directories above it; replaces what has
        that name.

        Raises MemoryBudgetError when it does not fit; leaves nothing behind then.
        """

    def ensure(self, path: Path, nbytes: int) -> Region:
        """What is there; else as `create`. All who do this at once get the same file."""

    def join(self, pieces: Sequence[tuple[Region, int, int]]) -> Region:
        """A map of stretches (offset, bytes) of these regions, one behind the other, to read from;
        `path` is the first one's. All begin and end between pages, but for the last end. It cannot
        be locked, and shows what is written there until it is closed. Where nothing maps, it is a
        copy."""

    def names(self, directory: Path) -> list[str]:
        """What is in it, in order; nothing when it is not there, vanishes meanwhile, or is somebody
        else's."""

    def rename(self, path: Path, to: Path) -> None:
        """Of a file or a directory, in one instant; replaces a file of that name. Raises OSError
        when there is no `path`."""

    def remove(self, path: Path) -> None:
        """A file, or a directory with all that is in it; nothing happens when it is not there."""

    def size(self, path: Path) -> int:
        """Of a file, in bytes, without what it has given up; 0 when there is none."""

    def free_bytes(self, directory: Path) -> int:
        """What could still be created there."""


class Journal(Protocol):
    """Where decisions are written down. Nothing depends on it."""

    def record(self, kind: str, why: str, /, level: int = INFO, **data: Any) -> None:
        """One fact or decision: a stable word for tools, a sentence for people with its numbers,
        and these numbers again. `level`: how loud it is in the log (`model/events.py`)."""


class Executor(Protocol):
    """Runs work that takes long, off the loop: hashing, copying, reading a store. Pieces of work
    that were submitted to one executor may run at the same time, unless it says otherwise."""

    def submit(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Have `work` done elsewhere; the loop calls `then` with its result. What it raises ends
        the process."""

    def act(self, acts: Acts[T], then: Callable[[T], None]) -> None:
        """The same for work in pieces: wherever it yields, others may run in between, and the
        process may die."""
