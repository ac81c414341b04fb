"""Ranks: the trainers of one node as processes, started as torchrun starts them.

Comes in: a `Launch` and the `Place` of a life of the ranks. Goes out: one pidfd a rank, which the kernel makes readable the moment the rank
ends, and exit codes with what the rank left in its error file. Ranks are counted from 0 on each node here. Decides nothing.

Invariant: a rank's whole process group is gone before the rank counts as dead after a failure: a data loader's worker that lives on would
hold the locks it inherited.
"""

from __future__ import annotations

import json
import logging
import os
import select
import shutil
import signal
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SubprocessContext, start_processes
from torch.distributed.elastic.multiprocessing.api import Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from keepstep.errors import ConfigError
from keepstep.model.launch import Launch, Place

# It warns that signals are not handled (we do) and that processes are being closed (they are dead).
logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.ERROR)


def count_ranks(kind: str) -> int:
    """How many ranks `--nproc-per-node kind` means here. Raises ConfigError."""
    accelerators = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    cores = len(os.sched_getaffinity(0))
    counts = {"auto": accelerators or cores, "cpu": cores, "gpu": torch.cuda.device_count()}
    if kind not in counts:
        raise ConfigError(f"--nproc-per-node: expected a number, 'auto', 'cpu' or 'gpu', found {kind!r}")
    if not counts[kind]:
        raise ConfigError("--nproc-per-node: expected a machine with CUDA devices for 'gpu', found none")
    return counts[kind]


class Ranks:
    """All ranks of the node, one life after the other."""

    def __init__(self, launch: Launch, job: str, environ: Mapping[str, str]) -> None:
        """`environ` is what every rank gets besides the agent's own environment."""
        self._launch, self._job, self._environ = launch, job, environ
        try:
            redirects, tee = Std.from_str(launch.redirects), Std.from_str(launch.tee)
        except ValueError as error:
            raise ConfigError(f"--redirects, --tee: expected 0 to 3 or a map such as 0:1,1:2: {error}") from error
        self._keeps_logs = launch.log_dir is not None or (launch.redirects, launch.tee) != ("0", "0")
        shown = None if launch.shown_ranks is None else set(launch.shown_ranks)
        self._logs = DefaultLogsSpecs(launch.log_dir, redirects, tee, shown)
        self._context: SubprocessContext | None = None
        self.pidfds: dict[int, int] = {}

    def start(self, place: Place) -> dict[int, int]:
        """Start all ranks; their pids. The ranks of the life before must be dead."""
        self._close_context()
        entry, *args = self._launch.command
        ranks = range(self._launch.ranks)
        # On the main thread it would replace the agent's signal handlers.
        with ThreadPoolExecutor(1) as thread:
            context = thread.submit(
                start_processes,
                name=self._launch.role,
                entrypoint=entry,
                args={rank: tuple(args) for rank in ranks},
                envs={rank: self._rank_environ(rank, place) for rank in ranks},
                logs_specs=self._logs,
            ).result()
        assert isinstance(context, SubprocessContext)
        self._context = context
        self.pidfds = {rank: os.pidfd_open(pid) for rank, pid in context.pids().items()}
        return context.pids()

    def _rank_environ(self, local_rank: int, place: Place) -> dict[str, str]:
        rank, world = str(place.first_rank + local_rank), str(place.world_size)
        environ = {
            "RANK": rank,
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(place.node),
            "ROLE_RANK": rank,
            "ROLE_NAME": self._launch.role,
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": str(self._launch.ranks),
            "GROUP_WORLD_SIZE": str(place.nodes),
            "ROLE_WORLD_SIZE": world,
            "MASTER_ADDR": place.master_addr,
            "MASTER_PORT": str(place.master_port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(place.attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(self._launch.max_restarts),
            "TORCHELASTIC_RUN_ID": self._job,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
        if self._launch.ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
            environ["OMP_NUM_THREADS"] = "1"
        return {**environ, **self._environ, "KEEPSTEP_ATTEMPT": str(place.attempt)}

    def pid(self, rank: int) -> int:
        assert self._context is not None
        return self._context.pids()[rank]

    def reap(self, rank: int) -> tuple[int, str]:
        """(exit code, message of the error file) of a rank whose pidfd is readable."""
        assert self._context is not None
        fd = self.pidfds.pop(rank)
        # Looked at before it is reaped: until then its number, which is its group's, belongs to nobody else.
        found = os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOWAIT)
        if found is not None and (found.si_code, found.si_status) != (os.CLD_EXITED, 0):
            os.killpg(self.pid(rank), signal.SIGKILL)
        os.close(fd)
        code = self._context.subprocess_handlers[rank].proc.wait()
        return code, self._message(rank)

    def _message(self, rank: int) -> str:
        assert self._context is not None
        try:
            with open(self._context.error_files[rank], encoding="utf-8") as file:
                message = json.load(file)["message"]
            return str(message["message"] if isinstance(message, dict) else message)
        except (OSError, ValueError, KeyError, TypeError):
            return ""  # only scripts under `record` write one, and a killed rank leaves half of it

    def signal(self, signum: int) -> None:
        """To every living rank and its children: ranks are in sessions of their own, so the terminal's Ctrl-C does not reach them."""
        for rank in self.pidfds:
            os.killpg(self.pid(rank), signum)

    def kill(self, timeout_s: float) -> list[int]:
        """SIGKILL and reap all living ranks; those that are still there after `timeout_s`."""
        self.signal(signal.SIGKILL)
        deadline = time.monotonic() + timeout_s
        for rank, fd in list(self.pidfds.items()):
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            if poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                self.reap(rank)
        return sorted(self.pidfds)

    def summary(self, exits: Iterable[tuple[int, int]]) -> str:
        """What torchrun prints when ranks failed: (rank, exit code), the first one is the cause."""
        assert self._context is not None
        failures = {}
        for rank, code in exits:
            file = self._context.error_files[rank] if self._message(rank) else ""
            failures[rank] = ProcessFailure(rank, self.pid(rank), code, file)
        first = next(iter(failures.values()))
        first.timestamp = min(f.timestamp for f in failures.values())  # whole seconds only: the order is better known here
        return str(ChildFailedError(self._launch.role, failures))

    def close(self, keep_errors: bool) -> None:
        """Every rank is dead: stop copying their output, and unless `keep_errors` remove the error files that nobody asked for."""
        self._close_context()
        if not (keep_errors or self._keeps_logs):
            shutil.rmtree(self._logs.root_log_dir, ignore_errors=True)

    def _close_context(self) -> None:
        if self._context is not None:
            self._context.close()
            self._context = None
