"""Board: where the nodes of a round show each other what they see of their ranks, when somebody
suspects something.

One key a node in the memory where their agents meet. Moves texts, decides nothing. Asked on the
watch's thread, with a client of its own; a node that shows nothing is not there.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from keepstep.errors import MeetingError
from keepstep.ports import BlockingKV


class RoundBoard:
    """Of one round. `open_kv` gives a client for another thread; it is called at the first use.
    Raises OSError as `Board` says."""

    def __init__(self, open_kv: Callable[[], BlockingKV], number: int, nodes: int) -> None:
        self._open_kv, self._number, self._nodes = open_kv, number, nodes
        self._kv: BlockingKV | None = None
        self._last: str | None = None
        self._posts = 0

    def post(self, node: int, evidence: str) -> None:
        self._posts += 1  # no value is written twice, as the port wants it
        value = json.dumps([self._posts, evidence])
        try:
            found = self._client().swap(self._key(node), self._last, value)
            if found != value:  # another life of this agent's has written there
                found = self._client().swap(self._key(node), found, value)
        except MeetingError as error:
            raise OSError(str(error)) from error
        self._last = found

    def read(self) -> dict[int, str]:
        try:
            values = self._client().read([self._key(node) for node in range(self._nodes)])
        except MeetingError as error:
            raise OSError(str(error)) from error
        told = {
            node: json.loads(value)[1] for node, value in enumerate(values) if value is not None
        }
        return {node: evidence for node, evidence in told.items() if evidence}

    def _client(self) -> BlockingKV:
        if self._kv is None:
            self._kv = self._open_kv()
        return self._kv

    def _key(self, node: int) -> str:
        return f"{self._number}/board/{node}"
