"""Two tensors of every type, cut in every way, against torch's own arithmetic on the whole."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch

from keepstep.edge.torch.comparison import numbers, tensors
from keepstep.edge.torch.comparison.saved import SavedPart, SavedTensor
from keepstep.edge.torch.comparison.tensors import ApartError, Comparer
from keepstep.model.comparison import VALUE, TensorBox, TensorKind

TYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128),
]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few hundred values take several of each."""
    monkeypatch.setattr(tensors, "WINDOW_BYTES", 256)
    monkeypatch.setattr(numbers, "CHUNK_VALUES", 8)


def part(tensor: torch.Tensor, offsets: Sequence[int]) -> SavedPart:
    raw = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())

    def read_into(at: int, target: memoryview) -> None:
        assert at + len(target) <= len(raw)
        target[:] = raw[at : at + len(target)]

    return SavedPart(TensorBox(tuple(offsets), tuple(tensor.shape)), read_into)


def saved(tensor: torch.Tensor, cut: Callable[[torch.Tensor], list[SavedPart]]) -> SavedTensor:
    kind = TensorKind(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    return SavedTensor(kind, tuple(cut(tensor)))


def whole(tensor: torch.Tensor) -> list[SavedPart]:
    return [part(tensor, [0] * tensor.dim())]


def in_rows(tensor: torch.Tensor) -> list[SavedPart]:
    return [part(tensor[:5], (0, 0)), part(tensor[5:], (5, 0))]


def in_columns(tensor: torch.Tensor) -> list[SavedPart]:
    return [part(tensor[:, :7], (0, 0)), part(tensor[:, 7:], (0, 7))]


def drawn(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """13 rows of 11 values."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(13, 11, generator=generator, dtype=torch.float64) * 20
    return values.ne(0) if dtype is torch.bool else values.to(dtype)


def exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


@pytest.mark.parametrize("cut", [whole, in_rows, in_columns])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_one_changed_value_is_found_and_measured(
    dtype: torch.dtype, cut: Callable[[torch.Tensor], list[SavedPart]]
) -> None:
    rng = random.Random(f"{dtype}{cut.__name__}")
    a = drawn(dtype, 1)
    b = a.clone()
    row, column = rng.randrange(13), rng.randrange(11)
    b[row, column] = not a[row, column] if dtype is torch.bool else 3
    assert Comparer().difference(saved(a, whole), saved(a.clone(), cut)) is None
    found = Comparer().difference(saved(a, whole), saved(b, cut))
    assert found is not None
    x, y = exact(a), exact(b)
    assert (found.values, found.differing, found.unlike) == (143, 1, 0)
    assert found.max_abs == pytest.approx(float((x - y).abs().max()))
    assert found.norm_a == pytest.approx(float(torch.linalg.vector_norm(x)))
    assert found.norm_b == pytest.approx(float(torch.linalg.vector_norm(y)))
    assert found.drift == pytest.approx(float((x - y).norm() / x.norm()))


@pytest.mark.parametrize("cut", [whole, in_rows, in_columns])
def test_all_values_changed(cut: Callable[[torch.Tensor], list[SavedPart]]) -> None:
    a, b = drawn(torch.float32, 1), drawn(torch.float32, 2)
    found = Comparer().difference(saved(a, in_columns), saved(b, cut))
    assert found is not None and found.differing == 143
    assert found.max_abs == pytest.approx(float((exact(a) - exact(b)).abs().max()))


def test_what_is_not_finite_counts_and_leaves_the_numbers_alone() -> None:
    a = drawn(torch.float32, 1)
    a[0, 0], a[1, 1] = math.nan, math.inf  # the same on both sides
    b = a.clone()
    b[2, 2], b[3, 3] = math.nan, -math.inf
    b[4, 4] += 0.5
    found = Comparer().difference(saved(a, whole), saved(b, whole))
    assert found is not None
    assert (found.differing, found.unlike) == (3, 2)
    assert found.max_abs == pytest.approx(0.5, rel=1e-4)
    finite = exact(a)[exact(a).isfinite()]
    assert found.norm_a == pytest.approx(float(finite.norm()))


def test_equal_nans_are_equal_and_signs_of_zero_are_not() -> None:
    a = torch.full((13, 11), math.nan)
    assert Comparer().difference(saved(a, whole), saved(a.clone(), in_rows)) is None
    zero = torch.zeros(13, 11)
    b = zero.clone()
    b[7, 3] = -0.0
    found = Comparer().difference(saved(zero, whole), saved(b, whole))
    assert found is not None
    assert (found.differing, found.max_abs, found.drift) == (1, 0.0, 0.0)


@pytest.mark.parametrize(("a", "b"), [(2**60, 2**60 + 1), (2**32, 2**32 - 1), (-(2**61), 7)])
def test_long_integers_that_no_float_tells_apart(a: int, b: int) -> None:
    found = Comparer().difference(
        saved(torch.tensor([[a]]), whole), saved(torch.tensor([[b]]), whole)
    )
    assert found is not None and found.max_abs == float(abs(a - b))


def test_scalars_and_nothing() -> None:
    one = saved(torch.tensor(1.5), whole)
    found = Comparer().difference(one, saved(torch.tensor(2.0), whole))
    assert found is not None and (found.values, found.max_abs) == (1, 0.5)
    empty = saved(torch.zeros(0, 5), whole)
    assert Comparer().difference(empty, empty) is None


def test_values_are_bytes_without_numbers() -> None:
    parts = [SavedPart(TensorBox((0,), (600,)), part(torch.zeros(600), (0,)).read_into)]
    one = SavedTensor(TensorKind(VALUE, (600,)), tuple(parts))
    changed = torch.zeros(600)
    changed[10] = 1
    other = SavedTensor(
        one.kind, (SavedPart(TensorBox((0,), (600,)), part(changed, (0,)).read_into),)
    )
    found = Comparer().difference(one, other)
    assert found is not None and found.max_abs is None and found.differing == 2


def test_parts_with_nothing_in_common() -> None:
    tensor = drawn(torch.float32, 1)
    upper, lower = (saved(tensor, lambda t, i=i: [in_rows(t)[i]]) for i in (0, 1))
    with pytest.raises(ApartError):
        Comparer().difference(upper, lower)
    assert Comparer().difference(upper, saved(tensor, in_columns)) is None
