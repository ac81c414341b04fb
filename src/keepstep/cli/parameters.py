"""Parameters: a command's options, made from a table instead of a long signature.

Comes in: options of `config/table.py`, or a dataclass whose fields are made with `argument`. Goes
out: parameters as typer reads them off a function. Parses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from rich.markup import escape

from keepstep.config.option import Option, Topic
from keepstep.config.settings import BY_NAME

Command = TypeVar("Command", bound=Callable[..., None])


@dataclass(frozen=True, slots=True)
class _Shown:
    """What a field says of its option besides name, type and default; see `argument`."""

    help: str
    panel: str
    metavar: str
    short: str
    variable_prefix: str
    least: int | None
    is_hidden: bool


def argument(
    default: object,
    help: str,
    *,
    panel: str,
    metavar: str = "",
    short: str = "",
    variable_prefix: str = "",
    least: int | None = None,
    is_hidden: bool = False,
) -> Any:
    """A field of a dataclass of arguments, and so an option of a command: `--some-name` for
    `some_name`.

    help: what it does, in a sentence or two.
    panel: the heading under which the help lists it.
    metavar: what stands for a value in the help.
    short: a short spelling, such as `-m`.
    variable_prefix: it is read from the variable of its name with this prefix, too.
    least: the smallest number that is accepted.
    is_hidden: accepted, not shown.
    """
    shown = _Shown(help, panel, metavar, short, variable_prefix, least, is_hidden)
    return field(default=default, metadata={"shown": shown})


def from_arguments(table: type[Any]) -> list[Parameter]:
    """One parameter for each field of the dataclass that was made with `argument`."""
    types = get_type_hints(table)
    return [
        _from_field(f.name, types[f.name], f.default, f.metadata["shown"])
        for f in fields(table)
        if "shown" in f.metadata
    ]


def _from_field(name: str, annotation: Any, default: object, shown: _Shown) -> Parameter:
    spellings = ["--" + name.replace("_", "-"), *([shown.short] if shown.short else [])]
    info = typer.Option(
        *spellings,
        help=escape(shown.help),
        envvar=shown.variable_prefix + name.upper() if shown.variable_prefix else None,
        show_envvar=False,
        metavar=shown.metavar or None,
        min=shown.least,
        show_default=default not in ("", 0, False, None),
        hidden=shown.is_hidden,
        rich_help_panel=shown.panel,
    )
    return _keyword(name, annotation, default, info)


def panel_of(topic: Topic) -> str:
    """The heading of a Config's options about this topic."""
    return f"keepstep: {topic.value}"


def from_options(options: Iterable[Option]) -> list[Parameter]:
    """One parameter for each option of a Config that a command line may carry. None is the value of
    one that was not given."""
    return [_from_option(option) for option in options if not option.is_secret]


def _from_option(option: Option) -> Parameter:
    kind = str if option.kind is Path else option.kind
    return _keyword(option.name, kind | None, None, config_option(option, panel_of(option.topic)))


def config_option(option: Option, panel: str | None = None) -> Any:
    """How typer shows an option of a Config."""
    default = f"[default: {option.default_words}]"
    return typer.Option(
        f"{option.flag}/--no-{option.flag[2:]}" if option.kind is bool else option.flag,
        help=f"{escape(option.help)} [dim]{escape(default)}[/dim]",
        metavar=option.metavar or None,
        show_default=False,
        rich_help_panel=panel,
    )


def named_option(name: str) -> Any:
    """The same by its name, for a command that takes only a few of the options."""
    return config_option(BY_NAME[name])


def by_panel(parameters: Iterable[Parameter], panels: Sequence[str]) -> list[Parameter]:
    """The options in the order of the panels under which they are listed."""
    return sorted(
        parameters, key=lambda p: panels.index(p.annotation.__metadata__[0].rich_help_panel)
    )


def _keyword(name: str, annotation: Any, default: object, info: Any) -> Parameter:
    annotation = Annotated[annotation, info]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def takes(parameters: Sequence[Parameter]) -> Callable[[Command], Command]:
    """Have typer call a command, a function of keywords, with these parameters."""

    def mark(command: Command) -> Command:
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return mark
