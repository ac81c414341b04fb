"""A page locker without a device. It looks at what is really mapped where pages are registered."""

from __future__ import annotations

from pathlib import Path


class FakeLocker:
    """See `PageLocker`. `refuses`: why nothing is registered; `refuses_from`: after so many ranges;
    `holds`: why nothing is unregistered. `calls`: what was called, with the address; `wrong`: what
    CUDA would have done wrong."""

    def __init__(self, refuses: str | None = None) -> None:
        self.refuses = refuses
        self.holds: str | None = None
        self.refuses_from: int | None = None
        self.calls: list[tuple[str, int]] = []
        self.wrong: list[str] = []
        self._files: dict[int, tuple[int, int | None]] = {}  # of each range: its end, its file

    @property
    def registered(self) -> set[int]:
        return set(self._files)

    def register(self, address: int, nbytes: int) -> str | None:
        self.calls.append(("register", address))
        if self.refuses is not None:
            return self.refuses
        if self.refuses_from is not None and len(self._files) >= self.refuses_from:
            return "too much"
        for other, (end, _) in self._files.items():
            if other < address + nbytes and address < end:
                self.wrong.append(f"{address:x} was registered already")
        self._files[address] = address + nbytes, file_at(address)
        if file_at(address) is None or file_at(address + nbytes - 1) is None:
            self.wrong.append(f"{address:x} is not mapped")
        return None

    def unregister(self, address: int) -> str | None:
        self.calls.append(("unregister", address))
        if self.holds is not None:
            return self.holds
        if address not in self._files:
            self.wrong.append(f"{address:x} was not registered")
            return "invalid"
        self.look()
        del self._files[address]
        return None

    def look(self) -> None:
        """Each registered range is still the map that it was."""
        for address, (_, file) in self._files.items():
            if file_at(address) != file:
                self.wrong.append(f"{address:x} was unmapped while it was registered")


def file_at(address: int) -> int | None:
    """The number of the file that is mapped there; None for none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, _, _, _, inode = line.split()[:5]
        begin, end = (int(word, 16) for word in where.split("-"))
        if begin <= address < end:
            return int(inode)
    return None
