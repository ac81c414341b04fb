"""What a rank and the keeper of its node say to each other, over a unix socket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from keepstep.model.bounds import (
    Checksum,
    Count,
    Length,
    Port,
    Rank,
    Sentence,
    StepNumber,
    Text,
    WorldSize,
)
from keepstep.model.mesh import Mesh
from keepstep.model.shares import RankRun, Share
from keepstep.model.snapshot import Stamp

StateSource = Literal["memory", "store", "fresh"]

# -- a rank to its keeper; what it is told comes back to the next one


@dataclass(frozen=True, slots=True)
class JoinVote:
    """Where do we resume? `holds`: the stamps this rank has proven; `foreign_world`: its slots are
    of a job with so many ranks. `fresh`: it belongs to a run that is to start over, and has not
    begun it yet. `group`, `digests`: as in `core/resume/cut.py`, `Holding`. `doubted_from`: states
    of that step and of later ones may be wrong. `goes_on`: the present launch of the job has
    trained on what memory holds here. `shares`: what those stamps tell of what it shares."""

    KIND: ClassVar[str] = "join"
    rank: Rank
    world_size: WorldSize
    incarnation: Count
    holds: tuple[Stamp, ...]
    foreign_world: Rank | None = None
    fresh: bool = False
    group: Checksum = 0
    digests: tuple[tuple[Stamp, Checksum], ...] = ()
    doubted_from: StepNumber | None = None
    goes_on: bool = True
    shares: tuple[tuple[Stamp, Share], ...] = ()


@dataclass(frozen=True, slots=True)
class TrainingPermitted:
    """All ranks have proven the state that was offered under this number: train on from `stamp`, in
    this epoch. `lost_steps` were completed and are done again; None: nobody knows how far the job
    had come, and `lost_at_least` says what is certain."""

    KIND: ClassVar[str] = "go"
    epoch: Count
    offer: Count
    source: StateSource
    stamp: Stamp
    lost_steps: Count | None
    why: Sentence
    lost_at_least: Count = 0


@dataclass(frozen=True, slots=True)
class Attach:
    """This rank has found another keeper than the one it joined. `permitted`: what it trains by;
    None while it does not train: it is about to ask, or finds together with its peers anew."""

    KIND: ClassVar[str] = "attach"
    rank: Rank
    world_size: WorldSize
    permitted: TrainingPermitted | None = None


@dataclass(frozen=True, slots=True)
class StateLoaded:
    """The state offered under this number is loaded, and what is newer is forgotten."""

    KIND: ClassVar[str] = "loaded"
    rank: Rank
    offer: Count


@dataclass(frozen=True, slots=True)
class StateUnusable:
    """The state offered under this number cannot be used here. `unread`: the store did not say what
    it is. `brought`: what was brought to this node for it does not prove; brought anew, it may."""

    KIND: ClassVar[str] = "failed"
    rank: Rank
    offer: Count
    why: Sentence
    unread: bool = False
    brought: bool = False


@dataclass(frozen=True, slots=True)
class PageChanged:
    """This rank's status page says something new. May get lost."""

    KIND: ClassVar[str] = "changed"
    rank: Rank


@dataclass(frozen=True, slots=True)
class WantCheckpoint:
    """A checkpoint of `step`, or of a newer one; None: of the newest there is. Answered by
    `CheckpointDone` with the same `ticket`. `steps_follow`: when this step is in nobody's memory,
    the next one that all capture is waited for."""

    KIND: ClassVar[str] = "persist"
    ticket: Count
    step: StepNumber | None
    why: Sentence
    steps_follow: bool = False


@dataclass(frozen=True, slots=True)
class Goodbye:
    """This rank ends, well or with an error."""

    KIND: ClassVar[str] = "bye"
    rank: Rank
    ok: bool
    why: Sentence


SeenText = Annotated[str, Length(12_000)]  # core/numbers/told_sight.py


@dataclass(frozen=True, slots=True)
class HaltWord:
    """About all ranks standing behind one step, from one of them (core/numbers/halt.py). `turn`: 0
    in front of the step's body, 1 behind it. `seen`: what it has seen, where it stands there."""

    KIND: ClassVar[str] = "halt"
    rank: Rank
    world_size: WorldSize
    epoch: Count
    step: StepNumber
    turn: Count
    says: Literal["asks", "stands", "agrees", "leaves"]
    seen: SeenText = ""


# -- a keeper to its ranks


@dataclass(frozen=True, slots=True)
class HaltOrder:
    """To all ranks. halt: stand there, who is not past it. tell: what ranks from `first` on have
    seen; who knows it of all agrees. go: all have agreed. void: nobody stands there any more."""

    KIND: ClassVar[str] = "halt-order"
    epoch: Count
    step: StepNumber
    turn: Count
    orders: Literal["halt", "tell", "go", "void"]
    seen: tuple[SeenText, ...] = ()
    first: Rank = 0
    why: Sentence = ""


@dataclass(frozen=True, slots=True)
class StateOffered:
    """Load this, prove it, forget what is newer, and say how that went. `step` is -1 for a fresh
    start. `keeps_newer`: what is newer is forgotten when all may go, not now. `replicas`: the ranks
    of several nodes that share it, this one among them, and may go on so; empty where there are
    none, and None where ranks that shared a later step were not equal in it."""

    KIND: ClassVar[str] = "offer"
    offer: Count
    source: StateSource
    step: StepNumber
    epoch: Count
    why: Sentence
    keeps_newer: bool = False
    replicas: tuple[RankRun, ...] | None = ()


@dataclass(frozen=True, slots=True)
class VoteRefused:
    """Nobody may train: a person has to decide. `is_final`: whoever asks again hears the same, so
    that a restart would be in vain. Then the agent hears it too."""

    KIND: ClassVar[str] = "refused"
    why: Sentence
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class VoteDelayed:
    """All wait, and for what."""

    KIND: ClassVar[str] = "delayed"
    why: Sentence


@dataclass(frozen=True, slots=True)
class CheckpointDone:
    """How a checkpoint that was asked for has ended: what `job.persist(...)` resolves to.

    `ticket`: which question this answers. `ok`: whether the checkpoint is in the store. `step`: of
    the checkpoint that answers the question, if there is one. `why`: one sentence.
    """

    KIND: ClassVar[str] = "persisted"
    ticket: Count
    ok: bool
    step: StepNumber | None
    why: Sentence


@dataclass(frozen=True, slots=True)
class SlotDamaged:
    """Scrubbing has found a slot of this rank that no longer proves."""

    KIND: ClassVar[str] = "damaged"
    slot: Rank
    why: Sentence


@dataclass(frozen=True, slots=True)
class Released:
    """The goodbye was heard."""

    KIND: ClassVar[str] = "released"


# -- a rank or an agent to its keeper, and the answers


@dataclass(frozen=True, slots=True)
class Listen:
    """Listen to the keepers of other nodes at this address; port 0: at any free one. `after`: the
    incarnation of the keeper before, which this one's is to be newer than, whatever the clock
    says."""

    KIND: ClassVar[str] = "listen"
    host: Text
    port: Port
    after: Count = 0


@dataclass(frozen=True, slots=True)
class Listening:
    """Where the keeper listens, which life of it, and the newest mesh it knows (-1: none), with the
    node's number in that (None: in none)."""

    KIND: ClassVar[str] = "listening"
    host: Text
    port: Port
    incarnation: Count
    mesh_version: StepNumber
    node: Rank | None = None


@dataclass(frozen=True, slots=True)
class CannotListen:
    """The address is not this node's, or it is taken."""

    KIND: ClassVar[str] = "cannot-listen"
    why: Sentence


@dataclass(frozen=True, slots=True)
class BeginMesh:
    """The nodes of the job, from now on."""

    KIND: ClassVar[str] = "mesh"
    mesh: Mesh


@dataclass(frozen=True, slots=True)
class AreYouThere:
    """Who waits for the keeper has heard nothing of it for a while."""

    KIND: ClassVar[str] = "are-you-there"


@dataclass(frozen=True, slots=True)
class StillHere:
    """Answers `AreYouThere`, at once."""

    KIND: ClassVar[str] = "still-here"


@dataclass(frozen=True, slots=True)
class CountTraffic:
    """How much has crossed the keeper's links?"""

    KIND: ClassVar[str] = "count"


@dataclass(frozen=True, slots=True)
class TrafficCounted:
    """What has crossed and what was refused, by name."""

    KIND: ClassVar[str] = "counts"
    counts: Annotated[dict[str, Count], Length(1000)]


# -- anybody to anybody


@dataclass(frozen=True, slots=True)
class NotUnderstood:
    """A message that came was none: perhaps the other side is another release of keepstep."""

    KIND: ClassVar[str] = "not-understood"
    why: Sentence


FromRank = (
    JoinVote
    | Attach
    | StateLoaded
    | StateUnusable
    | PageChanged
    | WantCheckpoint
    | HaltWord
    | Goodbye
    | Listen
    | BeginMesh
    | AreYouThere
    | CountTraffic
    | NotUnderstood
)
ToRank = (
    StateOffered
    | TrainingPermitted
    | VoteRefused
    | VoteDelayed
    | CheckpointDone
    | HaltOrder
    | SlotDamaged
    | Released
    | Listening
    | CannotListen
    | StillHere
    | TrafficCounted
    | NotUnderstood
)
