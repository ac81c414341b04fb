"""Known: plain values come back as they were; hostile ones do nothing."""

from __future__ import annotations

import argparse
import array
import datetime
import decimal
import fractions
import io
import pathlib
import pickle
import random
import tracemalloc
import types
import uuid
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from keepstep.edge.torch.pickles.checked import load_pickles, load_torch
from keepstep.edge.torch.pickles.known import Known
from keepstep.errors import UntrustedError
from keepstep.model.units import MIB
from tests.edge.torch.pickles.hostile import LYING, RUNNING, Text

MEMORY_BYTES = 32 * MIB


def read(raw: bytes) -> Any:
    (found,) = load_pickles(raw, (1,), Known())
    return found


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def bits_of(value: Any) -> bytes:
    """The oracle: what Python's own pickler says of a value."""
    return pickle.dumps(value, 5)


PLAIN = [
    *(None, True, -1, 1 << 100, 1.5, float("nan"), 1j, "text", b"bytes", bytearray(b"bytes")),
    *(range(3, 9, 2), slice(1, None, 2), {1, 2}, frozenset((1, (2, 3))), (1, [2, {"a": ()}])),
    *(deque([1, 2], 3), Counter("aab"), OrderedDict(a=1), defaultdict(list, a=[1])),
    *(ChainMap({"a": 1}, {}), array.array("d", [1.5]), uuid.UUID(int=7)),
    datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
    *(datetime.date(2026, 1, 2), datetime.time(3), datetime.timedelta(1, 2, 3)),
    *(decimal.Decimal("1.20"), fractions.Fraction(-1, 3), pathlib.PurePosixPath("/a/b")),
    *(argparse.Namespace(a=1), types.SimpleNamespace(b=2), random.Random(3)),
    *(int, list, torch.Tensor, numpy.float32, torch.float16, torch.qint8, torch.strided),
    *(torch.device("cpu"), torch.Size([1, 2]), torch.per_tensor_affine),
    *(numpy.float32(1.5), numpy.bool_(True), numpy.datetime64("2026-01-02"), numpy.str_("a")),
    *(numpy.arange(6).reshape(2, 3), numpy.asfortranarray(numpy.ones((2, 3)))),
    *(numpy.zeros((0, 3)), numpy.array(1.0), numpy.array(["a", None], dtype=object)),
    numpy.array([(1, 2.0, "a")], dtype=[("i", "<i4"), ("f", "<f8", (1,)), ("u", "U3")]),
    numpy.array([(1, "a")], dtype=[("i", "<i4"), ("o", "O")]),
    *(numpy.dtype("<f8"), numpy.dtype("datetime64[s]"), numpy.dtype([("a", "<i4")])),
    *(numpy.random.default_rng(4), numpy.random.RandomState(5), numpy.random.Philox(6)),
]

PLACEMENTS = [Shard(1), Replicate(), Partial("avg")]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_a_plain_value_comes_back_bit_for_bit(value: Any) -> None:
    for protocol in (2, 4, 5):
        if not isinstance(value, torch.layout) or protocol > 2:
            found = read(pickle.dumps(value, protocol))
            assert type(found) is type(value)
            assert bits_of(found) == bits_of(pickle.loads(pickle.dumps(value, protocol)))


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_a_plain_value_comes_back_from_what_torch_has_saved(value: Any) -> None:
    whole = torch.load(io.BytesIO(saved(value)), weights_only=False)
    assert bits_of(load_torch(saved(value), Known())) == bits_of(whole)


def test_tensors_that_are_pickled_as_a_whole_come_back() -> None:
    quantized = torch._empty_affine_quantized([3], scale=0.1, zero_point=0, dtype=torch.qint8)
    sparse = torch.eye(3).to_sparse()
    for tensor in (torch.arange(3.0), torch.nn.Parameter(torch.ones(2)), quantized, sparse):
        for found in (read(pickle.dumps(tensor)), load_torch(saved(tensor), Known())):
            assert type(found) is type(tensor)
            assert found.dtype == tensor.dtype
            assert found.requires_grad == tensor.requires_grad
            assert torch.equal(_dense(found), _dense(tensor))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.dequantize() if tensor.is_quantized else tensor.detach().to_dense()


def test_placements_come_back_and_are_never_without_a_state() -> None:
    """torch's own are C++ objects, which crash who looks at an empty one."""
    whole = [*PLACEMENTS, PLACEMENTS[0]]
    for protocol in (2, 5):
        found = read(pickle.dumps(whole, protocol))
        assert found == whole
        assert found[0] is found[-1]
    (empty,) = read(
        Text().name(Shard.__module__, "Shard").value(()).do(pickle.NEWOBJ, pickle.TUPLE1).end()
    )
    assert not isinstance(empty, Shard)
    for state in ({"dim": []}, {"other": 1}, 7):
        text = Text().name(Shard.__module__, "Shard").value(()).do(pickle.NEWOBJ).value(state)
        with pytest.raises(UntrustedError):
            read(text.do(pickle.BUILD).end())


@pytest.mark.parametrize("name", RUNNING)
def test_what_would_run_is_refused_and_does_not_run(name: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    raw = RUNNING[name](mark)
    with pytest.raises(UntrustedError):
        read(raw)
    assert not mark.exists()


def test_what_would_run_would_run(tmp_path: Path) -> None:
    """That the pickles above are what they seem."""
    mark = tmp_path / "mark"
    pickle.loads(RUNNING["os.mkdir"](mark))
    assert mark.exists()


@pytest.mark.parametrize("name", LYING)
def test_what_lies_is_refused(name: str) -> None:
    with pytest.raises(UntrustedError):
        read(LYING[name])


def test_numpys_own_dtypes_are_never_changed() -> None:
    before = numpy.dtype("<f8").byteorder
    class_and_args = (numpy.dtype, ("f8", False, False))
    swap = (3, ">", None, None, None, -1, -1, 0)
    assert read(pickle.dumps(_Reduced((*class_and_args, swap)))).byteorder == ">"
    assert numpy.dtype("<f8").byteorder == before


class _Reduced:
    def __init__(self, reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


def test_a_class_that_nobody_knows_is_named_and_how_to_trust_it() -> None:
    with pytest.raises(UntrustedError) as refused:
        read(pickle.dumps(_Reduced((_Reduced, ((),)))))
    assert f"KEEPSTEP_TRUSTED_TYPES={__name__}._Reduced" in str(refused.value)


def test_torchs_archives_hold_no_program_and_nothing_larger_than_they_are(tmp_path: Path) -> None:
    script = io.BytesIO()
    torch.jit.save(torch.jit.trace(torch.nn.Linear(1, 1), torch.ones(1)), script)
    for raw in (script.getvalue(), pickle.dumps(1), b""):
        with pytest.raises(UntrustedError):
            load_torch(raw, Known())
    mark = tmp_path / "mark"
    with pytest.raises(UntrustedError):
        load_torch(saved(_Reduced((Path.mkdir, (mark,)))), Known())
    assert not mark.exists()


# -- properties

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.decimals()
    | st.fractions()
    | st.datetimes()
    | st.timedeltas()
    | st.uuids()
    | st.builds(numpy.float64, st.floats())
    | st.builds(numpy.array, st.lists(st.integers(-9, 9), max_size=4))
    | st.sampled_from([torch.float32, torch.Size([2]), torch.device("cpu"), range(4), slice(2)])
)
keys = st.integers() | st.text() | st.tuples(st.integers(), st.text())
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner, max_size=4)
        | st.sets(keys, max_size=4)
        | st.frozensets(keys, max_size=4)
        | st.builds(deque, st.lists(inner, max_size=3))
        | st.builds(OrderedDict, st.dictionaries(keys, inner, max_size=3))
        | st.builds(types.SimpleNamespace, a=inner)
    ),
    max_leaves=20,
)


@given(value=values, protocol=st.sampled_from([2, 4, 5]))
def test_any_plain_value_comes_back_bit_for_bit(value: Any, protocol: int) -> None:
    raw = pickle.dumps(value, protocol)
    assert bits_of(read(raw)) == bits_of(pickle.loads(raw))


def reads_within_bounds(raw: bytes) -> None:
    tracemalloc.start()
    try:
        read(raw)
    except UntrustedError:
        pass
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak_bytes < MEMORY_BYTES


@settings(max_examples=300)
@given(raw=st.binary(max_size=200))
def test_random_bytes_are_read_or_refused(raw: bytes) -> None:
    reads_within_bounds(raw)


SEEDS = [pickle.dumps(value, protocol) for value in PLAIN for protocol in (2, 5)]
SEEDS += [raw for raw in LYING.values() if len(raw) < 1000]


@settings(max_examples=600)
@given(
    raw=st.sampled_from(SEEDS),
    changes=st.lists(st.tuples(st.integers(0, 999), st.binary(max_size=4)), min_size=1, max_size=4),
    cut=st.none() | st.integers(0, 400),
)
def test_changed_pickles_are_read_or_refused(
    raw: bytes, changes: list[tuple[int, bytes]], cut: int | None
) -> None:
    changed = bytearray(raw)
    for at, new in changes:
        begin = at % (len(changed) + 1)
        changed[begin : begin + len(new)] = new
    reads_within_bounds(bytes(changed[:cut]))


@pytest.mark.parametrize(
    ("sizes", "strides", "offsets"),
    [([[3]], [[1]], [3]), ([[3]], [[3]], [0]), ([[-1]], [[1]], [0]), ([[2]], [[1]], [-1])],
)
def test_a_nested_tensor_does_not_reach_beyond_its_memory(
    sizes: list[Any], strides: list[Any], offsets: list[int]
) -> None:
    told = (torch.tensor(sizes), torch.tensor(strides), torch.tensor(offsets))
    with pytest.raises(UntrustedError, match="larger than its memory"):
        Known().call(Known().find("torch._utils", "_rebuild_nested_tensor"), (torch.ones(5), *told))
