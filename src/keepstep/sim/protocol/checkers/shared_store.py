"""Shared store: of two runs that use one store neither takes nor removes what is the other's.

What is published is removed, or what it is made of, by a process of its own job alone, and by none
of a run that it has overtaken. A job that adopts nothing goes on from nothing that another has
written, and begins nothing of its own in a store that is another's. At the end all that is
published is whole.

Not verified: what is left of attempts that came to nothing; which of two jobs the store is given
to, when both begin at once.
"""

from __future__ import annotations

from keepstep.edge.store.draft import MANIFEST
from keepstep.edge.store.manifest import Manifest, manifest_from_bytes
from keepstep.errors import DamageError
from keepstep.model.snapshot import Stamp
from keepstep.sim.protocol.checkers.inspection import onlooker
from keepstep.sim.protocol.faults.beside import Beside
from keepstep.sim.protocol.job.observer import Observer
from keepstep.sim.protocol.job.persisters import open_store
from keepstep.sim.protocol.job.program import Program
from keepstep.sim.protocol.world.world import Process


class StoreIsShared(Observer):
    """Of the run beside which there is another one."""

    NAME = "shared store"

    def __init__(self, beside: Beside) -> None:
        self._beside = beside
        self._job, self._other = beside.job, beside.other
        self._disk = beside.job.around.disk

    def _violated(self, what: str) -> None:
        if not self._job.violations:
            self._job.violate(self.NAME, what)

    def removed(self, process: Process, path: str) -> None:
        """Called before it is, whoever does it."""
        directory, _, name = path.rpartition("/")
        file = self._disk.files.get(f"{directory}/{MANIFEST}")
        manifest = None if file is None else _manifest(bytes(file.data))
        if file is None or manifest is None or name not in (MANIFEST, *manifest.files):
            return
        is_other = process.world is self._other.world
        who = f"{process.name} of {'the other' if is_other else 'this'} run"
        job = (self._other if is_other else self._job).plan.job
        if manifest.job != job:
            self._violated(f"{who} (job {job}) removes {path}, which is of job {manifest.job}")
        elif name != MANIFEST:
            self._violated(f"{who} removes {path}, and the checkpoint is published")
        elif self._beside.is_overtaken and is_other and file.writer.world is self._job.world:
            self._violated(f"{who} removes {path}, which its successor has written")

    def over(self) -> None:
        if self._disk.has_lied:
            return
        process = onlooker(self._job.nodes[0].machine)
        url = self._job.around.settings.store
        assert url is not None
        store = open_store(url, self._disk.as_it_lies(), process)
        for manifest in store.published():
            try:
                store.verify(manifest.name)
            except DamageError as error:
                self._violated(f"{manifest.name.directory} is published and not whole: {error}")


class OtherTakesNothing(Observer):
    """Of the other run."""

    def __init__(self, beside: Beside) -> None:
        self._beside = beside

    def went(self, program: Program, source: str, stamp: Stamp, epoch: int) -> None:
        beside = self._beside
        if source == "store" and beside.other.world.now_ns > beside.slept_ns:
            beside.is_overtaken = False  # it has begun anew, with what its successor has written
            beside.job.around.oracle.beside = beside.other.around.oracle  # and overtakes that one
        # A disk that lies may have torn the record of whose it is, and nothing else may be there.
        if beside.kind == "another" and not beside.job.around.disk.has_lied:
            beside.other.violate(
                StoreIsShared.NAME,
                f"rank {program.who.rank} of another job goes on from {stamp} ({source}), and the "
                "store is not its own",
            )


def _manifest(raw: bytes) -> Manifest | None:
    try:
        return manifest_from_bytes(raw, "the disk", None)
    except DamageError:
        return None
