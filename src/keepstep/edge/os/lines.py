"""Lines: `ports.Box` over a pair of pipes, driven by a loop: a message a line.

Comes in: bytes of one pipe. Goes out: typed messages to a `Hearer`, and lines into the other pipe.
What the other end does not read yet waits here until the loop can write it: sending never blocks.
What to do about a line that is no message is its owner's business.

Invariant: everything that came before the end is heard before `gone`, which comes once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from keepstep.edge.os.loop import Loop
from keepstep.model.units import KIB
from keepstep.ports import Hearer, MessageCodec

READ_BYTES = 64 * KIB
MAX_LINE_BYTES = 512 * KIB  # longer than any message; a longer line has no end
MAX_WHY = 1000  # characters


class LineBox:
    """See `ports.Box`. `refused`: how many lines were no message."""

    def __init__(
        self,
        loop: Loop,
        reads: int,
        writes: int,
        pid: int,
        codec: MessageCodec,
        on_refused: Callable[[LineBox, str], None],
    ) -> None:
        """reads, writes: pipes, which are this box's from now on. pid: of the process at the other
        end. on_refused: takes why, for every line that is no message."""
        self._loop = loop
        self._reads = reads
        self._writes = writes
        self.pid = pid
        self._codec = codec
        self._on_refused = on_refused
        self.refused = 0
        self._unfinished = b""  # of the line that is coming
        self._unsent = bytearray()
        self._hearer: Hearer | None = None  # until the end
        os.set_blocking(reads, False)
        os.set_blocking(writes, False)

    def begin(self, hearer: Hearer) -> None:
        """From now on what comes is heard."""
        self._hearer = hearer
        self._loop.add_reader(self._reads, self._read)

    # -- the port

    def send(self, message: Any, /) -> bool:
        """See `ports.Box`."""
        line = self._codec.encode(message) + b"\n"
        if self._hearer is None:
            return False
        if self._unsent:
            self._unsent += line
            return True
        return self._write(line)

    def poke(self, message: Any, /) -> None:
        """See `ports.Box`."""
        if not self._unsent:
            self.send(message)

    def hear_rest(self) -> None:
        """See `ports.Box`."""
        while self._hearer is not None and self._take():
            pass

    def close(self) -> None:
        """See `ports.Box`."""
        if self._hearer is not None:
            self._hearer = None
            self._loop.remove_reader(self._reads)
            os.close(self._reads)
            if not self._unsent:
                os.close(self._writes)

    def release(self) -> None:
        """See `ports.Box`."""
        os.close(self._reads)
        os.close(self._writes)

    # -- what the loop brings

    def _read(self) -> None:
        self._take()

    def _take(self) -> bool:
        """Hear what there is; whether there was anything."""
        try:
            found = os.read(self._reads, READ_BYTES)
        except BlockingIOError:
            return False
        if not found:
            self.end()
            return True
        *lines, self._unfinished = (self._unfinished + found).split(b"\n")
        for line in lines:
            self._hear(line)
        if len(self._unfinished) > MAX_LINE_BYTES:
            self._refuse(f"a line of more than {MAX_LINE_BYTES} bytes")
            self.end()
        return True

    def _hear(self, line: bytes) -> None:
        if self._hearer is None:
            return  # hearing the one before has ended this
        try:
            message = self._codec.decode(line)
        except ValueError as error:
            self._refuse(str(error)[:MAX_WHY])
        else:
            self._hearer.hear(self, message)

    def _refuse(self, why: str) -> None:
        self.refused += 1
        self._on_refused(self, why)

    def end(self) -> None:
        """Nobody is there, or nobody worth hearing."""
        hearer = self._hearer
        if hearer is not None:
            self.drop_unsent()
            self.close()
            hearer.gone(self)

    def drop_unsent(self) -> None:
        """What the other end has not read yet is not for it any more."""
        self._unsent.clear()
        self._loop.remove_writer(self._writes)

    def _write(self, line: bytes) -> bool:
        try:
            sent = os.write(self._writes, line)
        except BlockingIOError:
            sent = 0
        except OSError:  # `gone` is heard behind what the other end said before
            return False
        if sent < len(line):
            self._unsent += line[sent:]
            self._loop.add_writer(self._writes, self._flush)
        return True

    def _flush(self) -> None:
        try:
            del self._unsent[: os.write(self._writes, self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()
        if not self._unsent:
            self._loop.remove_writer(self._writes)
            if self._hearer is None:
                os.close(self._writes)
