"""Live dumps: those of this rank, of this hang, and of plain values; else nothing."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.edge.probes import recorder
from keepstep.edge.probes.recorder import live_dumps
from keepstep.edge.torch.pickles.plain import load_plain
from keepstep.model.units import S_NS

DUMP = {"pg_config": {}, "entries": [{"collective_seq_id": 3}]}
Start = Callable[..., int]


@pytest.fixture
def start() -> Iterator[Start]:
    """A process with that environment, which waits."""
    children = []

    def started(**environ: str) -> int:
        wait = "import sys; print(); sys.stdout.flush(); sys.stdin.read()"
        command = [sys.executable, "-S", "-c", wait]
        pipe = subprocess.PIPE
        child = subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe)
        children.append(child)
        assert child.stdout is not None
        child.stdout.readline()
        return child.pid

    yield started
    for child in children:
        child.communicate()


@pytest.mark.parametrize("name", ["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"])
def test_each_rank_has_its_own_where_its_environment_says(
    tmp_path: Path, start: Start, name: str
) -> None:
    pids = {rank: start(**{name: f"{tmp_path}/trace_"}) for rank in (4, 5, 6)}
    (tmp_path / "trace_4").write_bytes(pickle.dumps(DUMP, 2))
    (tmp_path / "trace_5").write_text(json.dumps(DUMP))
    (tmp_path / "trace_7").write_text(json.dumps(DUMP))
    assert live_dumps(pids, 60 * S_NS, load_plain) == {4: DUMP, 5: DUMP}


def test_where_nothing_says_so_nothing_is_looked_for(tmp_path: Path, start: Start) -> None:
    home = tmp_path / ".cache" / "torch"
    home.mkdir(parents=True)
    (home / "comm_lib_trace_rank_0").write_text(json.dumps(DUMP))
    assert live_dumps({0: start(HOME=str(tmp_path))}, 60 * S_NS, load_plain) == {}
    assert live_dumps({0: 2**22 + 1}, 60 * S_NS, load_plain) == {}, "there is no such process"


class Wicked:
    """What a pickle may do when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_old_torn_wicked_and_large_ones_are_as_none(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = start(TORCH_FR_DUMP_TEMP_FILE=f"{tmp_path}/trace_")
    path = tmp_path / "trace_0"
    whole = pickle.dumps(DUMP, 2)

    def found() -> dict[int, object]:
        return live_dumps({0: pid}, 60 * S_NS, load_plain)

    path.write_bytes(whole)
    assert found() == {0: DUMP}
    os.utime(path, (1, 1))
    assert found() == {}, "of an earlier hang"
    path.write_bytes(whole[:-9])
    assert found() == {}
    path.write_bytes(pickle.dumps({"entries": [Wicked(tmp_path / "made")]}, 2))
    assert found() == {} and not (tmp_path / "made").exists()
    path.unlink()
    os.mkfifo(path)
    assert found() == {}, "nobody writes to it"
    path.unlink()
    path.write_bytes(whole)
    monkeypatch.setattr(recorder, "MOST_BYTES", len(whole) - 1)
    assert found() == {}
