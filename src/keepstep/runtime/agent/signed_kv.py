"""Signed KV: a job's memory where others can write too, but only the job's own words are heard.

Each value stands there with a MAC, made with the job's name and secret over its key, its epoch and
itself. A value without one of ours counts as nothing at all: who reads it finds nothing, who writes
there takes its place, and who waits goes on waiting. The MAC holds a value in its key, and a key
belongs to one attempt, so that no word of an attempt can be said again in another, nor one job's in
another's.

The **epoch** is the meeting's, and is in every value but the opening, which begins it
(`opening.py`). A value of an older one counts as nothing, like a stranger's: it is of an earlier
run under the same secret, or from before the nodes met anew. One of a newer epoch is none that can
be understood, and not written over: whoever owns this is told, and meets anew.

Comes in: a KV and the secret. Goes out: the same KV without strangers' words. Not kept off: who
deletes keys, or writes without end; that stops the meeting, not the training, and it is told.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Sequence
from functools import partial

from keepstep.model.units import S_NS
from keepstep.ports import KV, Timer, Timers
from keepstep.runtime.agent.meeting_record import OPENING

MAC_LETTERS = 32  # 128 bits
LOOK_AGAIN_NS = 1 * S_NS
EPOCH_LETTERS = 16

_EPOCH = re.compile(r"[0-9a-f]{16}")


def _nobody_told(_: object) -> None:
    """For who does not want to know."""


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
    """See `ports.KV`. `refused` hears the key of each value that is none of ours, `older` that of
    each of an older epoch, `newer` the epoch of one that is newer. What was asked of a key where
    such a one stands is not answered: there is nobody any more to talk to in this epoch."""

    def __init__(
        self,
        kv: KV,
        secret: str,
        timers: Timers,
        refused: Callable[[str], None],
        job: str = "",
        older: Callable[[str], None] = _nobody_told,
        newer: Callable[[int], None] = _nobody_told,
    ) -> None:
        self.epoch = 0
        self._older, self._newer = older, newer
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
        holds = guard[0], self._signed(*guard)
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
        theirs: str | None = None

        def heard(found: str | None) -> None:
            nonlocal theirs
            if self.is_newer(key, found):
                return
            ours = self.opened(key, found)
            stays = (
                is_guarded and found == theirs
            )  # though it was expected: the guard does not hold
            if found is not None and ours is None and expected is None and not stays:
                theirs = found
                # nothing of ours is there; of which epoch that is may be known since
                swap(key, found, self._signed(key, value), heard)
            else:
                then(ours)

        before = None if expected is None else self._signed(key, expected)
        swap(key, before, self._signed(key, value), heard)

    def read(self, keys: Sequence[str], then: Callable[[list[str | None]], None]) -> None:
        asked = list(keys)

        def heard(texts: list[str | None]) -> None:
            if any(self.is_newer(*each) for each in zip(asked, texts, strict=True)):
                return
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
        """The value that stands there, None when it is none of ours, or of another epoch."""
        if text is None:
            return None
        epoch, value = self._parts(key, text)
        if value is None:
            self._refused(key)
            return None
        if epoch is not None and epoch != self.epoch:
            self._older(key)
            return None
        return value

    def _signed(self, key: str, value: str) -> str:
        epoch = "" if key == OPENING else f"{self.epoch:0{EPOCH_LETTERS}x}"
        return self._seal.sign(key, epoch + value)

    def _parts(self, key: str, text: str) -> tuple[int | None, str | None]:
        """Epoch and value; no value: it is none of ours. The opening has no epoch."""
        value = self._seal.opened(key, text)
        if value is None or key == OPENING:
            return None, value
        if not _EPOCH.match(value) or len(value) == EPOCH_LETTERS:
            return None, None
        return int(value[:EPOCH_LETTERS], 16), value[EPOCH_LETTERS:]

    def is_newer(self, key: str, text: str | None) -> bool:
        """Whether a word of a newer epoch stands there, which is told."""
        epoch = None if text is None else self._parts(key, text)[0]
        if epoch is None or epoch <= self.epoch:
            return False
        self._newer(epoch)
        return True


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
        told = zip(self._keys, texts, strict=True)
        if any(self._signed.is_newer(*each) for each in told):
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
