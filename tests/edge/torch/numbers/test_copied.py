"""Looks at copies: all that has floating point, each time, and nothing is worked out anew for a
copy of the same tensors."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from keepstep.edge.torch.numbers.copied import CopiedSpan, KnownBad
from keepstep.edge.torch.state import Protected


def training(layers: int) -> tuple[Protected, nn.Module]:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    protected = Protected.of({"model": model, "optimizer": optimizer}, lazy=True)
    optimizer.register_step_post_hook(protected.used_gradients.updated)
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    return protected, model


def test_parameters_and_the_optimizers_state_are_looked_at_in_each_copy() -> None:
    protected, _ = training(20)
    state, known = protected.gather(), KnownBad(["optimizer"])
    looked_at = {item.spec.name for item, _ in known.of(state.copies).pairs}
    lazy = {item.spec.name for copies in state.copies for item, _ in copies.lazy.pairs}
    assert looked_at == lazy
    assert sum(name.startswith("model.") for name in lazy) == 40
    assert sum("exp_avg" in name for name in lazy) == 80


def test_the_same_tensors_are_not_gone_through_again() -> None:
    protected, _ = training(3)
    known = KnownBad(["optimizer"])
    found = []
    for _ in range(2):
        state = protected.gather()
        assert not any(copies.lazy.pairs for copies in state.copies[1:])
        found.append(known.of(state.copies))
    assert found[0] is found[1]


def test_what_came_later_lies_behind_and_is_looked_at() -> None:
    protected, _ = training(2)
    known = KnownBad(["optimizer"])
    before = known.of(protected.gather().copies)
    kept, *others = protected.gather().copies
    more, _ = training(1)
    both = known.of((kept, *others, more.gather().copies[0]))
    assert both.pairs[: len(before.pairs)] == before.pairs
    assert len(both.pairs) > len(before.pairs) and len(both.spans) > len(before.spans)


@given(
    st.lists(st.integers(0, 400), min_size=2, max_size=2, unique=True).map(sorted),
    st.sets(st.integers(0, 12)),
)
def test_of_a_span_exactly_the_blocks_that_are_kept_are_left(
    ends: list[int], lacking: set[int]
) -> None:
    begin, end = (4 * at for at in ends)
    pieces = list(CopiedSpan(torch.float32, begin, end).kept(lacking, 128))
    found = [at for piece in pieces for at in range(piece.begin, piece.end)]
    assert found == [at for at in range(begin, end) if at // 128 not in lacking]
