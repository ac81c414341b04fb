"""Settings: a value for every option, from code, the environment and the defaults, all checked.

Sources, strongest first: the Config given in code; the variables `KEEPSTEP_*` (`keepstep run` sets
them for its ranks); the defaults. An unknown name is an error in both. Which options there are is
in `config/table.py`.

Comes in: a Config and an environment. Goes out: Settings. Invariant: what is in Settings was
checked.
"""

from __future__ import annotations

import difflib
import json
import os
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from keepstep.config.option import ENV_PREFIX, Environ, Option
from keepstep.config.table import OPTIONS, Options
from keepstep.errors import ConfigError
from keepstep.model.decoding import an_object, from_json
from keepstep.model.device import UNTESTED_NCCL
from keepstep.model.lost import LOST_VARIABLES
from keepstep.model.topology import Copies, parse_policy

MAX_SOCKET_PATH_BYTES = 107  # sockaddr_un holds 108 with the final zero
# Variables that keepstep's own processes hand down; they configure nothing.
INTERNAL = {
    "KEEPSTEP_AGENT",
    "KEEPSTEP_SUPERVISOR",
    "KEEPSTEP_RUN",
    "KEEPSTEP_PREDECESSOR",
    "KEEPSTEP_AGENT_REPORT",
    "KEEPSTEP_AGENT_SOCKET",
    "KEEPSTEP_RANK_OF",
    "KEEPSTEP_ATTEMPT",
    "KEEPSTEP_REJOIN",
    "KEEPSTEP_FAULTS",
    "KEEPSTEP_DRILL",
    "KEEPSTEP_LAB",
    "KEEPSTEP_RAY_AGENT",
}
# Those, what `replace_command` is told, and a switch of the user's that is no option yet.
NO_OPTIONS = INTERNAL | {*LOST_VARIABLES, UNTESTED_NCCL}
YES_AND_NO = {
    **dict.fromkeys(("on", "1", "true", "yes"), True),
    **dict.fromkeys(("off", "0", "false", "no"), False),
}
BY_NAME = {option.name: option for option in OPTIONS}
BY_VARIABLE = {option.variable: option for option in OPTIONS}


@dataclass(frozen=True, slots=True)
class Config(Options[None, str | Path]):
    """What a user sets. None leaves an option to the environment, and then to its default."""

    def to_env(self) -> dict[str, str]:
        """The same in the words of a shell, for a process that is started.

        Returns:
            The `KEEPSTEP_*` variables that say the same. An unset option has none.
        """
        values = ((option, getattr(self, option.name)) for option in OPTIONS)
        return {option.variable: _to_text(value) for option, value in values if value is not None}


def options_in_words(options: Iterable[Option]) -> str:
    """A paragraph for each option: name, help, default."""
    return "\n".join(
        textwrap.fill(
            f"{option.name}: {option.help} Default: {option.default_words}.",
            width=100,
            initial_indent="    ",
            subsequent_indent="        ",
        )
        for option in options
    )


Config.__doc__ = f"{Config.__doc__}\n\n{options_in_words(OPTIONS)}\n    "


@dataclass(frozen=True, slots=True)
class Settings(Options[NoReturn, Path]):
    """A value for every option: what the runtime reads."""

    def __post_init__(self) -> None:
        unset = [o.name for o in OPTIONS if not o.may_be_none and getattr(self, o.name) is None]
        assert not unset, unset

    @property
    def job_dir(self) -> Path:
        """Where the job's memory is on this node."""
        return job_dir_of(self.arena_dir, self.job)

    @property
    def journal_path(self) -> Path:
        """Where the job's journal is on this node."""
        return self.state_dir / self.job / "journal.jsonl"

    def to_text(self) -> str:
        """The settings as one of our processes gets them on its command line: without
        secrets, since everybody on the machine can read that."""
        secrets = dict.fromkeys(option.name for option in OPTIONS if option.is_secret)
        return json.dumps({**asdict(self), **secrets}, default=str)

    def secret_env(self) -> dict[str, str]:
        """What `to_text` leaves out, as variables, which only the user's own processes can read."""
        values = ((o.variable, getattr(self, o.name)) for o in OPTIONS if o.is_secret)
        return {variable: value for variable, value in values if value is not None}


def user_dir(arena_dir: Path) -> Path:
    """Where the memory of this user's jobs is on this node: a directory for each job."""
    return arena_dir / f"keepstep-{os.getuid()}"


@lru_cache(maxsize=64)  # asked for all the time
def job_dir_of(arena_dir: Path, job: str) -> Path:
    """Where one job's memory is."""
    return user_dir(arena_dir) / job


ENDING = "~ending-"  # no job's name has a "~" in it


def ending_dir_of(job_dir: Path, pid: int | str) -> Path:
    """Where this process puts a job's memory while it removes it."""
    return job_dir.with_name(f"{job_dir.name.partition(ENDING)[0]}{ENDING}{pid}")


def settings_from_text(text: str, environ: Environ | None = None) -> Settings:
    """The inverse of `Settings.to_text`, with the secrets that `Settings.secret_env` has put into
    the environment."""
    values = an_object(from_json(text))
    for name, value in values.items():
        option = BY_NAME[name]
        if option.is_secret and environ is not None:
            value = environ.get(option.variable)
        values[name] = option.settle(value)
    return Settings(**values)


def resolve(
    config: Config | Mapping[str, Any] | None, environ: Environ, default_job: str
) -> Settings:
    """Settings from code, environment and defaults.

    config: what code gives; a mapping has the names of options as keys.
    environ: the environment.
    default_job: the job's name where nobody sets one.

    Raises ConfigError naming option, expected and found.
    """
    given = config if isinstance(config, Config) else from_mapping(config or {})
    ambient = from_environ(environ)
    values: dict[str, Any] = {}
    for option in OPTIONS:
        value = getattr(given, option.name)
        if value is None:
            value = getattr(ambient, option.name)
        if value is None:
            value = option.default_in(environ, default_job)
        check(option, value)
        values[option.name] = option.settle(value)
    settings = Settings(**values)
    check_socket_path(settings.job_dir)
    check_only_slot(settings)
    return settings


def check_only_slot(settings: Settings) -> None:
    """Raises ConfigError where a rank would overwrite its only snapshot and nobody else has it
    whole: a parity is worth nothing without the bytes of those it was computed from."""
    policy = settings.redundancy
    if settings.slots == 1 and not isinstance(parse_policy(policy), Copies):
        raise ConfigError(
            "slots: expected 2 or more, or redundancy copies:M, by which other nodes have the "
            f"snapshot while the only slot is overwritten, found slots=1 and redundancy={policy!r}"
        )


def from_mapping(values: Mapping[str, Any]) -> Config:
    """A Config from a dict by names of options. Raises ConfigError on an unknown one, naming the
    nearest."""
    for key in values:
        if key not in BY_NAME:
            raise ConfigError(_unknown("unknown configuration key", str(key), sorted(BY_NAME)))
    return Config(**{str(name): value for name, value in values.items()})


def from_environ(environ: Environ) -> Config:
    """A Config from the variables `KEEPSTEP_*`. Raises ConfigError on an unknown one, naming the
    nearest, and on a value that cannot be read."""
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable in NO_OPTIONS:
            continue
        if variable not in BY_VARIABLE:
            raise ConfigError(
                _unknown("unknown environment variable", variable, sorted(BY_VARIABLE))
            )
        option = BY_VARIABLE[variable]
        values[option.name] = _from_text(option, text)
    return Config(**values)


def check(option: Option, value: Any) -> None:
    """Raises ConfigError naming option, expected and found when this cannot be its value."""
    if value is None and option.may_be_none:
        return
    if not _is_of_kind(option, value) or not option.check.holds(value):
        raise ConfigError(
            f"{option.name}: expected {option.check.expected}, found {_shown(option, value)}"
        )


def _shown(option: Option, value: Any) -> str:
    if option.is_secret:
        return f"{len(value.encode())} bytes" if isinstance(value, str) else type(value).__name__
    return repr(value)


def _is_of_kind(option: Option, value: Any) -> bool:
    if isinstance(value, bool):  # an int to Python, and to nobody else
        return option.kind is bool
    accepted = {float: (int, float), Path: (str, Path)}.get(option.kind, (option.kind,))
    return isinstance(value, accepted) or (
        option.check.also is not None and isinstance(value, option.check.also)
    )


def check_socket_path(directory: Path) -> None:
    """A keeper listens in a job's directory. Raises ConfigError when the name is too long."""
    length = len(os.fsencode(directory / "keeper.sock"))
    if length > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"arena_dir and job: expected a socket path of at most {MAX_SOCKET_PATH_BYTES} "
            f"bytes, found {length} ({directory})"
        )


def _unknown(what: str, found: str, known: list[str]) -> str:
    near = difflib.get_close_matches(found, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{what} {found!r}{hint} (known: {', '.join(known)})"


def _to_text(value: Any) -> str:
    return ("1" if value else "0") if isinstance(value, bool) else str(value)


def _from_text(option: Option, text: str) -> Any:
    try:
        if option.kind is bool:
            return YES_AND_NO[text.lower()]
        if option.kind in (int, float):
            return option.kind(text)
    except (KeyError, ValueError):
        raise ConfigError(
            f"{option.variable}: expected {_words_of(option.kind)}, found {text!r}"
        ) from None
    return text


def _words_of(kind: type) -> str:
    """What a variable may say."""
    return "on or off" if kind is bool else kind.__name__
