"""Entrance: what `protect` looks at before anything begins, and what becomes of an error there.

Comes in: what a program gave. Goes out: nothing, a ConfigError, or what is to be told. Touches no
memory and no state.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from keepstep.config import Config, Settings, resolve
from keepstep.config.table import OPTIONS
from keepstep.edge.os.error_file import write_error_file
from keepstep.errors import ConfigError
from keepstep.model.launch import AGENT_SOCKET


def tell_agent_if_it_ends() -> None:
    """The program may mend what was wrong and go on. If not, the error is what it ended of."""
    before = sys.excepthook

    def told(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        write_error_file(error, os.environ)
        before(kind, error, trace)

    sys.excepthook = told


def check_names(config: Any, nameless: tuple[Any, ...], stateful: Mapping[str, Any]) -> None:
    """Raises ConfigError when what should have a name has none, or the other way round."""
    if nameless or not (config is None or isinstance(config, (Config, Mapping))):
        raise ConfigError(
            "protect() takes what it protects by name; write protect(model=model, "
            "optimizer=optimizer), and a Config, if any, in front of them"
        )
    if "config" in stateful:
        raise ConfigError(
            "protect() takes its settings without a name, in front; write protect("
            "keepstep.Config(...), model=model). To protect an object called config, give it "
            "another name"
        )


def check_encrypt_is_heard(settings: Settings, environ: Mapping[str, str]) -> None:
    """For several nodes. Under an agent it is the agent that tells keepers whether to encrypt, and
    it hears nothing of what the program says in code. Raises ConfigError."""
    told = AGENT_SOCKET not in environ or resolve(None, environ, settings.job).encrypt
    if settings.encrypt and not told:
        raise ConfigError(
            "encrypt: expected KEEPSTEP_ENCRYPT=1 or `keepstep run --encrypt`, which the agents "
            "hear before the program runs, found it in code alone: nothing would be encrypted"
        )


def unheard_options(settings: Settings, environ: Mapping[str, str], nodes: int) -> str:
    """What code says to the agents of `keepstep run`, which began before the program did and heard
    something else; empty: there is no agent, or nothing of that kind."""
    if AGENT_SOCKET not in environ:
        return ""
    told = resolve(None, environ, settings.job)
    unheard = [
        option
        for option in OPTIONS
        if 0 < option.agents_from <= nodes
        and getattr(settings, option.name) != getattr(told, option.name)
        and (option.name, settings.slow_ranks) != ("slow_ranks", "off")  # ranks alone can do that
    ]
    if not unheard:
        return ""
    names = ", ".join(option.name for option in unheard)
    ways = ", ".join(
        option.variable if option.is_secret else f"{option.flag} or {option.variable}"
        for option in unheard
    )
    return (
        f"{names}: set in code, where the agents of `keepstep run`, which read it, do not hear it: "
        f"for them holds what they were told before the program ran. Set there: {ways}"
    )
