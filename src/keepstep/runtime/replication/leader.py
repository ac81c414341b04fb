"""Leader: what the keeper of node 0 does for all: which policy holds, and which generation is
protected and committed.

Comes in: the nodes' reports. Goes out: its word to all of them. Everything it knows is rebuilt from
new reports by whoever leads next.
"""

from __future__ import annotations

from collections.abc import Set

from keepstep.core.redundancy.node_safety import abbreviate
from keepstep.core.redundancy.placement import Facts, auto, place
from keepstep.core.redundancy.protection import assignments
from keepstep.core.redundancy.survival import which_can_be_lost
from keepstep.core.resume.commit import Commit, RankFacts
from keepstep.core.resume.cut import Holding, common
from keepstep.errors import ConfigError
from keepstep.model.horizon import Horizon
from keepstep.model.mesh import Mesh
from keepstep.model.messages.peers import (
    AllEnded,
    HorizonWord,
    NodeReport,
    RankReport,
    SafetyWord,
)
from keepstep.model.topology import Auto, NoRedundancy, Policy, Scheme
from keepstep.ports import Journal
from keepstep.runtime.replication.peer_inbox import PeerInbox

# OPT-175B's: 1.5 % of the instances a day (GEMINI, SOSP'23, section 7.2)
FAILURES_PER_NODE_HOUR = 0.015 / 24


class Leader:
    """Of one round."""

    def __init__(self, lines: PeerInbox, mesh: Mesh, asked: Policy, journal: Journal) -> None:
        """Raises ConfigError when the policy cannot be had with these nodes."""
        self._lines, self._mesh, self._asked, self._journal = lines, mesh, asked, journal
        self._policy: Scheme | None = None
        self._why = ""
        self._commit: Commit | None = None
        self._ended: set[int] = set()
        self._facts: dict[int, tuple[int, int]] = {}  # by node: snapshot bytes, free bytes
        if len(mesh.members) == 1:
            self._settle(NoRedundancy(), "there is one node")
        elif not isinstance(asked, Auto):
            assignments(asked, mesh)
            self._settle(asked, f"{asked} was asked for")

    def _settle(self, policy: Scheme, why: str) -> None:
        self._policy, self._why = policy, why
        self._journal.record(
            "policy",
            f"redundancy across {len(self._mesh.members)} nodes: {policy}: {why}",
            policy=str(policy),
        )

    def went(self, epoch: int) -> None:
        """All ranks train on."""
        self._commit = Commit(self._mesh.world_size, epoch)
        self._say()

    def reported(self, node: int, report: NodeReport) -> None:
        """What a node says that its ranks hold."""
        if self._commit is None:  # another keeper led before: it began this epoch
            self._commit = Commit(self._mesh.world_size, report.epoch)
        if report.epoch != self._commit.epoch:
            return
        self._facts[node] = (report.snapshot_bytes, report.free_bytes)
        self._choose_policy(report.hindered)
        heard = Horizon(report.epoch, report.committed, report.target, inherited=report.inherited)
        if self._commit.report(map(_facts, report.ranks), heard) is not None:
            self._say()

    def holdings(self) -> list[Holding]:
        """What every rank holds itself, as last reported."""
        return [f.own for f in self._commit.facts.values()] if self._commit is not None else []

    def safety(self, alive: Set[int]) -> SafetyWord | None:
        """Which nodes may be lost at this moment, from what is proven. None while nothing is
        known."""
        if (
            self._commit is None
            or self._policy is None
            or len(self._commit.facts) < self._mesh.world_size
        ):
            return None
        facts, horizon = self._commit.facts, self._commit.horizon
        stamp = horizon.committed or max(
            common([f.own.sealed for f in facts.values()]), default=None
        )
        placement = place(self._policy, self._mesh.topology)
        proven: dict[int, tuple[int, ...]] = {}
        for node, holders in placement.holders.items():
            ranks = [facts[r] for r in self._mesh.ranks_of(node)]
            everywhere = all(stamp in f.protected for f in ranks)
            proven[node] = (
                holders
                if everywhere
                else (node,)
                if all(stamp in f.own.sealed for f in ranks)
                else ()
            )
        return abbreviate(
            self._mesh,
            str(self._policy),
            self._why,
            stamp,
            horizon.committed is not None,
            which_can_be_lost(placement, alive, proven),
            alive,
        )

    def _choose_policy(self, hindered: str) -> None:
        before = self._policy
        if hindered and not isinstance(self._policy, NoRedundancy):
            self._settle(
                NoRedundancy(), f"{hindered}; from now on snapshots stay on their own nodes"
            )
        elif (
            self._policy is None
            and len(self._facts) == len(self._mesh.members)
            and all(b for b, _ in self._facts.values())
        ):
            snapshot_bytes, free_bytes = (
                max(b for b, _ in self._facts.values()),
                min(f for _, f in self._facts.values()),
            )
            policy, why = auto(
                Facts(self._mesh.topology, free_bytes, snapshot_bytes, FAILURES_PER_NODE_HOUR)
            )
            try:
                assignments(policy, self._mesh)
            except ConfigError as error:
                policy, why = NoRedundancy(), str(error)
            self._settle(policy, why)
        if self._policy != before:
            self._say()

    def ended(self, node: int) -> None:
        """All ranks of that node ended well."""
        self._ended.add(node)
        if len(self._ended) == len(self._mesh.members):
            for member in self._mesh.members:
                self._lines.send(member.node, AllEnded(self._mesh.version))

    def joined(self, node: int) -> None:
        """A link to that node's keeper is open, perhaps to another life of it: it may have missed
        the last word."""
        if self._commit is not None:
            self._send(node, self._commit.horizon)

    def _say(self) -> None:
        assert self._commit is not None
        for member in self._mesh.members:
            self._send(member.node, self._commit.horizon)

    def _send(self, node: int, horizon: Horizon) -> None:
        word = HorizonWord(
            mesh_version=self._mesh.version,
            epoch=horizon.epoch,
            policy=str(self._policy or Auto()),
            why=self._why,
            committed=horizon.committed,
            target=horizon.target,
            inherited=horizon.inherited,
            alive=tuple(sorted(horizon.alive)),
            decided_step=horizon.decided_step,
        )
        self._lines.send(node, word)


def _facts(row: RankReport) -> RankFacts:
    own = Holding(frozenset(row.sealed), row.pending, row.decided_step)
    return RankFacts(row.rank, own, frozenset(row.protected))
