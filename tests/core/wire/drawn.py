"""Messages drawn from their type hints: everything that a field may hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from keepstep.errors import KeepstepError
from keepstep.model.bounds import Range

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
Drawn = st.SearchStrategy[Any]
Named = Mapping[str, Drawn]


def values(
    hint: Any, bound: Any = None, small: int | None = None, named: Named | None = None
) -> Drawn:
    """Everything that a field of this type may hold. `small`: numbers up to that one, mostly.
    `named`: what fields of these names hold, in messages within it."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return values(args[0], args[1], small, named)
    if hint is bool:
        return st.booleans()
    if hint is int:
        bound = bound or Range(-1, (1 << 63) - 1)
        if small is None:
            return st.integers(bound.least, bound.most)
        few = st.integers(bound.least, min(small, bound.most))
        return few | few | few | st.integers(bound.least, bound.most)
    if hint is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if hint is str:
        return st.text(max_size=min(bound.most, 20))
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple and args[-1] is not Ellipsis:
        return st.tuples(*(values(arg, None, small, named) for arg in args))
    if origin is tuple:
        return st.lists(values(args[0], None, small, named), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(st.text(max_size=5), values(args[1], None, small, named), max_size=3)
    if origin in (Union, UnionType):
        return st.one_of(
            *(st.none() if a is NoneType else values(a, None, small, named) for a in args)
        )
    if issubclass(hint, Enum):
        return st.sampled_from(hint)
    if issubclass(hint, tuple):
        hints = get_type_hints(hint, include_extras=True)
        return st.builds(hint, *(values(hints[name], None, small, named) for name in hint._fields))
    return messages(hint, small, named)


def messages(kind: type[Any], small: int | None = None, named: Named | None = None) -> Drawn:
    """Every message of that kind. `named`: what else fields of these names hold."""
    hints = get_type_hints(kind, include_extras=True)
    named = named or {}
    made = {
        f.name: named.get(f.name, values(hints[f.name], None, small, named))
        for f in fields(kind)
        if f.init
    }

    @st.composite
    def draw(draw: Callable[[Any], Any]) -> Any:
        chosen = {name: draw(strategy) for name, strategy in made.items()}
        try:
            return kind(**chosen)
        except KeepstepError:  # a mesh that cannot be
            return None

    return draw().filter(lambda message: message is not None)
