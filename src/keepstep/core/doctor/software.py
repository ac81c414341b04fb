"""Software: whether system, Python and torch are ones that keepstep works with.

Comes in: versions. Goes out: defects.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from keepstep.core.doctor.defect import Defect, DoctorCheck, broken, silence, warning
from keepstep.model.machine_facts import MachineFacts

MIN_KERNEL = (5, 3)  # pidfd_open
SMOOTH_KERNEL = (5, 14)  # MADV_POPULATE_WRITE: slots are touched without writing to them
MIN_PYTHON = (3, 10)
MIN_TORCH = (2, 6)
REJOINING_TORCH = (2, 7)


def kernel(facts: MachineFacts) -> Iterator[Defect]:
    """Whether the kernel has what keepstep calls."""
    software = facts.software
    version = _version(software.kernel)
    if software.system != "Linux":
        yield broken(
            f"the system is {software.system}",
            "keepstep needs pidfds, tmpfs and file locks of Linux",
            "run it on Linux, in a container or a virtual machine",
        )
    elif version is None:
        yield silence("the kernel's version")
    elif version < MIN_KERNEL:
        yield broken(
            f"the kernel is {software.kernel}",
            "agents watch their ranks by pidfds",
            "Linux 5.3 or newer",
        )
    elif version < SMOOTH_KERNEL:
        yield warning(
            f"the kernel is {software.kernel}",
            "slots cannot be touched beforehand: the first captures take longer",
            "Linux 5.14 or newer",
        )


def python(facts: MachineFacts) -> Iterator[Defect]:
    """Whether this Python is one that keepstep works with."""
    software = facts.software
    if software.python < MIN_PYTHON or not software.is_64_bit:
        bits = "64" if software.is_64_bit else "32"
        yield broken(
            f"Python is {software.python[0]}.{software.python[1]} with {bits} bits",
            "keepstep and torch are written for newer ones, of 64 bits",
            "a virtual environment of Python 3.10 or newer, 64 bits",
        )
    if not software.asserts:
        yield warning(
            "Python runs without assertions (-O or PYTHONOPTIMIZE)",
            "what keepstep asserts of itself is not checked: a mistake goes on instead of ending",
            "unset PYTHONOPTIMIZE",
        )


def torch(facts: MachineFacts) -> Iterator[Defect]:
    """Whether there is a torch that keepstep works with."""
    found = facts.software.torch
    if found is None:
        yield broken(
            "PyTorch is not installed in this Python",
            "keepstep protects PyTorch trainings, and brings none of its own",
            "pip install 'keepstep[torch]' (without a GPU: pip install torch --index-url "
            "https://download.pytorch.org/whl/cpu)",
        )
        return
    version = _version(found)
    if version is None:
        yield silence(f"what version {found!r} of torch is")
    elif version < MIN_TORCH:
        yield broken(
            f"torch is {found}", "keepstep needs 2.6 or newer", "pip install --upgrade 'torch>=2.6'"
        )
    elif version < REJOINING_TORCH:
        yield warning(
            f"torch is {found}",
            "survivors cannot stay in their process: all ranks start anew when one dies",
            "pip install --upgrade 'torch>=2.7'",
        )


def user_name(facts: MachineFacts) -> Iterator[Defect]:
    """Whether Python can name the user."""
    if not facts.software.has_user_name:
        yield warning(
            f"user {facts.wanted.user} has no entry in /etc/passwd, and USER is not set",
            "torch.compile names its cache after the user, and fails",
            "export USER=trainer, or TORCHINDUCTOR_CACHE_DIR",
        )


def _version(text: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", text)
    return None if found is None else (int(found[1]), int(found[2]))


CHECKS = (
    DoctorCheck("kernel", kernel),
    DoctorCheck("python", python),
    DoctorCheck("torch", torch),
    DoctorCheck("user-name", user_name),
)
