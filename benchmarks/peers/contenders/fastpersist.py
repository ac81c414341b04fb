"""DeepSpeed's FastPersist: torch.save through its file writer with two buffers; a rename once the
file is whole. The writer compiles an extension when it is first used."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from deepspeed.io import FastFileWriter, FastFileWriterConfig
from deepspeed.ops.op_builder import AsyncIOBuilder

from benchmarks.peers.contenders import torch_save
from benchmarks.peers.workload import Workload

BUFFER_BYTES = 64 << 20


class Contender(torch_save.Contender):
    """Its files are torch.save's, and are read as those are."""

    def __init__(self, workload: Workload, room: Path) -> None:
        super().__init__(workload, room)
        builder = AsyncIOBuilder()
        if not builder.is_compatible(verbose=False):
            raise RuntimeError("its async_io cannot be compiled here: are libaio's headers there?")
        self._handle = builder.load(verbose=False).aio_handle(1 << 20, 8, False, True, 1)
        self._buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)

    def save(self, step: int) -> None:
        writer = FastFileWriter(
            file_path=str(self._coming),
            config=FastFileWriterConfig(dnvme_handle=self._handle, pinned_tensor=self._buffer),
        )
        torch.save(self._work.state(), writer, _use_new_zipfile_serialization=False)
        writer.close()
        os.replace(self._coming, self._file)
