"""Fleets that were never there: what sound and broken nodes would have measured, from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from keepstep.core.preflight.catalogue import (
    CHECKS,
    CLOCKS,
    DISK,
    LINK_SPEED,
    MEMORY,
    MEMORY_SPEED,
    NETWORK,
    PCIE,
    PRODUCTS,
    RING,
    ROUND_TRIP,
    SAME,
    STATIC,
    TRAINING,
    with_floors,
)
from keepstep.core.preflight.history import LOSS
from keepstep.core.preflight.judgement import FleetEvidence
from keepstep.core.preflight.links import suspect
from keepstep.core.preflight.schedule import Rounds, all_pairs, confirming
from keepstep.model.messages.preflight import (
    CheckOutcome,
    CheckReading,
    ClockGap,
    FleetTrait,
    LinkReading,
    Samples,
)
from keepstep.model.units import GIB, MIB, MS_NS

PLANNED = tuple(check.name for check in CHECKS if check.name != PCIE)
USUAL = {
    "training-step": 8 * MS_NS,
    "products": 40 * 10**9,
    "memory-speed": 12 * GIB,
    "disk-write": 400 * MIB,
    "disk-sync": 2 * MS_NS,
    "ring": 300 * MIB,
}
QUANTITIES_OF = {
    TRAINING: ("training-step",),
    PRODUCTS: ("products",),
    MEMORY_SPEED: ("memory-speed",),
    DISK: ("disk-write", "disk-sync"),
    RING: ("ring",),
}
LINK_BYTES_PER_S, TRIP_NS = GIB, 50_000


@dataclass
class MadeNode:
    """factors: of the usual value, by quantity. sends, receives: of the usual speed. ahead_ns: of
    its wall clock."""

    factors: dict[str, float] = field(default_factory=dict)
    sends: float = 1.0
    receives: float = 1.0
    ahead_ns: int = 0
    loss: str = "a" * 32
    versions: dict[str, str] = field(default_factory=lambda: {"torch": "2.7.0", "python": "3.11"})
    bad: dict[str, str] = field(default_factory=dict)


@dataclass
class MadeFleet:
    """links: of the usual speed, by direction. noise: the standard deviation of each sample's
    logarithm; luck: of a node's."""

    nodes: list[MadeNode]
    random: random.Random
    noise: float = 0.03
    luck: float = 0.02
    links: dict[tuple[int, int], float] = field(default_factory=dict)

    def evidence(self) -> FleetEvidence:
        numbers = list(range(len(self.nodes)))
        quantities = with_floors({})
        first = self.measure(all_pairs(numbers))
        suspicion = suspect(first, [quantities[q.name] for q in (LINK_SPEED, ROUND_TRIP)])
        again = [
            self.measure(confirming(suspicion.suspects, suspicion.good, suspicion.pairs, turn))
            for turn in range(2 if suspicion.pairs else 0)
        ]
        return FleetEvidence(
            hosts={n: f"host{n}" for n in numbers},
            machines={n: f"machine{n}" for n in numbers},
            planned=PLANNED if len(numbers) > 1 else (STATIC, MEMORY, *QUANTITIES_OF),
            skipped={},
            quantities=quantities,
            readings={n: tuple(self.readings(node)) for n, node in enumerate(self.nodes)},
            links=first,
            confirming=tuple(again),
        )

    def readings(self, node: MadeNode) -> list[CheckReading]:
        found = []
        for check in PLANNED:
            if check in (CLOCKS, NETWORK):
                continue
            reading = CheckReading(check, CheckOutcome.OK)
            if check in node.bad:
                reading = replace(reading, outcome=CheckOutcome.BAD, found=node.bad[check])
            else:
                samples = [
                    Samples(name, self.samples(USUAL[name] * node.factors.get(name, 1.0)))
                    for name in QUANTITIES_OF.get(check, ())
                ]
                traits = {
                    SAME: [FleetTrait(name, value) for name, value in node.versions.items()],
                    TRAINING: [FleetTrait(LOSS, node.loss, "cpu")],
                }.get(check, [])
                reading = replace(reading, samples=tuple(samples), traits=tuple(traits))
            found.append(reading)
        return found

    def samples(self, usual: float, luck: float | None = None) -> tuple[int, ...]:
        gauss = self.random.gauss
        mine = usual * 2 ** gauss(0, self.luck if luck is None else luck)
        return tuple(max(1, round(mine * 2 ** gauss(0, self.noise))) for _ in range(5))

    def measure(self, rounds: Rounds) -> tuple[LinkReading, ...]:
        return tuple(self.link(one, other) for pairs in rounds for one, other in pairs)

    def link(self, one: int, other: int) -> LinkReading:
        ways = [
            self.samples(LINK_BYTES_PER_S * self.speed(a, b))
            for a, b in ((one, other), (other, one))
        ]
        trips = self.samples(TRIP_NS)
        within_ns = min(trips) // 2 + 1
        ahead_ns = self.nodes[other].ahead_ns - self.nodes[one].ahead_ns
        clock = ClockGap(ahead_ns + self.random.randint(-within_ns, within_ns), within_ns)
        return LinkReading(one, other, *ways, trips, clock=clock)

    def speed(self, one: int, other: int) -> float:
        return min(
            self.nodes[one].sends, self.nodes[other].receives, self.links.get((one, other), 1.0)
        )


def healthy(nodes: int, seed: int = 0) -> MadeFleet:
    return MadeFleet([MadeNode() for _ in range(nodes)], random.Random(seed))


Plant = Callable[[MadeFleet, int], None]


def slower(quantity: str, factor: float) -> Plant:
    """factor: of its value, above 1 for a time."""

    def plant(fleet: MadeFleet, node: int) -> None:
        fleet.nodes[node].factors[quantity] = factor

    return plant


def says(check: str, found: str) -> Plant:
    def plant(fleet: MadeFleet, node: int) -> None:
        fleet.nodes[node].bad[check] = found

    return plant


def slow_link(fleet: MadeFleet, node: int) -> None:
    fleet.nodes[node].sends = fleet.nodes[node].receives = 0.1


def slow_sender(fleet: MadeFleet, node: int) -> None:
    fleet.nodes[node].sends = 0.1


def wrong_clock(fleet: MadeFleet, node: int) -> None:
    fleet.nodes[node].ahead_ns = -130 * MS_NS


def wrong_version(fleet: MadeFleet, node: int) -> None:
    fleet.nodes[node].versions["torch"] = "2.6.0"


def other_loss(fleet: MadeFleet, node: int) -> None:
    fleet.nodes[node].loss = "b" * 32


PLANTS: dict[str, tuple[str, Plant]] = {
    "slow memory": (MEMORY_SPEED, slower("memory-speed", 0.4)),
    "slow core": (PRODUCTS, slower("products", 0.45)),
    "slow steps": (TRAINING, slower("training-step", 2.5)),
    "slow disk": (DISK, slower("disk-write", 0.1)),
    "slow sync": (DISK, slower("disk-sync", 60)),
    "flipped bit in a product": (PRODUCTS, says(PRODUCTS, "core 3 gave another product")),
    "flipped bit in memory": (MEMORY, says(MEMORY, "memory gave back 0x10")),
    "low file limit": (STATIC, says(STATIC, "open-files: 200")),
    "small /dev/shm": (STATIC, says(STATIC, "arena-size: 64 MiB")),
    "slow link": (NETWORK, slow_link),
    "slow sender": (NETWORK, slow_sender),
    "wrong clock": (CLOCKS, wrong_clock),
    "wrong version": (SAME, wrong_version),
    "another loss": (TRAINING, other_loss),
}
