"""Watching: what a run tells those who judge it.

`Watch` hands each thing that happens to the checkers that want to hear of it. A checker looks and
never acts: a run goes the same way with it and without it. What a checker finds wrong ends the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keepstep.model.events import Event
from keepstep.model.mesh import Mesh
from keepstep.model.messages.peers import MeshMessage
from keepstep.model.snapshot import Stamp

if TYPE_CHECKING:
    from keepstep.sim.protocol.agents import Agent
    from keepstep.sim.protocol.job import Job
    from keepstep.sim.protocol.links import SimLinks
    from keepstep.sim.protocol.machine import Machine
    from keepstep.sim.protocol.trainer import Rank


class Checker:
    """One property. Overrides what it wants to hear."""

    name = ""

    def __init__(self, job: Job) -> None:
        self.job = job

    def violated(self, what: str) -> None:
        self.job.violate(self.name, what)

    def joined(self, rank: Rank) -> None:
        """A rank asks where to resume."""

    def loaded(self, rank: Rank, source: str, stamp: Stamp, state: bytes) -> None:
        """A rank has loaded, proven, and forgotten what is newer."""

    def went(self, rank: Rank, source: str, stamp: Stamp, epoch: int) -> None:
        """A rank may train."""

    def stepped(self, rank: Rank, step: int) -> None:
        """A rank has completed a step."""

    def done(self, rank: Rank) -> None:
        """A rank has done its last step."""

    def skipped(self, rank: Rank, step: int) -> None:
        """It is not captured."""

    def overwrites(self, rank: Rank, stamp: Stamp) -> None:
        """A rank gives a snapshot of its own up for a new one."""

    def sealed(self, rank: Rank, stamp: Stamp) -> None:
        """It is."""

    def asked(self, rank: Rank, ticket: int) -> None:
        """A rank wants a checkpoint."""

    def killed(self, agent: Agent, rank: Rank, why: str) -> None:
        """By its agent."""

    def agent_came(self, agent: Agent) -> None:
        """Another life of an agent."""

    def agent_ends(self, agent: Agent, ok: bool, why: str) -> None:
        """The job is over here."""

    def formed(self, agent: Agent, number: int, mesh: Mesh) -> None:
        """A round begins on that machine."""

    def said(self, links: SimLinks, node: int, message: MeshMessage) -> None:
        """From one keeper to another."""

    def written(self, key: str, value: str) -> None:
        """Where agents meet."""

    def journal(self, machine: Machine, event: Event) -> None:
        """A keeper has decided something."""

    def struck(self, what: str) -> None:
        """The nemesis has done something."""

    def over(self) -> None:
        """The job has ended, and everything of ours with it."""


class Watch:
    """Each of a checker's methods, for all checkers that have it."""

    joined: Callable[..., None]
    loaded: Callable[..., None]
    went: Callable[..., None]
    stepped: Callable[..., None]
    done: Callable[..., None]
    skipped: Callable[..., None]
    overwrites: Callable[..., None]
    sealed: Callable[..., None]
    asked: Callable[..., None]
    killed: Callable[..., None]
    agent_came: Callable[..., None]
    agent_ends: Callable[..., None]
    formed: Callable[..., None]
    said: Callable[..., None]
    written: Callable[..., None]
    journal: Callable[..., None]
    struck: Callable[..., None]
    over: Callable[..., None]

    def __init__(self, checkers: list[Checker]) -> None:
        self.checkers = checkers
        for name in Watch.__annotations__:
            methods = [
                getattr(c, name)
                for c in checkers
                if getattr(type(c), name) is not getattr(Checker, name)
            ]
            setattr(self, name, _all(methods))


def _all(methods: list[Callable[..., None]]) -> Callable[..., None]:
    if len(methods) == 1:
        return methods[0]

    def call(*args: Any) -> None:
        for method in methods:
            method(*args)

    return call
