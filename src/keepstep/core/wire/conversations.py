"""Conversations within a node: which messages each end of a connection may send, and which it
understands.

Comes in: a message to send, or a packet that came. Goes out: the other one, or `NotAMessage`.
"""

from __future__ import annotations

from typing import Any, get_args

from keepstep.core.wire.codec import Codec
from keepstep.model.bounds import MAX_PACKET_BYTES
from keepstep.model.messages.agent_rank import FromProcess, ToProcess
from keepstep.model.messages.keeper_agent import FromAgent, ToAgent
from keepstep.model.messages.keeper_rank import FromRank, ToRank


class Conversation:
    """One end's part in it. See `ports.MessageCodec`."""

    def __init__(self, incoming: object, outgoing: object) -> None:
        """incoming, outgoing: unions of message classes."""
        self._incoming: Codec[Any] = Codec(get_args(incoming), MAX_PACKET_BYTES)
        self._outgoing: Codec[Any] = Codec(get_args(outgoing), MAX_PACKET_BYTES)

    def encode(self, message: Any) -> bytes:
        """Raises NotAMessage when the other end would not understand it."""
        return self._outgoing.encode(message)

    def decode(self, packet: bytes | memoryview) -> Any:
        """Raises NotAMessage."""
        return self._incoming.decode(packet)


KEEPER_WITH_NODE = Conversation(FromRank | FromAgent, ToRank | ToAgent)
RANK_WITH_KEEPER = Conversation(ToRank, FromRank)
AGENT_WITH_KEEPER = Conversation(ToAgent, FromAgent)
AGENT_WITH_PROCESS = Conversation(FromProcess, ToProcess)
PROCESS_WITH_AGENT = Conversation(ToProcess, FromProcess)
