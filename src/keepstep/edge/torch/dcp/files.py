"""CheckpointFiles: what PyTorch's reader and writer see of a checkpoint in the store.

Comes in: DCP's requests for streams. Goes out: streams of a draft, or verified ones, by the file's
name alone. Decides nothing.
"""

from __future__ import annotations

import io
import os
import posixpath
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.filesystem import FileSystemBase

from keepstep.edge.store.draft import Draft


class CheckpointFiles(FileSystemBase):
    """One checkpoint. `opened` gives a stream for a name; `draft` is there when it is being
    written."""

    def __init__(self, opened: Callable[[str], io.RawIOBase], draft: Draft | None = None) -> None:
        self._opened, self._draft = opened, draft

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.RawIOBase]:
        assert mode == ("rb" if self._draft is None else "wb"), mode
        with self._opened(posixpath.basename(path)) as stream:
            yield stream

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return posixpath.join(path, suffix)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        assert self._draft is not None
        self._draft.rename(posixpath.basename(path), posixpath.basename(new_path))

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return self._draft is not None and posixpath.basename(path) in self._draft.files

    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        return path

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """The draft has made it."""

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        raise AssertionError(f"a draft begins empty and writes {path} once")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True
