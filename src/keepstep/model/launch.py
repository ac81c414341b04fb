"""Launch: what `keepstep run` was asked to start, after its arguments have been understood."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Launch:
    """One node's ranks.

    `command` is the whole command of a rank; `argv` the script and its own arguments, which name the job. `master_port` 0 means a
    free one. `redirects`, `tee` are torchrun's (`0`, `3`, `0:1,1:2`); `shown_ranks` None shows the output of all.
    """

    command: tuple[str, ...]
    argv: tuple[str, ...]
    ranks: int
    max_restarts: int = 100
    role: str = "default"
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    log_dir: str | None = None
    redirects: str = "0"
    tee: str = "0"
    shown_ranks: frozenset[int] | None = None
