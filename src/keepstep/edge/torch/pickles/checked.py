"""Checked: a machine for pickles that names, calls, makes and fills nothing but what its vocabulary
lets it.

It is Python's own unpickler, written in Python: in the one written in C nobody can see what is
called with what, or keep a pickle from writing into a class. What is seldom used and hard to bound
(persistent objects, extensions, classes of Python 2) is refused.
"""

from __future__ import annotations

import io
import itertools
import pickle
import posixpath
import re
import struct
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol

import torch

from keepstep.errors import KeepstepError, UntrustedError

# What a key may consist of: the hash of a tuple walks through all that is in it.
MAX_KEY_ITEMS = 10_000
# Successive numbers that an argument may be: a range is small, and what is made of it is not.
MAX_NUMBERS = 1 << 20
DEPTH_OF_ARGUMENTS = 3

# What iterates, as far as Python pickles it. It may go on for ever, or for longer than its bytes.
_ITERABLES: tuple[Any, ...] = ([], (), "", "\u20ac", b"", range(0), range(1 << 99))
ITERATORS: frozenset[type] = frozenset(
    (
        *(type(iter(some)) for some in _ITERABLES),
        *(enumerate, zip, reversed, type(reversed([]))),
        *(itertools.count, itertools.cycle, itertools.repeat, itertools.chain, itertools.islice),
    )
)

# The bytes say what is done, so any error may come that Python, numpy and torch have.
READING_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, BufferError, EOFError, ImportError),
    *(
        LookupError,
        MemoryError,
        NameError,
        OSError,
        RuntimeError,
        StopIteration,
        SystemError,
        TypeError,
    ),
    *(ValueError, pickle.PickleError, re.error, struct.error, zipfile.BadZipFile),
)

_CONTAINERS = (dict, list, set, deque)
_UNUSED = (
    pickle.INST,
    pickle.OBJ,
    pickle.EXT1,
    pickle.EXT2,
    pickle.EXT4,
    pickle.PERSID,
    pickle.NEXT_BUFFER,
    pickle.READONLY_BUFFER,
    pickle.STRING,
    pickle.BINSTRING,
    pickle.SHORT_BINSTRING,
)


@dataclass(eq=False, slots=True)
class Unfilled:
    """Stands for an object that is made only when its state is known: without one it would have
    no memory, or could take one that lies. `place`: where the pickle remembers it."""

    fill: Callable[[Any], Any]
    place: int = -1


class NotPlainError(Exception):
    """What is to be pickled holds something that is not known."""


@dataclass(frozen=True, slots=True)
class OnlyCalled:
    """Stands for a function that a pickle may call, under the eyes of its vocabulary. The function
    itself looks at nothing: nobody is to find it in what was read, and call it some day."""

    module: str
    name: str

    def __call__(self, *args: Any, **options: Any) -> Any:
        raise UntrustedError(f"{self.module}.{self.name} is only called as a state is read")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotPlainError


class Vocabulary(Protocol):
    """What a pickle may do. Each raises UntrustedError for what it may not."""

    def find(self, module: str, name: str) -> Any:
        """What stands for a name."""

    def call(self, function: Any, args: tuple[Any, ...]) -> Any:
        """What a call of something that was found gives, or an `Unfilled`."""

    def make(self, kind: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """A new object of a class that was found, not yet initialized, or an `Unfilled`."""

    def build(self, made: Any, state: Any) -> None:
        """Give a made object its state."""

    def holds(self, made: Any) -> bool:
        """Whether items may be put into it."""


_Unpickler: Any = pickle._Unpickler  # of which the stubs know next to nothing


OF_TYPE = OnlyCalled("torch._tensor", "_rebuild_from_type_v2")
ITER = OnlyCalled("builtins", "iter")


class CheckedUnpickler(_Unpickler):
    """Reads one pickle after another from a file."""

    def __init__(self, file: io.BytesIO, vocabulary: Vocabulary, **options: Any) -> None:
        super().__init__(file, **options)
        self._vocabulary = vocabulary

    def find_class(self, module: str, name: str) -> Any:
        said = module
        if self.proto < 3:
            module = IMPORT_MAPPING.get(module, module)  # as Python's own does
            module, name = NAME_MAPPING.get((said, name), (module, name))
        return self._vocabulary.find(module, name)

    def load_reduce(self) -> None:
        args, function = _checked_args(self.stack.pop()), self.stack[-1]
        # What iterates over others goes through them when it is asked to: not here.
        makes_iterator = function == ITER or (isinstance(function, type) and function in ITERATORS)
        # The first argument of OF_TYPE is what it is to call.
        values = args[1:] if function == OF_TYPE else args
        _check_values(values, may_iterate=makes_iterator)
        self._put(self._vocabulary.call(function, args))

    def load_newobj(self) -> None:
        args = _checked_args(self.stack.pop())
        _check_values(args)
        self._put(self._vocabulary.make(self.stack[-1], args, {}))

    def load_newobj_ex(self) -> None:
        options, args = self.stack.pop(), _checked_args(self.stack.pop())
        if type(options) is not dict:
            raise UntrustedError("the saved state makes an object with what are no options")
        _check_values((*args, *options.values()))
        self._put(self._vocabulary.make(self.stack[-1], args, dict(options)))

    def _put(self, made: Any) -> None:
        """In the place of what it was made of."""
        if type(made) is Unfilled:
            made.place = len(self.memo)  # where it is remembered next
        self.stack[-1] = made

    def load_build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        # The state of an iterator is what it iterates over.
        _check_values((state,), may_iterate=type(made) in ITERATORS)
        if type(made) is not Unfilled:
            self._vocabulary.build(made, state)
            return
        filled = self.stack[-1] = made.fill(state)
        if self.memo.get(made.place) is made:
            self.memo[made.place] = filled

    def load_append(self) -> None:
        self._check_holder(self.stack[-2])
        super().load_append()

    def load_appends(self) -> None:
        self._check_holder(self.metastack[-1][-1])
        super().load_appends()

    def load_setitem(self) -> None:
        self._check_holder(self.stack[-3])
        check_keys(self.stack[-2:-1])
        super().load_setitem()

    def load_setitems(self) -> None:
        self._check_holder(self.metastack[-1][-1])
        check_keys(self.stack[::2])
        super().load_setitems()

    def load_additems(self) -> None:
        self._check_holder(self.metastack[-1][-1])
        check_keys(self.stack)
        super().load_additems()

    def load_frozenset(self) -> None:
        check_keys(self.stack)
        super().load_frozenset()

    def load_dict(self) -> None:
        check_keys(self.stack[::2])
        super().load_dict()

    def load_bytearray8(self) -> None:
        (nbytes,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(nbytes)))  # what is there, and not what is said

    def load_unused(self) -> None:
        raise UntrustedError("the saved state has an operation that none of ours has")

    def _check_holder(self, made: Any) -> None:
        if type(made) not in _CONTAINERS and not self._vocabulary.holds(made):
            raise UntrustedError(
                f"the saved state puts items into a {type(made).__name__}, which holds none"
            )

    dispatch: ClassVar[dict[Any, Any]] = {
        **_Unpickler.dispatch,
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.NEWOBJ_EX[0]: load_newobj_ex,
        pickle.BUILD[0]: load_build,
        pickle.APPEND[0]: load_append,
        pickle.APPENDS[0]: load_appends,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.ADDITEMS[0]: load_additems,
        pickle.FROZENSET[0]: load_frozenset,
        pickle.DICT[0]: load_dict,
        pickle.BYTEARRAY8[0]: load_bytearray8,
        **dict.fromkeys([ord(operation) for operation in _UNUSED], load_unused),
    }


def _checked_args(args: Any, depth: int = 0) -> tuple[Any, ...]:
    if type(args) is not tuple:
        raise UntrustedError("the saved state calls something with what are no arguments")
    for arg in args:
        if type(arg) is range and len(arg) > MAX_NUMBERS:
            raise UntrustedError(f"expected at most {MAX_NUMBERS} successive numbers, found {arg}")
        if type(arg) is tuple and depth < DEPTH_OF_ARGUMENTS:
            _checked_args(arg, depth + 1)
    return args


def _check_values(args: tuple[Any, ...], may_iterate: bool = False, depth: int = 0) -> None:
    """Whoever is given an iterator may go through all of it, and it need not end; whoever is given
    a function may call it."""
    for arg in args:
        if type(arg) in ITERATORS and not may_iterate:
            raise UntrustedError(
                f"the saved state calls something with a {type(arg).__name__}, which need not end"
            )
        if type(arg) is OnlyCalled:
            raise UntrustedError(f"the saved state hands {arg.module}.{arg.name} to something")
        if type(arg) is tuple and depth < DEPTH_OF_ARGUMENTS:
            _check_values(arg, may_iterate, depth + 1)


def check_keys(keys: Iterable[Any]) -> None:
    """Raises UntrustedError for one whose hash would take forever."""
    for key in keys:
        if type(key) is tuple:
            _check_key(key)


def _check_key(key: tuple[Any, ...]) -> None:
    level, items = [key], 0
    for _ in range(100):
        level = [inner for outer in level for inner in outer if type(inner) is tuple]
        items += sum(map(len, level)) + len(level)
        if not level:
            return
        if items > MAX_KEY_ITEMS:
            break
    raise UntrustedError("the saved state has a key of tuples within tuples without end")


def load_pickles(raw: bytes, sections: Sequence[int], vocabulary: Vocabulary) -> list[Any]:
    """The objects of pickles that lie one behind the other. `sections`: how many of them know each
    other's objects. Raises UntrustedError, and other errors of ours as they are."""
    file = io.BytesIO(raw)
    found = []
    try:
        for pickles in sections:
            unpickler = CheckedUnpickler(file, vocabulary)
            found += [unpickler.load() for _ in range(pickles)]
        return found
    except KeepstepError:
        raise
    except READING_ERRORS as error:
        raise _unreadable(error) from error


def load_torch(raw: bytes, vocabulary: Vocabulary) -> Any:
    """What `torch.save` has written. Raises as `load_pickles` does."""
    try:
        _check_archive(raw)
        module = SimpleNamespace(__name__=__name__, Unpickler=_with(vocabulary))
        # not only weights, but no more than the vocabulary knows
        return torch.load(
            io.BytesIO(raw), map_location="cpu", weights_only=False, pickle_module=module
        )
    except KeepstepError:
        raise
    except READING_ERRORS as error:
        raise _unreadable(error) from error


def _check_archive(raw: bytes) -> None:
    """Raises UntrustedError for what is larger than its file, and for a TorchScript program."""
    records = zipfile.ZipFile(io.BytesIO(raw)).infolist()
    is_stored = all(record.compress_type == zipfile.ZIP_STORED for record in records)
    is_program = any(posixpath.basename(record.filename) == "constants.pkl" for record in records)
    if is_program or not is_stored or sum(record.file_size for record in records) > len(raw):
        raise UntrustedError("the saved value is not what torch.save writes")


def _with(vocabulary: Vocabulary) -> type[CheckedUnpickler]:
    class TorchUnpickler(CheckedUnpickler):
        def __init__(self, file: io.BytesIO, **options: Any) -> None:
            super().__init__(file, vocabulary, **options)

    return TorchUnpickler


def _unreadable(error: Exception) -> UntrustedError:
    return UntrustedError(
        f"the saved state is not what keepstep writes: {type(error).__name__}: {error}. Its "
        "checksums are right, so it was not damaged by accident; nothing of it is loaded"
    )
