"""Versions, read without importing what they are of."""

from __future__ import annotations

import sys
from importlib.metadata import version

import pytest

from keepstep.edge.doctor.software import cuda_in, read_software


@pytest.mark.parametrize(
    ("source", "cuda"),
    [
        ("from typing import Optional\ncuda: Optional[str] = '12.8'\n", "12.8"),
        ("cuda = '11.8'\nhip = None\n", "11.8"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.2'\n", ""),
        ("__version__ = '2.6'\ncuda: str\n", None),
    ],
)
def test_the_cuda_that_torch_was_built_for(source: str, cuda: str | None) -> None:
    assert cuda_in(source) == cuda


def test_this_python() -> None:
    found = read_software(also=["xxhash", "no_such_package"])
    assert found.system == "Linux" and found.python == sys.version_info[:2] and found.asserts
    assert found.torch == version("torch") and found.torch_cuda is not None
    assert "xxhash" in found.packages and "no_such_package" not in found.packages


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = read_software()
    assert (found.torch, found.torch_cuda) == (None, None)
