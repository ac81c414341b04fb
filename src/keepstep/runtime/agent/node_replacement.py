"""Replacing: whom the platform is asked to replace, and by whom.

Comes in: the nodes of the round, and that one of them is lost. Goes out: one question to the
platform for each lost node, asked by the first of those that are left, and its answer in the
journal. The replacement announces itself by joining; nobody waits for it here.
"""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.config import Settings
from keepstep.edge.os.journal import Journal
from keepstep.edge.os.provider import CommandProvider
from keepstep.model.lost import LostNode
from keepstep.ports import NodeProvider


class Replacing:
    def __init__(self, settings: Settings, journal: Journal) -> None:
        self._settings, self._journal = settings, journal
        self._provider: NodeProvider | None = (
            CommandProvider(settings.replace_command) if settings.replace_command else None
        )
        self._hosts: Sequence[str] = ()
        self._node = -1
        self._lost: set[int] = set()

    @property
    def vacant(self) -> tuple[int, ...]:
        """The nodes that are lost."""
        return tuple(sorted(self._lost))

    def host_of(self, node: int) -> str:
        return self._hosts[node]

    def begin(self, node: int, hosts: Sequence[str]) -> None:
        """A round of nodes on these hosts, this one among them."""
        self._node, self._hosts = node, hosts
        self._lost.clear()

    def lost(self, node: int, why: str) -> None:
        self._lost.add(node)
        left = set(range(len(self._hosts))) - self._lost
        if self._provider is None or not left or self._node != min(left):
            return
        host = self._hosts[node]
        self._journal.record(
            "replacement-wanted",
            f"node {node} on {host} is lost: a replacement is asked for",
            node=node,
        )
        self._provider.replace(
            LostNode(self._settings.job, node, host, why), lambda told: self._asked(node, told)
        )

    def _asked(self, node: int, told: str) -> None:
        """On the provider's thread."""
        self._journal.record(
            "replacement-asked", f"a replacement of node {node}: {told}", node=node
        )
