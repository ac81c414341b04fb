"""Atlas: under which placement a step would be committed, in the epoch that a rank trains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from keepstep.model.mesh import Member, Mesh
from keepstep.model.messages.peers import HorizonWord
from keepstep.model.snapshot import Stamp
from keepstep.sim.protocol.checkers.atlas import Atlas, Generation

STAMP = Stamp(6, 1)


def _atlas() -> Atlas:
    """Of three machines, with a rank each."""
    nodes = [
        SimpleNamespace(machine=SimpleNamespace(number=number, host=f"10.0.0.{number}"))
        for number in range(3)
    ]
    job: Any = SimpleNamespace(nodes=nodes, plan=SimpleNamespace(nodes=3), world_size=3)
    return Atlas(job)


def _forms(atlas: Atlas, version: int, *machines: int) -> None:
    """Its nodes are these machines."""
    members = [
        Member(node, f"10.0.0.{number}", 20000, 1, 1) for node, number in enumerate(machines)
    ]
    nobody: Any = None
    atlas.formed(nobody, Mesh(version, 0, tuple(members), "secret"))


def _tells(atlas: Atlas, version: int, epoch: int) -> None:
    nobody: Any = None
    word = HorizonWord(version, epoch, "copies:2", "asked for", None, None, None, (), -1)
    atlas.said(nobody, 1, word)


def _holder(found: Generation | None) -> int | None:
    """The machine that keeps the copy of rank 0."""
    if found is None:
        return None
    (holder,) = found.assignments[0].holders
    return found.machines[holder]


def test_who_still_trains_is_protected_as_its_own_mesh_was_told() -> None:
    atlas = _atlas()
    _forms(atlas, 1, 0, 1, 2)
    _tells(atlas, 1, epoch=1)
    assert _holder(atlas.would_be(STAMP, 1)) == 1

    _forms(atlas, 2, 0, 2, 1)
    assert _holder(atlas.would_be(STAMP, 1)) == 1, "nobody has told anything in the newest mesh"
    assert atlas.would_be(STAMP, 2) is None, "what was told before counts for no newer epoch"

    _tells(atlas, 2, epoch=2)
    assert _holder(atlas.would_be(STAMP, 2)) == 2
    assert _holder(atlas.would_be(STAMP, 1)) == 1


def test_before_a_word_of_an_epoch_the_newest_mesh_holds() -> None:
    """The leader's own node reads of a commit before any word of it is said."""
    atlas = _atlas()
    _forms(atlas, 1, 0, 1, 2)
    assert atlas.would_be(STAMP, 1) is None
    _tells(atlas, 1, epoch=1)
    assert _holder(atlas.would_be(STAMP, 2)) == 1
