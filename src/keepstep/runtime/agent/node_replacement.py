"""Node replacement: whom the platform is asked to replace, and by whom.

Comes in: the nodes of the attempt, and that one of them is lost. Goes out: one question to the
platform for each lost node, asked by the first of those that are left, and its answer in the
journal. The replacement announces itself by joining; nobody waits for it here.
"""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.model.lost import LostNode
from keepstep.ports import Journal, NodeProvider


class NodeReplacement:
    """In one attempt. `node`: this one; `hosts`: of all nodes, in order."""

    def __init__(
        self,
        provider: NodeProvider | None,
        journal: Journal,
        job: str,
        node: int = 0,
        hosts: Sequence[str] = (),
    ) -> None:
        self._provider = provider
        self._journal = journal
        self._job = job
        self._node = node
        self._hosts = hosts
        self._lost: set[int] = set()

    @property
    def vacant(self) -> tuple[int, ...]:
        """The nodes that are lost."""
        return tuple(sorted(self._lost))

    def host_of(self, node: int) -> str:
        return self._hosts[node] if node < len(self._hosts) else ""

    def lost(self, node: int, why: str) -> None:
        self._lost.add(node)
        left = set(range(len(self._hosts))) - self._lost
        if self._provider is None or not left or self._node != min(left):
            return
        host = self.host_of(node)
        told = f"node {node} on {host} is lost: asking the platform for a replacement"
        self._journal.record("replacement-wanted", told, node=node)
        lost = LostNode(self._job, node, host, why)
        self._provider.replace(lost, lambda answer: self._answered(node, answer))

    def _answered(self, node: int, answer: str) -> None:
        """From any thread."""
        told = f"a replacement of node {node}: {answer}"
        self._journal.record("replacement-asked", told, node=node)
