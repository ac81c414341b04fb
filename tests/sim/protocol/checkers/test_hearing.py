"""All is heard: a link that loses what was on its way when a connection broke is found out, one
that sends it again is not."""

from __future__ import annotations

import pytest

from keepstep.core.wire.delivery import Inbox, Outbox
from keepstep.model.units import S_NS
from keepstep.sim.protocol.job.plan import RunPlan
from keepstep.sim.protocol.swarm import run
from keepstep.sim.protocol.wire.network import Wires

PLAN = RunPlan(
    nodes=3,
    steps=20,
    wires=Wires(breaks=0.02),
    faults_until_ns=20 * S_NS,
    limit_ns=300 * S_NS,
)
NAME = "all is heard"


@pytest.mark.parametrize("seed", [1, 2])
def test_what_a_connection_loses_is_sent_again(seed: int) -> None:
    outcome = run(seed, PLAN)
    assert outcome.wrong is None


def test_what_is_not_sent_again_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outbox, "rewind", lambda self: None)
    outcome = run(1, PLAN)
    assert outcome.wrong is not None and outcome.wrong.startswith(NAME)


def test_what_comes_twice_is_no_word_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inbox, "is_new", lambda self, number: True)
    outcome = run(1, PLAN)
    assert outcome.wrong is not None and outcome.wrong.startswith(NAME)
