"""Job name: the default name of a job.

The same user running the same script in the same directory means the same job, whatever the
arguments: a command that is typed again, or submitted again with another learning rate, finds its
own state, under every launcher. Who wants two jobs gives them names.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path


def default_job(argv: Sequence[str]) -> str:
    """`train-1f3a09c2`: argv[0] is the script's path."""
    here = _working_directory()
    script = os.path.normpath(os.path.join(here, argv[0])) if argv and argv[0] else "interactive"
    parts = os.fsencode("\0".join([str(os.getuid()), script, here]))
    digest = hashlib.blake2b(parts, digest_size=4).hexdigest()
    stem = "".join(c if c.isalnum() or c in "._-" else "-" for c in Path(script).stem)[:40]
    return f"{stem.lstrip('-') or 'job'}-{digest}"


def _working_directory() -> str:
    """Also where it has been removed: a process that is restarted there is of the same job."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return os.readlink("/proc/self/cwd").removesuffix(" (deleted)")


def job_hash(job: str, uid: int) -> bytes:
    """What ties a slot to its job: 16 bytes."""
    return hashlib.blake2b(f"{uid}\0{job}".encode(), digest_size=16).digest()
