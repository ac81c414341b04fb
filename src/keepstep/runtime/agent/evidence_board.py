"""Evidence board: where the nodes of an attempt show each other what they see of their ranks, when
somebody suspects something.

One key a node where their agents meet. Moves texts, decides nothing; a node that shows nothing is
not there.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from keepstep.model.decoding import a_list, from_json
from keepstep.ports import KV


class EvidenceBoard:
    """Of one attempt, as one node uses it: one exchange at a time."""

    def __init__(self, meets_in: Callable[[], KV | None], attempt: int, nodes: int) -> None:
        """meets_in: the KV in which the nodes meet now; None while there is none."""
        self.meets_in = meets_in
        self._attempt = attempt
        self._nodes = nodes
        self._last: str | None = None  # what this node has written there
        self._posts = 0

    def exchange(self, node: int, evidence: str, then: Callable[[dict[int, str]], None]) -> None:
        """Show what this node sees; `then` hears what every node shows, this one included. Empty
        evidence takes back what was shown. While there is no KV nothing happens."""
        kv = self.meets_in()
        if kv is None:
            return
        self._posts += 1  # no value is written twice, as the port wants it
        value = json.dumps([self._posts, evidence])

        def swapped(found: str | None) -> None:
            if found == value or found == self._last:
                self._last = found
                self._read(kv, then)
            else:  # another life of this node's agent has written there
                self._last = found
                kv.swap(self._key(node), found, value, swapped_again)

        def swapped_again(found: str | None) -> None:
            self._last = found
            self._read(kv, then)

        kv.swap(self._key(node), self._last, value, swapped)

    def _read(self, kv: KV, then: Callable[[dict[int, str]], None]) -> None:
        def read(values: list[str | None]) -> None:
            shown = {node: _evidence(value) for node, value in enumerate(values) if value}
            then({node: evidence for node, evidence in shown.items() if evidence})

        kv.read([self._key(node) for node in range(self._nodes)], read)

    def _key(self, node: int) -> str:
        return f"{self._attempt}/board/{node}"


def _evidence(value: str) -> str:
    """What a node shows; nothing when it is none of this release's words."""
    try:
        posts, evidence = a_list(from_json(value))
    except ValueError:
        return ""
    return evidence if isinstance(evidence, str) and isinstance(posts, int) else ""
