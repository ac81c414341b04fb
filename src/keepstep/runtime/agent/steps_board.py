"""Steps board: where the nodes of an attempt tell what their ranks did, and the leader who is slow.

One key a node where their agents meet, and one of the leader's. Moves texts, decides nothing; who
writes is whose key it is, as far as the job's secret says (`signed_kv.py`). One exchange at a time:
while one is not answered the next is not begun, so nothing piles up where nobody answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from keepstep.ports import KV

T = TypeVar("T")


class StepsBoard:
    """Of one attempt, as one node uses it."""

    def __init__(
        self, meets_in: Callable[[], KV | None], attempt: int, node: int, nodes: int
    ) -> None:
        """meets_in: the KV in which the nodes meet now; None while there is none."""
        self._meets_in = meets_in
        self._attempt = attempt
        self.node, self.nodes = node, nodes
        self._last: dict[str, str | None] = {}  # by key, what this node has written there
        self._asked: KV | None = None  # which has not answered yet

    @property
    def is_free(self) -> bool:
        """Whether an exchange may begin."""
        kv = self._meets_in()
        return kv is not None and kv is not self._asked

    def tell(self, text: str, then: Callable[[str], None]) -> None:
        """What this node tells, empty: nothing new; `then` hears the leader's word, empty: none."""
        kv = self._begin()

        def read() -> None:
            kv.read([self._word_key()], lambda found: self._answered(kv, then, found[0] or ""))

        if text:
            self._write(kv, self._steps_key(self.node), text, read)
        else:
            read()

    def gather(self, then: Callable[[Mapping[int, str]], None]) -> None:
        """`then` hears what each other node tells."""
        kv = self._begin()
        others = [node for node in range(self.nodes) if node != self.node]

        def read(values: list[str | None]) -> None:
            told = {node: text for node, text in zip(others, values, strict=True) if text}
            self._answered(kv, then, told)

        kv.read([self._steps_key(node) for node in others], read)

    def say(self, word: str) -> None:
        """The leader's word."""
        kv = self._begin()
        self._write(kv, self._word_key(), word, lambda: self._answered(kv, _nothing, None))

    def _begin(self) -> KV:
        kv = self._meets_in()
        assert kv is not None and kv is not self._asked
        self._asked = kv
        return kv

    def _answered(self, kv: KV, then: Callable[[T], None], what: T) -> None:
        if kv is self._asked:
            self._asked = None
        then(what)

    def _write(self, kv: KV, key: str, value: str, then: Callable[[], None]) -> None:
        """Whatever stands there: an agent of this node before this one may have written it, and a
        KV that was lost has nothing."""

        def swapped(found: str | None) -> None:
            self._last[key] = found
            if found == value:
                then()
            else:
                kv.swap(key, found, value, swapped_again)

        def swapped_again(found: str | None) -> None:
            self._last[key] = found
            then()

        kv.swap(key, self._last.get(key), value, swapped)

    def _steps_key(self, node: int) -> str:
        return f"{self._attempt}/steps/{node}"

    def _word_key(self) -> str:
        return f"{self._attempt}/slow"


def _nothing(_: None) -> None:
    """Nobody asked what came of it."""
