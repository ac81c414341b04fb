"""A stranger where nodes meet: writes, overwrites and deletes what it likes, and can neither read
the job's secret, nor join, stop or end it."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from keepstep.model.attempts import Arrival, Opening, Verdict
from keepstep.runtime.agent.meeting_record import OPENING, _encode
from keepstep.runtime.agent.signed_kv import WordSeal
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


def test_what_was_said_in_an_earlier_run_under_the_same_secret_ends_nothing(job: Job) -> None:
    """Word for word, with its signature, as whoever reads there can write it down: that the first
    attempt stops, before it has begun and while it lives; and the opening of that time."""
    hour_ago = (time.time_ns() - 3600 * 10**9) // 10**6
    seal = WordSeal(SECRET, "t")
    stop = seal.sign("0/verdict", f"{hour_ago:016x}{STOP}")
    opening = seal.sign(OPENING, _encode(Opening(None, hour_ago)))
    job.start().wait_for("nodes-awaited")
    store = TCPStore("127.0.0.1", job.machines.port, is_master=False, timeout=timedelta(seconds=30))
    store.set(f"{PREFIX}0/verdict", stop)
    job.start()
    job.hold()
    store.set(f"{PREFIX}0/verdict", stop)
    store.set(f"{PREFIX}{OPENING}", opening)
    until(
        lambda: store.get(f"{PREFIX}{OPENING}").decode() != opening,
        "that the opening is said again",
    )
    job.end()
    for node in job.nodes:
        assert not node.events("ranks-restarted") and len(node.events("attempt-formed")) == 1
        assert "a stranger says so" not in node.wait_for("job-ended").why
    told = [event.why for node in job.nodes for event in node.events("stranger-refused")]
    assert len(told) <= 2 and all("before the nodes met this time" in why for why in told) and told


def values(store: TCPStore) -> dict[str, str]:
    """All that stands there."""
    mine = [key for key in store.list_keys() if key.startswith(PREFIX)]
    return {key: store.get(key).decode(errors="replace") for key in mine}
