"""The lost are missed: within its time, by who is left, and nobody is blamed where nobody is."""

from __future__ import annotations

import pytest

from keepstep.model.units import S_NS
from keepstep.runtime.keeper.keeper import Keeper
from keepstep.sim.protocol.job.job import SimJob, SimOutcome
from keepstep.sim.protocol.job.plan import RunPlan
from keepstep.sim.protocol.swarm import watch
from keepstep.sim.protocol.world.world import World

PLAN = RunPlan(nodes=3, steps=12, replace_ns=40 * S_NS, limit_ns=300 * S_NS)


def _run(lost: int, plan: RunPlan = PLAN) -> SimOutcome:
    """So many machines are lost at once, in the midst of training."""
    job = SimJob(plan, World(1))
    watch(job)

    def lose() -> None:
        for node in job.living_nodes()[:lost]:
            job.lose_machine(node)
        job.struck(f"lost {lost} machines")

    job.world.after(8 * S_NS, None, lose)
    return job.run()


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_the_attempt_ends_soon(lost: int) -> None:
    assert _run(lost).wrong is None


def test_an_attempt_that_goes_on_without_a_machine_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Keeper, "peer_is_dead", lambda self, mesh, node, why: None)
    wrong = _run(1).wrong
    assert wrong is not None and wrong.startswith("the lost are missed")


def test_where_nobody_replaces_it_the_job_ends_with_fewer() -> None:
    plan = RunPlan(
        nodes=3, min_nodes=2, shrink_after_s=3.0, steps=12, replaces=False, limit_ns=400 * S_NS
    )
    assert _run(1, plan).wrong is None


def test_where_fewer_could_not_resume_the_job_waits_for_the_machine_it_needs() -> None:
    """There is a store, and no checkpoint in it yet."""
    plan = RunPlan(
        nodes=3,
        min_nodes=2,
        shrink_after_s=3.0,
        store=True,
        steps=12,
        replaces=False,
        replace_ns=40 * S_NS,
        limit_ns=400 * S_NS,
    )
    job = SimJob(plan, World(1))
    watch(job)
    job.world.after(8 * S_NS, None, lambda: job.lose_machine(job.living_nodes()[-1]))
    assert job.run().wrong is None
    assert {node.exit_code for node in job.living_nodes()} == {0}
    assert any(
        event.kind == "restore-refused" for node in job.nodes for event in node.machine.events
    )
