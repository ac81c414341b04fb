"""Own file: one to append to that nobody else reads, writes or has put there, the directory that it
is in, and files that are read without waiting.

Where a state directory is shared, somebody else may have made what lies at a journal's or a log's
place: a link to where this user may write, a pipe that nobody reads, a file of their own. Comes in:
a path. Goes out: a descriptor of a regular file of this user's with no rights for others, or
OSError. Never waits.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

# what stands there is another's, or a link, which this user has not put there
ANOTHERS = (errno.EPERM, errno.EACCES, errno.ELOOP, errno.ENOTDIR)
FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def read_regular(path: Path, owner: int | None = None, directory: int | None = None) -> int:
    """A descriptor that reads it. Raises FileNotFoundError also for what would be waited for in
    vain, such as a pipe. owner: whose it must be, and no link then, else PermissionError or another
    OSError. directory: a descriptor of the one that it is in."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if owner is None else os.O_NOFOLLOW)
    fd = os.open(path if directory is None else path.name, flags, dir_fd=directory)
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise FileNotFoundError(errno.ENOENT, "expected a regular file, found none", str(path))
        if owner is not None:
            _check_owner("file", path, facts, path.parent, owner)
    except OSError:
        os.close(fd)
        raise
    return fd


def read_if_of(path: Path, owner: int | None) -> int | None:
    """A descriptor that reads it; None where there is no regular file. owner: whose it and its
    directory must be, else None too; None: anybody's. Raises OSError."""
    try:
        if owner is None:
            return read_regular(path)
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        directory = os.open(path.parent, flags)
        try:
            _check_owner("directory", path.parent, os.fstat(directory), path.parent, owner)
            return read_regular(path, owner, directory)
        finally:
            os.close(directory)
    except OSError as error:
        if not isinstance(error, FileNotFoundError) and (
            owner is None or error.errno not in ANOTHERS
        ):
            raise
        return None


def append_to_own(path: Path) -> int:
    """A descriptor that writes behind what is there; the file is made where there is none. Raises
    OSError, PermissionError among them for what is not this user's."""
    fd = os.open(path, FLAGS, 0o600)
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "expected a regular file, found none", str(path))
        _check_owner("file", path, facts, path.parent)
        if facts.st_mode & 0o077:
            with suppress(OSError):  # where the filesystem knows no modes
                os.fchmod(fd, 0o600)
    except OSError:
        os.close(fd)
        raise
    return fd


def check_own_directory(path: Path) -> None:
    """Raises OSError where it is no directory of this user's, and lets nobody else write to it."""
    facts = os.lstat(path)
    if not stat.S_ISDIR(facts.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "expected a directory, found none", str(path))
    _check_owner("directory", path, facts, path)
    if facts.st_mode & 0o022:
        with suppress(OSError):  # where the filesystem knows no modes
            os.chmod(path, stat.S_IMODE(facts.st_mode) & ~0o022)


def _check_owner(
    what: str, path: Path, facts: os.stat_result, made_in: Path, owner: int | None = None
) -> None:
    """Raises PermissionError for what is not the owner's, this user if not said. made_in: where a
    new file shows whose this user's are."""
    wanted = os.geteuid() if owner is None else owner
    found = facts.st_uid
    if found != wanted and not (wanted == os.geteuid() and found == _owner_of_new(made_in)):
        raise PermissionError(
            errno.EPERM, f"expected a {what} of user {wanted}, found one of user {found}", str(path)
        )


def _owner_of_new(directory: Path) -> int:
    """As whose a file appears that is made there: over NFS root's may be nobody's."""
    with suppress(OSError), tempfile.TemporaryFile(dir=directory) as probe:
        return os.fstat(probe.fileno()).st_uid
    return os.geteuid()
