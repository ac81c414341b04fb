"""Signed KV: a job's memory where others can write too, but only the job's own words are heard.

Each value stands there with a MAC, made with the job's name and secret over its key and itself. A
value without one of ours counts as nothing at all: who reads it finds nothing, who writes there
takes its place, and who waits goes on waiting. The MAC holds a value in its key, and a key belongs
to one attempt, so that no word of an attempt can be said again in another, nor one job's in
another's.

Comes in: a KV and the secret. Goes out: the same KV without strangers' words. Not kept off: who
deletes keys, or writes without end; that stops the meeting, not the training, and it is told. Nor
is who says again, under the same key, what was said in an earlier run of the job with this secret
(`docs/security.md`).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence
from functools import partial

from keepstep.model.units import S_NS
from keepstep.ports import KV, Timer, Timers

MAC_LETTERS = 32  # 128 bits
LOOK_AGAIN_NS = 1 * S_NS


class WordSeal:
    """A MAC before each value, over its key and itself, made with the job's name and secret."""

    def __init__(self, secret: str, job: str) -> None:
        own = hashlib.blake2b(secret.encode(), person=b"keepstep-kv").digest()
        self._secret = hmac.new(own, job.encode(), hashlib.sha256).digest()

    def sign(self, key: str, value: str) -> str:
        """What is to stand at that key."""
        mac = hmac.new(self._secret, _bytes(f"{key}\0{value}"), hashlib.sha256)
        return mac.hexdigest()[:MAC_LETTERS] + value

    def opened(self, key: str, text: str) -> str | None:
        """The value in what stands there, None when it is none of ours."""
        value = text[MAC_LETTERS:]
        expected = self.sign(key, value)
        if value and hmac.compare_digest(_bytes(text), _bytes(expected)):
            return value
        return None


class SignedKV:
    """See `ports.KV`. `refused` hears the key of each value that is none of ours."""

    def __init__(
        self,
        kv: KV,
        secret: str,
        timers: Timers,
        refused: Callable[[str], None],
        job: str = "",
    ) -> None:
        self._kv = kv
        self._seal = WordSeal(secret, job)
        self._timers = timers
        self._refused = refused

    @property
    def hosted(self) -> bool:
        return self._kv.hosted

    def swap(
        self, key: str, expected: str | None, value: str, then: Callable[[str | None], None]
    ) -> None:
        self._swap(self._kv.swap, key, expected, value, then, is_guarded=False)

    def swap_while(
        self,
        guard: tuple[str, str],
        key: str,
        expected: str | None,
        value: str,
        then: Callable[[str | None], None],
    ) -> None:
        holds = guard[0], self._seal.sign(*guard)
        guarded = partial(self._kv.swap_while, holds)
        self._swap(guarded, key, expected, value, then, is_guarded=True)

    def _swap(
        self,
        swap: Callable[[str, str | None, str, Callable[[str | None], None]], None],
        key: str,
        expected: str | None,
        value: str,
        then: Callable[[str | None], None],
        is_guarded: bool,
    ) -> None:
        signed, theirs = self._seal.sign(key, value), None

        def heard(found: str | None) -> None:
            nonlocal theirs
            ours = self.opened(key, found)
            stays = (
                is_guarded and found == theirs
            )  # though it was expected: the guard does not hold
            if found is not None and ours is None and expected is None and not stays:
                theirs = found
                swap(key, found, signed, heard)  # nothing of ours is there
            else:
                then(ours)

        swap(key, None if expected is None else self._seal.sign(key, expected), signed, heard)

    def read(self, keys: Sequence[str], then: Callable[[list[str | None]], None]) -> None:
        asked = list(keys)

        def heard(texts: list[str | None]) -> None:
            then([self.opened(key, text) for key, text in zip(asked, texts, strict=True)])

        self._kv.read(asked, heard)

    def wait(
        self,
        keys: Sequence[str],
        within_ns: int | None,
        then: Callable[[list[str] | None], None],
    ) -> Timer:
        return _SignedWait(self, self._kv, self._timers, list(keys), within_ns, then)

    def close(self) -> None:
        self._kv.close()

    def opened(self, key: str, text: str | None) -> str | None:
        """The value that stands there, None when it is none of ours."""
        if text is None:
            return None
        value = self._seal.opened(key, text)
        if value is None:
            self._refused(key)
        return value


def _bytes(text: str) -> bytes:
    """As they stand there: a stranger's need not be UTF-8 (see `ports.KV`)."""
    return text.encode("utf-8", "surrogateescape")


class _SignedWait:
    """Until something of ours is at all keys. While strangers' words are there, looks again."""

    def __init__(
        self,
        signed: SignedKV,
        kv: KV,
        timers: Timers,
        keys: list[str],
        within_ns: int | None,
        then: Callable[[list[str] | None], None],
    ) -> None:
        self._signed = signed
        self._kv = kv
        self._timers = timers
        self._keys = keys
        self._left_ns = within_ns
        self._then = then
        self._timer = self._begin()

    def cancel(self) -> None:
        self._timer.cancel()

    def _begin(self) -> Timer:
        return self._kv.wait(self._keys, self._left_ns, self._heard)

    def _heard(self, texts: list[str] | None) -> None:
        if texts is None:
            self._then(None)
            return
        found = [self._signed.opened(k, text) for k, text in zip(self._keys, texts, strict=True)]
        ours = [value for value in found if value is not None]
        if len(ours) == len(self._keys):
            self._then(ours)
        elif self._left_ns is not None and self._left_ns <= LOOK_AGAIN_NS:
            self._timer = self._timers.after(self._left_ns, lambda: self._then(None))
        else:
            self._timer = self._timers.after(LOOK_AGAIN_NS, self._again)

    def _again(self) -> None:
        if self._left_ns is not None:
            self._left_ns -= LOOK_AGAIN_NS
        self._timer = self._begin()
