"""Processes: what runs here, what this process has inherited, and what it may do.

Comes in: /proc. Goes out: ProcessFacts. Of other processes only names, states, parents and, of
keepers, the command line are read.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

from keepstep.config.settings import ending_dir_of, job_dir_of
from keepstep.edge.doctor.host import Host, table_of, whole
from keepstep.edge.os.process_stat import stat_in
from keepstep.edge.os.processes import KEEPER_MODULE
from keepstep.model.decoding import a_text, an_object, from_json
from keepstep.model.machine_facts import KeeperTrace, ProcessFacts

SYS_PTRACE = 1 << 19  # CAP_SYS_PTRACE
SETTLE_S = 0.2


def read_processes(host: Host) -> ProcessFacts:
    """All processes that /proc shows."""
    own = table_of(host.text("/proc/self/status"))
    load = (host.text("/proc/loadavg") or "").split()
    tasks = load[3].rpartition("/")[2] if len(load) > 3 else None
    zombies = [parent for state, parent in _states(host) if state == "Z"]
    capabilities = int(own.get("CapEff", "0"), 16)
    return ProcessFacts(
        is_root=host.user() == 0,
        cpus=host.cpus(),
        load=float(load[0]) if load else None,
        tasks=whole(tasks),
        pid_max=host.number("/proc/sys/kernel/pid_max"),
        threads_max=host.number("/proc/sys/kernel/threads-max"),
        zombies=len(zombies),
        zombies_of_init=zombies.count(1),
        init=host.text("/proc/1/comm"),
        ignored_signals=_signals(own.get("SigIgn", "0")),
        blocked_signals=_signals(own.get("SigBlk", "0")),
        has_autogroup=host.number("/proc/sys/kernel/sched_autogroup_enabled") == 1,
        may_nice_session=host.may("/proc/self/autogroup", os.W_OK),
        ptrace_scope=host.number("/proc/sys/kernel/yama/ptrace_scope"),
        may_trace=bool(capabilities & SYS_PTRACE),
        pidfd_refusal=host.pidfd_refusal(),
        keepers=tuple(_settled_keepers(host)),
    )


def _pids(host: Host) -> list[str]:
    return [name for name in host.names("/proc") if name.isdecimal()]


def _states(host: Host) -> Iterator[tuple[str, int]]:
    """(state, parent) of each process."""
    for pid in _pids(host):
        stat = stat_in(host.text(f"/proc/{pid}/stat") or "")
        if stat is not None:
            yield stat.state, stat.parent


def _signals(mask: str) -> frozenset[str]:
    """Names of the signals in a mask of /proc/<pid>/status: bit 0 is signal 1."""
    bits = int(mask, 16)
    return frozenset(each.name for each in signal.Signals if bits >> (each - 1) & 1)


def _settled_keepers(host: Host) -> list[KeeperTrace]:
    """This user's. One that is just ending has no memory either, so those without are looked at
    twice."""
    found = list(_keepers(host, _pids(host)))
    if all(keeper.has_memory for keeper in found):
        return found
    host.pause(SETTLE_S)
    return list(_keepers(host, [str(keeper.pid) for keeper in found]))


def _keepers(host: Host, pids: list[str]) -> Iterator[KeeperTrace]:
    for pid in pids:
        try:
            if host.place(f"/proc/{pid}").stat().st_uid != os.geteuid():
                continue  # what others have on their command line is nobody's to parse
            line = host.text(f"/proc/{pid}/cmdline") or ""
            if KEEPER_MODULE not in line:
                continue
            said = line.partition(f"{KEEPER_MODULE}\0")[2].partition("\0")[0]
            settings = an_object(from_json(said))
            job = a_text(settings["job"])
            job_dir = job_dir_of(Path(a_text(settings["arena_dir"])), job)
            yield KeeperTrace(int(pid), job, _has_memory(host, pid, job_dir))
        except (ValueError, KeyError, OSError):
            continue  # a command that only names it, or it has just ended


def _has_memory(host: Host, pid: str, job_dir: Path) -> bool:
    """Whether the directory is there for that process, which may see other mounts, or is just being
    removed by it."""
    root = Path(f"/proc/{pid}/root")
    for path in (job_dir, ending_dir_of(job_dir, pid)):
        try:
            os.stat(host.place(root / path.relative_to("/")))
        except FileNotFoundError:
            continue
        except OSError:
            pass  # nobody but the keeper knows
        return True
    return False
