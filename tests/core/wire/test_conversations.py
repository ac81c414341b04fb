"""Conversations: what one end sends the other understands, and nobody else's messages."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given, settings

from keepstep.core.wire.codec import NotAMessage
from keepstep.core.wire.conversations import (
    AGENT_WITH_KEEPER,
    AGENT_WITH_PROCESS,
    KEEPER_WITH_NODE,
    PROCESS_WITH_AGENT,
    RANK_WITH_KEEPER,
    Conversation,
)
from keepstep.model.messages.agent_rank import FromProcess, ToProcess
from keepstep.model.messages.keeper_agent import BeginMesh, FromAgent, ToAgent
from keepstep.model.messages.keeper_rank import FromRank, ToRank
from tests.core.wire.drawn import messages

# Who sends, who hears, and what.
WAYS: list[tuple[Conversation, Conversation, Any]] = [
    (RANK_WITH_KEEPER, KEEPER_WITH_NODE, FromRank),
    (KEEPER_WITH_NODE, RANK_WITH_KEEPER, ToRank),
    (AGENT_WITH_KEEPER, KEEPER_WITH_NODE, FromAgent),
    (KEEPER_WITH_NODE, AGENT_WITH_KEEPER, ToAgent),
    (PROCESS_WITH_AGENT, AGENT_WITH_PROCESS, FromProcess),
    (AGENT_WITH_PROCESS, PROCESS_WITH_AGENT, ToProcess),
]
# What a mesh may be is more than its fields say: see `test_codec.py`.
CASES = [
    (sender, hearer, kind)
    for sender, hearer, union in WAYS
    for kind in get_args(union)
    if kind is not BeginMesh
]


@pytest.mark.parametrize(("sender", "hearer", "kind"), CASES)
def test_what_one_end_sends_the_other_hears(
    sender: Conversation, hearer: Conversation, kind: type[Any]
) -> None:
    @given(messages(kind))
    def check(message: Any) -> None:
        assert hearer.decode(sender.encode(message)) == message

    check()


@pytest.mark.parametrize(("sender", "hearer", "kind"), CASES)
def test_an_end_neither_sends_nor_hears_what_the_other_is_to_say(
    sender: Conversation, hearer: Conversation, kind: type[Any]
) -> None:
    @settings(max_examples=10)
    @given(messages(kind))
    def check(message: Any) -> None:
        packet = sender.encode(message)
        with pytest.raises(NotAMessage):
            sender.decode(packet)
        with pytest.raises(NotAMessage):
            hearer.encode(message)

    if kind not in _said_both_ways(sender):
        check()


def _said_both_ways(end: Conversation) -> set[type[Any]]:
    said = {kind for sender, _, union in WAYS if sender is end for kind in get_args(union)}
    heard = {kind for _, hearer, union in WAYS if hearer is end for kind in get_args(union)}
    return said & heard
