"""Parts: what nodes say to each other through the store is taken as they said it, and only by the
attempt it belongs to."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.edge.store.manifest import FileSum
from keepstep.edge.store.parts import (
    CheckpointPart,
    PartItem,
    Sketch,
    part_from_bytes,
    part_to_bytes,
    survey_from_bytes,
    survey_to_bytes,
)
from keepstep.errors import DamageError, IdentityError
from keepstep.model.checkpoint import CheckpointAttempt
from keepstep.model.layout import Shard
from keepstep.model.snapshot import Stamp

ATTEMPT = CheckpointAttempt("job", Stamp(7, 2), 1234, (2, 3))
WEIGHT = Sketch(("model", "w", 0), "ab" * 16, 48, "float32", (3, 4), Shard((6, 4), (3, 0)))
SURVEY = {
    2: {"model.w.0": WEIGHT, "mine": Sketch(("mine",), "00" * 16, 3)},
    3: {"model.w.0": WEIGHT},
    4: {},
}
FILES = {"__2_1234.distcp": FileSum(9, 4, ("0" * 16, "1" * 16, "2" * 16))}
PART = CheckpointPart(
    {"loss": 0.5, "bad": math.inf},
    {"model": ["a", None]},
    FILES,
    (PartItem(2, "model.w.0", (3, 0), "__2_1234.distcp", 5, 4),),
)

numbers = st.integers(0, 2**50)
shapes = st.lists(st.integers(0, 2**40), max_size=3).map(tuple)
sketches = st.builds(
    Sketch,
    path=st.lists(st.text(max_size=4) | st.integers(0, 9), max_size=3).map(tuple),
    digest=st.text("0123456789abcdef", min_size=32, max_size=32),
    bytes=numbers,
    dtype=st.none() | st.sampled_from(["float32", "bfloat16"]),
    shape=shapes,
    shard=st.none() | st.builds(Shard, shapes, shapes),
)
surveys = st.fixed_dictionaries(
    {rank: st.dictionaries(st.text(max_size=5), sketches, max_size=3) for rank in (2, 3, 4)}
)
items = st.builds(
    PartItem,
    st.integers(2, 4),
    st.text(max_size=5),
    st.none() | shapes,
    st.from_regex(r"__[0-9]_[0-9]{1,4}\.distcp", fullmatch=True),
    numbers,
    numbers,
)


@given(surveys)
def test_a_survey_says_the_same_after_a_round_trip(survey: dict[int, dict[str, Sketch]]) -> None:
    found = survey_from_bytes(survey_to_bytes(ATTEMPT, 1, survey), "here", ATTEMPT, 1)
    assert found == survey
    assert [s.path for rank in survey for s in survey[rank].values()] == [
        found[rank][n].path for rank in survey for n in survey[rank]
    ]


@given(st.lists(items, max_size=4).map(tuple))
def test_a_part_says_the_same_after_a_round_trip(found: tuple[PartItem, ...]) -> None:
    part = replace(PART, items=found)
    assert part_from_bytes(part_to_bytes(ATTEMPT, 1, part), "here", ATTEMPT, 1) == part


def test_every_single_bit_and_every_cut_of_both_is_guarded() -> None:
    both = (
        (survey_to_bytes(ATTEMPT, 1, SURVEY), survey_from_bytes),
        (part_to_bytes(ATTEMPT, 1, PART), part_from_bytes),
    )
    for raw, read in both:
        read(raw, "here", ATTEMPT, 1)
        for bit in range(8 * len(raw)):
            damaged = bytearray(raw)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(DamageError):
                read(bytes(damaged), "here", ATTEMPT, 1)
        for length in range(len(raw)):
            with pytest.raises(DamageError):
                read(raw[:length], "here", ATTEMPT, 1)


@pytest.mark.parametrize(
    ("other", "node", "words"),
    [
        (replace(ATTEMPT, job="other"), 1, "expected job 'job', found 'other'"),
        (replace(ATTEMPT, stamp=Stamp(8, 2)), 1, "expected step 7, found 8"),
        (replace(ATTEMPT, stamp=Stamp(7, 3)), 1, "expected epoch 2, found 3"),
        (replace(ATTEMPT, number=99), 1, "expected attempt 1234, found 99"),
        (replace(ATTEMPT, ranks=(2, 3, 1)), 1, r"expected ranks \[2, 3\], found \[2, 3, 1\]"),
        (replace(ATTEMPT, ranks=(2, 3)), 0, "expected node 1, found 0"),
    ],
    ids=["job", "step", "epoch", "attempt", "ranks", "node"],
)
def test_what_belongs_to_another_attempt_is_refused(
    other: CheckpointAttempt, node: int, words: str
) -> None:
    with pytest.raises(IdentityError, match=words):
        survey_from_bytes(survey_to_bytes(other, node, {}), "here", ATTEMPT, 1)
    with pytest.raises(IdentityError, match=words):
        part_from_bytes(part_to_bytes(other, node, PART), "here", ATTEMPT, 1)


@given(st.integers(0, 2**63), st.integers(0, 2**63), st.integers(0, 5))
def test_an_attempt_has_names_of_its_own(mine: int, other: int, index: int) -> None:
    attempt, stranger = replace(ATTEMPT, number=mine), replace(ATTEMPT, number=other)
    for names in (
        CheckpointAttempt.survey_name,
        CheckpointAttempt.part_name,
        CheckpointAttempt.data_name,
    ):
        assert (names(attempt, index) == names(stranger, index)) == (mine == other)
    assert (attempt.name.directory == stranger.name.directory) == (mine == other)


def test_ranks_are_numbered_node_by_node() -> None:
    assert [list(ATTEMPT.ranks_of(node)) for node in (0, 1)] == [
        [0, 1],
        [2, 3, 4],
    ] and ATTEMPT.world_size == 5
