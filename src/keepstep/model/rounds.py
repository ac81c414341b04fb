"""Rounds: what the agents of a job say to each other where they meet.

Values only. A round is one life of all ranks: it is formed by arrivals, one a node, and closed by
one verdict. `core/recovery/rendezvous.py` makes nodes of arrivals; `edge/torch/rendezvous.py`
carries both.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from keepstep.model.failure import Failure, failure_from_json


@dataclass(frozen=True, slots=True)
class Arrival:
    """An agent that wants to be in the round. `token` is this life of the agent; `host`, `port`,
    `incarnation` are its keeper's, and `newest_round` is the newest that keeper or agent know of,
    perhaps from another start of the job.

    `nodes`, `least_nodes` and `own_secret` (one was configured; it never travels) must be equal
    everywhere. `node` is the id it had in the round before, `node_rank` the one it was asked to
    have.
    """

    token: str
    host: str
    port: int
    incarnation: int
    ranks: int
    nodes: int
    least_nodes: int = 0
    own_secret: bool = False
    rack: str | None = None
    node: int | None = None
    node_rank: int | None = None
    newest_round: int = -1

    @property
    def is_nobody(self) -> bool:
        """Whether it holds a place that stays empty in this round."""
        return self.ranks == 0

    def to_text(self) -> str:
        return json.dumps(asdict(self))


NOBODY = Arrival("nobody", "", 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a round ends, the same for all its nodes.

    `again`: there will be another round; `failure` is why, when it was one; `keep` when ranks that
    can stay in their process do, else all start anew; `vacant` are the nodes whose places are free
    for others. `stop`: the job ends with `code`, by `signum` where it was a signal. `done`: all
    ranks of all nodes ended well.
    """

    kind: Literal["again", "stop", "done"]
    why: str
    code: int = 0
    signum: int = 0
    keep: bool = False
    failure: Failure | None = None
    vacant: tuple[int, ...] = ()

    def to_text(self) -> str:
        return json.dumps(asdict(self))


def arrival_from_text(text: str) -> Arrival:
    """The inverse of `Arrival.to_text`."""
    return Arrival(**json.loads(text))


def verdict_from_text(text: str) -> Verdict:
    """The inverse of `Verdict.to_text`."""
    said = json.loads(text)
    failure = None if said["failure"] is None else failure_from_json(said["failure"])
    return Verdict(**{**said, "failure": failure, "vacant": tuple(said["vacant"])})
