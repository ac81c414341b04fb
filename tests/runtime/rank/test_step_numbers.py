"""Step numbers: whether a step counts is its doubt's word; where nobody looks every step does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.core.numbers.updates import CALIBRATION
from keepstep.edge.torch.numbers.update_replay import ReplayCost
from keepstep.runtime.rank import step_numbers
from keepstep.runtime.rank.step_numbers import NumbersOfProcess
from tests.runtime.fakes import FakeJournal

WHO: Any = SimpleNamespace(world_size=2, rank=0, local_world_size=2, has_many_nodes=False)


def numbers(
    monkeypatch: pytest.MonkeyPatch,
    wanted: str,
    journal: FakeJournal | None = None,
    **options: int,
) -> NumbersOfProcess:
    settings: Any = SimpleNamespace(
        wrong_numbers=wanted,
        journal_path=None,
        skip_spikes=False,
        check_products=False,
        slots=None,
        store=None,
        **{"look_every_steps": 1, "calibrate_runs": 0, "replay_update_bytes": 0, **options},
    )
    guard = SimpleNamespace(can_agree=True, drop=lambda: None, know_what_is_meant=lambda: None)
    monkeypatch.setattr(step_numbers, "Guard", lambda *_, **__: guard)
    doubt = SimpleNamespace(
        prepare=lambda step: step != 4,
        counts=lambda step, loss, entered, is_last: (
            (step, loss, entered, is_last) == (5, 0.5, True, False)
        ),
        is_trying=False,
        has_bad_state=False,
        begin=lambda step: None,
        erred=[],
    )
    doubt.replay_erred = lambda step, names: doubt.erred.append((step, names))
    doubt.stand_down = lambda why: not doubt.has_bad_state
    monkeypatch.setattr(step_numbers, "Doubt", lambda **_: doubt)
    nothing: Any = SimpleNamespace(pause=None, step_took=lambda _: None, known_bad=object())
    return NumbersOfProcess(settings, WHO, nothing, nothing, journal or FakeJournal())


def test_where_nobody_looks_every_step_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = numbers(monkeypatch, "off")
    assert found.prepare(4) and found.counts(4, None, False, True)


def test_a_step_in_doubt_counts_only_if_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = numbers(monkeypatch, "skip")
    assert found.prepare(5) and not found.prepare(4)
    assert found.counts(5, 0.5, True, False)
    assert not found.counts(6, 0.5, True, False) and not found.counts(5, 0.5, True, True)


def test_who_stands_down_looks_no_more_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = FakeJournal()
    found = numbers(monkeypatch, "undo", journal)
    for _ in range(2):
        found.stand_down("partial_sum()")
    assert found.prepare(4) and found.counts(6, None, True, False)
    [told] = journal.of("caveat")
    assert "partial_sum()" in told.why


def test_what_is_in_doubt_is_decided_before_anybody_stands_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run of it in another rank's place counts for nobody: that is still to be known."""
    found = numbers(monkeypatch, "undo")
    doubt: Any = found._doubt
    doubt.is_trying = True
    found.stand_down("partial_sum()")
    assert not found.counts(6, 0.5, True, False)
    doubt.is_trying = False
    found.stand_down("partial_sum()")
    assert found.counts(6, 0.5, True, False)


@pytest.mark.parametrize("has_bad_state", [True, False])
def test_copies_are_looked_at_no_more_unless_one_was_bad(
    has_bad_state: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = numbers(monkeypatch, "undo")
    doubt: Any = found._doubt
    doubt.has_bad_state = has_bad_state
    found.stand_down("partial_sum()")
    assert (found._protected.known_bad is not None) == has_bad_state


class Replay:
    """Updates that are made again; it begins where somebody says so."""

    def __init__(self) -> None:
        self.began: list[int] = []
        self.is_due = False
        self.turn = -1
        self.erred: tuple[str, ...] = ()
        self.ends = 0
        self.cost = ReplayCost(alone_bytes=4 << 20, updates=1, took_ns=3_000_000)

    def begin(self, is_rerun: bool) -> None:
        assert not is_rerun
        self.began.append(self.turn)

    def end(self) -> None:
        self.ends += 1


def test_updates_are_made_again_in_each_step_until_it_is_known_what_that_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where somebody looks, whoever looks begins it."""
    replay, journal = Replay(), FakeJournal()
    monkeypatch.setattr(step_numbers, "UpdateReplay", lambda *_: replay)
    found = numbers(monkeypatch, "undo", journal, look_every_steps=4, replay_update_bytes=1 << 20)
    for step in range(8, 12):
        found.begin(step)
        found.counts(step, None, True, False)
    assert replay.began == [2, 2, 2] and replay.ends == 4 and not journal.kinds
    updates: Any = found._updates
    for _ in range(CALIBRATION):
        updates.judge.heard(0.0, ())
    found.begin(13)
    replay.erred = ("model.0.weight",)
    for _ in range(2):
        found.counts(13, None, True, False)
    assert replay.began == [2, 2, 2] and replay.turn == 3
    [told] = journal.of("repeats")
    assert "1.0 MiB at a time of 4.0 MiB" in told.why and "3.0 ms each" in told.why
    doubt: Any = found._doubt
    assert doubt.erred[0] == (13, ("model.0.weight",))
    updates.judge.give_up("it comes each time")
    found.counts(14, None, True, False)
    [told] = journal.of("not-repeatable")
    assert "each time" in told.why


def test_what_is_meant_is_known_before_the_first_body_though_nobody_looks_at_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A restart lands on any step: what its first bodies spoil was learnt at the next look as the
    program's own, and sealed."""
    found = numbers(monkeypatch, "undo", look_every_steps=8)
    asked: list[str] = []
    guard: Any = found._guard
    guard.know_what_is_meant = lambda: asked.append("meant")
    doubt: Any = found._doubt
    doubt.begin = lambda step: asked.append("body")
    found.begin(19)
    assert asked == ["meant", "body"]
