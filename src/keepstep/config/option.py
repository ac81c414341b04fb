"""What an option is, and how a field of a table declares one.

Comes in: a dataclass whose fields are made with `option`. Goes out: its options, as values. Knows
no option by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from keepstep.errors import ConfigError

ENV_PREFIX = "KEEPSTEP_"
MAX_SECONDS = 365 * 24 * 3600

# What a field holds besides a value: None in a `Config`, where an option may be left unset, and
# nothing in `Settings`, where every option has its value.
Unset = TypeVar("Unset")
# How a field holds a directory: as a user writes it in a `Config`, as a Path in `Settings`.
Directory = TypeVar("Directory")

Environ = Mapping[str, str]


class Topic(str, Enum):
    """What an option is about, and so for whom it is: the headings options are listed under."""

    JOB = "Job"
    SNAPSHOTS = "Snapshots in memory"
    CHECKPOINTS = "Checkpoints in a store"
    NODES = "Several nodes"
    FAILURES = "Failures"
    MONITORING = "Monitoring"


@dataclass(frozen=True, slots=True)
class Check:
    """What a value must be.

    expected: completes "expected ...", in errors and in the docs.
    holds: asked about a value of the option's type, never about None. It refuses one by a false
        answer, or by a ConfigError in words of its own.
    also: a type of value that is accepted besides the option's own.
    """

    expected: str
    holds: Callable[[Any], object] = lambda value: True
    also: type | None = None


def seconds(least: float = 0) -> Check:
    """A number of seconds, from `least` to a year, which nobody waits for, and which is a number of
    nanoseconds that messages and timers can hold several times over."""
    return Check(
        f"seconds, {least:g} to {MAX_SECONDS}", lambda value: least <= value <= MAX_SECONDS
    )


def check_seconds(name: str, value: float) -> None:
    """The same for an option that stands in no table. Raises ConfigError."""
    check = seconds()
    if not check.holds(value):
        raise ConfigError(f"{name}: expected {check.expected}, found {value:g}")


@dataclass(frozen=True, slots=True)
class Declared:
    """What a field says of its option besides name and type; for the fields see `Option`."""

    default: object
    check: Check
    topic: Topic
    help: str
    example: object
    metavar: str
    default_words: str
    is_secret: bool
    settle: Callable[[Any], Any]
    agents_from: int


@dataclass(frozen=True, slots=True)
class Option:
    """One option, as everything that is made from a table sees it.

    kind: bool, int, float, str, or Path for a directory.
    may_be_none: None is one of its values: off, or to be found out later.
    default: the value where nobody sets one, or a function that finds it, given the environment and
        the job name derived from the command.
    check: what other values than None must be.
    help: what it does, in one to three sentences.
    example: a valid value other than the default.
    metavar: what stands for a value in a help text, with its unit; empty for a bool.
    default_words: the default for a reader, where the value itself does not tell.
    is_secret: its value is never shown, and never taken from a command line, which everybody on the
        machine can read.
    settle: makes of a checked value the one that `Settings` hold.
    agents_from: of jobs of so many nodes or more the agents of `keepstep run` read it. They hear
        nothing of what code says. 0: of none.
    """

    name: str
    kind: type
    may_be_none: bool
    default: object
    check: Check
    topic: Topic
    help: str
    example: object
    metavar: str
    default_words: str
    is_secret: bool
    settle: Callable[[Any], Any]
    agents_from: int

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return ENV_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """The option of `keepstep run` that sets it."""
        return "--" + self.name.replace("_", "-")

    def default_in(self, environ: Environ, derived_job: str) -> object:
        """The value where nobody sets one. `derived_job`: the name derived from the command."""
        return self.default(environ, derived_job) if callable(self.default) else self.default


def option(
    *,
    default: object,
    check: Check,
    topic: Topic,
    help: str,
    example: object,
    metavar: str = "",
    default_words: str = "",
    is_secret: bool = False,
    settle: Callable[[Any], Any] = lambda value: value,
    agents_from: int = 0,
) -> Any:
    """A field of a table. Its name and type are the option's; for the arguments see `Option`."""
    declared = Declared(
        default=default,
        check=check,
        topic=topic,
        help=help,
        example=example,
        metavar=metavar,
        default_words=default_words or in_words(default),
        is_secret=is_secret,
        settle=settle,
        agents_from=agents_from,
    )
    return field(default=None, repr=not is_secret, metadata={"declared": declared})


def in_words(value: object) -> str:
    """A value as a reader expects it: `on`, `none`, `30`."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)


def options_of(table: type[Any]) -> tuple[Option, ...]:
    """The options of a table, a dataclass, in the order of its fields."""
    types = get_type_hints(table)
    return tuple(_option(f.name, types[f.name], f.metadata["declared"]) for f in fields(table))


def _option(name: str, annotation: object, declared: Declared) -> Option:
    alternatives = set(get_args(annotation)) - {Unset}
    may_be_none = type(None) in alternatives
    [kind] = alternatives - {type(None)}
    return Option(
        name=name,
        kind=Path if kind is Directory else kind,
        may_be_none=may_be_none,
        default=declared.default,
        check=declared.check,
        topic=declared.topic,
        help=declared.help,
        example=declared.example,
        metavar=declared.metavar,
        default_words=declared.default_words,
        is_secret=declared.is_secret,
        settle=declared.settle,
        agents_from=declared.agents_from,
    )
