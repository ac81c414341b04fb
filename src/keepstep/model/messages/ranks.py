"""What ranks tell each other over their process group, where no agent introduces their keepers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from keepstep.model.bounds import Count, Rank, StepNumber, Text


@dataclass(frozen=True, slots=True)
class NodeHost:
    """The address at which this rank's node believes that others reach it."""

    KIND: ClassVar[str] = "host"
    host: Text


@dataclass(frozen=True, slots=True)
class NodeKeeper:
    """Where this rank's keeper listens. `fresh_secret` is for jobs that have none of their own
    (`own_secret`), which never travels. `encrypts`: what it says to other nodes' keepers.
    `mesh_version`: one that is newer than any it knows. `redundancy`: as it was told."""

    KIND: ClassVar[str] = "keeper"
    job: Text
    host: Text
    port: Rank
    incarnation: Count
    rack: Text | None
    own_secret: bool
    fresh_secret: Text
    encrypts: bool
    mesh_version: StepNumber
    redundancy: Text = ""

    @property
    def address(self) -> tuple[str, int, int]:
        """Equal for the ranks of one node, and for nobody else."""
        return (self.host, self.port, self.incarnation)
