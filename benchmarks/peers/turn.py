"""One contender's turn: everything that is measured of it, once.

In come a contestant, a kind of state and how long; out comes a `Turn`, figures in seconds, bytes
and steps. A figure that could not be had is None, and `why` says where the turn ended.

A turn, in order: a first save; blocks of steps saved and not saved, alternating; a planned end and
a restore; SIGKILL between two saves; SIGKILL in the middle of one. Each kill is followed by a new
process at once, as a launcher would start it, so that `to_next_step_s` has the import of torch in
it for everyone.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.contestant import Contestant, Failed


@dataclass
class Length:
    """`pairs` of blocks of `steps` steps, and `kills` in the middle of a save."""

    steps: int
    pairs: int
    kills: int


@dataclass
class Turn:
    state_bytes: int | None = None
    tensors: int | None = None
    setup_s: float | None = None
    first_call_s: float | None = None
    first_whole_s: float | None = None
    step_s: float | None = None
    slowdown: float | None = None  # 0.1: a tenth longer
    call_s: float | None = None
    whole_s: float | None = None  # the call, and until nothing of it is under way
    extra_cpu_s: float | None = None  # a step
    skipped: float | None = None  # of the steps that it was asked to save
    memory_ratio: float | None = None  # of the state's bytes
    restore_s: float | None = None
    kill_to_next_step_s: float | None = None
    kill_lost_steps: int | None = None
    mid_save_to_next_step_s: float | None = None
    mid_save_lost_steps: list[int] | None = None
    copy_bytes_per_s: float | None = None  # of each of two ranks, into the other's memory
    torn: int = 0  # restored states that were of no step
    why: str | None = None


def measure(contestant: Contestant, kind: str, length: Length, has_companion: bool) -> Turn:
    """Never raises for what the contender does; the turn tells of it."""
    turn = Turn()
    try:
        _measure(contestant, kind, length, has_companion, turn)
    except Failed as error:
        turn.why = str(error)
    finally:
        contestant.end()
    return turn


def _measure(
    contestant: Contestant, kind: str, length: Length, has_companion: bool, turn: Turn
) -> None:
    def begin() -> dict[str, Any]:
        contestant.start(has_companion)
        prepared = contestant.ask("prepare", kind=kind)
        turn.state_bytes, turn.tensors = prepared["state_bytes"], prepared["tensors"]
        return {**prepared, "memory_bytes": contestant.memory_bytes(), **contestant.ask("begin")}

    begun = begin()
    if begun["found"]:
        raise Failed("it restored something in an empty room")
    turn.setup_s = begun["setup_s"]
    contestant.ask("train", count=2, save=False)
    plain_bytes = begun["memory_bytes"]
    first = contestant.ask("train", count=1, save=True)
    turn.first_call_s = first["calls_s"][0]
    turn.first_whole_s = turn.first_call_s + first["wait_s"]
    _blocks(contestant, length, turn)
    turn.memory_ratio = (contestant.memory_bytes() - plain_bytes) / begun["state_bytes"]

    pause_s = min(max(turn.step_s or 0.0, 0.05), 0.5)
    done = contestant.ask("stamp", count=2, pause_s=pause_s)["step"]
    contestant.leave()
    begun = begin()
    if not begun["found"]:
        raise Failed("it restored nothing after a planned end")
    turn.restore_s = begun["restore_s"]
    turn.torn += not begun["whole"]

    done = contestant.ask("stamp", count=3, pause_s=pause_s)["step"]
    killed_ns = contestant.kill()
    turn.kill_to_next_step_s, lost = _go_on(contestant, begin, done, killed_ns, turn)
    turn.kill_lost_steps = lost
    turn.mid_save_lost_steps, times = [], []
    # A save that goes on behind the call is struck there too, but before the next one begins.
    call_s = turn.call_s or 0.001
    span_s = min(max(turn.whole_s or 0.0, call_s), call_s + 0.8 * pause_s)
    for number in range(length.kills):
        done = _into_a_save(contestant, pause_s, span_s * (number + 0.5) / length.kills)
        took_s, lost = _go_on(contestant, begin, done, contestant.kill(), turn)
        times.append(took_s)
        turn.mid_save_lost_steps.append(lost)
    turn.mid_save_to_next_step_s = statistics.median(times) if times else None
    contestant.leave()


def _blocks(contestant: Contestant, length: Length, turn: Turn) -> None:
    medians: dict[bool, list[float]] = {False: [], True: []}
    cpu: dict[bool, list[float]] = {False: [], True: []}
    calls: list[float] = []
    whole: list[float] = []
    skipped = 0
    for pair in range(length.pairs):
        for save in (False, True) if pair % 2 == 0 else (True, False):
            before_s = contestant.cpu_s()
            block = contestant.ask("train", count=length.steps, save=save)
            cpu[save].append((contestant.cpu_s() - before_s) / length.steps)
            medians[save].append(statistics.median(block["steps_s"]))
            calls += block["calls_s"]
            whole += [call_s + block["wait_s"] for call_s in block["calls_s"][-1:]]
            skipped += block["skipped"]
    turn.step_s = statistics.median(medians[False])
    ratios = [saved / plain for plain, saved in zip(medians[False], medians[True], strict=True)]
    turn.slowdown = statistics.median(ratios) - 1
    turn.call_s, turn.whole_s = statistics.median(calls), statistics.median(whole)
    extra = [saved - plain for plain, saved in zip(cpu[False], cpu[True], strict=True)]
    turn.extra_cpu_s = statistics.median(extra)
    turn.skipped = skipped / (length.pairs * length.steps)


def _into_a_save(contestant: Contestant, pause_s: float, delay_s: float) -> int:
    """Returns within the third save, some way into it. The last step that had ended by then."""
    contestant.tell("stamp", count=1000, pause_s=pause_s, tell=True)
    for _ in range(3):
        heard = contestant.hear()
        if "saving" not in heard:
            raise Failed(f"killed in mid-save: {heard.get('why', heard)}")
    time.sleep(delay_s * random.uniform(0.9, 1.1))
    return int(heard["saving"])


def _go_on(
    contestant: Contestant, begin: Any, done: int, killed_ns: int, turn: Turn
) -> tuple[float, int]:
    """From the kill to the end of the first step after it, and how many steps were lost."""
    begun = begin()
    contestant.ask("train", count=1, save=False)
    took_s = (time.monotonic_ns() - killed_ns) / 1e9
    turn.torn += not begun["whole"]
    contestant.ask("stamp", count=1, pause_s=0.0)
    return took_s, done - begun["step"]
