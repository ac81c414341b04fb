"""A job of two nodes on this machine's loopback, with a secret, and a step in which it waits."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.processes.test_run_nodes import Begin, Machines, Node, machines, until

__all__ = ["Job", "job", "machines"]  # fixtures

SECRET = "known to both nodes and nobody else"
PROGRAM = """
import os, pathlib, torch, keepstep
weights = torch.zeros(1000)
torch.distributed.init_process_group("gloo")
job = keepstep.protect(weights=weights)
for step in job.steps(8):
    total = torch.ones(())
    torch.distributed.all_reduce(total)
    weights += total
    if step == 4 and os.environ["RANK"] == "1":
        assert job._drain(job._rank.drain, 60)
        pathlib.Path("held").touch()
        with open("go-on") as until_it_is_opened:
            until_it_is_opened.read()
assert weights.eq(16).all()
"""


class Job:
    """`begin` starts one node after the other; `end` lets them go on and waits."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        os.mkfifo(machines.room / "out" / "go-on")
        self.nodes: list[Node] = []

    def start(self, *options: str) -> Node:
        """One more node."""
        own = ("--redundancy", "copies:2", "--standby", "0", "--block-mac", "on")
        self.nodes.append(self.machines.start(*own, *options))
        return self.nodes[-1]

    def hold(self) -> None:
        """Until it waits in its step."""

        def held() -> bool:
            for node in self.nodes:
                assert node.agent.poll() is None, node.ended()
            return self.machines.out("held") is not None

        until(held, "the step in which it waits")

    def end(self) -> list[str]:
        """What each node said, when all have ended well."""
        (self.machines.room / "out" / "go-on").write_text("")
        said = [node.ended() for node in self.nodes]
        assert [code for code, _ in said] == [0, 0], said
        return [output for _, output in said]


@pytest.fixture
def job(machines: Begin, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setenv("KEEPSTEP_SECRET", SECRET)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield Job(machines('exec "$PYTHON" "$PROGRAM"', program=PROGRAM))
