"""Values: what options are checked with, where defaults come from, and how places are made
absolute."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from keepstep.config.option import Environ
from keepstep.errors import ConfigError

MAX_JOB_CHARACTERS = 64


def is_job_name(value: str) -> bool:
    allowed = all(c.isalnum() or c in "._-" for c in value)
    return 0 < len(value) <= MAX_JOB_CHARACTERS and allowed and value.strip(".") != ""


def default_job_name(environ: Environ, derived_job: str) -> str:
    return derived_job


def default_state_dir(environ: Environ, derived_job: str) -> str:
    home = environ.get("HOME") or _home_of_user()
    state_home = environ.get("XDG_STATE_HOME") or os.path.join(home, ".local", "state")
    return os.path.join(state_home, "keepstep")


def _home_of_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # as in a container that runs under any number
        raise ConfigError(
            f"state_dir: expected HOME or an entry for user {os.getuid()} in /etc/passwd, found "
            "neither; set KEEPSTEP_STATE_DIR"
        ) from None


def are_dotted_names(value: str) -> bool:
    names = value.replace(",", " ").split()
    return all(part.isidentifier() for name in names for part in name.split("."))


def are_functions(value: str) -> bool:
    places = [place.partition(":") for place in value.replace(",", " ").split()]
    return all(colon and are_dotted_names(f"{module} {name}") for module, colon, name in places)


def is_shared_store(value: str | Path) -> bool:
    if str(value).startswith("memory://"):
        raise ConfigError(
            "store: expected a place other processes can read, found 'memory://', which lives in "
            "one process"
        )
    return bool(str(value).strip())  # what a shell makes of a variable that is not set is no place


# Places are made absolute: keeper and persister work in another directory.


def absolute_store(value: str | Path | None) -> str | None:
    if value is None or "://" in str(value):
        return None if value is None else str(value)
    return os.path.abspath(os.path.expanduser(value))


def absolute_dir(value: str | Path) -> Path:
    return Path(value).absolute()
