"""Process world: the real world of one trainer's process, as a rank's ports.

Comes in: settings, and what belongs to the process: its driver, its journal, what it protects. Goes
out: a `RankWorld`, and the facts of its node. Decides nothing.
"""

from __future__ import annotations

import os
import secrets

from keepstep.config import Settings
from keepstep.core.wire.conversations import PROCESS_WITH_AGENT, RANK_WITH_KEEPER
from keepstep.edge.net.agents import NodeAgents
from keepstep.edge.net.keepers import KeeperSocket
from keepstep.edge.os.clock import CLOCK
from keepstep.edge.os.journal import FileJournal
from keepstep.edge.os.machine import address_towards, available_bytes, proof_threads
from keepstep.edge.os.needs import unsigned_blocks
from keepstep.edge.os.numa import node_near
from keepstep.edge.os.orphans import forget_rank_mark
from keepstep.edge.probes.ranks_elsewhere import ranks_elsewhere
from keepstep.edge.shm.memory import SharedMemory
from keepstep.edge.torch.cuda_runtime import place_on_bus
from keepstep.edge.torch.live_state import TorchState, cuda_device
from keepstep.edge.torch.membership import membership
from keepstep.edge.torch.process_groups import TorchGroups, process_group
from keepstep.edge.torch.state import Protected
from keepstep.model.hosts import first_host
from keepstep.runtime.keeper_search import KeeperSearches
from keepstep.runtime.rank.bootstrap import NodeFacts
from keepstep.runtime.rank.driver import Driver
from keepstep.runtime.rank.identity import place_of_newcomer
from keepstep.runtime.rank.world import RankIdentity, RankWorld


def process_world(
    settings: Settings,
    who: RankIdentity,
    protected: Protected,
    journal: FileJournal,
    driver: Driver,
) -> RankWorld:
    place = place_of_newcomer(os.environ)
    forget_rank_mark(os.environ)
    objects = protected.parts().values()
    door = KeeperSocket(driver.loop, settings, RANK_WITH_KEEPER, journal.record, who.rank)
    return RankWorld(
        clock=CLOCK,
        timers=driver.loop,
        memory=SharedMemory(numa_node_of(protected)),
        journal=journal,
        keepers=KeeperSearches(door, CLOCK, driver.loop),
        agents=NodeAgents(driver.loop, os.environ, PROCESS_WITH_AGENT, journal.record),
        live=TorchState(protected, who.rank, who.world_size, settings),
        groups=TorchGroups(membership, driver.trainer, objects, place is not None),
        trainer=driver.trainer,
        background=driver.background,
        aside=driver.aside,
        available_bytes=available_bytes,
        pid=os.getpid(),
        has_agent="KEEPSTEP_AGENT" in os.environ,
        takes_place_at=place,
        proof_threads=proof_threads(),
        elsewhere=lambda: _elsewhere(settings),
    )


def _elsewhere(settings: Settings) -> str:
    found = ranks_elsewhere(settings.job_dir, os.environ)
    return ", ".join(
        f"rank {each.rank} (process {each.pid}) in job {each.job_dir.name!r} below "
        f"{each.job_dir.parent.parent}"
        for each in found
    )


def numa_node_of(protected: Protected) -> int | None:
    """That is nearest to the device of the state, if it is on one."""
    device = cuda_device(protected.parts().values())
    place = None if device is None else place_on_bus(device)
    return None if place is None else node_near(place)


def node_facts(settings: Settings) -> NodeFacts:
    return NodeFacts(
        host=first_host(settings.host),
        rack=settings.rack,
        secret=settings.secret,
        encrypt=settings.encrypt,
        meeting_host=os.environ.get("MASTER_ADDR", ""),
        has_process_group=process_group() is not None,
        address_towards=address_towards,
        fresh_secret=secrets.token_hex(32),
        unsigned_blocks=unsigned_blocks(settings),
        redundancy=settings.redundancy,
    )
