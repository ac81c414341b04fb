"""What people read."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from keepstep.core.economics.goodput import account
from keepstep.dashboard import terminal
from keepstep.dashboard.timeline import stories
from keepstep.model.events import Event
from keepstep.model.units import MS_NS, S_NS

WALL_NS = 1_700_000_000 * S_NS


def at(ms: int, who: str, kind: str, why: str, **data: Any) -> Event:
    return Event(WALL_NS + ms * MS_NS, ms * MS_NS, who, kind, why, data)


def written(ms: int, step: int) -> list[Event]:
    return [
        at(ms, "keeper", "persist-started", "writing", step=step),
        at(ms + 5, "keeper", "persisted", f"copy {step}", step=step),
    ]


def shown(what: RenderableType, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("age_ns", "words"),
    [
        (None, "-"),
        (0, "0.0 s"),
        (400 * MS_NS, "0.4 s"),
        (12 * S_NS, "12 s"),
        (180 * S_NS, "3 min"),
        (9000 * S_NS, "2.5 h"),
        (345_600 * S_NS, "4 days"),
    ],
)
def test_an_age_has_the_precision_that_matters(age_ns: int | None, words: str) -> None:
    assert terminal.human_age(age_ns) == words


def test_a_story_folds_what_repeats_and_keeps_every_sentence_that_does_not() -> None:
    events = [
        at(0, "keeper", "keeper-started", "keeper 7 has [/m]; nothing there yet"),
        at(
            1,
            "keeper",
            "resumed",
            "every rank starts afresh",
            source="fresh",
            step=-1,
            lost_steps=0,
        ),
        at(2, "rank 1", "slots-made", "4 slots"),
        at(3, "rank 0", "slots-made", "4 slots"),
        *(
            e
            for i in range(3)
            for e in (
                at(10 * i + 10, "keeper", "persist-started", "writing"),
                at(10 * i + 15, "keeper", "persisted", f"copy {i}", step=i),
            )
        ),
        at(100, "agent", "rank-exited", "rank 1 was killed", rank=1, code=-9),
        at(
            900,
            "keeper",
            "resumed",
            "every rank has proven step 2",
            source="memory",
            step=2,
            lost_steps=1,
        ),
        at(950, "rank 0", "next-step", "step 3 is done", step=3),
    ]
    text = shown(terminal.story("demo", 1, 1, stories(events)[0]))
    assert "1 failure, 1 recovered, 1 completed step lost; it goes on" in " ".join(text.split())
    assert "Recovery 1: resumed with step 2 from memory in 850.0 ms, 1 completed step lost" in text
    assert "rank 1, rank 0  4 slots" in text
    assert "3 checkpoints, steps 0 to 2; the last one: copy 2" in text and "copy 1" not in text
    assert "[/m]" in text  # a sentence is no markup
    assert text.count("rank 1 was killed") == 2  # in the recovery and in the timeline


def test_an_end_without_recovery_is_not_called_one() -> None:
    killed = at(5, "keeper", "rank-left", "rank 0 is gone", expected=False)
    over = at(2005, "keeper", "job-over", "gone for longer than the grace time", ok=False)
    start = at(0, "keeper", "resumed", "afresh", source="fresh", step=-1)
    text = shown(terminal.story("demo", 2, 2, stories([start, killed, over])[0]))
    assert "1 failure, 0 recovered" in text and "Failure 1: the job ended 2.00 s later" in text
    assert "nothing has resumed yet" in shown(
        terminal.story("demo", 2, 2, stories([start, killed])[0])
    )


@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=8).filter(any))
def test_shares_sum_to_the_whole_and_are_rounded_by_less_than_one(amounts: list[int]) -> None:
    found = terminal.shares(amounts, 1000)
    assert sum(found) == 1000
    assert all(
        abs(share * sum(amounts) - 1000 * amount) < sum(amounts)
        for share, amount in zip(found, amounts, strict=True)
    )


def test_where_the_time_went() -> None:
    start = [
        at(0, "agent", "job-started", ""),
        at(1000, "keeper", "resumed", "", step=-1, source="fresh", lost_steps=0, epoch=1),
    ]
    spent = account(
        [
            *start,
            at(7000, "rank 0", "rank-bye", "", ok=True),
            at(7_000 + 8_000, "agent", "job-ended", ""),
        ]
    )
    rows = [" ".join(line.split()) for line in shown(terminal.account(spent)).splitlines()]
    assert "productive 6.00 s 40.0 % steps that count" in rows
    assert "starting 1.00 s 6.7 % before the first step" in rows
    assert "in all 15.00 s 100.0 %" in rows
    assert not any(row.startswith("recovering") for row in rows)
    assert shown(terminal.account(account([]))).strip() == ""


def test_an_incident_fits_on_a_screen() -> None:
    ranks = [at(1000 + r, f"rank {r}", "lost-notice", "word " * 100, rank=1) for r in range(64)]
    damage = [at(2000 + r, f"rank {r}", "damaged", f"slot of rank {r}", rank=r) for r in range(64)]
    start = at(0, "keeper", "resumed", "afresh", source="fresh", step=-1)
    told = stories([start, at(999, "agent", "rank-exited", "gone", code=-9), *ranks, *damage])[0]
    text = shown(terminal.chain(told.recoveries[0], start))
    assert len(text.splitlines()) <= 24
    assert "64 say so, the last: word word" in text and "and 60 more" in text
