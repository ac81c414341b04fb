"""Filesystem: the disk behind the store, which all machines of a simulated cluster share, as fsspec
wants a filesystem.

`SharedDisk` is the disk itself and what is wrong with it; `SimFileSystem` is one process's way to
it. A process may be killed at each of its calls: what it had written by then stays, a torn file
too, and nothing that it does while it unwinds reaches the disk any more.

What may be wrong: the disk is full; it does not answer, always or now and then; each call takes
long; it lies: it says that bytes are written and others lie there, which the writer may or may not
see when it reads them back; its lists fall behind, for all: they show what was there when that
began, as an object store's or a mirror's may, while whoever names a file finds it as it is.
Removing and renaming take effect in one instant for all machines.

Not simulated: a disk that forgets what was written when a machine is lost, and directories that
some machines see later than others.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from fsspec.spec import AbstractFileSystem

from keepstep.sim.protocol.world.world import Killed, Process

AWAY = "the store does not answer"


class DiskFile:
    """Bytes that lie on the disk. `writer_sees`: what the process that wrote them reads instead,
    because its machine still has that in memory."""

    __slots__ = ("data", "lies", "writer", "writer_sees")

    def __init__(self, writer: Process) -> None:
        self.data = bytearray()
        self.lies = False
        self.writer = writer
        self.writer_sees: bytearray | None = None

    def seen_by(self, process: Process) -> bytearray:
        """What that process reads."""
        if self.writer_sees is not None and process is self.writer:
            return self.writer_sees
        return self.data


class SharedDisk:
    """`full`: nothing more can be written. `away`: the part of all calls that fail. `slow_ns`: how
    long each call takes at most. `lying`: what is written from now on lies there differently;
    `has_lied`: some of it did. `unreadable`: files that nobody can read. `is_behind`: lists show
    what was there when that began; `hidden`: all that came meanwhile, ever. `on_remove`: those who
    see each file that is about to be removed, and by whom."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.full = False
        self.away = 0.0
        self.slow_ns = 0
        self.lying = False
        self.has_lied = False
        self.unreadable: set[str] = set()  # paths of files
        self.hidden: set[str] = set()
        self._listed: dict[str, bool] | None = None  # by path, whether it is a file
        self.on_remove: list[Callable[[Process, str], None]] = []
        self.files: dict[str, DiskFile] = {}
        self.directories: set[str] = {""}

    def heal(self) -> None:
        """Nothing is wrong any more; what lies there wrongly stays."""
        self.full = False
        self.away = 0.0
        self.slow_ns = 0
        self.lying = False
        self.unreadable.clear()
        self.is_behind = False

    @property
    def is_behind(self) -> bool:
        return self._listed is not None

    @is_behind.setter
    def is_behind(self, is_behind: bool) -> None:
        now = {**dict.fromkeys(self.directories, False), **dict.fromkeys(self.files, True)}
        self._listed = now if is_behind else None

    def appears(self, path: str) -> None:
        """A file or a directory is there from now on."""
        if self._listed is not None and path not in self._listed:
            self.hidden.add(path)

    def as_it_lies(self) -> SharedDisk:
        """The same files, with nothing wrong: for who looks from outside."""
        twin = SharedDisk(Random(0))
        twin.files = self.files
        twin.directories = self.directories
        return twin

    def begin(self, path: str, writer: Process) -> DiskFile:
        """An empty file at `path`, in place of what is there."""
        file = self.files[path] = DiskFile(writer)
        self.appears(path)
        if self.lying:
            file.lies = self.has_lied = True
            file.writer_sees = bytearray() if self.random.random() < 0.5 else None
        return file

    def append(self, file: DiskFile, data: bytes) -> None:
        """These bytes, or what a disk that lies makes of them."""
        if file.writer_sees is not None:
            file.writer_sees += data
        file.data += self._lie(data) if file.lies else data

    def _lie(self, data: bytes) -> bytes:
        match self.random.randrange(3):
            case 0:
                return bytes(len(data))
            case 1:
                return data[: self.random.randrange(len(data) + 1)]
            case _:
                wrong = bytearray(data)
                if wrong:
                    wrong[self.random.randrange(len(wrong))] ^= 1 << self.random.randrange(8)
                return bytes(wrong)

    def names(self, directory: str) -> list[str]:
        """The paths of what is in a directory, in order."""
        above = f"{directory}/" if directory else ""
        return _below(above, directory, [*self.files, *self.directories])

    def listed(self, directory: str) -> dict[str, bool] | None:
        """What a list of that directory shows, and whether each is a file; None: no such
        directory."""
        shown = self._listed
        if shown is None:
            shown = {**dict.fromkeys(self.directories, False), **dict.fromkeys(self.files, True)}
        if shown.get(directory, True):
            return None
        above = f"{directory}/" if directory else ""
        return {path: shown[path] for path in _below(above, directory, shown)}


class SimFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """One process's view of the disk."""

    protocol = "simulated"
    cachable = False

    def __init__(self, disk: SharedDisk, process: Process) -> None:
        super().__init__()
        self._disk = disk
        self._process = process

    def call(self, what: str, path: str) -> None:
        """An operation begins. The process may be killed here. Raises OSError when it fails."""
        disk = self._disk
        fails = self._process.touch(f"{what} in the store", path)
        if disk.slow_ns:
            self._process.spend(disk.random.randrange(disk.slow_ns))
        if fails or (disk.away and disk.random.random() < disk.away):
            raise OSError(errno.EIO, AWAY, path)

    def _allocate(self, path: str) -> None:
        if self._disk.full:
            raise OSError(errno.ENOSPC, "No space left on device", path)

    # -- files

    def _open(self, path: str, mode: str = "rb", **how: Any) -> io.BytesIO | WrittenFile:
        if mode == "rb":
            return io.BytesIO(self.cat_file(path))
        assert mode == "wb", mode
        self.call("open", path)
        if self._parent(path) not in self._disk.directories:
            raise FileNotFoundError(errno.ENOENT, "No such directory", path)
        return WrittenFile(self, path, self._disk.begin(path, self._process))

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **how: Any
    ) -> bytes:
        path = self._strip_protocol(path)
        self.call("read", path)
        if path in self._disk.unreadable:
            raise OSError(errno.EIO, AWAY, path)
        return bytes(self._file(path).seen_by(self._process)[start:end])

    def _file(self, path: str) -> DiskFile:
        if path not in self._disk.files:
            raise FileNotFoundError(errno.ENOENT, "No such file", path)
        return self._disk.files[path]

    def write(self, path: str, file: DiskFile, data: bytes) -> None:
        """Of an open file: a part of it if the process is killed here, or the disk is full."""
        disk = self._disk
        try:
            self.call("write", path)
            self._allocate(path)
        except (Killed, OSError):
            disk.append(file, data[: disk.random.randrange(len(data) + 1)])
            raise
        disk.append(file, data)

    def rm_file(self, path: str) -> None:
        path = self._strip_protocol(path)
        self.call("remove", path)
        self._file(path)
        for seen in self._disk.on_remove:
            seen(self._process, path)
        del self._disk.files[path]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **how: Any) -> None:
        """At once, or not at all."""
        path = self._strip_protocol(path)
        self.call("put", path)
        if mode == "create" and path in self._disk.files:
            raise FileExistsError(errno.EEXIST, "File exists", path)
        self._allocate(path)
        self._disk.append(self._disk.begin(path, self._process), value)

    def mv(self, path1: str, path2: str, **how: Any) -> None:
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        self.call("rename", source)
        self._disk.files[target] = self._file(source)
        self._disk.appears(target)
        del self._disk.files[source]

    # -- directories

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        path = self._strip_protocol(path)
        self.call("make", path)
        if path in self._disk.directories:
            if not exist_ok:
                raise FileExistsError(errno.EEXIST, "File exists", path)
            return
        self._allocate(path)
        while path:
            self._disk.directories.add(path)
            self._disk.appears(path)
            path = self._parent(path)

    def rmdir(self, path: str) -> None:
        path = self._strip_protocol(path)
        self.call("remove", path)
        if path not in self._disk.directories:
            raise FileNotFoundError(errno.ENOENT, "No such directory", path)
        if self._disk.names(path):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", path)
        self._disk.directories.discard(path)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        """One after the other: whoever is killed meanwhile leaves the rest."""
        path = self._strip_protocol(path)
        for inner in self._disk.names(path) if recursive else ():
            self.rm(inner, recursive=True)
        if path in self._disk.directories:
            self.rmdir(path)
        else:
            self.rm_file(path)

    def ls(self, path: str, detail: bool = True, **how: Any) -> list[Any]:
        path = self._strip_protocol(path)
        self.call("list", path)
        listed = self._disk.listed(path)
        if listed is None:
            self._file(path)
            listed = {path: True}
        if not detail:
            return list(listed)
        return [self._listed_entry(name, is_file) for name, is_file in listed.items()]

    def _listed_entry(self, path: str, is_file: bool) -> dict[str, Any]:
        """Also of what is not there any more."""
        is_there = path in self._disk.files or path in self._disk.directories
        gone = {"name": path, "size": 0, "type": "file" if is_file else "directory"}
        return self._entry(path) if is_there else gone

    def info(self, path: str, **how: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        self.call("look", path)
        return self._entry(path)

    def _entry(self, path: str) -> dict[str, Any]:
        if path in self._disk.directories:
            return {"name": path, "size": 0, "type": "directory"}
        size = len(self._file(path).seen_by(self._process))
        return {"name": path, "size": size, "type": "file"}

    def exists(self, path: str, **how: Any) -> bool:
        """As a local disk has it: what cannot be looked at is not there."""
        try:
            self.info(path)
        except OSError:
            return False
        return True


class WrittenFile:
    """A file that is open for writing. What is written lies on the disk at once."""

    def __init__(self, filesystem: SimFileSystem, path: str, file: DiskFile) -> None:
        self._filesystem = filesystem
        self._path = path
        self._file = file
        self._is_closed = False

    def write(self, data: bytes | memoryview) -> int:
        """Raises OSError."""
        self._filesystem.write(self._path, self._file, bytes(data))
        return len(data)

    def close(self) -> None:
        """Raises OSError. Nothing happens the second time."""
        if not self._is_closed:
            self._is_closed = True
            self._filesystem.call("close", self._path)

    def __enter__(self) -> WrittenFile:
        return self

    def __exit__(self, *why: object) -> None:
        self.close()


def _below(above: str, directory: str, paths: Iterable[str]) -> list[str]:
    return sorted(
        path
        for path in paths
        if path.startswith(above) and path != directory and "/" not in path[len(above) :]
    )
