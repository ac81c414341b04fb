"""Whose a file is whose lines name nobody, beside files that name their rank."""

from __future__ import annotations

import pytest

from keepstep.core.postmortem.places import rank_beside, rank_columns


@pytest.mark.parametrize(
    ("alone", "path", "rank"),
    [
        ({"worker-5.log": 5}, "worker-4.log", 4),
        ({"a/job-17/w3.log": 3, "a/job-17/w5.log": 5}, "a/job-17/w4.log", 4),
        ({"node-0.log": 0}, "node-1.log", None),  # rank 0 speaks for its node
        ({"node-1.log": 8}, "node-2.log", None),  # several ranks in a file
        ({"worker-5.log": 5, "worker-6.log": 2}, "worker-4.log", None),
        ({"run-5-node-0.log": 5}, "run-5-node-1.log", None),  # the number of the run
        ({"job5/w5.log": 5}, "job5/w4.log", None),  # one or the other
        ({"worker-5.log": 5}, "driver.log", None),
        ({}, "worker-4.log", None),
    ],
)
def test_by_the_files_beside_it(alone: dict[str, int], path: str, rank: int | None) -> None:
    assert rank_beside(path, rank_columns(alone)) == rank
