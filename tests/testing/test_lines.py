"""Lines: each whole line once, also when the next one is only half there."""

from __future__ import annotations

from pathlib import Path

from keepstep.testing.lines import Lines, append


def test_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    lines = Lines(path)
    assert lines.new() == []
    append(path, {"n": 1})
    append(path, {"n": 2})
    assert lines.new() == [{"n": 1}, {"n": 2}] and lines.new() == []
    with open(path, "a") as file:
        file.write('{"n": ')
        file.flush()
        assert lines.new() == []
        file.write("3}\n")
    assert lines.new() == [{"n": 3}] == Lines(path).new()[2:]
