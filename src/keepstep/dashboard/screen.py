"""Screen: rich's console for words that somebody else may have chosen.

A store's manifest, a log's path, another node's journal or a file's name may hold what a terminal
acts on, or what rich takes for its own markup: a `[/x]` in it would end the command. Comes in:
anything rich can render. Goes out: the same, with nothing in it that a terminal acts on but rich's
own colours. What is to have a colour is a `Text`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from keepstep.model.decoding import on_a_screen


class Screen(Console):
    """A console on which every text is only shown."""

    def __init__(
        self,
        stderr: bool = False,
        highlight: bool = True,
        soft_wrap: bool = False,
        file: IO[str] | None = None,
        width: int | None = None,
    ) -> None:
        super().__init__(
            stderr=stderr,
            highlight=highlight,
            soft_wrap=soft_wrap,
            file=file,
            width=width,
            markup=False,
            emoji=False,
        )

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """What is to be shown, piece by piece."""
        for piece in super().render(renderable, options):
            yield piece if piece.control else piece._replace(text=on_a_screen(piece.text))
