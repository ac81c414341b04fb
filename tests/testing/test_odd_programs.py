"""Healthy trainings that look wrong to a naive eye look right to the guard, in every step."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from keepstep.core.numbers.spikes import Spikes
from keepstep.edge.torch.membership import Membership
from keepstep.edge.torch.numbers.copied import KnownBad
from keepstep.edge.torch.numbers.guard import Guard
from keepstep.edge.torch.state import Protected
from keepstep.testing.odd_programs import PROGRAMS

STEPS = 420


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_nothing_is_wrong_with_it(name: str) -> None:
    torch.manual_seed(7)
    program = PROGRAMS[name]()
    protected = Protected.of(program.protected, True)
    protected.known_bad = KnownBad()
    guard = Guard(protected, Membership(), 1, Spikes())
    for optimizer in protected.optimizers:
        optimizer.register_step_pre_hook(guard.before_update)
    meant = 0
    for step in range(STEPS):
        guard.begin(is_watched=False)
        loss = program.body(step)
        assert guard.end(loss) == (), f"step {step}"
        guard.accept()
        if step % 50 == 49 and (bad := guard.bad_state()):
            assert bad.may_be_meant, bad
            meant += 1
            guard.learn()
    assert meant == (1 if name == "late_masks" else 0)
    assert math.isfinite(sum(float(p.sum()) for p in guard._parameters()) or 0) or meant
