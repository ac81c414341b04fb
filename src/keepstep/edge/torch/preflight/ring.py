"""Ring: the all-reduce of the job's ranks over gloo, proven and timed, by one of them.

The sums are of whole numbers that differ by rank and place, small enough to be exact in float32, so
that every rank knows what each element must be.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from keepstep.edge.torch.tcp_store import join_store
from keepstep.model.units import S_NS

PERIOD = 1021


@dataclass(frozen=True, slots=True)
class RingFigures:
    """`speeds`: bytes of a buffer reduced a second, one for each round. `wrong`: (round, elements)
    of the first round whose sums are not what they must be."""

    speeds: tuple[int, ...]
    wrong: tuple[int, int] | None


def all_reduce(
    rank: int, world: int, address: tuple[str, int], size_bytes: int, rounds: int, within_s: float
) -> RingFigures:
    """Be that rank; the store is at `address`. Raises torch's DistError, RuntimeError."""
    store = PrefixStore("preflight-ring", join_store(address, within_s))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=within_s)
    )
    try:
        count = size_bytes // 4
        places = torch.arange(count, dtype=torch.float32) % PERIOD
        expected = places * world + world * (world - 1) // 2
        speeds, wrong = [], None
        for turn in range(rounds + 1):
            buffer = places + rank
            dist.barrier()
            begun_ns = time.perf_counter_ns()
            dist.all_reduce(buffer)
            took_ns = max(1, time.perf_counter_ns() - begun_ns)
            if turn:  # the first one makes the connections
                speeds.append(count * 4 * S_NS // took_ns)
            elements = int((buffer != expected).sum())
            if elements and wrong is None:
                wrong = (turn, elements)
        return RingFigures(tuple(speeds), wrong)
    finally:
        dist.destroy_process_group()
