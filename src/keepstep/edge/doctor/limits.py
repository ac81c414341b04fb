"""Limits: of this process, and of the control groups that it is in, of either version.

Comes in: /proc/self/limits, /proc/self/cgroup and what they point to. Goes out: the tightest of
each. In a container the groups above its own are not there to be read.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from keepstep.edge.doctor.host import Host, whole
from keepstep.model.machine_facts import UNLIMITED, CgroupFacts, LimitFacts, ProcessLimit

CGROUPS = "/sys/fs/cgroup"
NO_LIMIT = 1 << 62  # version 1 says so as a number of pages near 2**63 bytes


def read_limits(host: Host) -> LimitFacts:
    """This process's resource limits: in bytes, seconds of processor time, or a count."""
    found = {}
    for line in (host.text("/proc/self/limits") or "").splitlines():
        words = re.split(r"\s{2,}", line.strip())
        if len(words) >= 3:
            soft, hard = (_limit(word) for word in words[1:3])
            if soft is not None and hard is not None:
                found[words[0]] = ProcessLimit(soft, hard)
    return LimitFacts(
        open_files=found.get("Max open files"),
        processes=found.get("Max processes"),
        locked_bytes=found.get("Max locked memory"),
        file_bytes=found.get("Max file size"),
        address_bytes=found.get("Max address space"),
        cpu_s=found.get("Max cpu time"),
        core_bytes=found.get("Max core file size"),
    )


def read_cgroups(host: Host) -> CgroupFacts:
    """The tightest limits of the groups that this process is in."""
    memory = _tightest(host, "memory", "memory.max", "memory.limit_in_bytes")
    pids = _tightest(host, "pids", "pids.max", "pids.max")
    usage = ("memory.current", "memory.usage_in_bytes")
    return CgroupFacts(
        memory_limit_bytes=memory[0],
        memory_used_bytes=_first(host, memory[1], *usage) if memory[1] else None,
        pids_limit=pids[0],
        pids_used=_first(host, pids[1], "pids.current") if pids[1] else None,
        cpu_cores=_cpu_cores(host),
        throttled_ratio=_throttled_ratio(host),
    )


def _groups(host: Host, controller: str) -> list[str]:
    """Directories of this process's group for that controller and of those above it, its own first.
    A path that a container does not show is taken for its root."""
    directories = []
    for line in (host.text("/proc/self/cgroup") or "").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            bases = [CGROUPS, f"{CGROUPS}/unified"]
        elif controller in controllers.split(","):
            bases = [f"{CGROUPS}/{controllers}", f"{CGROUPS}/{controller}"]
        else:
            continue
        for base in bases:
            inner = PurePosixPath(base + path)
            directories += [str(each) for each in (inner, *inner.parents)]
    inside = [each for each in directories if each.startswith(CGROUPS)]
    return [each for each in dict.fromkeys(inside) if host.place(each).is_dir()]


def _tightest(host: Host, controller: str, *names: str) -> tuple[int, str]:
    """The lowest limit and the directory that has it; empty: there is none."""
    found = (UNLIMITED, "")
    for group in _groups(host, controller):
        limit = _first(host, group, *names)
        if limit is not None and limit < min(found[0], NO_LIMIT):
            found = limit, group
    return found


def _first(host: Host, group: str, *names: str) -> int | None:
    numbers = (host.number(f"{group}/{name}") for name in names)
    return next((number for number in numbers if number is not None), None)


def _cpu_cores(host: Host) -> float | None:
    shares = []
    for group in _groups(host, "cpu"):
        quota, period = [*(host.text(f"{group}/cpu.max") or "").split(), "", ""][:2]
        if not period:
            quota = host.text(f"{group}/cpu.cfs_quota_us") or ""
            period = host.text(f"{group}/cpu.cfs_period_us") or ""
        share, of = whole(quota), whole(period)
        if share is not None and of and share > 0:
            shares.append(share / of)
    return min(shares, default=None)


def _throttled_ratio(host: Host) -> float:
    for group in _groups(host, "cpu"):
        words = (host.text(f"{group}/cpu.stat") or "").split()
        counts = dict(zip(words[::2], words[1::2], strict=False))
        periods = whole(counts.get("nr_periods"))
        throttled = whole(counts.get("nr_throttled"))
        if periods and throttled is not None:
            return throttled / periods
    return 0.0


def _limit(word: str) -> int | None:
    return UNLIMITED if word == "unlimited" else whole(word)
