"""Links: what a node measures of the copies that it sends, and tells the leading keeper.

Values only. `edge/net/tcp.py` asks the kernel, `runtime/replication/link_watch.py` reports,
`core/detection/links.py` decides.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from keepstep.model.bounds import U63, Range, Rank


class LinkCount(NamedTuple):
    """What the kernel has counted of a connection since it began: bytes that the other side
    acknowledged; for how long there were bytes to send or to be acknowledged; bytes sent, and of
    them those that were sent again; for how long the other side had no room."""

    acked_bytes: int = 0
    busy_ns: int = 0
    sent_bytes: int = 0
    resent_bytes: int = 0
    reader_ns: int = 0


_Amount = Annotated[int, Range(0, U63)]


class LinkSample(NamedTuple):
    """What a node's copies to another one took, over a while. See `LinkCount`."""

    nbytes: _Amount
    busy_ns: _Amount
    sent_bytes: _Amount = 0
    resent_bytes: _Amount = 0
    reader_ns: _Amount = 0


class LinkRow(NamedTuple):
    """To that node."""

    node: Rank
    sample: LinkSample
