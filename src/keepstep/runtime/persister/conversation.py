"""Conversation with the persister: which messages a keeper and its persister may send each other.

Comes in: a message to send, or a line that came. Goes out: the other one, or `NotAMessage`.
"""

from __future__ import annotations

from typing import Any, get_args

from keepstep.core.wire.codec import Codec
from keepstep.model.messages.persister import FromPersister, ToPersister


class PersisterCodec:
    """One end's part in it. See `ports.MessageCodec`. An act names all nodes of the job, so it may
    be longer than other messages within a node."""

    def __init__(self, incoming: object, outgoing: object) -> None:
        """incoming, outgoing: unions of message classes."""
        self._incoming: Codec[Any] = Codec(get_args(incoming))
        self._outgoing: Codec[Any] = Codec(get_args(outgoing))

    def encode(self, message: Any, /) -> bytes:
        """See `ports.MessageCodec`."""
        return self._outgoing.encode(message)

    def decode(self, packet: bytes, /) -> Any:
        """See `ports.MessageCodec`."""
        return self._incoming.decode(packet)


KEEPER_WITH_PERSISTER = PersisterCodec(FromPersister, ToPersister)
PERSISTER_WITH_KEEPER = PersisterCodec(ToPersister, FromPersister)
