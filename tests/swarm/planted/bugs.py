"""The list of planted bugs: one mistake each that an engineer could make in the product.

Each `<room>.toml` beside this has several `[[bug]]`: `name`; `why` it is a bug; `module`, its path
in the package; `find`, text that occurs there exactly once; `replace`, what stands there instead;
where it shows only in jobs that the swarm seldom draws, `plan`: in what its jobs differ from
`RunPlan`'s own values; and, where the first seed that finds it is a long way off, `seed`: the one
that did when this was written. The hunt begins there. That seed is another run once what is drawn
has changed: then the hunt goes through all seeds, and `seed` is to be written anew.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keepstep

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
PACKAGE = Path(keepstep.__file__).parent


@dataclass(frozen=True, slots=True)
class Bug:
    """`room`: the file that it is listed in."""

    room: str
    name: str
    why: str
    module: str
    find: str
    replace: str
    plan: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None

    @property
    def path(self) -> Path:
        """Of the module's source."""
        return PACKAGE / self.module

    @property
    def module_name(self) -> str:
        """As it is imported."""
        return ".".join(("keepstep", *Path(self.module).with_suffix("").parts))

    def planted_source(self) -> str:
        """The module's source with the bug in it. Raises ValueError when the text that it is to
        replace is not there exactly once."""
        source = self.path.read_text()
        count = source.count(self.find)
        if count != 1:
            raise ValueError(f"{self.name}: {self.module} has the text to replace {count} times")
        return source.replace(self.find, self.replace)


def all_bugs() -> list[Bug]:
    """Of all rooms, in the order of the files."""
    return [
        Bug(room=path.stem, **entry)
        for path in sorted(HERE.glob("*.toml"))
        for entry in tomllib.loads(path.read_text())["bug"]
    ]


def bug_called(name: str) -> Bug:
    """Raises KeyError when there is none of that name."""
    return {bug.name: bug for bug in all_bugs()}[name]
