"""Prebuilt: what a program's own function makes, the same bits whenever it is called.

A model that takes long to make holds a restarted rank up. `prebuilt("models:make")` calls
`make` of the module `models`; with the option `prebuild` the process that stands by has called it
already, and the program gets what it made. So it must not matter who called it, and when: the
function draws from generators of its own, seeded by its name, and leaves the program's as they
were. Torch's of the CPU, numpy's and Python's are meant; build on the CPU and move what was built.

Invariant: what is built is handed out once, because the program will change it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from keepstep.errors import ConfigError

_waiting: dict[str, Any] = {}  # built, and not yet asked for


def prebuilt(target: str) -> Any:
    """What a function of the program's makes, built ahead where `prebuild` names it.

    Where `prebuild` (`KEEPSTEP_PREBUILD`, `keepstep run --prebuild`) names it, a process that stood
    by has called it before it became this rank; otherwise it is called now. Both give the same
    bits: random numbers of torch (CPU), numpy and Python are drawn from a seed that follows from
    the name, and the program's own generators stay as they were. Not for what depends on the rank.

    Args:
        target: `"module:function"`, called without arguments.

    Returns:
        What it made; the program may change it.

    Raises:
        ConfigError: there is no such function. What it raises itself passes through.
    """
    if target in _waiting:
        return _waiting.pop(target)
    return _build(target)


def build_ahead(targets: Sequence[str], failed: Callable[[str, BaseException], None]) -> None:
    """In the process that stands by. What cannot be built is left to the program, which will raise
    the same again where somebody sees it; `failed` hears of it."""
    with ThreadPoolExecutor(1) as builder:
        for target in targets:
            built = builder.submit(_build, target)
            error = built.exception()
            if error is None:
                _waiting[target] = built.result()
            else:
                failed(target, error)


def _build(target: str) -> Any:
    function = _function(target)
    seed = int.from_bytes(hashlib.sha256(target.encode()).digest()[:4], "little")
    with _own_generators(seed):
        return function()


def _function(target: str) -> Callable[[], Any]:
    module, _, name = target.partition(":")
    if not module or not name:
        raise ConfigError(f"prebuilt: expected 'module:function', found {target!r}")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"prebuilt: expected a function at {target!r}, found {error}") from error
    if not callable(found):
        raise ConfigError(f"prebuilt: expected a function at {target!r}, found {found!r}")
    function: Callable[[], Any] = found
    return function


@contextlib.contextmanager
def _own_generators(seed: int) -> Iterator[None]:
    """Seeded generators meanwhile, and then those of before. numpy's where the program has it."""
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy = sys.modules.get("numpy")
    if numpy is None:
        with contextlib.suppress(ImportError):  # the function may import it, and draw from it
            numpy = importlib.import_module("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed devices, too
    random.seed(seed)
    if numpy is not None:
        numpy.random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
