"""`keepstep run` on several nodes, all on this machine's loopback: they meet, restart together,
replace one another, end together."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from keepstep.config import job_dir_of
from keepstep.edge.os.journal import read_journal
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.node_safety_file import read_node_safety
from keepstep.model.events import Event
from tests.edge.kubernetes.cluster import Cluster, kubeconfig, served
from tests.processes import waiting

COMMAND = "from keepstep.cli.main import app; app()"
PATIENCE_S = 100.0


PROGRAM = """
import os, pathlib, sys, time, torch, keepstep
weights = torch.zeros(1000)
go_on = pathlib.Path(sys.argv[3]) if len(sys.argv) > 3 else None
torch.distributed.init_process_group("gloo")
job = keepstep.protect(weights=weights)
for step in job.steps(40):
    total = torch.ones(())
    torch.distributed.all_reduce(total)
    weights += total
    time.sleep(0.01)
    while step == 10 and go_on and not go_on.exists():
        time.sleep(0.05)
    if step == 20 and os.environ[sys.argv[1]] == sys.argv[2]:
        raise ValueError(f"no number is {id(job):#x}")
assert weights.eq(80).all()
"""


def until(look: Callable[[], Any], what: str) -> Any:
    return waiting.until(look, what, PATIENCE_S)


@dataclass
class Node:
    """A machine: its agent, what the agent started, and its memory."""

    agent: subprocess.Popen[str]
    journal_path: Path
    arena_dir: Path

    def events(self, kind: str) -> list[Event]:
        return [e for e in read_journal(self.journal_path) if e.kind == kind]

    def wait_for(self, kind: str, count: int = 1) -> Event:
        event: Event = until(
            lambda: self.events(kind)[count - 1 : count],
            f"event {count} of {kind} in {self.journal_path}",
        )[0]
        return event

    def ended(self) -> tuple[int, str]:
        """(exit code, output), once it has left."""
        output, _ = self.agent.communicate(timeout=PATIENCE_S)
        return self.agent.returncode, output

    def lose(self) -> None:
        """Nothing of it remains and nobody was told."""
        lost = []
        with suppress(psutil.NoSuchProcess):
            agent = psutil.Process(self.agent.pid)
            lost += [agent, *agent.children(recursive=True)]
        for event in self.events("keeper-started"):
            with suppress(psutil.NoSuchProcess):
                keeper = psutil.Process(event.data["pid"])
                lost += [keeper] if str(self.arena_dir) in " ".join(keeper.cmdline()) else []
        for process in lost:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.agent.wait()
        shutil.rmtree(self.arena_dir, ignore_errors=True)


@dataclass
class Machines:
    """Starts nodes, all of one job and with one meeting point."""

    room: Path
    arena: Path
    script: str
    nnodes: int | str = 2
    program: str = PROGRAM
    port: int = 0

    def __post_init__(self) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        self.nodes: list[Node] = []
        (self.room / "out").mkdir()
        (self.room / "tmp").mkdir()
        # Ranks that leave their word in `out` and need nothing of keepstep's.
        (self.room / "rank.sh").write_text('cd "$OUT"\n' + self.script)

    def start(self, *options: str, nproc: int = 1) -> Node:
        """One more machine, with an address and a memory of its own."""
        number = len(self.nodes) + 1
        arena, state = self.arena / str(number), self.room / f"state-{number}"
        arena.mkdir()
        own = (
            "--job",
            "t",
            "--arena-dir",
            str(arena),
            "--state-dir",
            str(state),
            "--host",
            f"127.0.0.{10 + number}",
            "--link-dead-s",
            "3",
        )
        meeting = (
            "--nnodes",
            str(self.nnodes),
            "--rdzv-endpoint",
            f"127.0.0.1:{self.port}",
            "--nproc-per-node",
            str(nproc),
        )
        program = ("--no-python", "sh", str(self.room / "rank.sh"))
        words = [
            sys.executable,
            "-c",
            COMMAND,
            "run",
            *own,
            "--grace-s",
            "1",
            *meeting,
            *options,
            *program,
        ]
        program_path = self.room / "program.py"
        program_path.write_text(self.program)
        environ = {**os.environ, "OUT": str(self.room / "out"), "TMPDIR": str(self.room / "tmp")}
        environ |= {"PYTHON": sys.executable, "PROGRAM": str(program_path)}
        log = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        agent = subprocess.Popen(words, cwd=self.room, env=environ, **log)  # type: ignore[call-overload]
        self.nodes.append(Node(agent, state / "t" / "journal.jsonl", arena))
        return self.nodes[-1]

    def start_two(self, *options: str) -> tuple[Node, Node]:
        """The first is node 0 and hosts the meeting point."""
        first = self.start(*options)
        first.wait_for("nodes-awaited")
        return first, self.start(*options)

    def out(self, name: str) -> str | None:
        path = self.room / "out" / name
        return path.read_text() if path.exists() else None

    def allow(self, name: str) -> None:
        """What a script waits for with `until_there`."""
        (self.room / "out" / name).touch()


Begin = Callable[..., Machines]
UNTIL_THERE = 'until_there() { while [ ! -e "$1" ]; do sleep 0.05; done; }\n'


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Begin]:
    begun: list[Machines] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ks-test-") as arena:

        def begin(script: str, nnodes: int = 2, program: str = PROGRAM) -> Machines:
            begun.append(Machines(tmp_path, Path(arena), UNTIL_THERE + script, nnodes, program))
            return begun[-1]

        yield begin
        for node in [node for machines in begun for node in machines.nodes]:
            node.lose()


@pytest.mark.everyday
def test_ranks_of_all_nodes_see_one_job(machines: Begin) -> None:
    job = machines('env > "env-$RANK"')
    late = job.start("--node-rank", "1", nproc=2)
    late.wait_for("nodes-awaited")
    nodes = [job.start("--node-rank", "0"), late]
    for node in nodes:
        code, output = node.ended()
        assert code == 0, output
        assert not list(node.arena_dir.iterdir())
    found = [
        dict(line.partition("=")[::2] for line in (job.out(f"env-{rank}") or "").splitlines())
        for rank in range(3)
    ]
    everywhere = {
        "WORLD_SIZE": "3",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.12",
        "KEEPSTEP_ATTEMPT": "0",
    }
    everywhere |= {
        "MASTER_PORT": found[0]["MASTER_PORT"],
        "KEEPSTEP_JOB": "t",
        "TORCHELASTIC_RUN_ID": "t",
    }
    for rank, (node, local, locals_) in enumerate([(0, 0, 1), (1, 0, 2), (1, 1, 2)]):
        own = {
            "RANK": rank,
            "ROLE_RANK": rank,
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": locals_,
            "GROUP_RANK": node,
        }
        expected = everywhere | {name: str(value) for name, value in own.items()}
        assert {name: found[rank].get(name) for name in expected} == expected
        assert "KEEPSTEP_SECRET" not in found[rank]
    assert found[0]["MASTER_PORT"] != str(job.port)
    formed = [node.wait_for("attempt-formed").data for node in nodes]
    assert [data["node"] for data in formed] == [0, 1]
    assert formed[0]["hosts"] == formed[1]["hosts"] and all(
        host.startswith("127.0.0.1") for host in formed[0]["hosts"]
    )


@pytest.mark.everyday
def test_a_rank_that_fails_on_one_node_restarts_all(machines: Begin) -> None:
    job = machines('[ "$KEEPSTEP_ATTEMPT" = 1 ] && exit; [ "$RANK" = 1 ] && exit 7; sleep 1000')
    nodes = job.start_two()
    for node in nodes:
        code, output = node.ended()
        assert code == 0, output
        assert [e.data["attempt"] for e in node.events("ranks-restarted")] == [1]
    assert (
        nodes[1]
        .events("attempt-wanted")[0]
        .why.startswith(
            "told the other nodes about attempt 0: node 1 says: rank 1 exited with code 7"
        )
    )
    assert (
        nodes[0]
        .events("ranks-restarted")[0]
        .why.startswith("node 1 says: rank 1 exited with code 7")
    )
    assert [e.data["attempt"] for e in nodes[0].events("attempt-formed")] == [0, 1]


def test_a_node_whose_ranks_ended_well_runs_them_again_when_another_fails(machines: Begin) -> None:
    job = machines(
        '[ "$RANK" = 0 ] && exit; until_there fail; [ "$KEEPSTEP_ATTEMPT" = 0 ] && exit 7; exit 0'
    )
    nodes = job.start_two()
    nodes[0].wait_for("rank-exited")
    job.allow("fail")
    for node in nodes:
        code, output = node.ended()
        assert code == 0, output
    assert [e.data["code"] for e in nodes[0].events("rank-exited")] == [0, 0]
    assert (
        not nodes[0].events("attempt-wanted")
        and nodes[0].events("job-ended")[0].why == nodes[1].events("job-ended")[0].why
    )


def test_a_program_that_fails_everywhere_ends_everywhere(machines: Begin) -> None:
    job = machines("sleep 0.2; exit $((7 + KEEPSTEP_ATTEMPT))")
    nodes = job.start_two()
    ended = [node.ended() for node in nodes]
    assert [code for code, _ in ended] == [70, 70], ended
    assert all(len(node.events("ranks-restarted")) == 2 for node in nodes), (
        "the third failure is one too many, wherever it is seen"
    )
    why = [node.events("job-ended")[0].why for node in nodes]
    assert any(
        "the program failed 3 times in a row without a new step" in sentence for sentence in why
    )


def test_what_fails_twice_in_the_same_way_before_protect_is_not_tried_again(
    machines: Begin,
) -> None:
    nodes = machines("sleep 0.2; exit 7").start_two()
    assert [node.ended()[0] for node in nodes] == [70, 70]
    assert [len(node.events("ranks-restarted")) for node in nodes] == [1, 1]


def test_the_same_failure_on_another_host_is_the_programs(machines: Begin) -> None:
    """First on one node, then on the other: the second time is the last one."""
    job = machines('exec "$PYTHON" "$PROGRAM" RANK "$KEEPSTEP_ATTEMPT"')
    nodes = job.start_two()
    ended = [node.ended() for node in nodes]
    assert [code for code, _ in ended] == [70, 70], ended
    assert [len(node.events("ranks-restarted")) for node in nodes] == [1, 1]
    found = [event for node in nodes for event in node.events("recurrence")]
    assert {event.data["finding"] for event in found} == {"code"}
    told = [(f["host"], f["step"], f["error"]) for f in found[0].data["failures"]]
    assert told == [
        ("127.0.0.11", 20, "ValueError: no number is ?"),
        ("127.0.0.12", 20, "ValueError: no number is ?"),
    ]


def may_lose(node: Node, number: int) -> bool:
    """Whether that node knows that this one is expendable."""
    known = read_node_safety(MEMORY, job_dir_of(node.arena_dir, "t")) or {"expendable": ()}
    return number in known["expendable"]


def test_a_node_on_which_a_step_fails_again_is_swapped_for_a_spare(machines: Begin) -> None:
    job = machines('until_there go; exec "$PYTHON" "$PROGRAM" KEEPSTEP_HOST 127.0.0.12 go-on')
    nodes = job.start_two("--redundancy", "copies:2")
    nodes[1].wait_for("attempt-formed")
    spare = job.start("--redundancy", "copies:2")
    spare.wait_for("nodes-awaited")
    job.allow("go")
    until(lambda: may_lose(nodes[1], 1), "that node 1 may be lost")
    job.allow("go-on")
    for node in (*nodes, spare):
        code, output = node.ended()
        assert code == 0, output
    suspected = nodes[1].events("recurrence")
    assert [event.data["finding"] for event in suspected] == ["suspect"] and len(
        suspected[0].data["failures"]
    ) == 2
    formed = spare.events("attempt-formed")[-1].data
    assert formed["node"] == 1 and [host.partition(":")[0] for host in formed["hosts"]] == [
        "127.0.0.11",
        "127.0.0.13",
    ]
    resumed, found = nodes[0].events("resumed")[-1], nodes[0].events("recurrence")[-1]
    assert (resumed.data["source"], resumed.data["step"] >= 18) == ("memory", True)
    assert found.data["finding"] == "hardware" and found.mono_ns > resumed.mono_ns


def test_a_signal_to_one_agent_ends_the_job_on_all_nodes(machines: Begin) -> None:
    job = machines('touch "runs-$RANK"; sleep 1000')
    nodes = job.start_two()
    until(lambda: job.out("runs-0") is not None and job.out("runs-1") is not None, "both ranks")
    nodes[1].agent.send_signal(signal.SIGTERM)
    ended = [node.ended() for node in nodes]
    assert [code for code, _ in ended] == [143, 143], ended
    assert (
        nodes[0]
        .events("job-ended")[0]
        .why.startswith("told to stop: node 1 says: preempted by SIGTERM (15)")
    )


@pytest.mark.everyday
def test_ctrl_c_on_one_node_ends_the_job_on_all(machines: Begin) -> None:
    job = machines('trap "exit 1" INT; touch "runs-$RANK"; while :; do sleep 0.05; done')
    nodes = job.start_two()
    until(lambda: job.out("runs-0") is not None and job.out("runs-1") is not None, "both ranks")
    nodes[1].agent.send_signal(signal.SIGINT)
    ended = [node.ended() for node in nodes]
    assert [code for code, _ in ended] == [130, 130], ended


def test_a_signal_while_waiting_for_the_others_is_answered(machines: Begin) -> None:
    node = machines("exit 0").start()
    node.wait_for("nodes-awaited")
    node.agent.send_signal(signal.SIGINT)
    assert node.ended()[0] == 130


@pytest.mark.parametrize("spare", ["waits already", "comes later"])
def test_a_replacement_becomes_the_node_that_was_lost(machines: Begin, spare: str) -> None:
    job = machines(
        'touch "runs-$RANK"; [ "$KEEPSTEP_ATTEMPT" = 0 ] && sleep 1000; echo "$RANK" > '
        '"by-$MASTER_ADDR-$GROUP_RANK"'
    )
    nodes = job.start_two()
    until(lambda: job.out("runs-0") is not None and job.out("runs-1") is not None, "both ranks")
    if spare == "waits already":
        replacement = job.start()
        assert "has its 2 nodes already" in replacement.wait_for("nodes-awaited").why
    nodes[1].lose()
    if spare == "comes later":
        assert "node 1 is lost" in nodes[0].wait_for("attempt-wanted").why
        nodes[0].wait_for("nodes-awaited", 2)
        replacement = job.start("--node-rank", "0")
    for node in (nodes[0], replacement):
        code, output = node.ended()
        assert code == 0, output
        assert not list(node.arena_dir.iterdir())
    formed = replacement.events("attempt-formed")[-1].data
    assert (formed["node"], formed["attempt"]) == (1, 1)
    assert [host.partition(":")[0] for host in formed["hosts"]] == ["127.0.0.11", "127.0.0.13"]
    assert job.out("by-127.0.0.11-1") == "1\n"


SHRINKING = """
import os, pathlib, sys, time, torch, keepstep
weights = torch.zeros(1000)
go_on = pathlib.Path(sys.argv[3]) if len(sys.argv) > 3 else None
torch.distributed.init_process_group("gloo")
world = torch.distributed.get_world_size()
job = keepstep.protect(weights=weights)
for step in job.steps(60):
    share = torch.ones(()) / world
    torch.distributed.all_reduce(share)
    weights += share
    if step == 30 and world == int(sys.argv[1]):
        time.sleep(1000)
assert weights.sub(60).abs().max() < 1e-3
"""


@pytest.mark.parametrize("count", [2, 3])
def test_a_job_goes_on_with_fewer_nodes_from_the_store(
    machines: Begin, tmp_path: Path, count: int
) -> None:
    """With three, the last node becomes the one that was lost: its ranks are others now."""
    job = machines(f'exec "$PYTHON" "$PROGRAM" {count}', program=SHRINKING)
    job.nnodes = f"{count - 1}:{count}"
    own = (
        "--store",
        str(tmp_path / "store"),
        "--persist-every-steps",
        "10",
        "--shrink-after-s",
        "4",
    )
    nodes = [*job.start_two(*own), *(job.start(*own) for _ in range(count - 2))]
    ids = [node.wait_for("attempt-formed").data["node"] for node in nodes]
    host, lost = nodes[ids.index(0)], nodes[ids.index(1)]
    stored = host.wait_for("persisted").data["step"]
    lost.lose()
    for node in (node for node in nodes if node is not lost):
        code, output = node.ended()
        assert code == 0, output
        assert not list(node.arena_dir.iterdir())
        assert node.events("attempt-formed")[-1].data["world_size"] == count - 1
    closed = [event.data["here"] for node in nodes for event in node.events("attempt-closed")]
    assert closed and set(closed) == {count - 1}
    resumed = host.events("resumed")[-1]
    assert resumed.data["source"] == "store" and resumed.data["step"] >= stored, resumed.why
    assert 0 < resumed.data["lost_steps"] <= 30 - stored, resumed.why


def test_without_a_store_there_is_no_going_on_with_fewer(machines: Begin) -> None:
    job = machines("exit 0")
    job.nnodes = "1:2"
    code, output = job.start().ended()
    assert code == 2 and "--nnodes 1:2: expected a store (--store)" in output.replace("\n", " ")


def test_the_platform_is_asked_once_for_a_replacement(machines: Begin) -> None:
    job = machines(
        'touch "runs-$RANK"; [ "$KEEPSTEP_ATTEMPT" = 0 ] && sleep 1000; exit 0', nnodes=3
    )
    asks = (
        f'echo "$KEEPSTEP_LOST_JOB $KEEPSTEP_LOST_NODE $KEEPSTEP_LOST_HOST" >> {job.room}/asked; '
        "exit 3"
    )
    nodes = [job.start("--replace-command", asks) for _ in range(3)]
    until(lambda: all(job.out(f"runs-{rank}") is not None for rank in range(3)), "all ranks")
    ids = [node.events("attempt-formed")[0].data["node"] for node in nodes]
    lost = next(at for at, node in enumerate(ids) if at and node)  # not where they meet
    nodes[lost].lose()
    until((job.room / "asked").exists, "the command")
    replacement = job.start()
    left = [node for at, node in enumerate(nodes) if at != lost]
    for node in (*left, replacement):
        code, output = node.ended()
        assert code == 0, output
    assert (job.room / "asked").read_text() == f"t {ids[lost]} 127.0.0.{11 + lost}\n"
    told = [e.why for node in left for e in node.events("replacement-asked")]
    assert len(told) == 1 and told[0].endswith("exited with 3")


def test_on_kubernetes_another_pod_takes_the_lost_ones_place(
    machines: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a cluster that is this test's own: its controller makes the pod, and the test the machine
    that the pod is. What the lost rank had is in the other node's memory."""
    cluster = Cluster(pods=0)
    cluster.now_s = time.time()
    job = machines('exec "$PYTHON" "$PROGRAM" RANK none go')
    options = ("--redundancy", "copies:2", "--node-provider", "kubernetes")

    def start(name: str) -> Node:
        monkeypatch.setenv("POD_NAME", name)
        return job.start(*options)

    with served(cluster) as url:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "config", url)))
        nodes = []
        for number in range(2):
            name = f"train-nodes-0-{number}-first"
            cluster.add(name, number, f"gpu-{number}", f"127.0.0.{11 + number}")
            cluster.runs(name, cluster.now_s - 3600)
            nodes.append(start(name))
            nodes[0].wait_for("nodes-awaited")
        until(lambda: may_lose(nodes[1], 1), "that node 1 may be lost")
        nodes[1].lose()
        [deletion] = until(lambda: list(cluster.deletions), "the deletion")
        assert deletion["name"] == "train-nodes-0-1-first"
        cluster.pass_s(7)
        replacement = start("train-nodes-0-1-other")
        cluster.pass_s(7)
        told = nodes[0].wait_for("replacement-asked").why
        job.allow("go")
        for node in (nodes[0], replacement):
            code, output = node.ended()
            assert code == 0, output
    assert told.startswith("a replacement of node 1: pod train-nodes-0-1-other runs on gpu-9 after")
    assert told.endswith("in place of train-nodes-0-1-first, which was deleted")
    resumed = nodes[0].events("resumed")[-1]
    assert resumed.data["source"] == "memory" and resumed.data["step"] >= 0


def test_an_agent_that_died_while_it_waited_is_not_counted_on(machines: Begin) -> None:
    job = machines("exit 0", nnodes=3)
    first = job.start()
    first.wait_for("nodes-awaited")
    dead = job.start()
    dead.wait_for("nodes-awaited")
    dead.lose()
    nodes = [first, job.start(), job.start()]
    for node in nodes:
        code, output = node.ended()
        assert code == 0, output
    assert sorted(node.events("attempt-formed")[-1].data["node"] for node in nodes) == [0, 1, 2]
    [said] = {e.why for node in nodes for e in node.events("attempt-wanted")}
    assert "about attempt 0: node 1 on 127.0.0.12 came and then did not answer" in said


@pytest.mark.everyday
def test_without_the_meeting_points_host_the_others_train_on(machines: Begin) -> None:
    """On this machine each agent can be the next host."""
    job = machines('touch "runs-$RANK"; until_there go')
    host, other = job.start_two()
    until(lambda: job.out("runs-0") is not None and job.out("runs-1") is not None, "both ranks")
    host.lose()
    assert f"the meeting point 127.0.0.1:{job.port} is gone" in other.wait_for("meeting-lost").why
    other.wait_for("meeting-found")
    job.allow("go")
    for node in (other, job.start()):
        code, output = node.ended()
        assert code == 0, output
    assert other.events("attempt-formed")[-1].data["attempt"] == 1


@pytest.mark.parametrize("killed", [0, 1])
def test_an_agent_that_is_killed_is_followed_by_one_whom_the_others_meet(
    machines: Begin, killed: int
) -> None:
    """The first one's takes the meeting point with it."""
    job = machines('touch "runs-$RANK-$KEEPSTEP_ATTEMPT"; until_there go')
    nodes = job.start_two()
    until(lambda: job.out("runs-0-0") is not None and job.out("runs-1-0") is not None, "ranks")
    os.kill(nodes[killed].events("job-started")[-1].data["pid"], signal.SIGKILL)
    until(lambda: job.out("runs-0-1") is not None and job.out("runs-1-1") is not None, "ranks")
    job.allow("go")
    for node in nodes:
        code, output = node.ended()
        assert code == 0, output
    assert len(nodes[killed].events("agent-restarted")) == 1
    assert [e.data["node"] for e in nodes[killed].events("attempt-formed")] == [killed, killed]
    assert len(nodes[1 - killed].events("meeting-found")) == 1 - killed


def test_the_next_keeper_listens_where_the_last_one_did(machines: Begin) -> None:
    job = machines('touch "runs-$RANK"; until_there go')
    nodes = job.start_two()
    until(lambda: job.out("runs-0") is not None and job.out("runs-1") is not None, "both ranks")
    nodes[1].wait_for("mesh")  # the ranks may be there before it has heard
    os.kill(nodes[1].events("keeper-started")[0].data["pid"], signal.SIGKILL)
    nodes[1].wait_for("mesh", 2)
    job.allow("go")
    for node in nodes:
        code, output = node.ended()
        assert code == 0, output
    ports = [e.data["port"] for e in nodes[1].events("keeper-listens")]
    assert len(ports) == 2 and ports[0] == ports[1]
    versions = [e.data["mesh_version"] for e in nodes[1].events("mesh")]
    assert versions[0] == versions[1], "it was told of the mesh that is lived"


@pytest.mark.everyday
def test_nodes_that_do_not_agree_on_their_number_are_told(machines: Begin) -> None:
    job = machines("exit 0")
    first = job.start()
    first.wait_for("nodes-awaited")
    job.nnodes = 3
    code, output = job.start().ended()
    assert code == 2 and "--nnodes: expected 2, as on 127.0.0.11, found 3" in output
    job.nnodes = 2
    assert job.start().ended()[0] == first.ended()[0] == 0
