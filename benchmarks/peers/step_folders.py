"""Step folders: a folder for each save of a contender that writes many files. Two are kept."""

from __future__ import annotations

import shutil
from pathlib import Path


class StepFolders:
    """In `room`. One counts once `marker`, which is written last, is in it."""

    def __init__(self, room: Path, marker: str) -> None:
        self._room, self._marker = room, marker

    def make_room(self, step: int) -> Path:
        """Where this step's save goes: nothing is there. All older ones but the newest are gone."""
        for old in self._all()[:-1]:
            shutil.rmtree(old)
        folder = self._room / f"step-{step:09}"
        shutil.rmtree(folder, ignore_errors=True)  # left half by one that was killed
        return folder

    def newest(self) -> Path | None:
        """The newest that counts."""
        whole = [folder for folder in self._all() if (folder / self._marker).exists()]
        return whole[-1] if whole else None

    def _all(self) -> list[Path]:
        return sorted(self._room.glob("step-*"))
