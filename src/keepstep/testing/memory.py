"""Memory: what lies in the job directories of a drill's nodes at this moment, in words.

Comes in: where they are. Goes out: for each node a line of what is committed and what is to be
protected next, and one for each rank's own, held and parity slots. For whoever has to find out why
something does not go on; decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot, rank_dir, ranks_in, slot_paths
from keepstep.edge.shm.slot_store import SHELVES
from keepstep.errors import DamageError
from keepstep.testing.crew import CrewPlace


def in_words(places: Sequence[CrewPlace]) -> Iterator[str]:
    for node, place in enumerate(places):
        yield f"node {node}: {_horizon(place.job_dir)}"
        for below in (*SHELVES.values(), ""):
            root = place.job_dir / below
            for rank in ranks_in(MEMORY, root):
                slots = ", ".join(_slot(path) for path in slot_paths(MEMORY, root, rank))
                if slots:
                    directory = rank_dir(root, rank).relative_to(place.job_dir)
                    yield f"node {node}: {directory}: {slots}"


def _horizon(job_dir: Path) -> str:
    try:
        page = HorizonPage(MEMORY, job_dir, make=False)
    except (OSError, ValueError):
        return "nothing is committed between nodes"
    last = page.last()
    page.close()
    return (
        f"epoch {last.epoch}, committed {last.committed}, to be protected {last.target}, "
        f"inherited {last.inherited}"
    )


def _slot(path: Path) -> str:
    try:
        slot = Slot(MEMORY, path)
    except (DamageError, OSError) as error:
        return f"{path.name} cannot be read ({error})"
    try:
        header = slot.header()
        is_pinned = not slot.lock(exclusive=True)
        return (
            f"{path.name} {header.state.name.lower()} "
            f"{header.stamp}{', pinned' if is_pinned else ''}"
        )
    except DamageError as error:
        return f"{path.name} damaged ({error})"
    finally:
        slot.close()
