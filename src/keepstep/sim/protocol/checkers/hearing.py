"""All is heard: while a link lives, what one keeper says over it the other one hears, each thing
once and in order, however often its connections break.

Looked at from outside, where messages go into the links and come out of them. Which link a message
went into is not seen: what is heard over one is a piece of all that was said to that node.

Not verified: what was said last before a link ended; blocks.
"""

from __future__ import annotations

from keepstep.model.messages.peers import MeshMessage
from keepstep.sim.protocol.checkers.atlas import Atlas
from keepstep.sim.protocol.checkers.checker import Checker
from keepstep.sim.protocol.job.job import SimJob
from keepstep.sim.protocol.wire.links import SimLinks

Way = tuple[bytes, int, int]  # a mesh's secret, and from which node to which
Place = tuple[SimLinks, int]  # whose words, and how many of them


class AllIsHeard(Checker):
    NAME = "all is heard"

    def __init__(self, job: SimJob, atlas: Atlas) -> None:
        super().__init__(job, atlas)
        self._said: dict[Way, dict[SimLinks, list[MeshMessage]]] = {}
        # What each has heard over the present link may end at these places of what was said.
        self._places: dict[tuple[SimLinks, int], list[Place]] = {}

    def said(self, links: SimLinks, node: int, message: MeshMessage) -> None:
        if links.who is not None:
            here, secret = links.who
            self._said.setdefault((secret, here, node), {}).setdefault(links, []).append(message)

    def linked(self, links: SimLinks, node: int) -> None:
        self._places.pop((links, node), None)

    def heard(self, links: SimLinks, node: int, message: MeshMessage) -> None:
        if links.who is None:
            return
        here, secret = links.who
        said = self._said.get((secret, node, here), {})
        before = self._places.get((links, node))
        if before is None:
            before = [(one, i) for one, words in said.items() for i in range(len(words))]
        places = [
            (one, i + 1) for one, i in before if i < len(said[one]) and said[one][i] == message
        ]
        self._places[links, node] = places
        if not places:
            self.violated(
                f"machine {links.machine} hears {message.KIND} of node {node}, and something else "
                "was said before that, or nothing"
            )
