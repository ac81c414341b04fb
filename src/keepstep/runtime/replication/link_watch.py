"""Link watch: how fast copies go from each node to each other, who is slow, and who damages them.

Comes in: what the links have counted (`ports.Links.sent_counts`, `damaged`), and what other nodes
report of theirs. Goes out: reports to the leading keeper; there, `slow-link` and `slow-link-over`
in the journal, and `link-unknown` and `link-known` of what nobody can tell; `link-damages` where it
is seen. Sends nothing of its own and delays nothing: it asks the kernel what the copies took.

Invariant: a sample is of enough bytes and of enough time to say something; what begins anew on the
way (a connection, a keeper) is in none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from keepstep.core.balance.link_remedy import StepBytes, link_remedy
from keepstep.core.detection.damage import LinkDamages
from keepstep.core.detection.link_canary import flaw_of_fresh_links, flaw_of_links
from keepstep.core.detection.link_doubts import LinkDoubts, LinksUnknown
from keepstep.core.detection.links import SlowLink, SlowLinks
from keepstep.model.events import INFO, WARNING
from keepstep.model.links import LinkCount, LinkRow, LinkSample
from keepstep.model.messages.peers import LinkReport
from keepstep.model.units import MIB, MS_NS, S_NS
from keepstep.ports import Journal
from keepstep.runtime.replication.mesh_links import MeshLinks

LOOK_NS = 2 * S_NS
LEAST_BYTES = MIB
# The kernel counts in ticks of some milliseconds.
LEAST_BUSY_NS = 50 * MS_NS

Channel = tuple[int, int]  # node, and number of the stream


class LinkMeter:
    """Of what this node sends."""

    def __init__(self) -> None:
        self._counted: dict[Channel, LinkCount] = {}
        self._grown: dict[int, LinkSample] = {}  # by node: what is not reported yet
        self._looked_ns = 0

    def is_due(self, now_ns: int) -> bool:
        """Whether it is time for another look."""
        return now_ns - self._looked_ns >= LOOK_NS

    def look(self, counts: Mapping[Channel, LinkCount], now_ns: int) -> tuple[LinkRow, ...]:
        """What is worth reporting since the last report."""
        self._looked_ns = now_ns
        grown: dict[int, list[LinkCount]] = {}
        for (node, stream), count in counts.items():
            before = self._counted.get((node, stream))
            if before is not None and all(b <= c for b, c in zip(before, count, strict=True)):
                difference = LinkCount(*(c - b for b, c in zip(before, count, strict=True)))
                grown.setdefault(node, []).append(difference)
        self._counted = dict(counts)
        for node, each in grown.items():
            self._grown[node] = _together(self._grown.get(node), each)
        rows = [
            LinkRow(node, sample)
            for node, sample in sorted(self._grown.items())
            if sample.nbytes >= LEAST_BYTES and sample.busy_ns >= LEAST_BUSY_NS
        ]
        for row in rows:
            del self._grown[row.node]
        return tuple(rows)


class DamageWatch:
    """Of what this node receives."""

    def __init__(self, journal: Journal) -> None:
        self._journal, self._damages = journal, LinkDamages()

    def look(self, counts: Mapping[int, int], now_ns: int) -> None:
        """counts: by node, how often until now something from there was not as it was sent."""
        for damage in self._damages.news(counts, now_ns):
            self._journal.record(
                "link-damages", damage.why, WARNING, node=damage.node, count=damage.count
            )


def _together(before: LinkSample | None, streams: Sequence[LinkCount]) -> LinkSample:
    """Streams run beside each other: the busiest one tells how long it took."""
    known = before or LinkSample(0, 0)
    busiest = max(streams, key=lambda count: count.busy_ns)
    return LinkSample(
        known.nbytes + sum(count.acked_bytes for count in streams),
        known.busy_ns + busiest.busy_ns,
        known.sent_bytes + sum(count.sent_bytes for count in streams),
        known.resent_bytes + sum(count.resent_bytes for count in streams),
        known.reader_ns + busiest.reader_ns,
    )


class LinkWatch:
    """Of a mesh, where this node leads it."""

    def __init__(
        self, racks: Sequence[str | None], journal: Journal, canary_every_ns: int = 0
    ) -> None:
        """racks: of each node. canary_every_ns: so often a copy of the judge is shown a slow link;
        0: only one when this is made."""
        self._journal = journal
        self._links = SlowLinks(racks)
        self._doubts = LinkDoubts(len(racks))
        self._step_bytes = StepBytes()
        self._committed_step: int | None = None
        self._has_news = False
        self._judged_ns = 0
        self._canary_every_ns = canary_every_ns
        self._shown_ns, self._times_shown = 0, 0
        self._flaw = flaw_of_fresh_links() if len(racks) > 1 else ""

    @property
    def slow(self) -> list[SlowLink]:
        """What is slow now."""
        return self._links.slow

    def receive(self, sender: int, report: LinkReport, now_ns: int) -> None:
        """What a node says of what it sends."""
        self._doubts.hear(sender, now_ns)
        for row in report.rows:
            self._links.add(sender, row.node, row.sample)
            if self._committed_step is not None:
                cell = sender, row.node
                self._step_bytes.add(cell, row.sample.nbytes, self._committed_step)
        self._has_news = True

    def tick(self, now_ns: int, committed_step: int | None = None) -> None:
        """What has come in since is judged together: with a thousand nodes reports come by the
        hundred. committed_step: the last one that is protected."""
        self._committed_step = committed_step
        if now_ns - self._judged_ns < LOOK_NS:
            return
        self._judged_ns = now_ns
        if self._has_news:
            self._has_news = False
            self._judge()
        self._show_canary(now_ns)
        for told in self._doubts.news(self._links, self._flaw, now_ns):
            if isinstance(told, LinksUnknown):
                level = WARNING if told.is_trouble else INFO
                self._journal.record("link-unknown", told.why, level, doubt=told.doubt)
            else:
                self._journal.record("link-known", told.why, doubt=told.doubt)

    def _show_canary(self, now_ns: int) -> None:
        """The judge itself learns nothing of it."""
        self._shown_ns = self._shown_ns or now_ns
        if self._canary_every_ns and now_ns - self._shown_ns >= self._canary_every_ns:
            self._shown_ns = now_ns
            self._flaw = flaw_of_links(self._links, self._times_shown)
            self._times_shown += 1

    def _judge(self) -> None:
        for told in self._links.news():
            if isinstance(told, SlowLink):
                self._tell(told)
            else:
                self._journal.record(
                    "slow-link-over",
                    told.why,
                    side=told.slow.side.name.lower(),
                    nodes=list(told.slow.nodes),
                )

    def _tell(self, slow: SlowLink) -> None:
        found = link_remedy(slow, self._step_bytes.of_a_step(slow.slowest))
        self._journal.record(
            "slow-link",
            f"{slow.why}; {found.why}",
            WARNING,
            remedy="observe",
            left_ns=found.left_ns,
            side=slow.side.name.lower(),
            nodes=list(slow.nodes),
            ratio=round(slow.ratio, 3),
            cause=slow.cause,
            cells=[list(cell) for cell in slow.cells],
        )


class NodeLinks:
    """What one node does of this in one mesh: it measures what it sends and receives, and judges
    what all report where it leads."""

    def __init__(self, links: MeshLinks, journal: Journal, canary_every_ns: int) -> None:
        self._links = links
        self._meter, self._damage = LinkMeter(), DamageWatch(journal)
        racks = [member.rack for member in links.mesh.members]
        self._watch = LinkWatch(racks, journal, canary_every_ns) if links.mesh.leads else None

    def receive(self, sender: int, report: LinkReport, now_ns: int) -> None:
        """What a node says of what it sends; heard where this node leads."""
        if self._watch is not None:
            self._watch.receive(sender, report, now_ns)

    def tick(self, now_ns: int, committed_step: int | None) -> None:
        """committed_step: the last one that is protected."""
        if self._meter.is_due(now_ns):
            rows = self._meter.look(self._links.sent_counts(), now_ns)
            self._damage.look(self._links.damaged(), now_ns)
            if rows:
                self._links.to_leader(LinkReport(self._links.version, rows))
        if self._watch is not None:
            self._watch.tick(now_ns, committed_step)
