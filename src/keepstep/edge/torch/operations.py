"""Operations: whether what a thread was in the midst of is over.

torch raises a tensor's version counter when the kernel that wrote it has ended. So a counter that
has not moved proves nothing about a kernel that still runs; it does once the thread has gone on.
That is seen from another thread, which looks at the frames: a thread that stands elsewhere than
before has left the call it was in. Some calls last long and move no counter of what stands still:
the backward pass, a collective, a wait in the standard library or in the kernel of the system.
Nothing has to be waited for in them.

When in doubt the answer is no: whoever asks waits for the thread itself to come by.
"""

from __future__ import annotations

import platform
import sys
import sysconfig
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from types import CodeType, FrameType

import torch.autograd.graph
import torch.distributed.distributed_c10d

_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
# An operation that has called this has not ended: its counter moves when this has returned.
_DISPATCH = "__torch_dispatch__"

# Code whose own calls into C write no tensor of the training's.
_STANDARD = f"{sysconfig.get_path('stdlib')}/"
_INSTALLED = ("/site-packages/", "/dist-packages/")  # below the standard library's directory
_PACKAGE = Path(__file__).parents[2]
_COLLECTIVES = torch.distributed.distributed_c10d.__file__
_QUIET = (f"{_PACKAGE}/edge/", f"{_PACKAGE}/runtime/", _COLLECTIVES)

# System calls that sleep, or wait for bytes or a process: a kernel of torch's makes none of them,
# not even while it waits for its other threads. By their numbers.
_SLEEPS = {
    "x86_64": {0, 7, 23, 35, 43, 45, 47, 61, 230, 232, 247, 270, 271, 281},
    "aarch64": {22, 63, 72, 73, 95, 101, 115, 202, 207, 212, 260},
}.get(platform.machine(), set())

_Place = tuple[int, int]  # a frame, and the instruction that it is at


class Operation:
    """What a thread is in the midst of at the moment when this is made, whatever it is."""

    def __init__(self, thread_id: int, native_id: int) -> None:
        """thread_id, native_id: as `threading` and the system number it."""
        self._thread_id = thread_id
        self._native_id = native_id
        places = _places(self._stack())
        self._place = places[-1] if places else None

    def is_over(self) -> bool:
        """Whether it has ended for certain, or is none that could move a counter."""
        stack = self._stack()
        if not stack:
            return True  # the thread is gone
        places = _places(stack)
        if self._place not in places:
            return True
        is_called_back = len(places) < len(stack)
        return not is_called_back and (_is_quiet(stack[-1].f_code) or self._is_asleep())

    def _stack(self) -> list[FrameType]:
        """The thread's frames, the innermost last."""
        stack = []
        frame = sys._current_frames().get(self._thread_id)
        while frame is not None:
            stack.append(frame)
            frame = frame.f_back
        return stack[::-1]

    def _is_asleep(self) -> bool:
        try:
            text = Path(f"/proc/self/task/{self._native_id}/syscall").read_text()
        except OSError:
            return False
        number = text.split(" ", 1)[0]
        return number.isdigit() and int(number) in _SLEEPS


def _places(stack: Sequence[FrameType]) -> list[_Place]:
    """From the outermost call to the innermost that may be an operation of its own."""
    outer = takewhile(lambda frame: frame.f_code.co_name != _DISPATCH, stack)
    return [(id(frame), frame.f_lasti) for frame in outer]


def _is_quiet(code: CodeType) -> bool:
    if code is _BACKWARD:
        return True
    path = code.co_filename
    if path.startswith(_QUIET):
        return True
    return path.startswith(_STANDARD) and not any(part in path for part in _INSTALLED)
