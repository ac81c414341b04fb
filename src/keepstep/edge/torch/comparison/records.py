"""Records: a checkpoint's tensors, read from DCP's files as they lie there.

A tensor's part is an archive that `torch.save` wrote: a directory at its end, a short pickle that
says how the memory is shaped, and the memory. The pickle goes through the checked machine with a
vocabulary that can say nothing else; the memory is read in pieces. A part whose memory is not row
after row is read whole.

Comes in: a store and a checkpoint's manifest. Goes out: a `SavedState`. Every byte lies in a block
whose checksum was right, and its MAC where somebody signs.
"""

from __future__ import annotations

import io
import math
import posixpath
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from keepstep.edge.store.checked_file import SeekableFile
from keepstep.edge.store.manifest import Manifest
from keepstep.edge.store.store import Store
from keepstep.edge.torch.comparison.saved import SavedPart, SavedState, SavedTensor, value
from keepstep.edge.torch.dcp.files import CheckpointFiles
from keepstep.edge.torch.dcp.metadata import CheckpointReader
from keepstep.edge.torch.dcp.tree import RANKS
from keepstep.edge.torch.pickles.checked import READING_ERRORS, CheckedUnpickler
from keepstep.edge.torch.pickles.known import Known
from keepstep.errors import DamageError, KeepstepError, UntrustedError
from keepstep.model.comparison import TensorBox, TensorKind

_LOCAL_HEADER = struct.Struct("<26xHH")  # of an archive's record: lengths of its name and extras
MOST_SHAPE_BYTES = 1 << 16  # of the pickle that says how a tensor's memory is shaped


def checkpoint_state(store: Store, manifest: Manifest, rank: int | None = None) -> SavedState:
    """`rank`: whose own values stand under their plain names, and no other rank's; None: all
    stand as they are stored. Raises DamageError, StoreError, UntrustedError."""
    url = store.url(manifest.name)
    reader = CheckpointReader(url, Known())
    reader.fs = CheckpointFiles(lambda name: store.open(manifest, name))  # type: ignore[assignment]
    metadata = reader.read_metadata()
    files = {name: store.open(manifest, name) for name in manifest.files}
    tensors = {}
    try:
        for stored in sorted(metadata.state_dict_metadata):
            name = _name_for(rank, stored)
            # what is stored for all comes before what one rank has of its own, which counts
            if name is not None:
                tensors[name] = _saved(files, metadata, stored, url)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamageError(f"{url}: its metadata is not what DCP writes: {error!r}") from error
    return SavedState(f"step {manifest.step} in {url}", manifest.step, tensors)


def _name_for(rank: int | None, stored: str) -> str | None:
    if rank is None or not stored.startswith(f"{RANKS}."):
        return stored
    _, whose, name = stored.split(".", 2)
    return name if whose == str(rank) else None


def _saved(
    files: Mapping[str, io.RawIOBase], metadata: Metadata, name: str, url: str
) -> SavedTensor:
    about = metadata.state_dict_metadata[name]
    if isinstance(about, BytesStorageMetadata):
        info = metadata.storage_data[MetadataIndex(name)]
        _check_place(info)
        return value(info.length, partial(_read, files[info.relative_path], info.offset))
    assert isinstance(about, TensorStorageMetadata)
    dtype, parts = about.properties.dtype, []
    for chunk in about.chunks:
        info = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
        box = TensorBox(tuple(chunk.offsets), tuple(chunk.sizes))
        _check_box(box, tuple(about.size), dtype, info)
        record = Record(files[info.relative_path], info, dtype, box, f"{url}: {name}")
        parts.append(SavedPart(box, record.read_into))
    kind = TensorKind(str(dtype).removeprefix("torch."), tuple(about.size))
    return SavedTensor(kind, tuple(parts))


def _check_box(
    box: TensorBox, whole: tuple[int, ...], dtype: torch.dtype, info: _StorageInfo
) -> None:
    """Whoever compares takes memory for a row of it. Raises ValueError, TypeError."""
    _check_place(info)
    reaches = zip(box.offsets, box.shape, whole, strict=True)
    if not all(0 <= at <= at + length <= size for at, length, size in reaches):
        raise ValueError(f"a part at {box.offsets} of {box.shape} in a tensor of {whole}")
    if box.count * dtype.itemsize > info.length:
        raise ValueError(f"{box.count} values of {dtype} in {info.length} bytes")


def _check_place(info: _StorageInfo) -> None:
    """Raises ValueError, TypeError."""
    if not 0 <= info.offset <= info.offset + info.length:
        raise ValueError(f"{info.length} bytes at {info.offset}")


def _read(file: io.RawIOBase, at: int, offset: int, target: memoryview) -> None:
    file.seek(at + offset)
    done = file.readinto(target)
    if done != len(target):
        raise DamageError(f"expected {len(target)} bytes at {at + offset}, found {done}")


class Record:
    """One tensor's archive within a file. It is looked into when its bytes are first asked for."""

    def __init__(
        self, file: io.RawIOBase, info: _StorageInfo, dtype: torch.dtype, box: TensorBox, where: str
    ) -> None:
        self._file, self._info, self._dtype, self._box = file, info, dtype, box
        self._where = where
        self._memory_at: int | None = None
        self._whole: torch.Tensor | None = None

    def read_into(self, offset: int, target: memoryview) -> None:
        if self._memory_at is None:
            self._memory_at = self._find()
        if self._whole is None:
            _read(self._file, self._memory_at, offset, target)
            return
        flat = self._whole.reshape(-1).view(torch.uint8)
        torch.frombuffer(target, dtype=torch.uint8).copy_(flat[offset : offset + len(target)])
        if offset + len(target) == flat.numel():
            self._memory_at = self._whole = None  # nothing more of it is asked for, or all again

    def _find(self) -> int:
        """Where in the file the tensor's first byte lies."""
        part = _Part(self._file, self._info.offset, self._info.length, self._where)
        try:
            with zipfile.ZipFile(part) as archive:
                begin = self._begin(archive, part)
                if begin is not None:
                    return self._info.offset + begin
            part.seek(0)
            whole = torch.load(io.BufferedReader(part), map_location="cpu", weights_only=True)
        except KeepstepError:
            raise
        except READING_ERRORS as error:
            raise DamageError(f"{self._where}: no tensor of torch.save's: {error!r}") from error
        if (whole.dtype, tuple(whole.shape)) != (self._dtype, self._box.shape):
            raise DamageError(f"{self._where}: expected {self._box}, found {whole.shape}")
        self._whole = whole.resolve_conj().resolve_neg().contiguous()
        return 0

    def _begin(self, archive: zipfile.ZipFile, part: _Part) -> int | None:
        """Where in the record the tensor's memory begins; None when it is not row after row, or
        has more than the tensor."""
        records = {posixpath.basename(record.filename): record for record in archive.infolist()}
        if any(record.compress_type != zipfile.ZIP_STORED for record in records.values()):
            raise UntrustedError(f"{self._where}: expected nothing compressed")
        if records["data.pkl"].file_size > MOST_SHAPE_BYTES:
            raise UntrustedError(f"{self._where}: expected the pickle of a tensor, found more")
        shaped = _shape_of(archive.read(records["data.pkl"]))
        if shaped is None or shaped[1:] != (self._box.shape, _rows(self._box.shape)):
            return None
        memory, nbytes = records[shaped[0]], self._box.count * self._dtype.itemsize
        part.seek(memory.header_offset)
        name, extras = _LOCAL_HEADER.unpack(part.read(_LOCAL_HEADER.size) or b"")
        begin = memory.header_offset + _LOCAL_HEADER.size + name + extras
        if begin + nbytes > self._info.length:
            raise DamageError(f"{self._where}: expected {nbytes} bytes in its record")
        return int(begin) if memory.file_size == nbytes else None


class _Part(SeekableFile):
    """A part of a file as a file."""

    def __init__(self, file: io.RawIOBase, begin: int, nbytes: int, where: str) -> None:
        super().__init__(nbytes, where)
        self._file, self._begin = file, begin

    def readinto(self, buffer: Any, /) -> int:
        with memoryview(buffer).cast("B") as view:
            count = max(0, min(len(view), self._nbytes - self._at))
            _read(self._file, self._begin, self._at, view[:count])
            self._at += count
            return count


def _rows(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


class _Shapes:
    """What the pickle of a plain tensor says, and nothing else: no object is made of it."""

    def find(self, module: str, name: str) -> Any:
        return module, name

    def call(self, function: Any, args: tuple[Any, ...]) -> Any:
        if function == ("collections", "OrderedDict") and not args:
            return OrderedDict()
        if function[0] == "torch._utils" and function[1].startswith("_rebuild_tensor_v"):
            return args
        return None

    def make(self, kind: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return None

    def build(self, made: Any, state: Any) -> None:
        """Nothing is."""

    def holds(self, made: Any) -> bool:
        return False


class _ShapeReader(CheckedUnpickler):
    def persistent_load(self, pid: Any) -> Any:
        """A tensor's memory, by its name: ("storage", type, name, device, count)."""
        return pid


def _shape_of(pickled: bytes) -> tuple[str, tuple[int, ...], tuple[int, ...]] | None:
    """The name of a tensor's memory, its shape and its strides; None: it is something else, or a
    view that changes signs."""
    said = _ShapeReader(io.BytesIO(pickled), _Shapes()).load()
    if not isinstance(said, tuple) or len(said) < 6 or any(isinstance(e, dict) and e for e in said):
        return None
    memory, _, shape, strides = said[:4]
    if not isinstance(memory, tuple) or len(memory) != 5:
        return None
    return str(memory[2]), tuple(shape), tuple(strides)
