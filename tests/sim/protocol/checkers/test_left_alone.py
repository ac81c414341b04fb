"""Who trains is left alone, however its ranks were lost; and who is not is found out."""

from __future__ import annotations

import pytest

from keepstep.model.units import MS_NS, S_NS
from keepstep.runtime.agent.rank_group import RankGroup
from keepstep.sim.protocol.job.job import SimJob, SimOutcome
from keepstep.sim.protocol.job.plan import RunPlan
from keepstep.sim.protocol.swarm import watch
from keepstep.sim.protocol.world.world import World

PLAN = RunPlan(nodes=1, ranks_per_node=2, policy="none", steps=30, limit_ns=300 * S_NS)


def _run(apart_ns: int) -> SimOutcome:
    """Both ranks are killed in the midst of training, one so long after the other."""
    job = SimJob(PLAN, World(1))
    watch(job)

    def kill(rank: int) -> None:
        for program in list(job.around.programs.values()):
            if program.who.rank == rank:
                program.process.end("killed")
        job.struck(f"killed rank {rank}")

    job.world.after(8 * S_NS, None, kill, 1)
    job.world.after(8 * S_NS + apart_ns, None, kill, 0)
    return job.run()


@pytest.mark.parametrize("apart_ms", [0, 1, 5, 50, 150, 400, 3000])
def test_ranks_that_have_all_died_are_restarted_once(apart_ms: int) -> None:
    assert _run(apart_ms * MS_NS).wrong is None


def test_a_restart_of_ranks_that_train_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankGroup, "_nobody_stays", lambda self: None)
    found = [_run(ms * MS_NS).wrong for ms in (1, 5, 50, 150)]
    assert any(wrong and wrong.startswith("who trains is left alone") for wrong in found), found
