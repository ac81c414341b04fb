"""A machine of its own for every test: memory and journals below tmp_path, jobs made of real pages
and slots."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from keepstep.cli.main import app
from keepstep.config import Settings, resolve
from keepstep.edge.os.job_directory import claim_job_dir
from keepstep.edge.os.journal import FileJournal
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.edge.shm.status_page import StatusPage
from keepstep.model.layout import TensorSpec, lay_out
from keepstep.model.snapshot import Phase, SlotState, SlotView, Stamp
from keepstep.runtime.job_name import job_hash

FLOATS = 3 << 20  # 12 MiB: three blocks


class Machine:
    """What the commands look at. `run` is `keepstep ...`; `close` ends all ranks that live here."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pages: list[StatusPage] = []

    def run(self, *words: str, answer: str | None = None) -> Any:
        return CliRunner().invoke(app, words, input=answer)

    def json(self, *words: str, code: int = 0) -> Any:
        """What `--json` prints: one document and nothing else."""
        result = self.run(*words, "--json")
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)

    def settings_of(self, job: str) -> Settings:
        return replace(self.settings, job=job)

    def journal(self, job: str, who: str = "keeper") -> FileJournal:
        return FileJournal(self.settings_of(job).journal_path, who)

    def slot(
        self, job: str, rank: int, index: int, step: int, floats: int = 1024, shelf: str = ""
    ) -> Path:
        """A rank's own, or (`shelf` being held or parity) what is kept for other nodes, whose
        manifest is no layout when it is a parity."""
        claim_job_dir(self.settings_of(job).job_dir)
        path = slot_path(self.settings_of(job).job_dir / shelf, rank, index)
        path.parent.mkdir(parents=True, exist_ok=True)
        layout = lay_out([TensorSpec("model.weight", "float32", (floats,), 4 * floats)])
        slot = Slot.create(MEMORY, path, 4 * floats, 4096)
        slot.begin(job_hash(job, os.getuid()), rank, 1, 1, Stamp(step, 1))
        slot.payload[: 4 * floats] = bytes([step % 256]) * (4 * floats)
        manifest = {"row": [0, 1], "tolerates": 1} if shelf == "parity" else layout.to_json()
        slot.seal(
            slot.write_table(4 * floats, json.dumps(manifest).encode()),
            layout.hash(),
            0.5,
            wall_ns=1,
        )
        slot.close()
        return path

    def rank(
        self, job: str, rank: int, steps: list[int], world_size: int = 1, **measured: Any
    ) -> StatusPage:
        """A living rank that holds these steps."""
        for index, step in enumerate(steps):
            self.slot(job, rank, index, step)
        page = StatusPage.own(MEMORY, self.settings_of(job).job_dir, rank)
        assert page is not None
        slots = tuple(SlotView(SlotState.SEALED, Stamp(step, 1)) for step in steps)
        page.publish(
            rank=rank,
            world_size=world_size,
            pid=100 + rank,
            epoch=1,
            phase=Phase.FORWARD,
            completed_step=steps[-1],
            slots=slots,
            **measured,
        )
        self.pages.append(page)
        return page

    def close(self) -> None:
        for page in self.pages:
            page.close()
        self.pages.clear()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    arena_dir = tmp_path / "arena"
    arena_dir.mkdir()
    monkeypatch.setenv("KEEPSTEP_ARENA_DIR", str(arena_dir))
    monkeypatch.setenv("COLUMNS", "200")  # so that no sentence is broken where a test looks
    made = Machine(resolve(None, os.environ, "demo"))
    yield made
    made.close()
