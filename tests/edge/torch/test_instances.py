"""Instances of a class: those from before it was watched, and each that comes, however it comes."""

from __future__ import annotations

import copy
import pickle

import torch

from keepstep.edge.torch.instances import instances, watch


class Counter:
    def __init__(self, count: int, step: int = 1) -> None:
        self.count, self.step = count, step


class Coarse(Counter):
    pass


class Named:
    def __new__(cls, name: str) -> Named:
        new = super().__new__(cls)
        new.label = name  # type: ignore[attr-defined]
        return new


def test_all_are_known_however_they_came_and_only_while_they_live() -> None:
    before = Counter(1)
    below = Coarse(2, step=10)
    watch(Counter)
    new = Counter(3, step=2)
    newer = Coarse(4)
    known = [before, below, new, newer, copy.deepcopy(new), pickle.loads(pickle.dumps(below))]

    class Late(Counter):
        pass

    known.append(Late(5))
    assert {id(found) for found in instances(Counter)} == {id(each) for each in known}
    assert [(each.count, each.step) for each in known[:4]] == [(1, 1), (2, 10), (3, 2), (4, 1)]
    del newer, known[3:]
    assert {found.count for found in instances(Counter)} == {1, 2, 3}


def test_a_class_that_makes_its_objects_itself_still_does() -> None:
    first = Named("first")
    watch(Named)
    second = Named("second")
    assert sorted(found.label for found in instances(Named)) == ["first", "second"]
    assert second is not first


def test_what_is_not_watched_is_searched_for() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert schedule in instances(torch.optim.lr_scheduler.LRScheduler)
