"""`keepstep diagnose` of more than can be read: it ends, says what it left out, and reads the parts
that tell most."""

from __future__ import annotations

import gzip
import json
import os
import random
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from keepstep.cli import log_reading
from keepstep.cli.diagnose import _left_line
from keepstep.cli.log_reading import ReadLogs, read_verdict
from keepstep.cli.main import app

STEP = b"2026-03-14 10:00:00,123 INFO trainer: step 7 loss 2.0\n"
OOM = b"[rank%d]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
PEER = b"RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.1]:4711\n"


def read(at: Path, most_bytes: int = 1 << 20, within_s: float = 60) -> ReadLogs:
    return read_verdict(at, within_s, most_bytes)


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["diagnose", *map(str, words)])


def test_of_more_than_the_bound_the_ends_of_all_are_read(tmp_path: Path) -> None:
    """20 MB of 64 ranks, of which 1 MiB may be read: the cause stands in the last line of one."""
    for rank in range(64):
        end = OOM % rank if rank == 41 else PEER
        (tmp_path / f"rank{rank}.log").write_bytes(STEP * 6000 + end)
    found = read(tmp_path)
    assert found.verdict is not None
    assert (found.verdict.cause.name, found.verdict.rank) == ("gpu-memory", 41)
    assert found.verdict.cascades == 63
    assert (found.left.parts, found.left.files, found.left.is_late) == (64, 0, False)
    assert 0 < found.left.read_bytes <= 1 << 20
    assert found.left.total_bytes == sum(f.stat().st_size for f in tmp_path.iterdir())


def test_reading_it_twice_gives_the_same(tmp_path: Path) -> None:
    for rank in range(8):
        (tmp_path / f"rank{rank}.log").write_bytes((STEP * 500 + PEER + OOM % rank) * 20)
    first, again = read(tmp_path), read(tmp_path)
    assert first.verdict == again.verdict and first.left == again.left


@pytest.mark.parametrize("most_bytes", [1 << 20, 100 << 20])
def test_a_line_between_two_parts_is_seen_once(tmp_path: Path, most_bytes: int) -> None:
    """Every line is an exit of its own: none is lost where parts meet, and none counts twice."""
    lines = [
        b"W 1 api.py:1] failed (exitcode: -9) local_rank: 0 (pid: %d) of binary: x\n" % i
        for i in range(190)
    ]
    for rank in range(2):
        (tmp_path / f"rank{rank}.log").write_bytes(STEP * 11_000 + b"".join(lines))
    found = read(tmp_path, most_bytes)
    assert found.verdict is not None
    assert found.verdict.cause.name == "killed"
    assert bool(found.left) == (most_bytes == 1 << 20)


def test_the_early_sighting_stands_first_though_the_end_is_read_before(tmp_path: Path) -> None:
    text = STEP * 9000 + PEER + STEP * 9000 + PEER
    (tmp_path / "rank0.log").write_bytes(text)
    found = read(tmp_path, most_bytes=900_000)
    assert found.verdict is not None and found.left
    (seen,) = found.verdict.evidence
    assert seen.offset == len(STEP) * 9000


def test_a_file_of_a_hundred_gigabytes_costs_what_its_ends_do(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    log.write_bytes(STEP * 100)
    os.truncate(log, 100 << 30)
    with open(log, "ab") as end:
        end.write(b"\n" + OOM % 0)
    began_s = time.process_time()
    found = read(tmp_path, most_bytes=16 << 20)
    assert time.process_time() - began_s < 20
    assert found.verdict is not None
    assert (found.verdict.cause.name, found.verdict.rank) == ("gpu-memory", 0)
    assert found.left.parts == 1


def test_a_line_that_is_too_far_to_be_counted_is_told_by_its_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepstep.edge.os.log_files.MAX_COUNTED_BYTES", 1000)
    (tmp_path / "rank0.log").write_bytes(STEP * 100 + OOM % 0)
    assert f"rank0.log:byte {100 * len(STEP)}" in run(tmp_path).stdout
    assert json.loads(run(tmp_path, "--json").stdout)["first"]["line"] is None


def test_a_bomb_is_unpacked_as_far_as_its_share(tmp_path: Path) -> None:
    bomb = gzip.compress(b"\x00" * (64 << 20), 9)
    for i in range(3):
        (tmp_path / f"bomb{i}.gz").write_bytes(bomb)
    (tmp_path / "rank1.log").write_bytes(OOM % 1)
    found = read(tmp_path, most_bytes=8 << 20)
    assert found.verdict is not None and found.verdict.cause.name == "gpu-memory"
    assert found.left.parts == 3
    assert found.left.read_bytes <= 8 << 20


def test_how_much_more_a_packed_log_holds_nobody_claims_to_know(tmp_path: Path) -> None:
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b"\x00" * (64 << 20), 9))
    said = _left_line(read(tmp_path, most_bytes=8 << 20).left)
    assert said.startswith("what comes behind the first 8.0 MiB of packed files; of 1 file only ")


def test_a_packed_log_that_is_torn_is_told_and_what_stands_before_is_read(tmp_path: Path) -> None:
    whole = OOM % 1 + random.Random(1).randbytes(200_000)
    (tmp_path / "rank1.log.gz").write_bytes(gzip.compress(whole)[:-50_000])
    found = json.loads(run(tmp_path, "--json").stdout)
    assert found["class"] == "gpu-memory" and found["rank"] == 1
    assert found["unread"]["rank1.log.gz"].startswith("packed, and torn: ")
    (tmp_path / "rank1.log.gz").write_bytes(b"\x1f\x8b\x08garbage")
    result = run(tmp_path)
    assert result.exit_code == 2 and "packed, and torn: " in result.output


def test_a_packed_log_is_read_to_its_end_where_it_fits(tmp_path: Path) -> None:
    (tmp_path / "rank1.log.gz").write_bytes(gzip.compress(STEP * 20_000 + OOM % 1))
    found = read(tmp_path, most_bytes=8 << 20)
    assert found.verdict is not None and found.verdict.rank == 1
    assert not found.left


def test_what_the_time_left_out_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that jumps an hour at the third file."""
    for rank in range(5):
        (tmp_path / f"rank{rank}.log").write_bytes(STEP + PEER)
    (tmp_path / "rank0.log").write_bytes(OOM % 0)
    reads: list[str] = []
    take = log_reading._take_dump
    monkeypatch.setattr(
        log_reading, "_take_dump", lambda s, f, name: (reads.append(name), take(s, f, name))[1]
    )
    monkeypatch.setattr(log_reading.time, "monotonic", lambda: 3600.0 if len(reads) >= 3 else 0.0)
    result = run(tmp_path)
    assert result.exit_code == 0 and "gpu-memory" in result.stdout
    assert "of 2 files nothing" in result.stdout and "the time was over" in result.stdout
    assert "--within-s" in result.stdout


def test_what_is_left_out_is_in_the_document(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_bytes(OOM % 0)
    assert json.loads(run(tmp_path, "--json").stdout)["left_out"] is None


def test_one_and_many(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_bytes(STEP + OOM % 0)
    (tmp_path / "rank1.log").write_bytes(STEP + PEER)
    said = run(tmp_path).stdout
    assert "1 cascade, 0 lines of the teardown, 0 errors survived" in said
    (tmp_path / "rank2.log").write_bytes(STEP + PEER + b"leaked semaphore\n")
    said = run(tmp_path).stdout
    assert "2 cascades, 1 line of the teardown" in said


def test_what_is_no_log_is_named_in_one_line_a_reason(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_bytes(STEP + OOM % 0)
    for i in range(7):
        os.mkfifo(tmp_path / f"pipe{i}")
    said = run(tmp_path).stdout
    assert said.count("a pipe") == 1 and "and 2 more: a pipe" in said


def test_a_name_that_is_no_text_ends_nothing(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/rank1\xff.log", "wb") as file:
        file.write(OOM % 1)
    assert run(tmp_path).exit_code == 0
    assert run(tmp_path, "--json").exit_code == 0


def test_one_line_of_many_megabytes(tmp_path: Path) -> None:
    (tmp_path / "rank1.log").write_bytes(b"x" * (60 << 20) + b"\n" + OOM % 1)
    found = read(tmp_path, most_bytes=100 << 20)
    assert found.verdict is not None and found.verdict.rank == 1
