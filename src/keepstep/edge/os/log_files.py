"""Log files: found, read, and searched for words, whatever is in them.

Comes in: a path and words. Goes out: the lines that hold one of the words, each once, in the order
of the file, with what stands around it. What the lines mean is not decided here.

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
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from keepstep.model.units import GIB, KIB, MIB

CHUNK_BYTES = 4 * MIB
AHEAD_BYTES = 64 * KIB  # of what follows a line
BEHIND_BYTES = 16 * KIB
MAX_LINE_BYTES = 4 * KIB
MAX_HITS = 100
MAX_FILES = 20_000
MAX_UNPACKED_BYTES = 4 * GIB
DIGITS = b"0123456789"
GRAM_BYTES = 8  # of a word, by which one pass finds it
LOOK_BYTES = 32 * KIB  # of a chunk, for whether its lines differ
MOST_DIFFERENT = 0.5
MIXER = 0x9E3779B97F4A7C15  # Knuth's, of 64 bits: 2**64 divided by the golden ratio
NO_LOGS = {".pt", ".pth", ".bin", ".npy", ".npz", ".safetensors", ".distcp", ".so", ".zip", ".tar"}


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


def find_logs(path: Path) -> list[Path]:
    """The regular files there, sorted: this one, or those below. No link is followed out."""
    if not path.is_dir():
        return [path]
    found = []
    for folder, folders, names in os.walk(path, followlinks=False):
        folders.sort()
        for name in sorted(names):
            file = Path(folder, name)
            if file.suffix not in NO_LOGS and _is_regular(file):
                found.append(file)
            if len(found) >= MAX_FILES:
                return found
    return found


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def search(path: Path, name: str, words: Sequence[str]) -> Iterator[LogExcerpt]:
    """The lines that hold one of these words. `name`: as which the excerpts know the file. Raises
    OSError where it cannot be read."""
    if path.exists() and not path.is_file():
        raise OSError(
            f"{path}: expected a regular file"
        )  # opening a pipe would wait for its writer
    needles = _Needles(words)
    with open(path, "rb") as raw:
        chunk, base = b"", 0  # base: where the chunk begins in the file
        done = 0  # up to here in the chunk, lines were searched
        for added, is_last in _chunks(_plain(raw)):
            chunk += added
            until = len(chunk) if is_last else max(done, len(chunk) - AHEAD_BYTES)
            until = until if is_last else chunk.rfind(b"\n", done, until) + 1 or until
            for begin, end in needles.lines(chunk, done, until):
                text = _text(chunk[begin : min(end, begin + MAX_LINE_BYTES)])
                yield LogExcerpt(name, base + begin, text, chunk, begin, end)
            kept = max(0, until - BEHIND_BYTES)
            chunk, base, done = chunk[kept:], base + kept, until - kept


def line_number(path: Path, offset: int) -> int:
    """Which line of the file begins at this offset, counted from 1."""
    lines, read = 1, 0
    with open(path, "rb") as raw:
        for chunk, _ in _chunks(_plain(raw)):
            lines += chunk.count(b"\n", 0, max(0, offset - read))
            read += len(chunk)
            if read >= offset:
                break
    return lines


class _Needles:
    """Words, and how to find their lines in a chunk."""

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


def _plain(raw: IO[bytes]) -> IO[bytes]:
    """The file, unpacked where gzip has packed it."""
    magic = raw.read(2)
    raw.seek(0)
    return gzip.GzipFile(fileobj=raw) if magic == b"\x1f\x8b" else raw  # type: ignore[return-value]


def _chunks(file: IO[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Its bytes, as UTF-8 where it is UTF-16, and whether these are the last. A packed file that is
    torn ends where it is torn."""
    decoder = None
    read = 0
    chunk = _read(file)
    if chunk.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        decoder = codecs.getincrementaldecoder("utf-16")(errors="replace")
    while chunk:
        read += len(chunk)
        following = _read(file) if read < MAX_UNPACKED_BYTES else b""
        plain = (
            decoder.decode(chunk, not following).encode("utf-8", "replace") if decoder else chunk
        )
        yield plain, not following
        chunk = following


def _read(file: IO[bytes]) -> bytes:
    try:
        return file.read(CHUNK_BYTES)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return b""


def _text(found: bytes) -> str:
    return found.decode("utf-8", "replace")
