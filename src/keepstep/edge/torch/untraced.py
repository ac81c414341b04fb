"""Untraced: code that `torch.compile` runs as it stands.

torch calls groups written in Python from its own C++: so does DDP, as often as it builds its
buckets. Where that happens beside compiled code, torch's tracer takes each such call for more code
to compile, finds attributes that it does not know, and ends the program. What is marked here is
skipped, with all that it calls. The mark is no public name (`torch.compiler.disable` is, and
imports all of the compiler): where a torch lacks it nothing is marked.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

import torch

_Class = TypeVar("_Class", bound=type)
_frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)


def untraced(kind: _Class) -> _Class:
    """Of this class, all functions and properties that are its own."""
    mark = getattr(_frames, "set_code_exec_strategy", None)
    if mark is None:
        return kind
    skip = _frames._FrameAction.SKIP
    strategy = _frames._FrameExecStrategy(skip, skip)  # of the frame, and of those in it
    for value in vars(kind).values():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(function, FunctionType):
            mark(function.__code__, strategy)
    return kind
