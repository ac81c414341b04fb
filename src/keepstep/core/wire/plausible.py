"""Plausible: what a message must satisfy beside its own fields, for the mesh it speaks of.

Comes in: a message that decoded. Goes out: why nobody can mean it, or nothing. A keeper refuses
such a message as it refuses one that does not decode: it comes from another release, or from a
mistake of ours, and it must not end a process.

Checked is what would break its receiver: ranks and nodes that are not there, sizes that contradict
each other, words that only the leader may say. Whether a message is true is another matter.
"""

from __future__ import annotations

from collections.abc import Iterable

from keepstep.model.mesh import LEADER, Mesh
from keepstep.model.messages.keeper_agent import FromAgent
from keepstep.model.messages.keeper_rank import (
    Attach,
    BeginMesh,
    FromRank,
    HaltOrder,
    HaltWord,
    JoinVote,
    StateLoaded,
    StateUnusable,
    TrainingPermitted,
    VoteDelayed,
    VoteRefused,
)
from keepstep.model.messages.peers import (
    ActOrdered,
    AddUp,
    AllEnded,
    CheckpointAnswer,
    CheckpointWord,
    CopyAccepted,
    CopyAcked,
    CopyOffer,
    FetchRanges,
    HorizonWord,
    InventoryReport,
    LinkReport,
    MeshMessage,
    NodeReport,
    NoSum,
    OfferWord,
    RankGone,
    RankJoined,
    RanksTrain,
    SafetyWord,
    SeveralMessages,
    SharesWord,
    VoteBody,
    VoteWord,
)
from keepstep.model.restore_sources import RestoreSource
from keepstep.model.shares import RankRun
from keepstep.model.wire import Part

MIN_SECRET_BYTES = 16


def flaw_of_local(message: FromRank | FromAgent, mesh: Mesh | None) -> str:
    """Why nobody on this node can mean this; "" when somebody may. `mesh`: None in a job of one
    node, or before the first mesh."""
    match message:
        case JoinVote() | Attach() | HaltWord():
            return _flaw_of_rank(message.rank, message.world_size, mesh)
        case BeginMesh():
            return _flaw_of_mesh(message.mesh)
        case _:
            return ""


def flaw_of_peer(node: int, message: MeshMessage, mesh: Mesh) -> str:
    """Why that node's keeper cannot mean this; "" when it may."""
    match message:
        case SeveralMessages(version, messages):
            # what each of them says is judged when its turn comes
            is_of_mesh = all(one.mesh_version == version for one in messages)
            return "" if is_of_mesh else f"messages of other meshes in one of mesh {version}"
        case CopyOffer():
            return _flaw_of_offer(node, message, mesh)
        case CopyAccepted() | CopyAcked() | FetchRanges() | NoSum():
            return ""
        case AddUp():
            return _flaw_of_sum(message, mesh)
        case HorizonWord() | SafetyWord() | AllEnded():
            return _unless_leading(node)
        case SharesWord():
            runs = [run for each in message.classes for run in each.runs]
            return _unless_leading(node) or _flaw_of_runs(runs, mesh)
        case NodeReport():
            return _unless_there([rank for row in message.ranks for rank in row.ranks], node, mesh)
        case LinkReport():
            there = set(range(len(mesh.members))) - {node}
            odd = [row.node for row in message.rows if row.node not in there]
            return f"expected other nodes of the mesh, found {odd[0]}" if odd else ""
        case InventoryReport():
            for parity in message.parities:
                if flaw := _flaw_of_group(parity.stripe_group, parity.rank, parity.tolerates):
                    return flaw
            return ""
        case VoteWord():
            return _flaw_of_vote(node, message.body, mesh)
        case CheckpointWord():
            is_leaders = isinstance(message.body, (ActOrdered, CheckpointAnswer))
            return _unless_leading(node) if is_leaders else ""
        case _:
            return ""


def _flaw_of_rank(rank: int, world_size: int, mesh: Mesh | None) -> str:
    if rank >= world_size:
        return f"expected a rank below {world_size}, found {rank}"
    if mesh is None:
        return ""
    if world_size != mesh.world_size:
        return f"expected a world of {mesh.world_size} ranks, found {world_size}"
    return _unless_there([rank], mesh.node, mesh)


def _flaw_of_mesh(mesh: Mesh) -> str:
    try:
        secret = mesh.secret.encode()
    except UnicodeEncodeError as error:
        return f"secret: {error}"
    if len(secret) < MIN_SECRET_BYTES:
        return f"expected a secret of at least {MIN_SECRET_BYTES} bytes, found {len(secret)}"
    for member in mesh.members:
        try:
            member.host.encode("idna")
        except UnicodeError as error:
            return f"host of node {member.node}: {error}"
    return ""


def _flaw_of_sum(asked: AddUp, mesh: Mesh) -> str:
    if not asked.addends:
        return "expected at least one to add up, found none"
    for node, _, (part, _, length), _ in asked.addends:  # ranks may have moved since
        if node >= len(mesh.members):
            return f"expected a node below {len(mesh.members)}, found {node}"
        if part not in (Part.KEPT, Part.PARITY):
            return f"expected what a rank keeps to be added up, found its {part.name.lower()}"
        if length > asked.nbytes:
            return f"expected at most {asked.nbytes} bytes of each, found {length}"
    return ""


def _unless_leading(node: int) -> str:
    return "" if node == LEADER else f"expected it of the node that leads, found node {node}"


def _unless_there(ranks: Iterable[int], node: int, mesh: Mesh) -> str:
    there = mesh.ranks_of(node)
    strange = next((rank for rank in ranks if rank not in there), None)
    if strange is None:
        return ""
    return f"expected ranks {there.start} to {there.stop - 1} of node {node}, found {strange}"


def _flaw_of_group(group: tuple[int, ...], rank: int, tolerates: int) -> str:
    if len(set(group)) != len(group) or rank not in group:
        return f"expected a stripe group with rank {rank} and nobody twice, found {group}"
    if not 0 < tolerates < len(group):
        return f"expected 1 to {len(group) - 1} losses to be tolerated, found {tolerates}"
    return ""


def _flaw_of_offer(node: int, offer: CopyOffer, mesh: Mesh) -> str:
    if node == mesh.node:
        return "expected an offer of another node"
    if flaw := _unless_there([offer.rank], node, mesh):
        return flaw
    room = (offer.capacity_bytes, offer.manifest_capacity_bytes)
    needs = (offer.payload_bytes, offer.manifest_bytes)
    if needs[0] > room[0] or needs[1] > room[1]:
        return f"expected a snapshot that fits into {room} bytes, found {needs}"
    if flaw := _flaw_of_lacking(offer):
        return flaw
    group = offer.stripe_group
    if not group:
        return ""
    if flaw := _flaw_of_group(group, offer.rank, offer.tolerates):
        return flaw
    if max(group) >= mesh.world_size:
        return f"expected ranks below {mesh.world_size}, found {group}"
    here = [rank for rank in group if mesh.node_of[rank] == mesh.node]
    if len(here) != 1:
        return f"expected one member of the stripe group on node {mesh.node}, found {here}"
    return ""


def _flaw_of_lacking(offer: CopyOffer) -> str:
    try:
        lacks = offer.lacks
    except ValueError:
        return f"expected a bitmap of blocks, found {offer.lacking!r:.40}"
    if max(lacks, default=-1) >= offer.payload_bytes:  # a block has more than one byte
        return f"expected blocks of {offer.payload_bytes} bytes, found number {max(lacks)}"
    return ""


def _flaw_of_vote(node: int, body: VoteBody, mesh: Mesh) -> str:
    match body:
        case RankJoined() | HaltWord():
            if body.world_size != mesh.world_size:
                return f"expected a world of {mesh.world_size} ranks, found {body.world_size}"
            return _unless_there([body.rank], node, mesh)
        case RanksTrain():
            return ""
        case RankGone() | StateLoaded() | StateUnusable():
            return _unless_there([body.rank], node, mesh)
        case TrainingPermitted() | VoteRefused() | VoteDelayed() | HaltOrder():
            return _unless_leading(node)
        case OfferWord():
            parts = [part for shared in body.shared for part in shared.parts]
            flaws = (_flaw_of_source(source, mesh) for source in [*body.sources, *parts])
            return _unless_leading(node) or next((flaw for flaw in flaws if flaw), "")


def _flaw_of_runs(runs: Iterable[RankRun], mesh: Mesh) -> str:
    for first, count, stride in runs:
        if not count or first + (count - 1) * max(1, stride) >= mesh.world_size:
            return f"expected ranks below {mesh.world_size}, found {count} from {first} on"
    return ""


def _flaw_of_source(source: RestoreSource, mesh: Mesh) -> str:
    givers = [*source.copies, *(member.node for member in source.members)]
    if source.rank >= mesh.world_size or not givers or max(givers) >= len(mesh.members):
        return f"expected a rank and nodes of the mesh, found {source}"
    if source.copies:
        return ""
    group = source.stripe_group
    if flaw := _flaw_of_group(group, source.rank, source.tolerates):
        return flaw
    members = {member.rank for member in source.members}
    if not members < set(group) or source.rank in members:
        return f"expected other members of its stripe group, found {source}"
    if len(members) < len(group) - source.tolerates:
        return f"expected {len(group) - source.tolerates} members, found {len(members)}"
    return ""
