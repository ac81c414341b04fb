"""etcd's answers: what its JSON gateway says, as values.

Comes in: JSON of whoever answered. Goes out: values, or ValueError: an answer that is none ends
nobody by an error that nobody expects. The questions are `etcd.py`'s.
"""

from __future__ import annotations

import base64
from typing import Any

from keepstep.model.decoding import a_list, a_text, an_object, from_json


def swapped(answer: Any, value: str) -> str | None:
    """What stands under a key that was to become `value` on a condition, and is read if that did
    not hold. None: nothing."""
    said = an_object(answer)
    return value if said.get("succeeded") is True else _values(said, 1)[0]


def values_read(answer: Any, count: int) -> list[tuple[str | None, int]]:
    """Of so many keys each value, and the revision as of which it was read."""
    said = an_object(answer)
    revision = _number(an_object(said.get("header")).get("revision"))
    return [(value, revision) for value in _values(said, count)]


def is_news(line: bytes) -> bool:
    """Whether this line of a watch says that something has happened, or that it watches no more."""
    result = an_object(an_object(from_json(line or b"{}")).get("result", {}))
    return "events" in result or bool(result.get("canceled"))


def lease_of(text: str) -> int:
    """A lease's number, as it stands under a key."""
    return _number(text)


def _values(said: dict[str, Any], count: int) -> list[str | None]:
    responses = a_list(said.get("responses"))
    if len(responses) != count:
        raise ValueError(f"expected {count} values, found {len(responses)}")
    return [_value(an_object(an_object(each).get("response_range"))) for each in responses]


def _value(found: dict[str, Any]) -> str | None:
    pairs = a_list(found.get("kvs", []))
    if not pairs:
        return None
    value = a_text(an_object(pairs[0]).get("value", ""))  # protobuf leaves out what is empty
    return base64.b64decode(value).decode("utf-8", "surrogateescape")


def _number(said: Any) -> int:
    """JSON has 64 bits as a text."""
    text = str(said) if type(said) is int else a_text(said)
    if not (text.isascii() and text.isdecimal() and len(text) <= 20):
        raise ValueError(f"expected a number of etcd's, found {text!r:.40}")
    return int(text)
