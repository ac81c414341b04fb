"""Log files: read, and searched for words, whatever is in them.

Comes in: a path, a portion of it, and words. Goes out: the lines that hold one of the words, each
once, in the order of the file, with what stands around it. What the lines mean is not decided here.

Invariant: memory is bounded, whatever a file holds: it is read in chunks, a line is cut at
`MAX_LINE`, and of each chunk and word the first and the last `MAX_HITS` lines count. Nothing is
mapped: a file that shrinks while it is read must not end the reader.

A log of 100 MB says few different things. So a chunk is first reduced to its different lines with
all digits taken out, unless a look at some of it says that nearly all differ. Then one pass over
what is left finds which words can be there, by eight bytes of each (with numpy; without, a pass for
each word): only those are looked for in the chunk itself.
"""

from __future__ import annotations

import codecs
import gzip
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from keepstep.edge.os.own_file import read_regular
from keepstep.model.units import KIB, MIB

CHUNK_BYTES = 4 * MIB
AHEAD_BYTES = 64 * KIB  # of what follows a line
BEHIND_BYTES = 16 * KIB
MAX_LINE_BYTES = 4 * KIB
MAX_HITS = 100
MAX_COUNTED_BYTES = 512 * MIB  # of lines, for the number of one
PACKED_RATIO = 20  # how much larger a packed log may well be
HEAD_BYTES = 4
LOOKED_BYTES = MIB  # at the beginning of a file, for who speaks there
GZIP = b"\x1f\x8b"
DIGITS = b"0123456789"
GRAM_BYTES = 8  # of a word, by which one pass finds it
LOOK_BYTES = 32 * KIB  # of a chunk, for whether its lines differ
MOST_DIFFERENT = 0.5
MIXER = 0x9E3779B97F4A7C15  # Knuth's, of 64 bits: 2**64 divided by the golden ratio
WIDE = (  # the longer marks first: one begins with another
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(frozen=True, slots=True)
class LogExcerpt:
    """A line, and what stands around it. `offset`: of its first byte in the file, unpacked."""

    path: str
    offset: int
    text: str
    _chunk: bytes
    _begin: int
    _end: int

    def before(self, size: int, /) -> str:
        """Up to so many bytes before the line."""
        return _text(self._chunk[max(0, self._begin - size) : self._begin])

    def after(self, size: int, /) -> str:
        """Up to so many bytes after the line."""
        return _text(self._chunk[self._end : self._end + size])


class TornLogError(OSError):
    """A packed log that ends where it should not, or is none. What stands before was read."""


def size_of(path: Path) -> tuple[int, bool]:
    """How large it is, as far as can be told without reading it, and whether it can be read from
    its beginning alone: then that is a guess. Raises OSError where it cannot be read."""
    with open(read_regular(path), "rb") as raw:
        head, size = raw.read(HEAD_BYTES), os.fstat(raw.fileno()).st_size
    if head.startswith(GZIP):
        return size * PACKED_RATIO, True
    return size, _wide(head) is not None


def head_of(path: Path) -> str:
    """Its first bytes as text. Raises OSError."""
    with open(read_regular(path), "rb") as raw:
        return _text(next(_chunks(_plain(raw), LOOKED_BYTES), (b"", True))[0])


def search(
    path: Path,
    name: str,
    needles: LogNeedles,
    begin: int = 0,
    end: int | None = None,
    goes_on: Callable[[int], bool] = lambda _: True,
) -> Iterator[LogExcerpt]:
    """The lines that hold one of the needles there, between these offsets. `name`: as which the
    excerpts know the file. `goes_on` hears how many bytes were read since it was called last, and
    tells whether to read more. Raises OSError where it cannot be read, and TornLogError at the end
    of one that is torn."""
    with open(read_regular(path), "rb") as raw:
        base = max(0, begin - BEHIND_BYTES)  # where the chunk begins in the file
        plain = _plain(raw)
        plain.seek(base)
        chunk, done = b"", begin - base  # up to here in the chunk, lines were searched
        most = None if end is None else end + AHEAD_BYTES - base
        for added, is_last in _chunks(plain, most):
            chunk += added
            until = len(chunk) if is_last else max(done, len(chunk) - AHEAD_BYTES)
            until = until if is_last else chunk.rfind(b"\n", done, until) + 1 or until
            until = until if end is None else min(until, end - base)
            for first, last in needles.lines(chunk, done, until):
                text = _text(chunk[first : min(last, first + MAX_LINE_BYTES)])
                yield LogExcerpt(name, base + first, text, chunk, first, last)
            if not goes_on(len(added)):
                return
            kept = max(0, until - BEHIND_BYTES)
            chunk, base, done = chunk[kept:], base + kept, until - kept
        if isinstance(plain, _Packed) and plain.why_torn:
            raise TornLogError(f"packed, and torn: {plain.why_torn}")


def line_number(path: Path, offset: int) -> int | None:
    """Which line of the file begins at this offset, counted from 1; None: too many stand before
    it."""
    if offset > MAX_COUNTED_BYTES:
        return None
    lines, read = 1, 0
    with open(read_regular(path), "rb") as raw:
        for chunk, _ in _chunks(_plain(raw)):
            lines += chunk.count(b"\n", 0, max(0, offset - read))
            read += len(chunk)
            if read >= offset:
                break
    return lines


class LogNeedles:
    """Words, and how to find their lines in a chunk: made once for all files."""

    def __init__(self, words: Sequence[str]) -> None:
        self._signs = {word.encode(): _sign(word.encode()) for word in words}
        grams = {sign for sign in self._signs.values() if len(sign) == GRAM_BYTES}
        self._present_in = _passes(grams)

    def lines(self, chunk: bytes, begin: int, end: int) -> list[tuple[int, int]]:
        """Begin and end of each line in there that holds a word."""
        found: set[tuple[int, int]] = set()
        text = _different(chunk[begin:end])
        present = self._present_in(text)
        for word, sign in self._signs.items():
            if sign in present or (len(sign) < GRAM_BYTES and sign in text):
                found.update(self._line_at(chunk, at) for at in _hits(chunk, word, begin, end))
        return sorted(found)

    def _line_at(self, chunk: bytes, at: int) -> tuple[int, int]:
        """The line around this place: progress bars end theirs with a carriage return. One that is
        too long begins half a bound before."""
        low = max(0, at - MAX_LINE_BYTES // 2)
        begin = max(chunk.rfind(b"\n", low, at), chunk.rfind(b"\r", low, at), low - 1) + 1
        high = at + MAX_LINE_BYTES
        end = chunk.find(b"\n", at, high)
        return begin, end if end >= 0 else min(high, len(chunk))


def _sign(word: bytes) -> bytes:
    """Eight bytes of it that other text has seldom; of a shorter word, all. Without digits: of a
    word in which that cannot be, nothing."""
    grams = [word[at : at + GRAM_BYTES] for at in range(max(1, len(word) - GRAM_BYTES + 1))]
    whole = [gram for gram in grams if not any(byte in DIGITS for byte in gram)]
    return max(whole, key=lambda gram: sum(not 97 <= byte <= 122 for byte in gram), default=b"")


def _different(part: bytes) -> bytes:
    """Its different lines without digits, where they are much less than all."""
    look = part[:LOOK_BYTES].translate(None, DIGITS).split(b"\n")
    if len(set(look)) > MOST_DIFFERENT * len(look):
        return part
    return b"\n".join(set(part.translate(None, DIGITS).split(b"\n")))


def _passes(grams: set[bytes]) -> Callable[[bytes], set[bytes]]:
    """What tells which of these are in a text. With numpy every place of it is looked up in a table
    of 65,536 hashes, and only what is in the table is compared."""
    try:
        import numpy as np
    except ImportError:
        return lambda text: {gram for gram in grams if gram in text}
    values = np.frombuffer(b"".join(grams), np.uint64)
    mixer, shift = np.uint64(MIXER), np.uint64(48)
    table = np.zeros(1 << 16, np.bool_)
    table[(values * mixer) >> shift] = True

    def present(text: bytes) -> set[bytes]:
        found: set[bytes] = set()
        for offset in range(min(GRAM_BYTES, max(0, len(text) - GRAM_BYTES + 1))):
            every = np.frombuffer(text, np.uint64, (len(text) - offset) // GRAM_BYTES, offset)
            places = every * mixer
            places >>= shift
            likely = every[table[places.view(np.int64)]]  # of that type no copy is made
            found.update(value.tobytes() for value in np.unique(likely))
        return found & grams

    return present


def _hits(chunk: bytes, word: bytes, begin: int, end: int) -> Iterator[int]:
    """Where the word is: the first times, one a line, and the last times."""
    at, count = chunk.find(word, begin, end), 0
    while at >= 0 and count < MAX_HITS:
        yield at
        count += 1
        following = chunk.find(b"\n", at, at + MAX_LINE_BYTES)
        at = chunk.find(word, following if following >= 0 else at + MAX_LINE_BYTES, end)
    low, count = at, 0
    while low >= 0 and count < MAX_HITS:
        at = chunk.rfind(word, low, end)
        if at < 0:
            return
        yield at
        count += 1
        end = max(chunk.rfind(b"\n", max(low, at - MAX_LINE_BYTES), at), low)
        if end <= low:
            return


class _Packed(gzip.GzipFile):
    """`why_torn`: what came behind could not be unpacked."""

    why_torn = ""


def _plain(raw: IO[bytes]) -> IO[bytes]:
    """The file, unpacked where gzip has packed it."""
    magic = raw.read(len(GZIP))
    raw.seek(0)
    return _Packed(fileobj=raw) if magic == GZIP else raw  # type: ignore[return-value]


def _wide(head: bytes) -> str | None:
    return next((name for mark, name in WIDE if head.startswith(mark)), None)


def _chunks(file: IO[bytes], most: int | None = None) -> Iterator[tuple[bytes, bool]]:
    """Its bytes, this many at most, as UTF-8 where its characters are wide, and whether these are
    the last. A packed file that is torn ends where it is torn."""
    chunk = _read(file, most)
    wide = _wide(chunk) if file.tell() == len(chunk) else None
    decoder = codecs.getincrementaldecoder(wide)(errors="replace") if wide else None
    read = 0
    while chunk:
        read += len(chunk)
        following = _read(file, None if most is None else most - read)
        plain = (
            decoder.decode(chunk, not following).encode("utf-8", "replace") if decoder else chunk
        )
        yield plain, not following
        chunk = following


def _read(file: IO[bytes], most: int | None) -> bytes:
    """The next bytes; of a packed file that is torn, what stands before the tear, too."""
    left = CHUNK_BYTES if most is None else max(0, min(CHUNK_BYTES, most))
    if not isinstance(file, _Packed):
        return file.read(left)
    parts = []
    try:
        while left and (part := file.read1(left)):
            parts.append(part)
            left -= len(part)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        file.why_torn = str(error)
    return b"".join(parts)


def _text(found: bytes) -> str:
    return found.decode("utf-8", "replace")
