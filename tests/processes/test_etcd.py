"""`keepstep run` on several nodes that meet over a real etcd: no process of the job, and no member
of etcd, is one that cannot be lost."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.model.events import Event
from keepstep.testing.etcd import MISSING, Members
from tests.processes.test_run_nodes import Begin, Machines, Node, machines, until

__all__ = ["machines"]  # the fixture
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

# The first life waits to be disturbed, the later ones end well.
DISTURBED = (
    'echo $$ > "pid-$RANK"; [ "$KEEPSTEP_ATTEMPT" = 0 ] && sleep 1000; echo "$KEEPSTEP_ATTEMPT" '
    '> "ended-$RANK"'
)


@pytest.fixture
def etcd(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Members]:
    (tmp_path / "etcd").mkdir()
    members = Members(tmp_path / "etcd", getattr(request, "param", 1))
    yield members
    members.stop()


def start(job: Machines, etcd: Members) -> Node:
    return job.start(
        "--rdzv-backend",
        "etcd",
        "--rdzv-endpoint",
        etcd.endpoint,
        "--link-dead-s",
        "2",
        "--standby",
        "0",
    )


def start_two(job: Machines, etcd: Members) -> tuple[Node, Node]:
    """The one that coordinates, and the other; the ranks of both run."""
    nodes = start(job, etcd), start(job, etcd)

    def ready() -> bool:
        for node in nodes:
            assert node.agent.poll() is None, node.ended()
        return bool(job.out("pid-0") and job.out("pid-1") and led(*nodes))

    until(ready, "two ranks and a coordinator")
    return nodes if led(nodes[0]) else nodes[::-1]


def name(node: Node) -> str:
    """As the sentences have it."""
    formed = node.events("attempt-formed")[0].data
    return f"node {formed['node']} on {formed['hosts'][formed['node']].partition(':')[0]}"


def kill_rank(job: Machines, rank: int) -> None:
    os.kill(int(until(lambda: job.out(f"pid-{rank}"), f"rank {rank}")), signal.SIGKILL)


def ended_well(*nodes: Node) -> None:
    for node in nodes:
        code, output = node.ended()
        assert code == 0, output
        assert not node.events("meeting-lost")


def led(*nodes: Node) -> list[Event]:
    return [event for node in nodes for event in node.events("coordinator") if event.data["leads"]]


def one_a_term(*nodes: Node) -> bool:
    """Exactly one coordinator in every term, from the first on. A busy machine may have had more
    of them than the test asked for."""
    terms = Counter(event.data["term"] for event in led(*nodes))
    return terms == dict.fromkeys(range(1, len(terms) + 1), 1)


@pytest.mark.parametrize(
    ("etcd", "disturb"),
    [(1, lambda _: None), (3, lambda etcd: etcd.kill(etcd.leader()))],
    ids=["nothing else happens", "etcd loses its leader"],
    indirect=["etcd"],
)
def test_a_killed_rank_comes_back(
    machines: Begin, etcd: Members, disturb: Callable[[Members], None]
) -> None:
    job = machines(DISTURBED)
    nodes = start_two(job, etcd)
    disturb(etcd)
    kill_rank(job, 1)
    ended_well(*nodes)
    assert [job.out(f"ended-{rank}") for rank in range(2)] == ["1\n", "1\n"]
    assert [e.data["attempt"] for e in nodes[0].events("attempt-formed")] == [0, 1]
    assert one_a_term(*nodes)


@pytest.mark.everyday
def test_the_job_does_not_notice_that_etcd_restarts(machines: Begin, etcd: Members) -> None:
    job = machines('echo $$ > "pid-$RANK"; until_there go')
    nodes = start_two(job, etcd)
    etcd.kill(0)
    for node in nodes:
        assert "does not answer" in node.wait_for("meeting-away").why
    etcd.start(0)
    for node in nodes:
        assert "answers again" in node.wait_for("meeting-away", 2).why
    job.allow("go")
    ended_well(*nodes)
    assert all(len(node.events("attempt-formed")) == 1 for node in nodes)
    assert one_a_term(*nodes)


def test_a_rank_that_dies_while_etcd_is_away_comes_back_when_it_is_back(
    machines: Begin, etcd: Members
) -> None:
    job = machines(DISTURBED)
    nodes = start_two(job, etcd)
    etcd.kill(0)
    kill_rank(job, 0)
    nodes[0].wait_for("meeting-away")
    etcd.start(0)
    ended_well(*nodes)
    assert [job.out(f"ended-{rank}") for rank in range(2)] == ["1\n", "1\n"]


def test_the_loss_of_the_coordinators_node_makes_one_other_coordinate(
    machines: Begin, etcd: Members
) -> None:
    job = machines(DISTURBED)
    lost, left = start_two(job, etcd)
    lost.lose()
    assert until(lambda: led(left), "another coordinator")[-1].why.startswith(
        f"{name(left)} coordinates, term "
    )
    replacement = start(job, etcd)
    ended_well(left, replacement)
    assert name(replacement).split()[1] == name(lost).split()[1], "it has the lost node's number"
    assert [job.out(f"ended-{rank}") for rank in range(2)] == ["1\n", "1\n"]
    assert one_a_term(lost, left, replacement)


def test_the_coordinator_is_killed_in_the_middle_of_a_recovery(
    machines: Begin, etcd: Members
) -> None:
    # no child is left when nobody ends its group
    job = machines(DISTURBED.replace("sleep 1000", "until_there ever"))
    nodes = start_two(job, etcd)
    kill_rank(job, 0)
    kill_rank(job, 1)
    os.kill(nodes[0].events("job-started")[0].data["pid"], signal.SIGKILL)
    ended_well(*nodes)
    assert nodes[0].events("agent-restarted")
    assert job.out("ended-0") == job.out("ended-1") != "0\n", "in the same life"
    assert one_a_term(*nodes)


def test_a_coordinator_that_stood_still_follows_its_successor(
    machines: Begin, etcd: Members
) -> None:
    job = machines(DISTURBED)
    nodes = start_two(job, etcd)
    agent = nodes[0].events("job-started")[0].data["pid"]
    os.kill(agent, signal.SIGSTOP)
    successor = until(lambda: led(nodes[1]), "another coordinator")[-1]
    os.kill(agent, signal.SIGCONT)
    sentence = (
        f"{name(nodes[1])} coordinates, term {successor.data['term']}; this agent did until now"
    )
    until(lambda: sentence in [e.why for e in nodes[0].events("coordinator")], sentence)
    kill_rank(job, 1)
    ended_well(*nodes)
    assert one_a_term(*nodes)


def test_a_steward_may_die_with_its_agent_and_who_is_left_does_not_wait_for_its_word(
    machines: Begin, etcd: Members
) -> None:
    job = machines(
        'echo $$ > "pid-$RANK"; [ "$KEEPSTEP_ATTEMPT" = 0 ] && until_there go; echo '
        '"$KEEPSTEP_ATTEMPT" > "ended-$RANK"'
    )
    nodes = start_two(job, etcd)
    nodes[0].agent.kill()  # the steward; the agent dies with it, its ranks do not
    until(lambda: led(nodes[1]), "another coordinator")
    assert not nodes[1].events("attempt-wanted"), "its ranks train on"
    job.allow("go")
    sentence = (
        "told the other nodes about attempt 0: the others' ranks ended well, and nobody can say "
        f"it of {name(nodes[0])}: "
    )
    assert nodes[1].wait_for("attempt-wanted").why.startswith(sentence)
    replacement = start(job, etcd)
    ended_well(nodes[1], replacement)
    assert [job.out(f"ended-{rank}") for rank in range(2)] == ["1\n", "1\n"]


def test_a_job_whose_agents_all_died_at_once_is_started_again(
    machines: Begin, etcd: Members
) -> None:
    """Their attempt stands in etcd as they left it, full and without a verdict."""
    job = machines(DISTURBED)
    dead = start_two(job, etcd)
    for node in dead:
        node.lose()
    nodes = start(job, etcd), start(job, etcd)
    ended_well(*nodes)
    assert [job.out(f"ended-{rank}") for rank in range(2)] == ["1\n", "1\n"]
    said = [e.why for node in nodes for e in node.events("attempt-wanted")]
    assert said[0].startswith(
        "told the other nodes about attempt 0: no agent of attempt 0 is there any more"
    )
    assert one_a_term(*dead, *nodes)
