"""World: everything an agent touches, in one value. `runtime/agent/process.py` makes the real one,
`sim/` one of virtual time.

An `Agent` is called from one loop, which also brings all answers of these ports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from keepstep.config import Settings
from keepstep.core.detection.deadlines import Deadlines, derive
from keepstep.core.parts.kernel_log import KernelTable
from keepstep.core.postmortem.table import PatternTable
from keepstep.model.launch import Launch, Predecessor
from keepstep.model.parts import PartPolicy, parse_part_policies
from keepstep.model.units import S_NS
from keepstep.ports import (
    Clock,
    Executor,
    Journal,
    Keepers,
    MeetingPlaces,
    Memory,
    NodeProvider,
    OpenKV,
    PartProber,
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
    encrypt: bool
    rack: str | None
    link_dead_s: float
    shrink_after_s: float
    deadlines: Deadlines
    host: str
    devices: tuple[str, ...] = ()
    predecessor: Predecessor | None = None
    tells_slow_ranks: bool = True
    swaps_slow_nodes: bool = False
    part_policies: Mapping[str, PartPolicy] | None = None
    canary_every_ns: int = 0
    redundancy: str = ""

    @staticmethod
    def of(
        settings: Settings,
        launch: Launch,
        host: str,
        devices: tuple[str, ...] = (),
        predecessor: Predecessor | None = None,
    ) -> AgentOptions:
        """Raises ConfigError when the settings' limits leave no room for each other."""
        link_dead_s = settings.link_dead_s if launch.nodes > 1 else None
        return AgentOptions(
            job=settings.job,
            job_dir=settings.job_dir,
            has_store=settings.store is not None,
            budget=settings.budget,
            secret=settings.secret,
            encrypt=settings.encrypt,
            rack=settings.rack,
            link_dead_s=settings.link_dead_s,
            shrink_after_s=settings.shrink_after_s,
            deadlines=derive(settings.hang_after_s, link_dead_s),
            host=host,
            devices=devices,
            predecessor=predecessor,
            tells_slow_ranks=settings.slow_ranks != "off",
            swaps_slow_nodes=settings.slow_ranks == "swap",
            part_policies=parse_part_policies(settings.sick_parts),
            canary_every_ns=int(settings.canary_every_s * S_NS),
            redundancy=settings.redundancy,
        )


@dataclass(frozen=True, slots=True)
class PartsWorld:
    """How an agent knows of its machine's parts: who probes them, and what the kernel's lines
    mean."""

    prober: PartProber
    table: KernelTable


@dataclass(frozen=True, slots=True)
class AgentWorld:
    """`token`: a new random text at each call. `take_part`: tells the supervisor that ranks of this
    attempt may be started from now on. `say_last_word`: tells it that the job ends here, with this
    code. `show`: prints to the person who started the job. `provider`: None: no platform is asked
    for other machines. `parts`: None: nobody looks at the machine's parts. `patterns`:
    what words of an error mean, None: nobody says."""

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
    take_part: Callable[[int], None]
    say_last_word: Callable[[int], None]
    show: Callable[[str], None]
    pid: int
    interpreter: str
    parts: PartsWorld | None = None
    patterns: PatternTable | None = None
