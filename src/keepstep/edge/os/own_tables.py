"""Own tables: the data about failures that come with the package.

Comes in: nothing. Goes out: the text of the table of patterns in logs, and of that of the kernel's
lines. Reads the package's own files alone; who asks knows what they mean.
"""

from __future__ import annotations

from importlib.resources import files


def pattern_text() -> str:
    """What words in a log mean, for `core/postmortem/table.py`."""
    return _text("keepstep.core.postmortem", "patterns.json")


def kernel_text() -> str:
    """What lines of the kernel mean, for `core/parts/kernel_log.py`."""
    return _text("keepstep.core.parts", "kernel_table.json")


def _text(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")
