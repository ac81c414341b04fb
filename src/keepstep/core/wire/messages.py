"""Messages: the kinds keepers exchange, as bounded JSON checked field by field.

Comes in: a `Message`, or bytes somebody sent. Goes out: the other one. Never trusts: an unknown
kind, a missing or surplus field, a value of another type or beyond its bound raises `NotAMessage`,
nothing else does, and nothing is unpickled.

Invariant: what `encode` accepts, `decode` gives back equal (a vote's body as JSON has it: lists,
not tuples).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

from keepstep.model.snapshot import Stamp
from keepstep.model.units import KIB
from keepstep.model.wire import Message, Part, Refusal

MAX_MESSAGE_BYTES = 256 * KIB
MAX_TEXT_CHARS = 1000
MAX_ITEMS = 10_000
_U32, _U63, _U64 = (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1

Check = Callable[[Any], Any]


class NotAMessage(ValueError):
    """Bytes or fields that are no message of ours; `reason` is UNKNOWN_KIND, OVERSIZED or
    MALFORMED."""

    def __init__(self, reason: Refusal, why: str) -> None:
        super().__init__(why)
        self.reason = reason


def _whole(least: int, most: int) -> Check:
    def check(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:  # a bool is an int to isinstance
            raise ValueError(f"expected a whole number from {least} to {most}, found {value!r:.40}")
        return value

    return check


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT_CHARS:
        raise ValueError(
            f"expected text of at most {MAX_TEXT_CHARS} characters, found {value!r:.40}"
        )
    return value


def _one_of(*words: str) -> Check:
    def check(value: Any) -> str:
        if value not in words:
            raise ValueError(f"expected one of {', '.join(words)}, found {value!r:.40}")
        return str(value)

    return check


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, found {value!r:.40}")
    return value


def _items(*checks: Check) -> Check:
    """A list with one value a check."""

    def check(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)) or len(value) != len(checks):
            raise ValueError(f"expected a list of {len(checks)}, found {value!r:.40}")
        return tuple(one(item) for one, item in zip(checks, value, strict=True))

    return check


def _many(one: Check) -> Check:
    def check(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)) or len(value) > MAX_ITEMS:
            raise ValueError(f"expected a list of at most {MAX_ITEMS}, found {value!r:.40}")
        return tuple(one(item) for item in value)

    return check


def _part(value: Any) -> Part:
    return value if isinstance(value, Part) else Part(_rank(value))


def _stamp(value: Any) -> Stamp:
    return value if isinstance(value, Stamp) else Stamp(*_pair(value))


_rank, _bytes, _number, _checksum = (
    _whole(0, _U32),
    _whole(0, _U63),
    _whole(0, _U63),
    _whole(0, _U64),
)
_pair = _items(_whole(-1, _U63), _whole(0, _U63))
_held = _many(_items(_rank, _stamp))
_SNAPSHOT: dict[str, Check] = {"round": _number, "rank": _rank, "stamp": _stamp}
_maybe = _many(_stamp)  # none or one
_row = _many(_rank)
_ranges = _many(_items(_rank, _rank))

KINDS: dict[str, dict[str, Check]] = {
    # To the leader: what this node has proven. `snapshots`: (rank, stamp); `parities`: (rank,
    # stamp, row, tolerates).
    "inventory": {
        "round": _number,
        "snapshots": _held,
        "parities": _many(_items(_rank, _stamp, _row, _rank)),
    },
    # To the leader: each rank here: (rank, sealed, pending, decided step, protected); what its last
    # word was, as far as this node heard; and what hinders the policy, if anything does.
    "report": {
        **{
            "round": _number,
            "epoch": _number,
            "committed": _maybe,
            "target": _maybe,
            "inherited": _maybe,
        },
        **{"snapshot_bytes": _bytes, "free_bytes": _bytes, "hindered": _text},
        "ranks": _many(_items(_rank, _many(_stamp), _maybe, _whole(-1, _U63), _many(_stamp))),
    },
    # The leader's word (model/horizon.py), and which policy holds.
    "horizon": {
        **{"round": _number, "epoch": _number, "policy": _text, "why": _text},
        **{
            "committed": _maybe,
            "target": _maybe,
            "alive": _many(_stamp),
            "decided_step": _whole(-1, _U63),
            "inherited": _maybe,
        },
    },
    # What the leader tells everybody about which nodes may be lost
    # (core/redundancy/node_safety.py).
    "standing": {
        **{
            "round": _number,
            "policy": _text,
            "policy_why": _text,
            "step": _whole(-1, _U63),
            "is_committed": _whole(0, 1),
        },
        **{
            "apart": _ranges,
            "alone": _ranges,
            "critical": _many(_items(_rank, _row)),
            "out_of_reach": _ranges,
        },
        **{"any_nodes": _whole(-1, _U32), "losable": _text},
    },
    # To the leader: the ranks here all ended well; and from it: those of all nodes did.
    "ended": {"round": _number},
    "over": {"round": _number},
    # The owner of a snapshot asks a holder to keep its part of it; the holder says when it has it
    # whole and verified, or why not.
    "offer": {
        **_SNAPSHOT,
        **{
            "payload_bytes": _bytes,
            "capacity_bytes": _bytes,
            "manifest_bytes": _bytes,
            "manifest_capacity_bytes": _bytes,
        },
        **{"table_checksum": _checksum, "row": _row, "tolerates": _rank, "horizon": _maybe},
    },
    "accept": _SNAPSHOT,
    "decline": {**_SNAPSHOT, "reason": _text},
    "ack": _SNAPSHOT,
    "nack": {**_SNAPSHOT, "reason": _text},
    # Send me these: (part, offset, length).
    "fetch": {**_SNAPSHOT, "ranges": _many(_items(_part, _bytes, _whole(1, _U63)))},
    # A word of the vote about what to resume from; what it means is core/resume/vote.py's business.
    "vote": {
        "round": _number,
        "word": _one_of("join", "attach", "left", "offer", "loaded", "failed", "go", "refused"),
        "body": _object,
    },
    # A word about writing a checkpoint.
    "persist": {
        "round": _number,
        "word": _one_of("ask", "answer", "order", "done"),
        "body": _object,
    },
    "refused": {"reason": _text},
    "bye": {"reason": _text},
    # The link's own: alive, and what has arrived.
    "ping": {"sent_ns": _number},
    "pong": {"sent_ns": _number},
    "got": {"number": _number},
    "block": {"number": _number, "result": _one_of("got", "damaged", "unwanted")},
}


def encode(message: Message) -> bytes:
    """Raises NotAMessage: what no peer would accept is not sent."""
    checked = _checked(message.kind, message.fields)
    try:
        body = json.dumps(
            {"kind": message.kind, **checked.fields}, separators=(",", ":"), allow_nan=False
        ).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise NotAMessage(Refusal.MALFORMED, f"{message.kind}: {error}") from error
    if len(body) > MAX_MESSAGE_BYTES:
        raise NotAMessage(
            Refusal.OVERSIZED,
            f"{message.kind} of {len(body)} bytes, at most {MAX_MESSAGE_BYTES} allowed",
        )
    return body


def decode(body: bytes) -> Message:
    """Raises NotAMessage."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise NotAMessage(
            Refusal.OVERSIZED,
            f"a message of {len(body)} bytes, at most {MAX_MESSAGE_BYTES} allowed",
        )
    try:
        fields = _object(json.loads(body.decode(), parse_constant=_no_constant))
        kind = _text(fields.pop("kind", None))
    except (ValueError, RecursionError) as error:
        raise NotAMessage(Refusal.MALFORMED, str(error)) from error
    return _checked(kind, fields)


def _checked(kind: str, fields: Any) -> Message:
    if kind not in KINDS:
        raise NotAMessage(
            Refusal.UNKNOWN_KIND, f"expected one of {', '.join(KINDS)}, found {kind!r:.40}"
        )
    checks = KINDS[kind]
    if fields.keys() != checks.keys():
        raise NotAMessage(
            Refusal.MALFORMED,
            f"{kind}: expected the fields {sorted(checks)}, found {sorted(fields)!r:.200}",
        )
    checked: dict[str, Any] = {}
    for name, check in checks.items():
        try:
            checked[name] = check(fields[name])
        except ValueError as error:
            raise NotAMessage(Refusal.MALFORMED, f"{kind}.{name}: {error}") from error
    return Message(kind, checked)


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")
