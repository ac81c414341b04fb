"""Software: versions and packages, read without importing any of them."""

from __future__ import annotations

import ast
import getpass
import os
import platform
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from keepstep.edge.os.needs import has_package
from keepstep.model.machine_facts import SoftwareFacts

OPTIONAL = ("numpy", "cryptography", "prometheus_client")


def read_software(also: Iterable[str] = ()) -> SoftwareFacts:
    """Of this Python. `also`: further packages to look for."""
    found = _torch_version()
    return SoftwareFacts(
        system=platform.system(),
        kernel=os.uname().release,
        python=sys.version_info[:2],
        is_64_bit=sys.maxsize > 1 << 32,
        asserts=not sys.flags.optimize,
        torch=found,
        torch_cuda=_torch_cuda() if found else None,
        packages=frozenset(name for name in (*OPTIONAL, *also) if has_package(name)),
        has_user_name=_has_user_name(),
    )


def cuda_in(source: str) -> str | None:
    """What torch/version.py says of CUDA: its version, empty: it was built without; None: it says
    nothing."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            names, value = [getattr(each, "id", "") for each in node.targets], node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            names, value = [getattr(node.target, "id", "")], node.value
        else:
            continue
        if "cuda" in names and isinstance(value, ast.Constant):
            return "" if value.value is None else str(value.value)
    return None


def _torch_version() -> str | None:
    if not has_package("torch"):
        return None
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        return cuda_in(Path(spec.origin).with_name("version.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


def _has_user_name() -> bool:
    try:
        getpass.getuser()
    except (KeyError, OSError):  # OSError: from Python 3.13 on
        return False
    return True
