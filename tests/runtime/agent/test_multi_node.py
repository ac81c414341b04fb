"""MultiNode: agents of several nodes form one attempt after the other, all see the same, a newcomer
gets the place of the missing one, and every attempt ends with one verdict for all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.core.recovery.leader_lease import Lease
from keepstep.model.attempts import Arrival, Verdict
from keepstep.model.failure import Cause, Failure
from keepstep.model.messages.keeper_rank import Listening
from keepstep.model.units import S_NS
from keepstep.runtime.agent.meeting import ALONE_NS, BEGINS_NS, STANDS_NS
from keepstep.runtime.agent.meeting_record import CODEC, LEADER, MeetingRecord
from keepstep.runtime.agent.multi_node import AWAY_NS, WELL_NS, MultiNode
from keepstep.runtime.agent.rendezvous import Formed, JoinRequest
from keepstep.runtime.agent.signed_kv import SignedKV
from keepstep.runtime.agent.tasks import Task
from tests.runtime.fakes import AgentRoom, FakeKV, FakeTime, Table

AGAIN = Verdict("again", "a rank failed")
FAILURE = Failure(Cause.CRASH, 1, "host1", step=8, error="ValueError", completed_step=7)


class Agent:
    def __init__(
        self,
        town: Town,
        number: int,
        min_nodes: int | None = None,
        encrypt: bool = False,
        secret: str | None = None,
    ) -> None:
        home = town.home / str(number)
        home.mkdir()
        nodes, time, table = town.nodes, town.time, town.table
        self.room = AgentRoom(home, ranks=2, nodes=nodes, time=time, table=table, number=number)
        self.room.change(encrypt=encrypt, secret=secret)
        if min_nodes is not None:
            self.room.launch = replace(self.room.launch, min_nodes=min_nodes)
        self.town = town
        self.number = number
        self.formeds: list[Formed] = []
        self.verdicts: list[Verdict] = []
        self.lost: list[str] = []
        self.joined = 0  # after so many verdicts
        self.rendezvous = MultiNode(self.room.world, self.room.options, self.room.launch, self)

    def formed(self, formed: Formed) -> None:
        self.formeds.append(formed)

    def ended(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)

    def meeting_lost(self, why: str, is_refused: bool = False) -> None:
        self.lost.append(why)

    def join(
        self, leave: bool = False, failure: Failure | None = None, stays: bool = True
    ) -> Agent:
        keeper = Listening(f"host{self.number}", 7, 100 + self.number, -1)
        self.rendezvous.join(JoinRequest(keeper, leave, failure, stays))
        return self

    def say(self, verdict: Verdict) -> None:
        self.rendezvous.say(self.formeds[-1].place.attempt, verdict)

    def die(self) -> None:
        """Without a word."""
        meeting = self.rendezvous._meeting
        assert meeting is not None
        meeting.abandon()
        meeting.kv.close()

    @property
    def attempt(self) -> int:
        return self.formeds[-1].place.attempt

    @property
    def node(self) -> int:
        return self.formeds[-1].place.node


class Town:
    def __init__(self, home: Path, nodes: int, agents: int | None = None) -> None:
        self.home = home
        self.nodes = nodes
        self.time = FakeTime()
        self.table = Table()
        count = nodes if agents is None else agents
        self.agents = [Agent(self, number) for number in range(count)]

    def form(self, *agents: Agent) -> None:
        for agent in agents or self.agents:
            agent.join()
        self.pass_s(3)

    def lose_kv(self, why: str = "") -> None:
        """For all. Another one is there at once, or nobody finds one because of `why`."""
        self.table = Table()
        for agent in self.agents:
            agent.room.table, agent.room.kv_error = self.table, why or None
            kv = agent.rendezvous.kv
            if isinstance(kv, SignedKV):
                kv = kv._kv
            if isinstance(kv, FakeKV):
                kv.is_closed = True
                agent.room.lost("the KV is lost")

    def find_kv(self) -> None:
        for agent in self.agents:
            agent.room.table, agent.room.kv_error = self.table, None

    def follow_verdicts(self, seconds: float) -> None:
        """Everybody takes part in the next attempt as soon as it hears that there will be one."""
        until_ns = self.time.now_ns + int(seconds * S_NS)
        while self.time.now_ns < until_ns:
            self.time.pass_ns(min(S_NS // 1000, until_ns - self.time.now_ns))
            for agent in self.agents:
                if len(agent.verdicts) > agent.joined:
                    agent.joined = len(agent.verdicts)
                    agent.join()

    def lead_elsewhere(self, beat: int = 0) -> None:
        """Another coordinates, and looks at no attempt of these."""
        lease = Lease(1, "another", "node 1", beat)
        self.table.values[LEADER] = CODEC.encode(lease).decode()
        self.time.after(S_NS, lambda: self.lead_elsewhere(beat + 1))

    def sit_down_and_die(self, second: Arrival) -> None:
        """An agent that is the last to come to attempt 0, and never answers."""
        others = MeetingRecord(FakeKV(self.time, self.table))
        for word in (others.take_seat(0, 1, second), others.mark(0, "full")):
            Task(word, lambda _: None, lambda error: pytest.fail(str(error)))

    def pass_s(self, seconds: float = 0.0) -> None:
        self.time.pass_ns(int(seconds * S_NS))


@settings(deadline=None, max_examples=20)
@given(nodes=st.integers(2, 4), speakers=st.lists(st.integers(0, 3), max_size=3))
def test_all_nodes_see_the_same_attempts_and_keep_their_numbers(
    tmp_path_factory: pytest.TempPathFactory, nodes: int, speakers: list[int]
) -> None:
    town = Town(tmp_path_factory.mktemp("m"), nodes)
    town.form()
    for speaker in speakers:
        town.agents[speaker % nodes].say(AGAIN)
        town.pass_s()
        town.form()
    for lived in range(len(speakers) + 1):
        formeds = [agent.formeds[lived] for agent in town.agents]
        places = [formed.place for formed in formeds]
        assert {place.attempt for place in places} == {lived}
        assert sorted(place.node for place in places) == list(range(nodes))
        assert [place.first_rank for place in places] == [2 * place.node for place in places]
        assert len({(place.master_addr, place.master_port) for place in places}) == 1
        meshes = [formed.mesh for formed in formeds]
        assert all(mesh is not None for mesh in meshes)
        assert len({(m.version, m.secret, m.members) for m in meshes if m is not None}) == 1
        assert [place.node for place in places] == [a.formeds[0].place.node for a in town.agents]
    versions = [f.mesh.version for f in town.agents[0].formeds if f.mesh is not None]
    assert versions == sorted(set(versions)), "each mesh is newer"
    assert all(agent.verdicts == [AGAIN] * len(speakers) for agent in town.agents)


def test_a_spare_waits_and_gets_the_place_that_is_said_to_be_vacant(tmp_path: Path) -> None:
    town = Town(tmp_path, nodes=2, agents=3)
    town.form(*town.agents[:2])
    first, second, spare = town.agents
    spare.join()
    town.pass_s()
    assert spare.formeds == [] and spare.room.journal.of("nodes-awaited")
    lost = second.node
    second.die()
    first.say(replace(AGAIN, vacant=(lost,)))
    town.pass_s()
    town.form(first)
    assert (spare.attempt, spare.node, first.attempt) == (1, lost, 1)


def test_who_was_there_comes_first_and_a_spare_in_time_for_who_does_not(tmp_path: Path) -> None:
    town = Town(tmp_path, nodes=2, agents=3)
    town.form(*town.agents[:2])
    first, second, spare = town.agents
    spare.join()
    town.pass_s()
    first.say(AGAIN)
    town.pass_s()
    town.form(first, second)
    assert spare.formeds == [] and second.attempt == 1
    second.die()
    first.say(AGAIN)
    town.pass_s()
    town.form(first)
    assert spare.attempt == 2 == first.attempt


def test_what_is_told_of_an_attempt_is_heard_by_all_in_the_next(tmp_path: Path) -> None:
    town = Town(tmp_path, nodes=2)
    town.form()
    first, second = town.agents
    second.say(replace(AGAIN, keep=True, failure=FAILURE))
    town.pass_s()
    second.join(failure=FAILURE)
    first.join()
    town.pass_s(3)
    assert all(a.formeds[-1].failures == (FAILURE,) and a.formeds[-1].keep for a in town.agents)


def test_all_nodes_wait_out_what_the_verdict_says_before_they_meet(tmp_path: Path) -> None:
    town = Town(tmp_path, nodes=2)
    town.form()
    town.agents[0].say(replace(AGAIN, wait_ns=20 * S_NS))
    town.pass_s()
    for agent in town.agents:
        agent.join()
    town.pass_s(19.9)
    assert [agent.attempt for agent in town.agents] == [0, 0]
    assert not [key for key in town.table.values if key.startswith("1/")], "nobody has come yet"
    town.pass_s(3)
    assert [agent.attempt for agent in town.agents] == [1, 1]
    town.agents[1].say(AGAIN)
    town.pass_s()
    town.form()
    assert [agent.attempt for agent in town.agents] == [2, 2], "it was for that attempt alone"


def test_who_asks_when_the_wait_is_over_does_not_wait_again(tmp_path: Path) -> None:
    """Nodes take different times to end what still runs."""
    town = Town(tmp_path, nodes=2)
    town.form()
    town.agents[0].say(replace(AGAIN, wait_ns=20 * S_NS))
    town.pass_s(20)
    town.form()
    assert [agent.attempt for agent in town.agents] == [1, 1]


@pytest.mark.parametrize("stays", [True, False])
def test_where_nobody_stays_all_begin_anew(tmp_path: Path, stays: bool) -> None:
    town = Town(tmp_path, nodes=2)
    town.form()
    first, second = town.agents
    second.say(replace(AGAIN, keep=True))
    town.pass_s()
    first.join(stays=stays)
    second.join(stays=False)
    town.pass_s(3)
    assert [agent.formeds[-1].keep for agent in town.agents] == [stays, stays]


def test_fewer_nodes_are_enough_when_no_more_come_in_time(tmp_path: Path) -> None:
    town = Town(tmp_path, nodes=3, agents=0)
    agents = [Agent(town, number, min_nodes=2).join() for number in range(2)]
    town.pass_s(BEGINS_NS / S_NS - 1)
    assert all(agent.formeds == [] for agent in agents)
    town.pass_s(3)
    assert [agent.formeds[0].place.world_size for agent in agents] == [4, 4]
    assert sum(len(agent.room.journal.of("attempt-closed")) for agent in agents) >= 1


def test_when_the_ranks_of_all_nodes_ended_well_the_job_is_done(tmp_path: Path) -> None:
    town = Town(tmp_path, nodes=2)
    town.form()
    first, second = town.agents
    first.rendezvous.ended_well(0, "well")
    town.pass_s()
    assert first.verdicts == []
    second.rendezvous.ended_well(0, "well")
    town.pass_s()
    assert [v.outcome for agent in town.agents for v in agent.verdicts] == ["done", "done"]
    assert sum(len(agent.room.journal.of("job-done")) for agent in town.agents) == 1


def test_an_agent_that_follows_a_killed_one_ends_its_attempt_and_has_its_number(
    tmp_path: Path,
) -> None:
    town = Town(tmp_path, nodes=2)
    town.form()
    first, second = town.agents
    node = second.node
    second.die()
    successor = Agent(town, 7)
    successor.number = second.number  # its keeper is the same
    successor.rendezvous.follow(0)
    successor.join()
    town.pass_s()
    assert [v.outcome for v in first.verdicts] == ["again"] and first.verdicts[0].keep
    town.form(first)
    assert (successor.attempt, first.attempt) == (1, 1) and successor.node == node


def test_nobody_waits_for_a_killed_agents_answer_once_another_has_followed_it(
    tmp_path: Path,
) -> None:
    """Who did would come late to the next attempt, which may begin with fewer by then."""
    town = Town(tmp_path, nodes=2)
    first, second = town.agents
    town.lead_elsewhere()
    first.join()
    town.pass_s(1)
    town.sit_down_and_die(replace(first.rendezvous._standing.mine, token="b"))
    town.pass_s(1)
    second.rendezvous.follow(0)
    second.join()
    town.pass_s(STANDS_NS / S_NS / 2)
    assert [agent.attempt for agent in town.agents] == [1, 1]


def test_every_node_tells_who_may_follow_it_which_attempt_it_is_in(tmp_path: Path) -> None:
    town = Town(tmp_path, nodes=3)
    town.form()
    assert [agent.room.told.attempts for agent in town.agents] == [[0]] * 3


def test_nodes_that_do_not_agree_are_told(tmp_path: Path) -> None:
    town = Town(tmp_path, nodes=2)
    town.agents[1] = other = Agent(town, 9, min_nodes=1)
    town.agents[0].join()
    town.pass_s()
    other.join()
    town.pass_s()
    assert len(other.lost) == 1 and "--nnodes" in other.lost[0]


def test_who_needs_the_others_gives_up_when_no_place_to_meet_comes_back(tmp_path: Path) -> None:
    town = Town(tmp_path, nodes=2)
    town.form()
    first, second = town.agents
    town.lose_kv("nobody answers")
    first.join()
    town.pass_s(AWAY_NS / S_NS - 1)
    assert first.lost == []
    town.pass_s(2)
    assert first.lost == ["the KV is lost [KS3200]"] and second.lost == [], "its ranks train on"
    second.rendezvous.ended_well(0, "well")
    town.pass_s(WELL_NS / S_NS + 1)
    assert second.lost == ["the KV is lost [KS3200]"]


def test_a_verdict_that_nobody_heard_before_it_was_lost_is_said_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    town = Town(tmp_path, nodes=2)
    town.form()
    first, second = town.agents
    town.table.waits.clear()  # the answer to who waits gets lost
    first.say(AGAIN)
    town.pass_s(0.001)
    assert town.table.values["0/verdict"] and first.verdicts == second.verdicts == []
    town.lose_kv()
    town.pass_s(3)
    assert first.verdicts == second.verdicts == [AGAIN]


def test_the_last_word_was_heard_though_the_answer_to_that_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    town = Town(tmp_path, nodes=2)
    town.form()
    first, second = town.agents
    kv, swap = second.rendezvous.kv, FakeKV.swap
    assert isinstance(kv, FakeKV)

    def unanswered(self: FakeKV, key: str, expected: Any, value: str, then: Any) -> None:
        swap(self, key, expected, value, (lambda found: None) if self is kv else then)

    monkeypatch.setattr(FakeKV, "swap", unanswered)
    first.say(Verdict("stop", "gave up", code=3))
    town.pass_s(1)
    assert second.verdicts == []
    town.lose_kv("nobody answers")
    assert [v.code for v in second.verdicts] == [3] and second.lost == []


def test_ranks_train_on_when_the_place_to_meet_is_lost_and_comes_back(tmp_path: Path) -> None:
    town = Town(tmp_path, nodes=2)
    town.form()
    town.lose_kv()
    town.pass_s(3)
    assert all(agent.verdicts == [] and len(agent.formeds) == 1 for agent in town.agents)
    assert all(agent.room.journal.of("meeting-found") for agent in town.agents)
    town.agents[1].say(AGAIN)
    town.pass_s()
    town.form()
    assert [agent.attempt for agent in town.agents] == [1, 1]
    assert sorted(agent.node for agent in town.agents) == [0, 1]


@pytest.mark.parametrize("attempts", [1, 3])
def test_whoever_follows_the_killed_host_meets_the_others_in_the_next_attempt(
    tmp_path: Path, attempts: int
) -> None:
    town = Town(tmp_path, nodes=2)
    for _ in range(attempts - 1):
        town.form()
        town.agents[0].say(AGAIN)
        town.pass_s()
    town.form()
    host, other = town.agents
    node = host.node
    host.die()
    town.agents = [other]
    town.lose_kv("nobody answers")
    town.pass_s(3)
    town.table = Table()
    successor = Agent(town, 7)
    successor.number = host.number  # its keeper is the same
    successor.rendezvous.follow(attempts - 1)
    successor.join()
    town.agents.append(successor)
    town.find_kv()
    town.pass_s(3)
    assert [v.keep for v in other.verdicts[attempts - 1 :]] == [True]
    town.form(other)
    assert (successor.attempt, other.attempt) == (attempts, attempts) and successor.node == node


def test_whoever_follows_the_host_gives_up_when_the_others_have_gone(tmp_path: Path) -> None:
    town = Town(tmp_path, nodes=2)
    town.form()
    host, other = town.agents
    host.die()
    other.die()
    town.table = Table()
    successor = Agent(town, 7)
    successor.room = host.room
    town.agents = [successor]
    host.room.table = town.table
    successor.rendezvous = MultiNode(
        host.room.world, host.room.options, host.room.launch, successor
    )
    successor.rendezvous.follow(0)
    successor.join()
    town.pass_s(ALONE_NS / S_NS - 1)
    assert successor.lost == []
    town.pass_s(2)
    assert len(successor.lost) == 1 and "none of the other nodes has come" in successor.lost[0]


def test_a_newcomer_does_not_begin_the_job_anew(tmp_path: Path) -> None:
    """It comes first to the new place, where nothing is known of the job."""
    town = Town(tmp_path, nodes=2)
    town.form()
    host, other = town.agents
    host.die()
    town.agents = [other]
    town.lose_kv("nobody answers")
    newcomer = Agent(town, 7)
    newcomer.room.kv_error = None
    town.agents.append(newcomer)
    newcomer.join()
    town.pass_s(3)
    assert newcomer.formeds == []
    town.find_kv()
    town.pass_s(3)
    assert [v.keep for v in other.verdicts] == [True], "its ranks may stay"
    town.form(other)
    assert (newcomer.attempt, other.attempt) == (1, 1)
    assert newcomer.node == host.node


def test_who_has_hosted_for_long_still_says_what_it_has_to(tmp_path: Path) -> None:
    town = Town(tmp_path, nodes=2)
    town.form()
    town.pass_s(2 * ALONE_NS / S_NS)
    for agent in town.agents:
        agent.rendezvous.ended_well(0, "well")
    town.pass_s()
    assert [agent.verdicts[-1].outcome for agent in town.agents] == ["done", "done"]


def test_what_could_not_be_said_is_said_when_there_is_a_place_again(tmp_path: Path) -> None:
    town = Town(tmp_path, nodes=2)
    town.form()
    town.lose_kv("nobody answers")
    town.agents[0].say(AGAIN)
    town.pass_s(3)
    town.find_kv()
    town.pass_s(3)
    assert [agent.verdicts for agent in town.agents] == [[AGAIN], [AGAIN]]


@settings(deadline=None, max_examples=40)
@given(
    nodes=st.integers(2, 4),
    story=st.lists(st.tuples(st.integers(0, 3), st.floats(0, 0.003), st.booleans()), max_size=4),
)
def test_whenever_it_is_lost_all_meet_again(
    tmp_path_factory: pytest.TempPathFactory,
    nodes: int,
    story: list[tuple[int, float, bool]],
) -> None:
    """Of each loss: who ends an attempt before it, how long before, and whether all are there
    again at once."""
    town = Town(tmp_path_factory.mktemp("m"), nodes)
    town.form()
    for speaker, before_s, at_once in story:
        town.agents[speaker % nodes].say(replace(AGAIN, keep=True))
        town.follow_verdicts(before_s)
        town.lose_kv("" if at_once else "nobody answers")
        town.follow_verdicts(2)
        town.find_kv()
        town.follow_verdicts(12)
        assert len({agent.attempt for agent in town.agents}) == 1
        assert [a.node for a in town.agents] == [a.formeds[0].place.node for a in town.agents]
        assert len({agent.formeds[-1].keep for agent in town.agents}) == 1
        meshes = [agent.formeds[-1].mesh for agent in town.agents]
        assert len({(m.version, m.secret, m.members) for m in meshes if m is not None}) == 1
    for agent in town.agents:
        agent.rendezvous.ended_well(agent.attempt, "well")
    town.pass_s()
    assert all(agent.verdicts[-1].outcome == "done" for agent in town.agents)


def test_one_that_cannot_be_found_is_told(tmp_path: Path) -> None:
    room = AgentRoom(tmp_path, nodes=2)
    room.kv_error = "nobody answers"
    lost: list[str] = []

    class Hearer:
        def formed(self, formed: Formed) -> None: ...

        def ended(self, verdict: Verdict) -> None: ...

        def meeting_lost(self, why: str, is_refused: bool = False) -> None:
            lost.append(why)

    MultiNode(room.world, room.options, room.launch, Hearer())
    room.time.pass_ns()
    assert lost == ["nobody answers [KS3200]"]


@pytest.mark.parametrize("hears", [True, False])
def test_the_host_leaves_when_the_others_have_heard_its_last_word(
    tmp_path: Path, hears: bool
) -> None:
    town = Town(tmp_path, nodes=2)
    town.form()
    host, other = town.agents
    if not hears:
        other.die()
    closed: list[int] = []
    answer = host.rendezvous.close(Verdict("stop", "gave up", code=3), 5 * S_NS)
    began_ns = town.time.now_ns
    answer.when_given(lambda: closed.append(town.time.now_ns - began_ns))
    town.pass_s(6)
    assert len(closed) == 1 and (closed[0] >= 5 * S_NS) != hears
    assert [v.code for v in other.verdicts] == [3] * hears
    assert host.verdicts == [], "nothing is told any more"


def test_before_there_is_a_meeting_the_end_is_quick(tmp_path: Path) -> None:
    town = Town(tmp_path, nodes=2)
    closed: list[bool] = []
    town.agents[0].rendezvous.close(None, S_NS).when_given(lambda: closed.append(True))
    town.pass_s(1)
    assert closed == [True] and town.agents[0].rendezvous.board(0) is None


STOP = Verdict("stop", "told to end", code=143, signum=15)


def successor_of(town: Town, killed: Agent) -> Agent:
    """The agent that follows it, before it has found where the nodes meet."""
    killed.die()
    successor = Agent(town, 7)
    successor.number = killed.number  # its keeper is the same
    successor.rendezvous.follow(killed.attempt)
    return successor


def test_who_follows_a_killed_agent_to_end_the_job_tells_the_others_first(tmp_path: Path) -> None:
    """They would wait for its node."""
    town = Town(tmp_path, nodes=2)
    town.form()
    first, second = town.agents
    successor = successor_of(town, second)
    closed: list[bool] = []
    successor.rendezvous.close(STOP, 5 * S_NS).when_given(lambda: closed.append(True))
    assert closed == [] and first.verdicts == []
    town.pass_s(3)
    assert first.verdicts == [STOP] and closed == [True] and successor.verdicts == []
    town.pass_s(5)
    assert closed == [True], "once"


def test_who_finds_nobody_to_tell_that_the_job_ends_goes_in_time(tmp_path: Path) -> None:
    town = Town(tmp_path, nodes=2)
    town.form()
    successor = successor_of(town, town.agents[1])
    successor.rendezvous._opening.cancel()  # nobody answers
    closed: list[int] = []
    began_ns = town.time.now_ns
    answer = successor.rendezvous.close(STOP, 5 * S_NS)
    answer.when_given(lambda: closed.append(town.time.now_ns - began_ns))
    town.pass_s(4.9)
    assert closed == []
    town.pass_s(3)
    assert closed == [5 * S_NS]


@pytest.mark.parametrize(("follows", "last"), [(0, None), (-1, STOP)])
def test_who_has_nothing_to_tell_or_follows_nobody_does_not_wait_for_a_meeting(
    tmp_path: Path, follows: int, last: Verdict | None
) -> None:
    agent = Town(tmp_path, nodes=2).agents[0]
    agent.rendezvous.follow(follows)
    closed: list[bool] = []
    agent.rendezvous.close(last, 5 * S_NS).when_given(lambda: closed.append(True))
    assert closed == [True]


@pytest.mark.parametrize("encrypts", [(True, False), (False, True)])
def test_a_node_that_is_told_otherwise_about_encryption_is_refused(
    tmp_path: Path, encrypts: tuple[bool, bool]
) -> None:
    town = Town(tmp_path, 2, agents=0)
    for number, encrypt in enumerate(encrypts):
        town.agents.append(Agent(town, number, encrypt=encrypt))
        town.form(town.agents[-1])
    first, second = town.agents
    expected, found = ("on", "off") if encrypts[0] else ("off", "on")
    assert second.lost == [
        f"encrypt: expected {expected}, as on the node that came first, found {found}: set it on "
        "every node or on none [KS1203]"
    ]
    assert not first.formeds and not second.formeds and not first.lost


@pytest.mark.parametrize("encrypt", [True, False])
def test_keepers_are_told_whether_they_encrypt(tmp_path: Path, encrypt: bool) -> None:
    town = Town(tmp_path, 2, agents=0)
    town.agents = [Agent(town, number, encrypt=encrypt) for number in range(2)]
    town.form()
    meshes = [agent.formeds[0].mesh for agent in town.agents]
    assert [mesh is not None and mesh.encrypt for mesh in meshes] == [encrypt] * 2


def take_away(town: Town, *keys: str) -> None:
    """As a stranger does who can write there: what it has written counts as nothing."""
    for key in keys:
        town.table.values.pop(key, None)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_place_that_is_taken_away_once_keeps_no_job_from_beginning(
    tmp_path: Path, when: str
) -> None:
    """The second agent comes after the first one has looked again, or before."""
    town = Town(tmp_path, nodes=2)
    first, second = town.agents
    first.join()
    town.pass_s(1)
    take_away(town, "0/seat/0")
    town.pass_s(STANDS_NS / S_NS + 1 if when == "after" else 0)
    second.join()
    town.pass_s(3 * STANDS_NS / S_NS)
    assert [agent.attempt for agent in town.agents] == [0, 0]
    assert sorted(agent.node for agent in town.agents) == [0, 1]


@pytest.mark.parametrize(
    "key", ["0/seat/0", "0/seat/1", "0/full/0", "0/ready/0", "0/ready/1", "0/verdict", "1/seat/0"]
)
@settings(deadline=None, max_examples=25)
@given(after_ms=st.integers(0, 4000))
def test_whatever_is_taken_away_whenever_all_meet_in_one_attempt(
    tmp_path_factory: pytest.TempPathFactory, key: str, after_ms: int
) -> None:
    town = Town(tmp_path_factory.mktemp("m"), nodes=2)
    for agent in town.agents:
        agent.join()
    town.time.after(after_ms * S_NS // 1000, lambda: take_away(town, key))
    town.time.after(S_NS, lambda: town.agents[1].say(AGAIN) if town.agents[1].formeds else None)
    town.follow_verdicts(60)
    assert len({agent.attempt for agent in town.agents}) == 1
    assert sorted(agent.node for agent in town.agents) == [0, 1]


def test_the_host_waits_for_all_that_it_has_lived_with(tmp_path: Path) -> None:
    """Also when somebody has taken their seats away: they are to hear its last word."""
    town = Town(tmp_path, nodes=2)
    town.form()
    host, other = town.agents
    other.die()
    take_away(town, "0/seat/1")
    closed: list[int] = []
    began_ns = town.time.now_ns
    answer = host.rendezvous.close(Verdict("stop", "gave up", code=3), 5 * S_NS)
    answer.when_given(lambda: closed.append(town.time.now_ns - began_ns))
    town.pass_s(6)
    assert len(closed) == 1 and closed[0] >= 5 * S_NS


@pytest.mark.parametrize("is_full", [True, False], ids=["to answer", "to be more"])
def test_who_waits_in_an_attempt_that_is_over_leaves_it(tmp_path: Path, is_full: bool) -> None:
    """Whoever said so was killed before it had called the attempt off, and whoever coordinates
    takes part in the next one and looks at that alone."""
    town = Town(tmp_path, nodes=2)
    first, other = town.agents
    others = MeetingRecord(FakeKV(town.time, town.table))

    town.lead_elsewhere()
    first.join()
    town.pass_s(1)
    if is_full:
        town.sit_down_and_die(replace(first.rendezvous._standing.mine, token="b"))
    town.pass_s(1)
    Task(others.say(0, AGAIN), lambda _: None, lambda error: pytest.fail(str(error)))
    other.join()
    town.pass_s(2 * STANDS_NS / S_NS)
    assert [agent.attempt for agent in town.agents] == [1, 1]


def test_what_waits_to_be_said_is_signed_as_of_the_next_meeting(tmp_path: Path) -> None:
    """It was said before it was known which meeting that is, and nobody heard it."""
    town = Town(tmp_path, nodes=2)
    for agent in town.agents:
        agent.room.change(secret="of the job")
        agent.rendezvous._options = agent.room.options
    town.form()
    town.lose_kv("nobody is there")
    town.agents[1].say(AGAIN)
    town.pass_s(3)
    town.find_kv()
    town.pass_s(3)
    assert [agent.verdicts for agent in town.agents] == [[AGAIN], [AGAIN]]
