"""Messages: the kinds that keepers exchange (`model/messages/peers.py`), and their codec.

Comes in: a message, or bytes that somebody sent. Goes out: the other one.
"""

from __future__ import annotations

from typing import get_args

from keepstep.core.wire.codec import Codec
from keepstep.model.messages.peers import KeeperMessage

KINDS: dict[str, type[KeeperMessage]] = {kind.KIND: kind for kind in get_args(KeeperMessage)}
_CODEC: Codec[KeeperMessage] = Codec(KINDS.values())

encode = _CODEC.encode
decode = _CODEC.decode
