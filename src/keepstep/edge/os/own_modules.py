"""Own modules: the words by which a Python runs one of keepstep's own.

`python -m` looks for modules in the working directory first, and that may be anybody's: a
`json.py` that somebody else has put into /tmp would run as whoever starts a training there. So the
working directory is no place to look for anything of keepstep's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

# without that place `sys.argv` and `__main__` are as under `python -m`
_RUN = (
    "import sys; sys.path[:] = filter(None, sys.path); import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def found_from_anywhere(environ: Mapping[str, str]) -> dict[str, str]:
    """For a child with another working directory: the places of modules that are relative to this
    one are given whole."""
    places = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
    whole = os.pathsep.join(map(os.path.abspath, places))
    return {**environ, "PYTHONPATH": whole} if whole else dict(environ)


def module_words(module: str, *words: str) -> list[str]:
    """What stands behind the interpreter and its flags."""
    return ["-c", _RUN, module, *words]
