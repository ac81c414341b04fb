"""`docs/codes.md`, made from the catalogue of codes.

`python -m keepstep.cli.codes_page` prints it; `make docs` writes it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from keepstep.codes import CODES, Chapter, Code
from keepstep.model.events import KINDS

COLUMNS = 100
HEAD = """\
# Errors and warnings by their codes

<!-- Made by `make docs` from src/keepstep/codes/: edit that. -->

Every error that keepstep raises, and every warning that it prints, ends with a code, such as
`[KS1002]`. `keepstep help KS1002` prints the same as this page, without a network. A code keeps its
meaning from release to release, while the words of a message may become better. What to look for
when there is no message at all: [Troubleshooting](troubleshooting.md).
"""


def page(codes: Iterable[Code]) -> str:
    """The whole page, as Markdown."""
    codes = list(codes)
    lines = [HEAD]
    for chapter in Chapter:
        lines.append(f"## {chapter.title}\n")
        for code in codes:
            if code.chapter is chapter:
                lines += [*_entry(code), ""]
    return "\n".join(lines)


def _entry(code: Code) -> Iterator[str]:
    yield f"### {code.number}"
    yield ""
    of = f"`{code.raised}`" if code.raised else _told(code.kind)
    if code.phrases:
        said = ", ".join(f'"{_plain(phrase)}"' for phrase in code.phrases)
        yield from _wrapped(f"{of}: {said}")
    else:
        yield from _wrapped(f"{of}: any other words")
    yield ""
    yield from _wrapped(_plain(code.means))
    yield ""
    more = f" [More]({code.read})." if code.read else ""
    yield from _wrapped(f"**What to do**: {_plain(code.remedy)}{more}")


def _told(kind: str) -> str:
    return f"`{kind}` in the journal" if kind in KINDS else "on stderr alone"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, break_on_hyphens=False, break_long_words=False)


def _plain(text: str) -> str:
    """As it stands: nothing of it is Markdown's but what is in backticks."""
    parts = text.split("`")
    for index in range(0, len(parts), 2):
        for special in "*_<[]":
            parts[index] = parts[index].replace(special, f"\\{special}")
    return "`".join(parts)


if __name__ == "__main__":
    print(page(CODES), end="")
