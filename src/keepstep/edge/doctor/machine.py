"""Machine: all facts of it, read in well under a second.

Comes in: a host, an environment, and what is asked for. Goes out: MachineFacts. What may be slow
(names) is asked for first, and waited for last.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from keepstep.edge.doctor.clock import read_clock
from keepstep.edge.doctor.directories import read_directory, read_mounts
from keepstep.edge.doctor.gpus import read_gpus
from keepstep.edge.doctor.host import Host
from keepstep.edge.doctor.limits import read_cgroups, read_limits
from keepstep.edge.doctor.memory import read_memory
from keepstep.edge.doctor.network import NameSearch, read_network
from keepstep.edge.doctor.processes import read_processes
from keepstep.edge.doctor.settings import read_settings
from keepstep.edge.doctor.software import read_software
from keepstep.model.machine_facts import LeftMemory, MachineFacts

FindLeft = Callable[[Path], Iterable[LeftMemory]]


def read_machine(
    host: Host,
    environ: Mapping[str, str],
    nodes: int = 1,
    store: str | None = None,
    find_left: FindLeft = lambda arena_dir: (),
) -> MachineFacts:
    """Facts of the machine.

    nodes: how many the job is to have.
    store: a directory or URL instead of KEEPSTEP_STORE.
    find_left: what dead jobs have left in an arena.
    """
    names = NameSearch(host)
    asked = read_settings(host, environ, nodes, store)
    arena_dir, state_dir = asked.settings.arena_dir, asked.settings.state_dir
    temporary = environ.get("TMPDIR") or tempfile.gettempdir()
    mounts = read_mounts(host)
    package = asked.wanted.store_package
    left = tuple(find_left(host.place(arena_dir)))
    return MachineFacts(
        arena=read_directory(host, arena_dir, mounts),
        state=read_directory(host, state_dir, mounts),
        temporary=read_directory(host, temporary, mounts),
        store=None if asked.store is None else read_directory(host, asked.store, mounts),
        memory=read_memory(host),
        cgroup=read_cgroups(host),
        limits=read_limits(host),
        processes=read_processes(host),
        clock=read_clock(host, (arena_dir, temporary, state_dir)),
        gpus=read_gpus(host, environ),
        software=read_software(() if package is None else (package,)),
        wanted=replace(asked.wanted, left=left),
        network=read_network(host, names),
    )
