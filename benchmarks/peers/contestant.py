"""One contender seen from outside: its processes are started, asked, killed, and added up.

In comes a name, a Python and a room; out come answers, CPU time and memory of everything that
carries this contender's mark. It never ends a process that does not carry it.

Invariant: when `end` returns, nothing that was started here is alive.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

from benchmarks import harness

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0


class Failed(Exception):
    """The contender said why it could not, or went silent."""


class Contestant:
    """`cores`: where all that it starts runs. `room`: a folder, which is not removed here."""

    def __init__(self, name: str, python: Path, room: Path, cores: list[int]) -> None:
        self._name, self._python, self._room, self._cores = name, python, room, cores
        self._mark = uuid.uuid4().hex
        self._trainer: subprocess.Popen[bytes] | None = None
        self._companion: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self.orphans_s = 0.0  # CPU time of processes that left the tree, for whoever adds up
        self._log = open(room.parent / f"{room.name}.log", "ab")  # noqa: SIM115

    # -- its processes

    def start(self, has_companion: bool = False) -> None:
        if has_companion:
            if self._companion is None:
                self._companion = self._open("--companion")
            else:
                assert self._companion.stdin is not None
                self._companion.stdin.write(b"restart\n")
                self._companion.stdin.flush()
        self._trainer, self._rest = self._open(), b""

    def _open(self, *words: str) -> subprocess.Popen[bytes]:
        command = [str(self._python), "-m", "benchmarks.peers.contender", self._name]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "JAX_PLATFORMS": "cpu",
            harness.MARK: self._mark,
        }
        return subprocess.Popen(
            ["taskset", "-c", ",".join(map(str, self._cores)), *command, str(self._room), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if not words else self._log,
            stderr=self._log,
            env=environment,
            cwd=ROOT,
        )

    def kill(self) -> int:
        """SIGKILL to the trainer alone, as a fault would. When it was, in ns."""
        assert self._trainer is not None
        now_ns = time.monotonic_ns()
        self._trainer.kill()
        self._trainer.wait()
        return now_ns

    def leave(self) -> None:
        """A planned end of the trainer."""
        assert self._trainer is not None
        self.ask("end")
        self._trainer.wait(PATIENCE_S)

    def end(self) -> None:
        own = [process.pid for process in (self._trainer, self._companion) if process is not None]
        self.orphans_s = harness.cpu_s(set(harness.marked(self._mark)) - set(own))
        if self._companion is not None and self._companion.stdin is not None:
            self._companion.stdin.close()  # it puts away what it shares
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._companion.wait(10.0)
        for process in (self._trainer, self._companion):
            if process is not None:
                process.kill()
                process.wait()
        harness.end_all(self._mark)
        self._log.close()

    # -- talking to it

    def tell(self, do: str, **words: Any) -> None:
        assert self._trainer is not None and self._trainer.stdin is not None
        try:
            self._trainer.stdin.write(json.dumps({"do": do, **words}).encode() + b"\n")
            self._trainer.stdin.flush()
        except BrokenPipeError:
            raise Failed(f"its process ended before {do}; {self._last_words()}") from None

    def ask(self, do: str, **words: Any) -> dict[str, Any]:
        self.tell(do, **words)
        while "ok" not in (answer := self.hear(do)):
            pass
        if not answer["ok"]:
            raise Failed(f"{do}: {answer['why']}")
        return answer

    def hear(self, what: str = "its word") -> dict[str, Any]:
        """The next line. Raises Failed when there is none in time."""
        assert self._trainer is not None and self._trainer.stdout is not None
        until_s = time.monotonic() + PATIENCE_S
        while b"\n" not in self._rest:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not select.select([self._trainer.stdout], [], [], left_s)[0]:
                raise Failed(f"{what}: no answer within {PATIENCE_S:.0f} s")
            found = os.read(self._trainer.stdout.fileno(), 1 << 16)
            if not found:
                raise Failed(f"{what}: its process ended; {self._last_words()}")
            self._rest += found
        line, _, self._rest = self._rest.partition(b"\n")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def _last_words(self) -> str:
        lines = (self._room.parent / f"{self._room.name}.log").read_text(errors="replace")
        return (lines.strip().splitlines() or ["it said nothing"])[-1][:160]

    # -- what it takes

    def cpu_s(self) -> float:
        return harness.cpu_s(harness.marked(self._mark))

    def memory_bytes(self) -> int:
        """What its processes hold, shared pages once, and what its room holds besides, when that is
        memory too. A file that a process has mapped counts with the process."""
        pids = harness.marked(self._mark)
        mapped = "".join(_read(f"/proc/{pid}/maps") for pid in pids)
        files = [path for path in self._room.rglob("*") if path.is_file()]
        return sum(_pss_bytes(pid) for pid in pids) + sum(
            path.stat().st_blocks * 512 for path in files if str(path) not in mapped
        )


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:  # ended meanwhile
        return ""


def _pss_bytes(pid: int) -> int:
    wanted = ("Pss_Anon:", "Pss_Shmem:")
    lines = _read(f"/proc/{pid}/smaps_rollup").splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(wanted))
