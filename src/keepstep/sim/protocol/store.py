"""Store: checkpoints of a simulated job, who writes them and who looks for them.

`SharedStore` is the place itself; `SimWriter` the persister of one keeper, with the acts and
answers of `runtime/persister/process.py`; `SimCheckpoints` what a keeper sees of it. A store may be
slow, full, away, torn (the persister dies in the middle) or lying: it says that all was written,
and what lies there is something else. A checkpoint is found whole or not by its own checksums, as
the real one is.

Not run here: torch, DCP's files and plans, fsspec.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from keepstep.coding.checksum import checksum
from keepstep.config import Settings
from keepstep.core.economics.retention import CheckpointInfo, parse_rules, to_keep
from keepstep.errors import DamageError, StoreError
from keepstep.model.mesh import LEADER
from keepstep.model.messages.persister import ActDone, CheckpointAct
from keepstep.model.snapshot import Stamp
from keepstep.model.units import MS_NS
from keepstep.ports import Memory
from keepstep.runtime.slot_locks import pin, unpin
from keepstep.sim.protocol.world import Process, World

Then = Callable[[ActDone], None]
Parts = dict[int, tuple[bytes, int]]  # by rank: bytes, and the checksum they should have


@dataclass
class SharedStore:
    """`act_ns`: how long an act takes, at most, while nothing is wrong."""

    world: World
    act_ns: int = 200 * MS_NS
    slow: int = 1  # times as long
    full: bool = False
    away: bool = False
    torn: float = 0.0  # of all acts
    lying: bool = False
    checkpoints: dict[int, Parts] = field(default_factory=dict)
    drafts: dict[tuple[int, int], Parts] = field(default_factory=dict)  # by step and attempt

    def __post_init__(self) -> None:
        self.random = self.world.stream("store")

    def damage_of(self, step: int) -> str | None:
        """What is wrong with a checkpoint."""
        wrong = [
            rank
            for rank, (data, expected) in self.checkpoints[step].items()
            if checksum(data) != expected
        ]
        return f"the part of rank {wrong[0]} fails its checksum" if wrong else None

    def read(self, step: int, rank: int) -> bytes:
        """Raises StoreError, DamageError."""
        if self.away:
            raise StoreError("the store does not answer")
        if step not in self.checkpoints:
            raise StoreError(f"there is no checkpoint of step {step}")
        data, expected = self.checkpoints[step][rank]
        if checksum(data) != expected:
            raise DamageError(
                f"the part of rank {rank} in the checkpoint of step {step} fails its checksum"
            )
        return data


class SimCheckpoints:
    """`ports.Checkpoints`."""

    def __init__(self, store: SharedStore, process: Process) -> None:
        self._store, self._process = store, process

    def usable(self) -> tuple[list[int], dict[int, str]]:
        if self._process.touch("list the store") or self._store.away:
            raise StoreError("the store does not answer")
        damage = {step: self._store.damage_of(step) for step in sorted(self._store.checkpoints)}
        return [step for step, why in damage.items() if why is None], {
            step: why for step, why in damage.items() if why is not None
        }


class SimWriter:
    """`ports.Writer`: one request after the other."""

    def __init__(
        self,
        store: SharedStore,
        settings: Settings,
        process: Process,
        new_memory: Callable[[Process], Memory],
    ) -> None:
        self._store, self._settings, self._keeper, self._new_memory = (
            store,
            settings,
            process,
            new_memory,
        )
        self._lines: list[tuple[CheckpointAct, Then]] = []
        # step, attempt and what this node has surveyed of it
        self._work: tuple[int, int, Parts] | None = None
        self._child: Process | None = None
        process.on_end.append(self.close)

    def ask(self, act: CheckpointAct, then: Then) -> None:
        self._lines.append((act, then))
        if self._keeper.touch("ask the writer"):
            self._keeper.after(MS_NS, self._died, "the simulation refused")
        elif len(self._lines) == 1:
            self._next()

    def close(self) -> None:
        if self._child is not None:
            self._child.end("its keeper needs it no more")
        self._child = None

    def _next(self) -> None:
        if self._child is None:
            self._child = child = self._keeper.machine.start("persister")
            self._memory = self._new_memory(child)
            child.on_end.append(lambda: self._ended(child))
        store = self._store
        delay_ns = MS_NS + store.random.randrange(store.act_ns * store.slow)
        self._child.after(delay_ns, self._act, self._child)

    def _ended(self, child: Process) -> None:
        if self._child is child and self._keeper.alive:
            self._child = None
            self._keeper.after(MS_NS, self._died, "the persister died")

    def _died(self, why: str) -> None:
        """It is gone, and with it everything it was told."""
        lines, self._lines, self._work = self._lines, [], None
        for _, heard in lines:
            heard(ActDone(False, why))

    def _act(self, child: Process) -> None:
        request, heard = self._lines[0]
        if self._store.torn and self._store.random.random() < self._store.torn:
            child.end("torn: killed while it writes")
            return
        ok, why, there = self._carry_out(request)
        self._keeper.after(MS_NS, self._answered, child, heard, ActDone(ok, why, there))

    def _answered(self, child: Process, heard: Then, answer: ActDone) -> None:
        if self._child is not child:
            return
        self._lines.pop(0)
        if self._lines:
            self._next()
        heard(answer)

    def _carry_out(self, request: CheckpointAct) -> tuple[bool, str, bool]:
        store, act, node = self._store, request.act, request.node
        stamp, attempt = Stamp(request.step, request.epoch), request.attempt
        ranks = list(request.ranks)
        if store.away or (store.full and act != "drop"):
            self._work = None
            return (
                False,
                "StoreError: the store does not answer"
                if store.away
                else "OSError: no space left in the store",
                False,
            )
        if act == "survey":
            return self._survey(stamp, attempt, node, ranks)
        if self._work is None or self._work[:2] != (stamp.step, attempt):
            return (
                act == "drop",
                f"node {node}: expected a survey of this attempt before its {act}, found none",
                False,
            )
        if act == "part":
            written = (
                self._work[2]
                if not store.lying
                else {r: (_lie(data), c) for r, (data, c) in self._work[2].items()}
            )
            store.drafts.setdefault((stamp.step, attempt), {}).update(written)
            return True, "written and read back", False
        draft = store.drafts.get((stamp.step, attempt), {})
        self._work = None
        if act == "drop":
            return True, f"attempt {attempt} is given up", False
        if len(draft) != sum(ranks):
            return False, f"expected the parts of {sum(ranks)} ranks, found {len(draft)}", False
        store.checkpoints[stamp.step] = draft
        infos = [CheckpointInfo(step, True, {}) for step in sorted(store.checkpoints)]
        for old in dict(to_keep(parse_rules(self._settings.keep), infos).removed):
            del store.checkpoints[old]
        return True, "published", False

    def _survey(
        self, stamp: Stamp, attempt: int, node: int, ranks: list[int]
    ) -> tuple[bool, str, bool]:
        first = sum(ranks[:node])
        slots = pin(self._memory, self._settings.job_dir, stamp, range(first, first + ranks[node]))
        if slots is None:
            return (
                False,
                f"node {node}: expected its ranks to hold {stamp}, found that one does not "
                "any more",
                False,
            )
        store = self._store
        try:
            if (
                node == LEADER
                and stamp.step in store.checkpoints
                and store.damage_of(stamp.step) is None
            ):
                return True, f"step {stamp.step} is in the store already, and intact", True
            parts: Parts = {}
            for slot in slots:
                header, _ = slot.verify_bytes()
                data = bytes(slot.payload[: header.payload_bytes])
                parts[header.rank] = (data, checksum(data))
        except (DamageError, LookupError) as error:
            return False, f"{type(error).__name__}: {error}", False
        finally:
            unpin(slots)
        self._work = (stamp.step, attempt, parts)
        return True, f"{len(parts)} ranks surveyed", False


def _lie(data: bytes) -> bytes:
    return bytes(len(data))
