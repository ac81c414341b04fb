"""`keepstep clean`: list and remove the memory of jobs that nobody lives in.

As JSON: {"leftovers": [{"job", "path", "bytes", "held_bytes", "keeper_alive", "ranks_alive":
[[rank, process], ...], "removed"}, ...]}; `held_bytes`, a part of `bytes`, are other nodes' copies
and parities, which go too. Without --yes nothing is removed, because a script cannot be asked.

Invariant: a directory is removed only while this process holds its keeper's lock, so that no keeper
can begin in it, and never while a rank lives: its bytes would stay allocated, and it could not save
any more.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console

from keepstep.cli.job_choice import JobOption, JsonOption, named, places, print_json
from keepstep.dashboard import terminal
from keepstep.dashboard.finding import Leftover, find_leftovers
from keepstep.dashboard.view import as_json
from keepstep.edge.net.unix_socket import Mailbox
from keepstep.errors import ConfigError, KeeperError
from keepstep.model.units import human_bytes

# the keeper may still have a checkpoint to write, or wait a minute for the node that leads to have
# written it
END_WITHIN_S = 90.0


def clean(
    job: JobOption = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="All jobs: what happens without --job; said aloud for scripts."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="With --job: end a keeper that holds the memory for a restart, too."
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """List and remove what dead jobs left in memory."""
    _check(job, everything, force)
    found = [leftover for leftover in find_leftovers(places()) if job in (None, leftover.job)]
    if job and not found:
        named(job)  # says so when the name is wrong
    going = [
        leftover for leftover in found if not leftover.alive or (force and not leftover.ranks_alive)
    ]
    if job and len(going) < len(found):
        raise ConfigError(_refusal(next(leftover for leftover in found if leftover not in going)))
    console = Console(stderr=json)
    console.print(
        terminal.leftovers(found) if found else f"No job holds memory in {places().arena_dir}.",
        highlight=False,
    )
    if found and not going:
        console.print("Nothing is left over: somebody lives in each of them.")
    removed = set()
    if going and (
        yes
        or (not json and typer.confirm(f"Remove {', '.join(leftover.job for leftover in going)}?"))
    ):
        for leftover in going:
            remove(leftover)
            removed.add(leftover.path)
            console.print(
                f"Removed {leftover.path}: {human_bytes(leftover.bytes)} are free again.",
                highlight=False,
                soft_wrap=True,
            )
    if json:
        print_json(
            {
                "leftovers": [
                    {**as_json(leftover), "removed": leftover.path in removed} for leftover in found
                ]
            }
        )


def _check(job: str | None, everything: bool, force: bool) -> None:
    if job and everything:
        raise ConfigError("expected --job or --all, found both")
    if force and not job:
        raise ConfigError("--force: expected the one job it is meant for (--job NAME), found none")


def _refusal(leftover: Leftover) -> str:
    if leftover.ranks_alive:
        return (
            f"job {leftover.job!r} is alive: expected nobody, found "
            f"{terminal.holders(leftover)}; end these processes first"
        )
    return (
        f"the keeper of job {leftover.job!r} holds its memory for a restart: expected nobody; "
        "--force ends it"
    )


def remove(leftover: Leftover) -> None:
    """Raises KeeperError when somebody came to life meanwhile, or the keeper does not end."""
    if leftover.keeper_alive:
        _end_keeper(leftover)
    try:
        lock_fd = os.open(
            leftover.path / "keeper.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
    except FileNotFoundError:
        return  # the keeper has cleaned up by itself
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        again = _look_again(leftover)
        if again and again.ranks_alive:
            raise KeeperError(
                f"{leftover.path}: expected nobody, found {terminal.holders(again)}, who "
                "came meanwhile"
            )
        # The directory leaves its name in one step: a new run of the job may begin this very
        # moment.
        gone = leftover.path.with_name(
            f"{leftover.path.name.partition('.ending-')[0]}.ending-{os.getpid()}"
        )
        os.rename(leftover.path, gone)
        shutil.rmtree(gone)
    except BlockingIOError:
        raise KeeperError(
            f"{leftover.path}: expected no keeper, found one that came meanwhile"
        ) from None
    finally:
        os.close(lock_fd)


def _look_again(leftover: Leftover) -> Leftover | None:
    found = next((other for other in find_leftovers(places()) if other.path == leftover.path), None)
    return replace(found, keeper_alive=False) if found else None  # the lock that it sees is ours


def _end_keeper(leftover: Leftover) -> None:
    try:
        box = Mailbox.connect(leftover.path / "keeper.sock", 5.0)
    except OSError as error:
        raise KeeperError(
            f"{leftover.path}: expected the keeper to answer, found {error}"
        ) from error
    box.send({"kind": "end", "ok": False, "why": "keepstep clean --force"})
    deadline = time.monotonic() + END_WITHIN_S
    try:
        while box.recv(max(0.0, deadline - time.monotonic())) is not None:
            pass
    except TimeoutError:
        raise KeeperError(
            f"{leftover.path}: expected the keeper to end within {END_WITHIN_S:.0f} s, found "
            "it still busy"
        ) from None
    finally:
        box.close()
