"""Processes, looked at from outside: state, where it sleeps in the kernel, processor time, bytes
moved.

Reads /proc and nothing else, so that a look costs some tens of microseconds and waits for nobody:
none of the files read here takes a lock that a hanging process can hold. A process that is gone is
an answer, not an error.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from keepstep.model.diagnosis import GroupSample, ProcessSample, State
from keepstep.model.units import S_NS

PROC = Path("/proc")
TICK_NS = S_NS // os.sysconf("SC_CLK_TCK")
GONE = ProcessSample("gone", 0, 0)
STATES: dict[str, State] = {
    **{
        "R": "running",
        "S": "asleep",
        "I": "asleep",
        "D": "uninterruptible",
        "T": "stopped",
        "t": "traced",
    },
    **{"Z": "gone", "X": "gone"},
}
# A frozen cgroup shows as D (cgroup v1) or S (v2): only the place tells.
FREEZERS = ("refrigerator", "do_freezer_trap")


@dataclass(frozen=True, slots=True)
class _Stat:
    """/proc/PID/stat, as far as it is asked for."""

    state: str
    group: int
    cpu_ns: int
    threads: int


def read_process(pid: int) -> ProcessSample:
    """One look; `state` is the main thread's, `cpu_ns` all threads'."""
    stat = _read_stat(pid)
    if stat is None or stat.state in "ZX":
        return GONE
    wchan = "" if stat.state == "R" else read_wchan(PROC / str(pid))
    state = (
        "frozen" if any(place in wchan for place in FREEZERS) else STATES.get(stat.state, "unknown")
    )
    return ProcessSample(state, stat.cpu_ns, stat.threads, wchan)


def read_group(group: int) -> GroupSample:
    """All living members of a process group: a rank and whatever it has started in it."""
    cpu_ns = io_bytes = 0
    for entry in os.listdir(PROC):
        if entry.isdigit() and (stat := _read_stat(int(entry))) is not None and stat.group == group:
            cpu_ns += stat.cpu_ns
            io_bytes += _read_io(int(entry))
    return GroupSample(cpu_ns, io_bytes)


def group_of(pid: int) -> int | None:
    """None: there is no such process."""
    stat = _read_stat(pid)
    return None if stat is None else stat.group


def read_wchan(task: Path) -> str:
    """Where in the kernel it sleeps; empty when it does not, or when that is not ours to see."""
    found = _read(task / "wchan")
    return "" if found in ("", "0") else found


def describe(pid: int) -> str:
    """For people: every thread with its state and place, and the kernel's stack where it may be
    read."""
    tasks = PROC / str(pid) / "task"
    try:
        threads = sorted(tasks.iterdir(), key=lambda task: int(task.name))
    except OSError:
        return f"process {pid} is gone\n"
    lines = [f"process {pid}, {len(threads)} threads: number, state, place in the kernel, name"]
    for task in threads:
        stat = _parse(_read(task / "stat"))
        lines.append(
            f"  {task.name:>8} {stat.state if stat else '?'} {read_wchan(task) or '-':32} "
            f"{_read(task / 'comm')}"
        )
    kernel = _read(PROC / str(pid) / "stack")
    return (
        "\n".join(lines)
        + (f"\nkernel stack of the main thread:\n{kernel}" if kernel else "")
        + "\n"
    )


def _read_stat(pid: int) -> _Stat | None:
    return _parse(_read(PROC / str(pid) / "stat"))


def _parse(text: str) -> _Stat | None:
    words = text.rpartition(")")[2].split()  # a name may hold anything, even a parenthesis
    if len(words) < 18:
        return None
    return _Stat(
        words[0], int(words[2]), (int(words[11]) + int(words[12])) * TICK_NS, int(words[17])
    )


def _read_io(pid: int) -> int:
    """Bytes that went through read and write, from disks, pipes and sockets alike."""
    found = dict(
        line.split(": ", 1) for line in _read(PROC / str(pid) / "io").splitlines() if ": " in line
    )
    return int(found.get("rchar", 0)) + int(found.get("wchar", 0))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""  # gone, or not ours to see
