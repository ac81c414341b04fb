"""Halting: one rank's part in a halt of all of them (core/numbers/halt.py).

Comes in: that this rank asks for one, or stands behind a step; orders; that a step counts, and that
the loop is over. Goes out: words to the keeper, and what has become of where it stands. Decides
nothing, and waits for nobody: who waits is `driven_rank.py`.

Invariant: what this rank has agreed to it leaves no more, unless it is told that it is void; and
what it says of another place is not what the next keeper hears of it.
"""

from __future__ import annotations

from typing import Literal

from keepstep.core.numbers.halt import BEHIND, Place
from keepstep.model.messages.keeper_rank import HaltOrder, HaltWord
from keepstep.runtime.rank.keeper_client import KeeperClient

Said = Literal["asks", "stands", "agrees", "leaves"]


class Halting:
    """Of one rank. `at`: behind that step all are to stand, this rank too; None: behind none that
    it knows of. `found`: what all have seen, once all have agreed; `why_void`: that they do not,
    and why."""

    def __init__(self, keeper: KeeperClient, rank: int, world_size: int) -> None:
        self._keeper, self._rank, self._world_size = keeper, rank, world_size
        self._epoch = -1
        self._is_in_loop = False
        self._place: Place | None = None  # where it stands
        self._seen = ""  # by this rank
        self._told: dict[int, str] = {}  # by rank, of where it stands
        self._has_agreed = False
        self.at: int | None = None
        self.found: tuple[str, ...] | None = None
        self.why_void = ""

    def train(self, epoch: int) -> None:
        """All train anew: what was said before is about another computation."""
        self._epoch, self.at, self._place = epoch, None, None
        self._keeper.forget_halt()

    # -- the trainer

    def step_begins(self) -> None:
        self._is_in_loop = True

    def loop_over(self) -> None:
        """This rank stands behind no step any more, unless another loop begins."""
        self._is_in_loop = False
        if self.at is not None:
            self._leave((self.at, BEHIND))

    def ask(self, step: int) -> None:
        """Have all stand behind that step."""
        self._say("asks", (step, BEHIND))

    def stand(self, step: int, turn: int, seen: str) -> None:
        """Here; `seen`: for all to hear."""
        self._place, self._seen = (step, turn), seen
        self._told, self._has_agreed, self.found, self.why_void = {}, False, None, ""
        self._say("stands", self._place, seen)

    @property
    def is_decided(self) -> bool:
        """Whether it is known what becomes of where this rank stands."""
        return self.found is not None or bool(self.why_void)

    @property
    def is_unheard(self) -> bool:
        """Whether no keeper says anything since this rank has said where it stands."""
        return self._keeper.is_halt_unheard

    def leave(self) -> None:
        """It has waited for too long: nobody goes without its word, and it is not to agree any
        more. Whoever has agreed stays."""
        if self._place is not None and not self._has_agreed and not self.is_decided:
            self.why_void = "not all ranks have come there in time"
            self._say("leaves", self._place)

    def go_on(self) -> None:
        """It stands nowhere any more; `found` and `why_void` stay."""
        place, self._place = self._place, None
        if self.found is None:
            self._keeper.forget_halt()
        if place == (self.at, BEHIND):
            self.at = None

    def counts(self, step: int) -> None:
        """That step is over."""
        self._keeper.forget_halt()  # if all have agreed, it was that nothing is wrong
        if self.at is not None and self.at <= step:
            self._leave((self.at, BEHIND))

    # -- the keeper

    def ordered(self, order: HaltOrder, step: int) -> None:
        """`step`: the newest that counts here."""
        if order.epoch != self._epoch:
            return
        place = (order.step, order.turn)
        if order.orders == "halt":
            self._told_to_halt(place, step)
        elif place == self._place and not self.is_decided:
            self._told_of_place(place, order)
        elif order.orders == "void" and place == (self.at, BEHIND):
            self.at = None

    def _told_to_halt(self, place: Place, step: int) -> None:
        if place == self._place:
            return
        if not self._is_in_loop or step >= place[0]:
            self._leave(place)
        elif place[1] == BEHIND:
            self.at = place[0]

    def _told_of_place(self, place: Place, order: HaltOrder) -> None:
        match order.orders:
            case "tell":
                self._told.update(enumerate(order.seen, order.first))
                if len(self._told) == self._world_size and not self._has_agreed:
                    self._has_agreed = True
                    self._say("agrees", place, self._seen)
            case "go":
                self.found = tuple(self._told[rank] for rank in sorted(self._told))
            case _:
                self.why_void = order.why or "the ranks do not stand at one step"
                self._say("leaves", place)  # a leader that takes over is not to count it in

    def _leave(self, place: Place) -> None:
        self.at = None
        self._say("leaves", place)

    def _say(self, says: Said, place: Place, seen: str = "") -> None:
        step, turn = place
        word = HaltWord(self._rank, self._world_size, self._epoch, step, turn, says, seen)
        self._keeper.say_of_halt(word, is_kept=place == self._place)
