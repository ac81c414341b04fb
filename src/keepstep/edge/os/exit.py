"""Exit: an exit code that is known only while the interpreter ends."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn


def exit_with(code: int) -> NoReturn:
    """Within an exit handler: run those that are left, and end the process with this code. What a
    handler raises cannot change the exit code any more, so the interpreter does not end it."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
