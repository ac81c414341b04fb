"""Digests: 64 bits of a block, computed where its bytes are, on a device or on the host.

What one replica leaves to others never comes to the host, so the host's XXH3 cannot tell whether it
is equal. This can: MULTILINEAR of Lemire and Kaser ("Strongly universal string hashing is fast",
The Computer Journal 57, 2014), after Carter and Wegman (1979). A block is words of 32 bits; each is
multiplied with a random key of 64 bits, and all are added to one more key, modulo 2^64. The upper
32 bits of that are strongly universal. Two such lanes with keys of their own make 64 bits: two
blocks of one length that differ, in whatever, have the same digest with probability 2^-64 over the
choice of keys. Words are signed here, which changes nothing: two that differ still do so by less
than 2^32. A sum may be taken in any order and in parts, so a block that lies in several tensors, on
several devices, is digested part by part; what is between them is zeros and adds nothing.

Keys are drawn (SHAKE256) from a seed that replicas have in common: a fault knows nothing of them.

Comes in: words, keys, sums that are added to. Goes out: operations of torch's, the same on any
device. Nothing here waits for one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

LANES = 2
WORD_BYTES = 4
PRODUCT_BYTES = 8
_SUBJECT = b"keepstep: keys of device digests, 1"
_UPPER = 32
_ALL_BITS = (1 << 64) - 1


def keys_of(seed: bytes, words: int) -> torch.Tensor:
    """For blocks of so many words: a row for each lane, the last of which is what it begins
    with."""
    drawn = hashlib.shake_256(_SUBJECT + seed).digest(LANES * (words + 1) * PRODUCT_BYTES)
    return torch.frombuffer(bytearray(drawn), dtype=torch.int64).view(LANES, words + 1)


def scratch_words(piece_bytes: int) -> int:
    """How many products a piece of so many bytes makes."""
    return LANES * (piece_bytes // WORD_BYTES)


@dataclass(eq=False)
class DigestPiece:
    """Words of some blocks that follow each other, a row for each. `keys`: of these words; `sums`:
    of these blocks; `scratch`: memory for the products."""

    words: torch.Tensor
    keys: torch.Tensor
    sums: torch.Tensor
    scratch: torch.Tensor

    def add(self) -> None:
        """To the sums."""
        rows, width = self.words.shape
        products = self.scratch[: LANES * rows * width].view(LANES, rows, width)
        torch.mul(self.words.unsqueeze(0), self.keys.unsqueeze(1), out=products)
        self.sums.add_(products.sum(-1))


def folded(sums: Sequence[torch.Tensor], keys: torch.Tensor) -> list[int]:
    """The digest of each block, from the sums of its parts (all of one shape, on the host)."""
    begin = keys[:, -1:]
    first, second = torch.stack([begin.expand_as(sums[0]), *sums]).sum(0).tolist()
    return [
        (one & _ALL_BITS) >> _UPPER << _UPPER | (other & _ALL_BITS) >> _UPPER
        for one, other in zip(first, second, strict=True)
    ]


def digest_of(block: bytes | memoryview, keys: torch.Tensor) -> int:
    """Of a block on the host; what does not fill a word is filled with zeros."""
    padded = bytearray(block) + bytes(-len(block) % WORD_BYTES)
    sums = torch.zeros(LANES, 1, dtype=torch.int64)
    if padded:
        words = torch.frombuffer(padded, dtype=torch.int32).view(1, -1)
        scratch = torch.empty(scratch_words(len(padded)), dtype=torch.int64)
        DigestPiece(words, keys[:, : words.shape[1]], sums, scratch).add()
    return folded([sums], keys)[0]
