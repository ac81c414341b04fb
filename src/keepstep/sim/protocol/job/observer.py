"""Observers: what a run tells those who judge it.

`Observers` hands each thing that happens to those who want to hear of it. An observer looks and
never acts: a run goes the same way with it and without it. Everything that is told was seen at a
port: a message that was sent, a page that was written, a process that ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keepstep.model.events import Event
from keepstep.model.mesh import Mesh
from keepstep.model.messages.peers import MeshMessage
from keepstep.model.snapshot import Phase, Stamp
from keepstep.sim.protocol.job.program import Program
from keepstep.sim.protocol.wire.links import SimLinks
from keepstep.sim.protocol.world.machine import Machine
from keepstep.sim.protocol.world.world import Process


class Observer:
    """Overrides what it wants to hear."""

    def joined(self, program: Program) -> None:
        """A rank asks where to resume."""

    def loaded(self, program: Program, source: str, stamp: Stamp) -> None:
        """A rank has loaded and proven what was offered; its live state is that."""

    def went(self, program: Program, source: str, stamp: Stamp, epoch: int) -> None:
        """A rank may train in this epoch, from that state on."""

    def announced(self, program: Program, phase: Phase, step: int) -> None:
        """A rank does this now."""

    def stepped(self, program: Program, step: int) -> None:
        """A rank has completed a step."""

    def halted(self, program: Program, step: int, is_taken_back: bool | None) -> None:
        """A rank has stood behind a step that was in doubt, and knows what is done about it; None:
        not all stood there."""

    def done(self, program: Program) -> None:
        """A rank has done its last step."""

    def overwrites(self, program: Program, stamp: Stamp) -> None:
        """A rank that trains gives a snapshot of its own up for a new one."""

    def sealed(self, program: Program, stamp: Stamp) -> None:
        """It is."""

    def killed(self, process: Process) -> None:
        """A rank, by its agent."""

    def agent_came(self, machine: Machine) -> None:
        """Another life of an agent."""

    def agent_ended(self, machine: Machine, exit_code: int) -> None:
        """The job is over on that machine."""

    def formed(self, machine: Machine, mesh: Mesh) -> None:
        """The keeper of that machine is told of a mesh."""

    def said(self, links: SimLinks, node: int, message: MeshMessage) -> None:
        """From one keeper to another."""

    def linked(self, links: SimLinks, node: int) -> None:
        """A keeper has another link with that node than before."""

    def heard(self, links: SimLinks, node: int, message: MeshMessage) -> None:
        """By one keeper from another."""

    def written(self, key: str, value: str) -> None:
        """In the memory that all agents share."""

    def removed(self, process: Process, path: str) -> None:
        """A file of the store is about to be."""

    def recorded(self, machine: Machine, event: Event) -> None:
        """In a journal."""

    def struck(self, what: str) -> None:
        """Something has gone wrong."""

    def damaged(self, machine: Machine, rank: int, stamp: Stamp) -> None:
        """A bit flipped in a sealed snapshot, copy or parity."""

    def over(self) -> None:
        """The job has ended, and everything of ours with it."""


class Observers:
    """Each of an observer's methods, for all observers that have it."""

    joined: Callable[[Program], None]
    loaded: Callable[[Program, str, Stamp], None]
    went: Callable[[Program, str, Stamp, int], None]
    announced: Callable[[Program, Phase, int], None]
    stepped: Callable[[Program, int], None]
    halted: Callable[[Program, int, bool | None], None]
    done: Callable[[Program], None]
    overwrites: Callable[[Program, Stamp], None]
    sealed: Callable[[Program, Stamp], None]
    killed: Callable[[Process], None]
    agent_came: Callable[[Machine], None]
    agent_ended: Callable[[Machine, int], None]
    formed: Callable[[Machine, Mesh], None]
    said: Callable[[SimLinks, int, MeshMessage], None]
    linked: Callable[[SimLinks, int], None]
    heard: Callable[[SimLinks, int, MeshMessage], None]
    written: Callable[[str, str], None]
    removed: Callable[[Process, str], None]
    recorded: Callable[[Machine, Event], None]
    struck: Callable[[str], None]
    damaged: Callable[[Machine, int, Stamp], None]
    over: Callable[[], None]

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._heard: set[str] = set()
        for name in Observers.__annotations__:
            own = getattr(Observer, name)
            methods = [getattr(o, name) for o in observers if getattr(type(o), name) is not own]
            setattr(self, name, _all(methods))
            if methods:
                self._heard.add(name)

    def wants(self, name: str) -> bool:
        """Whether anybody hears of that."""
        return name in self._heard


def _all(methods: list[Callable[..., None]]) -> Callable[..., None]:
    if len(methods) == 1:
        return methods[0]

    def call(*arguments: Any) -> None:
        for method in methods:
            method(*arguments)

    return call
