"""`keepstep clean`: list the memory that jobs have left, and remove it.

As JSON: {"leftovers": [{"job", "path", "bytes", "held_bytes", "keeper_alive", "ranks_alive":
[[rank, process], ...], "removed"}, ...]}; `held_bytes`, a part of `bytes`, are other nodes' copies
and parities, which go too. With --json nothing is removed unless --yes is given, because a script
cannot be asked.

Invariant: a directory is removed only while this process holds its keeper's lock, so that no keeper
can begin in it, and never while a rank lives: its bytes would stay allocated, and it could save no
more.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from keepstep.cli.job_choice import (
    JsonOption,
    arena_dir,
    job_option,
    named,
    no_memory,
    print_json,
)
from keepstep.config import ending_dir_of
from keepstep.core.wire.conversations import AGENT_WITH_KEEPER
from keepstep.dashboard import terminal
from keepstep.dashboard.document import as_json
from keepstep.dashboard.finding import Leftover, find_leftovers
from keepstep.dashboard.screen import Screen
from keepstep.edge.net.unix_socket import Mailbox
from keepstep.edge.os.job_directory import leave_arena
from keepstep.errors import ConfigError, KeeperError
from keepstep.model.messages.keeper_agent import RemoveMemory
from keepstep.model.units import human_bytes

# The keeper may still have a checkpoint to write, or wait a minute for the leading node to have
# written it.
END_WITHIN_S = 90.0
LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


def clean(
    job: Annotated[str | None, job_option("every job without a living process")] = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="Every job without a living process: the default."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="With --job: end a keeper that keeps the memory for a restart, too."
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """List the memory of jobs that have no living process, and remove it."""
    _check(job, everything, force)
    found = [each for each in find_leftovers(arena_dir()) if job in (None, each.job)]
    if job and not found:
        named(job)  # raises when there is no such job
    going = [each for each in found if not each.alive or (force and not each.ranks_alive)]
    if job and len(going) < len(found):
        raise ConfigError(_refusal(next(each for each in found if each not in going)))
    console = Screen(stderr=json, highlight=False)
    console.print(terminal.leftovers(found) if found else no_memory())
    if found and not going:
        console.print("Nothing to remove: each has a living process.")
    removed = _remove_all(going, console) if going and (yes or _agrees(going, json)) else set()
    if json:
        rows = [{**as_json(each), "removed": each.path in removed} for each in found]
        print_json({"leftovers": rows})


def _check(job: str | None, everything: bool, force: bool) -> None:
    if job and everything:
        raise ConfigError("expected --job or --all, found both")
    if force and not job:
        raise ConfigError("--force: expected --job NAME, the one job it is meant for, found none")


def _refusal(leftover: Leftover) -> str:
    if leftover.ranks_alive:
        return (
            f"--job: expected a job without living ranks, found {leftover.job!r} with "
            f"{terminal.survivors(leftover)}; end these processes first"
        )
    return (
        f"--job: expected a job without a keeper, found {leftover.job!r}, whose keeper keeps its "
        "memory for a restart; --force ends it"
    )


def _agrees(going: Sequence[Leftover], as_json: bool) -> bool:
    if as_json:
        return False
    return typer.confirm(f"Remove {', '.join(each.job for each in going)}?")


def _remove_all(going: Sequence[Leftover], console: Console) -> set[Path]:
    for leftover in going:
        remove(leftover)
        freed = human_bytes(leftover.bytes)
        console.print(f"Removed {leftover.path}: {freed} freed.", soft_wrap=True)
    return {leftover.path for leftover in going}


def remove(leftover: Leftover) -> None:
    """Remove a job's memory; a living keeper is ended first. Raises KeeperError when a process came
    to life meanwhile, or when the keeper does not end."""
    if leftover.keeper_alive:
        _end_keeper(leftover)
    try:
        lock_fd = os.open(leftover.path / "keeper.lock", LOCK_FLAGS, 0o600)
    except FileNotFoundError:
        return  # the keeper has removed it by itself
    try:
        _take(lock_fd, leftover.path)
        _check_ranks(leftover)
        # The directory leaves its name in one step: a new run of the job may begin any moment.
        gone = ending_dir_of(leftover.path, os.getpid())
        os.rename(leftover.path, gone)
        shutil.rmtree(gone)
        leave_arena(leftover.path.parent)
    finally:
        os.close(lock_fd)


def _take(lock_fd: int, path: Path) -> None:
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise KeeperError(f"{path}: expected no keeper, found one that came meanwhile") from None


def _check_ranks(leftover: Leftover) -> None:
    for found in find_leftovers(leftover.path.parent.parent):
        if found.path == leftover.path and found.ranks_alive:
            ranks = replace(found, keeper_alive=False)  # the lock that it sees is ours
            raise KeeperError(
                f"{leftover.path}: expected no living rank, found {terminal.survivors(ranks)}, "
                "which came meanwhile"
            )


def _end_keeper(leftover: Leftover) -> None:
    try:
        box = Mailbox.connect(leftover.path / "keeper.sock", 5.0, AGENT_WITH_KEEPER)
    except OSError as error:
        raise KeeperError(
            f"{leftover.path}: expected the keeper to answer, found {error}"
        ) from error
    box.send(RemoveMemory("keepstep clean --force"))
    deadline = time.monotonic() + END_WITHIN_S
    try:
        while box.recv(max(0.0, deadline - time.monotonic())) is not None:
            pass
    except TimeoutError:
        raise KeeperError(
            f"{leftover.path}: expected the keeper to end within {END_WITHIN_S:.0f} s, found it "
            "still busy"
        ) from None
    finally:
        box.close()
