"""Whoever looks at a job's memory may look at the moment when its keeper removes it: a directory
that vanishes while it is listed has nothing in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keepstep.config import job_dir_of
from keepstep.dashboard.collective_profiles import network_view
from keepstep.dashboard.finding import find_leftovers
from keepstep.dashboard.moment import Moment
from keepstep.dashboard.slots import held_rows, slot_rows
from keepstep.edge.os.job_directory import claim_job_dir
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot, ranks_in, slot_path
from keepstep.edge.shm.status_pages import read_pages
from keepstep.testing.crew import CrewPlace, remains_of
from keepstep.testing.memory import in_words
from keepstep.testing.witness import Witness

NOW = Moment(1, 1)


def search(job_dir: Path) -> object:
    """What CI failed of."""
    place = CrewPlace(job_dir, job_dir.with_name("journal.jsonl"))
    witness = Witness.__new__(Witness)
    witness.places = [place]
    witness._journals = []
    witness._pages = {}
    witness._horizon = None
    witness._search()
    return witness._pages


LOOKS: dict[str, Callable[[Path], object]] = {
    "ranks": lambda job_dir: ranks_in(MEMORY, job_dir),
    "status pages": read_pages,
    "slots": lambda job_dir: slot_rows(job_dir, NOW),
    "held slots": lambda job_dir: held_rows(job_dir, NOW),
    "collective profiles": lambda job_dir: network_view(job_dir).ranks,
    "leftovers": lambda job_dir: find_leftovers(job_dir.parents[1]),
    "a drill's remains": lambda job_dir: remains_of([CrewPlace(job_dir, job_dir / "journal")]),
    "a drill's words": lambda job_dir: list(in_words([CrewPlace(job_dir, job_dir / "journal")]))[
        1:
    ],
    "a drill's witness": search,
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
@pytest.mark.parametrize("what", ["", "rank-00000", "held"])
def test_it_vanishes_while_it_is_listed(
    look: Callable[[Path], object], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_dir = job_dir_of(tmp_path, "j")
    claim_job_dir(job_dir)
    for root in (job_dir, job_dir / "held"):
        path = slot_path(root, 0, 0)
        path.parent.mkdir(parents=True)
        Slot.create(MEMORY, path, 4096, 4096).close()
    with monkeypatch.context() as patched:
        for name in ("listdir", "scandir"):
            patched.setattr(os, name, _vanished(getattr(os, name), job_dir / what))
        look(job_dir)


def _vanished(listing: Callable[..., Any], doomed: Path) -> Callable[..., Any]:
    """The real one, but that the doomed directory has gone just before it looks."""

    def looked(directory: Any = ".", *rest: Any) -> Any:
        if not isinstance(directory, int) and Path(directory) == doomed:
            raise FileNotFoundError(2, "No such file or directory", str(directory))
        return listing(directory, *rest)

    return looked
