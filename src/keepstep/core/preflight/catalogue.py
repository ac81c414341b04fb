"""Catalogue: which checks there are, what they measure, and what a figure must be at least.

Values only. A quantity has two limits, and either is enough to fail: an absolute floor, so that a
fleet whose nodes are all slow fails, too; and a ratio to what the other nodes have. Both are
deliberately far from what sound hardware does: they are to name what is broken, not to rank. Who
knows the hardware sets floors (`--floor`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from keepstep.errors import ConfigError
from keepstep.model.units import MIB, MS_NS, S_NS, human_bytes, human_ns

STARTS_WITHIN_S = 20.0
SLOWEST = 4.0


class Measure(Enum):
    """What samples count, and so which way is better."""

    BYTES_PER_S = "B/s"
    FLOP_PER_S = "flop/s"
    NS = "ns"

    @property
    def is_better_high(self) -> bool:
        return self is not Measure.NS


@dataclass(frozen=True, slots=True)
class Quantity:
    """Something measured. `floor`: the worst value that passes anywhere. `least_ratio`: to the
    median of the others; below it a node is an outlier, unless its value is `harmless` or better:
    the time of what nobody waits for. `is_shared`: nodes on one machine take it from each other, so
    that it is compared only between nodes that have a machine of their own."""

    name: str
    measure: Measure
    floor: int
    least_ratio: float
    harmless: int | None = None
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class PreflightCheck:
    """`expects_s`: what it takes where nothing is known yet. `needs_fleet`: several nodes, or
    several ranks. `is_alone`: nodes of one machine take turns, because its figures count."""

    name: str
    why: str
    fix: str
    expects_s: float
    quantities: tuple[Quantity, ...] = ()
    needs_fleet: bool = False
    is_alone: bool = False

    @property
    def deadline_s(self) -> float:
        """After which its process is killed: a busy machine imports torch in many seconds."""
        return STARTS_WITHIN_S + SLOWEST * self.expects_s


STATIC, SAME, MEMORY, TRAINING = "static", "same-software", "memory", "training"
PRODUCTS, MEMORY_SPEED, DISK, PCIE = "products", "memory-speed", "disk", "pcie"
CLOCKS, NETWORK, RING = "clocks", "network", "ring"

LINK_SPEED = Quantity("link-speed", Measure.BYTES_PER_S, 10 * MIB, 0.5)
CLOCK_OFFSET = Quantity("clock-offset", Measure.NS, 100 * MS_NS, 0.0)
ROUND_TRIP = Quantity("round-trip", Measure.NS, 100 * MS_NS, 0.2, harmless=MS_NS)

CHECKS: tuple[PreflightCheck, ...] = (
    PreflightCheck(
        STATIC,
        "the job or keepstep would fail there",
        "keepstep doctor on that node names the remedy",
        expects_s=0.5,
    ),
    PreflightCheck(
        SAME,
        "nodes that differ fail when they meet, or compute different numbers without a word",
        "install the same on all nodes, from one image or one lock file",
        expects_s=0.1,
        needs_fleet=True,
    ),
    PreflightCheck(
        MEMORY,
        "a training would compute with wrong bytes, and store them",
        "take the node out; test it with memtester or memtest86+ and replace the module that "
        "edac-util names",
        expects_s=1,
    ),
    PreflightCheck(
        TRAINING,
        "a rank there would move the parameters of all others away from the right ones",
        "take the node out and repeat there: keepstep preflight --only products,training,memory",
        expects_s=5,
        quantities=(Quantity("training-step", Measure.NS, 10 * S_NS, 0.6, is_shared=True),),
    ),
    PreflightCheck(
        PRODUCTS,
        "a step takes as long as the slowest rank",
        "look for heat, a low clock, a cpu quota or another job: keepstep doctor, lscpu, top",
        expects_s=1.5,
        quantities=(Quantity("products", Measure.FLOP_PER_S, 10**8, 0.6),),
        is_alone=True,
    ),
    PreflightCheck(
        MEMORY_SPEED,
        "captures, copies and data loading take that much longer, and with them every step",
        "look for missing or mixed modules (dmidecode -t memory), a wrong NUMA or power setting, "
        "another job",
        expects_s=1,
        quantities=(Quantity("memory-speed", Measure.BYTES_PER_S, 256 * MIB, 0.6),),
        is_alone=True,
    ),
    PreflightCheck(
        DISK,
        "checkpoints and logs wait for it, and all nodes wait for the slowest checkpoint",
        "look at the disk: smartctl -H, dmesg, df, iostat -x 1; or store elsewhere (--dir)",
        expects_s=2,
        quantities=(
            Quantity("disk-write", Measure.BYTES_PER_S, 5 * MIB, 0.3),
            Quantity("disk-sync", Measure.NS, S_NS, 0.1, harmless=50 * MS_NS),
        ),
        is_alone=True,
    ),
    PreflightCheck(
        PCIE,
        "batches and snapshots cross it in every step",
        "look at the link's width and speed: nvidia-smi -q -d PCIE; reseat or replace the device",
        expects_s=5,
        quantities=(
            Quantity("to-device", Measure.BYTES_PER_S, 4000 * MIB, 0.8),
            Quantity("from-device", Measure.BYTES_PER_S, 4000 * MIB, 0.8),
            Quantity("device-products", Measure.FLOP_PER_S, 10**11, 0.8),
        ),
        is_alone=True,
    ),
    PreflightCheck(
        CLOCKS,
        "logs and journals of several nodes tell events in the wrong order, so that a failure is "
        "laid to the wrong node; certificates and object stores refuse what is minutes off",
        "synchronise it: chronyc tracking, chronyc makestep, timedatectl set-ntp true (on the "
        "host of a container)",
        expects_s=1,
        quantities=(CLOCK_OFFSET,),
        needs_fleet=True,
    ),
    PreflightCheck(
        NETWORK,
        "every collective goes at the speed of its slowest link",
        "look at ip -s link, ethtool, cable and switch port of the node",
        expects_s=5,
        quantities=(LINK_SPEED, ROUND_TRIP),
        needs_fleet=True,
    ),
    PreflightCheck(
        RING,
        "the job's first all-reduce would fail the same way",
        "check GLOO_SOCKET_IFNAME, firewalls between the nodes, and the network check above",
        expects_s=8,
        quantities=(Quantity("ring", Measure.BYTES_PER_S, MIB, 0.1),),
        needs_fleet=True,
    ),
)
BY_CHECK = {check.name: check for check in CHECKS}
QUANTITIES = {quantity.name: quantity for check in CHECKS for quantity in check.quantities}
CHECK_OF = {quantity.name: check for check in CHECKS for quantity in check.quantities}

Floors = Mapping[str, int]


def with_floors(floors: Floors) -> dict[str, Quantity]:
    """The quantities by name, with these floors instead of the catalogue's. Raises ConfigError for
    a name that there is not."""
    for name in floors:
        if name not in QUANTITIES:
            raise ConfigError(f"--floor: expected one of {', '.join(QUANTITIES)}, found {name!r}")
    return {
        name: replace(quantity, floor=floors.get(name, quantity.floor))
        for name, quantity in QUANTITIES.items()
    }


def is_below_floor(quantity: Quantity, value: int) -> bool:
    """Whether that is worse than anything that passes."""
    return _is_worse(quantity, value, quantity.floor)


def is_harmless(quantity: Quantity, value: int) -> bool:
    """Whether that is good enough whatever others have."""
    return quantity.harmless is not None and not _is_worse(quantity, value, quantity.harmless)


def _is_worse(quantity: Quantity, value: int, than: int) -> bool:
    return value < than if quantity.measure.is_better_high else value > than


def in_words(measure: Measure, value: int) -> str:
    """`3.2 GiB/s`."""
    if measure is Measure.NS:
        return human_ns(value)
    if measure is Measure.BYTES_PER_S:
        return f"{human_bytes(value)}/s"
    return f"{value / 1e9:.1f} Gflop/s"
