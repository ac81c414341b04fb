"""Host: the machine as the doctor reads it: files below a root, and calls that are no files.

Comes in: paths as they are on the machine. Goes out: text and numbers, None where nothing can be
read. Whatever reads the machine goes through here, so that a test can lay out another one: its root
is a directory, its calls are functions.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

MOST_BYTES = 1 << 20  # of any file of /proc that is read
TIMEX_BYTES = 512  # more than struct timex has
TIME_ERROR = 5


@dataclass(frozen=True, slots=True)
class Space:
    """Of a file system: bytes and files, in all and free."""

    total_bytes: int
    free_bytes: int
    free_files: int


def space_of(path: Path) -> Space:
    """What is free for this user there. Raises OSError."""
    found = os.statvfs(path)
    unit = found.f_frsize
    return Space(found.f_blocks * unit, found.f_bavail * unit, found.f_favail)


def addresses_of(name: str) -> tuple[str, ...]:
    """Where a name leads, by the machine's resolver; it may take long. Empty: nowhere."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(each[4][0]) for each in found))


def is_clock_synchronised() -> bool | None:
    """As the kernel was told (adjtimex(2)); None: it does not say."""
    timex = ctypes.create_string_buffer(TIMEX_BYTES)  # modes = 0: read, change nothing
    state = int(ctypes.CDLL(None, use_errno=True).adjtimex(timex))
    return None if state < 0 else state != TIME_ERROR


def pidfd_refusal() -> str:
    """Why no process can be watched, empty: it can."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return str(error)
    return ""


def output_of(command: Sequence[str], within_s: float) -> str:
    """What a program prints. Raises OSError where it cannot be started or fails, with the first
    line of what it said; TimeoutError after so many seconds, when it has been killed."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=within_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"no answer within {within_s:g} s") from None
    if done.returncode:
        said = f"{done.stdout}\n{done.stderr}".strip().splitlines()
        raise OSError(said[0].strip() if said else f"it ended with {done.returncode}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class Host:
    """A machine. `wait_s`: how long slow answers (names, `nvidia-smi`) may take, each."""

    root: Path = Path("/")
    wait_s: float = 0.5
    space: Callable[[Path], Space] = space_of
    addresses: Callable[[str], tuple[str, ...]] = addresses_of
    clock_synchronised: Callable[[], bool | None] = is_clock_synchronised
    pidfd_refusal: Callable[[], str] = pidfd_refusal
    output: Callable[[Sequence[str], float], str] = output_of
    wall_s: Callable[[], float] = time.time
    now_s: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep
    cpus: Callable[[], int] = lambda: len(os.sched_getaffinity(0))
    user: Callable[[], int] = os.geteuid

    def place(self, path: str | Path) -> Path:
        """Where that path of the machine is."""
        return self.root / str(path).lstrip("/")

    def text(self, path: str | Path) -> str | None:
        """A file's text without blanks around it."""
        try:
            with open(self.place(path), "rb") as file:
                return file.read(MOST_BYTES).decode(errors="replace").strip()
        except OSError:
            return None

    def number(self, path: str | Path) -> int | None:
        """A file that holds one whole number."""
        return whole(self.text(path))

    def names(self, path: str | Path) -> list[str]:
        """What is in a directory, sorted; nothing where it cannot be read."""
        try:
            return sorted(os.listdir(self.place(path)))
        except OSError:
            return []

    def may(self, path: str | Path, how: int) -> bool:
        """Whether this process may do that with the file (access(2))."""
        return os.access(self.place(path), how)


def whole(text: str | None) -> int | None:
    """A whole number, or None."""
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def table_of(text: str | None) -> dict[str, str]:
    """`name: value` lines by name."""
    lines = (line.partition(":") for line in (text or "").splitlines())
    return {name.strip(): value.strip() for name, sep, value in lines if sep}


class TimedAnswer:
    """What a function answers, asked in a thread of its own: it may take longer than anybody
    waits, and is left behind then. `now_s`: a clock that never goes back."""

    def __init__(
        self, ask: Callable[[], tuple[str, ...]], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask = ask
        self._now_s = now_s
        self._found: tuple[tuple[str, ...], float] | None = None
        self._asked_s = now_s()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        begun_s = self._now_s()  # a busy machine begins late, which is no matter of the answer
        found = self._ask()
        self._found = found, self._now_s() - begun_s

    def get(self, within_s: float) -> tuple[tuple[str, ...], float | None]:
        """The answer and how long it took, in seconds; None: it has not come within so many seconds
        of the question."""
        self._thread.join(max(0.0, self._asked_s + within_s - self._now_s()))
        return self._found if self._found is not None else ((), None)
