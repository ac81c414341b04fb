"""World: everything an agent touches, in one value. `runtime/agent/process.py` makes the real one,
`sim/` one of virtual time.

An `Agent` is called from one loop, which also brings all answers of these ports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from keepstep.core.detection.deadlines import Deadlines
from keepstep.ports import (
    Clock,
    Executor,
    Journal,
    Keepers,
    MeetingPlaces,
    Memory,
    NodeProvider,
    OpenKV,
    Probes,
    RankProcesses,
    ServeBoxes,
    Timers,
)


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """What of the settings an agent needs. `host`: at which other nodes reach this one. `devices`:
    of its ranks, one each, or none."""

    job: str
    job_dir: Path
    has_store: bool
    budget: str
    secret: str | None
    rack: str | None
    link_dead_s: float
    shrink_after_s: float
    deadlines: Deadlines
    host: str
    devices: tuple[str, ...] = ()
    restarted: bool = False  # the node's agent before this one was killed


@dataclass(frozen=True, slots=True)
class AgentWorld:
    """`token`: text that nobody has had before and nobody can guess. `say_last_word`: to whoever
    would start another agent: the job ends here, with this code. `show`: to the person who started
    the job. `provider`: None: nobody is asked for other machines."""

    clock: Clock
    timers: Timers
    memory: Memory
    journal: Journal
    executor: Executor
    keepers: Keepers
    processes: RankProcesses
    probes: Probes
    serve_boxes: ServeBoxes
    open_kv: OpenKV
    meeting_places: MeetingPlaces
    provider: NodeProvider | None
    token: Callable[[], str]
    say_last_word: Callable[[int], None]
    show: Callable[[str], None]
    pid: int
    interpreter: str
