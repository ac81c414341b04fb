"""What the keepers of different nodes say to each other, over their links.

A `MeshMessage` is about one mesh and says its version: one of an older mesh is dropped, one of a
mesh that is not known yet waits until it is. `LinkStreams` and `LinkGoodbye` are the link's own and
go no further; what else the ends of a link tell each other is no message but a `Signal`
(`model/wire.py`).

Rows that come by the thousand (a rank in a report, a snapshot in an inventory) are named tuples,
which cross as lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

from keepstep.model.bounds import (
    U32,
    ByteCount,
    Checksum,
    Count,
    HostName,
    Length,
    Port,
    Range,
    Rank,
    Sentence,
    StepNumber,
    Text,
    WorldSize,
)
from keepstep.model.links import LinkRow
from keepstep.model.messages.keeper_rank import (
    HaltOrder,
    HaltWord,
    StateLoaded,
    StateSource,
    StateUnusable,
    TrainingPermitted,
    VoteDelayed,
    VoteRefused,
)
from keepstep.model.messages.persister import ActName
from keepstep.model.replicas import ReplicaDifference
from keepstep.model.restore_sources import (
    HeldParity,
    HeldShare,
    HeldSnapshot,
    RestoreSource,
    SharedSources,
)
from keepstep.model.shares import Share, ShareClass, blocks_of
from keepstep.model.snapshot import Stamp
from keepstep.model.units import PAGE_BYTES
from keepstep.model.wire import (
    MAX_ADDENDS,
    MAX_ADDRESSES,
    MAX_BLOCK_BYTES,
    MAX_STREAMS,
    BlockRange,
)

Bitmap = Annotated[str, Length(2 * PAGE_BYTES)]  # of blocks, as a slot's header has room for it

# -- to the leader: what a node has


@dataclass(frozen=True, slots=True)
class InventoryReport:
    """What this node has proven of what it holds for others, or keeps of ranks that have moved."""

    KIND: ClassVar[str] = "inventory"
    mesh_version: Count
    snapshots: tuple[HeldSnapshot, ...]
    parities: tuple[HeldParity, ...]
    shares: tuple[HeldShare, ...] = ()


class RanksReport(NamedTuple):
    """The snapshots of each of these ranks, which are alike: sealed, being written, and proven by
    all their holders; and the newest step about which the rank has decided. `group`, `digests`,
    `shares`, `plan`: of what other ranks have, too (`core/resume/cut.py`, `Holding`)."""

    ranks: tuple[Rank, ...]
    sealed: tuple[Stamp, ...]
    pending: Stamp | None
    decided_step: StepNumber
    protected: tuple[Stamp, ...]
    group: Checksum = 0
    digests: tuple[tuple[Stamp, Checksum], ...] = ()
    shares: tuple[tuple[Stamp, Share], ...] = ()
    plan: Checksum = 0


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What the ranks of this node hold in `epoch`.

    `committed`, `target`, `inherited`: as in the last `HorizonWord` that this node has heard.
    `snapshot_bytes`: of all its ranks' snapshots of one step; `free_bytes`: of its memory.
    `span_steps`: so many steps the captures of its slowest rank take.
    `policy`: that this node follows, auto before it knows one; `hindered`: what keeps it from being
    followed, empty when nothing does.
    """

    KIND: ClassVar[str] = "report"
    mesh_version: Count
    epoch: Count
    committed: Stamp | None
    target: Stamp | None
    inherited: Stamp | None
    snapshot_bytes: Count
    free_bytes: Count
    hindered: Sentence
    ranks: tuple[RanksReport, ...]
    span_steps: Count = 1
    policy: Text = "auto"


@dataclass(frozen=True, slots=True)
class LinkReport:
    """How fast this node's copies went to other nodes since it last said so."""

    KIND: ClassVar[str] = "links"
    mesh_version: Count
    rows: tuple[LinkRow, ...]


@dataclass(frozen=True, slots=True)
class RanksEnded:
    """All ranks of this node ended well."""

    KIND: ClassVar[str] = "ended"
    mesh_version: Count


# -- from the leader to all


@dataclass(frozen=True, slots=True)
class HorizonWord:
    """What everybody may rely on (`model/horizon.py`), which policy holds, and why that one."""

    KIND: ClassVar[str] = "horizon"
    mesh_version: Count
    epoch: Count
    policy: Text
    why: Sentence
    committed: Stamp | None
    target: Stamp | None
    inherited: Stamp | None
    alive: tuple[Stamp, ...]
    decided_step: StepNumber
    period_steps: Count = 1
    agreed_steps: Count = 0
    difference: ReplicaDifference | None = None


@dataclass(frozen=True, slots=True)
class SharesWord:
    """Which ranks are replicas, on whichever nodes (`core/redundancy/share_classes.py`)."""

    KIND: ClassVar[str] = "shares"
    mesh_version: Count
    epoch: Count
    classes: tuple[ShareClass, ...]


class NodeRange(NamedTuple):
    """Nodes from `first` to `last`."""

    first: Rank
    last: Rank


class CriticalNode(NamedTuple):
    """A node, and the nodes whose snapshots would go with it."""

    node: Rank
    owners: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class SafetyWord:
    """Which nodes may be lost; only exceptions are named (`core/redundancy/node_safety.py`).

    `step`: of the snapshots that this is about, -1 when there are none. `apart`: nodes that are not
    linked with the leader. `alone`: nodes with which their own snapshots would go, and nobody
    else's. `any_nodes`: so many may be lost, whichever they are; -1 when something is out of reach.
    """

    KIND: ClassVar[str] = "safety"
    mesh_version: Count
    policy: Text
    policy_why: Sentence
    step: StepNumber
    is_committed: bool
    apart: tuple[NodeRange, ...]
    alone: tuple[NodeRange, ...]
    critical: tuple[CriticalNode, ...]
    out_of_reach: tuple[NodeRange, ...]
    any_nodes: Annotated[int, Range(-1, U32)]
    why: Sentence


@dataclass(frozen=True, slots=True)
class AllEnded:
    """The ranks of all nodes ended well."""

    KIND: ClassVar[str] = "over"
    mesh_version: Count


# -- the owner of a snapshot and a holder of its redundancy


@dataclass(frozen=True, slots=True)
class CopyOffer:
    """The owner asks a holder to keep a copy of this snapshot; with a `stripe_group`, to add it to
    the parity that the holder's member of that group keeps.

    `floor`: what is older may be overwritten, as far as the owner knows. `lacking`: the blocks that
    ranks of the owner's node keep for this one, and that are not sent (`SlotHeader.lacking`), in
    hexadecimal.
    """

    KIND: ClassVar[str] = "offer"
    mesh_version: Count
    rank: Rank
    stamp: Stamp
    payload_bytes: ByteCount
    capacity_bytes: ByteCount
    manifest_bytes: ByteCount
    manifest_capacity_bytes: ByteCount
    table_checksum: Checksum
    stripe_group: tuple[Rank, ...]
    tolerates: Rank
    floor: Stamp | None
    lacking: Bitmap = ""

    @property
    def lacks(self) -> frozenset[int]:
        """The same, by their numbers. Raises ValueError."""
        return blocks_of(bytes.fromhex(self.lacking))


@dataclass(frozen=True, slots=True)
class CopyAccepted:
    """Send it."""

    KIND: ClassVar[str] = "accept"
    mesh_version: Count
    rank: Rank
    stamp: Stamp


@dataclass(frozen=True, slots=True)
class CopyDeclined:
    """There is no memory for it here. Said once."""

    KIND: ClassVar[str] = "decline"
    mesh_version: Count
    rank: Rank
    stamp: Stamp
    why: Sentence


@dataclass(frozen=True, slots=True)
class CopyAcked:
    """The holder has its part whole, and has proven it."""

    KIND: ClassVar[str] = "ack"
    mesh_version: Count
    rank: Rank
    stamp: Stamp


@dataclass(frozen=True, slots=True)
class CopyUnavailable:
    """The holder has not got it whole, or has it no more; or a source cannot give it."""

    KIND: ClassVar[str] = "nack"
    mesh_version: Count
    rank: Rank
    stamp: Stamp
    why: Sentence


@dataclass(frozen=True, slots=True)
class FetchRanges:
    """Send these bytes of a snapshot, as blocks. `restores`: not for a copy that is on its way, but
    by who restores, or writes a checkpoint."""

    KIND: ClassVar[str] = "fetch"
    mesh_version: Count
    rank: Rank
    stamp: Stamp
    ranges: tuple[BlockRange, ...]
    restores: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotUnproven:
    """To who gave it, or to all that gave some where that is not known: what came of this snapshot
    does not prove. Who gave it looks at what rests there, or would offer it again and again."""

    KIND: ClassVar[str] = "unproven"
    mesh_version: Count
    rank: Rank
    stamp: Stamp


class Addend(NamedTuple):
    """A piece of a codeword, on the node that has it, and how often it counts in a sum of a code
    over 256 elements. `range`: of what that rank keeps (`Part.KEPT`, `Part.PARITY`)."""

    node: Rank
    rank: Rank
    range: BlockRange
    coefficient: Annotated[int, Range(1, 255)]


@dataclass(frozen=True, slots=True)
class AddUp:
    """Send the sum of these as one block of `Part.SUM`, `nbytes` long; what is shorter continues as
    zeros. `number`: of the asker's, no other of which is the same."""

    KIND: ClassVar[str] = "add-up"
    mesh_version: Count
    number: Count
    stamp: Stamp
    nbytes: Annotated[int, Range(1, MAX_BLOCK_BYTES)]
    addends: Annotated[tuple[Addend, ...], Length(MAX_ADDENDS)]


@dataclass(frozen=True, slots=True)
class NoSum:
    """What that number asks for cannot be added up here."""

    KIND: ClassVar[str] = "no-sum"
    mesh_version: Count
    number: Count
    why: Sentence


# -- the vote about the state from which all resume (core/resume/vote.py); what a rank says of an
# offer, and what it is told in the end, crosses as it is, and so does what is said about a halt


@dataclass(frozen=True, slots=True)
class RankJoined:
    """To the leader: a rank asks where to resume.

    `holds`: the stamps it has proven. `foreign_world`: its slots are of a job with so many ranks.
    `completed_step`: how far its last life had come; `failed`: whether that told of an error.
    `epoch`: the newest that its node knows. `fresh`: its run is to start over. `group`, `digests`,
    `doubted_from`, `goes_on`, `shares`: as in `JoinVote`.
    """

    KIND: ClassVar[str] = "join"
    rank: Rank
    world_size: WorldSize
    incarnation: Count
    holds: tuple[Stamp, ...]
    foreign_world: Rank | None
    completed_step: Count | None
    epoch: Count
    failed: bool
    fresh: bool = False
    group: Checksum = 0
    digests: tuple[tuple[Stamp, Checksum], ...] = ()
    doubted_from: StepNumber | None = None
    goes_on: bool = True
    shares: tuple[tuple[Stamp, Share], ...] = ()


@dataclass(frozen=True, slots=True)
class RankGone:
    """To the leader: a rank that had asked is gone."""

    KIND: ClassVar[str] = "left"
    rank: Rank


@dataclass(frozen=True, slots=True)
class RanksTrain:
    """To the leader: it may be another one than that which permitted this, and others may wait for
    the same permission."""

    KIND: ClassVar[str] = "train"
    permitted: TrainingPermitted


@dataclass(frozen=True, slots=True)
class OfferWord:
    """To all: load this state. `sources`: where ranks that lack it fetch it from. `keeps_newer`:
    what is newer in memory is forgotten when all may go, not now. `shared`: ranks that share it
    over nodes. `had_differed`: at a later step than this one those who shared it were not
    equal."""

    KIND: ClassVar[str] = "offer"
    offer: Count
    source: StateSource
    stamp: Stamp
    why: Sentence
    sources: tuple[RestoreSource, ...]
    keeps_newer: bool = False
    shared: tuple[SharedSources, ...] = ()
    had_differed: bool = False


VoteToLeader = RankJoined | RankGone | StateLoaded | StateUnusable | RanksTrain | HaltWord
VoteToAll = OfferWord | TrainingPermitted | VoteRefused | VoteDelayed | HaltOrder
VoteBody = VoteToLeader | VoteToAll


@dataclass(frozen=True, slots=True)
class VoteWord:
    """A word of the vote."""

    KIND: ClassVar[str] = "vote"
    mesh_version: Count
    body: VoteBody


# -- writing checkpoints (runtime/keeper/checkpointing.py)


@dataclass(frozen=True, slots=True)
class CheckpointAsked:
    """To the leader: a rank of this node wants a checkpoint of `step`, or of a newer one; None: of
    the newest there is. `steps_follow`: as in `WantCheckpoint`."""

    KIND: ClassVar[str] = "ask"
    ticket: Count
    step: StepNumber | None
    why: Sentence
    steps_follow: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointAnswer:
    """From the leader: what became of that. `step`: of the checkpoint that answers it."""

    KIND: ClassVar[str] = "answer"
    ticket: Count
    ok: bool
    step: StepNumber | None
    why: Sentence


@dataclass(frozen=True, slots=True)
class ActOrdered:
    """From the leader: carry this act out, for that attempt. is_urgent: somebody waits for it."""

    KIND: ClassVar[str] = "order"
    act: ActName
    stamp: Stamp
    attempt: Count
    is_urgent: bool = False


@dataclass(frozen=True, slots=True)
class ActAnswer:
    """To the leader: how that went. `hung`: as in `ActDone`."""

    KIND: ClassVar[str] = "done"
    act: ActName
    attempt: Count
    ok: bool
    why: Sentence
    hung: bool = False


CheckpointBody = CheckpointAsked | CheckpointAnswer | ActOrdered | ActAnswer


@dataclass(frozen=True, slots=True)
class CheckpointWord:
    """A word about writing a checkpoint."""

    KIND: ClassVar[str] = "checkpoint"
    mesh_version: Count
    body: CheckpointBody


# -- the link's own


class KeeperAddress(NamedTuple):
    """Where a keeper listens."""

    host: HostName
    port: Port


@dataclass(frozen=True, slots=True)
class LinkStreams:
    """Over how many streams this side sends its blocks, and all addresses at which it is reached,
    the one that is known first. Who dials sees to it that there are so many."""

    KIND: ClassVar[str] = "streams"
    streams: Annotated[int, Range(1, MAX_STREAMS)]
    addresses: Annotated[tuple[KeeperAddress, ...], Length(MAX_ADDRESSES)]


@dataclass(frozen=True, slots=True)
class LinkGoodbye:
    """The last message of a keeper that ends."""

    KIND: ClassVar[str] = "bye"
    reason: Sentence


SnapshotMessage = (
    CopyOffer
    | CopyAccepted
    | CopyDeclined
    | CopyAcked
    | CopyUnavailable
    | FetchRanges
    | SnapshotUnproven
)


@dataclass(frozen=True, slots=True)
class SeveralMessages:
    """What was said about several snapshots at one time, in order."""

    KIND: ClassVar[str] = "several"
    mesh_version: Count
    messages: tuple[SnapshotMessage, ...]


MeshMessage = (
    InventoryReport
    | NodeReport
    | LinkReport
    | RanksEnded
    | HorizonWord
    | SharesWord
    | SafetyWord
    | AllEnded
    | SnapshotMessage
    | SeveralMessages
    | AddUp
    | NoSum
    | VoteWord
    | CheckpointWord
)
KeeperMessage = MeshMessage | LinkStreams | LinkGoodbye
