"""Probes of a node's processes as `ports.Probes`: /proc, cgroups, py-spy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from keepstep.edge.probes import hindrance, memory, process, recorder, reference, stacks
from keepstep.model.diagnosis import GroupSample, ProcessSample, Stack
from keepstep.model.step_work import FixedWork, Hindrance
from keepstep.model.units import S_NS


class NodeProbes:
    """`home`: the directory where stacks are saved, one directory for each time. `unpickle`: plain
    values, from bytes that anybody may have written; raises UntrustedError."""

    def __init__(self, home: Path, unpickle: Callable[[bytes], object]) -> None:
        self._home, self._unpickle = home, unpickle

    def process(self, pid: int) -> ProcessSample:
        return process.read_process(pid)

    def group_of(self, pid: int) -> int | None:
        return process.group_of(pid)

    def group(self, group: int) -> GroupSample:
        return process.read_group(group)

    def oom_counter(self, pid: int) -> Callable[[], int | None]:
        counter = memory.find_counter(pid)
        return lambda: memory.read_counter(counter)

    def machine_oom_kills(self) -> int | None:
        return memory.machine_oom_kills()

    def hindrance(self, pid: int) -> Callable[[], Hindrance]:
        return hindrance.find_hindrance(pid)

    def fixed_work(self, pids: Mapping[int, int], within_ns: int) -> dict[int, FixedWork]:
        return reference.measure(pids, within_ns)

    def stacks(self, pids: Mapping[int, int], within_ns: int) -> dict[int, Stack]:
        return stacks.take(pids, within_ns / S_NS)

    def save_stacks(self, found: Mapping[int, Stack]) -> str:
        numbers = [int(path.name[7:]) for path in self._home.glob("stacks-*") if _is_ours(path)]
        directory = self._home / f"stacks-{1 + max(numbers, default=0)}"
        stacks.save(directory, found)
        return str(directory)

    def recorder_dumps(self, pids: Mapping[int, int], newer_than_ns: int) -> dict[int, object]:
        return recorder.live_dumps(pids, newer_than_ns, self._unpickle)


def _is_ours(path: Path) -> bool:
    return path.name[7:].isascii() and path.name[7:].isdigit()
