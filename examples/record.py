"""A recording of a command, as one SVG that any browser plays: no script, no font of others.

    python examples/record.py --out docs/pictures/demo.svg make demo

Runs the command in a terminal of its own, notes when each line of its output came, and draws them
with these times. Pauses are cut to `--most-pause` seconds, and the picture says so; at the end the
last screen stays for a while, then it begins anew. Paths of this machine are shown as seen from the
repository. Ends with the command's exit code, and draws nothing when that is not 0.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b-\x1f\x7f]")
LINE_PX, CHAR_PX, MARGIN_PX = 18, 7.8, 14
LAST_SCREEN_S = 6.0
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Line:
    """What came at once, and when: seconds since the command began."""

    at_s: float
    text: str


def recorded(command: Sequence[str], columns: int) -> tuple[list[Line], int]:
    """Its lines, and its exit code."""
    ours, theirs = pty.openpty()
    environ = {**os.environ, "COLUMNS": str(columns), "TERM": "dumb", "NO_COLOR": "1"}
    began = time.monotonic()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environ
    ) as process:
        os.close(theirs)
        lines = [Line(time.monotonic() - began, text) for text in _lines(ours)]
    os.close(ours)
    return lines, process.returncode


def _lines(terminal: int) -> Iterator[str]:
    rest = b""
    while True:
        try:
            found = os.read(terminal, 65536)
        except OSError:  # nobody writes to it any more
            found = b""
        if not found:
            break
        *whole, rest = (rest + found).split(b"\n")
        for line in whole:
            yield CONTROL.sub("", line.decode(errors="replace").rstrip("\r"))
    if rest:
        yield CONTROL.sub("", rest.decode(errors="replace"))


def from_here(text: str, root: Path = ROOT) -> str:
    """Without what differs from machine to machine: where the repository lies, and its Python."""
    return text.replace(f"{root}/.venv/bin/", "").replace(f"{root}/", "")


def shortened(lines: Sequence[Line], most_pause_s: float) -> list[Line]:
    """The same lines, no two of them further apart than that."""
    found, now_s, before_s = [], 0.0, 0.0
    for line in lines:
        now_s += min(line.at_s - before_s, most_pause_s)
        before_s = line.at_s
        found.append(Line(now_s, from_here(line.text)))
    return found


def drawn(title: str, lines: Sequence[Line], columns: int, rows: int) -> str:
    """The picture. Each line appears at its time; what does not fit on the screen moves up."""
    length_s = (lines[-1].at_s if lines else 0.0) + LAST_SCREEN_S
    width, height = columns * CHAR_PX + 2 * MARGIN_PX, (rows + 2) * LINE_PX + 2 * MARGIN_PX
    styles, texts = [], []
    last_px = max(0, len(lines) - rows) * LINE_PX
    moves = ["0%{transform:translateY(0)}"]
    for number, line in enumerate(lines):
        at = min(line.at_s / length_s * 100, 99.9)
        styles.append(
            f"@keyframes l{number}{{0%{{opacity:0}}{at:.3f}%{{opacity:1}}100%{{opacity:1}}}}"
            f".l{number}{{animation:l{number} {length_s:.2f}s step-end infinite}}"
        )
        y = (number + 1) * LINE_PX
        text = escape(line.text[:columns])
        texts.append(f'<text class="l{number}" y="{y}" xml:space="preserve">{text}</text>')
        if number >= rows:
            moves.append(f"{at:.3f}%{{transform:translateY(-{(number - rows + 1) * LINE_PX}px)}}")
    moves.append(f"100%{{transform:translateY(-{last_px}px)}}")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
            f'role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">',
            "<style>",
            "text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#d8dee9}",
            f"@keyframes up{{{''.join(moves)}}}",
            f".up{{animation:up {length_s:.2f}s step-end infinite}}",
            *styles,
            # who wants no motion sees the last screen
            "@media (prefers-reduced-motion:reduce){text{animation:none!important}"
            f".up{{animation:none;transform:translateY(-{last_px}px)}}}}",
            "</style>",
            '<rect width="100%" height="100%" rx="8" fill="#1e222a"/>',
            f'<text x="{MARGIN_PX}" y="{MARGIN_PX + LINE_PX - 4}" style="fill:#8fa1b3">'
            f"{escape(title)}</text>",
            f'<svg x="{MARGIN_PX}" y="{MARGIN_PX + LINE_PX}" width="{width - 2 * MARGIN_PX:.0f}" '
            f'height="{(rows + 1) * LINE_PX}"><g class="up">',
            *texts,
            "</g></svg></svg>",
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--columns", type=int, default=110)
    parser.add_argument("--rows", type=int, default=28)
    parser.add_argument("--most-pause", type=float, default=1.5, help="seconds (default: 1.5)")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if not given.command:
        parser.error("a command is missing: what is to be recorded")
    lines, code = recorded(given.command, given.columns)
    if code:
        print(*(line.text for line in lines[-20:]), sep="\n", file=sys.stderr)
        print(f"the command ended with {code}: nothing was drawn", file=sys.stderr)
        return code
    title = f"$ {' '.join(given.command)}    (pauses cut to {given.most_pause:g} s)"
    given.out.parent.mkdir(parents=True, exist_ok=True)
    picture = drawn(title, shortened(lines, given.most_pause), given.columns, given.rows)
    given.out.write_text(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
