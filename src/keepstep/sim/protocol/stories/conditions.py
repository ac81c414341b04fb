"""Conditions: what a rule of a story may wait for.

Each is a predicate over what happens on the stage. `LOOKS` are about what lies in memory, and are
looked for again and again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keepstep.model.snapshot import SlotState
from keepstep.sim.protocol.faults.acts import header_of
from keepstep.sim.protocol.stories.phrases import PLACE, Phrases, fields
from keepstep.sim.protocol.stories.stage import Happened, StoryStage
from keepstep.sim.protocol.world.memory import File

Condition = Callable[[StoryStage, Happened], bool]
Look = Callable[[StoryStage], bool]

CONDITIONS: Phrases[Condition] = Phrases("a condition")
LOOKS: Phrases[Look] = Phrases("a condition")


@CONDITIONS.phrase(
    "rank 0 has completed step 5", r"rank (?P<rank>\d+) has completed step (?P<step>\d+)"
)
def _stepped(rank: str, step: str) -> Condition:
    return lambda stage, it: it == Happened("stepped", int(rank), int(step))


@CONDITIONS.phrase("rank 0 seals step 5", r"rank (?P<rank>\d+) seals step (?P<step>\d+)")
def _sealed(rank: str, step: str) -> Condition:
    return lambda stage, it: it == Happened("sealed", int(rank), int(step))


@CONDITIONS.phrase("rank 0 asks where to resume", r"rank (?P<rank>\d+) asks where to resume")
def _joined(rank: str) -> Condition:
    return lambda stage, it: (it.kind, it.whose) == ("joined", int(rank))


@CONDITIONS.phrase(
    "rank 0 has loaded what was offered", r"rank (?P<rank>\d+) has loaded what was offered"
)
def _loaded(rank: str) -> Condition:
    return lambda stage, it: (it.kind, it.whose) == ("loaded", int(rank))


@CONDITIONS.phrase("rank 0 may train", r"rank (?P<rank>\d+) may train")
def _went(rank: str) -> Condition:
    return lambda stage, it: (it.kind, it.whose) == ("went", int(rank))


@CONDITIONS.phrase("rank 0 has done its last step", r"rank (?P<rank>\d+) has done its last step")
def _done(rank: str) -> Condition:
    return lambda stage, it: (it.kind, it.whose) == ("done", int(rank))


@CONDITIONS.phrase("all ranks have done their last step", r"all ranks have done their last step")
def _all_done() -> Condition:
    return lambda stage, it: it.kind == "all done"


@CONDITIONS.phrase(
    "another agent begins on machine 0", rf"another agent begins on (?P<place>{PLACE})"
)
def _agent_came(place: str) -> Condition:
    return lambda stage, it: it.kind == "agent came" and it.whose == stage.machine_number(place)


@CONDITIONS.phrase("the agents have written 0/full/0", r"the agents have written (?P<key>\S+)")
def _written(key: str) -> Condition:
    return lambda stage, it: (it.kind, it.whose) == ("written", key)


@CONDITIONS.phrase(
    "a keeper says accept with rank=0 stamp.step=3",
    r"a keeper says (?P<kind>[\w-]+)(?: with (?P<having>.+))?",
)
def _said(kind: str, having: str | None) -> Condition:
    wanted = fields(having)
    return lambda stage, it: (it.kind, it.whose) == ("said", kind) and _has(it.data, wanted)


@CONDITIONS.phrase(
    "node-lost with node=1 is recorded on machine 0",
    rf"(?P<kind>[\w-]+)(?: with (?P<having>.+))? is recorded(?: on (?P<place>{PLACE}))?",
)
def _recorded(kind: str, having: str | None, place: str | None) -> Condition:
    wanted = fields(having)

    def holds(stage: StoryStage, it: Happened) -> bool:
        return (
            it.kind == "recorded"
            and it.data.kind == kind
            and (place is None or it.whose == stage.machine_number(place))
            and has_fields(it.data.data, wanted)
        )

    return holds


@CONDITIONS.phrase(
    "the agent of machine 1 calls start ranks",
    rf"the (?P<role>agent|keeper) of (?P<place>{PLACE}) calls (?P<what>.+)",
)
def _calls(role: str, place: str, what: str) -> Condition:
    def holds(stage: StoryStage, it: Happened) -> bool:
        process: Any = it.whose
        return (
            it.kind == "calls"
            and it.data == what
            and process.role == role
            and process.machine.number == stage.machine_number(place)
        )

    return holds


@CONDITIONS.phrase("rank 1 calls put", r"rank (?P<rank>\d+) calls (?P<what>.+)")
def _rank_calls(rank: str, what: str) -> Condition:
    def holds(stage: StoryStage, it: Happened) -> bool:
        if it.kind != "calls" or it.data != what:
            return False
        process: Any = it.whose
        program = stage.job.around.programs.get(process)
        return program is not None and program.who.rank == int(rank)

    return holds


@LOOKS.phrase("a parity is under way on machine 0", rf"a parity is under way on (?P<place>{PLACE})")
def _parity_under_way(place: str) -> Look:
    return lambda stage: bool(parity_under_way(stage, place))


@LOOKS.phrase("step 3 is committed", r"step (?P<step>\d+) is committed")
def _committed(step: str) -> Look:
    return lambda stage: stage.committed is not None and stage.committed.step >= int(step)


def parity_under_way(stage: StoryStage, place: str) -> list[tuple[str, File]]:
    """That this machine is writing, by path."""
    files = stage.job.nodes[stage.machine_number(place)].machine.files
    found = []
    for path, file in files.every_file():
        if "/parity/" in path and "/slot-" in path:
            header = header_of(path, file)
            if header is not None and header.state is SlotState.WRITING:
                found.append((path, file))
    return found


def has_fields(data: Any, wanted: dict[str, str]) -> bool:
    """Whether these items have these texts."""
    return all(str(data.get(name)) == text for name, text in wanted.items())


def _has(message: object, wanted: dict[str, str]) -> bool:
    """Whether these attributes, and attributes of attributes, have these texts."""
    return all(str(_attribute(message, name)) == text for name, text in wanted.items())


def _attribute(message: object, name: str) -> object:
    for part in name.split("."):
        message = getattr(message, part, None)
    return message
