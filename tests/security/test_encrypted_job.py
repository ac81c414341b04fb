"""A job whose keepers encrypt what they send each other: it ends well, and no node that is told
otherwise is part of it."""

from __future__ import annotations

import pytest

from keepstep.config import job_dir_of
from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.edge.shm.memory import MEMORY
from tests.processes.test_run_nodes import until
from tests.security.two_nodes import Job, job, machines

__all__ = ["job", "machines"]  # fixtures
pytestmark = pytest.mark.timeout(200)


def test_two_nodes_that_encrypt_keep_each_other_s_copies(job: Job) -> None:
    for _ in range(2):
        job.start("--encrypt")
    job.hold()
    for node in job.nodes:
        page = HorizonPage(MEMORY, job_dir_of(node.arena_dir, "t"), make=False)
        until(lambda page=page: page.last().committed, "a step of which each has the other's copy")
        page.close()
    job.end()
    assert not [why for node in job.nodes for why in node.events("node-lost")]


@pytest.mark.parametrize("first", [True, False])
def test_a_node_that_is_told_otherwise_is_refused_by_name(job: Job, first: bool) -> None:
    encrypts = job.start(*(["--encrypt"] if first else []))
    encrypts.wait_for("nodes-awaited")
    code, said = job.start(*([] if first else ["--encrypt"])).ended()
    expected, found = ("on", "off") if first else ("off", "on")
    assert code != 0
    assert (
        f"encrypt: expected {expected}, as on the node that came first, found {found}: set it on "
        "every node or on none"
    ) in said


def test_without_a_secret_nothing_is_encrypted_and_nothing_starts(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KEEPSTEP_SECRET")
    code, said = job.start("--encrypt").ended()
    assert code != 0 and "encrypt: expected a `secret` of the job's own, found none" in said
