"""What is sent arrives equal; whatever else comes is refused by a NotAMessage and nothing else."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.wire.codec import Codec, NotAMessage
from keepstep.model.bounds import Count, Length, Range, Text
from keepstep.model.messages import agent_rank, keeper_agent, keeper_rank, peers, persister
from keepstep.model.snapshot import Stamp
from keepstep.model.wire import Refusal
from tests.core.wire.drawn import ANY_JSON, messages

CONVERSATIONS: dict[str, tuple[type[Any], ...]] = {
    "from rank": get_args(keeper_rank.FromRank),
    "to rank": get_args(keeper_rank.ToRank),
    "from agent": get_args(keeper_agent.FromAgent),
    "to agent": get_args(keeper_agent.ToAgent),
    "from process": get_args(agent_rank.FromProcess),
    "to process": get_args(agent_rank.ToProcess),
    "to persister": (persister.CheckpointAct,),
    "from persister": (persister.ActDone,),
    "between keepers": get_args(peers.KeeperMessage),
}
KINDS = sorted(
    {kind for kinds in CONVERSATIONS.values() for kind in kinds}, key=lambda k: k.__qualname__
)


MESH = {
    "version": 7,
    "node": 1,
    "members": [
        {"node": n, "host": "h", "port": 1, "incarnation": 2, "ranks": 3, "rack": None}
        for n in range(2)
    ],
    "secret": "s",
}


@pytest.mark.parametrize("kind", [k for k in KINDS if k is not keeper_rank.BeginMesh])
def test_what_is_sent_arrives_equal(kind: type[Any]) -> None:
    codec: Codec[Any] = Codec([kind])

    @given(messages(kind))
    def check(message: Any) -> None:
        assert codec.decode(codec.encode(message)) == message

    check()


def test_a_mesh_arrives_equal() -> None:
    codec: Codec[Any] = Codec([keeper_rank.BeginMesh])
    message = codec.decode(json.dumps({"kind": "mesh", "mesh": MESH}).encode())
    assert message.mesh.world_size == 6 and codec.decode(codec.encode(message)) == message


def test_a_mesh_that_cannot_be_is_no_message() -> None:
    codec: Codec[Any] = Codec([keeper_rank.BeginMesh])
    with pytest.raises(NotAMessage, match="nodes 0 to N-1"):
        codec.decode(json.dumps({"kind": "mesh", "mesh": {**MESH, "node": 5}}).encode())


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_any_bytes(name: str) -> None:
    codec: Codec[Any] = Codec(CONVERSATIONS[name])

    @given(st.binary(max_size=200))
    def check(data: bytes) -> None:
        with pytest.raises(NotAMessage):
            codec.decode(data)

    check()


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_any_json_object(name: str) -> None:
    """Among them ones that are almost a message: of a known kind, with known fields."""
    kinds = CONVERSATIONS[name]
    codec: Codec[Any] = Codec(kinds)
    names = sorted({f.name for kind in kinds for f in fields(kind)})
    almost = st.dictionaries(st.sampled_from(names), ANY_JSON) if names else st.just({})

    @given(almost, st.sampled_from([k.KIND for k in kinds]) | ANY_JSON)
    def check(plain: dict[str, Any], kind: Any) -> None:
        data = json.dumps({**plain, "kind": kind}).encode()
        try:
            message = codec.decode(data)
        except NotAMessage:
            return
        assert codec.decode(codec.encode(message)) == message

    check()


def test_a_list_is_no_message() -> None:
    for data in (b"[]", b"3", b"null", b'"join"', b"[" * 100_000):
        with pytest.raises(NotAMessage) as caught:
            Codec([persister.ActDone]).decode(data)
        assert caught.value.reason is Refusal.MALFORMED


@dataclass(frozen=True, slots=True)
class Small:
    KIND: ClassVar[str] = "small"
    number: Annotated[int, Range(1, 3)]
    text: Annotated[str, Length(3)]
    stamp: Stamp | None = None
    many: Annotated[tuple[Count, ...], Length(2)] = ()


@dataclass(frozen=True, slots=True)
class Other:
    KIND: ClassVar[str] = "other"
    why: Text


SMALL: Codec[Any] = Codec([Small])


@pytest.mark.parametrize(
    "plain",
    [
        {},
        {"number": 1},
        {"number": 1, "text": "abc", "more": 1},
        {"number": 0, "text": "abc"},
        {"number": 4, "text": "abc"},
        {"number": True, "text": "abc"},
        {"number": 1.0, "text": "abc"},
        {"number": "1", "text": "abc"},
        {"number": 1, "text": "abcd"},
        {"number": 1, "text": None},
        {"number": 1, "text": "abc", "stamp": [1]},
        {"number": 1, "text": "abc", "stamp": [1, -2]},
        {"number": 1, "text": "abc", "many": [1, 2, 3]},
        {"number": 1, "text": "abc", "many": {"0": 1}},
    ],
)
def test_a_field_that_is_not_as_it_should_be(plain: dict[str, Any]) -> None:
    with pytest.raises(NotAMessage) as caught:
        SMALL.decode(json.dumps({"kind": "small", **plain}).encode())
    assert caught.value.reason is Refusal.MALFORMED


def test_a_sentence_that_is_too_long_is_cut_where_it_is_written() -> None:
    codec: Codec[Any] = Codec([persister.ActDone])
    why = "a" * 2000
    assert codec.decode(codec.encode(persister.ActDone(False, why))) == persister.ActDone(
        False, why[:1000]
    )
    with pytest.raises(NotAMessage):
        codec.decode(json.dumps({"kind": "done", "ok": False, "why": why}).encode())


def test_a_field_with_a_default_may_be_missing() -> None:
    assert SMALL.decode(b'{"kind":"small","number":1,"text":"a"}') == Small(1, "a")


@pytest.mark.parametrize("message", [Small(9, "a"), Small(1, "abcd"), Small(1, 2), None])  # type: ignore[arg-type]
def test_what_no_peer_would_accept_is_not_sent(message: Any) -> None:
    with pytest.raises(NotAMessage):
        SMALL.encode(message)


def test_another_conversations_message_is_not_sent() -> None:
    with pytest.raises(NotAMessage) as caught:
        SMALL.encode(Other("why"))
    assert caught.value.reason is Refusal.UNKNOWN_KIND


def test_too_long_a_message_is_neither_sent_nor_read() -> None:
    codec: Codec[Any] = Codec([Other], max_bytes=40)
    for attempt in (
        lambda: codec.encode(Other("a" * 40)),
        lambda: codec.decode(b'{"kind":"other","why":"' + b"a" * 40 + b'"}'),
    ):
        with pytest.raises(NotAMessage) as caught:
            attempt()
        assert caught.value.reason is Refusal.OVERSIZED


def test_messages_of_a_union_are_told_apart_by_their_kind() -> None:
    @dataclass(frozen=True, slots=True)
    class Letter:
        KIND: ClassVar[str] = "letter"
        content: Small | Other
        beside: Small | Other | None = None

    globals()["Letter"] = Letter
    codec: Codec[Any] = Codec([Letter])
    for content in (Small(1, "a"), Other("b")):
        for letter in (Letter(content), Letter(content, content)):
            assert codec.decode(codec.encode(letter)) == letter
    for wrong in ({"kind": "letter"}, {"why": "b"}, {"kind": "other"}, {"kind": []}, 3):
        with pytest.raises(NotAMessage):
            codec.decode(json.dumps({"kind": "letter", "content": wrong}).encode())
    with pytest.raises(NotAMessage):
        codec.encode(Letter(None))  # type: ignore[arg-type]


def test_a_list_with_a_bound_of_its_own_may_hold_messages() -> None:
    @dataclass(frozen=True, slots=True)
    class Bundle:
        KIND: ClassVar[str] = "bundle"
        letters: Annotated[tuple[Small, ...], Length(2)]
        by_name: Annotated[dict[str, Small], Length(1)]

    globals()["Bundle"] = Bundle
    codec: Codec[Any] = Codec([Bundle])
    one, other = Small(1, "a", Stamp(3, 1)), Small(2, "b")
    for bundle in (Bundle((), {}), Bundle((one,), {"x": other}), Bundle((one, other), {})):
        assert codec.decode(codec.encode(bundle)) == bundle
    for too_much in (Bundle((one, one, one), {}), Bundle((), {"x": one, "y": other})):
        with pytest.raises(NotAMessage):
            codec.encode(too_much)
