"""Progress bars on standard error, so that standard output holds nothing but the answer."""

from __future__ import annotations

from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from keepstep.dashboard.screen import Screen


def counting_bar(is_shown: bool = True) -> Progress:
    """A bar that counts things done out of things to do; only for people, who see a terminal."""
    return _bar(is_shown, MofNCompleteColumn(), TimeElapsedColumn())


def timing_bar(is_shown: bool = True) -> Progress:
    """A bar for what ends by the clock."""
    return _bar(is_shown, TimeElapsedColumn())


def bytes_bar() -> Progress:
    """A bar that counts bytes, and how fast they go."""
    return _bar(True, DownloadColumn(binary_units=True), TransferSpeedColumn())


def _bar(is_shown: bool, *columns: ProgressColumn) -> Progress:
    console = Screen(stderr=True)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *columns,
        console=console,
        transient=True,
        disable=not (is_shown and console.is_terminal),
    )
