"""Ways to do a step without waiting: what a program may ask for, when, and what it is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from keepstep.config import Settings, resolve
from keepstep.core.balance.partial import begin_line
from keepstep.edge.torch.state import Protected
from keepstep.errors import ConfigError
from keepstep.model.partial import Given, PartialRule
from keepstep.runtime.rank.job import partial_sums
from keepstep.runtime.rank.job.local_steps import LocalSteps
from keepstep.runtime.rank.job.partial_sums import RECORD, PartialSumsOfJob
from keepstep.runtime.rank.world import RankIdentity
from tests.runtime.fakes import FakeJournal

RANKS = 4
USUAL = {"need": 3, "wait_s": 0.0, "late": "drop", "model": None, "replay": None}
F, N = Given.FRESH, Given.NOTHING
JOB = "t"


def protected() -> Protected:
    model = nn.Linear(2, 1)
    return Protected.of({"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}, True)


def settings(home: Path, **given: Any) -> Settings:
    return resolve({"state_dir": str(home), **given}, {}, JOB)


def part_of(
    home: Path,
    ranks: int,
    journal: FakeJournal | None = None,
    worked: Callable[[int], object] = lambda _: None,
    look_no_more: Callable[[str], None] = lambda _: None,
    **given: Any,
) -> PartialSumsOfJob:
    who = RankIdentity(JOB, 1, 0, ranks, ranks)
    journal = journal or FakeJournal()
    return PartialSumsOfJob(
        *(protected(), who, settings(home, **given), journal, lambda: None, worked),
        look_no_more,
    )


class Summed:
    """In the place of the ranks: what they give to each step, which this rank hears."""

    def __init__(self, given: Mapping[int, tuple[Given, ...]]) -> None:
        self.given, self.begun = given, 0

    def begin(self) -> None:
        self.begun += 1

    def sum(self, at: tuple[int, int], turn: Any, known: Any = None) -> tuple[Given, ...]:
        found = self.given.get(at[1], (F,) * RANKS)
        assert known is None or known == found
        return found

    def finish(self) -> None: ...


class Program:
    """Rank 0's, and what it is told."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        home: Path,
        given: Mapping[int, tuple[Given, ...]] | None = None,
    ) -> None:
        self.journal, self.sums = FakeJournal(), Summed(given or {})
        patch.setattr(partial_sums, "group_of_all", lambda *_: (None, None))
        patch.setattr(partial_sums, "PartialSums", lambda *_: self.sums)
        patch.setattr(partial_sums, "tell_all", lambda mine, ranks: [mine] * ranks)
        self.computed: list[int] = []
        self.part = part_of(home, RANKS, self.journal, self.computed.append)

    def step(self, step: int, epoch: int = 1, **given: Any) -> int:
        """How often the body runs."""
        return sum(1 for _ in self.part.of_step(step, epoch, **{**USUAL, **given}))


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Program]:
    return lambda given=None: Program(monkeypatch, tmp_path, given)


def test_who_is_late_sits_out_and_the_record_says_so(
    program: Callable[..., Program], tmp_path: Path
) -> None:
    late = (N, F, F, F)
    live = program({1: late, 2: late, 4: late})
    assert [live.step(step) for step in range(4)] == [1, 1, 0, 1]
    assert live.step(3, epoch=2) == 1, "done again"
    assert live.step(4, epoch=2) == 1 and live.sums.begun == 2
    assert live.step(5, epoch=3) == 1, "late in a life that is over"
    assert live.computed == [1, 1, 0, 1, 1, 1, 1]
    lines = (tmp_path / JOB / RECORD).read_text()
    assert [line.count("begin") for line in lines.splitlines()] == [1, 0, 0, 1, 0, 1]
    told = [event.data for event in live.journal.events if event.kind == "left-out"]
    assert [(one["step"], one["ranks"], one["count"]) for one in told] == [(1, [0], 1), (4, [0], 2)]
    played = program({1: late, 2: late, 4: late})
    replay = {"replay": tmp_path / JOB / RECORD}
    assert [played.step(step, **replay) for step in range(6)] == [1, 1, 0, 1, 1, 1]
    assert (tmp_path / JOB / RECORD).read_text() == lines, "what is played back is not recorded"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"need": 0}, "need= between 1 and 4, found 0"),
        ({"need": 5}, "need= between 1 and 4, found 5"),
        ({"need": True}, "need= between 1 and 4, found True"),
        ({"wait_s": -1.0}, "wait_s= between 0 and"),
        ({"wait_s": "1"}, "a number of seconds"),
        ({"wait_s": float("nan")}, "wait_s= between 0 and"),
        ({"late": "ignore"}, r"late= one of \['drop', 'add'\], found 'ignore'"),
        ({"replay": "/nowhere/record"}, "cannot be played back"),
        ({"model": nn.Linear(1, 1)}, "expected a DistributedDataParallel"),
    ],
)
def test_what_cannot_be_asked_for(
    program: Callable[..., Program], given: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        program().step(0, **given)


def test_it_is_asked_for_once_within_a_step(program: Callable[..., Program]) -> None:
    live = program()
    with pytest.raises(ConfigError, match="within a step"):
        live.part.of_step(None, 1, **USUAL)
    live.step(0)
    with pytest.raises(ConfigError, match="twice in one step"):
        live.step(0)


def test_all_ranks_ask_for_the_same(
    program: Callable[..., Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    live = program()
    monkeypatch.setattr(
        partial_sums, "tell_all", lambda mine, ranks: [list(mine), [2, *mine[1:]], list(mine)]
    )
    with pytest.raises(ConfigError, match=r"need=2 wait_s=0.0 late='drop'.*need=3"):
        live.step(0)


def test_a_record_that_cannot_be_is_refused_where_it_says_so(
    program: Callable[..., Program], tmp_path: Path
) -> None:
    path = tmp_path / "odd"
    begin = begin_line(0, PartialRule(RANKS, 3, 0, "drop"))
    path.write_text(begin + '{"step": 1, "given": "1002"}\n')
    live = program()
    live.step(0, replay=path)
    with pytest.raises(ConfigError, match="cannot be played back at step 1"):
        live.step(1, replay=path)


def test_without_groups_of_ours_it_is_refused(tmp_path: Path) -> None:
    part = part_of(tmp_path, 2)
    with pytest.raises(ConfigError, match="keepstep.init_process_group"):
        part.of_step(0, 1, **{**USUAL, "need": 1})


def test_one_rank_alone_waits_for_nobody(tmp_path: Path) -> None:
    part = part_of(tmp_path, 1)
    assert [len(list(part.of_step(s, 1, **{**USUAL, "need": 1}))) for s in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("asked", ["skip", "stop"])
def test_a_step_that_would_be_run_again_with_others_in_time_is_refused(
    asked: str, tmp_path: Path
) -> None:
    part = part_of(tmp_path, 1, wrong_numbers=asked)
    with pytest.raises(ConfigError, match="expected wrong_numbers off"):
        part.of_step(0, 1, **{**USUAL, "need": 1})


def test_by_default_nobody_looks_at_numbers_from_the_first_sum_on(tmp_path: Path) -> None:
    told: list[str] = []
    part = part_of(tmp_path, 1, look_no_more=told.append)
    for step in range(2):
        assert len(list(part.of_step(step, 1, **{**USUAL, "need": 1}))) == 1
    assert told == [partial_sums.CALLER] * 2
    with pytest.raises(ConfigError):
        part.of_step(2, 1, **{**USUAL, "need": 9})
    assert len(told) == 2, "nothing was summed"


def test_local_steps_average_behind_the_last_of_each_period(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    averaged: list[int] = []
    monkeypatch.setattr(
        "keepstep.runtime.rank.job.local_steps.average", lambda *_: averaged.append(now)
    )
    ways = LocalSteps(protected(), 2, settings(tmp_path), lambda: None)
    for now in range(10):
        with ways.of_step(now, 4, None):
            pass
    assert averaged == [3, 7]
    for step, every, expected in ((None, 4, "within a step"), (1, 0, "found 0"), (1, 2.5, "2.5")):
        with pytest.raises(ConfigError, match=expected), ways.of_step(step, every, None):  # type: ignore[arg-type]
            pass
    sharing = settings(tmp_path, share_replicas="node")
    shares = LocalSteps(protected(), 2, sharing, lambda: None)
    with pytest.raises(ConfigError, match="share_replicas off"), shares.of_step(1, 2, None):
        pass
