"""Prober: the process that runs a node's probes, each in a child of its own with a deadline.

Comes in: options on the command line; the end of its stdin, when whoever started it is gone. Goes
out: a line for each answer (`model/parts.py`), and one now and then that says it lives. Never
imports torch, has no threads, and holds nothing that a probe could keep: a child is forked for each
look and killed when it is late. One that outlives that, in the kernel, is left alone, and its probe
is not run again until it is gone.

    python -m keepstep.edge.parts.prober '{"arena_dir": ..., ...}' '{"kernel": 4711}'

Invariant: every probe answers within its deadline, if only that it saw nothing.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from keepstep.edge.doctor.host import Host
from keepstep.edge.parts import amd, nvml, traces
from keepstep.edge.parts.clocks import probe_clock
from keepstep.edge.parts.kernel import probe_kernel
from keepstep.edge.parts.nic import probe_nic
from keepstep.edge.parts.place import probe_disk, probe_shm
from keepstep.edge.parts.pressure import probe_pressure
from keepstep.edge.parts.probe import PartLook, Probe, Targets
from keepstep.model.decoding import a_count, a_text, an_object, from_json
from keepstep.model.parts import (
    BEAT,
    BEAT_NS,
    DEADLINE_NS,
    PROBES,
    ProbeAnswer,
    a_cursor,
    answer_from_line,
)
from keepstep.model.units import MIB, MS_NS, S_NS

ALL: Mapping[str, Probe] = {
    "nvml": nvml.probe_nvml,
    "amd": amd.probe_amd,
    "nic": probe_nic,
    "disk": probe_disk,
    "shm": probe_shm,
    "pressure": probe_pressure,
    "clock": probe_clock,
    "kernel": probe_kernel,
}
PRESENT = {"nvml": nvml.DRIVER, "amd": amd.DRIVER}  # without these a probe is not run
ANSWER_BYTES = MIB


def targets_to_text(targets: Targets) -> str:
    """For the command line."""
    return json.dumps(asdict(targets), default=str)


def targets_from_text(text: str) -> Targets:
    """The inverse. Raises ValueError."""
    plain = an_object(from_json(text))
    found = plain.get("traces")
    return Targets(
        Path(a_text(plain.get("arena_dir"))),
        Path(a_text(plain.get("disk_dir"))),
        a_count(plain.get("pid")),
        None if found is None else Path(a_text(found)),
    )


def cursors_to_text(cursors: Mapping[str, int]) -> str:
    """For the command line: by probe, from where it reads on."""
    return json.dumps(dict(cursors))


def cursors_from_text(text: str) -> dict[str, int]:
    """The inverse. Raises ValueError."""
    found = {name: a_cursor(cursor) for name, cursor in an_object(from_json(text)).items()}
    if unknown := found.keys() - PROBES.keys():
        raise ValueError(f"expected names of probes, found {min(unknown)!r:.40}")
    return found


def is_wanted(name: str, host: Host, targets: Targets) -> bool:
    """Whether this machine has something for that probe at this moment, or there is a trace."""
    if name not in PRESENT or host.place(PRESENT[name]).exists():
        return True
    return traces.is_there(name, targets)


@dataclass
class _Turn:
    """A probe: when it is due, where it reads on, and its child, if it has one (`pid`, 0: none).
    `is_late`: that was killed, and is not gone yet."""

    due_ns: int
    cursor: int = -1
    pid: int = 0
    reads: int = -1
    since_ns: int = 0
    said: bytes = b""
    is_late: bool = False


class Prober:
    """Runs until `stdin` ends. `say`: hears each line."""

    def __init__(
        self,
        probes: Mapping[str, Probe],
        host: Host,
        targets: Targets,
        stdin: int,
        say: Callable[[str], None],
        cursors: Mapping[str, int] | None = None,
    ) -> None:
        """cursors: by probe, where its last look ended that a prober before this one told of."""
        self._probes, self._host, self._targets = probes, host, targets
        self._stdin, self._say = stdin, say
        now_ns = time.monotonic_ns()
        # one after the other at first, so that they never all run at once
        self._turns = {
            name: _Turn(now_ns + 50 * MS_NS * place, (cursors or {}).get(name, -1))
            for place, name in enumerate(probes)
        }
        self._beat_ns = now_ns
        self._poll = select.poll()
        self._poll.register(stdin, select.POLLIN)

    def run(self) -> None:
        """Until then."""
        try:
            while self._turn():
                pass
        finally:
            for turn in self._turns.values():
                if turn.pid:
                    with suppress(ProcessLookupError):
                        os.kill(turn.pid, signal.SIGKILL)

    def _turn(self) -> bool:
        now_ns = time.monotonic_ns()
        if now_ns >= self._beat_ns:
            self._say(ProbeAnswer(BEAT, now_ns, 0, "").to_line())
            self._beat_ns = now_ns + BEAT_NS
        for name, turn in self._turns.items():
            self._look_after(name, turn, now_ns)
        wakes_ns = min([self._beat_ns, *(self._wakes_ns(turn) for turn in self._turns.values())])
        left_ms = max(0, wakes_ns - time.monotonic_ns()) / MS_NS
        by_pipe = {turn.reads: (name, turn) for name, turn in self._turns.items()}
        for fd, _ in self._poll.poll(left_ms + 1):
            if fd == self._stdin:
                if not os.read(fd, 4096):
                    return False
            else:
                self._hear(*by_pipe[fd])
        return True

    def _wakes_ns(self, turn: _Turn) -> int:
        return turn.since_ns + DEADLINE_NS if turn.pid and not turn.is_late else turn.due_ns

    def _look_after(self, name: str, turn: _Turn, now_ns: int) -> None:
        if turn.is_late and turn.pid and _is_gone(turn.pid):
            turn.pid, turn.is_late = 0, False
        if turn.pid and not turn.is_late and now_ns - turn.since_ns >= DEADLINE_NS:
            self._answer(name, turn, PartLook(blind=f"no answer within {DEADLINE_NS / S_NS:g} s"))
            os.kill(turn.pid, signal.SIGKILL)
            self._close(turn)
            turn.is_late = True
        if now_ns < turn.due_ns:
            return
        turn.due_ns = now_ns + PROBES[name].every_ns
        if not is_wanted(name, self._host, self._targets):
            return
        if turn.is_late:
            self._answer(name, turn, PartLook(blind="a look before hangs in the kernel"))
        elif not turn.pid:
            self._fork(name, turn, now_ns)

    def _fork(self, name: str, turn: _Turn, now_ns: int) -> None:
        reads, writes = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
        except OSError as error:
            os.close(reads)
            os.close(writes)
            self._answer(name, turn, PartLook(blind=f"no process for it: {error.strerror}"))
            return
        if pid == 0:
            _be_the_child(name, self._probes[name], self._host, self._targets, turn.cursor, writes)
        os.close(writes)
        turn.pid, turn.reads, turn.since_ns, turn.said = pid, reads, now_ns, b""
        self._poll.register(reads, select.POLLIN)

    def _hear(self, name: str, turn: _Turn) -> None:
        data = os.read(turn.reads, 65536)
        turn.said += data
        if data and len(turn.said) <= ANSWER_BYTES:
            return
        self._close(turn)
        pid, turn.pid = turn.pid, 0
        if data:
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        code = os.waitstatus_to_exitcode(status)
        try:
            cursor, line = turn.said.split(b"\n", 1)
            answer = answer_from_line(line)
            look = PartLook(answer.readings, answer.blind, int(cursor))
        except ValueError:
            look = PartLook(blind=f"its process ended with {code}")
        if not look.blind or look.cursor >= 0:
            turn.cursor = look.cursor
        self._answer(name, turn, look)

    def _close(self, turn: _Turn) -> None:
        self._poll.unregister(turn.reads)
        os.close(turn.reads)
        turn.reads = -1

    def _answer(self, name: str, turn: _Turn, look: PartLook) -> None:
        now_ns = time.monotonic_ns()
        took_ns = max(0, now_ns - turn.since_ns)
        answer = ProbeAnswer(name, now_ns, took_ns, look.blind, look.readings, turn.cursor)
        self._say(answer.to_line())


def _be_the_child(
    name: str, probe: Probe, host: Host, targets: Targets, cursor: int, writes: int
) -> None:
    """Never returns. What the probe raises that no probe should ends it with 1 and no word."""
    code = 1
    try:
        try:
            look = traces.play(name, targets, cursor) or probe(host, targets, cursor)
        except (OSError, ValueError) as error:
            look = PartLook(blind=str(error))
        line = ProbeAnswer(name, 0, 0, look.blind, look.readings).to_line()
        data = memoryview(f"{look.cursor}\n{line}".encode())
        while data:
            data = data[os.write(writes, data) :]
        code = 0
    finally:
        os._exit(code)


def _is_gone(pid: int) -> bool:
    """Whether that child has ended; it is no zombie then."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


def _say(line: str) -> None:
    """To whoever started this process; it ends where nobody is left to hear."""
    try:
        data = memoryview(line.encode())
        while data:
            data = data[os.write(1, data) :]
    except BrokenPipeError:
        os._exit(0)


def main() -> None:
    """Of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's: whoever started it decides
    targets = targets_from_text(sys.argv[1])
    host = Host()
    if is_wanted("nvml", host, targets):
        with suppress(ImportError):
            import pynvml  # noqa: F401  # once here, and not in every child
    Prober(ALL, host, targets, 0, _say, cursors_from_text(sys.argv[2])).run()


if __name__ == "__main__":
    main()
