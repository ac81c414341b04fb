"""What an agent and the processes of its node say to each other, over a unix socket: its ranks, and
the process that stands by to become one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from keepstep.model.bounds import Count, Length, LongText, Port, Rank, Sentence, Text
from keepstep.model.messages.keeper_rank import NotUnderstood

# -- a rank to its agent


@dataclass(frozen=True, slots=True)
class RankHere:
    """This connection is that rank's, which has its state and begins to train."""

    KIND: ClassVar[str] = "rank"
    rank: Rank
    pid: Rank


@dataclass(frozen=True, slots=True)
class CanStay:
    """This rank can stay in its process when a peer is lost."""

    KIND: ClassVar[str] = "able"
    rank: Rank


@dataclass(frozen=True, slots=True)
class CannotStay:
    """It cannot after all: it ends, or its loop is over."""

    KIND: ClassVar[str] = "unable"
    rank: Rank


@dataclass(frozen=True, slots=True)
class Regrouped:
    """This rank is among its peers again, or for the first time, and trains."""

    KIND: ClassVar[str] = "regrouped"
    rank: Rank


@dataclass(frozen=True, slots=True)
class TrainingEnded:
    """The training has ended well; only the end of the process is left."""

    KIND: ClassVar[str] = "ended"
    rank: Rank


@dataclass(frozen=True, slots=True)
class ConnectionSuspect:
    """A connection to a peer failed, and nobody has said why. It does not say that any rank is
    lost. May get lost itself."""

    KIND: ClassVar[str] = "suspect"
    rank: Rank
    why: Sentence


# -- a process that stands by, to its agent


@dataclass(frozen=True, slots=True)
class StandbyReady:
    """This process has imported torch and can become a rank. `unbuilt`: what it was to build ahead
    and could not; empty: nothing."""

    KIND: ClassVar[str] = "standby"
    pid: Rank
    unbuilt: Sentence = ""


# -- an agent to its ranks


@dataclass(frozen=True, slots=True)
class PeerLostNotice:
    """A peer is lost: end every collective, give the step up, wait for `RegroupAt`."""

    KIND: ClassVar[str] = "lost"
    why: Sentence


@dataclass(frozen=True, slots=True)
class RegroupAt:
    """Where the ranks of the job's next attempt meet."""

    KIND: ClassVar[str] = "regroup"
    attempt: Count
    host: Text
    port: Port


# -- an agent to the process that stands by


@dataclass(frozen=True, slots=True)
class BecomeRank:
    """Run this command, in this environment."""

    KIND: ClassVar[str] = "become"
    command: Annotated[tuple[LongText, ...], Length(1000)]
    environ: Annotated[dict[str, LongText], Length(1000)]


FromProcess = (
    RankHere
    | CanStay
    | CannotStay
    | Regrouped
    | TrainingEnded
    | ConnectionSuspect
    | StandbyReady
    | NotUnderstood
)
ToProcess = PeerLostNotice | RegroupAt | BecomeRank | NotUnderstood
