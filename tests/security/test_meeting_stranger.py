"""A stranger where nodes meet: writes, overwrites and deletes what it likes, and can neither read
the job's secret, nor join, stop or end it."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from keepstep.model.attempts import Arrival, Verdict
from keepstep.runtime.agent.meeting_record import _encode
from tests.processes.test_run_nodes import until
from tests.security.two_nodes import SECRET, Job, job, machines

__all__ = ["job", "machines"]  # fixtures
pytestmark = pytest.mark.timeout(200)

PREFIX = f"keepstep/{os.getuid()}/t/"
STOP = _encode(Verdict("stop", "a stranger says so"))
SEAT = _encode(Arrival("stranger", "127.0.0.99", 9, 1, ranks=1, nodes=2))


def test_a_stranger_reads_no_secret_and_does_not_join_or_stop_it(job: Job) -> None:
    job.start().wait_for("nodes-awaited")
    store = TCPStore("127.0.0.1", job.machines.port, is_master=False, timeout=timedelta(seconds=30))
    before = values(store)
    store.set(f"{PREFIX}0/verdict", STOP)
    store.set(f"{PREFIX}0/seat/1", SEAT)
    store.set(f"{PREFIX}1/verdict", STOP)
    second = job.start()
    job.hold()
    assert second.wait_for("attempt-formed").data["world_size"] == 2
    found = values(store)
    assert before and not [text for text in (*before.values(), *found.values()) if SECRET in text]

    for key in found:
        if "verdict" in key or "leader" in key:
            store.set(key, STOP)
        else:
            store.delete_key(key)
    store.set(f"{PREFIX}0/verdict", STOP)
    for node in job.nodes:
        until(lambda node=node: node.events("stranger-refused"), "that a stranger is told of")
    job.end()
    for node in job.nodes:
        assert not node.events("ranks-restarted")
        assert "a stranger says so" not in node.wait_for("job-ended").why
        assert len(node.events("attempt-formed")) == 1


def values(store: TCPStore) -> dict[str, str]:
    """All that stands there."""
    mine = [key for key in store.list_keys() if key.startswith(PREFIX)]
    return {key: store.get(key).decode(errors="replace") for key in mine}
