"""Known torch: tensors that are pickled as a whole, placements and the like, made from what a
pickle says.

torch's own functions take more memory for a tensor that is said to be larger than its own, and
unpickle memory that is within a pickle with everything.
"""

from __future__ import annotations

import collections
import io
from collections.abc import Callable
from functools import cache
from importlib import import_module
from operator import index
from typing import Any

import torch

from keepstep.edge.torch.pickles.checked import Unfilled
from keepstep.errors import UntrustedError

PLACEMENTS = "torch.distributed.tensor.placement_types"

_compressed: Any = torch.sparse_compressed_tensor

TORCHS_VALUES = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)


def _layout(name: str) -> torch.layout:
    found = getattr(torch, str(name).removeprefix("torch."))
    if not isinstance(found, torch.layout):
        raise UntrustedError(f"expected a layout, found {name!r}")
    return found


def _storage(raw: bytes) -> Any:
    """A tensor's memory within a pickle: torch itself would unpickle it with everything."""
    return torch.load(io.BytesIO(raw), weights_only=True)


def _tensor(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    _hooks: Any = None,
    views: Any = None,
) -> torch.Tensor:
    """`views`: whether it is a conjugate or negative view of its memory, where it is one."""
    _check_inside(storage, offset, size, stride)
    hooks: collections.OrderedDict[Any, Any] = collections.OrderedDict()
    if views is not None and not (isinstance(views, dict) and views.keys() <= {"conj", "neg"}):
        raise UntrustedError(f"expected a tensor's conj and neg, found {views!r}")
    how = None if views is None else {name: bool(is_one) for name, is_one in views.items()}
    return torch._utils._rebuild_tensor_v2(
        storage, offset, size, stride, bool(requires_grad), hooks, how
    )


def _quantized(
    storage: Any, offset: Any, size: Any, stride: Any, quantizer: Any, requires_grad: Any, *_: Any
) -> torch.Tensor:
    _check_inside(storage, offset, size, stride)
    hooks: collections.OrderedDict[Any, Any] = collections.OrderedDict()
    return torch._utils._rebuild_qtensor(
        storage, offset, size, stride, quantizer, bool(requires_grad), hooks
    )


def _check_inside(storage: Any, offset: Any, size: Any, stride: Any) -> None:
    """A tensor outside of its memory would take more."""
    if not isinstance(storage, torch.storage.TypedStorage):
        raise UntrustedError(f"expected a tensor's memory, found a {type(storage).__name__}")
    sizes, strides = list(map(index, size)), list(map(index, stride))
    last = index(offset) + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    is_empty = 0 in sizes
    if min((index(offset), *sizes, *strides)) < 0 or not (is_empty or last < storage._size()):
        raise UntrustedError("the saved state has a tensor that is larger than its memory")


def _parameter(data: torch.Tensor, requires_grad: Any, *_: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(_a_tensor(data), bool(requires_grad))


def _a_tensor(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise UntrustedError(f"expected a tensor, found a {type(value).__name__}")
    return value


def _sparse(layout: torch.layout, data: Any) -> torch.Tensor:
    """torch's own function makes it at once and leaves the look at its indices for later."""
    if type(data) not in (tuple, list):
        raise UntrustedError(f"expected a tensor's parts, found a {type(data).__name__}")
    if layout is not torch.sparse_coo:
        *parts, size = data
        return _compressed(*parts, size, layout=layout, check_invariants=True)
    indices, values, size = data[:3]
    made = torch.sparse_coo_tensor(indices, values, size, check_invariants=True)
    return made._coalesced_(bool(data[3])) if len(data) > 3 else made


def _nested(buffer: Any, sizes: Any, strides: Any, offsets: Any) -> torch.Tensor:
    """Each of the tensors in it lies within its memory."""
    told = [_a_tensor(part) for part in (sizes, strides, offsets)]
    if _a_tensor(buffer).dim() != 1 or any(part.dtype != torch.int64 for part in told):
        raise UntrustedError("expected the memory and the shapes of a nested tensor")
    shapes = zip(*(part.tolist() for part in told), strict=True)
    for size, stride, offset in shapes:
        last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        is_inside = 0 in size or last < buffer.numel()
        if min((offset, *size, *stride)) < 0 or not is_inside:
            raise UntrustedError("the saved state has a tensor that is larger than its memory")
    return torch._utils._rebuild_nested_tensor(buffer, sizes, strides, offsets)


def _named_results(kind: type) -> Callable[..., Any]:
    """What torch's functions give that have several results."""

    def make(results: Any, more: Any = None) -> Any:
        if type(results) is not tuple or more:
            raise UntrustedError(f"expected the results of torch.{kind.__name__}")
        return kind(results)

    return make


RESULTS: dict[tuple[str, str], tuple[Any, Callable[..., Any]]] = {
    ("torch.return_types", name): (kind, _named_results(kind))
    for name, kind in vars(torch.return_types).items()
    if isinstance(kind, type) and issubclass(kind, tuple)
}

# By the name of torch's function, what is done in its place.
FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    (found.__module__, found.__name__): call
    for found, call in (
        (torch.serialization._get_layout, _layout),
        (torch.storage._load_from_bytes, _storage),
        (torch._utils._rebuild_tensor_v2, _tensor),
        (torch._utils._rebuild_qtensor, _quantized),
        (torch._utils._rebuild_parameter, _parameter),
        (torch._utils._rebuild_sparse_tensor, _sparse),
        (torch._utils._rebuild_nested_tensor, _nested),
    )
}


@cache
def placements() -> dict[str, type]:
    """By name. Only who finds one in a pickle imports them, which takes a second."""
    if not torch.distributed.is_available():
        return {}
    placed = import_module(PLACEMENTS)
    names = ("Shard", "Replicate", "Partial", "_StridedShard")
    return {name: getattr(placed, name) for name in names if hasattr(placed, name)}


def unfilled_placement(kind: type) -> Any:
    """torch's own crash the process when they are looked at without a state."""
    if kind is placements()["Replicate"]:
        return kind()  # which has none

    def fill(state: Any) -> Any:
        if not isinstance(state, dict) or not all(type(v) in (int, str) for v in state.values()):
            raise UntrustedError("expected the dimension of a placement")
        return kind(**state)

    return Unfilled(fill)


def build_placement(made: Any, state: Any) -> None:
    """Of one that has no state."""
    if state not in (None, {}):
        raise UntrustedError(f"the saved state changes a {type(made).__name__}")
