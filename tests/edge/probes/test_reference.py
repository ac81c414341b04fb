"""Fixed work where processes run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from keepstep.edge.probes import reference
from keepstep.model.units import S_NS

WITHIN_NS = 60 * S_NS


@contextmanager
def pinned(processor: int) -> Iterator[int]:
    """A process that waits there."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as waits:
        os.sched_setaffinity(waits.pid, {processor})
        yield waits.pid


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor")
def test_each_ranks_processors_are_measured() -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        pids = {rank: stack.enter_context(pinned(p)) for rank, p in enumerate((first, second))}
        found = reference.measure(pids, WITHIN_NS)
    assert {rank: work.processors for rank, work in found.items()} == {0: {first}, 1: {second}}
    for work in found.values():
        assert len(work.tries_ns) == reference.TRIES and min(work.tries_ns) > 0


def test_who_is_gone_is_left_out() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    found = reference.measure({0: os.getpid(), 1: gone.pid}, WITHIN_NS)
    assert set(found) == {0}


def test_what_takes_too_long_is_nothing() -> None:
    assert reference.measure({0: os.getpid()}, 1) == {}
