"""Surroundings: what all nodes of a simulated job share.

Values and places only; nothing here acts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from keepstep.config import Settings
from keepstep.model.launch import Launch
from keepstep.sim.protocol.job.meetings import Meetings
from keepstep.sim.protocol.job.observer import Observers
from keepstep.sim.protocol.job.oracle import Oracle
from keepstep.sim.protocol.job.plan import RunPlan
from keepstep.sim.protocol.job.program import Program
from keepstep.sim.protocol.wire.network import Network
from keepstep.sim.protocol.world.filesystem import SharedDisk
from keepstep.sim.protocol.world.kv import KVPlace
from keepstep.sim.protocol.world.world import Process, World


@dataclass
class Surroundings:
    """`launch`: what every agent of the job is to start. `programs`: the living ones, by their
    process. `disk`: where the store is. `observers` may be replaced before the run begins.
    `awaited`: a person hears that the job needs so many nodes to go on."""

    world: World
    plan: RunPlan
    settings: Settings
    launch: Launch
    network: Network
    disk: SharedDisk
    kv: KVPlace
    meetings: Meetings
    oracle: Oracle
    observers: Observers
    awaited: Callable[[int], None]
    programs: dict[Process, Program] = field(default_factory=dict)
