"""Log files are searched whatever is in them, in bounded memory and work."""

from __future__ import annotations

import gzip
import os
import random
import sys
from pathlib import Path

import pytest

from keepstep.edge.os import log_files
from keepstep.edge.os.log_files import (
    MAX_HITS,
    MAX_LINE_BYTES,
    LogNeedles,
    TornLogError,
    head_of,
    line_number,
    search,
    size_of,
)
from keepstep.edge.os.log_folders import find_logs

WORDS = ["CUDA out of memory", "Xid (", "Signal 9"]


def texts(path: Path, words: list[str] = WORDS) -> list[str]:
    return [excerpt.text for excerpt in search(path, path.name, LogNeedles(words))]


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_lines_with_a_word_come_once_and_in_order(tmp_path: Path) -> None:
    data = b"a\nb Xid (1) CUDA out of memory\nc\nSignal 9\nd Signal 8\n"
    path = written(tmp_path / "a.log", data)
    found = list(search(path, "a.log", LogNeedles(WORDS)))
    assert [e.text for e in found] == ["b Xid (1) CUDA out of memory", "Signal 9"]
    assert [line_number(path, e.offset) for e in found] == [2, 4]
    assert found[1].before(100).endswith("memory\nc\n") and found[1].after(100) == "\nd Signal 8\n"


@pytest.mark.parametrize("has_numpy", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_chunks_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, has_numpy: bool
) -> None:
    """Against the dumb way: every line of the whole file. Some lines differ by digits alone, or
    nearly all do; some words have only parts in them."""
    if not has_numpy:
        monkeypatch.setitem(sys.modules, "numpy", None)
    draw = random.Random(seed)
    words = ["abc", "xy z", "q1", "a longer word", "exitcode  :", "in 8 parts of it", "Signal 9"]
    pieces = [*words, "ab", "c", "x", "y", " ", "1", "2", "\n", "\n", "q", "filler ", "a longer"]
    pieces += ["in 9 parts of it", "longer word", "exitcode :", "Signal ", "same 7\n"]
    pieces += ["same 3\n" * 9] * (seed % 3)
    text = "".join(draw.choice(pieces) for _ in range(2000))
    monkeypatch.setattr(log_files, "CHUNK_BYTES", draw.randrange(500, 3000))
    monkeypatch.setattr(log_files, "AHEAD_BYTES", 400)
    monkeypatch.setattr(log_files, "BEHIND_BYTES", 200)
    monkeypatch.setattr(log_files, "MAX_HITS", 10_000)
    path = written(tmp_path / "a.log", text.encode())
    dumb = [line for line in text.split("\n") if any(word in line for word in words)]
    found = list(search(path, "a.log", LogNeedles(words)))
    assert [excerpt.text for excerpt in found] == dumb
    for excerpt in found:
        begin, end = excerpt.offset, excerpt.offset + len(excerpt.text)
        assert text[begin:end] == excerpt.text
        assert excerpt.before(50) == text[max(0, begin - 50) : begin]
        assert excerpt.after(50) == text[end : end + 50]


def test_packed_torn_and_other_encodings(tmp_path: Path) -> None:
    data = b"x\n" * 9 + b"Xid (79)\n" + random.Random(1).randbytes(200_000)
    assert texts(written(tmp_path / "a.gz", gzip.compress(data)))[0] == "Xid (79)"
    torn = written(tmp_path / "b.gz", gzip.compress(data)[:-90_000])
    found = search(torn, "b.gz", LogNeedles(["Xid (79)"]))
    assert next(found).text == "Xid (79)"
    with pytest.raises(TornLogError, match="packed, and torn: Compressed file ended before"):
        next(found)
    none = written(tmp_path / "c.gz", b"\x1f\x8bnothing of the kind")
    with pytest.raises(TornLogError, match="packed, and torn: Unknown compression method"):
        texts(none)
    wide = "é\nCUDA out of memory é\n".encode("utf-16")
    assert texts(written(tmp_path / "d.log", wide)) == ["CUDA out of memory é"]
    latin = b"\xe9\xff Xid (1)\n"
    assert texts(written(tmp_path / "e.log", latin)) == ["\ufffd\ufffd Xid (1)"]


def test_progress_bars_and_lines_without_end(tmp_path: Path) -> None:
    bar = b"10%|#  |\r20%|## |\rXid (79)\nrest\n"
    assert texts(written(tmp_path / "a.log", bar)) == ["Xid (79)"]
    long = b"\x00" * 9_000_000 + b"Xid (79)" + b"y" * 9_000_000
    found = texts(written(tmp_path / "b.log", long))
    assert len(found) == 1
    assert "Xid (79)" in found[0] and len(found[0]) <= MAX_LINE_BYTES + 8


def test_of_a_flood_the_first_and_the_last_count(tmp_path: Path) -> None:
    """The work after the search is bounded, whatever a file says how often."""
    flood = b"".join(b"Xid (%d)\n" % i for i in range(100_000))
    found = texts(written(tmp_path / "a.log", flood))
    assert (found[0], found[-1]) == ("Xid (0)", "Xid (99999)")
    assert len(found) == 2 * MAX_HITS


def test_what_is_no_log_is_not_looked_for(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    log = written(tmp_path / "deep" / "a.log", b"")
    written(tmp_path / "model.safetensors", b"")
    (tmp_path / "away").symlink_to("/")
    (tmp_path / "link.log").symlink_to(log)
    assert find_logs(tmp_path).files == {"deep/a.log": log}


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert find_logs(tmp_path).files == {}
    with pytest.raises(OSError, match="regular file"):
        texts(tmp_path / "pipe")
    for read in (size_of, head_of, lambda pipe: line_number(pipe, 1)):
        with pytest.raises(OSError, match="regular file"):  # put there after it was found
            read(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError):
        texts(tmp_path / "nowhere")
