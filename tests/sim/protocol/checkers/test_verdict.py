"""Verdicts: who gives up must have a reason."""

from __future__ import annotations

from keepstep.sim.protocol import swarm


def test_a_run_may_give_up_that_another_one_of_its_job_has_overtaken() -> None:
    """It has lost its machines and gone on from the store. The run of yesterday loses its memory,
    too, and does so after it: what the first one stores would not count any more."""
    assert swarm.run(10109475).wrong is None
