"""What a keeper asks of its persister, and the answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from keepstep.model.bounds import Count, Length, Rank, Sentence, StepNumber
from keepstep.model.checkpoint import Timeline
from keepstep.model.messages.keeper_rank import NotUnderstood

ActName = Literal["survey", "part", "publish", "drop"]


@dataclass(frozen=True, slots=True)
class CheckpointAct:
    """One act of an attempt to write a checkpoint. `attempt` is the leader's number for it; `ranks`
    how many each node has, in the order of the nodes; `timeline` in which it is made, if known."""

    KIND: ClassVar[str] = "act"
    act: ActName
    node: Rank
    step: StepNumber
    epoch: Count
    attempt: Count
    ranks: Annotated[tuple[Rank, ...], Length(100_000)]
    timeline: Timeline | None = None


@dataclass(frozen=True, slots=True)
class ActDone:
    """`there`: the whole checkpoint has been in the store all along. `hung`: the store did not
    answer, and the persister was given up over it: said by the keeper in its stead."""

    KIND: ClassVar[str] = "done"
    ok: bool
    why: Sentence
    there: bool = False
    hung: bool = False


ToPersister = CheckpointAct | NotUnderstood
FromPersister = ActDone | NotUnderstood
