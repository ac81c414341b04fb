"""Pace: how long things took in a real job, so that a simulated one takes as long.

Values only: each is a sample of what was measured, drawn from with equal chance; an empty one is
not known, and the plan's own figure stands (`measured_plan.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Aftermath:
    """`notice_ns`: from a rank's end until its agent knows; `rank_start_ns`: from a rank's start
    until it asks where to resume; `keeper_start_ns`, `agent_start_ns`, `replace_ns`: until another
    keeper, agent, machine is there."""

    notice_ns: tuple[int, ...] = ()
    rank_start_ns: tuple[int, ...] = ()
    keeper_start_ns: tuple[int, ...] = ()
    agent_start_ns: tuple[int, ...] = ()
    replace_ns: tuple[int, ...] = ()


@dataclass(frozen=True)
class Pace:
    """Of a step, in this order: `forward_ns`, until the rank enters its backward pass;
    `collective_ns`, from the last rank's entry until the collectives are over; `rest_ns`, what is
    left of the backward pass; `update_ns`; then the step is complete. `stall_ns` lies between two
    steps; `capture_ns` after that (or before its end) the capture begins, takes `copy_ns` to the
    moment before the seal, and `seal_ns` from there.

    `bytes_per_s`: of copies. `persist_every_steps`: the program asks for a checkpoint. `failures`:
    what follows them.
    """

    forward_ns: tuple[int, ...]
    collective_ns: tuple[int, ...]
    rest_ns: tuple[int, ...]
    update_ns: tuple[int, ...]
    stall_ns: tuple[int, ...]
    capture_ns: tuple[int, ...]
    copy_ns: tuple[int, ...]
    seal_ns: tuple[int, ...]
    bytes_per_s: tuple[int, ...] = ()
    persist_every_steps: int = 0
    failures: Aftermath = field(default_factory=Aftermath)
