"""Metadata: a checkpoint's `.metadata`, a pickle, read as what DCP writes there and nothing else.

Comes in: the file. Goes out: DCP's Metadata, of torch's own classes for it and plain values.
"""

from __future__ import annotations

import dataclasses
from enum import Enum
from functools import cache
from typing import Any

from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from keepstep.edge.torch.pickles.checked import Vocabulary, load_pickles
from keepstep.edge.torch.pickles.known import Known, Name, set_attributes
from keepstep.errors import UntrustedError


class CheckpointReader(FileSystemReader):
    """DCP's own reader. `vocabulary`: what the checkpoint's values may consist of."""

    def __init__(self, path: str, vocabulary: Vocabulary) -> None:
        super().__init__(path)
        self.vocabulary = vocabulary

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self.fs.concat_path(self.path, ".metadata")  # ours has one for all ranks
        with self.fs.create_stream(path, "rb") as file:
            raw = file.read()
        (found,) = load_pickles(raw, (1,), MetadataTypes())
        if not isinstance(found, Metadata):
            raise UntrustedError(
                f"{path}: expected DCP's metadata, found a {type(found).__name__}; nothing is "
                "loaded"
            )
        meta = found.storage_meta = getattr(found, "storage_meta", None) or StorageMeta()
        meta.load_id = self.load_id
        return found


class MetadataTypes(Known):
    """Plain types, and those of DCP's metadata: records, and numbers with a name."""

    def find_other(self, module: str, name: str) -> Any:
        kinds = _kinds()
        return kinds[module, name] if (module, name) in kinds else super().find_other(module, name)

    def call_other(self, function: Any, args: tuple[Any, ...]) -> Any:
        if function in _kinds().values() and issubclass(function, Enum):
            return function(*args)
        return super().call_other(function, args)

    def make(self, kind: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if kind in _kinds().values() and not args and not options:
            return kind.__new__(kind)
        return super().make(kind, args, options)

    def build(self, made: Any, state: Any) -> None:
        if type(made) not in _kinds().values() or isinstance(made, Enum):
            super().build(made, state)
        elif hasattr(made, "__setstate__"):
            made.__setstate__(state)
        else:
            set_attributes(made, state)


@cache
def _kinds() -> dict[Name, type]:
    found = (*vars(metadata).values(), filesystem._StorageInfo)
    return {
        (kind.__module__, kind.__qualname__): kind
        for kind in found
        if isinstance(kind, type)
        and kind.__module__.startswith("torch.distributed.checkpoint.")
        and (dataclasses.is_dataclass(kind) or issubclass(kind, Enum))
    }
