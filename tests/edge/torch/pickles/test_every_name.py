"""Every name that a pickle may use, with arguments that nobody expects: it is refused or made, soon
and of little memory; and no name stands for a function that somebody could call later."""

from __future__ import annotations

import itertools
import os
import pickle
import resource
from contextlib import suppress
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import pytest
import torch  # noqa: F401  # once here, not in each child

from keepstep.edge.torch.pickles import checked
from keepstep.edge.torch.pickles.checked import load_pickles
from keepstep.edge.torch.pickles.inert import Inert
from keepstep.edge.torch.pickles.known import Known, Name, names
from keepstep.edge.torch.pickles.known_numpy import numpys_names
from keepstep.errors import UntrustedError
from tests.edge.torch.pickles.hostile import Text

CPU_S = 4
MOST_MORE_BYTES = 1 << 30
ALL: list[Name] = sorted({*names(), *numpys_names()})
PAIR = ("a", 1)


def odd() -> list[Any]:
    """Arguments."""
    return [
        itertools.repeat(1),
        itertools.repeat(PAIR),
        itertools.cycle([PAIR]),
        itertools.count(),
        zip(itertools.repeat("a"), itertools.repeat(1), strict=False),
        enumerate(itertools.repeat(1)),
        range(1 << 60),
        [itertools.repeat(PAIR)],
        "1" * 1000,
        1 << 40,
        -1,
        None,
        (),
    ]


def texts(name: Name) -> list[bytes]:
    """Calls and makings of that name."""
    found = []
    for arg in odd():
        for args in ((arg,), (arg, arg), ((arg,),), ("x", arg), (0, (arg,), (arg,))):
            for operation in (pickle.REDUCE, pickle.NEWOBJ):
                found.append(Text().name(*name).value(args).do(operation).end())
    return found


def read_all(raws: list[bytes]) -> None:
    for raw in raws:
        for vocabulary in (Known(), Inert()):
            with suppress(UntrustedError):
                load_pickles(raw, (1,), vocabulary)


def ends_soon(raws: list[bytes]) -> int:
    """What a child that reads them ends with: 0 when it got through."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            used = pages * os.sysconf("SC_PAGE_SIZE")
            limit = used + MOST_MORE_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            spent = resource.getrusage(resource.RUSAGE_SELF)
            until = int(spent.ru_utime + spent.ru_stime) + CPU_S
            resource.setrlimit(resource.RLIMIT_CPU, (until, until))
            read_all(raws)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("name", ALL, ids=".".join)
def test_odd_arguments_are_refused_soon(name: Name) -> None:
    assert ends_soon(texts(name)) == 0


def test_what_does_not_end_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked, "_check_values", lambda args, may_iterate=False: None)
    assert ends_soon(texts(("collections", "OrderedDict"))) != 0


@pytest.mark.parametrize("name", ALL, ids=".".join)
def test_no_name_stands_for_a_function(name: Name) -> None:
    found = Known().find(*name)
    assert not isinstance(found, (FunctionType, BuiltinFunctionType, MethodType)), found
