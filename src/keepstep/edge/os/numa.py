"""NUMA: the node whose memory is nearest to a device.

Comes in: the device's place on the PCI bus, sysfs. Goes out: a node's number; None where it makes
no difference, or nobody knows: one node alone has memory, the bus tells of none (virtual machines
say -1), or there is no such device.
"""

from __future__ import annotations

from pathlib import Path

SYSFS = Path("/sys")
DOMAIN_DIGITS = 4  # sysfs's; some tools write eight


def node_near(pci: str, sysfs: Path = SYSFS) -> int | None:
    """`pci`: such as `0000:3b:00.0`."""
    domain, _, place = pci.strip().lower().partition(":")
    name = f"{domain[-DOMAIN_DIGITS:]}:{place}"
    try:
        own = (sysfs / "bus/pci/devices" / name / "numa_node").read_text()
        there = (sysfs / "devices/system/node/has_memory").read_text()
        return nearest(own, there)
    except (OSError, ValueError):
        return None


def nearest(own: str, there: str) -> int | None:
    """`own`: the device's node; `there`: those with memory, such as `0-1,4`. Raises ValueError when
    one is no such thing."""
    node, nodes = int(own), _numbers(there)
    return node if node in nodes and len(nodes) > 1 else None


def _numbers(text: str) -> set[int]:
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
