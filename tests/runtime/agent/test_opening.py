"""Epochs of a meeting: a stranger who has written down all that was said in an earlier run under
the same secret says it again in this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.model.attempts import Verdict
from keepstep.model.units import S_NS
from keepstep.runtime.agent.meeting_record import OPENING
from tests.runtime.agent.test_multi_node import Agent, Town

SECRET = "of the job, for all its runs"
STOP = Verdict("stop", "the earlier run was stopped", code=3)


def town_of(home: Path, began_s: int = 0, agents: int = 2) -> Town:
    """Agent 0 has the KV."""
    home.mkdir()
    town = Town(home, 2, agents=0)
    town.time.now_ns += began_s * S_NS
    town.agents = [Agent(town, number, secret=SECRET) for number in range(agents)]
    return town


def earlier_run(home: Path, began_s: int = 0) -> dict[str, str]:
    """All that was said there."""
    town = town_of(home, began_s)
    town.form()
    town.agents[0].say(STOP)
    town.pass_s(1)
    assert [agent.verdicts for agent in town.agents] == [[STOP]] * 2
    return dict(town.table.values)


def strangers_told_of(town: Town) -> list[str]:
    return [
        str(event.why)
        for agent in town.agents
        for event in agent.room.journal.events
        if event.kind == "stranger-refused"
    ]


@pytest.mark.parametrize("told_first", [True, False], ids=["before all", "as they train"])
def test_an_earlier_runs_words_end_nothing(tmp_path: Path, told_first: bool) -> None:
    said = earlier_run(tmp_path / "earlier")
    town = town_of(tmp_path / "this", 3600)
    if told_first:
        town.table.values.update({key: said[key] for key in said if key != OPENING})
        town.form()
    else:
        town.form()
        town.table.values["0/verdict"] = said["0/verdict"]
        for look in list(town.table.waits):
            look()
    town.pass_s(30)
    assert [agent.attempt for agent in town.agents] == [0, 0]
    assert [agent.verdicts for agent in town.agents] == [[], []]
    told = strangers_told_of(town)
    assert told and len(told) <= 2, "once on each node"
    assert "before the nodes met this time" in told[0]


def test_an_earlier_runs_opening_gives_way_to_the_hosts(tmp_path: Path) -> None:
    """And with it all that was said under it. The other node has believed it first, and looks for
    an attempt behind those of the earlier run."""
    said = earlier_run(tmp_path / "earlier")
    town = town_of(tmp_path / "this", 3600, agents=0)
    town.table.values.update(said)
    for number in (1, 0):
        town.agents.append(Agent(town, number, secret=SECRET).join())
        town.pass_s(1)
    town.pass_s(30)
    assert len({agent.attempt for agent in town.agents}) == 1
    assert not any(STOP in agent.verdicts for agent in town.agents)
    assert town.table.values[OPENING] != said[OPENING]
    assert [agent.lost for agent in town.agents] == [[], []]


@pytest.mark.parametrize("after_s", [5, 40], ids=["at once", "later"])
def test_who_comes_when_the_opening_was_taken_away_keeps_all_in_one_meeting(
    tmp_path: Path, after_s: int
) -> None:
    """It is said again by those who live in the attempt. Who comes before that begins another
    meeting, in which all meet anew."""
    town = town_of(tmp_path / "this")
    town.form()
    said = dict(town.table.values)
    del town.table.values[OPENING]
    town.pass_s(after_s)
    town.agents.append(Agent(town, 2, secret=SECRET).join())
    town.follow_verdicts(60)
    newest = max(agent.attempt for agent in town.agents if agent.formeds)
    assert sum(bool(agent.formeds) and agent.attempt == newest for agent in town.agents) == 2
    assert newest == (1 if after_s == 5 else 0)
    assert (town.table.values[OPENING] == said[OPENING]) is (after_s == 40)
    assert [agent.lost for agent in town.agents] == [[], [], []]


def test_what_was_seen_once_is_the_oldest_that_counts(tmp_path: Path) -> None:
    """The KV is lost, and the stranger is first at the next one."""
    said = earlier_run(tmp_path / "earlier", began_s=-500)
    town = town_of(tmp_path / "this", 3600)
    town.form()
    town.lose_kv()
    town.table.values.update(said)
    town.follow_verdicts(60)
    assert [agent.verdicts for agent in town.agents if STOP in agent.verdicts] == []
    assert len({agent.attempt for agent in town.agents}) == 1
    assert town.table.values[OPENING] != said[OPENING]
