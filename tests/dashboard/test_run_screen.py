"""What people read of a run."""

from __future__ import annotations

import pytest

from keepstep.dashboard.run_screen import chain, run_screen
from keepstep.dashboard.timeline import runs_of
from tests.dashboard.screens import at, shown


def test_a_story_folds_what_repeats_and_keeps_every_sentence_that_does_not() -> None:
    events = [
        at(0, "keeper", "keeper-started", "keeper 7 has [/m]", adopted_slots=0),
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
    text = shown(run_screen("demo", 1, 1, runs_of(events)[0], is_alive=True))
    assert "1 failure, 1 recovered, 1 completed step lost; still running" in " ".join(text.split())
    assert "Recovery 1: resumed with step 2 from memory in 850.0 ms, 1 completed step lost" in text
    assert "rank 1, rank 0  4 slots" in text
    assert "3 checkpoints, steps 0 to 2; the last one: copy 2" in text and "copy 1" not in text
    assert "[/m]" in text  # a sentence is no markup
    assert text.count("rank 1 was killed") == 2  # in the recovery and in the timeline


@pytest.mark.parametrize(
    ("is_alive", "told"),
    [
        (True, "still running"),
        (False, "its journal tells of no end, and no rank of it lives"),
        (None, "its journal tells of no end"),
    ],
)
def test_a_run_without_an_end_is_running_only_where_somebody_lives(
    is_alive: bool | None, told: str
) -> None:
    start = at(0, "keeper", "resumed", "afresh", source="fresh", step=-1)
    text = " ".join(shown(run_screen("demo", 1, 1, runs_of([start])[0], is_alive)).split())
    assert f"; {told}" in text


def test_an_end_without_recovery_is_not_called_one() -> None:
    killed = at(5, "keeper", "rank-left", "rank 0 is gone", expected=False)
    over = at(2005, "keeper", "job-over", "gone for longer than the grace time", ok=False)
    start = at(0, "keeper", "resumed", "afresh", source="fresh", step=-1)
    text = shown(run_screen("demo", 2, 2, runs_of([start, killed, over])[0]))
    assert "1 failure, 0 recovered" in text and "Failure 1: the job ended 2.00 s later" in text
    assert "not recovered yet" in shown(run_screen("demo", 2, 2, runs_of([start, killed])[0]))


def test_an_incident_fits_on_a_screen() -> None:
    ranks = [at(1000 + r, f"rank {r}", "lost-notice", "word " * 100, rank=1) for r in range(64)]
    damage = [at(2000 + r, f"rank {r}", "damaged", f"slot of rank {r}", rank=r) for r in range(64)]
    start = at(0, "keeper", "resumed", "afresh", source="fresh", step=-1)
    told = runs_of([start, at(999, "agent", "rank-exited", "gone", code=-9), *ranks, *damage])[0]
    text = shown(chain(told.recoveries[0], start))
    assert len(text.splitlines()) <= 24
    assert "64 report it, the last: word word" in text and "and 60 more" in text


def test_a_chain_gives_its_sentences_the_room_and_says_nothing_twice() -> None:
    why = "rank 1 was killed by SIGKILL (9) 22.1 s after start; starting what is missing"
    events = [
        at(0, "keeper", "resumed", "afresh", source="fresh", step=-1),
        at(22156, "keeper", "rank-left", "rank 1 is gone without goodbye", rank=1, expected=False),
        at(22157, "agent", "plan", why),
        at(22204, "agent", "ranks-restarted", f"{why}; all started again after 34.8 ms"),
        at(36900, "keeper", "resumed", "every rank", source="memory", step=3, lost_steps=1),
    ]
    recovery = runs_of(events)[0].recoveries[0]
    for width, has_links in ((80, False), (140, True)):
        drawn = shown(chain(recovery, events[0]), width)
        lines = [" ".join(line.split()) for line in drawn.splitlines()]
        text = " ".join(lines)
        assert text.count("22.1 s after start") == 1
        assert any("restarted at 22.204 s +47.0 ms all started again" in line for line in lines)
        assert ("fact noticed at 22.156 s" in text) == has_links
        assert "noticed at 22.156 s rank 1 is gone" in text, "nothing came before it"
