"""Turns: which faults a soak does, one after the other, drawn from a seed.

Comes in: a seed, the job's shape, the kinds that can be done here. Goes out: an endless sequence of
`DrillTurn`s. Pure: the same seed gives the same sequence. At which instant of the job a turn comes
is the machine's chance.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from keepstep.errors import ConfigError
from keepstep.testing.faults import (
    AGENT_KILL,
    ETCD_RESTART,
    LINK_KINDS,
    NODE_KINDS,
    PHASES,
    PROTECT,
    STORE_KINDS,
    Fault,
)

# How often, in relation to each other.
WEIGHTS = {
    **{"kill": 5, "stop": 2, "torn": 3, "flip": 1},
    **{"keeper-kill": 3, AGENT_KILL: 2},
    **{"full": 1, ETCD_RESTART: 2},
    **{"kill-node": 4, "link-down": 2},
    **dict.fromkeys(STORE_KINDS, 1),
}
SECOND_RATIO = 0.1  # of the turns hold a second fault, while the first one is being recovered from
# a keeper's death alone costs little: a rank goes too, while the next one adopts
SECOND_AFTER_KEEPER_RATIO = 0.5
# ranks that die while the store is rough come back from memory
SECOND_WITH_STORE_RATIO = 0.3
SHORTEST_ROUGH_MS, LONGEST_ROUGH_MS = 500.0, 6000.0
MEAN_GAP_MS, MOST_GAP_MS = 800.0, 5000.0  # now and then long enough for a process to stand by again
LONG_FLAP_RATIO = 0.3  # of the links stay away for longer than it takes to be given up


SECOND_RATIOS = {
    "keeper-kill": SECOND_AFTER_KEEPER_RATIO,
    **dict.fromkeys(STORE_KINDS, SECOND_WITH_STORE_RATIO),
}


@dataclass(frozen=True, slots=True)
class DrillTurn:
    """Wait so long after the last recovery; then the first fault, and the second one during its
    recovery, or while it lasts. `at` fills in their step."""

    gap_ms: float
    faults: tuple[Fault, ...]

    def at(self, step: int) -> tuple[Fault, ...]:
        return tuple(replace(fault, step=step) for fault in self.faults)


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the job. `step_ms`: within it something done from outside strikes. `link_dead_ms`: until a
    silent node is given up."""

    nodes: int
    nproc: int
    step_ms: float
    link_dead_ms: float

    @property
    def world_size(self) -> int:
        return self.nodes * self.nproc


def possible(
    text: str, nodes: int, namespaces: bool, small_store: bool, etcd: bool
) -> tuple[str, ...]:
    """`kill,stop`: kinds a soak may draw; nothing: all that can be done here. Raises
    ConfigError."""
    impossible = set() if nodes > 1 else set(NODE_KINDS)
    impossible |= set() if namespaces else set(LINK_KINDS)
    impossible |= set() if small_store else {"full"}
    impossible |= set() if etcd else {ETCD_RESTART}
    # one of several agents is their meeting point's host
    impossible |= set() if etcd or nodes == 1 else {AGENT_KILL}
    known = tuple(kind for kind in WEIGHTS if kind not in impossible)
    kinds = tuple(filter(None, text.split(","))) if text else known
    if not kinds or set(kinds) - set(known):
        raise ConfigError(f"kinds: expected some of {', '.join(known)}, found {text!r}")
    return kinds


def draw_turns(seed: int, shape: Shape, kinds: Sequence[str]) -> Iterator[DrillTurn]:
    rng = random.Random(seed)
    weights = [WEIGHTS[kind] for kind in kinds]
    while True:
        gap_ms = round(min(rng.expovariate(1 / MEAN_GAP_MS), MOST_GAP_MS), 1)
        first = _draw(rng, rng.choices(list(kinds), weights)[0], shape)
        ratio = SECOND_RATIO if first.ends_a_rank else SECOND_RATIOS.get(first.kind, 0.0)
        second = (_draw_second(rng, first, shape, kinds),) if rng.random() < ratio else ()
        yield DrillTurn(gap_ms, (first, *second))


def _draw(rng: random.Random, kind: str, shape: Shape) -> Fault:
    after_ms = round(rng.uniform(0, shape.step_ms), 1) if rng.random() < 0.5 else None
    one = Fault(kind, rng.randrange(shape.world_size), 0, rng.choice(PHASES[:-1]))
    if kind == "torn":
        return replace(one, phase="seal")
    if kind == "flip":
        return replace(one, where="arena")
    if kind == "full":
        return replace(one, phase="persist", where="store")
    if kind == "kill-node":
        return replace(
            one,
            rank=0,
            phase=rng.choice((*PHASES[:-1], PROTECT)),
            after_ms=after_ms,
            nodes=(rng.randrange(shape.nodes),),
        )
    if kind in LINK_KINDS:
        short, long = (
            (100.0, shape.link_dead_ms / 2),
            (shape.link_dead_ms + 500, shape.link_dead_ms + 2000),
        )
        for_ms = round(rng.uniform(*(long if rng.random() < LONG_FLAP_RATIO else short)), 1)
        return replace(one, rank=0, nodes=(rng.randrange(shape.nodes),), for_ms=for_ms)
    if kind == ETCD_RESTART:
        return replace(one, rank=0, phase="forward", for_ms=round(rng.uniform(0, 2000), 1))
    if kind in STORE_KINDS:
        for_ms = round(rng.uniform(SHORTEST_ROUGH_MS, LONGEST_ROUGH_MS), 1)
        return replace(one, rank=0, phase="forward", for_ms=for_ms)
    return one if after_ms is None else replace(one, phase="forward", after_ms=after_ms)


def _draw_second(rng: random.Random, first: Fault, shape: Shape, kinds: Sequence[str]) -> Fault:
    """A kill, or where nodes may be lost now and then a node: that can be more than memory
    survives, and is what the store is for."""
    after_ms = round(rng.uniform(0, 60), 1)
    if first.kind == "keeper-kill":
        return Fault("kill", rng.randrange(shape.world_size), 0, after_ms=after_ms)
    if first.kind in STORE_KINDS and first.for_ms is not None:
        later_ms = round(rng.uniform(0, first.for_ms), 1)
        if "kill-node" in kinds and rng.random() < 0.3:
            node = rng.randrange(shape.nodes)
            return Fault("kill-node", 0, 0, after_ms=later_ms, nodes=(node,))
        return Fault("kill", rng.randrange(shape.world_size), 0, after_ms=later_ms)
    if "kill-node" in kinds and rng.random() < 0.3:
        return Fault("kill-node", 0, 0, "restore", nodes=(rng.randrange(shape.nodes),))
    return Fault(
        "kill",
        rng.randrange(shape.world_size),
        0,
        "restore",
        after_ms=None if rng.random() < 0.5 else after_ms,
    )
