"""What every rank gives reaches all, also where numpy is not installed: torch does not bring it."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from keepstep.edge.torch import process_groups
from keepstep.edge.torch.process_groups import gather_objects

OBJECTS: list[Any] = [{"a": [1, 2.5]}, ("longer than the other one" * 100, None)]


class TwoRanks:
    """Threads, each with a gloo group of its own, in place of torch's one of a process."""

    def __init__(self) -> None:
        self.store, self.groups = dist.HashStore(), threading.local()

    def all_run(self, act: Callable[[int], Any]) -> list[Any]:
        found: list[Any] = [None, None]

        def one(rank: int) -> None:
            self.groups.own = dist.ProcessGroupGloo(self.store, rank, 2)
            found[rank] = act(rank)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return found

    def get_world_size(self) -> int:
        return 2

    def all_gather(self, found: list[Any], mine: Any) -> None:
        self.groups.own.allgather([found], [mine]).wait()


def test_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        process_groups.importlib.util,
        "find_spec",
        lambda name: None if name == "numpy" else find(name),
    )
    ranks = TwoRanks()
    monkeypatch.setattr(process_groups, "process_group", lambda: ranks)
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert ranks.all_run(lambda rank: gather_objects(OBJECTS[rank])) == [OBJECTS, OBJECTS]
