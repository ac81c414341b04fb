"""Settings: what is asked of this machine, from `KEEPSTEP_*` variables and those of other
libraries.

Comes in: an environment. Goes out: WantedFacts, and settings that hold what could be read. Nothing
that goes out has the secret in it, nor the password of a store's URL.
"""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from keepstep.config import Settings, from_environ, resolve, user_dir
from keepstep.config.option import ENV_PREFIX
from keepstep.config.settings import BY_VARIABLE, INTERNAL, check
from keepstep.edge.doctor.host import Host
from keepstep.edge.os.job_directory import is_own
from keepstep.errors import ConfigError
from keepstep.model.machine_facts import WantedFacts

# Variables of launchers and libraries that are judged. None of them holds a secret.
OF_OTHERS = (
    *("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"),
    *("TORCH_NCCL_BLOCKING_WAIT", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
)
STORE_PACKAGES = {
    **{"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"},
    **{"az": "adlfs", "abfs": "adlfs", "abfss": "adlfs", "hdfs": "pyarrow"},
}
LOCAL = ("file", "local")
JOB = "any"  # its name is part of no fact


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for. `store`: its directory, None: there is none, or it is no directory."""

    settings: Settings
    wanted: WantedFacts
    store: Path | None


def read_settings(host: Host, environ: Mapping[str, str], nodes: int, store: str | None) -> Asked:
    """`store`: instead of the one that the environment names."""
    own = {name: text for name, text in environ.items() if name.startswith(ENV_PREFIX)}
    problems = {name: problem for name in sorted(own) if (problem := _problem(name, own[name]))}
    readable = {name: text for name, text in environ.items() if name not in problems}
    told = list(problems.values())
    try:
        settings = resolve({"store": store} if store else None, readable, JOB)
    except ConfigError as error:
        told.append(str(error))
        settings = resolve({"state_dir": tempfile.gettempdir()}, {}, JOB)
    directory, package = _store(str(settings.store) if settings.store else None)
    wanted = WantedFacts(
        nodes=nodes,
        user=host.user(),
        problems=tuple(told),
        internal=tuple(sorted(INTERNAL & environ.keys())),
        user_dir_refusal=_user_dir_refusal(host, settings),
        store=str(settings.store) if settings.store else None,
        store_package=package,
        redundancy=settings.redundancy,
        metrics_port=settings.metrics_port,
        block_mac=settings.block_mac,
        encrypt=settings.encrypt,
        secret_characters=None if settings.secret is None else len(set(settings.secret)),
        left=(),
        environ={name: environ[name] for name in OF_OTHERS if name in environ},
    )
    return Asked(replace(settings, secret=None), wanted, directory)


def _problem(variable: str, text: str) -> str:
    """What is wrong with one variable; empty: nothing. Not its value where that is a secret."""
    if variable in INTERNAL:
        return ""
    if variable not in BY_VARIABLE:
        near = difflib.get_close_matches(variable, sorted(BY_VARIABLE), n=1)
        return f"{variable} is no option of keepstep" + (f": {near[0]} is one" if near else "")
    option = BY_VARIABLE[variable]
    try:
        check(option, getattr(from_environ({variable: text}), option.name))
    except ConfigError as error:
        said = str(error)
        for name in (option.name, variable):
            said = said.removeprefix(f"{name}: ")
        return f"{variable}: {said}"
    return ""


def _user_dir_refusal(host: Host, settings: Settings) -> str:
    """Why this user's directory in the arena is not taken; empty: it is, or can be made."""
    path = user_dir(settings.arena_dir)
    if not os.path.lexists(host.place(path)) or is_own(host.place(path)):
        return ""
    return f"{path} is no directory of user {host.user()} alone (mode 700)"


def _store(url: str | None) -> tuple[Path | None, str | None]:
    """(directory, package that reads it)."""
    if url is None:
        return None, None
    protocol, found, path = url.partition("://")
    if not found:
        return Path(os.path.abspath(url)), None
    if protocol in LOCAL:
        return Path(os.path.abspath(path)), None
    return None, STORE_PACKAGES.get(protocol)
