"""Delta: what has changed from one plain document to the next, and the next one from that.

Comes in: two documents, objects within objects by name; anything else is a value and changes as a
whole. Goes out: a change, which is itself such a document: under a name stands `[value]` where it
is set, `[]` where it is gone, or the change of what is below it. Pure.

Invariant: `changed(before, difference(before, after)) == after`, and the change is empty if and
only if nothing has changed. `page.js` does the same as `changed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Document = Mapping[str, Any]


def difference(before: Document, after: Document) -> dict[str, Any]:
    """The change that leads from one to the other."""
    change: dict[str, Any] = {name: [] for name in before if name not in after}
    for name, value in after.items():
        if name not in before:
            change[name] = [value]
            continue
        old = before[name]
        if old is value:
            continue
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            below = difference(old, value)
            if below:
                change[name] = below
        elif old != value or type(old) is not type(value):  # True == 1 to Python, and to no reader
            change[name] = [value]
    return change


def changed(before: Document, change: Document) -> dict[str, Any]:
    """The document after that change. `before` stays as it is."""
    after = dict(before)
    for name, said in change.items():
        if isinstance(said, Mapping):
            after[name] = changed(before[name], said)
        elif said:
            after[name] = said[0]
        else:
            del after[name]
    return after
