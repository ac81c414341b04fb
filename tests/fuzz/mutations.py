"""Mutations: from bytes that are right to bytes that are nearly right. Each is drawn from a seeded
`Random` alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

ODD_NUMBERS = (0, -1, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**400, -(2**63), 1e308, 0.5)
ODD_VALUES: tuple[Any, ...] = (
    *ODD_NUMBERS,
    None,
    True,
    "",
    "0",
    "\0",
    "../../etc/passwd",
    "nan",
    "\ud800",
    [],
    {},
    [[]],
    [None],
    {"": None},
    float("nan"),
    float("inf"),
)
DEEP = 20_000

Mutate = Callable[[Random, bytes], bytes]


def anything(random: Random, seed: bytes) -> bytes:
    """Bytes that have nothing to do with it."""
    return random.randbytes(random.randrange(2 * len(seed) + 16))


def flipped(random: Random, seed: bytes) -> bytes:
    """Some bits are others."""
    out = bytearray(seed or b"\0")
    for _ in range(random.choice((1, 1, 2, 8))):
        at = random.randrange(8 * len(out))
        out[at // 8] ^= 1 << at % 8
    return bytes(out)


def cut(random: Random, seed: bytes) -> bytes:
    """Its end is missing."""
    return seed[: random.randrange(len(seed) + 1)]


def spliced(random: Random, seed: bytes) -> bytes:
    """A piece of it stands somewhere else, or comes again, many times."""
    one, two = sorted(random.randrange(len(seed) + 1) for _ in range(2))
    at = random.randrange(len(seed) + 1)
    return seed[:at] + seed[one:two] * random.choice((1, 1, 2, 50)) + seed[at:]


def overwritten(random: Random, seed: bytes) -> bytes:
    """A word of it is an odd number."""
    number = int(random.choice(ODD_NUMBERS[:8])) & (1 << 64) - 1
    word = number.to_bytes(8, "little")[: random.choice((1, 2, 4, 8))]
    at = random.randrange(len(seed) + 1)
    return seed[:at] + word + seed[at + len(word) :]


def otherwise_said(random: Random, seed: bytes) -> bytes:
    """The same JSON with something odd in one place; another mutation when it is no JSON."""
    try:
        plain = json.loads(seed)
    except ValueError:
        return overwritten(random, seed)
    for _ in range(random.choice((1, 1, 1, 3))):
        plain = _odd(random, plain)
    return json.dumps(plain).encode()


def nested(random: Random, seed: bytes) -> bytes:
    """JSON that is deeper than any stack."""
    return random.choice((b"[" * DEEP, b'{"a":' * DEEP, b"[" * DEEP + b"]" * DEEP))


USUAL: tuple[Mutate, ...] = (
    anything,
    flipped,
    cut,
    spliced,
    overwritten,
    otherwise_said,
    otherwise_said,
    otherwise_said,
)


def mutated(random: Random, seed: bytes) -> bytes:
    """One of them; now and then the rare one, which takes long."""
    mutate = nested if random.random() < 0.001 else random.choice(USUAL)
    return mutate(random, seed)


def _odd(random: Random, plain: Any) -> Any:
    """Somewhere in it something is missing, or too much, or another."""
    inner = list(plain) if isinstance(plain, (dict, list)) else []
    if not inner or random.random() < 0.15:
        return random.choice(ODD_VALUES)
    if isinstance(plain, dict):
        key = random.choice(inner)
        rest = {name: value for name, value in plain.items() if name != key}
        match random.randrange(5):
            case 0:
                return rest
            case 1:
                return {**plain, str(random.choice(ODD_VALUES)): plain[key]}
            case _:
                return {**plain, key: _odd(random, plain[key])}
    at = random.randrange(len(inner))
    match random.randrange(5):
        case 0:
            return inner[:at] + inner[at + 1 :]
        case 1:
            return inner[:at] + [inner[at]] * random.choice((2, 100)) + inner[at:]
        case _:
            return [*inner[:at], _odd(random, inner[at]), *inner[at + 1 :]]
