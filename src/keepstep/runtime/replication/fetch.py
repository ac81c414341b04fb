"""Fetch: one rank's snapshot from other nodes' memory into a slot of its own: from copies, in
parallel, or decoded from a stripe group, of whose pieces others add up what they can.

Comes in: where it can be had (`core/resume/sources.py`). Goes out: a sealed slot that proved whole
by its own table, or the reason why not. What proves the payload comes first, all of it from one
node. Everything but blocks happens in the keeper's loop.

Invariant: of several with a copy, one that fails, or gives what does not prove, costs only itself:
it is left out, and what it owed is asked of the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import NamedTuple

from keepstep.core.redundancy.stripes import (
    Combine,
    StripeRegion,
    Stripes,
    chunks,
    decode_plan,
    stripes_of_snapshots,
)
from keepstep.edge.shm.slot import Slot, rank_dir, slot_path, slot_paths
from keepstep.edge.shm.slot_header import capacity_of, parse_page
from keepstep.errors import DamageError, MemoryBudgetError
from keepstep.model.kept import KeptBlocks, kept_of
from keepstep.model.messages.peers import FetchRanges, SnapshotUnproven
from keepstep.model.restore_sources import RestoreSource
from keepstep.model.shares import blocks_of, runs_of
from keepstep.model.snapshot import SlotHeader, SlotState, Stamp
from keepstep.model.units import KIB, PAGE_BYTES
from keepstep.model.wire import BlockRange, Part
from keepstep.ports import Memory
from keepstep.runtime.keeper_world import KeeperWorld
from keepstep.runtime.replication.decode import PayloadDecoder
from keepstep.runtime.replication.encode import sizes_of_header
from keepstep.runtime.replication.mesh_links import MeshLinks
from keepstep.runtime.replication.peer_inbox import BlockTaker
from keepstep.runtime.replication.receive import (
    IncomingSnapshot,
    WantedRanges,
    check_holes,
    in_runs,
    make_holes,
    prove,
    ranges_of,
)
from keepstep.runtime.replication.repair_sums import RepairSums
from keepstep.runtime.replication.serve import SnapshotServer
from keepstep.runtime.replication.step_sources import CHUNK_BYTES, StepSources

STEPS_AHEAD = 16
HEADER = BlockRange(Part.HEADER, 0, PAGE_BYTES)
_PROVING = (Part.TABLE, Part.MANIFEST)  # what the header names


@dataclass(frozen=True, slots=True)
class FetchResult:
    """How it ended. `why` is None when the slot is sealed; `is_away`: because nobody could be
    reached, not because nobody has it. `sources`: the nodes that had not failed."""

    rank: int
    stamp: Stamp
    why: str | None
    nbytes: int
    took_ns: int
    sources: tuple[int, ...]
    is_away: bool


class _Proof(NamedTuple):
    """What proves a payload, as one node gave all of it: `pieces`, which themselves have proven."""

    header: SlotHeader
    capacity: int
    pieces: dict[BlockRange, bytes]


class Fetch:
    """One rank's. `ended` is called once."""

    def __init__(
        self,
        world: KeeperWorld,
        links: MeshLinks,
        server: SnapshotServer,
        repair_sums: RepairSums,
        job_dir: Path,
        job_hash: bytes,
        source: RestoreSource,
        stamp: Stamp,
        ended: Callable[[FetchResult], None],
        path: Path | None = None,
        has_one_slot: bool = False,
    ) -> None:
        """`path`: where the slot is to be; None: among the rank's own, in place of the one that is
        worth least, once it is whole. Until then theirs stay as they are: the rank has them mapped,
        and goes on with them when this fails.

        `has_one_slot`: there is room for no other. The rank's own is taken for it, if what it holds
        is worth nothing beside what is fetched; when this fails it is gone, and made anew.
        """
        self._world, self._memory, self._clock = world, world.memory, world.clock
        self._links, self._server, self._repair_sums = links, server, repair_sums
        self._job_dir, self._job_hash = job_dir, job_hash
        self.source, self.stamp, self._ended = source, stamp, ended
        self._rank = source.rank
        self._takes_a_place = path is None
        self._has_one_slot = has_one_slot
        # A name of its own: a thread may still be making the one of a fetch that was stopped.
        own_name = f"fetched-{self._clock.monotonic_ns()}"
        self._path = path or rank_dir(job_dir, source.rank) / own_name
        self._nodes = list(source.copies) or [member.node for member in source.members]
        self._ranges = WantedRanges(lambda: links.call_in_loop(self._go_on))
        self._asked: dict[int, set[tuple[int, BlockRange]]] = {node: set() for node in self._nodes}
        self._began_ns = self._clock.monotonic_ns()
        self._nbytes = 0
        self._incoming: IncomingSnapshot | None = None  # once its size is known
        self._over = self._is_away = False
        self._is_decoding = False  # a worker rebuilds
        self._sources: StepSources | None = None  # once it is decoded
        self._road: Generator[None, None, None] = (
            self._by_copies() if source.copies else self._by_decoding()
        )

    def start(self) -> None:
        """Ask for it."""
        for rank in dict.fromkeys((self._rank, *self.source.stripe_group)):
            self._links.expect(rank, self.stamp, self._ranges)
        self._go_on()

    # -- the road: a generator that is advanced whenever something has come

    def _go_on(self) -> None:
        if self._over:
            return
        try:
            next(self._road)
        except StopIteration:
            self._end(None)
        except DamageError as error:
            self._doubt(self._asked)
            self._end(str(error))
        except (LookupError, MemoryBudgetError) as error:
            self._end(str(error))

    def _doubt(self, nodes: Iterable[int]) -> None:
        """What came does not prove: who gave it may hold it so, and has proven it long ago."""
        for node in nodes:
            if node == self._links.node:
                self._server.doubt()
            else:
                unproven = SnapshotUnproven(self._links.version, self._rank, self.stamp)
                self._links.send(node, unproven)

    def _unproven(self, node: int, why: str) -> None:
        """What that one gave does not prove."""
        if node in self._asked:
            self._doubt([node])
            self.source_failed(node, why)

    def _by_copies(self) -> Generator[None, None, None]:
        incoming = yield from self._make_slot((yield from self._proof()))
        wanted = incoming.missing()
        share = -(-len(wanted) // len(self._nodes))
        for index, node in enumerate(list(self._nodes)):  # contiguous shares: each holder reads on
            if not self._nodes:
                break
            asked = node if node in self._asked else self._nodes[0]  # it may have failed already
            self._ask(asked, [(self._rank, r) for r in wanted[index * share : (index + 1) * share]])
        while incoming.missing():
            yield
        incoming.seal(self._job_hash)

    def _proof(self) -> Generator[None, None, _Proof]:
        """Of the first that gives one. Raises LookupError when nobody does."""
        for node in list(self._nodes):
            try:
                return (yield from self._proof_of(node))
            except DamageError as error:
                self._unproven(node, str(error))
            except LookupError:
                continue  # it is left out already
        raise LookupError("nobody is left who could give what proves it")

    def _proof_of(self, node: int) -> Generator[None, None, _Proof]:
        """Raises DamageError, or LookupError when the node has failed."""
        page, header = yield from self._header_of(node, self._rank)
        ranges = [range_ for range_ in self._ranges_of(header) if range_.part in _PROVING]
        pieces = yield from self._bring(node, self._rank, ranges)
        parts = {
            part: b"".join(data for range_, data in pieces.items() if range_.part is part)
            for part in _PROVING
        }
        prove(header, parts[Part.TABLE], parts[Part.MANIFEST], str(self._path))
        return _Proof(header, capacity_of(page), {**pieces, HEADER: page})

    def _header_of(self, node: int, rank: int) -> Generator[None, None, tuple[bytes, SlotHeader]]:
        """Its page, and what that says."""
        page = (yield from self._bring(node, rank, [HEADER]))[HEADER]
        header = parse_page(page, self._path)
        if (header.job_hash, header.rank, header.stamp) != (self._job_hash, rank, self.stamp):
            raise DamageError(
                f"expected {self.stamp} of rank {rank}, was sent {header.stamp} of rank "
                f"{header.rank}"
            )
        if header.state is not SlotState.SEALED:
            raise DamageError(f"{self.stamp} of rank {rank} is {header.state.name.lower()}")
        lacking, size = blocks_of(header.lacking), self._memory.block_bytes
        check_holes(header.payload_bytes, lacking, size, str(self._path))
        return page, header

    def _bring(
        self, node: int, rank: int, ranges: list[BlockRange]
    ) -> Generator[None, None, dict[BlockRange, bytes]]:
        """All of these of that node alone. Raises LookupError when it has failed."""
        if node in self._asked:
            self._want(node, [(rank, range_) for range_ in ranges])
        while not all(self._ranges.has(rank, range_) for range_ in ranges):
            if node not in self._asked:
                raise LookupError(f"node {node} has failed")
            yield
        return {range_: bytes(self._ranges.take(rank, range_)) for range_ in ranges}

    def _make_slot(self, proof: _Proof) -> Generator[None, None, IncomingSnapshot]:
        """Its slot, with all but the payload. Making that is work for another thread: the first
        touch of memory takes long."""
        header, capacity, pieces = proof
        manifest_capacity = header.manifest_bytes + header.manifest_bytes // 2 + 4 * KIB
        made: list[Slot | MemoryBudgetError] = []

        def make() -> Slot | MemoryBudgetError:
            try:
                if self._has_one_slot and self._takes_a_place:
                    slot = self._take_only(header)
                    if slot is not None:
                        return slot
                return Slot.create(self._memory, self._path, capacity, manifest_capacity)
            except MemoryBudgetError as error:
                return error

        def take(slot: Slot | MemoryBudgetError) -> None:
            made.append(slot)
            if self._over and isinstance(slot, Slot):
                self._memory.remove(slot.path)
                slot.close()
            self._go_on()

        self._world.workers.submit(make, take)
        while not made:
            yield
        slot = made[0]
        if isinstance(slot, MemoryBudgetError):
            raise slot
        slot.begin(self._job_hash, self._rank, header.world_size, header.incarnation, self.stamp)
        lacking = blocks_of(header.lacking)
        make_holes(slot, header.payload_bytes, lacking)
        self._incoming = IncomingSnapshot(
            slot,
            self._rank,
            self.stamp,
            header.payload_bytes,
            header.manifest_bytes,
            self._ranges_of(header),
            lambda: self._links.call_in_loop(self._go_on),
            lacking=lacking,
        )
        for range_, data in pieces.items():
            self._incoming.put(range_, data)
        if self.source.copies:
            self._incoming.believe_table(
                lambda node, why: self._links.call_in_loop(lambda: self._unproven(node, why))
            )
            self._links.expect(self._rank, self.stamp, self._incoming)
        return self._incoming

    def _ranges_of(self, header: SlotHeader) -> list[BlockRange]:
        size, lacking = self._memory.block_bytes, blocks_of(header.lacking)
        return ranges_of(header.payload_bytes, header.manifest_bytes, size, lacking)

    def _take_only(self, wanted: SlotHeader) -> Slot | None:
        """The rank's only slot, under the name that this fetch has for it: what is written there is
        not found before it is whole. None when it is too small, somebody reads it, or it holds what
        may still be gone back to."""
        path = slot_path(self._job_dir, self._rank, 0)
        try:
            with closing(Slot(self._memory, path)) as slot:
                lacking = blocks_of(wanted.lacking)
                if not slot.fits(wanted.payload_bytes, wanted.manifest_bytes, lacking):
                    return None
                if not slot.lock(exclusive=True):
                    return None
                try:
                    header = slot.header()
                    is_kept = header.state is SlotState.SEALED and header.stamp < self.stamp
                except DamageError:
                    is_kept = False
                slot.unlock()
            if is_kept:
                return None
            self._memory.rename(path, self._path)
            return Slot(self._memory, self._path)
        except (DamageError, OSError):  # there is none, or nothing that is one
            return None

    def _by_decoding(self) -> Generator[None, None, None]:
        proof = yield from self._proof_of(self._nodes[0])
        header = proof.header
        size = self._memory.block_bytes
        sizes = {self._rank: sizes_of_header(header, size).kept_bytes}
        for rank in self.source.stripe_group:
            if rank != self._rank:
                _, other = yield from self._header_of(self._nodes[0], rank)
                sizes[rank] = sizes_of_header(other, size).kept_bytes
        incoming = yield from self._make_slot(proof)
        group, tolerates = self.source.stripe_group, self.source.tolerates
        nbytes = [sizes[rank] for rank in group]
        stripes = stripes_of_snapshots(group, tolerates, nbytes, self._memory.block_bytes)
        kept = kept_of(header.payload_bytes, size, header.lacking)
        yield from self._decode(stripes, incoming, kept)
        incoming.seal(self._job_hash)

    def _decode(
        self, stripes: Stripes, incoming: IncomingSnapshot, kept: KeptBlocks
    ) -> Generator[None, None, None]:
        node_of = dict(self.source.members)
        steps = self._steps(stripes, node_of)
        decoder = PayloadDecoder(stripes, incoming, kept)
        sources = self._sources = StepSources(
            *(self._world, self._links.node, self.stamp, stripes, node_of),
            *(self._repair_sums, self._ranges, self._want, self._go_on),
        )
        ahead: deque[Combine] = deque()
        while True:
            for step in islice(steps, STEPS_AHEAD - len(ahead)):
                ahead.append(step)
                sources.want(step)
            if not ahead and not self._is_decoding:
                return
            ready = list(takewhile(sources.has, ahead))
            if not ready or self._is_decoding:
                yield
                continue
            for _ in ready:
                ahead.popleft()
            self._rebuild(decoder, [(step, sources.take(step)) for step in ready])

    def _steps(self, stripes: Stripes, node_of: Mapping[int, int]) -> Iterator[Combine]:
        """All that rebuild the payload, in the order of its bytes."""
        missing = [rank for rank in self.source.stripe_group if rank not in node_of]
        lost = missing[: stripes.tolerates]
        for combine in decode_plan(stripes, lost, self._rank):
            if combine.targets[0].region is StripeRegion.DATA:
                yield from (step for step in chunks(combine, CHUNK_BYTES) if step.targets)

    def _rebuild(
        self, decoder: PayloadDecoder, ready: list[tuple[Combine, bytearray | list[bytearray]]]
    ) -> None:
        """Beside the loop: it takes as long as reading and writing memory does."""

        def work() -> None:
            for step, found in ready:
                if isinstance(found, bytearray):
                    decoder.take(step, found)
                else:
                    decoder.rebuild(step, found)

        def done(_: None) -> None:
            self._is_decoding = False
            self._go_on()

        self._is_decoding = True
        self._world.workers.submit(work, done)

    # -- asking

    def _want(self, node: int, wanted: list[tuple[int, BlockRange]]) -> None:
        for rank, range_ in wanted:
            self._ranges.want(node, rank, range_)
        self._ask(node, wanted)

    def _ask(self, node: int, wanted: list[tuple[int, BlockRange]]) -> None:
        if self._over:
            return
        self._asked[node].update(wanted)
        for rank in dict.fromkeys(rank for rank, _ in wanted):
            ranges = tuple(range_ for r, range_ in wanted if r == rank)
            if not ranges:
                continue
            if node == self._links.node:
                self._take_here(rank, ranges)
                continue
            self._nbytes += sum(length for _, _, length in ranges)
            for run in in_runs(ranges):
                asked = FetchRanges(self._links.version, rank, self.stamp, run, restores=True)
                if not self._links.send(node, asked):
                    self.source_failed(node, "it cannot be asked", is_away=True)
                    return

    def _take_here(self, rank: int, ranges: tuple[BlockRange, ...]) -> None:
        """This node is a source itself."""
        here, taker = self._links.node, self._taker()
        try:
            for range_ in ranges:
                self._server.copy_here(rank, self.stamp, range_, taker, here)
        except (LookupError, DamageError) as error:
            self.source_failed(here, str(error))

    def _taker(self) -> BlockTaker:
        """Who takes what is asked for now."""
        if self._incoming is not None and self.source.copies:
            return self._incoming
        return self._ranges

    def source_failed(self, node: int, why: str, is_away: bool = False) -> None:
        """That node cannot give what it owes, perhaps only because it cannot be reached."""
        if self._over or node not in self._asked:
            return
        self._is_away |= is_away
        owed = self._asked.pop(node)
        self._nodes.remove(node)
        if not self.source.copies or not self._nodes:
            self._end(f"node {node}: {why}")
            return
        if self._incoming is None:  # what proves it is asked of another one as a whole
            self._links.call_in_loop(self._go_on)
            return
        self._incoming.refuse(node)
        missing = set(self._incoming.missing())
        self._ask(self._nodes[0], [(rank, r) for rank, r in sorted(owed) if r in missing])

    def link_is_dead(self, node: int, why: str) -> None:
        """Nothing comes from there any more."""
        if self._incoming is not None:
            self._incoming.link_is_gone(node)
        self.source_failed(node, why, is_away=True)

    def stop(self) -> None:
        """Another mesh, or nobody waits for it any more."""
        self._end(None, tell=False)

    def _end(self, why: str | None, tell: bool = True) -> None:
        if self._over:
            return
        self._over = True
        if self._sources is not None:
            self._sources.end()
            self._nbytes += self._sources.nbytes
        self._links.expect_no_more(self._ranges)
        if self._incoming is not None:
            self._links.expect_no_more(self._incoming)
            if why is not None or not tell:
                # a thread may still be writing there: it must not be found
                self._memory.remove(self._path)
            elif self._takes_a_place:
                least = 1 if self._has_one_slot else 2
                path = free_slot_path(self._memory, self._job_dir, self._rank, self.stamp, least)
                self._memory.rename(self._path, path)
            self._incoming.slot.close()
        if tell:
            took_ns = self._clock.monotonic_ns() - self._began_ns
            self._ended(
                FetchResult(
                    self._rank,
                    self.stamp,
                    why,
                    self._nbytes,
                    took_ns,
                    tuple(self._nodes),
                    self._is_away,
                )
            )


def free_slot_path(memory: Memory, job_dir: Path, rank: int, stamp: Stamp, least: int = 2) -> Path:
    """The slot of that rank that is worth least: none, empty or damaged, the newest that everybody
    goes back behind, else the oldest. `least`: so many it has."""
    worth: list[tuple[int, int, int]] = []
    paths = {int(p.name.split("-")[1]): p for p in slot_paths(memory, job_dir, rank)}
    for index in range(max(least, len(paths))):
        try:
            slot = Slot(memory, paths[index])
            header = slot.header()
            slot.close()
        except (KeyError, OSError, DamageError):
            worth.append((0, 0, index))
            continue
        if header.state is not SlotState.SEALED:
            worth.append((1, 0, index))
        else:
            step = header.stamp.step
            worth.append((2, -step, index) if header.stamp > stamp else (3, step, index))
    return slot_path(job_dir, rank, min(worth)[2])


def replace_bytes(memory: Memory, slot: Slot, proven: Path) -> str | None:
    """Make a pinned slot what another slot, just fetched and proven, is: payload, table, manifest,
    header last. None, or why not."""
    fresh = Slot(memory, proven)
    try:
        header, manifest = fresh.verify_bytes()
        if header.payload_bytes > slot.capacity or len(manifest) > slot.manifest_capacity:
            return f"{slot.path} is smaller than what was fetched"
        if slot.lacking() - (lacking := fresh.lacking()):
            return f"{slot.path} has holes where what was fetched has none"
        kept = [block for block in range(header.block_count) if block not in lacking]
        size, payload = header.block_bytes, fresh.part(Part.PAYLOAD, header)
        for first, count in runs_of(kept):
            run = payload[first * size : (first + count) * size]
            slot.payload[first * size : first * size + len(run)] = run
        for part in (Part.TABLE, Part.MANIFEST):
            slot.part(part, header)[:] = fresh.part(part, header)
        slot.adopt(header)
        slot.verify_bytes()
    except (DamageError, LookupError) as error:
        return str(error)
    finally:
        fresh.close()
    return None
