"""Pickles that would run something, and what they would leave behind."""

from __future__ import annotations

import builtins
import functools
import io
import itertools
import os
import pickle
import subprocess
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch

Mark = Callable[[Path], bytes]


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self.reduced


def marking(path: Path) -> Any:
    """An object whose making makes that directory."""
    return Calls(os.mkdir, str(path))


class Text:
    """A pickle by hand: what is on the stack, operation by operation."""

    def __init__(self) -> None:
        self.raw = pickle.PROTO + bytes([4])

    def name(self, module: str, name: str) -> Text:
        return self.value(module).value(name).do(pickle.STACK_GLOBAL)

    def value(self, value: Any) -> Text:
        raw = pickle.dumps(value, 4)
        begin = 11 if raw[2:3] == pickle.FRAME else 2
        self.raw += raw[begin:-1]
        return self

    def do(self, *operations: bytes) -> Text:
        self.raw += b"".join(operations)
        return self

    def end(self) -> bytes:
        return self.raw + pickle.STOP


def _code(path: Path) -> str:
    return f"__import__('os').mkdir({str(path)!r})"


def _in_memory_of_a_tensor(path: Path) -> bytes:
    """torch unpickles a storage that lies within a pickle."""
    inner = io.BytesIO()
    torch.save(marking(path), inner)
    return pickle.dumps(Calls(torch.storage._load_from_bytes, inner.getvalue()))


# What makes the directory when it is read by Python's own unpickler.
RUNNING: dict[str, Mark] = {
    "os.mkdir": lambda path: pickle.dumps(marking(path)),
    "eval": lambda path: pickle.dumps(Calls(builtins.eval, _code(path))),
    "exec": lambda path: pickle.dumps(Calls(builtins.exec, _code(path))),
    "Popen": lambda path: pickle.dumps(Calls(subprocess.Popen, ["mkdir", str(path)])),
    "protocol 0": lambda path: pickle.dumps(marking(path), 0),
    "INST": lambda path: b"(V" + str(path).encode() + b"\nios\nmkdir\n.",
    "OBJ": lambda path: b"(cos\nmkdir\nV" + str(path).encode() + b"\no.",
    "in a list": lambda path: pickle.dumps([1, {"a": (marking(path),)}]),
    "in a partial": lambda path: pickle.dumps(Calls(functools.reduce, os.mkdir, [str(path)], 511)),
    "a tensor's memory": _in_memory_of_a_tensor,
    "torch.load": lambda path: pickle.dumps(Calls(torch.load, str(path))),
    "a tensor's type": lambda path: pickle.dumps(
        Calls(torch._tensor._rebuild_from_type_v2, os.mkdir, torch.Tensor, (str(path),), {})
    ),
    "a default": lambda path: (
        Text()
        .name("collections", "defaultdict")
        .name("os", "mkdir")
        .do(pickle.TUPLE1, pickle.REDUCE)
        .end()
    ),
    "a state": lambda path: pickle.dumps(Calls(OrderedDict, state={"a": marking(path)})),
}


def _set_on(module: str, name: str, attribute: str) -> bytes:
    """Writes an attribute into what a name stands for."""
    text = Text().name(module, name).value((None, {attribute: 1}))
    return text.do(pickle.BUILD).end()


# What runs nothing at once, and must be refused as well: it writes into what is not its own, takes
# memory, or lies about what it is.
LYING: dict[str, bytes] = {
    "no pickle": b"\x00\x01",
    "nothing": b"",
    "a class is changed": _set_on("torch", "Size", "numel"),
    "a class of Python's is changed": _set_on("uuid", "UUID", "hex"),
    "a function is changed": _set_on("_codecs", "encode", "__defaults__"),
    "a module": pickle.dumps(Calls(getattr, 1, "real")),
    "pairs without end": pickle.dumps(Calls(OrderedDict, Calls(itertools.repeat, ("a", 1)))),
    "sizes for ever": pickle.dumps(Calls(torch.Size, Calls(itertools.repeat, 1))),
    "options without end": Text()
    .name("builtins", "object")
    .value(())
    .value(itertools.repeat(("a", 1)))
    .do(pickle.NEWOBJ_EX)
    .end(),
    "globals of a function": Text()
    .name("builtins", "getattr")
    .name("random", "Random")
    .value("__init__")
    .do(pickle.TUPLE2, pickle.REDUCE)
    .end(),
    "numbers without end": pickle.dumps(Calls(list, range(1 << 40))),
    "a size without end": pickle.dumps(Calls(torch.Size, range(1 << 40))),
    "arguments without end": Text()
    .name("collections", "ChainMap")
    .name("builtins", "range")
    .value((1 << 40,))
    .do(pickle.REDUCE, pickle.NEWOBJ)
    .end(),
    "a bytearray without end": pickle.PROTO
    + bytes([5])
    + pickle.BYTEARRAY8
    + (1 << 40).to_bytes(8, "little"),
    "bytes of a number": pickle.dumps(Calls(bytes, 1 << 36)),
    "a tensor larger than its memory": pickle.dumps(
        Calls(
            torch._utils._rebuild_tensor_v2,
            torch.storage.TypedStorage(
                wrap_storage=torch.zeros(1).untyped_storage(), dtype=torch.float32, _internal=True
            ),
            *(0, (1 << 34,), (1,), False, OrderedDict()),
        )
    ),
    "an array larger than its memory": pickle.dumps(
        Calls(
            numpy._core.multiarray._reconstruct,
            *(numpy.ndarray, (1 << 36,), b"b"),
        )
    ),
    "an array of addresses": pickle.dumps(
        Calls(
            numpy._core.multiarray._reconstruct,
            *(numpy.ndarray, (0,), b"b"),
            state=(1, (1,), numpy.dtype("O"), False, b"12345678"),
        )
    ),
    "a dtype that hides objects": pickle.dumps(
        Calls(
            numpy._core.multiarray.scalar,
            Calls(
                numpy.dtype,
                *("V8", False, True),
                state=(3, "|", None, ("a",), {"a": (numpy.dtype("O"), 0)}, 8, 1, 0),
            ),
            b"12345678",
        )
    ),
    "a fraction without end": pickle.dumps(Calls(__import__("fractions").Fraction, "1e999999999")),
    "a key without end": Text()
    .do(pickle.EMPTY_DICT)
    .value(())
    .do(*[pickle.DUP + pickle.TUPLE2] * 64)
    .value(1)
    .do(pickle.SETITEM)
    .end(),
    "a deep key": Text()
    .do(pickle.EMPTY_DICT)
    .value(())
    .do(*[pickle.TUPLE1] * 100_000)
    .value(1)
    .do(pickle.SETITEM)
    .end(),
    "items for a class": Text().name("builtins", "list").value(1).do(pickle.APPEND).end(),
}
