"""Memory: a machine's tmpfs, as `ports.Memory`: files that outlive processes and are lost with the
machine.

`MachineFiles` is the machine's, `SimMemory` one process's view of it, and knows what that process
has
mapped: its locks end with it. Space is counted as the kernel does: a file takes it until it has no
name and nobody has it mapped. What a reader sees is what has been written by that instant: half a
page, too, when its writer stops there.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from keepstep.errors import MemoryBudgetError
from keepstep.model.units import KIB, human_bytes
from keepstep.ports import Region
from keepstep.sim.protocol.world.world import Killed, Process

Seen = Callable[[Process, str, memoryview, int, bytes], None]

PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
SPARSE_BYTES = 32 * KIB  # from here on a file's memory is taken only where something is written


class File:
    """Bytes, the name that leads to them, who has them mapped, and who has locked them."""

    __slots__ = ("data", "exclusive", "holes_bytes", "name", "regions", "shared")

    def __init__(self, nbytes: int, name: str) -> None:
        is_small = nbytes < SPARSE_BYTES
        self.data = bytearray(nbytes) if is_small else mmap.mmap(-1, nbytes, PRIVATE)
        self.name: str | None = name  # None: it has none any more
        self.holes_bytes = 0  # given up, as they count
        self.regions = 0
        self.shared: list[SimRegion] = []
        self.exclusive: SimRegion | None = None


class MachineFiles:
    """All of one machine. `block_bytes`: of a snapshot, how many share a checksum. `on_put` sees
    every page that is about to be written: by whom, where, what is there now, and what comes."""

    def __init__(self, budget_bytes: int, block_bytes: int, random: Random) -> None:
        self.budget_bytes = budget_bytes
        self.block_bytes = block_bytes
        self.random = random
        self.on_put: Seen = _nobody
        self.used_bytes = 0
        self.most_bytes = 0
        self.eaten_bytes = 0  # by something that is none of ours
        self._directories: dict[str, dict[str, File | None]] = {}  # None: a directory

    def find(self, path: str) -> File | None:
        directory, _, name = path.rpartition("/")
        entries = self._directories.get(directory)
        return None if entries is None else entries.get(name)

    def make(self, path: str, nbytes: int) -> File | None:
        """None: there is no room."""
        if self.used_bytes + nbytes + self.eaten_bytes > self.budget_bytes:
            return None
        directory, _, name = path.rpartition("/")
        entries = self._make_directory(directory)
        old = entries.get(name)
        fresh = entries[name] = File(nbytes, path)
        self.used_bytes += nbytes
        self.most_bytes = max(self.most_bytes, self.used_bytes)
        if old is not None:
            self._unname(old)
        return fresh

    def _make_directory(self, directory: str) -> dict[str, File | None]:
        entries = self._directories.get(directory)
        if entries is None:
            entries = self._directories[directory] = {}
            above, _, name = directory.rpartition("/")
            if name:
                self._make_directory(above)[name] = None
        return entries

    def _unname(self, file: File) -> None:
        file.name = None
        self.give_back(file)

    def give_back(self, file: File) -> None:
        if file.name is None and not file.regions:
            self.used_bytes -= len(file.data) - file.holes_bytes

    def punch(self, file: File, nbytes: int) -> None:
        file.holes_bytes += nbytes
        self.used_bytes -= nbytes

    def names(self, directory: str) -> list[str]:
        return sorted(self._directories.get(directory, ()))

    def rename(self, path: str, to: str) -> None:
        directory, _, name = path.rpartition("/")
        entries = self._directories.get(directory, {})
        if name not in entries:
            raise FileNotFoundError(f"{path}: nothing there to rename")
        moved = entries.pop(name)
        directory, _, name = to.rpartition("/")
        entries = self._make_directory(directory)
        old = entries.get(name)
        entries[name] = moved
        if old is not None:
            self._unname(old)
        if moved is not None:
            moved.name = to
            return
        for known in [d for d in self._directories if d == path or d.startswith(path + "/")]:
            there = to + known[len(path) :]
            self._directories[there] = inner = self._directories.pop(known)
            for name, file in inner.items():
                if file is not None:
                    file.name = f"{there}/{name}"

    def remove(self, path: str) -> None:
        directory, _, name = path.rpartition("/")
        entries = self._directories.get(directory, {})
        if name not in entries:
            return
        found = entries.pop(name)
        if found is not None:
            self._unname(found)
            return
        for inner in self.names(path):
            self.remove(f"{path}/{inner}")
        self._directories.pop(path, None)

    def every_file(self) -> list[tuple[str, File]]:
        return [
            (f"{d}/{n}", f)
            for d, entries in sorted(self._directories.items())
            for n, f in sorted(entries.items())
            if f is not None
        ]


class SimRegion:
    """`ports.Region`: one process's map of a file."""

    __slots__ = (
        "_file",
        "_memory",
        "_name",
        "address",
        "nbytes",
        "path",
        "view",
    )

    def __init__(self, memory: SimMemory, path: Path, name: str, file: File) -> None:
        self.path = path
        self._name = name
        self._memory = memory
        self._file = file
        self.nbytes = len(file.data)
        self.view = memoryview(file.data)
        self.address = 0
        file.regions += 1
        memory.regions.add(self)

    def prefault(self, at: int = 0, nbytes: int | None = None) -> None:
        pass

    def punch(self, at: int, nbytes: int) -> None:
        self._memory.process.touch("punch", self._name)
        self.view[at : at + nbytes] = bytes(nbytes)
        self._memory.files.punch(self._file, nbytes)

    def has_holes(self) -> bool:
        return self._file.holes_bytes > 0

    def lock(self, exclusive: bool) -> bool:
        if self._memory.process.touch("lock"):
            return False
        file = self._file
        others = [r for r in file.shared if r is not self]
        if (file.exclusive is not None and file.exclusive is not self) or (exclusive and others):
            return False
        file.shared = others if exclusive else [*others, self]
        file.exclusive = self if exclusive else None
        return True

    def unlock(self) -> None:
        file = self._file
        if file.exclusive is self:
            file.exclusive = None
        elif file.shared:
            file.shared = [r for r in file.shared if r is not self]

    def put(self, at: int, data: bytes) -> None:
        process = self._memory.process
        try:
            process.touch("put", self._name)
        except Killed:
            part = self._memory.files.random.randrange(len(data) + 1)
            self.view[at : at + part] = data[:part]
            raise
        self._memory.files.on_put(process, self._name, self.view, at, data)
        self.view[at : at + len(data)] = data

    def gather(self, at: int, ranges: int, count: int) -> int:
        raise OSError(errno.ENOSYS, "no process of the simulation has addresses", self._name)

    def is_there(self) -> bool:
        return self._file.name == self._name

    def close(self) -> None:
        if self in self._memory.regions:
            self._memory.regions.discard(self)
            self.drop()

    def drop(self) -> None:
        """What the kernel does with it at the end of its process."""
        self.unlock()
        self.view.release()
        self._file.regions -= 1
        if self._file.name is None:
            self._memory.files.give_back(self._file)


class SimJoined:
    """`ports.Region`: a copy of stretches of files, as they were."""

    def __init__(self, pieces: Sequence[tuple[Region, int, int]]) -> None:
        self.path = pieces[0][0].path
        self.is_there = pieces[0][0].is_there
        self.view = memoryview(
            bytearray(b"".join(region.view[at : at + nbytes] for region, at, nbytes in pieces))
        )
        self.address = 0

    def prefault(self, at: int = 0, nbytes: int | None = None) -> None:
        pass

    def punch(self, at: int, nbytes: int) -> None:
        raise AssertionError("several files' memory is not given up by whoever reads it")

    def has_holes(self) -> bool:
        return False

    def lock(self, exclusive: bool) -> bool:
        raise AssertionError("several files are locked one by one")

    def unlock(self) -> None:
        pass

    def put(self, at: int, data: bytes) -> None:
        raise AssertionError("several files are only read")

    def gather(self, at: int, ranges: int, count: int) -> int:
        raise AssertionError("several files are only read")

    def close(self) -> None:
        self.view.release()


class SimMemory:
    """`ports.Memory` of one process."""

    def __init__(self, files: MachineFiles, process: Process) -> None:
        self.files = files
        self.process = process
        self.block_bytes = files.block_bytes
        self.regions: set[SimRegion] = set()
        process.on_end.append(self._end)

    def _end(self) -> None:
        regions, self.regions = self.regions, set()
        for region in regions:
            region.drop()

    def open(self, path: Path) -> Region:
        self.process.touch("open")
        name = str(path)
        file = self.files.find(name)
        if file is None:
            raise FileNotFoundError(f"{path}: no such file")
        if not len(file.data):
            raise ValueError(f"{path} is empty")
        return SimRegion(self, path, name, file)

    def create(self, path: Path, nbytes: int) -> Region:
        failed = self.process.touch("create")
        name = str(path)
        file = None if failed else self.files.make(name, nbytes)
        if file is None:
            free = human_bytes(self.free_bytes(path))
            raise MemoryBudgetError(
                f"a slot of {human_bytes(nbytes)} does not fit into {path.parent}: {free} "
                "are free there"
            )
        return SimRegion(self, path, name, file)

    def ensure(self, path: Path, nbytes: int) -> Region:
        return (
            self.open(path) if self.files.find(str(path)) is not None else self.create(path, nbytes)
        )

    def join(self, pieces: Sequence[tuple[Region, int, int]]) -> Region:
        self.process.touch("join")
        return SimJoined(pieces)

    def names(self, directory: Path) -> list[str]:
        return self.files.names(str(directory))

    def rename(self, path: Path, to: Path) -> None:
        self.process.touch("rename")
        self.files.rename(str(path), str(to))

    def remove(self, path: Path) -> None:
        self.process.touch("remove")
        self.files.remove(str(path))

    def size(self, path: Path) -> int:
        file = self.files.find(str(path))
        return 0 if file is None else len(file.data) - file.holes_bytes

    def free_bytes(self, directory: Path) -> int:
        return max(0, self.files.budget_bytes - self.files.used_bytes - self.files.eaten_bytes)


def _nobody(process: Process, path: str, view: memoryview, at: int, data: bytes) -> None:
    """Nobody wants to know."""
