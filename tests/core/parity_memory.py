"""Members' memories as bytes, and the parity plans carried out on them."""

from __future__ import annotations

import random

from keepstep.coding.reed_solomon import rebuild, solve
from keepstep.core.redundancy.stripes import Combine, Region, Stripes, encode_plan

Memory = dict[tuple[int, Region], bytearray]


def carry_out(plan: list[Combine], stripes: Stripes, memory: Memory) -> None:
    """What a keeper does, on buffers."""
    for combine in plan:
        have, want = (
            tuple(p.position for p in pieces) for pieces in (combine.sources, combine.targets)
        )
        sources = [
            memoryview(memory[p.member, p.region])[p.start : p.stop] for p in combine.sources
        ]
        targets = [
            memoryview(memory[p.member, p.region])[p.start : p.stop] for p in combine.targets
        ]
        rebuild(solve(stripes.k, stripes.tolerates, have, want), sources, targets)


def encoded(stripes: Stripes, seed: int = 0) -> Memory:
    """Random data on every member, and parity computed by everybody's own plan."""
    rng = random.Random(seed)
    memory: Memory = {
        (m, Region.DATA): bytearray(rng.randbytes(n))
        for m, n in zip(stripes.members, stripes.data_bytes, strict=True)
    }
    memory.update(
        {
            (m, Region.PARITY): bytearray(rng.randbytes(stripes.parity_bytes))
            for m in stripes.members
        }
    )
    for member in stripes.members:
        carry_out(encode_plan(stripes, member), stripes, memory)
    return memory
