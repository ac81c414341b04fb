"""Reach: every tensor, generator and plain value that a running program can get at, hashed.

Comes in: the frame in which the program stands. Goes out: hashes by path. The search begins with
the modules of the program's own files and the variables of its running functions, and goes on
through containers, attributes, closures, defaults, bound methods, running generators and iterators.
An object is looked at once, under the shortest path. Never changes anything, draws no numbers.

Left out: gradients, which `protect` keeps where a step goes on from them; keepstep's own objects,
threads, locks, files, and what only C code reaches.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import random
import sys
import sysconfig
import types
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from keepstep.edge.torch.dcp.tree import raw_bytes
from keepstep.edge.torch.tree import is_plain
from keepstep.model.fingerprint import SeenValue

PLAIN = (int, float, complex, str, bytes, type(None))

_LEFT_OUT = frozenset(
    ("keepstep", "threading", "_thread", "queue", "socket", "logging", "weakref", "subprocess")
) | frozenset(("concurrent", "asyncio", "ssl", "tempfile", "io", "_io", "importlib", "typing"))
_INSTALLED = ("site-packages", "dist-packages")
_STANDARD = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib"))
_OURS = str(Path(__file__).parents[2])

Found = Iterator[tuple[str, Any]]  # a step of a path, and where it leads


def reach(
    frame: types.FrameType | None, modules: Iterable[types.ModuleType]
) -> dict[str, SeenValue]:
    """All that the program can get at from where it stands. `modules`: that are loaded."""
    queue = deque(_roots(frame, modules))
    seen: dict[str, SeenValue] = {}
    kept: dict[int, Any] = {}  # so that no number is given twice
    while queue:
        path, value = queue.popleft()
        is_plain_value = isinstance(value, PLAIN)
        if not is_plain_value and id(value) in kept:
            continue
        leaf = _leaf(value)
        if leaf is not None:
            seen[path] = leaf
        if is_plain_value:
            continue
        kept[id(value)] = value
        if leaf is None or leaf.entries is not None or isinstance(value, torch.Tensor):
            queue.extend((f"{path}{step}", inner) for step, inner in _below(value))
    return seen


def is_own(filename: str) -> bool:
    """Whether it is a file of the program's, and not of what it uses."""
    is_installed = any(part in _INSTALLED for part in Path(filename).parts)
    known = (*_STANDARD, _OURS)
    return not (is_installed or filename.startswith(("<", *known)))


def _roots(
    frame: types.FrameType | None, loaded: Iterable[types.ModuleType]
) -> Iterator[tuple[str, Any]]:
    frames = []
    while frame is not None:
        if is_own(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back
    modules = [m for m in loaded if is_own(getattr(m, "__file__", None) or "<")]
    spaces = [(m.__name__, vars(m)) for m in modules]
    for running in reversed(frames):
        code = running.f_code
        name = Path(code.co_filename).stem if code.co_name == "<module>" else f"{code.co_name}()"
        spaces.append((name, running.f_locals))
    done = set()
    for name, space in spaces:
        if id(space) not in done:
            done.add(id(space))
            own = {n: v for n, v in space.items() if not n.startswith("__")}
            yield from ((f"{name}: {n}", value) for n, value in own.items())


# -- what is hashed


def _leaf(value: Any) -> SeenValue | None:
    """None: it has nothing of its own to hash."""
    if isinstance(value, enum.Enum):
        return SeenValue("member", str(value))
    if isinstance(value, PLAIN):
        return None if _is_left_out(type(value)) else SeenValue("value", _digest(value))
    if isinstance(value, torch.Tensor):
        return SeenValue("tensor", _tensor_digest(value))
    if isinstance(value, torch.Generator):
        return SeenValue("torch generator", _tensor_digest(value.get_state()))
    if isinstance(value, random.Random):
        state = None if isinstance(value, random.SystemRandom) else value.getstate()
        return SeenValue("Python generator", _digest(state))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if isinstance(value, (numpy.random.Generator, numpy.random.RandomState)):
            bits = value.bit_generator if hasattr(value, "bit_generator") else value._bit_generator
            return SeenValue("numpy generator", _digest(_plain_state(bits.state)))
        if isinstance(value, (numpy.ndarray, numpy.generic)) and not value.dtype.hasobject:
            return SeenValue("array", _digest((str(value.dtype), value.shape, value.tobytes())))
    return _plain_container(value)


def _plain_container(value: Any) -> SeenValue | None:
    if isinstance(value, dict):
        items = [*value.keys(), *value.values()]
        entries = [_digest(pair) for pair in value.items()] if _all_plain(items) else None
        kind = "dict"
    elif isinstance(value, (list, deque, tuple)):
        entries = [_digest(each) for each in value] if _all_plain(value) else None
        kind = "list"
    elif isinstance(value, (set, frozenset)):
        entries = sorted(map(_digest, value)) if _all_plain(value) else None
        kind = "set"
    else:
        return None
    return None if entries is None else SeenValue(kind, _digest(entries), tuple(entries))


def _all_plain(values: Any) -> bool:
    return all(isinstance(value, PLAIN) for value in list(values))


def _plain_state(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _plain_state(value) for key, value in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state


def _digest(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode(errors="replace"), digest_size=8).hexdigest()


def _tensor_digest(tensor: torch.Tensor) -> str:
    what = f"{tensor.dtype}{list(tensor.shape)}"
    if tensor.is_meta or not is_plain(tensor) or not tensor.numel():
        return what
    with torch.no_grad():
        host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        raw = host.reshape(-1).view(torch.uint8)
    return f"{what} {hashlib.blake2b(raw_bytes(raw), digest_size=8).hexdigest()}"


# -- what is below


def _below(value: Any) -> Found:
    kind = type(value)
    if _is_left_out(kind) or isinstance(value, types.ModuleType):
        return
    if isinstance(value, torch.Tensor):
        yield from _attributes(value)
    elif isinstance(value, dict):
        for index, (key, inner) in enumerate(list(value.items())):
            yield (f"[{key!r}]" if isinstance(key, PLAIN) else f"[#{index}]"), inner
        if kind is not dict:
            yield from _attributes(value)
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{index}]", inner) for index, inner in enumerate(list(value)))
    elif isinstance(value, type):
        if is_own(getattr(sys.modules.get(value.__module__), "__file__", None) or "<"):
            own = vars(value).items()
            yield from ((f".{n}", inner) for n, inner in own if not n.startswith("__"))
    elif isinstance(value, types.FunctionType):
        yield from _below_function(value)
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
        yield ".__func__", value.__func__
    elif isinstance(value, (staticmethod, classmethod)):
        yield "", value.__func__
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        if frame is not None:
            yield ".<at>", frame.f_lasti
            yield from ((f".<{name}>", inner) for name, inner in frame.f_locals.items())
            yield ".<from>", value.gi_yieldfrom
    elif kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__"):
        yield from _below_iterator(value)
    elif isinstance(value, torch.nn.Module):
        yield from _below_module(value)
    elif kind.__module__ != "builtins":
        yield from _attributes(value)


def _below_function(function: types.FunctionType) -> Found:
    if hasattr(function, "__wrapped__"):
        yield "", function.__wrapped__
    if not is_own(function.__code__.co_filename):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f".<{name}>", cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    yield from ((f".<default {i}>", d) for i, d in enumerate(function.__defaults__ or ()))
    yield from ((f".<{n}>", d) for n, d in (function.__kwdefaults__ or {}).items())
    yield from ((f".{n}", inner) for n, inner in vars(function).items() if n != "__wrapped__")


def _below_iterator(iterator: Any) -> Found:
    """What it would be made again from: that has its place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = iterator.__reduce__()
        except (TypeError, AttributeError):
            return
    if isinstance(made, tuple):
        parts = [part for part in made[1:] if part is not None]
        yield from ((f".<{index}>", part) for index, part in enumerate(parts))


def _below_module(module: torch.nn.Module) -> Found:
    inside = vars(module)
    for table in ("_parameters", "_buffers", "_modules"):
        for name, inner in inside.get(table, {}).items():
            yield (f"[{name}]" if name.isdigit() else f".{name}"), inner
    for name, inner in inside.items():
        if name not in ("_parameters", "_buffers", "_modules"):
            yield f".{name}", inner


def _attributes(value: Any) -> Found:
    inside = getattr(value, "__dict__", None)
    if isinstance(inside, dict):
        yield from ((f".{name}", inner) for name, inner in list(inside.items()))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and isinstance(
                vars(kind).get(name), types.MemberDescriptorType
            ):
                try:
                    yield f".{name}", getattr(value, name)
                except AttributeError:
                    continue


def _is_left_out(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _LEFT_OUT
