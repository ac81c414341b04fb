"""What the swarm has found in the keepers, as small stories: each failed before it was mended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from keepstep.sim.protocol.site import Site
from keepstep.sim.protocol.trainer import Rank

from keepstep.edge.shm.slot import Slot, parse_page
from keepstep.errors import DamageError
from keepstep.model.messages.peers import CopyAccepted, MeshMessage
from keepstep.model.restore_sources import RestoreSource
from keepstep.model.snapshot import SlotState, Stamp
from keepstep.model.units import KIB, MS_NS, PAGE_BYTES, S_NS
from keepstep.model.wire import Part, Span
from keepstep.runtime.replication.node import Node
from keepstep.sim.protocol.job.job import Job, Outcome
from keepstep.sim.protocol.job.observer import Checker
from keepstep.sim.protocol.job.plan import Plan
from keepstep.sim.protocol.swarm import CHECKERS
from keepstep.sim.protocol.wire.links import SimLinks
from keepstep.sim.protocol.wire.network import Wires
from keepstep.sim.protocol.world.memory import SimMemory
from keepstep.sim.protocol.world.world import World


def a_job(plan: Plan) -> Job:
    return Job(plan, World(1), CHECKERS)


def events(job: Job, kind: str) -> list[str]:
    return [e.why for site in job.sites for e in site.machine.events if e.kind == kind]


def ended_well(job: Job) -> Outcome:
    outcome = job.run()
    assert outcome.wrong is None, "\n".join([outcome.wrong, *outcome.trace])
    return outcome


def node_half(job: Job, site: int) -> Node:
    keeper = job.sites[site].keeper
    assert keeper is not None and keeper.keeper.node is not None
    return keeper.keeper.node


def test_a_link_that_a_restore_has_left_says_of_no_node_that_it_is_lost() -> None:
    """Its other end's next keeper does not expect it: the node counted as lost, and all were
    restarted, again and again."""
    job = a_job(Plan(nodes=3, steps=20, policy="none"))

    def link() -> None:
        nodes = {node_half(job, s).mesh.node: node_half(job, s) for s in range(3)}  # type: ignore[union-attr]
        for node in (nodes[1], nodes[2]):
            node.state.recovery.link_with_sources({2: RestoreSource(2, copies=(1,))})
            node.state._links.restored()  # as the permission to go on does

    def kill() -> None:
        site = next(s for s in range(3) if node_half(job, s).mesh.node == 2)  # type: ignore[union-attr]
        job.sites[site].keeper.process.end("killed")  # type: ignore[union-attr]

    job.world.at(3 * S_NS, None, link)
    job.world.at(5 * S_NS, None, kill)
    ended_well(job)
    assert events(job, "node-lost") == []
    assert len(events(job, "resumed")) == 1


def test_a_source_that_cannot_be_reached_is_no_reason_to_give_memory_up() -> None:
    """A path that fails while a lost machine's rank is restored: memory was given up for a fresh
    start, which some ranks refuse, and by then the offer alone had voided all parities."""
    job = a_job(Plan(nodes=3, steps=20, policy="parity:3", scrub_every_s=0.0))

    def lose() -> None:
        nodes = {node_half(job, s).mesh.node: s for s in range(3)}  # type: ignore[union-attr]
        job.lose_machine(job.sites[nodes[2]])
        # of the machine that comes in its place; the leader is reached
        paths = [(nodes[1], 3), (3, nodes[1])]
        job.network.block(paths)
        job.world.after(14 * S_NS, None, job.network.unblock, paths)

    job.world.at(12 * S_NS, None, lose)
    outcome = ended_well(job)
    assert all("from memory" in why or "afresh" in why for why in events(job, "resumed"))
    assert len([why for why in events(job, "resumed") if "afresh" in why]) == 1
    assert outcome.lost_steps <= 4


def test_a_bit_that_flips_in_the_header_of_a_parity_under_way_ends_no_keeper() -> None:
    job = a_job(Plan(nodes=3, steps=10, policy="parity:3", scrub_every_s=0.0))
    flipped: list[str] = []

    def look() -> None:
        for path, file in job.sites[0].machine.files.every_file():
            if "/parity/" in path and "/slot-" in path and not flipped:
                try:
                    is_writing = (
                        parse_page(bytes(file.data[:PAGE_BYTES]), job.settings.job_dir).state
                        is SlotState.WRITING
                    )
                except DamageError:
                    continue
                if is_writing:
                    file.data[1000] ^= 1
                    flipped.append(path)
        job.world.after(MS_NS // 2, None, look)

    job.world.at(4 * S_NS, None, look)
    ended_well(job)
    assert flipped and any(flipped[0] in why for why in events(job, "copy-refused"))


def test_a_new_leader_that_knows_no_policy_yet_has_nobody_remove_what_it_holds() -> None:
    """With `auto` it is settled from the reports of all nodes. When one is lost and the keepers of
    two others die, the next ones heard that a generation is committed, knew of no holders, and
    removed the only copies there were."""
    job = a_job(Plan(nodes=3, steps=30, policy="auto", link_dead_s=8.0, replace_ns=20 * S_NS))

    def lose() -> None:
        nodes = {node_half(job, s).mesh.node: s for s in range(3)}  # type: ignore[union-attr]
        job.lose_machine(job.sites[nodes[1]])
        for node in (0, 2):
            job.sites[nodes[node]].keeper.process.end("killed")  # type: ignore[union-attr]

    job.world.at(12 * S_NS, None, lose)
    assert ended_well(job).lost_steps <= 4
    assert len([why for why in events(job, "resumed") if "afresh" in why]) == 1


def test_an_answer_that_a_link_died_with_is_given_again() -> None:
    """The link was made anew before its node counted as lost, the leader offered the same again,
    and nobody said that it was loaded."""
    job = a_job(Plan(nodes=2, steps=5, link_dead_s=3.0))

    def look() -> None:
        if not events(job, "restore-offered"):
            job.world.after(MS_NS, None, look)
            return
        leader = next(s for s in range(2) if node_half(job, s).mesh.leads)  # type: ignore[union-attr]
        path = [(1 - leader, leader)]
        job.network.block(path)
        job.world.after(3500 * MS_NS, None, job.network.unblock, path)

    job.world.after(MS_NS, None, look)
    outcome = ended_well(job)
    assert events(job, "node-lost") == [] and outcome.virtual_ns < 60 * S_NS


def test_a_checkpoint_of_what_is_damaged_is_refused_in_the_end() -> None:
    """A rank's page said that it held the newest step of all, its slot's header was damaged: the
    request waited, and its rank with it, and then the keeper, for ever."""
    job = a_job(Plan(nodes=2, steps=5, store=True, persist_every_steps=0, scrub_every_s=0.0))

    def flip() -> None:
        for path, file in job.sites[0].machine.files.every_file():
            if "/held/" not in path and "/slot-" in path:
                file.data[1000] ^= 1

    def look() -> None:
        if all(r._ending and not r._capturing for site in job.sites for r in site.ranks.values()):
            flip()
        else:
            job.world.after(MS_NS // 10, None, look)

    job.world.at(3 * S_NS, None, look)
    outcome = ended_well(job)
    assert outcome.virtual_ns < 200 * S_NS


class Kept:
    """Somebody who takes blocks."""

    def __init__(self) -> None:
        self.memory, self.came = bytearray(10), 0

    def place(self, node: int, span: Span) -> memoryview:
        return memoryview(self.memory)

    def arrived(self, node: int, span: Span, checksum: int) -> None:
        self.came += 1


def test_a_block_is_told_to_whom_it_was_written() -> None:
    """Who came in the place of another while a block was on its way took it for his: a parity of
    other bytes, or a copy that was acknowledged and did not have them."""
    job = a_job(Plan(nodes=2, steps=3))
    job.world.run(2 * S_NS)
    lines, span = node_half(job, 0)._inbox, Span(7, Stamp(1, 1), Part.PAYLOAD, 0, 10)
    one, other = Kept(), Kept()
    lines.expect(7, span.stamp, one)
    place = lines.place(1, span)
    assert place is not None
    place[:] = b"0123456789"
    lines.expect(7, span.stamp, other)
    lines.block(1, span, 0)
    assert (one.came, other.came) == (0, 0), (
        "neither: the one expects nothing any more, the other has nothing"
    )
    assert lines.place(1, span) is not None
    lines.block(1, span, 0)
    assert (
        (one.came, other.came) == (0, 1)
        and one.memory == b"0123456789"
        and other.memory == bytes(10)
    )


@pytest.mark.parametrize("policy", ["none", "copies:2", "parity:3"])
@pytest.mark.parametrize("at_byte", [40, PAGE_BYTES + 10])
def test_a_bit_that_flips_between_a_ranks_question_and_its_load_costs_no_copied_generation(
    policy: str, at_byte: int
) -> None:
    """In the header, or in the state. It was given up by all, although other nodes had proven
    it."""
    flipped: list[Stamp] = []
    lives: list[Rank] = []

    class Flips(Checker):
        name = "flips"

        def joined(self, rank: Rank) -> None:
            if rank.rank != 0:
                return
            lives.append(rank)
            if len(lives) == 2:
                self.job.world.after(MS_NS, rank.process, self.flip, rank)

        def flip(self, rank: Rank) -> None:
            headers = {
                path: parse_page(bytes(file.data[:PAGE_BYTES]), path)
                for path, file in own_slots(self.job, rank)
            }
            path, header = max(
                headers.items(), key=lambda at: (at[1].state is SlotState.SEALED, at[1].stamp)
            )
            dict(own_slots(self.job, rank))[path].data[at_byte] ^= 1
            self.job.atlas.damaged.add((rank.site.machine.number, 0, header.stamp))
            flipped.append(header.stamp)

    job = Job(
        Plan(nodes=3, steps=20, policy=policy, scrub_every_s=0.0, stays=False),
        World(1),
        [*CHECKERS, Flips],
    )
    job.world.at(10 * S_NS, None, lambda: lives[0].process.end("killed"))
    ended_well(job)
    [_, again] = [e for site in job.sites for e in site.machine.events if e.kind == "resumed"]
    assert again.data["source"] == "memory" and len(flipped) == 1
    assert (again.data["step"] == flipped[0].step) == (policy != "none")


def test_a_snapshot_that_is_in_its_ranks_hands_for_a_moment_is_copied_soon_after() -> None:
    """A keeper that could not pin it tried again with the leader's next word, a step or two
    later."""
    committed: list[int] = []

    class Holds(Checker):
        name = "holds"

        def sealed(self, rank: Rank, stamp: Stamp) -> None:
            if (rank.rank, stamp.step) != (0, 3):
                return
            hand = rank.site.machine.start("hand")
            slots = [
                Slot(SimMemory(rank.site.machine.files, hand), Path(path))
                for path, _ in own_slots(self.job, rank)
            ]
            [slot] = [slot for slot in slots if slot.claims(stamp)]
            assert slot.lock(exclusive=True)
            self.job.world.after(100 * MS_NS, None, hand.end, "has let go")
            self.job.world.after(
                3 * S_NS,
                None,
                lambda: committed.append(node_half(self.job, 0).state.horizon.committed.step),  # type: ignore[union-attr]
            )

    ended_well(
        Job(Plan(nodes=2, steps=6, step_ns=20 * S_NS, slots=4), World(1), [*CHECKERS, Holds])
    )
    assert committed == [3]


def test_an_agent_that_is_killed_as_a_round_begins_is_spoken_for_by_the_next_one() -> None:
    """It had its seat, and had not started its ranks. Its keeper lived on, so that no link was
    lost, and the next agent waited as a spare: nobody got on for a minute."""
    job = a_job(Plan(nodes=2, steps=20))
    killed: list[int] = []

    def lose() -> None:
        sites = {node_half(job, s).mesh.node: job.sites[s] for s in range(2)}  # type: ignore[union-attr]
        job.lose_machine(sites[0])
        look(sites[1])

    def look(site: Site) -> None:
        if site.agent is not None and all(
            f"1/ready/{place}" in job.kv.written for place in range(2)
        ):
            killed.append(job.world.now_ns)
            site.agent.process.end("killed")
        else:
            job.world.after(MS_NS // 10, None, look, site)

    job.world.at(10 * S_NS, None, lose)
    outcome = ended_well(job)
    assert len(killed) == 1 and len(events(job, "resumed")) == 2 and outcome.virtual_ns < 50 * S_NS


def test_a_header_that_was_damaged_before_it_was_sent_is_not_kept_beside_a_parity() -> None:
    """What was sent arrived as it was sent, and so it was acknowledged, committed, and could not be
    restored."""
    flipped: list[Stamp] = []
    lives: list[Rank] = []

    class Flips(Checker):
        name = "flips"

        def joined(self, rank: Rank) -> None:
            lives.extend([rank] if rank.rank == 0 and not lives else [])

        def said(self, links: SimLinks, node: int, message: MeshMessage) -> None:
            if (
                isinstance(message, CopyAccepted)
                and (message.rank, message.stamp.step) == (0, 3)
                and not flipped
            ):
                flipped.append(message.stamp)
                self.job.world.after(300 * MS_NS, None, self.flip, flipped[0])

        def flip(self, stamp: Stamp) -> None:
            for path, file in own_slots(self.job, lives[0]):
                if parse_page(bytes(file.data[:PAGE_BYTES]), Path(path)).stamp == stamp:
                    file.data[1000] ^= 1
            self.job.atlas.damaged.add((lives[0].site.machine.number, 0, stamp))
            self.job.world.after(15 * S_NS, None, self.job.lose_machine, lives[0].site)

    # so that the header, which goes last, waits for its turn
    wires = Wires(bytes_per_s=10 * KIB, queue_bytes=KIB)
    job = Job(
        Plan(
            nodes=3, steps=10, step_ns=10 * S_NS, policy="parity:3", scrub_every_s=0.0, wires=wires
        ),
        World(1),
        [*CHECKERS, Flips],
    )
    ended_well(job)
    assert len(flipped) == 1 and any(
        "damaged" in why for why in [*events(job, "damaged"), *events(job, "copy-refused")]
    )
    assert [
        e.data["source"] for site in job.sites for e in site.machine.events if e.kind == "resumed"
    ][1:] == ["memory"]


def own_slots(job: Job, rank: Rank) -> list[tuple[str, Any]]:
    own = f"{rank.site.settings.job_dir}/rank-{rank.rank:05}/slot-"
    return [
        (path, file) for path, file in rank.site.machine.files.every_file() if path.startswith(own)
    ]
