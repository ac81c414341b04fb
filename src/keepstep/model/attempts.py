"""Attempts: what the agents of a job say to each other where they meet.

Values only. An attempt is one life of all ranks: it is formed by arrivals, one a node, and closed
by one verdict. `core/recovery/rendezvous.py` makes nodes of arrivals;
`runtime/agent/meeting_record.py` carries both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from keepstep.model.bounds import Count, Length, Rank, StepNumber, Text
from keepstep.model.failure import Failure


@dataclass(frozen=True, slots=True)
class Arrival:
    """An agent that wants to take part. `token` is this life of the agent; `host`, `port` and
    `incarnation` are its keeper's; `newest_version` is the newest mesh that keeper or agent know
    of, perhaps from another start of the job (-1: none).

    `nodes`, `min_nodes` and `redundancy` must be equal everywhere; an empty one is not known.
    `node` is the number it had in the attempt before, `node_rank` the one it was asked to have.
    `stays`: some of its ranks can stay in their process.
    """

    KIND: ClassVar[str] = "arrival"
    token: Text
    host: Text
    port: Rank
    incarnation: Count
    ranks: Rank
    nodes: Rank
    min_nodes: Rank = 0
    rack: Text | None = None
    node: Rank | None = None
    node_rank: Rank | None = None
    newest_version: StepNumber = -1
    stays: bool = False
    redundancy: Text = ""

    @property
    def is_vacant(self) -> bool:
        """Whether it holds a place that stays empty in this attempt."""
        return self.ranks == 0


VACANT = Arrival(token="nobody", host="", port=0, incarnation=0, ranks=0, nodes=0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an attempt ends, the same for all its nodes.

    outcome: `again`: there will be another attempt; `stop`: the job ends with `code`, by `signum`
        where it was a signal; `done`: all ranks of all nodes ended well.
    keep: ranks that can stay in their process do; else all start anew.
    failure: why there is another attempt, when it was one.
    vacant: the nodes whose places are free for others.
    least: fewer nodes than so many do not form the next attempt.
    wait_ns: from when they hear this the nodes wait so long before they meet for the next attempt.
    """

    KIND: ClassVar[str] = "verdict"
    outcome: Literal["again", "stop", "done"]
    why: Text
    code: Rank = 0
    signum: Rank = 0
    keep: bool = False
    failure: Failure | None = None
    vacant: Annotated[tuple[Rank, ...], Length(100_000)] = ()
    least: Rank = 0
    wait_ns: Count = 0


@dataclass(frozen=True, slots=True)
class Opening:
    """What all attempts have in common. `secret`: the keepers', None where each node has one
    configured; `first_version`: of the first mesh, from the time when the nodes first met;
    `encrypt`: as configured on the node that came first."""

    KIND: ClassVar[str] = "opening"
    secret: Text | None
    first_version: Count
    encrypt: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """What failed on a node in an attempt."""

    KIND: ClassVar[str] = "failed"
    failure: Failure
