"""One real rank a node, on two nodes: the one that becomes slow is named by its own agent, compared
with the other node's."""

from __future__ import annotations

import pytest

from tests.processes.test_run_nodes import Begin, machines

__all__ = ["machines"]  # a fixture

pytestmark = pytest.mark.timeout(180)
STEPS, SLOW_FROM, SLOW_HOST = 2600, 1600, "127.0.0.12"
# Nothing computes: on few processors that would make others slow.
PROGRAM = f"""
import os, time, torch, keepstep
weights = torch.zeros(1000)
keepstep.init_process_group()
job = keepstep.protect(weights=weights)
is_slow = os.environ["KEEPSTEP_HOST"] == "{SLOW_HOST}"
for step in job.steps({STEPS}):
    with step:
        time.sleep(0.03 if is_slow and step >= {SLOW_FROM} else 0.015)
        total = torch.ones(())
        torch.distributed.all_reduce(total)
        weights += total
"""


def test_the_slow_one_of_two_nodes_is_named_on_its_own(machines: Begin) -> None:
    job = machines('exec "$PYTHON" "$PROGRAM"', program=PROGRAM)
    nodes = [job.start("--redundancy", "copies:2", nproc=1)]
    nodes[0].wait_for("nodes-awaited")
    nodes.append(job.start("--redundancy", "copies:2", nproc=1))
    for node in nodes:
        code, output = node.ended()
        assert code == 0, output
    told = nodes[1].events("slow-rank")
    late = [event.data for event in told if event.data["told_step"] > SLOW_FROM]
    assert late and late[0]["rank"] == 1 and late[0]["section"] == "compute", told
    for node in nodes:
        assert not [e for e in node.events("slow-unknown") if e.data["doubt"] == "alone"]
