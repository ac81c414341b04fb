"""Meeting place: the store at which the ranks of one life of their groups meet. The agents make it; this is a rank's side."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

WITHIN = timedelta(seconds=60)


def connect(host: str, port: int) -> Any:
    """A client. Raises RuntimeError when nobody is there."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=WITHIN)
