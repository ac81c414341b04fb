"""Recordings: every line of the output is in the picture, at its time, whatever it holds; a command
that failed is no picture."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

RECORD = Path(__file__).parents[2] / "examples" / "record.py"
program = runpy.run_path(str(RECORD))
Line, drawn, recorded, shortened, from_here = (
    program[name] for name in ("Line", "drawn", "recorded", "shortened", "from_here")
)
SVG = "{http://www.w3.org/2000/svg}"
times = st.lists(st.floats(0, 1e5, allow_nan=False), max_size=60).map(sorted)


@given(times, st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=40))
def test_all_lines_are_in_the_picture_in_order(at_s: list[float], text: str) -> None:
    lines = [Line(at, f"{number} {text}") for number, at in enumerate(at_s)]
    root = ElementTree.fromstring(drawn('a "title" & <more>', lines, 120, 10))
    shown = [each.text for each in root.iter(f"{SVG}text")][1:]
    assert shown == [line.text for line in lines]
    style = root.find(f"{SVG}style")
    assert style is not None and style.text is not None
    assert all(f".l{number}{{animation:" in style.text for number in range(len(lines)))


@given(times, st.floats(0.01, 10))
def test_pauses_are_cut_and_nothing_else(at_s: list[float], most_s: float) -> None:
    found = [line.at_s for line in shortened([Line(at, "") for at in at_s], most_s)]
    for before, after, now, then in zip([0.0, *at_s], at_s, [0.0, *found], found, strict=False):
        assert abs((then - now) - min(after - before, most_s)) < 1e-6


def test_a_terminal_is_what_the_command_sees() -> None:
    said = "import sys; print(sys.stdout.isatty(), '\\x1b[31mred\\x1b[0m'); print('end', end='')"
    lines, code = recorded([sys.executable, "-c", said], 80)
    assert [line.text for line in lines] == ["True red", "end"] and code == 0
    assert 0 < lines[0].at_s <= lines[1].at_s


def test_a_command_that_failed_leaves_the_last_picture(tmp_path: Path) -> None:
    out = tmp_path / "demo.svg"
    out.write_text("the last one")
    done = subprocess.run(
        [sys.executable, str(RECORD), "--out", str(out), "sh", "-c", "echo no luck; exit 3"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3 and "no luck" in done.stderr
    assert out.read_text() == "the last one"


def test_paths_are_those_of_the_repository() -> None:
    root = Path("/home/somebody/keepstep")
    line = f"1 rank of `{root}/.venv/bin/python -u {root}/examples/gpt.py --out /tmp/x`"
    assert from_here(line, root) == "1 rank of `python -u examples/gpt.py --out /tmp/x`"


def test_the_picture_of_the_readme_is_of_the_demo_and_of_no_machine() -> None:
    picture = RECORD.parent.parent / "docs" / "pictures" / "demo.svg"
    root = ElementTree.parse(picture).getroot()
    shown = [each.text or "" for each in root.iter(f"{SVG}text")]
    assert "make demo" in shown[0] or "examples/demo.py" in shown[0]
    assert any("SIGKILL" in line for line in shown) and "equal, bit for bit" in shown[-1]
    assert picture.stat().st_size < 40_000
    assert not [line for line in shown if "/home/" in line or "/.venv/" in line]
