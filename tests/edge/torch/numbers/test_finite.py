"""Whether tensors are finite: the quick way says what the slow way says."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepstep.edge.torch.numbers.finite import bad_names, norm_of, tensors_in

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int32]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2]
VALUES = [0.0, 1.0, -3.5, math.nan, math.inf, -math.inf, 6e4, 1e-30]


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.sampled_from(VALUES), max_size=5)),
        max_size=6,
    )
)
def test_the_names_are_those_of_tensors_with_a_value_that_is_not_finite(
    given_: list[tuple[torch.dtype, list[float]]],
) -> None:
    named = {}
    for number, (dtype, values) in enumerate(given_):
        whole = [0.0 if not math.isfinite(v) else v for v in values]
        exact = [int(v) for v in whole] if dtype is torch.int32 else values
        named[f"t{number}"] = torch.tensor(exact, dtype=None if dtype.itemsize == 1 else dtype)
        named[f"t{number}"] = named[f"t{number}"].to(dtype)
    wide = {n: t.float() if t.dtype.itemsize == 1 else t for n, t in named.items()}
    slow = [name for name, t in wide.items() if not bool(torch.isfinite(t).all())]
    assert bad_names(named) == slow


def test_a_norm_that_overflows_of_finite_values_is_finite() -> None:
    huge = torch.full((1000,), 1e19)  # the sum of their squares is not a float32
    assert norm_of([huge]) == pytest.approx(1e19 * math.sqrt(1000))
    assert bad_names({"huge": huge}) == []


def test_a_norm_of_half_precision_does_not_overflow() -> None:
    assert norm_of([torch.full((100,), 6e4, dtype=torch.float16)]) == pytest.approx(6e5, rel=0.01)


def test_the_norm_of_many_is_that_of_one() -> None:
    parts = [torch.randn(7, 3), torch.randn(5), torch.randn(())]
    whole = torch.cat([p.reshape(-1) for p in parts])
    assert norm_of(parts) == pytest.approx(float(whole.norm()))
    assert norm_of([]) == 0.0
    assert math.isnan(norm_of([*parts, torch.tensor([math.nan])]))


def test_sparse_gradients_have_values() -> None:
    bad = torch.sparse_coo_tensor([[0, 2]], [1.0, math.nan], (4,))
    assert bad_names({"bad": bad, "good": torch.ones(2)}) == ["bad"]


def test_tensors_are_found_wherever_they_are_in_a_batch() -> None:
    x, y = torch.ones(1), torch.zeros(2)
    found = dict(tensors_in({"a": [x, ("text", y)], "b": 3}))
    assert found == {"['a'][0]": x, "['a'][1][1]": y}
