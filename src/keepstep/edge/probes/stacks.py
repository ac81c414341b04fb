"""Stacks: where every thread of a process is, without asking the process.

Comes in: pids and a time limit for all of them together. Goes out: a `Stack` each, always: with the
kernel's view of the threads, and with Python's frames where py-spy is installed
(`keepstep[stacks]`) and may look. py-spy reads the other's memory and never stops it
(`--nonblocking`), so a stopped process answers like any other; it needs what ptrace needs: the same
user, and on kernels with Yama `ptrace_scope` 0 or CAP_SYS_PTRACE. It runs as a process of its own:
when it hangs it is left behind, and nobody waits.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from keepstep.edge.os.own_file import check_own_directory
from keepstep.edge.probes.process import describe
from keepstep.model.diagnosis import Stack

WAITS_IN = ("torch/distributed/",)
MAY_WAIT_IN = ("torch/autograd/", "torch/nn/parallel/")  # collectives start from within
NOT_INSTALLED = "no Python frames: py-spy is not installed (pip install 'keepstep[stacks]')"


def take(pids: Mapping[int, int], limit_s: float) -> dict[int, Stack]:
    """The stacks of each rank's process, all within `limit_s`."""
    until = time.monotonic() + limit_s
    tool = find_py_spy()
    asked = {rank: _ask(tool, pid) for rank, pid in pids.items()}
    found = {}
    for rank, pid in pids.items():
        said, frames = _answer(asked[rank], until, limit_s)
        main = main_frames(frames, pid)
        digest = hashlib.sha256("\n".join(main).encode()).hexdigest()[:12] if main else ""
        found[rank] = Stack(f"{describe(pid)}\n{frames or said}\n", digest, waits(main))
    return found


def save(directory: Path, stacks: Mapping[int, Stack]) -> None:
    """One file a rank, in a directory that nobody has made before. Raises OSError."""
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_own_directory(directory.parent)
    directory.mkdir(mode=0o700)
    for rank, stack in stacks.items():
        (directory / f"rank-{rank}.txt").write_text(stack.text, encoding="utf-8")


def find_py_spy() -> str | None:
    """Beside this Python, or on the path."""
    return shutil.which(
        "py-spy",
        path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    )


def main_frames(text: str, pid: int) -> list[str]:
    """The main thread's frames in what py-spy printed, innermost first."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith(f"Thread {pid} "):
            frames = []
            for frame in lines:
                if not frame.startswith("    "):
                    break
                frames.append(frame.strip())
            return frames
    return []


def waits(frames: list[str]) -> bool | None:
    """Whether these frames wait for other ranks; None when they do not tell."""
    if not frames or any(place in frames[0] for place in MAY_WAIT_IN):
        return None
    return any(place in frames[0] for place in WAITS_IN)


def _ask(tool: str | None, pid: int) -> subprocess.Popen[str] | str:
    """A py-spy at work, or why there is none."""
    if tool is None:
        return NOT_INSTALLED
    command = [tool, "dump", "--nonblocking", "--pid", str(pid)]
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace"
        )
    except OSError as error:
        return f"no Python frames: py-spy could not be started ({error})"


def _answer(asked: subprocess.Popen[str] | str, until: float, limit_s: float) -> tuple[str, str]:
    """(why there are no frames, frames)."""
    if isinstance(asked, str):
        return asked, ""
    try:
        frames, error = asked.communicate(timeout=max(0.01, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        asked.kill()
        # it may hang in the kernel, as its subject does
        with contextlib.suppress(subprocess.TimeoutExpired):
            asked.communicate(timeout=0.1)
        return f"no Python frames: py-spy did not answer within {limit_s:g} s", ""
    if asked.returncode == 0 and "Thread " in frames:
        return "", frames
    return f"no Python frames: {error.strip() or 'py-spy found none'}", ""
