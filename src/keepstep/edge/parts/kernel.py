"""Kernel: lines of the kernel's log that are new since the last look, as /dev/kmsg gives them.

Goes out: of the kernel's own lines (not those that programs write there) the ones that hold a word
somebody looks for; `cursor`, the number of the last line. What was there before the first look is
another job's, and only remembered by its number.

Canary: the log has lines at all. A container sees no log, or may not read it: that is blindness.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from keepstep.edge.doctor.host import Host
from keepstep.edge.parts.probe import PartLook, Targets
from keepstep.model.parts import KernelLine

LOG = "/dev/kmsg"
RECORD_BYTES = 8192
MOST_LINES = 500
US_NS = 1000
KERNEL = 0  # the facility of the kernel's own lines
WORDS = (
    *("NVRM", "Xid", "fallen off the bus", "amdgpu", "EDAC", "Hardware Error"),
    *("temperature above threshold", "clock throttled", "I/O error", "nvme", "EXT4-fs error"),
    *("Remounting filesystem", "NETDEV WATCHDOG", "mlx5_core"),
)


def probe_kernel(host: Host, targets: Targets, cursor: int) -> PartLook:
    """See `Probe`."""
    last, lines = -1, []
    try:
        for number, line in _records(str(host.place(LOG))):
            if number > cursor >= 0 and line is not None:
                lines.append(line)
            last = max(last, number)
    except OSError as error:
        return PartLook(blind=f"{LOG}: {error.strerror}; it takes CAP_SYSLOG")
    if last < 0:
        return PartLook(blind=f"{LOG} has no lines")
    return PartLook(tuple(lines[-MOST_LINES:]), cursor=last)


def _records(path: str) -> Iterator[tuple[int, KernelLine | None]]:
    """Of each line its number, and the line where it is one of the kernel's that is looked for.
    Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    rest = b""
    try:
        while True:
            try:
                data = os.read(fd, RECORD_BYTES)
            except BlockingIOError:
                return
            except BrokenPipeError:  # lines were overwritten meanwhile: the next one is there
                continue
            if not data:
                return
            *whole, rest = (rest + data).split(b"\n")
            for record in whole:
                with contextlib.suppress(ValueError):
                    yield _parse(record.decode(errors="replace"))
    finally:
        os.close(fd)


def _parse(record: str) -> tuple[int, KernelLine | None]:
    """`priority,number,microseconds,flags;text`. Raises ValueError on the lines behind one, which
    begin with a blank, and on what is none."""
    head, sign, text = record.partition(";")
    priority, number, since_us, *_ = head.split(",")
    if not sign or record.startswith(" "):
        raise ValueError(record)
    is_wanted = int(priority) >> 3 == KERNEL and any(word in text for word in WORDS)
    return int(number), KernelLine(int(since_us) * US_NS, text) if is_wanted else None
