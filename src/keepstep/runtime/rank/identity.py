"""Identity: which rank this process is, and how many ranks share its node.

Comes in: the environment that a launcher made, and the process group if there is one. Never
guesses: what the environment does not say is asked of all ranks, or an error names it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from keepstep.errors import ConfigError
from keepstep.model.launch import REJOIN
from keepstep.model.messages.agent_rank import RegroupAt
from keepstep.runtime.rank.world import RankIdentity

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Gather = Callable[[Any], list[Any]]


def identity_of(
    job: str, arena_dir: Path, environ: Mapping[str, str], group: Any, gather: Gather
) -> RankIdentity:
    """group: `torch.distributed` when it has a process group, else None; `gather` asks all its
    ranks. Raises ConfigError."""
    if group is not None:
        rank, world_size = group.get_rank(), group.get_world_size()
    else:
        rank, world_size = place_in_world(environ)
    here = environ.get("LOCAL_WORLD_SIZE")
    if here is None and group is not None and world_size > 1:
        local = count_here(arena_dir, gather)
    else:
        local = world_size if not here else _number(environ, "LOCAL_WORLD_SIZE", world_size)
    place = next((name for name in ("LOCAL_RANK", "SLURM_LOCALID") if name in environ), None)
    local_rank = None if place is None else _number(environ, place, 0)
    return RankIdentity(job, os.getuid(), rank, world_size, local, local_rank)


def place_in_world(environ: Mapping[str, str]) -> tuple[int, int]:
    """(rank, world size) without a process group. Raises ConfigError in a Slurm step that has not
    said how its tasks belong together."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1" and not {"RANK", "WORLD_SIZE"} <= set(environ):
        raise ConfigError(
            f"protect() in a Slurm step of {tasks} tasks expected "
            "torch.distributed.init_process_group() before it, or RANK and WORLD_SIZE "
            "(0 and 1, and a KEEPSTEP_JOB each, for tasks that have nothing to do with "
            "each other), found neither"
        )
    rank, world_size = _number(environ, "RANK", 0), _number(environ, "WORLD_SIZE", 1)
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"expected RANK from 0 to {world_size - 1}, as WORLD_SIZE is {world_size}; found {rank}"
        )
    return rank, world_size


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    if not (text.isascii() and text.lstrip("-").isdigit()):
        raise ConfigError(f"expected a whole number in {name}, found {text!r}")
    return int(text)


def count_here(arena_dir: Path, gather: Gather) -> int:
    """How many ranks keep their slots in this memory. All ranks call it. Raises ConfigError."""
    try:
        at = arena_dir.stat()
    except FileNotFoundError:
        raise ConfigError(
            f"arena_dir: expected a directory, found nothing at {arena_dir}"
        ) from None
    # Two containers of one machine are two nodes.
    memory = (BOOT_ID.read_text(), at.st_dev, at.st_ino)
    return gather(memory).count(memory)


def place_of_newcomer(environ: Mapping[str, str]) -> RegroupAt | None:
    """Where this process meets its peers when it takes a lost rank's place, as its agent said; None
    when it does not."""
    if environ.get(REJOIN) != "1":
        return None
    return RegroupAt(
        attempt=int(environ["KEEPSTEP_ATTEMPT"]),
        host=environ["MASTER_ADDR"],
        port=int(environ["MASTER_PORT"]),
    )
