"""Rank processes: the trainers of one node, started as torchrun starts them.

Comes in: a `Launch`, and which ranks of an attempt are to be started, signalled or killed. Goes
out: which have ended, with their exit codes and what they left in their error files. A process that
stands by may become a rank later. Ranks are counted from 0 on each node here. Decides nothing.

Invariant: a rank's whole process group is gone before the end of a rank that failed is told: a data
loader's worker that lives on would hold the locks it inherited.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    SubprocessContext,
    start_processes,
)
from torch.distributed.elastic.multiprocessing.api import LogsDest, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from keepstep.edge.os.error_file import last_words, read_error_file
from keepstep.edge.os.loop import Loop
from keepstep.edge.os.orphans import end_orphans
from keepstep.edge.os.own_modules import module_words
from keepstep.edge.os.rank_ends import EndWatch
from keepstep.errors import ConfigError, KeeperError
from keepstep.model.device import STAYING, UNTESTED_NCCL
from keepstep.model.launch import DEFAULT_ROLE, RANK_OF, Launch, RankAssignment, RankEnd
from keepstep.ports import Executor

# It warns that signals are not handled (we do) and that processes are being closed (they are dead).
logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.ERROR)


def count_ranks(kind: str) -> int:
    """How many ranks `--nproc-per-node kind` means here. Raises ConfigError."""
    accelerators = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    cores = len(os.sched_getaffinity(0))
    counts = {"auto": accelerators or cores, "cpu": cores, "gpu": torch.cuda.device_count()}
    if kind not in counts:
        raise ConfigError(
            f"--nproc-per-node: expected a number, 'auto', 'cpu' or 'gpu', found {kind!r}"
        )
    if not counts[kind]:
        raise ConfigError(
            "--nproc-per-node: expected a machine with CUDA devices for 'gpu', found none"
        )
    return counts[kind]


@dataclass(frozen=True)
class ContextProcess:
    """One process of a context of torch's, by its number there."""

    context: SubprocessContext
    number: int

    @property
    def pid(self) -> int:
        return self.context.pids()[self.number]

    @property
    def error_file(self) -> str:
        return self.context.error_files[self.number]


class _Logs(DefaultLogsSpecs):
    """torch's, for some of the ranks: their directories are named after them."""

    ranks: Sequence[int] = ()

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        found = super().reify(envs)
        # a rank's number is never larger than the rank
        for number, rank in reversed(list(enumerate(self.ranks))):
            old = os.path.dirname(found.error_files[number])
            new = os.path.join(os.path.dirname(old), str(rank))
            if old == new:
                continue
            os.rename(old, new)
            for paths in (
                found.stdouts,
                found.stderrs,
                found.tee_stdouts,
                found.tee_stderrs,
                found.error_files,
            ):
                if number in paths:
                    paths[number] = paths[number].replace(old + os.sep, new + os.sep)
            envs[number]["TORCHELASTIC_ERROR_FILE"] = found.error_files[number]
        return found


Streams = Std | dict[int, Std]


def streams(launch: Launch) -> tuple[Streams, Streams]:
    """What of the ranks' output is redirected, and what is shown besides, as torch has it. Raises
    ConfigError when that is none of torchrun's."""
    try:
        return Std.from_str(launch.redirects), Std.from_str(launch.tee)
    except ValueError as error:
        raise ConfigError(
            f"--redirects, --tee: expected 0 to 3 or a map such as 0:1,1:2: {error}"
        ) from error


def line_prefix(role: str, local_rank: int, environ: Mapping[str, str]) -> str:
    """What stands in front of the lines of a rank that are shown besides: the rank's number in the
    job, as logs elsewhere name it; torch's words where the user has named a role."""
    is_named = role != DEFAULT_ROLE
    return f"{role}{local_rank}" if is_named else f"rank{environ.get('RANK', local_rank)}"


class TorchRankProcesses:
    """See `ports.RankProcesses`."""

    def __init__(
        self, loop: Loop, executor: Executor, launch: Launch, job: str, environ: Mapping[str, str]
    ) -> None:
        """environ: what every rank gets besides the agent's own environment. Raises ConfigError
        as `streams` does."""
        self._loop = loop
        self._executor = executor
        self._launch = launch
        self._job = job
        self._environ = environ
        self._told: Callable[[Sequence[RankEnd]], None] = _nobody
        self._ends = EndWatch(self._have_ended)
        self._loop.add_reader(self._ends.fileno(), self._ends.look)
        self._redirects, self._tee = streams(launch)
        self._keeps_logs = launch.log_dir is not None or (launch.redirects, launch.tee) != (
            "0",
            "0",
        )
        self._log_dirs: list[str] = []
        self._run_log_dir: str | None = None
        self._processes: dict[int, ContextProcess] = {}
        self._living: dict[int, int] = {}
        self._standby: ContextProcess | None = None

    @property
    def may_stand_by(self) -> bool:
        """Whether a process can be started before it is known which rank it will be: the output of
        all goes the same way."""
        return not self._keeps_logs and self._launch.shown_ranks is None

    @property
    def living(self) -> Mapping[int, int]:
        return self._living

    def listen(self, ended: Callable[[Sequence[RankEnd]], None]) -> None:
        self._told = ended

    def start(
        self, place: RankAssignment, ranks: Collection[int], environ: Mapping[str, str]
    ) -> dict[int, int]:
        entry, *args = self._launch.command
        numbers = sorted(ranks)
        if not numbers:
            return {}
        environs = [{**self.environ_of(rank, place), **environ} for rank in numbers]
        context = self._spawn(self._launch.role, entry, tuple(args), numbers, environs)
        for number, rank in enumerate(numbers):
            self._take(rank, ContextProcess(context, number))
        return {rank: self._living[rank] for rank in numbers}

    def start_standby(self) -> None:
        self._end_standby()
        context = self._spawn(
            "standby",
            sys.executable,
            ("-u", *module_words("keepstep.runtime.rank.standby", *self._launch.command[1:])),
            [0],
            [self._static_environ()],
        )
        self._standby = ContextProcess(context, 0)

    @property
    def standby_pid(self) -> int | None:
        return None if self._standby is None else self._standby.pid

    def standby_becomes(self, rank: int) -> int:
        standby, self._standby = self._standby, None
        if standby is None:
            raise KeeperError("no process stands by to become a rank")
        self._take(rank, standby)
        return standby.pid

    def _end_standby(self) -> None:
        if self._standby is not None:
            self._standby.context.close(signal.SIGKILL)
            self._standby = None

    def _take(self, rank: int, process: ContextProcess) -> None:
        self._let_go(rank)
        self._processes[rank] = process
        self._living[rank] = process.pid
        self._ends.watch(rank, process.pid)

    def _spawn(
        self,
        name: str,
        entry: str,
        args: tuple[str, ...],
        ranks: Sequence[int],
        environs: Sequence[Mapping[str, str]],
    ) -> SubprocessContext:
        shown = (
            None
            if self._launch.shown_ranks is None
            else {n for n, rank in enumerate(ranks) if rank in self._launch.shown_ranks}
        )
        logs = _Logs(
            self._launch.log_dir, _for(self._redirects, ranks), _for(self._tee, ranks), shown
        )
        logs.ranks = ranks
        if self._keeps_logs:  # one directory for the job, with one for each life in it
            logs._run_log_dir = self._run_log_dir
        else:
            self._log_dirs.append(logs.root_log_dir)
        # On the main thread it would replace the agent's signal handlers.
        with ThreadPoolExecutor(1) as thread:
            context = thread.submit(
                start_processes,
                name=name,
                entrypoint=entry,
                args=dict.fromkeys(range(len(ranks)), args),
                envs={number: dict(environ) for number, environ in enumerate(environs)},
                logs_specs=logs,
                log_line_prefixes={
                    number: f"[{line_prefix(name, rank, environs[number])}]:"
                    for number, rank in enumerate(ranks)
                },
            ).result()
        assert isinstance(context, SubprocessContext)
        self._run_log_dir = logs._run_log_dir
        return context

    def environ_of(self, local_rank: int, place: RankAssignment) -> dict[str, str]:
        """What makes a process this rank."""
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
            "TORCHELASTIC_RESTART_COUNT": str(place.attempt),
            "KEEPSTEP_ATTEMPT": str(place.attempt),
        }
        return {**self._static_environ(), **environ}

    def _static_environ(self) -> dict[str, str]:
        """What all ranks have in common, in every life."""
        environ = {
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_MAX_RESTARTS": str(self._launch.max_restarts),
            "TORCHELASTIC_RUN_ID": self._job,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get(
                "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"
            ),
        }
        if os.environ.get(UNTESTED_NCCL) == "1":
            environ |= {v.name: os.environ.get(v.name, v.value) for v in STAYING}
        if self._launch.ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
            environ["OMP_NUM_THREADS"] = "1"
        return {**environ, **self._environ}

    # -- ends

    def _have_ended(self, ranks: Sequence[int]) -> None:
        self._told([self._reap(rank) for rank in ranks])

    def _reap(self, rank: int) -> RankEnd:
        pid = self._living.pop(rank)
        # Looked at before it is reaped: until then its number, which is its group's, belongs to
        # nobody else.
        found = os.waitid(os.P_PIDFD, self._ends.pidfd(rank), os.WEXITED | os.WNOWAIT)
        if found is not None and (found.si_code, found.si_status) != (os.CLD_EXITED, 0):
            os.killpg(pid, signal.SIGKILL)
        self._ends.drop(rank)
        process = self._processes[rank]
        code = process.context.subprocess_handlers[process.number].proc.wait()
        return RankEnd(rank, pid, code, last_words(process.error_file, pid, code))

    def signal(self, signum: int) -> None:
        """Ranks are in sessions of their own, so the terminal's Ctrl-C does not reach them."""
        for pid in self._living.values():
            os.killpg(pid, signum)

    def kill(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            if rank in self._living:
                os.killpg(self._living[rank], signal.SIGKILL)

    def end_orphans(self, agent_pids: Sequence[int], then: Callable[[list[int]], None]) -> None:
        place = self._environ[RANK_OF]
        marks = [{"KEEPSTEP_AGENT": str(pid), RANK_OF: place} for pid in agent_pids]
        self._executor.submit(
            lambda: [pid for each in marks for pid in end_orphans(each, Path(place))], then
        )

    def summary(self, ends: Sequence[tuple[int, int]]) -> str:
        failures = {}
        for rank, code in ends:
            process = self._processes[rank]
            path = read_error_file(process.error_file).path
            failures[rank] = ProcessFailure(rank, process.pid, code, path)
        first = next(iter(failures.values()))
        # Whole seconds only: the order is better known here.
        first.timestamp = min(failure.timestamp for failure in failures.values())
        return str(ChildFailedError(self._launch.role, failures))

    def close(self, keep_errors: bool) -> None:
        """Stop copying their output, too."""
        self._end_standby()
        for rank in list(self._processes):
            self._let_go(rank)
        self._loop.remove_reader(self._ends.fileno())
        self._ends.close()
        if not keep_errors:
            for directory in self._log_dirs:
                shutil.rmtree(directory, ignore_errors=True)

    def _let_go(self, rank: int) -> None:
        """The rank's process is dead; its context is closed with the last of its processes."""
        process = self._processes.pop(rank, None)
        if process is not None and all(
            other.context is not process.context for other in self._processes.values()
        ):
            process.context.close()


def _for(streams: Streams, ranks: Sequence[int]) -> Streams:
    """Which streams of these ranks, by their number among them."""
    return (
        streams
        if isinstance(streams, Std)
        else {n: streams[rank] for n, rank in enumerate(ranks) if rank in streams}
    )


def _nobody(ends: Sequence[RankEnd]) -> None:
    """Nobody listens yet."""
