"""Partial sums of a job: a step's mean gradient without those who come too late.

    the loop's body, where it is this rank's turn -> edge/torch/partial_sums.py -> gradients that
    are the same on all ranks

Comes in: the loop's steps. Goes out: `left-out` in the journal, and the record: who has given what
to which step, by rank 0, beside the journal. It is written before the step's update, so it is there
for each step that anybody can go on from.

Invariant: the computation that a state has come from is that of the record played back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from keepstep.config import Settings
from keepstep.core.balance.partial import (
    PartialRecord,
    PartialTurns,
    begin_line,
    parse_record,
    sum_line,
)
from keepstep.edge.torch.local_steps import without_reduction
from keepstep.edge.torch.micro_batches import Gradients, learning, tell_all
from keepstep.edge.torch.partial_sums import PartialSums, group_of_all
from keepstep.edge.torch.state import Protected
from keepstep.errors import ConfigError
from keepstep.model.events import WARNING
from keepstep.model.partial import LATE, Given, Late, PartialRule
from keepstep.model.units import MS_NS
from keepstep.ports import Journal
from keepstep.runtime.rank.world import RankIdentity

CALLER = "partial_sum()"
RECORD = "partial-sums.jsonl"
MOST_WAIT_S = 600.0


class PartialSumsOfJob:
    """Of one rank."""

    def __init__(
        self,
        protected: Protected,
        who: RankIdentity,
        settings: Settings,
        journal: Journal,
        check_peers: Callable[[], object],
        worked: Callable[[int], None],
        look_no_more: Callable[[str], None],
    ) -> None:
        """check_peers: raises PeerLost when what came from them is worthless. worked: hears whether
        this rank computes in a step. look_no_more: hears in each step that it would be run again
        with other ranks in time, and so why nobody is to look at its numbers."""
        self._protected, self._journal = protected, journal
        self._path = settings.journal_path.parent / RECORD
        self._agrees = settings.wrong_numbers in ("skip", "stop")
        self._look_no_more = look_no_more
        self._rank, self._ranks = who.rank, who.world_size
        self._check_peers, self._worked = check_peers, worked
        self._asked: tuple[Any, ...] = ()
        self._epoch = -1
        self._models: list[Any] = []
        self._sums: PartialSums | None = None
        self._turns = PartialTurns(PartialRule(self._ranks, self._ranks, 0, "drop"))
        self._played: PartialRecord | None = None
        self._last_step = -1
        self._left_out = 0

    def of_step(
        self,
        step: int | None,
        epoch: int,
        need: int,
        wait_s: float,
        late: str,
        model: Any,
        replay: str | os.PathLike[str] | None,
    ) -> Iterator[None]:
        """Once, or never where it is not this rank's turn. Raises ConfigError, PeerLost."""
        if step is None:
            raise ConfigError(f"{CALLER}: expected it within a step, found none begun")
        if self._agrees:
            raise ConfigError(
                f"{CALLER}: expected wrong_numbers off, found skip or stop: a step that is "
                "run again would have other ranks in time"
            )
        asked = (need, wait_s, late, model, replay)
        if asked != self._asked:
            self._prepare(*asked)
            self._asked, self._epoch = asked, -1
        if epoch != self._epoch:
            self._begin(step)
            self._epoch = epoch
        elif step == self._last_step:
            raise ConfigError(f"{CALLER} was called twice in one step: expected once")
        self._last_step = step
        self._look_no_more(CALLER)
        return self._step(step)

    def _prepare(
        self, need: int, wait_s: float, late: str, model: Any, replay: str | os.PathLike[str] | None
    ) -> None:
        rule = _rule(self._ranks, need, wait_s, late)
        self._models, parameters = learning(self._protected, model, self._ranks, CALLER)
        if self._ranks > 1:
            group, members = group_of_all(parameters, self._ranks)
            gradients = Gradients(parameters)
            self._sums = PartialSums(group, members, gradients, self._rank, self._ranks)
        self._turns = PartialTurns(rule)
        self._played = None if replay is None else _played(Path(replay), rule)

    def _begin(self, step: int) -> None:
        """All go on from the same state, and nobody is late."""
        rule = self._turns.rule
        if self._sums is not None:
            mine = (rule.need, rule.wait_ns, LATE.index(rule.late), self._played is not None)
            told = tell_all(mine, self._ranks)
            self._check_peers()
            if len({tuple(one) for one in told}) > 1:
                raise ConfigError(
                    f"{CALLER} expected the same need, wait_s, late and replay on all ranks, found "
                    + ", ".join(
                        f"need={need} wait_s={wait_ns / 1e9} late={LATE[late]!r} replay={bool(r)}"
                        for need, wait_ns, late, r in sorted({tuple(one) for one in told})
                    )
                )
            self._sums.begin()
        self._turns = PartialTurns(rule)
        if self._rank == 0 and self._played is None and self._sums is not None:
            self._write(begin_line(step, rule))

    def _step(self, step: int) -> Iterator[None]:
        turns, played = self._turns, self._played
        if played is not None and step in played.begins:
            turns.late = frozenset()
        computes = turns.turn.computes(self._rank)
        self._worked(int(computes))
        if computes:
            with without_reduction(self._models):
                yield
        if self._sums is None:
            return
        known = None if played is None else _checked(turns, played, step)
        given = self._sums.sum((self._epoch, step), turns.turn, known)
        self._check_peers()
        assert given is not None, "worthless, and nobody is lost"
        late = turns.over(given)
        if self._rank == 0 and played is None:
            if any(part is not Given.FRESH for part in given):
                self._write(sum_line(step, given))
            if late:
                self._tell(step, late)

    def finish(self) -> None:
        """No step follows: who was late in the last one gets what it was sent."""
        sums, self._sums = self._sums, None
        if sums is not None:
            sums.finish()
        self._asked = ()

    def _write(self, line: str) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "a", encoding="utf-8") as record:
                record.write(line)
        except OSError as error:
            why = f"the record of partial sums lacks a line, so it cannot be played back: {error}"
            self._journal.record("caveat", why, WARNING)

    def _tell(self, step: int, late: frozenset[int]) -> None:
        """The first time, and ever more seldom: a rank that is always slow is late every second
        step."""
        before, self._left_out = self._left_out, self._left_out + len(late)
        if before.bit_length() == self._left_out.bit_length():
            return
        rule = self._turns.rule
        named = ", ".join(str(rank) for rank in sorted(late)[:8])
        follows = "dropped" if rule.late == "drop" else "added in the next step"
        self._journal.record(
            "left-out",
            f"the mean gradient of step {step} is that of {rule.ranks - len(late)} of {rule.ranks} "
            f"ranks: rank {named} came later than the {rule.need} that are waited for and "
            f"{rule.wait_ns / MS_NS:.0f} ms. What it has computed is {follows}; "
            f"{self._left_out} gradients were late since this process began",
            WARNING,
            step=step,
            ranks=sorted(late),
            late=rule.late,
            count=self._left_out,
        )


def _rule(ranks: int, need: int, wait_s: float, late: str) -> PartialRule:
    if isinstance(need, bool) or not isinstance(need, int) or not 1 <= need <= ranks:
        raise ConfigError(f"{CALLER} expected need= between 1 and {ranks}, found {need!r}")
    if isinstance(wait_s, bool) or not isinstance(wait_s, (int, float)):
        raise ConfigError(f"{CALLER} expected wait_s= a number of seconds, found {wait_s!r}")
    if not 0 <= wait_s <= MOST_WAIT_S:
        raise ConfigError(f"{CALLER} expected wait_s= between 0 and {MOST_WAIT_S}, found {wait_s}")
    kinds: dict[str, Late] = {"drop": "drop", "add": "add"}
    if late not in kinds:
        raise ConfigError(f"{CALLER} expected late= one of {list(LATE)}, found {late!r}")
    return PartialRule(ranks, need, int(wait_s * 1e9), kinds[late])


def _played(path: Path, rule: PartialRule) -> PartialRecord:
    try:
        with open(path, encoding="utf-8") as file:
            return parse_record(file, rule)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{CALLER}: {path} cannot be played back: {error}") from error


def _checked(turns: PartialTurns, played: PartialRecord, step: int) -> tuple[Given, ...]:
    given = played.of_step(step)
    try:
        turns.check(given)
    except ValueError as error:
        raise ConfigError(
            f"{CALLER}: the record cannot be played back at step {step}: {error}"
        ) from None
    return given
