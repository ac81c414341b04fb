"""Every kind of message crosses unchanged; nothing else comes out of bytes, whatever they are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.wire.messages import (
    KINDS,
    MAX_ITEMS,
    MAX_MESSAGE_BYTES,
    MAX_TEXT_CHARS,
    NotAMessage,
    decode,
    encode,
)
from keepstep.model.snapshot import Stamp
from keepstep.model.wire import Message, Part, Refusal

U63 = st.integers(0, (1 << 63) - 1)
RANKS = st.integers(0, (1 << 32) - 1)
STAMPS = st.builds(Stamp, st.integers(-1, (1 << 63) - 1), U63)
HELD = st.lists(st.tuples(RANKS, STAMPS), max_size=4).map(tuple)
SOME = st.lists(STAMPS, max_size=3).map(tuple)
MAYBE = st.lists(STAMPS, max_size=1).map(tuple)
ROWS = st.lists(RANKS, max_size=4).map(tuple)
TEXT = st.text(max_size=MAX_TEXT_CHARS)
WORDS = {"vote": ["join", "left", "offer", "go"], "persist": ["ask", "answer", "order", "done"]}
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4)
    ),
    max_leaves=12,
)

FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "rank": RANKS,
    "stamp": STAMPS,
    "reason": TEXT,
    "snapshots": HELD,
    "parities": st.lists(st.tuples(RANKS, STAMPS, ROWS, RANKS), max_size=3).map(tuple),
    "ranks": st.lists(
        st.tuples(RANKS, SOME, MAYBE, st.integers(-1, 1 << 62), SOME), max_size=3
    ).map(tuple),
    "row": ROWS,
    "tolerates": RANKS,
    "alive": SOME,
    **dict.fromkeys(("committed", "target", "horizon", "inherited"), MAYBE),
    "decided_step": st.integers(-1, 1 << 62),
    **dict.fromkeys(("policy", "policy_why", "losable", "why", "hindered"), TEXT),
    "table_checksum": st.integers(0, (1 << 64) - 1),
    "ranges": st.lists(
        st.tuples(st.sampled_from(Part), U63, st.integers(1, (1 << 63) - 1)), max_size=4
    ).map(tuple),
    "body": st.dictionaries(st.text(max_size=10), JSON, max_size=4),
    **dict.fromkeys(
        ("apart", "alone", "out_of_reach"), st.lists(st.tuples(RANKS, RANKS), max_size=3).map(tuple)
    ),
    "critical": st.lists(st.tuples(RANKS, ROWS), max_size=3).map(tuple),
    "is_committed": st.integers(0, 1),
    "any_nodes": st.integers(-1, (1 << 32) - 1),
    "result": st.sampled_from(["got", "damaged", "unwanted"]),
}


MANY = {
    name
    for name in FIELDS
    if name not in ("rank", "stamp", "result", "tolerates", "table_checksum")
}


def messages(kind: str) -> st.SearchStrategy[Message]:
    fields = {**FIELDS, "word": st.sampled_from(WORDS.get(kind, [""]))}
    return st.fixed_dictionaries({name: fields.get(name, U63) for name in KINDS[kind]}).map(
        lambda found: Message(kind, found)
    )


ANY = st.sampled_from(sorted(KINDS)).flatmap(messages)


@pytest.mark.parametrize("kind", sorted(KINDS))
@given(st.data())
def test_what_is_encoded_is_decoded(kind: str, data: st.DataObject) -> None:
    message = data.draw(messages(kind))
    assert decode(encode(message)) == message


def outcome(body: bytes) -> Message | Refusal:
    try:
        return decode(body)
    except NotAMessage as error:
        return error.reason


@given(st.binary(max_size=200))
def test_random_bytes_are_no_message(body: bytes) -> None:
    assert isinstance(outcome(body), Refusal)


@given(JSON, st.sampled_from(sorted(KINDS)))
def test_random_json_is_no_message_unless_it_is_one(value: Any, kind: str) -> None:
    said = {"kind": kind, **value} if isinstance(value, dict) else value
    found = outcome(json.dumps(said).encode())
    assert isinstance(found, Refusal) or found == decode(encode(found))


@given(ANY, st.data())
def test_one_field_of_another_type_is_no_message(message: Message, data: st.DataObject) -> None:
    fields = json.loads(encode(message))
    name = data.draw(st.sampled_from(sorted(fields)))
    wrong: Any = data.draw(
        st.sampled_from([None, True, 1.5, -2, 1 << 64, [], [[]], ["x"], {"x": 1}, "no such word"])
    )
    fields[name] = wrong
    found = outcome(json.dumps(fields).encode())
    # Text may be any text and a body any object, an empty list is a list of nothing: those say
    # something else, but they say it.
    if isinstance(found, Message):
        assert name in MANY and json.loads(encode(found)) == fields


@given(ANY, st.booleans())
def test_a_field_missing_or_too_many_is_no_message(message: Message, surplus: bool) -> None:
    fields = json.loads(encode(message))
    if surplus:
        fields["surplus"] = 1
    else:
        del fields[next(name for name in fields if name != "kind")]
    assert outcome(json.dumps(fields).encode()) is Refusal.MALFORMED


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message("sing", {}), Refusal.UNKNOWN_KIND),
        (Message("bye", {"reason": "x" * (MAX_TEXT_CHARS + 1)}), Refusal.MALFORMED),
        (Message("vote", {"round": 1, "word": "go", "body": {"x": object()}}), Refusal.MALFORMED),
        (
            Message("vote", {"round": 1, "word": "go", "body": {"x": float("nan")}}),
            Refusal.MALFORMED,
        ),
        (
            Message("vote", {"round": 1, "word": "go", "body": {"x": "x" * MAX_MESSAGE_BYTES}}),
            Refusal.OVERSIZED,
        ),
        (
            Message(
                "inventory",
                {"round": 1, "snapshots": ((1, Stamp(1, 1)),) * (MAX_ITEMS + 1), "parities": ()},
            ),
            Refusal.MALFORMED,
        ),
    ],
)
def test_what_nobody_would_accept_is_not_sent(message: Message, reason: Refusal) -> None:
    with pytest.raises(NotAMessage) as caught:
        encode(message)
    assert caught.value.reason is reason


def test_a_full_inventory_fits() -> None:
    held = tuple((rank, Stamp(1_000_000 + rank, 3)) for rank in range(MAX_ITEMS))
    assert (
        decode(
            encode(Message("inventory", {"round": 1, "snapshots": held, "parities": ()}))
        ).fields["snapshots"]
        == held
    )
