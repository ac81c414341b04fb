"""Layouts: every tensor has its own place, and a layout survives being written down."""

from __future__ import annotations

import json
from dataclasses import asdict

from hypothesis import given
from hypothesis import strategies as st

from keepstep.model.layout import (
    ALIGN_BYTES,
    Layout,
    Shard,
    TensorSpec,
    difference,
    lay_out,
    layout_from_text,
)

dims = st.lists(st.integers(0, 9), max_size=3).map(tuple)
shards = st.none() | st.builds(Shard, dims, dims)
specs = st.builds(
    TensorSpec,
    st.text(max_size=8),
    st.sampled_from(["float32", "bfloat16"]),
    dims,
    st.integers(0, 300),
    st.none() | dims,
    shards,
)
layouts = st.lists(specs, max_size=8).map(lay_out)


def spec(
    name: str, shape: tuple[int, ...] = (2, 3), dtype: str = "float32", shard: Shard | None = None
) -> TensorSpec:
    return TensorSpec(name, dtype, shape, 24, None, shard)


@given(layouts)
def test_segments_are_aligned_in_order_and_apart(layout: Layout) -> None:
    end = 0
    for segment in layout.segments:
        assert segment.offset % ALIGN_BYTES == 0 and end <= segment.offset < end + ALIGN_BYTES
        end = segment.end
    assert end <= layout.objects_offset < end + ALIGN_BYTES


@given(layouts)
def test_it_comes_back_from_json(layout: Layout) -> None:
    back = layout_from_text(json.dumps(layout.to_json()).encode(), "here")
    assert back == layout and back.hash() == layout.hash()


@given(layouts)
def test_json_has_every_field_of_a_segment_in_order(layout: Layout) -> None:
    """In order, for the hash: slots of another release are compared by it."""
    written = json.dumps(layout.to_json()["segments"])
    assert written == json.dumps([asdict(segment) for segment in layout.segments])


@given(layouts, layouts)
def test_hashes_are_equal_exactly_for_equal_layouts(one: Layout, other: Layout) -> None:
    assert (one.hash() == other.hash()) is (one.segments == other.segments)


@given(layouts)
def test_a_layout_does_not_differ_from_itself(layout: Layout) -> None:
    assert difference(layout, layout) == []


def test_differences_name_what_is_saved_and_what_is_live() -> None:
    live = lay_out([spec("a"), spec("b"), spec("c"), spec("d", shard=Shard((4, 3), (2, 0)))])
    saved = lay_out(
        [
            spec("a"),
            spec("b", (3, 2)),
            spec("c", dtype="int8"),
            spec("d", shard=Shard((4, 3), (0, 0))),
            spec("e"),
        ]
    )
    assert difference(live, saved) == [
        "b: saved float32[3, 2], live float32[2, 3]",
        "c: saved int8[2, 3], live float32[2, 3]",
        "d: saved float32[2, 3], part of [4, 3] at [0, 0], live float32[2, 3], part of "
        "[4, 3] at [2, 0]",
        "e: saved float32[2, 3], live nothing",
    ]
    assert difference(lay_out([spec("x")]), lay_out([])) == ["x: saved nothing, live float32[2, 3]"]


def test_many_differences_are_counted() -> None:
    assert difference(lay_out([spec(str(i)) for i in range(9)]), lay_out([]))[5:] == ["and 4 more"]
