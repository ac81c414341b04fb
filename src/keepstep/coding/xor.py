"""XOR: the parity of one lost member, in place and at memory speed, with the GIL released.

Comes in: buffers, which may be maps of other processes' memory; nothing is copied. A source shorter
than the target continues as zeros. numpy is imported on the first call, because only a job with
parity needs it.

ISA-L's `xor_gen` does the same in one pass; it wants aligned buffers and gains a tenth to a fifth
over these tiles, so it is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from keepstep.coding.reference import Buffer
from keepstep.model.units import MIB

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TILE_BYTES = MIB  # a tile of the target stays in cache while all sources pass


def xor_into(target: Buffer, sources: Sequence[Buffer]) -> None:
    """target ^= each source."""
    import numpy as np

    into = np.frombuffer(target, np.uint8)
    parts = [np.frombuffer(source, np.uint8) for source in sources]
    for at in range(0, len(into), TILE_BYTES):
        out = into[at : at + TILE_BYTES]
        for part in parts:
            _add(part[at : at + TILE_BYTES], out)


def xor_of(target: Buffer, sources: Sequence[Buffer]) -> None:
    """target = XOR of the sources, of which there is at least one."""
    import numpy as np

    into = np.frombuffer(target, np.uint8)
    first, *others = [np.frombuffer(source, np.uint8) for source in sources]
    for at in range(0, len(into), TILE_BYTES):
        out, head = into[at : at + TILE_BYTES], first[at : at + TILE_BYTES]
        out[: len(head)] = head
        out[len(head) :] = 0
        for part in others:
            _add(part[at : at + TILE_BYTES], out)


def _add(tile: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    import numpy as np

    reached = out[: len(tile)]
    np.bitwise_xor(reached, tile, out=reached)
