"""KV client: `ports.KV` by threads, over a backend whose calls block.

    owner's loop -> questions -> one thread, one connection, in order -> answers -> owner's loop
                 -> waits -> a thread and a connection each

Moves questions and answers; what they mean is the backend's (`etcd.py`,
`edge/torch/tcp_store.py`).
A wait blocks its thread and its connection, and cannot be interrupted. So one that nobody listens
to any more goes on, for at most the backend's `slice_s`, and serves who waits for the same keys by
then. What has waited is kept for the next wait.

The threads are daemons, and one may be inside the backend for long after `close`: a process that
used TCPStore ends by `os._exit` (see `cli/main.py`), because an interpreter that is taken down
under such a thread may abort.

Invariant: whatever is told (`opened`, `failed`, an answer, `lost`) is told by the loop, and nothing
after `failed`, `lost` or `close`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from keepstep.edge.os.loop import Loop, LoopTimer
from keepstep.errors import KeepstepError, MeetingError
from keepstep.ports import KV, Timer

MAX_IDLE = 4  # connections that have waited and are kept for the next wait

T = TypeVar("T")
Keys = tuple[str, ...]


class BlockingClient(Protocol):
    """A connection to a backend, for one thread at a time. Every call raises MeetingError when the
    memory is gone, and waits out what passes."""

    @property
    def hosted(self) -> bool:
        """See `ports.KV`."""

    @property
    def slice_s(self) -> float:
        """How long a wait should last at most before it is looked whether it is still wanted."""

    def swap(self, key: str, expected: str | None, value: str) -> str | None:
        """See `ports.KV`."""

    def swap_while(
        self, guard: tuple[str, str], key: str, expected: str | None, value: str
    ) -> str | None:
        """See `ports.KV`."""

    def read(self, keys: Sequence[str]) -> list[str | None]:
        """See `ports.KV`."""

    def wait(self, keys: Sequence[str], within_s: float) -> list[str] | None:
        """What is there once something is at all of these; None when that was not so in time."""

    def another(self) -> BlockingClient:
        """One more connection. Called from other threads."""


GivenUp = Callable[[], bool]
Dial = Callable[[GivenUp], BlockingClient]


def open_kv(
    loop: Loop,
    dial: Dial,
    opened: Callable[[KV], None],
    failed: Callable[[str], None],
    lost: Callable[[str], None],
) -> Timer:
    """See `ports.OpenKV`. `dial`, on a thread: make the first connection, and raise KeepstepError
    when there is none to be had or when `given_up()`."""
    return KVOpening(KVClient(loop, dial, opened, failed, lost))


class KVOpening:
    def __init__(self, client: KVClient) -> None:
        self._client = client

    def cancel(self) -> None:
        if not self._client.is_open:
            self._client.close()


class KVClient:
    """See `ports.KV`. Everything that is told to it by a thread is posted."""

    def __init__(
        self,
        loop: Loop,
        dial: Dial,
        opened: Callable[[KV], None],
        failed: Callable[[str], None],
        lost: Callable[[str], None],
    ) -> None:
        self._loop, self._dial = loop, dial
        self._tell_opened, self._tell_failed, self._tell_lost = opened, failed, lost
        self.is_open = False
        self.is_closed = False
        self.hosted = False
        self._questions: SimpleQueue[_Question[Any] | None] = SimpleQueue()
        self._waits: dict[Keys, list[_Wait]] = {}  # a thread waits for each of these
        self._idle: list[_Waiter] = []
        self._another: Callable[[], BlockingClient] | None = None
        _start(self._ask_all, self.crashed, "keepstep-kv")

    # -- the port

    def swap(
        self, key: str, expected: str | None, value: str, then: Callable[[str | None], None]
    ) -> None:
        assert value and expected != value
        self._ask(lambda client: client.swap(key, expected, value), then)

    def swap_while(
        self,
        guard: tuple[str, str],
        key: str,
        expected: str | None,
        value: str,
        then: Callable[[str | None], None],
    ) -> None:
        assert value and expected != value
        self._ask(lambda client: client.swap_while(guard, key, expected, value), then)

    def read(self, keys: Sequence[str], then: Callable[[list[str | None]], None]) -> None:
        asked = tuple(keys)
        self._ask(lambda client: client.read(asked), then)

    def wait(
        self,
        keys: Sequence[str],
        within_ns: int | None,
        then: Callable[[list[str] | None], None],
    ) -> Timer:
        asked = tuple(keys)
        wait = _Wait(self._waits, asked, then)
        if self.is_closed:
            return wait
        if not asked:  # a TCPStore would wait for ever
            self._loop.post(lambda: self._tell(wait.answer, []))
            return wait
        self._begin(asked, wait)
        if within_ns is not None:
            wait.deadline = self._loop.after(within_ns, lambda: self._look(wait))
        return wait

    def close(self) -> None:
        self.is_closed = True
        self.is_open = False
        for waits in self._waits.values():
            for wait in list(waits):
                wait.cancel()
        for waiter in self._idle:
            waiter.wait_for(None)
        self._idle.clear()
        self._another = None
        self._questions.put(None)

    # -- questions

    def _ask(self, ask: Callable[[BlockingClient], T], then: Callable[[T], None]) -> None:
        if not self.is_closed:
            self._questions.put(_Question(ask, then))

    def _ask_all(self) -> None:
        """The thread that asks."""
        try:
            client = self._dial(lambda: self.is_closed)
        except KeepstepError as error:
            self._loop.post(partial(self._end, self._tell_failed, str(error)))
            return
        self._loop.post(partial(self._opened, client))
        try:
            while (question := self._questions.get()) is not None:
                answer = question.ask(client)
                self._loop.post(partial(self._tell, question.then, answer))
        except MeetingError as error:
            self.memory_lost(str(error))

    def _opened(self, client: BlockingClient) -> None:
        if not self.is_closed:
            self.is_open, self.hosted, self._another = True, client.hosted, client.another
            self._tell_opened(self)

    def _tell(self, then: Callable[[T], None], answer: T) -> None:
        if not self.is_closed:
            then(answer)

    def _end(self, tell: Callable[[str], None], why: str) -> None:
        if not self.is_closed:
            self.close()
            tell(why)

    def memory_lost(self, why: str) -> None:
        """From a thread: the memory is gone."""
        self._loop.post(partial(self._end, self._tell_lost, why))

    def crashed(self, error: BaseException) -> None:
        """From a thread: a mistake of ours, which is the loop's to raise."""
        self._loop.post(partial(_raise, error))

    # -- waits

    def _begin(self, keys: Keys, wait: _Wait) -> None:
        if keys not in self._waits:
            waiter = self._idle.pop() if self._idle else _Waiter(self)
            self._waits[keys] = []
            waiter.wait_for(keys)
        self._waits[keys].append(wait)

    def connect(self) -> BlockingClient:
        """From a thread: a connection for it. Raises MeetingError."""
        another = self._another
        if another is None:
            raise MeetingError("closed")
        return another()

    def is_wanted(self, keys: Keys) -> bool:
        """From a thread: whether somebody still waits for these."""
        return bool(self._waits.get(keys))

    def ended(self, waiter: _Waiter, keys: Keys, found: list[str] | None) -> None:
        """From a thread: something is at all of these keys; None: nobody wants to know."""
        self._loop.post(partial(self._ended, waiter, keys, found))

    def _ended(self, waiter: _Waiter, keys: Keys, found: list[str] | None) -> None:
        waits = self._waits[keys]
        if found is None and waits and not self.is_closed:
            waiter.wait_for(keys)  # somebody has come meanwhile
            return
        del self._waits[keys]
        if self.is_closed or len(self._idle) == MAX_IDLE:
            waiter.wait_for(None)
        else:
            self._idle.append(waiter)
        for wait in list(waits):
            self._tell(wait.answer, found)  # unless one of them closes

    def _look(self, wait: _Wait) -> None:
        """Its time is over, but perhaps the thread that waits for it has only just begun."""
        self._ask(lambda client: client.read(wait.keys), wait.answer_in_time)


class _Question(Generic[T]):
    __slots__ = ("ask", "then")

    def __init__(self, ask: Callable[[BlockingClient], T], then: Callable[[T], None]) -> None:
        self.ask, self.then = ask, then


class _Wait:
    """See `ports.Timer`. Is in `waits` under its keys for as long as it may be answered."""

    def __init__(
        self,
        waits: dict[Keys, list[_Wait]],
        keys: Keys,
        then: Callable[[list[str] | None], None],
    ) -> None:
        self.keys = keys
        self._waits = waits
        self._then: Callable[[list[str] | None], None] | None = then
        self.deadline: LoopTimer | None = None

    def answer(self, found: list[str] | None) -> None:
        then = self._then
        self.cancel()
        if then is not None:
            then(found)

    def answer_in_time(self, found: list[str | None]) -> None:
        there = [value for value in found if value is not None]
        self.answer(there if len(there) == len(found) else None)

    def cancel(self) -> None:
        self._then = None
        if self.deadline is not None:
            self.deadline.cancel()
        waits = self._waits.get(self.keys, [])
        if self in waits:
            waits.remove(self)


class _Waiter:
    """A thread that waits, for one set of keys after the other, with a connection of its own."""

    def __init__(self, client: KVClient) -> None:
        self._client = client
        self._asked: SimpleQueue[Keys | None] = SimpleQueue()
        _start(self._wait_all, client.crashed, "keepstep-kv-wait")

    def wait_for(self, keys: Keys | None) -> None:
        """None: end."""
        self._asked.put(keys)

    def _wait_all(self) -> None:
        connection: BlockingClient | None = None
        try:
            while (keys := self._asked.get()) is not None:
                connection = connection or self._client.connect()
                found: list[str] | None = None
                while found is None and self._client.is_wanted(keys):
                    found = connection.wait(keys, connection.slice_s)
                if self._client.is_closed:  # perhaps nobody runs its loop any more
                    return
                self._client.ended(self, keys, found)
        except MeetingError as error:
            self._client.memory_lost(str(error))


def _start(work: Callable[[], None], crashed: Callable[[BaseException], None], name: str) -> None:
    """Not a pool's thread: the interpreter would wait for it at its end."""

    def run() -> None:
        try:
            work()
        except BaseException as error:
            crashed(error)
            raise

    threading.Thread(target=run, name=name, daemon=True).start()


def _raise(error: BaseException) -> NoReturn:
    raise error
