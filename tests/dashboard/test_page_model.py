"""What the page is told of a job: the words of the terminal, nothing that grows older by itself,
and nothing but plain, bounded values, whatever a journal says."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.config import Settings
from keepstep.dashboard.collective_profiles import NetworkView, RankProfile
from keepstep.dashboard.finding import FoundJob
from keepstep.dashboard.links import DamageRow, LinkRows, SlowLinkRow
from keepstep.dashboard.moment import Moment
from keepstep.dashboard.nodes import NodeRow, NodesView
from keepstep.dashboard.page_model import CopyTraffic, page_model
from keepstep.dashboard.run_page import (
    MAX_CHARACTERS,
    MAX_LINES,
    MAX_POINTS,
    MAX_RECOVERIES,
    run_log,
    run_outline,
    run_page,
)
from keepstep.dashboard.run_screen import run_screen
from keepstep.dashboard.slowness import DoubtRow, SlowRow
from keepstep.dashboard.status_screen import status_screen
from keepstep.dashboard.timeline import runs_of
from keepstep.dashboard.view import JobView, job_view, pending
from keepstep.edge.os.clock import CLOCK
from keepstep.model.events import KINDS, Event
from keepstep.model.rhythm import Interleaved
from keepstep.model.units import MS_NS, S_NS
from tests.dashboard.screens import at, shown
from tests.dashboard.test_view import hold_as_keeper, make_rank, places  # noqa: F401

NOTHING = CopyTraffic()


def view_at(places: Settings, now: Moment) -> JobView:  # noqa: F811
    job = FoundJob("demo", places.job_dir, places.journal_path, places.job_dir.is_dir(), 0)
    return job_view(job, now)


def modelled(view: JobView, now: Moment) -> dict[str, Any]:
    return page_model(view, NOTHING, [], None, now)


def text_of(document: Any) -> str:
    return json.dumps(document, ensure_ascii=False)


def flat(text: str) -> str:
    return " ".join(text.split())


def later(now: Moment, seconds: float) -> Moment:
    ns = int(seconds * S_NS)
    return Moment(now.wall_ns + ns, now.mono_ns + ns, now.boot)


@pytest.fixture
def training(places: Settings) -> Iterator[Settings]:  # noqa: F811
    pages = [
        make_rank(places, 0, [6, 7, 8], step=9, skipped_steps=3, captured_steps=7),
        make_rank(places, 1, [7, 8], step=9, completed_step=10),
    ]
    keeper = hold_as_keeper(places, CLOCK.boot())
    yield places
    for page in pages:
        page.close()
    os.close(keeper)


@pytest.mark.parametrize("seconds", [0.25, 1.0, 5.0])
def test_nothing_in_it_grows_older_by_itself(training: Settings, seconds: float) -> None:
    now = Moment.now()
    soon = later(now, seconds)
    assert modelled(view_at(training, now), now) == modelled(view_at(training, soon), soon)


def test_it_says_what_the_terminal_says(training: Settings) -> None:
    now = Moment.now()
    view = view_at(training, now)
    page, terminal = modelled(view, now), flat(shown(status_screen(view), 300))
    assert (page["job"], page["state"], page["tone"]) == ("demo", "training", "good")
    assert page["why"] in terminal and page["memory"]["text"] in terminal
    assert page["horizon"]["step"] == 8 and page["at_risk_steps"] == 2
    for row in page["protection"].values():
        assert flat(f"{row['against']} {row['upto']}") in terminal and row["why"] in terminal
    rank = page["ranks"]["0"]
    assert rank["doing"] in terminal and rank["holds"] == "step 6, step 7, step 8"
    assert (rank["done"], rank["newest"], rank["at_risk"], rank["tone"]) == (8, 8, 0, "good")
    assert page["ranks"]["1"]["at_risk"] == 2


def test_health_names_what_calls_for_a_look(training: Settings) -> None:
    now = Moment.now()
    view = view_at(training, now)
    [skipped] = modelled(view, now)["health"].values()
    assert skipped["text"] == "3 captures skipped, 30.0% of all; most by rank 0 (3)."
    assert skipped["tone"] == "warn"
    silent = [
        f["text"] for f in modelled(view_at(training, later(now, 60)), now)["health"].values()
    ]
    assert "Silent: ranks 0, 1." in silent
    gone = replace(view.ranks[1], alive=False)
    broken = replace(view, ranks=(view.ranks[0], gone), keeper_alive=False)
    page = modelled(broken, now)
    told = [finding["text"] for finding in page["health"].values()]
    assert told[:2] == ["The keeper of this node is not alive.", "Gone: rank 1."]
    assert (
        page["ranks"]["1"]["doing"].startswith("gone in ") and page["ranks"]["1"]["tone"] == "bad"
    )


def test_who_is_slow_is_shown_with_what_is_done_about_it(training: Settings) -> None:
    now = Moment.now()
    slow = SlowRow(1, "data", "quota", "rank 1 is slow since step 3", 5 * S_NS)
    page = modelled(replace(view_at(training, now), slow=(slow,)), now)
    found = next(iter(page["health"].values()))
    assert found["text"] == "Rank 1 is slow in data (quota)." and found["tone"] == "warn"
    assert found["why"] == "rank 1 is slow since step 3."
    assert page["ranks"]["1"]["doing"].endswith(", slow") and page["ranks"]["1"]["tone"] == "warn"
    assert page["ranks"]["0"]["tone"] == "good"
    said = replace(slow, confirmed="program", confirmed_why="rank 1: it has more to do")
    page = modelled(replace(view_at(training, now), slow=(said,)), now)
    found = next(iter(page["health"].values()))
    assert found["why"] == "rank 1 is slow since step 3. rank 1: it has more to do."
    untold = replace(slow, section="", cause="")
    page = modelled(replace(view_at(training, now), slow=(untold,)), now)
    assert next(iter(page["health"].values()))["text"] == "Rank 1 is slow."


def test_where_no_rank_is_left_status_does_not_say_that_it_recovers(training: Settings) -> None:
    told = {"step": 3, "source": "memory", "lost_steps": 0, "epoch": 1}
    events = [at(1, "keeper", "resumed", "all are back", **told)]
    events.append(at(9, "agent", "rank-exited", "rank 1 was killed", rank=1, code=-9))
    gone = replace(view_at(training, Moment.now()), incident=pending(runs_of(events)[-1]))
    assert gone.incident is not None
    for state, word in (("waiting", "Not training since"), ("broken", "Recovering since")):
        assert word in flat(shown(status_screen(replace(gone, state=state)), 300))


def test_slow_links_and_damage_call_for_a_look(training: Settings) -> None:
    now = Moment.now()
    slow = SlowLinkRow("link", (0, 2), 3.0, "loss", "the link is slow", 5 * S_NS)
    damage = DamageRow(1, 12, "12 messages were not as they were sent", 5 * S_NS)
    links = LinkRows((slow,), (damage,))
    page = modelled(replace(view_at(training, now), links=links), now)
    found = list(page["health"].values())[:2]
    assert [each["text"] for each in found] == [
        "Copies are slow: link, nodes 0, 2 (loss).",
        "What comes from node 1 is damaged: 12 in a minute.",
    ]
    assert {each["tone"] for each in found} == {"warn"}
    assert found[0]["why"] == "the link is slow."
    screen = flat(shown(status_screen(replace(view_at(training, now), links=links)), 300))
    assert "Slow link, told 5.0 s ago: the link is slow." in screen
    assert "Damage, told 5.0 s ago: 12 messages were not as they were sent." in screen


def test_what_nobody_can_tell_is_shown(training: Settings) -> None:
    now = Moment.now()
    doubt = DoubtRow("slow ranks", "alone", "rank 1 is alone on its node", 5 * S_NS)
    view = replace(view_at(training, now), doubts=(doubt,))
    found = next(iter(modelled(view, now)["health"].values()))
    assert found == {
        "text": "Unknown: slow ranks.",
        "tone": "quiet",
        "why": "rank 1 is alone on its node.",
    }
    terminal = flat(shown(status_screen(view), 300))
    assert "Unknown, told 5.0 s ago: slow ranks: rank 1 is alone on its node." in terminal


def test_a_silent_agent_is_shown_and_does_not_grow_older_by_itself(training: Settings) -> None:
    now = Moment.now()
    told = []
    for seconds in (30, 40):
        silence = DoubtRow("slow ranks and hangs", "silence", "it says nothing", seconds * S_NS)
        later_on = Moment(now.wall_ns + seconds * S_NS, now.mono_ns + seconds * S_NS, now.boot)
        view = replace(view_at(training, now), doubts=(silence,))
        told.append(next(iter(modelled(view, later_on)["health"].values())))
        terminal = flat(shown(status_screen(view), 300))
        assert f"Unknown: slow ranks and hangs: it says nothing for {seconds} s." in terminal
    assert told[0] == told[1] and told[0]["tone"] == "warn"
    assert told[0]["why"].startswith("it says nothing since ")
    never = replace(view, doubts=(replace(silence, age_ns=None),))
    assert next(iter(modelled(never, now)["health"].values()))["why"] == "it says nothing."


def test_a_rank_that_is_done_is_not_called_gone(training: Settings) -> None:
    now = Moment.now()
    view = view_at(training, now)
    done = replace(view.ranks[1], alive=False, phase="done")
    page = modelled(replace(view, ranks=(view.ranks[0], done)), now)
    assert page["ranks"]["1"]["tone"] == "quiet"
    assert not any("Gone" in finding["text"] for finding in page["health"].values())


NODES = NodesView(
    policy="copies:2",
    policy_why="it was asked for",
    step=41,
    is_committed=True,
    nodes=tuple(NodeRow(n, f"10.0.0.{n}", None, (2 * n, 2 * n + 1), n != 3) for n in range(4)),
    here=1,
    safe=(1, 3),
    critical={0: (0, 2)},
    out_of_reach=(2,),
    any_nodes=0,
    why="node 0 must stay",
    told_age_ns=2 * S_NS,
    doubt="",
)


def test_nodes_say_what_goes_with_them(training: Settings) -> None:
    now = Moment.now()
    view = replace(view_at(training, now), nodes=NODES)
    nodes = modelled(view, now)["nodes"]
    assert [nodes["rows"][str(n)]["fate"] for n in range(4)] == [
        "with it go the snapshots of nodes 0, 2",
        "may be lost",
        "its snapshots are no longer in memory",
        "may be lost",
    ]
    assert [nodes["rows"][str(n)]["tone"] for n in range(4)] == ["bad", "good", "bad", "warn"]
    assert nodes["rows"]["1"]["is_here"] and nodes["rows"]["1"]["ranks"] == "ranks 2 to 3"
    terminal = flat(shown(status_screen(view), 400))
    assert all(flat(text) in terminal for text, _ in nodes["words"]) and len(nodes["words"]) == 2
    doubted = replace(NODES, doubt="no keeper is alive here to receive changes")
    rows = modelled(replace(view, nodes=doubted), now)["nodes"]["rows"]
    assert {row["fate"] for row in rows.values()} == {"unknown"}


def test_copies_are_told_where_they_are_known(training: Settings) -> None:
    now = Moment.now()
    view = replace(view_at(training, now), nodes=NODES)
    profiles = NetworkView((RankProfile(0, None, "no step yet"),), 0, (), None, None)
    done = Interleaved(1, 5 * MS_NS, 2 * MS_NS, 0, 3 << 20, 0, 1 << 20)
    copies = page_model(view, CopyTraffic(profiles, done), [], None, now)["copies"]
    said = [line["text"] for line in copies.values()]
    assert said[0] == "Policy copies:2: it was asked for."
    assert said[1].startswith("The node's keeper has not planned any copies")
    assert "3.0 MiB went while the network was idle" in said[2]
    assert modelled(replace(view, nodes=None), now)["copies"] == {}


# -- a run

START = [
    at(0, "keeper", "keeper-started", "keeper 7 has it", adopted_slots=0),
    at(5, "keeper", "rank-joined", "rank 0 of 2", rank=0, pid=70),
    at(6, "keeper", "rank-joined", "rank 1 of 2", rank=1, pid=71),
    at(10, "keeper", "resumed", "afresh", source="fresh", step=-1, lost_steps=0, epoch=1),
    at(20, "rank 0", "next-step", "step 0 is done", step=0),
]


def failure(ms: int, step: int, epoch: int) -> list[Event]:
    memory = {"source": "memory", "step": step, "lost_steps": 1, "epoch": epoch}
    return [
        at(ms, "agent", "rank-exited", "rank 1 was killed by SIGKILL (9)", rank=1, code=-9),
        at(ms + 40, "agent", "ranks-restarted", "the ranks run again"),
        at(ms + 90, "keeper", "rank-joined", "rank 1 of 2", rank=1, pid=71 + epoch),
        at(ms + 100, "keeper", "resumed", f"every rank has proven step {step}", **memory),
        at(ms + 130, "rank 1", "next-step", f"step {step + 1} is done", step=step + 1),
    ]


def test_the_users_own_absence_is_a_bar_of_its_own() -> None:
    def plain(ms: int, pid: int, **resumed: Any) -> list[Event]:
        joined = at(ms, "keeper", "rank-joined", "rank 0 of 1", rank=0, pid=pid, goes_on=False)
        return [joined, at(ms + 20, "keeper", "resumed", "every rank", epoch=pid, **resumed)]

    left = at(1000, "keeper", "rank-left", "rank 0 is gone", rank=0, pid=1, expected=False)
    first = plain(10, 1, source="fresh", step=-1, lost_steps=0)
    again = plain(61_000, 2, source="memory", step=7, lost_steps=0)
    [run] = runs_of([*first, left, *again])
    page, terminal = run_page(1, run), flat(shown(run_screen("demo", 1, 1, run), 400))
    [recovery] = page["recoveries"].values()
    assert (recovery["took_ms"], recovery["away_ms"]) == (20, 60_000)
    [away] = [stage for stage in recovery["stages"] if stage["link"] == "away"]
    assert (away["at_ms"], away["took_us"]) == (60_000, 60_000_000)
    assert away["why"] in terminal and recovery["title"] in terminal


def test_a_recovery_is_a_waterfall_of_the_terminals_sentences() -> None:
    stored = at(500, "keeper", "persisted", "step 5 is stored", step=5)
    [run] = runs_of([*START, stored, *failure(1000, 8, 2)])
    page, terminal = run_page(1, run), flat(shown(run_screen("demo", 1, 1, run), 400))
    [recovery] = page["recoveries"].values()
    assert recovery["title"] in terminal and recovery["tone"] == "good"
    assert (recovery["at_ms"], recovery["took_ms"]) == (1000, 130)
    assert [(s["name"], s["at_ms"]) for s in recovery["stages"]] == [
        ("noticed", 0),
        ("restarted", 40),
        ("joined", 90),
        ("resumed", 100),
        ("next step", 130),
    ]
    assert sum(stage["took_us"] for stage in recovery["stages"]) == 130_000
    assert all(stage["why"] in terminal for stage in recovery["stages"])
    assert page["steps"] == [[10, -1], [20, 0], [500, 5], [1100, 8], [1130, 9]]
    assert page["checkpoints"] == [[500, 5]] and page["length_ms"] == 1130
    assert [line["why"] for line in page["log"].values() if line["tone"] == "bad"] == [
        "rank 1 was killed by SIGKILL (9)"
    ]
    assert page["ranks"]["1"] == {
        **{"lives": 2, "pid": 73, "step": 9, "state": "trained"},
        "why": "step 9 is done",
    }


def test_trouble_is_counted_and_the_last_word_kept() -> None:
    troubles = [
        at(100 + i, "keeper", "persist-failed", f"no space, the {i}th time", step=i)
        for i in range(3)
    ]
    [run] = runs_of([*START, *troubles])
    [(kind, trouble)] = run_page(1, run)["troubles"].items()
    assert (kind, trouble["times"], trouble["why"]) == (
        "persist-failed",
        3,
        "no space, the 2th time",
    )
    assert trouble["what"] == KINDS["persist-failed"] and trouble["last_ms"] == 102


def test_a_page_carries_so_much_and_no_more() -> None:
    failures = [
        e for i in range(MAX_RECOVERIES + 5) for e in failure(1000 + 1000 * i, 8 + i, 2 + i)
    ]
    stored = [
        at(900_000 + i, "keeper", "persisted", f"step {i} is stored", step=i)
        for i in range(2 * MAX_POINTS)
    ]
    [run] = runs_of([*START, *failures, *stored])
    page = run_page(1, run)
    assert len(page["recoveries"]) == MAX_RECOVERIES and page["earlier_recoveries"] == 5
    assert len(page["log"]) == MAX_LINES and page["log_lines"] > MAX_LINES
    assert len(page["steps"]) == MAX_POINTS
    assert page["steps"][0] == [10, -1] and page["steps"][-1][1] == 2 * MAX_POINTS - 1
    last = page["log_lines"]
    assert list(page["log"]) == [str(index) for index in range(last - MAX_LINES, last)]


def test_the_log_is_had_piece_by_piece() -> None:
    said = [at(i, "agent", "plan", f"word {i}") for i in range(3 * MAX_LINES)]
    [run] = runs_of([*START, *said])
    page = run_page(1, run)
    found: dict[str, Any] = dict(page["log"])
    while (first := min(map(int, found))) > 0:
        found |= run_log(run, first)
    assert sorted(map(int, found)) == list(range(page["log_lines"]))
    assert run_log(run, 0) == {} and run_log(run, 10**9) == page["log"]


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(max_size=4),
    st.lists(st.integers(), max_size=2),
)
ODD_TEXT = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["</script><script>", "\x1b[2J", "\u202eevil", "\ud800", "x" * 5000]),
)


@st.composite
def odd_events(draw: st.DrawFn) -> list[Event]:
    names = ("step", "rank", "code", "epoch", "source", "lost_steps", "ok", "completed_step")
    return [
        Event(
            wall_ns=draw(st.integers(0, 2**62)),
            mono_ns=draw(st.integers(0, 2**62)),
            who=draw(ODD_TEXT),
            kind=draw(st.sampled_from([*KINDS, "unheard-of"])),
            why=draw(ODD_TEXT),
            data=draw(st.dictionaries(st.sampled_from(names), JUNK, max_size=4)),
            boot=draw(st.sampled_from(["", "a", "b"])),
        )
        for _ in range(draw(st.integers(1, 12)))
    ]


@given(odd_events())
def test_whatever_a_journal_says_the_page_is_plain_and_bounded(events: list[Event]) -> None:
    for number, run in enumerate(runs_of(events), 1):
        page = {**run_page(number, run), "outline": run_outline(number, run)}
        assert json.loads(json.dumps(page)) == page
        # as it is: escaped, what lies beyond U+FFFF looks like two halves of a character
        text = json.dumps(page, ensure_ascii=False)
        for odd in ("\\u001b", "\u202e", "\ud800"):
            assert odd not in text
        for recovery in page["recoveries"].values():
            assert all(stage["took_us"] >= 0 for stage in recovery["stages"])
            assert all(len(stage["why"]) <= MAX_CHARACTERS for stage in recovery["stages"])
        assert all(line["at_ms"] >= 0 for line in page["log"].values())
        assert page["length_ms"] >= max(line["at_ms"] for line in page["log"].values())
