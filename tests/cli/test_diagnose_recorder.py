"""`keepstep diagnose` beside dumps of torch's flight recorder."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

from keepstep.cli.log_reading import read_verdict
from tests.core.postmortem.recorded import a_call

REDUCE = "nccl:all_reduce"


def dump(*calls: dict[str, Any]) -> bytes:
    return pickle.dumps({"version": "2.10", "pg_config": {}, "entries": list(calls)}, 2)


def laid_out(at: Path, **files: bytes) -> Path:
    for name, data in files.items():
        (at / name).write_bytes(data)
    return at


def test_dumps_alone_name_the_rank_that_hangs(tmp_path: Path) -> None:
    waits = dump(a_call(0, 5, REDUCE, is_over=True), a_call(0, 6, REDUCE))
    behind = dump(a_call(0, 5, REDUCE, is_over=True))
    laid_out(tmp_path, nccl_trace_rank_0=waits, nccl_trace_rank_1=behind, nccl_trace_rank_2=waits)
    verdict, _, unread, _ = read_verdict(tmp_path)
    assert verdict is not None and not unread
    assert (verdict.cause.name, verdict.rank) == ("hang", 1)
    assert "did not enter all_reduce 6" in verdict.why


def test_what_jsons_hold_is_the_same(tmp_path: Path) -> None:
    documents = [[a_call(0, 6, REDUCE)], [a_call(0, 6, "nccl:broadcast")], [a_call(0, 6, REDUCE)]]
    for rank, calls in enumerate(documents):
        (tmp_path / f"trace_{rank}.json").write_text(
            json.dumps({"pg_config": {}, "entries": calls})
        )
    verdict, *_ = read_verdict(tmp_path)
    assert verdict is not None
    assert (verdict.cause.name, verdict.rank) == ("collective-mismatch", 1)


def test_a_root_in_a_log_beats_them(tmp_path: Path) -> None:
    oom = b"[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
    waits, behind = dump(a_call(0, 6, REDUCE)), dump(a_call(0, 5, REDUCE, is_over=True))
    laid_out(tmp_path, trace_rank_0=waits, trace_rank_1=behind, trace_rank_2=waits)
    laid_out(tmp_path, **{"rank1.log": oom})
    verdict, *_ = read_verdict(tmp_path)
    assert verdict is not None
    assert (verdict.cause.name, verdict.rank) == ("gpu-memory", 1)
    assert verdict.missed is not None and verdict.missed.missing == (1,)


class Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, ("made-by-a-dump",)


def test_a_hostile_dump_calls_nothing_and_is_told(tmp_path: Path) -> None:
    hostile = pickle.dumps({"pg_config": {}, "entries": [Hostile()]}, 2)
    torn = dump(a_call(0, 6, REDUCE))[:-20]
    laid_out(tmp_path, trace_rank_0=hostile, trace_rank_1=torn, trace_x=dump(a_call(0, 6, REDUCE)))
    _, _, unread, _ = read_verdict(tmp_path)
    assert set(unread) == {"trace_rank_0", "trace_rank_1", "trace_x"}
    assert "plain values" in unread["trace_rank_0"]
    assert "rank at the end of its name" in unread["trace_x"]
    assert not Path("made-by-a-dump").exists()


def test_a_log_of_json_lines_is_a_log(tmp_path: Path) -> None:
    said = b'{"entries": 1}\n[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB\n'
    verdict, *_ = read_verdict(laid_out(tmp_path, **{"rank1.log": said}))
    assert verdict is not None and verdict.cause.name == "gpu-memory"
