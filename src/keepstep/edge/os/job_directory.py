"""Job directory: where a job's memory is on this node, so that nobody else can have put anything
there.

    <arena_dir>/keepstep-<uid>/<job>/

Each user has one directory in the arena, and below it one for each job. Whoever owns a directory
decides what is in it, and what is in it is loaded by the trainer. So before anything there is
opened or connected to, both must be found to be real directories (no links) of this user with no
rights for others. Nobody else can put another one in their place later: a sticky arena (as
/dev/shm is) lets only the owner rename them, and one that only root or this user may write is as
good.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from keepstep.errors import IdentityError, KeeperError

TRIES = 100  # the last job to leave removes the user's directory while another one comes


def claim_job_dir(job_dir: Path) -> None:
    """Make the job directory, or accept our own.

    Raises IdentityError when it is not this user's alone, KeeperError when it cannot be made.
    """
    for left in reversed(range(TRIES)):
        try:
            _check_arena(job_dir.parent.parent)
            _claim(job_dir.parent)
            _claim(job_dir)
            return
        except FileNotFoundError as error:
            if not left or not job_dir.parent.parent.is_dir():
                raise _cannot_be_made(job_dir, error) from error
        except OSError as error:
            raise _cannot_be_made(job_dir, error) from error


def is_own_job_dir(job_dir: Path) -> bool:
    """Whether it is there, and this user's alone. What is not is none of ours."""
    try:
        _check_arena(job_dir.parent.parent)
    except (OSError, IdentityError):
        return False
    return is_own(job_dir.parent) and is_own(job_dir)


def is_own(path: Path) -> bool:
    """Whether this is a directory of this user's alone."""
    try:
        _check_own(path)
    except (OSError, IdentityError):
        return False
    return True


def leave_job_dir(job_dir: Path, own: str) -> None:
    """Remove the file of this name, and the directory if nothing else is left in it."""
    with suppress(OSError):
        (job_dir / own).unlink()
        job_dir.rmdir()
        leave_arena(job_dir.parent)


def leave_arena(user_dir: Path) -> None:
    """Remove this user's directory if no job is left in it."""
    with suppress(OSError):
        user_dir.rmdir()


def _claim(path: Path) -> None:
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    _check_own(path)


def _check_own(path: Path) -> None:
    """Raises IdentityError, OSError when nothing is there."""
    me = os.geteuid()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:  # a link is none either
        raise IdentityError(f"{path}: expected a directory, found a link or a file") from None
    except PermissionError:
        raise IdentityError(
            f"{path}: expected a directory of user {me}, found one of another user"
        ) from None
    try:
        facts = os.fstat(fd)
    finally:
        os.close(fd)
    if facts.st_uid != me:
        raise IdentityError(
            f"{path}: expected a directory of user {me}, found one of user {facts.st_uid}; "
            "choose another arena_dir, or have it removed"
        )
    if facts.st_mode & 0o077:
        mode = stat.S_IMODE(facts.st_mode)
        raise IdentityError(
            f"{path}: expected a directory for its owner alone (mode 700), found mode {mode:o}"
        )


def _check_arena(path: Path) -> None:
    """Raises IdentityError, OSError."""
    facts = path.stat()
    others_may_write = facts.st_mode & 0o022 and not facts.st_mode & stat.S_ISVTX
    if others_may_write or facts.st_uid not in (0, os.geteuid()):
        mode = stat.S_IMODE(facts.st_mode)
        raise IdentityError(
            f"arena_dir: expected a directory of root or of user {os.geteuid()} in which nobody "
            f"else can rename (mode 1777, as /dev/shm has, or 755), found {path}, user "
            f"{facts.st_uid}, mode {mode:o}"
        )


def _cannot_be_made(path: Path, error: OSError) -> KeeperError:
    return KeeperError(
        f"{path}: expected a directory for the job that can be made, found {error.strerror}"
    )
