"""Members' memories as bytes, and the parity plans carried out on them."""

from __future__ import annotations

import random

from keepstep.coding.reed_solomon import rebuild, solve
from keepstep.core.redundancy.stripes import Combine, StripeRegion, Stripes

Memory = dict[tuple[int, StripeRegion], bytearray]


def encode_plan(stripes: Stripes, member: int) -> list[Combine]:
    """What the parity of `member` is in the end, whoever added what when: one Combine for each of
    its t blocks."""
    index, size = stripes.members.index(member), len(stripes.members)
    plan = []
    for row in range(stripes.tolerates):
        codeword = (index - row) % size
        pieces = [stripes.piece(codeword, i) for i in range(size)]
        sources = sorted(
            (p for p in pieces if p.region is StripeRegion.DATA), key=lambda p: p.position
        )
        plan.append(Combine(codeword, tuple(sources), (pieces[index],)))
    return plan


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
        (m, StripeRegion.DATA): bytearray(rng.randbytes(n))
        for m, n in zip(stripes.members, stripes.data_bytes, strict=True)
    }
    memory.update(
        {
            (m, StripeRegion.PARITY): bytearray(rng.randbytes(stripes.parity_bytes))
            for m in stripes.members
        }
    )
    for member in stripes.members:
        carry_out(encode_plan(stripes, member), stripes, memory)
    return memory
