"""WritePlan: nothing is lost and nothing written twice, whatever the ranks have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.edge.store.parts import Sketch
from keepstep.edge.torch.dcp.plan import WritePlan, make_plan
from keepstep.errors import LayoutError
from keepstep.model.layout import Shard


def sketch(name: str, content: int) -> Sketch:
    """A value of one of a few contents: bytes, or tensors of several types and sizes."""
    dtype = [None, "float32", "float16"][content % 3]
    return Sketch(
        (name,), f"{content:032x}", 8 * content, dtype, () if dtype is None else (content, 2)
    )


ranks = st.lists(
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 5)).map(
        lambda d: {n: sketch(n, c) for n, c in d.items()}
    ),
    min_size=1,
    max_size=5,
)


def written(plan: WritePlan) -> list[tuple[str, int, str]]:
    """(name in the checkpoint, rank that writes it, the rank's own name for it)"""
    return [
        (i.index.fqn, rank, plan.own_names[rank][i.index.fqn])
        for rank, p in enumerate(plan.plans)
        for i in p.items
    ]


@given(ranks)
def test_every_value_of_every_rank_is_in_the_checkpoint_exactly_once(
    held: list[dict[str, Sketch]],
) -> None:
    plan = make_plan(held)
    names = [name for name, _, _ in written(plan)]
    assert len(names) == len(set(names)) and set(names) == set(plan.metadata.state_dict_metadata)
    content = {name: held[rank][own] for name, rank, own in written(plan)}
    for rank, own in enumerate(held):
        for name, value in own.items():
            assert content.get(f"ranks.{rank}.{name}", content[name]) == value
            assert content[name] == next(other[name] for other in held if name in other), (
                "the plain name is the lowest rank's"
            )


def test_replicas_are_spread_by_size() -> None:
    held = [
        {str(i): Sketch((str(i),), "0" * 32, 4000, "float32", (1000,)) for i in range(12)}
        for _ in range(4)
    ]
    assert [len(p.items) for p in make_plan(held).plans] == [3, 3, 3, 3]


def test_boxes_that_leave_a_gap_or_overlap_are_refused() -> None:
    def box(offset: int) -> dict[str, Sketch]:
        return {"w": Sketch(("w",), f"{offset:032x}", 8, "float32", (2,), Shard((4,), (offset,)))}

    make_plan([box(0), box(2)])
    for wrong in ([box(0)], [box(0), box(1)], [box(0), box(2), box(3)]):
        with pytest.raises(LayoutError):
            make_plan(wrong)
