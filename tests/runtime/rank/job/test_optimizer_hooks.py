"""What of an optimizer's step is its update: all that it calls, whenever that was registered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from keepstep.model.step_work import Section
from keepstep.runtime.rank.job.optimizer_hooks import OptimizerHooks


class FakeMeasure:
    def __init__(self) -> None:
        self.section = Section.COMPUTE

    def enter(self, section: Section) -> None:
        self.section = section

    def before_update(self) -> None:
        self.section = Section.HOOK

    def update_begun(self, *_: object) -> None:
        self.section = Section.UPDATE

    def updated(self, *_: object) -> None:
        self.section = Section.COMPUTE


def nothing(*_: object, **__: object) -> None:
    return None


def test_a_hook_from_before_protect_is_a_part_of_the_update_as_one_from_behind_it() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    measure, seen = FakeMeasure(), []

    def hook(*_: object) -> None:
        seen.append(measure.section)

    optimizer.register_step_pre_hook(hook)
    protected: Any = SimpleNamespace(
        optimizers=[optimizer], used_gradients=SimpleNamespace(updated=nothing), updates=nothing
    )
    rank: Any = SimpleNamespace(before_update=nothing, stalled=nothing)
    numbers: Any = SimpleNamespace(updated=nothing, before_update=nothing)
    driver: Any = None
    hooks = OptimizerHooks(protected, rank, driver, numbers, measure)  # type: ignore[arg-type]
    optimizer.register_step_pre_hook(hook)
    optimizer.step()
    assert seen == [Section.UPDATE] * 2 and measure.section is Section.COMPUTE
    hooks.remove()
    optimizer.step()
    assert seen[2:] == [Section.COMPUTE] * 2
