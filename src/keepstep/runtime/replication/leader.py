"""Leader: what the keeper of node 0 does for all: which policy holds, which generation is
protected and committed, and which ranks are replicas.

Comes in: the nodes' reports. Goes out: horizons, share classes, and which nodes may be lost, to all
of them. What has come in one turn is decided about once: with a thousand ranks reports come by the
hundred. Everything it knows is rebuilt from new reports by whoever leads next.

A node without memory for what it is to hold ends redundancy for all, so that steps are committed at
all; what was wanted is tried again later, each time after twice as long.

Invariant: this node's own page tells a word before any other node hears it. So what was committed
is known to the next leader, even if this one dies as it says so.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

from keepstep.core.redundancy.node_safety import abbreviate
from keepstep.core.redundancy.placement import Facts, auto, place
from keepstep.core.redundancy.protection import assignments
from keepstep.core.redundancy.share_classes import ShareClasses, differing
from keepstep.core.redundancy.survival import which_can_be_lost
from keepstep.core.resume.commit import Commit, RankFacts
from keepstep.core.resume.cut import Holding
from keepstep.errors import ConfigError
from keepstep.model.events import INFO, WARNING
from keepstep.model.horizon import Horizon
from keepstep.model.messages.peers import (
    AllEnded,
    HorizonWord,
    NodeReport,
    RanksReport,
    SafetyWord,
    SharesWord,
)
from keepstep.model.replicas import ReplicaDifference
from keepstep.model.shares import ShareClass
from keepstep.model.snapshot import Stamp
from keepstep.model.topology import Auto, Copies, NoRedundancy, Policy, Scheme
from keepstep.model.units import S_NS, counted, first_names
from keepstep.ports import Clock, Journal
from keepstep.runtime.replication.mesh_links import MeshLinks

# OPT-175B's: 1.5 % of the instances a day (GEMINI, SOSP'23, section 7.2)
FAILURES_PER_NODE_HOUR = 0.015 / 24
# Until a policy that a node has no memory for is tried again, at first and at most. While it is
# tried nothing is committed, for a second or so.
TRY_AGAIN_FIRST_NS = 60 * S_NS
TRY_AGAIN_MOST_NS = 960 * S_NS
SHOWN_RANKS = 8


@dataclass
class _Hindrance:
    """What keeps the policy that was wanted from being followed. `wait_ns`: until that is tried
    again; `since_ns`: when it was given up, None while it is tried."""

    wanted: Scheme
    why: str
    wait_ns: int
    since_ns: int | None


class Leader:
    """Of one mesh. `asked`: the policy that was configured; `follow`: this node does as it is told
    by a word. `has_one_slot`: so every rank has: its newest snapshot may lie on other nodes alone
    at any moment, and without them nothing is captured. `shares`: replicas over nodes keep one
    snapshot."""

    def __init__(
        self,
        links: MeshLinks,
        asked: Policy,
        clock: Clock,
        journal: Journal,
        follow: Callable[[HorizonWord], None],
        has_one_slot: bool = False,
        shares: bool = False,
    ) -> None:
        """Raises ConfigError when the policy cannot be had with these nodes."""
        self._links, self._mesh, self._clock, self._journal = links, links.mesh, clock, journal
        self._follow = follow
        self._has_one_slot = has_one_slot
        self._shares = shares
        self._share_classes: ShareClasses | None = None  # of the epoch that is trained
        self._hindered = ""  # that was told last
        self._policy: Scheme | None = None
        self._why = ""
        self._hindrance: _Hindrance | None = None
        self._commit: Commit | None = None  # of the epoch that is trained
        self._ended: set[int] = set()
        self._facts: dict[int, tuple[int, int]] = {}  # by node: snapshot bytes, free bytes
        self._last: dict[int, NodeReport] = {}  # by node
        self._rows: dict[int, tuple[RanksReport, ...]] = {}  # by node, of that what counts
        # what was reported since the last decision, by the horizon that the reporting node knew
        self._reported: list[tuple[Horizon, list[RankFacts]]] = []
        self._spans: dict[int, int] = {}  # by node: steps that a capture takes
        self._period_steps = 1  # that was announced
        self._told_difference: ReplicaDifference | None = None  # the newest in the journal
        if len(self._mesh.members) == 1:
            self._settle(NoRedundancy(), "there is one node")
        elif not isinstance(asked, Auto):
            assignments(asked, self._mesh)
            self._settle(asked, f"{asked} was asked for{self._price(asked)}")

    def _settle(self, policy: Scheme, why: str) -> None:
        self._policy, self._why = policy, why
        nodes = len(self._mesh.members)
        told = f"redundancy across {nodes} nodes: {policy}: {why}"
        self._journal.record("policy", told, policy=str(policy))

    def _price(self, asked: Policy) -> str:
        """Of one slot, in words."""
        if not self._has_one_slot or not isinstance(asked, Copies):
            return ""
        spare = asked.m - 2
        lost = f"any {counted(spare, 'node')} may be lost" if spare else "no node may be lost"
        return f", and each rank has one slot: while that is overwritten {lost}"

    def resumed(self, epoch: int) -> None:
        """All ranks train on."""
        self._commit = commit = self._begin_epoch(epoch)
        self._last.clear()
        self._rows.clear()
        self._reported.clear()
        self._announce(commit)

    def _begin_epoch(self, epoch: int) -> Commit:
        self._share_classes = ShareClasses(self._mesh.world_size) if self._shares else None
        return Commit(self._mesh.world_size, epoch)

    def receive_report(self, node: int, report: NodeReport) -> None:
        """What a node says that its ranks hold. `decide` makes something of it."""
        if self._commit is None:  # another keeper led before: it began this epoch
            self._commit = self._begin_epoch(report.epoch)
        commit = self._commit
        if report.epoch != commit.epoch:
            return
        self._facts[node] = (report.snapshot_bytes, report.free_bytes)
        self._spans[node] = report.span_steps
        self._last[node] = report
        self._choose_policy(commit, report.hindered if self._is_followed_by(report) else "")
        self._take(node, report)

    def _is_followed_by(self, report: NodeReport) -> bool:
        """Whether that node follows the policy that holds."""
        return report.policy == self._policy_name

    def _take(self, node: int, report: NodeReport) -> None:
        known = Horizon(report.epoch, report.committed, report.target, inherited=report.inherited)
        before, rows = self._rows.get(node, ()), report.ranks
        if not self._is_followed_by(report):  # it may lie nowhere but with its owner
            rows = tuple([row._replace(protected=()) for row in rows])
        self._rows[node] = rows
        news = [fact for row in rows if row not in before for fact in _facts(row)]
        if self._reported and self._reported[-1][0] == known:
            self._reported[-1][1].extend(news)
        else:
            self._reported.append((known, news))

    def decide(self) -> None:
        """All that was reported in this turn is there: announce what it comes to, if that is
        new."""
        commit = self._commit
        if commit is None or not self._reported:
            return
        reported, self._reported = self._reported, []
        found = [commit.report(news, known) for known, news in reported]
        is_new_period = max(self._spans.values()) != self._period_steps
        if is_new_period or any(horizon is not None for horizon in found):
            self._announce(commit)
        self._look_for_replicas(commit)

    def _look_for_replicas(self, commit: Commit) -> None:
        known = self._share_classes
        if known is None:
            return
        before = known.classes or ()
        holdings = {rank: fact.own for rank, fact in commit.facts.items()}
        if known.look(holdings):
            for each in set(known.classes or ()) - set(before):
                if each.is_over:
                    self._tell_over(each, [holdings[rank] for rank in each.members])
            self._links.to_all(SharesWord(self._mesh.version, commit.epoch, known.classes or ()))

    def _tell_over(self, over: ShareClass, members: list[Holding]) -> None:
        ranks = list(over.members)
        shown = first_names([str(rank) for rank in ranks], SHOWN_RANKS)
        differed = differing(members, Stamp(-1, 0))
        why = f"{counted(len(ranks), 'rank')} share no more: one of them goes by another plan"
        if differed:
            why = (
                f"{differed[-1]} is not shared, so nobody holds it: ranks {shown} differ "
                "(in what, nobody can say over nodes). Replicas are to be equal after every update"
            )
        told = f"{why}; each rank keeps all of its own from here on"
        step = differed[-1].step if differed else -1
        level = WARNING if differed else INFO
        self._journal.record("not-shared", told, level, ranks=ranks[:SHOWN_RANKS], step=step)

    def holdings(self) -> list[Holding]:
        """What every rank holds itself, as last reported."""
        return [f.own for f in self._commit.facts.values()] if self._commit is not None else []

    def safety(self, linked: Set[int]) -> SafetyWord | None:
        """Which nodes may be lost at this moment, from what is proven; `linked`: those that are
        reached. None while nothing is known."""
        commit, policy = self._commit, self._policy
        if commit is None or policy is None or len(commit.facts) < self._mesh.world_size:
            return None
        horizon = commit.horizon
        held = commit.held()
        stamp = horizon.committed or max(held, default=None)
        placement = place(policy, self._mesh.topology)
        proven = {
            node: self._proven_on(commit, node, holders, stamp)
            for node, holders in placement.holders.items()
        }
        return abbreviate(
            self._mesh,
            str(policy),
            self._why,
            stamp,
            horizon.committed is not None,
            which_can_be_lost(placement, linked, proven),
            linked,
        )

    def _proven_on(
        self, commit: Commit, node: int, holders: tuple[int, ...], stamp: Stamp | None
    ) -> tuple[int, ...]:
        """The nodes that have proven their part of the snapshots of that node's ranks, and keep it
        whatever the next moment brings."""
        facts = [commit.facts[rank] for rank in self._mesh.ranks_of(node)]
        if all(stamp in fact.protected for fact in facts):
            is_kept = not self._has_one_slot
            return holders if is_kept else tuple(each for each in holders if each != node)
        return (node,) if all(stamp in fact.own.sealed for fact in facts) else ()

    def _choose_policy(self, commit: Commit, hindered: str) -> None:
        before = self._policy
        if hindered and self._has_one_slot:
            if hindered != self._hindered:
                self._hindered = hindered
                why = f"{hindered}; ranks with one slot capture nothing until it can"
                self._journal.record("copies-needed", why, WARNING)
        elif hindered and before is not None and not isinstance(before, NoRedundancy):
            self._give_up(commit, before, hindered)
        elif before is None and self._knows_all_nodes():
            self._change_policy(commit, *self._cheapest())
        if self._policy != before:
            self._announce(commit)

    def _give_up(self, commit: Commit, wanted: Scheme, why: str) -> None:
        """One node has no memory for it."""
        before = self._hindrance
        wait_ns = (
            TRY_AGAIN_FIRST_NS if before is None else min(2 * before.wait_ns, TRY_AGAIN_MOST_NS)
        )
        self._hindrance = _Hindrance(wanted, why, wait_ns, self._clock.monotonic_ns())
        told = (
            f"{why}; until there is room, snapshots stay on their own nodes and go with them. "
            f"{wanted} is tried again in {wait_ns // S_NS} s"
        )
        self._change_policy(commit, NoRedundancy(), told)

    def _change_policy(self, commit: Commit, policy: Scheme, why: str) -> None:
        """What was protected under the one before is decided about first, and then forgotten: under
        the other one it may lie on too few nodes."""
        self.decide()
        self._settle(policy, why)
        self._rows.clear()
        commit.forget_protected()
        for node, report in self._last.items():
            self._take(node, report)

    def tick(self) -> None:
        """From time to time: what a node had no memory for is tried again."""
        hindrance, commit = self._hindrance, self._commit
        if hindrance is None or hindrance.since_ns is None or commit is None:
            return
        waited_ns = self._clock.monotonic_ns() - hindrance.since_ns
        if waited_ns >= hindrance.wait_ns:
            hindrance.since_ns = None
            told = f"tried again after {waited_ns // S_NS} s; then {hindrance.why}"
            self._change_policy(commit, hindrance.wanted, told)
            self._announce(commit)

    def _knows_all_nodes(self) -> bool:
        facts = self._facts.values()
        return len(facts) == len(self._mesh.members) and all(nbytes for nbytes, _ in facts)

    def _cheapest(self) -> tuple[Scheme, str]:
        """The policy that fits into the nodes' memory, and why that one."""
        snapshot_bytes = max(nbytes for nbytes, _ in self._facts.values())
        free_bytes = min(free for _, free in self._facts.values())
        facts = Facts(self._mesh.topology, free_bytes, snapshot_bytes, FAILURES_PER_NODE_HOUR)
        policy, why = auto(facts)
        try:
            assignments(policy, self._mesh)
        except ConfigError as error:
            return NoRedundancy(), str(error)
        return policy, why

    def ended(self, node: int) -> None:
        """All ranks of that node ended well."""
        self._ended.add(node)
        if len(self._ended) == len(self._mesh.members):
            self._links.to_all(AllEnded(self._mesh.version))

    def link_is_open(self, node: int) -> None:
        """Perhaps to another life of that node's keeper: it may have missed the last horizon."""
        if self._commit is not None:
            self._links.send(node, self._word(self._commit.horizon))
            known = self._share_classes
            if known is not None and known.classes is not None:
                version, epoch = self._mesh.version, self._commit.epoch
                self._links.send(node, SharesWord(version, epoch, known.classes))

    @property
    def _policy_name(self) -> str:
        return str(self._policy or Auto())

    def _announce(self, commit: Commit) -> None:
        self._tell_difference(commit)
        self._period_steps = max(self._spans.values(), default=1)
        word = self._word(commit.horizon)
        self._follow(word)
        self._links.to_others(word)

    def _tell_difference(self, commit: Commit) -> None:
        wrong = commit.horizon.difference
        if wrong is None or wrong == self._told_difference:
            return
        self._told_difference = wrong
        follows = "committed all the same"
        if wrong.condemns:
            follows = "never committed, nor is what was computed from it: all go back to before it"
        told = f"{wrong.stamp} is {follows}; {wrong.sentence()}"
        ranks, step = list(wrong.ranks), wrong.stamp.step
        self._journal.record("condemned", told, WARNING, step=step, ranks=ranks)

    def _word(self, horizon: Horizon) -> HorizonWord:
        return HorizonWord(
            mesh_version=self._mesh.version,
            epoch=horizon.epoch,
            policy=self._policy_name,
            why=self._why,
            committed=horizon.committed,
            target=horizon.target,
            inherited=horizon.inherited,
            alive=tuple(sorted(horizon.alive)),
            decided_step=horizon.decided_step,
            period_steps=self._period_steps,
            agreed_steps=horizon.agreed_steps,
            difference=horizon.difference,
        )


def _facts(row: RanksReport) -> list[RankFacts]:
    sealed = frozenset(row.sealed)
    told = row.group, row.digests, row.shares, row.plan
    own = Holding(sealed, row.pending, row.decided_step, *told)
    protected = frozenset(row.protected)
    return [RankFacts(rank, own, protected) for rank in row.ranks]
