"""Happenings: what a rule of a story may do: the acts of `faults/acts.py`, and looks at how the
job stands in the middle of a run.

Each takes the stage and returns what was done, in words; an empty text when nothing went wrong by
it. Raises KeepstepError when who is meant is not there.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from keepstep.edge.shm.slot import Slot
from keepstep.errors import KeepstepError
from keepstep.model.snapshot import SlotState
from keepstep.sim.protocol.faults.acts import header_of
from keepstep.sim.protocol.stories.conditions import parity_under_way
from keepstep.sim.protocol.stories.phrases import PLACE, TIME, Phrases, ns, quantity
from keepstep.sim.protocol.stories.stage import StoryStage
from keepstep.sim.protocol.world.machine import Machine
from keepstep.sim.protocol.world.memory import File, SimMemory

Happening = Callable[[StoryStage], str]

HAPPENINGS: Phrases[Happening] = Phrases("an act")

FOR = rf"for (?P<time>{TIME})"

# -- processes


@HAPPENINGS.phrase("kill rank 1", r"kill rank (?P<rank>\d+)")
def _kill_rank(rank: str) -> Happening:
    return lambda stage: stage.acts.kill_rank(stage.program(int(rank)))


@HAPPENINGS.phrase(
    "kill rank 1 at its 37th port call",
    r"kill rank (?P<rank>\d+) at its (?P<call>\d+)(?:st|nd|rd|th) port call",
)
def _kill_rank_at_call(rank: str, call: str) -> Happening:
    return lambda stage: stage.acts.kill_rank_at_call(stage.program(int(rank)), int(call))


@HAPPENINGS.phrase("kill all ranks", r"kill all ranks")
def _kill_all_ranks() -> Happening:
    return lambda stage: stage.acts.kill_all_ranks()


@HAPPENINGS.phrase(
    "kill the keeper of machine 0", rf"kill the (?P<role>keeper|agent) of (?P<place>{PLACE})"
)
def _kill(role: str, place: str) -> Happening:
    return lambda stage: stage.acts.kill(
        role, stage.node(place).machine, stage.process(role, place)
    )


@HAPPENINGS.phrase(
    "kill the agent of machine 0 at its 2nd port call",
    rf"kill the (?P<role>keeper|agent) of (?P<place>{PLACE}) "
    r"at its (?P<call>\d+)(?:st|nd|rd|th) port call",
)
def _kill_at_call(role: str, place: str, call: str) -> Happening:
    return lambda stage: stage.acts.kill_at_call(
        role, stage.node(place).machine, stage.process(role, place), int(call)
    )


@HAPPENINGS.phrase("stop rank 1 for 5s", rf"stop rank (?P<rank>\d+) {FOR}")
def _stop_rank(rank: str, time: str) -> Happening:
    return lambda stage: stage.acts.stop(f"rank {rank}", stage.program(int(rank)).process, ns(time))


@HAPPENINGS.phrase(
    "stop the keeper of machine 0 for 5s",
    rf"stop the (?P<role>keeper|agent) of (?P<place>{PLACE}) {FOR}",
)
def _stop(role: str, place: str, time: str) -> Happening:
    return lambda stage: stage.acts.stop(
        f"the {role} of {place}", stage.process(role, place), ns(time)
    )


@HAPPENINGS.phrase(
    "send SIGTERM to the agent of machine 0",
    rf"send (?P<name>SIG[A-Z]+) to the agent of (?P<place>{PLACE})",
)
def _signal(name: str, place: str) -> Happening:
    return lambda stage: stage.acts.signal_agent(stage.node(place), signal.Signals[name])


# -- machines


@HAPPENINGS.phrase("lose machine 1", rf"lose (?P<place>{PLACE})")
def _lose(place: str) -> Happening:
    return lambda stage: stage.acts.lose_machine(stage.node(place))


@HAPPENINGS.phrase(
    "the wall clock of machine 0 jumps by 30s",
    rf"the wall clock of (?P<place>{PLACE}) jumps by (?P<time>-?{TIME})",
)
def _jump(place: str, time: str) -> Happening:
    by_ns = -ns(time[1:]) if time.startswith("-") else ns(time)
    return lambda stage: stage.acts.jump_clock(stage.node(place).machine, by_ns)


@HAPPENINGS.phrase(
    "leave 32KiB of memory on machine 0 for 3s",
    rf"leave (?P<left>\d+ ?(?:B|KiB|MiB)) of memory on (?P<place>{PLACE}) {FOR}",
)
def _eat(left: str, place: str, time: str) -> Happening:
    left_bytes = round(quantity(left))
    return lambda stage: stage.acts.eat_memory(stage.node(place).machine, left_bytes, ns(time))


# -- bits


@HAPPENINGS.phrase(
    "flip byte 40 of the newest snapshot of rank 0",
    r"flip byte (?P<byte>\d+) of the newest snapshot of rank (?P<rank>\d+)",
)
def _flip_newest(byte: str, rank: str) -> Happening:
    def act(stage: StoryStage) -> str:
        machine = stage.machine_of_rank(int(rank))
        path, file = _newest(_slots(stage, machine, "", int(rank)))
        return stage.acts.flip(machine, path, file, 8 * int(byte))

    return act


@HAPPENINGS.phrase(
    "flip byte 40 of the snapshot of step 3 of rank 0",
    r"flip byte (?P<byte>\d+) of the snapshot of step (?P<step>\d+) of rank (?P<rank>\d+)",
)
def _flip_step(byte: str, step: str, rank: str) -> Happening:
    def act(stage: StoryStage) -> str:
        machine = stage.machine_of_rank(int(rank))
        for path, file in _slots(stage, machine, "", int(rank)):
            header = header_of(path, file)
            if header is not None and header.stamp.step == int(step):
                return stage.acts.flip(machine, path, file, 8 * int(byte))
        raise KeepstepError(f"rank {rank} has no snapshot of step {step}")

    return act


@HAPPENINGS.phrase(
    "flip byte 40 of the newest copy of rank 0 on machine 1",
    rf"flip byte (?P<byte>\d+) of the newest (?P<what>copy|parity) of rank (?P<rank>\d+) "
    rf"on (?P<place>{PLACE})",
)
def _flip_held(byte: str, what: str, rank: str, place: str) -> Happening:
    def act(stage: StoryStage) -> str:
        machine = stage.node(place).machine
        part = "held/" if what == "copy" else "parity/"
        path, file = _newest(_slots(stage, machine, part, int(rank)))
        return stage.acts.flip(machine, path, file, 8 * int(byte))

    return act


@HAPPENINGS.phrase(
    "flip byte 1000 of the parity under way on machine 0",
    rf"flip byte (?P<byte>\d+) of the parity under way on (?P<place>{PLACE})",
)
def _flip_parity(byte: str, place: str) -> Happening:
    def act(stage: StoryStage) -> str:
        found = parity_under_way(stage, place)
        if not found:
            raise KeepstepError(f"no parity is under way on {place}")
        path, file = found[0]
        return stage.acts.flip(stage.node(place).machine, path, file, 8 * int(byte))

    return act


@HAPPENINGS.phrase(
    "flip byte 1000 of every snapshot on machine 0",
    rf"flip byte (?P<byte>\d+) of every snapshot on (?P<place>{PLACE})",
)
def _flip_all(byte: str, place: str) -> Happening:
    def act(stage: StoryStage) -> str:
        machine = stage.node(place).machine
        own = [(p, f) for p, f in machine.files.every_file() if _is_own(stage, p)]
        return "; ".join(stage.acts.flip(machine, p, f, 8 * int(byte)) for p, f in own)

    return act


@HAPPENINGS.phrase(
    "hold the snapshot of step 3 of rank 0 for 100ms",
    rf"hold the snapshot of step (?P<step>\d+) of rank (?P<rank>\d+) {FOR}",
)
def _hold(step: str, rank: str, time: str) -> Happening:
    """As its rank does for a moment: nobody else can pin it."""

    def act(stage: StoryStage) -> str:
        machine = stage.machine_of_rank(int(rank))
        hand = machine.start("hand")
        memory = SimMemory(machine.files, hand)
        for path, file in _slots(stage, machine, "", int(rank)):
            header = header_of(path, file)
            if header is not None and header.stamp.step == int(step):
                if not Slot(memory, Path(path)).lock(exclusive=True):
                    raise KeepstepError(f"somebody holds step {step} of rank {rank} already")
                stage.job.world.after(ns(time), None, hand.end, "has let go")
                return f"step {step} of rank {rank} is held"
        raise KeepstepError(f"rank {rank} has no snapshot of step {step}")

    return act


# -- the network

ONE_WAY = rf"(?P<source>{PLACE}) -> (?P<target>{PLACE})"
BOTH_WAYS = rf"(?P<source>{PLACE}) - (?P<target>{PLACE})"


@HAPPENINGS.phrase("cut machine 0 - machine 1 for 2s", rf"cut {BOTH_WAYS} {FOR}")
def _cut(source: str, target: str, time: str) -> Happening:
    return lambda stage: stage.acts.cut(*_way(stage, source, target), ns(time))


@HAPPENINGS.phrase("cut machine 0 -> machine 1 for 2s", rf"cut {ONE_WAY} {FOR}")
def _cut_one_way(source: str, target: str, time: str) -> Happening:
    return lambda stage: stage.acts.cut_one_way(*_way(stage, source, target), ns(time))


@HAPPENINGS.phrase("stall machine 0 -> machine 1 for 2s", rf"stall {ONE_WAY} {FOR}")
def _stall(source: str, target: str, time: str) -> Happening:
    return lambda stage: stage.acts.stall(*_way(stage, source, target), ns(time))


@HAPPENINGS.phrase("isolate machine 0 for 2s", rf"isolate (?P<place>{PLACE}) {FOR}")
def _isolate(place: str, time: str) -> Happening:
    def act(stage: StoryStage) -> str:
        here = stage.machine_number(place)
        numbers = [node.machine.number for node in stage.job.living_nodes()]
        return stage.acts.isolate(here, [n for n in numbers if n != here], ns(time))

    return act


@HAPPENINGS.phrase(
    "break the connections of machine 0 - machine 1", rf"break the connections of {BOTH_WAYS}"
)
def _break(source: str, target: str) -> Happening:
    return lambda stage: stage.acts.flap(*_way(stage, source, target), [0])


@HAPPENINGS.phrase(
    "damage 5% of what is sent for 3s", rf"damage (?P<part>\d+)% of what is sent {FOR}"
)
def _damage(part: str, time: str) -> Happening:
    def act(stage: StoryStage) -> str:
        stage.job.world.after(ns(time), None, stage.acts.good_wire)
        return stage.acts.flip_on_the_wire(int(part) / 100)

    return act


@HAPPENINGS.phrase("kv away for 3s", rf"kv away {FOR}")
def _kv_away(time: str) -> Happening:
    return lambda stage: stage.acts.kv_away(ns(time))


# -- the store


@HAPPENINGS.phrase("the store is away for 3s", rf"the store is (?P<how>away|full|lying) {FOR}")
def _store(how: str, time: str) -> Happening:
    def act(stage: StoryStage) -> str:
        match how:
            case "away":
                return stage.acts.store_away(1.0, ns(time))
            case "full":
                return stage.acts.store_full(ns(time))
            case _:
                return stage.acts.store_lies(ns(time))

    return act


@HAPPENINGS.phrase(
    "the store takes up to 1s a call for 3s",
    rf"the store takes up to (?P<most>{TIME}) a call {FOR}",
)
def _slow_store(most: str, time: str) -> Happening:
    return lambda stage: stage.acts.store_slow(ns(most), ns(time))


@HAPPENINGS.phrase("kill the persister of machine 0", rf"kill the persister of (?P<place>{PLACE})")
def _kill_persister(place: str) -> Happening:
    def act(stage: StoryStage) -> str:
        for process in stage.node(place).machine.processes.values():
            if process.role == "persister":
                return stage.acts.kill_persister(process)
        raise KeepstepError(f"there is no living persister on {place}")

    return act


# -- looks


@HAPPENINGS.phrase(
    "expect that step 3 is committed", r"expect that step (?P<step>\d+) is committed"
)
def _expect_committed(step: str) -> Happening:
    def look(stage: StoryStage) -> str:
        committed = stage.committed
        if committed is None or committed.step < int(step):
            stage.job.violate("story", f"step {step} is committed by now: found {committed}")
        return ""

    return look


def _way(stage: StoryStage, source: str, target: str) -> tuple[int, int]:
    return stage.machine_number(source), stage.machine_number(target)


def _slots(stage: StoryStage, machine: Machine, part: str, rank: int) -> list[tuple[str, File]]:
    start = f"{stage.job.around.settings.job_dir}/{part}rank-{rank:05}/slot-"
    return [(path, file) for path, file in machine.files.every_file() if path.startswith(start)]


def _is_own(stage: StoryStage, path: str) -> bool:
    return path.startswith(f"{stage.job.around.settings.job_dir}/rank-") and "/slot-" in path


def _newest(slots: list[tuple[str, File]]) -> tuple[str, File]:
    """The sealed one with the newest stamp."""
    found = [
        (header.stamp, path, file)
        for path, file in slots
        if (header := header_of(path, file)) is not None and header.state is SlotState.SEALED
    ]
    if not found:
        raise KeepstepError("nothing sealed is there")
    _, path, file = max(found, key=lambda each: each[0])
    return path, file
