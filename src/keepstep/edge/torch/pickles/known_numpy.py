"""Known numpy: arrays, numbers and generators of numpy, made from what a pickle says.

numpy itself takes a dtype's state and an array's bytes as they come; a dtype that lies about the
objects in it makes addresses of bytes. So a dtype is made anew from what its state says, and an
array's bytes must be as many as it has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from operator import index
from typing import Any

from keepstep.edge.torch.pickles.checked import OnlyCalled, Unfilled
from keepstep.errors import UntrustedError

MT19937_WORDS = 624
_ALIGNED = 0x80  # a flag of a dtype with fields
_PLAIN_DTYPE = 8  # items of the state of a dtype that has no metadata


@cache
def numpys_names() -> dict[tuple[str, str], tuple[Any, Callable[..., Any] | None]]:
    """By name, what stands for it and what a call does. Empty without numpy."""
    try:
        import numpy
        from numpy.random import bit_generator
    except ImportError:
        return {}
    kinds = {numpy.dtype(code).type for code in numpy.typecodes["All"]}
    found: dict[tuple[str, str], tuple[Any, Callable[..., Any] | None]] = {
        ("numpy", kind.__name__): (kind, None) for kind in kinds
    }
    found["numpy", "record"] = found["numpy.rec", "record"] = (numpy.record, None)
    found["numpy", "dtype"] = (numpy.dtype, _dtype)
    for kind in (*_array_kinds(), numpy.ma.MaskedArray):
        found[kind.__module__, kind.__name__] = (kind, None)
    found["numpy.matrixlib.defmatrix", "matrix"] = (numpy.matrix, None)  # before 2.0
    core = "numpy._core"
    seeds = bit_generator.__name__
    functions: tuple[tuple[str, str, Callable[..., Any]], ...] = (
        (f"{core}.multiarray", "_reconstruct", _empty_array),
        (f"{core}.multiarray", "scalar", _scalar),
        (f"{core}.numeric", "_frombuffer", _array),
        ("numpy.ma.core", "_mareconstruct", _empty_masked),
        ("numpy.random._pickle", "__bit_generator_ctor", _bit_generator),
        ("numpy.random._pickle", "__generator_ctor", _generator),
        ("numpy.random._pickle", "__randomstate_ctor", _random_state),
        (seeds, "__pyx_unpickle_SeedSequence", _seeds),
    )
    for module, name, call in functions:
        if _numpys(module, name) is not None:
            found[module, name] = (OnlyCalled(module, name), call)
    for kind in _bit_generators():
        found[kind.__module__, kind.__name__] = (kind, None)
    found[seeds, "SeedSequence"] = (bit_generator.SeedSequence, None)
    return found


def _numpys(module: str, name: str) -> Any:
    """numpy's function of that name, where this numpy has it."""
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return getattr(import_module(module.replace("numpy._core", "numpy.core")), name, None)


def _array_kinds() -> tuple[type, ...]:
    import numpy

    return numpy.ndarray, numpy.recarray, numpy.matrix


@cache
def numpys_builds() -> dict[type, Callable[[Any, Any], None]]:
    """By class, how an object of it takes its state."""
    try:
        import numpy
        from numpy.random import bit_generator
    except ImportError:
        return {}
    builds: dict[type, Callable[[Any, Any], None]] = {
        **dict.fromkeys(_array_kinds(), _build_array),
        numpy.ma.MaskedArray: _build_masked,
        numpy.random.Generator: _build_generator,
        numpy.random.RandomState: _build_generator,
        bit_generator.SeedSequence: _build_seeds,
        **dict.fromkeys(_bit_generators(), _build_generator),
    }
    return builds


def _bit_generators() -> tuple[type, ...]:
    from numpy import random

    return random.MT19937, random.PCG64, random.PCG64DXSM, random.Philox, random.SFC64


def _dtype(code: Any, align: Any = False, copy: Any = True) -> Any:
    """Made when all is known of it, as a program would make it."""
    import numpy

    if type(code) is not str and code is not numpy.record:
        raise UntrustedError(f"expected a dtype's code, found a {type(code).__name__}")
    return Unfilled(partial(_dtype_of, code))


def _dtype_of(code: Any, state: Any) -> Any:
    import numpy

    if type(state) is not tuple or len(state) < _PLAIN_DTYPE:
        raise UntrustedError("the saved state has a dtype without its state")
    _, order, subarray, names, fields, itemsize, _, flags, *more = state
    beside = more[0] if more else None  # of a moment in time: metadata and unit
    metadata, unit = beside if type(beside) is tuple else (beside, None)
    made = _bare_dtype(code, order, subarray, names, fields, (itemsize, flags), unit)
    if not metadata:
        return made
    if type(metadata) is not dict:
        raise UntrustedError("expected what is known of a dtype by its names")
    return numpy.dtype(made, metadata=metadata)


def _bare_dtype(
    code: Any, order: Any, subarray: Any, names: Any, fields: Any, laid_out: Any, unit: Any
) -> Any:
    import numpy

    nbytes, flags = laid_out

    if names is not None:
        ordered = [fields[name] for name in names]
        description: Any = {
            "names": list(names),
            "formats": [_a_dtype(field[0]) for field in ordered],
            "offsets": [index(field[1]) for field in ordered],
            "itemsize": index(nbytes),
            "titles": [field[2] if len(field) > 2 else None for field in ordered],
        }
        made = numpy.dtype(description, align=bool(index(flags) & _ALIGNED))
        return numpy.dtype((numpy.record, made)) if code is numpy.record else made
    if subarray is not None:
        base, shape = subarray
        return numpy.dtype((_a_dtype(base), shape))
    made = numpy.dtype(code)
    if made.char in "mM" and unit is not None:
        name, count, *_ = unit
        name = name.decode() if isinstance(name, bytes) else name
        is_generic = name == "generic"
        made = made if is_generic else numpy.dtype(f"{made.char}8[{index(count)}{name}]")
    return made.newbyteorder(order) if order in ("<", ">") else made


def _a_dtype(value: Any) -> Any:
    import numpy

    if not isinstance(value, numpy.dtype):
        raise UntrustedError(f"expected a dtype, found a {type(value).__name__}")
    return value


def makes_empty_array(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether it is numpy's own call for an empty array of a class that comes first."""
    if "numpy" not in sys.modules or not args or not isinstance(args[0], type):
        return False
    import numpy

    named = numpys_names()
    if function is named["numpy._core.multiarray", "_reconstruct"][0]:
        return args[1:] == ((0,), b"b") and issubclass(args[0], numpy.ndarray)
    masked = named.get(("numpy.ma.core", "_mareconstruct"))
    is_masked = masked is not None and function is masked[0]
    return is_masked and args[1:3] == (numpy.ndarray, (0,)) and args[3:] in ((b"b",), ("b",))


def empty_array(function: OnlyCalled, args: tuple[Any, ...]) -> Any:
    """What numpy's own function gives, where `makes_empty_array`."""
    return _numpys(function.module, function.name)(*args)


def build_of(kind: type) -> Callable[[Any, Any], None] | None:
    """How an object of a class of the program's own takes its state, where one of numpy's has the
    say in that."""
    own = getattr(kind, "__setstate__", None)
    builds = numpys_builds() if "numpy" in sys.modules else {}
    for base in kind.__mro__:
        if base in builds and getattr(base, "__setstate__", None) is own:
            return builds[base]
    return None


def _empty_array(kind: Any, shape: Any, code: Any) -> Any:
    import numpy

    if kind not in _array_kinds() or shape != (0,):
        raise UntrustedError("expected an empty array, to be filled")
    return numpy.ndarray.__new__(kind, 0, numpy.int8)


def _empty_masked(kind: Any, of: Any, shape: Any, code: Any) -> Any:
    import numpy

    if kind is not numpy.ma.MaskedArray or of is not numpy.ndarray or shape != (0,):
        raise UntrustedError("expected an empty masked array, to be filled")
    return numpy.ma.MaskedArray(numpy.ndarray(0, numpy.int8), mask=numpy.ndarray(0, bool))


def _build_masked(made: Any, state: Any) -> None:
    import numpy

    _, shape, dtype, is_fortran, content, mask, _ = state
    if not isinstance(dtype, numpy.dtype) or dtype.hasobject:
        raise UntrustedError("expected a masked array of numbers")
    for inner, raw in ((dtype, content), (numpy.ma.make_mask_descr(dtype), mask)):
        _build_array(numpy.ndarray(0, numpy.int8), (1, shape, inner, is_fortran, raw))
    made.__setstate__(state)


def _build_array(made: Any, state: Any) -> None:
    import numpy

    shape, dtype, content = (None, None, None)
    if type(state) is tuple and len(state) == 5:
        _, shape, dtype, _, content = state
    if type(shape) is not tuple or not isinstance(dtype, numpy.dtype):
        raise UntrustedError("the saved state has an array without its state")
    items = 1
    for size in shape:
        items *= index(size)
    held = len(content) if type(content) is list else -1
    nbytes = len(content) if type(content) is bytes else -1
    fits = held == items if dtype.hasobject else nbytes == items * dtype.itemsize
    if min(shape, default=0) < 0 or not fits:
        raise UntrustedError(f"the saved state has an array of {shape} with other content")
    made.__setstate__(state)


def _array(content: Any, dtype: Any, shape: Any, order: Any, *_: Any) -> Any:
    import numpy

    if not isinstance(content, (bytes, bytearray)) or not isinstance(dtype, numpy.dtype):
        raise UntrustedError("expected an array's bytes")
    return numpy.frombuffer(content, dtype=dtype).reshape(shape, order=order)


def _scalar(dtype: Any, content: Any = b"") -> Any:
    import numpy

    if not isinstance(dtype, numpy.dtype) or dtype.hasobject or type(content) is not bytes:
        raise UntrustedError("expected a number's bytes")
    if len(content) != dtype.itemsize:
        raise UntrustedError(f"expected {dtype.itemsize} bytes, found {len(content)}")
    return numpy.frombuffer(content, dtype=dtype, count=1)[0]


def _bit_generator(kind: Any = "MT19937") -> Any:
    for known in _bit_generators():
        if kind is known or kind == known.__name__:
            made: Any = known(0)
            return made
    raise UntrustedError(f"expected a generator of bits, found {kind!r}")


def _generator(bits: Any = "MT19937", *_: Any) -> Any:
    from numpy import random

    return random.Generator(_bits(bits))


def _random_state(bits: Any = "MT19937", *_: Any) -> Any:
    from numpy import random

    return random.RandomState(_bits(bits))


def _bits(bits: Any) -> Any:
    return bits if isinstance(bits, _bit_generators()) else _bit_generator(bits)


def _build_generator(made: Any, state: Any) -> None:
    if state is not None:
        check_generator_state(state)
        made.__setstate__(state)


def check_generator_state(state: Any) -> None:
    """Raises UntrustedError for a place outside of a generator's words: numpy would read there."""
    parts = state if isinstance(state, tuple) else (state,)
    for part in parts:
        inner = part.get("state") if isinstance(part, dict) else None
        position = inner.get("pos", 0) if isinstance(inner, dict) else 0
        buffered = part.get("buffer_pos", 0) if isinstance(part, dict) else 0
        if not 0 <= index(position) <= MT19937_WORDS or not 0 <= index(buffered) <= 4:
            raise UntrustedError("the saved state has a random state that points outside of itself")


def _seeds(kind: Any, checksum: Any, state: Any) -> Any:
    from numpy.random import SeedSequence

    if kind is not SeedSequence:
        raise UntrustedError(f"expected a sequence of seeds, found {kind!r}")
    made = SeedSequence(0)
    if state is not None:
        _build_seeds(made, state)
    return made


def _build_seeds(made: Any, state: Any) -> None:
    numpy = sys.modules["numpy"]
    entropy, children, pool, pool_size, spawned = state[:5]
    if not isinstance(pool, numpy.ndarray) or pool.dtype != numpy.uint32:
        raise UntrustedError("the saved state has a sequence of seeds without its words")
    if pool.shape != (index(pool_size),):
        raise UntrustedError("the saved state has a sequence of seeds with other words")
    made.__setstate_cython__((entropy, children, pool, pool_size, spawned))
