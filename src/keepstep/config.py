"""Config: everything a user may set, checked once, in one place.

Sources, strongest first: the Config given in code; `KEEPSTEP_*` variables (what `keepstep run`
sets); the defaults. The environment fills only what the code left unset, and unknown names are
errors in both. Comes in: a Config and an environment. Goes out: a Config with every field set.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from keepstep.errors import ConfigError
from keepstep.model.failure import DEFAULT_BUDGET, parse_budget
from keepstep.model.topology import parse_policy

ENV_PREFIX = "KEEPSTEP_"
MIN_SECRET_BYTES = 16
SOCKET_PATH_BYTES = 107  # sockaddr_un holds 108 with the final zero


@dataclass(frozen=True, slots=True)
class Config:
    """What a user may set. None means: not set here, take the environment's or the default.

    job: name of the job; equal names share a job directory. Default: script name and a hash of
        user, script path, arguments, directory and SLURM_JOB_ID, so the same command finds its own
        state again.
    store: directory or fsspec URL (`s3://bucket/prefix`) for checkpoints. Default: none.
    persist_every_steps: a checkpoint to the store every n steps; 0: only on demand, on SIGTERM and
        at the end.
    keep: retention of checkpoints, a union of rules: `latest:2`, `every:1000`, `best:loss:min:1`.
    slots: slots a rank; 0 chooses (see core/redundancy/memory_budget.py). At least 2.
    arena_dir: where slots live; must be memory (tmpfs).
    grace_s: how long the keeper outlives agent and ranks before it removes everything.
    lazy: copy parameters and optimizer state during the next forward and backward. False copies at
        the boundary (for code that writes to `.data` outside the optimizer's step, which version
        counters do not see).
    scrub_every_s: how often the keeper re-verifies resting slots; 0 never.
    state_dir: where journals live.
    redundancy: what other nodes keep of a snapshot: `none`, `copies:M`, `parity:N`, `rs:K+M`, or
        `auto`.
    host: the address at which other nodes reach this one. Default: that of the interface that leads
        to the job's meeting point.
    rack: what this node fails together with; for all nodes or for none.
    secret: shared by the job's keepers, at least 16 bytes. Default: made anew for each start and
        handed round at the meeting point.
    link_dead_s: how long a link between nodes may stay away before its node counts as lost.
    interleave: `auto` sends copies to other nodes only while the trainers' collectives leave the
        network idle, where that can be seen and helps (docs/interleaving.md); `off` sends them at
        once.
    metrics_port: where the node's agent serves Prometheus metrics. Default: nowhere. Needs the
        extra `metrics`.
    replace_command: run by the shell, by one of the agents, when a node is lost, with
        KEEPSTEP_LOST_NODE, _HOST, _JOB and _WHY set: it has the platform start another one.
        Default: somebody else does, or a spare waits.
    budget: how many restarts each cause of failure may cost in a row, `crash=10,node=unlimited`;
        after `refill=100` new steps since the last one its budget is whole again. What is not named
        stays at its default.
    shrink_after_s: how long nodes that may be missing (`--nnodes MIN:MAX`) are waited for before
        the job goes on without them.
    hang_after_s: no rank's progress for so long is a hang, whatever it looks like. Default: learnt
        from the job's own steps.
    """

    job: str | None = None
    store: str | None = None
    persist_every_steps: int | None = None
    keep: str | None = None
    slots: int | None = None
    arena_dir: str | None = None
    grace_s: float | None = None
    lazy: bool | None = None
    scrub_every_s: float | None = None
    state_dir: str | None = None
    redundancy: str | None = None
    host: str | None = None
    rack: str | None = None
    secret: str | None = None
    link_dead_s: float | None = None
    interleave: str | None = None
    metrics_port: int | None = None
    hang_after_s: float | None = None
    replace_command: str | None = None
    budget: str | None = None
    shrink_after_s: float | None = None

    def to_env(self) -> dict[str, str]:
        """The `KEEPSTEP_*` variables that say the same; unset fields are left out."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {ENV_PREFIX + k.upper(): _to_text(v) for k, v in values.items() if v is not None}


@dataclass(frozen=True, slots=True)
class Settings:
    """A Config with everything set: what the runtime reads."""

    job: str
    store: str | None
    persist_every_steps: int
    keep: str
    slots: int
    arena_dir: Path
    grace_s: float
    lazy: bool
    scrub_every_s: float
    state_dir: Path
    redundancy: str
    host: str | None
    rack: str | None
    secret: str | None
    link_dead_s: float
    interleave: str
    metrics_port: int | None
    hang_after_s: float | None
    replace_command: str | None
    budget: str
    shrink_after_s: float

    @property
    def job_dir(self) -> Path:
        return _job_dir(self.arena_dir, self.job)

    @property
    def journal_path(self) -> Path:
        return self.state_dir / self.job / "journal.jsonl"

    def to_text(self) -> str:
        """As it is handed to a process of ours on its command line, which everybody can read:
        without the secret."""
        return json.dumps({**asdict(self), "secret": None}, default=str)


@lru_cache(maxsize=64)  # asked for all the time
def _job_dir(arena_dir: Path, job: str) -> Path:
    return arena_dir / f"keepstep-{job}"


def settings_from_text(text: str) -> Settings:
    """The inverse of `Settings.to_text`, but for the secret."""
    values = json.loads(text)
    return Settings(
        **{**values, "arena_dir": Path(values["arena_dir"]), "state_dir": Path(values["state_dir"])}
    )


def resolve(
    config: Config | Mapping[str, Any] | None, environ: Mapping[str, str], default_job: str
) -> Settings:
    """Settings from code, environment and defaults. Raises ConfigError naming key, expected and
    found."""
    chosen = from_mapping(config or {}) if not isinstance(config, Config) else config
    ambient = from_environ(environ)
    merged = {f.name: getattr(chosen, f.name) for f in fields(Config)}
    for name, value in merged.items():
        if value is None:
            merged[name] = getattr(ambient, name)
    defaults = _defaults(environ, default_job)
    return _checked({k: defaults[k] if v is None else v for k, v in merged.items()})


def from_mapping(values: Mapping[str, Any]) -> Config:
    """A Config from a dict. Raises ConfigError on an unknown key, with the nearest known one."""
    known = {f.name for f in fields(Config)}
    for key in values:
        if key not in known:
            raise ConfigError(_unknown("configuration key", str(key), sorted(known)))
    return Config(**{str(k): v for k, v in values.items()})


# Variables keepstep's own processes hand down; not configuration.
INTERNAL = {
    "KEEPSTEP_AGENT",
    "KEEPSTEP_SUPERVISOR",
    "KEEPSTEP_RESTARTED_AGENT",
    "KEEPSTEP_LAST_WORD",
    "KEEPSTEP_AGENT_SOCKET",
    "KEEPSTEP_ATTEMPT",
    "KEEPSTEP_REJOIN",
    "KEEPSTEP_FAULTS",
    "KEEPSTEP_DRILL",
    "KEEPSTEP_LAB",
}


def from_environ(environ: Mapping[str, str]) -> Config:
    """A Config from `KEEPSTEP_*`. Raises ConfigError on an unknown name or a value that does not
    parse."""
    types = {ENV_PREFIX + f.name.upper(): (f.name, str(f.type)) for f in fields(Config)}
    values: dict[str, Any] = {}
    for key, text in environ.items():
        if not key.startswith(ENV_PREFIX) or key in INTERNAL:
            continue
        if key not in types:
            raise ConfigError(_unknown("environment variable", key, sorted(types)))
        name, kind = types[key]
        values[name] = _from_text(key, text, kind)
    return Config(**values)


def _unknown(what: str, found: str, known: list[str]) -> str:
    near = difflib.get_close_matches(found, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {found!r}{hint} (known: {', '.join(known)})"


def _to_text(value: Any) -> str:
    return ("1" if value else "0") if isinstance(value, bool) else str(value)


def _from_text(key: str, text: str, kind: str) -> Any:
    try:
        if kind.startswith("bool"):
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[
                text.lower()
            ]
        if kind.startswith("int"):
            return int(text)
        if kind.startswith("float"):
            return float(text)
    except (KeyError, ValueError):
        raise ConfigError(f"{key}: expected {kind.split(' ')[0]}, found {text!r}") from None
    return text


def _defaults(environ: Mapping[str, str], default_job: str) -> dict[str, Any]:
    state_home = environ.get("XDG_STATE_HOME") or os.path.join(
        environ.get("HOME", "/tmp"), ".local", "state"
    )
    # A foreign launcher's restart (Slurm requeue, a person typing the command again) takes minutes;
    # the agent's takes seconds.
    grace_s = 30.0 if "KEEPSTEP_AGENT" in environ else 300.0
    return {
        "job": default_job,
        "store": None,
        "persist_every_steps": 1000,
        "keep": "latest:2",
        "slots": 0,
        "arena_dir": "/dev/shm",
        "grace_s": grace_s,
        "lazy": True,
        "scrub_every_s": 30.0,
        "state_dir": os.path.join(state_home, "keepstep"),
        "redundancy": "auto",
        "host": None,
        "rack": None,
        "secret": None,
        "link_dead_s": 10.0,
        "interleave": "auto",
        "metrics_port": None,
        "hang_after_s": None,
        "replace_command": None,
        "budget": DEFAULT_BUDGET.to_text(),
        "shrink_after_s": 300.0,
    }


def _checked(values: dict[str, Any]) -> Settings:
    expect = {
        "job": (
            str,
            "a name of letters, digits, '.', '_' and '-', at most 64 long and not all dots",
            _is_name,
        ),
        "persist_every_steps": (int, "a whole number of steps, 0 or more", lambda v: v >= 0),
        "keep": (str, "retention rules such as 'latest:2,every:1000'", bool),
        "slots": (int, "0 (choose) or 2 to 8", lambda v: v == 0 or 2 <= v <= 8),
        "arena_dir": ((str, Path), "a directory in memory", bool),
        "grace_s": ((int, float), "seconds, 0 or more", lambda v: 0 <= v < math.inf),
        "lazy": (bool, "True or False", lambda v: True),
        "scrub_every_s": ((int, float), "seconds, 0 or more", lambda v: 0 <= v < math.inf),
        "state_dir": ((str, Path), "a directory", bool),
        "redundancy": (str, "none, copies:M, parity:N, rs:K+M or auto", bool),
        "host": ((str, type(None)), "an address or a name", lambda v: v is None or bool(v)),
        "rack": ((str, type(None)), "a name", lambda v: v is None or bool(v)),
        "secret": (
            (str, type(None)),
            "at least 16 bytes",
            lambda v: v is None or len(v.encode()) >= MIN_SECRET_BYTES,
        ),
        "link_dead_s": ((int, float), "seconds, at least 2", lambda v: 2 <= v < math.inf),
        "interleave": (str, "auto or off", lambda v: v in ("auto", "off")),
        "metrics_port": (
            (int, type(None)),
            "a port, 1 to 65535",
            lambda v: v is None or 0 < v < 1 << 16,
        ),
        "replace_command": ((str, type(None)), "a command", lambda v: v is None or bool(v.strip())),
        "budget": (str, "causes with numbers such as 'crash=3,node=unlimited'", lambda v: True),
        "shrink_after_s": ((int, float), "seconds, 0 or more", lambda v: 0 <= v < math.inf),
        "hang_after_s": (
            (int, float, type(None)),
            "seconds, at least 4",
            lambda v: v is None or 4 <= v < math.inf,
        ),
    }
    for name, (kind, words, good) in expect.items():
        value = values[name]
        wrong_bool = isinstance(value, bool) and kind is not bool
        if not isinstance(value, kind) or wrong_bool or not good(value):  # type: ignore[arg-type]
            found = (
                f"{len(value.encode())} bytes"
                if name == "secret" and isinstance(value, str)
                else repr(value)
            )
            raise ConfigError(f"{name}: expected {words}, found {found}")
    parse_policy(values["redundancy"])
    parse_budget(values["budget"])
    if values["store"] is not None and not isinstance(values["store"], (str, Path)):
        raise ConfigError(
            f"store: expected a directory or an fsspec URL, found {values['store']!r}"
        )
    if str(values["store"]).startswith("memory://"):
        raise ConfigError(
            "store: expected a place other processes can read, found 'memory://', which "
            "lives in one process"
        )
    # Made absolute here: the keeper and the persister work in another directory.
    settings = Settings(
        **{
            **values,
            "store": None if values["store"] is None else _absolute_url(str(values["store"])),
            "arena_dir": Path(values["arena_dir"]).absolute(),
            "state_dir": Path(values["state_dir"]).absolute(),
        }
    )
    socket_path = os.fsencode(settings.job_dir / "keeper.sock")
    if len(socket_path) > SOCKET_PATH_BYTES:
        raise ConfigError(
            f"arena_dir and job: expected a socket path of at most {SOCKET_PATH_BYTES} "
            f"bytes, found {len(socket_path)} ({settings.job_dir})"
        )
    return settings


def _absolute_url(store: str) -> str:
    return store if "://" in store else os.path.abspath(os.path.expanduser(store))


def _is_name(value: str) -> bool:
    return (
        0 < len(value) <= 64
        and all(c.isalnum() or c in "._-" for c in value)
        and value.strip(".") != ""
    )
