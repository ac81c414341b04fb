"""CheckpointsAreWhole: what is published is whole and right, and stays until newer ones take its
place.

Looked at from outside: when the manifest of a checkpoint is removed, and when the run is over, with
the product's own store over what lies on the disk then.

Not verified: what a disk that lied has lost; that what its lists hid for a while is gone on from;
that a checkpoint is written as often as was asked for; what is left of attempts that came to
nothing; that the last step of a run stays which another one of the same job has overtaken.
"""

from __future__ import annotations

from keepstep.edge.store.draft import MANIFEST
from keepstep.edge.store.store import Store
from keepstep.errors import DamageError, StoreError
from keepstep.model.events import Event
from keepstep.model.snapshot import Stamp
from keepstep.sim.protocol.checkers.atlas import Atlas
from keepstep.sim.protocol.checkers.checker import Checker
from keepstep.sim.protocol.checkers.inspection import onlooker
from keepstep.sim.protocol.job.checkpoint_format import read_state
from keepstep.sim.protocol.job.job import KEPT, SimJob
from keepstep.sim.protocol.job.persisters import open_store
from keepstep.sim.protocol.job.program import Program
from keepstep.sim.protocol.world.machine import Machine
from keepstep.sim.protocol.world.world import Process


class CheckpointsAreWhole(Checker):
    NAME = "checkpoints"

    def __init__(self, job: SimJob, atlas: Atlas) -> None:
        super().__init__(job, atlas)
        self._newest = -1  # step of which a keeper said that it is in the store

    def recorded(self, machine: Machine, event: Event) -> None:
        if event.kind == "persisted":
            self._newest = max(self._newest, event.data["step"])

    def went(self, program: Program, source: str, stamp: Stamp, epoch: int) -> None:
        if self.job.around.settings.store is None:
            return
        self._newest = min(self._newest, stamp.step)  # what is beyond it is computed again
        if source == "fresh":
            steps = self._shown_and_whole()
            if steps:
                self.violated(f"all start afresh, and the store has shown {steps} all along")

    def _shown_and_whole(self) -> list[int]:
        """What a disk that lies has kept all the same is a checkpoint as any other."""
        store, disk = self._store(), self.job.around.disk
        shown = (s for s in self._steps(store) if store.place(s, MANIFEST).path not in disk.hidden)
        return [step for step in shown if not disk.has_lied or self._is_whole(store, step)]

    def removed(self, process: Process, path: str) -> None:
        """Called before it is."""
        is_ours = process.world is self.job.world
        if not is_ours or not path.endswith(f"/{MANIFEST}") or self.job.around.disk.has_lied:
            return
        store = self._store()
        steps = self._steps(store)
        whole = [step for step in steps if store.intact(step) is not None]
        step = next((s for s in whole if store.place(s, MANIFEST).path == path), None)
        if step is not None and len([s for s in whole if s > step]) < KEPT:
            self.violated(f"{process.name} removes step {step}, and there are {whole}")

    def over(self) -> None:
        if self.job.around.settings.store is None:
            return
        store = self._store()
        whole = [step for step in self._steps(store) if self._is_whole(store, step)]
        for step in whole:
            self._compare(store, step)
        # another run of the same job has gone on from what is here: its later epoch counts
        is_overtaken = self.job.around.oracle.beside is not None
        has_lied = self.job.around.disk.has_lied
        if not has_lied and not is_overtaken and max(whole, default=-1) < self._newest:
            self.violated(f"step {self._newest} was in the store, and at the end there are {whole}")

    def _steps(self, store: Store) -> list[int]:
        """Those of the job's checkpoints that count, newest first."""
        found = store.follow().list_checkpoints({self.job.plan.job})
        return [manifest.step for manifest in found.checkpoints]

    def _store(self) -> Store:
        around = self.job.around
        assert around.settings.store is not None
        process = onlooker(self.job.nodes[0].machine)
        return open_store(around.settings.store, around.disk.as_it_lies(), process)

    def _is_whole(self, store: Store, step: int) -> bool:
        try:
            store.verify(step)
        except (DamageError, StoreError) as error:
            if not self.job.around.disk.has_lied:
                self.violated(f"step {step} is published and is not whole: {error}")
            return False
        return True

    def _compare(self, store: Store, step: int) -> None:
        oracle = self.job.around.oracle
        for rank in range(store.read_manifest(step).world_size):
            state = read_state(store, step, rank, oracle.nbytes(rank))
            if not oracle.is_checkpoint(step, rank, state):
                self.violated(f"rank {rank} finds {len(state)} wrong bytes in step {step}")
