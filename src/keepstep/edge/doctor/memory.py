"""Memory: what /proc/meminfo, /proc/sys/vm and /sys tell of it."""

from __future__ import annotations

import re

from keepstep.edge.doctor.host import Host, table_of, whole
from keepstep.model.machine_facts import MemoryFacts
from keepstep.model.units import KIB


def read_memory(host: Host) -> MemoryFacts:
    """Memory of the whole machine, in bytes."""
    table = table_of(host.text("/proc/meminfo"))

    def number(name: str) -> int | None:
        words = table.get(name, "").split()
        found = whole(words[0]) if words else None
        return None if found is None else found * (KIB if words[-1] == "kB" else 1)

    swap, swap_free = number("SwapTotal"), number("SwapFree")
    free_pages, page = number("HugePages_Free"), number("Hugepagesize")
    defrag = re.search(r"\[(.+?)\]", host.text("/sys/kernel/mm/transparent_hugepage/defrag") or "")
    return MemoryFacts(
        total_bytes=number("MemTotal"),
        available_bytes=number("MemAvailable"),
        swapped_bytes=None if swap is None or swap_free is None else swap - swap_free,
        commit_limit_bytes=number("CommitLimit"),
        committed_bytes=number("Committed_AS"),
        huge_pages_bytes=None if free_pages is None or page is None else free_pages * page,
        overcommit=host.number("/proc/sys/vm/overcommit_memory"),
        defrag=defrag[1] if defrag else None,
        numa_nodes=_numa_nodes(host),
        zone_reclaim=host.number("/proc/sys/vm/zone_reclaim_mode"),
        numa_balancing=host.number("/proc/sys/kernel/numa_balancing"),
    )


def _numa_nodes(host: Host) -> int:
    names = host.names("/sys/devices/system/node")
    return sum(bool(re.fullmatch(r"node\d+", name)) for name in names)
