"""KV: the memory that all agents share, as `ports.KV` in virtual time.

`KVPlace` is where agents look for it, `SharedKeys` one life of it, `SimKV` the client of one
process. The memory is nobody's (as etcd is), or it is in the first process of one machine that
opens it (as an embedded store is) and is lost with that process.

What may happen, as it may with the real ones: questions and answers take a while, differently long
for each client; what two clients ask takes effect in either order. The memory is away for a while:
questions wait, and take effect late. An answer gets lost after the question took effect, or a
question arrives long after it was asked again. What was asked takes effect after its asker has
died. The memory is lost: who asks or waits is told so, and late if its host's machine has vanished
without a word. A process may be killed at each of its questions.

The real clients rely on it that no value is written twice in one key: a process that does so ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from keepstep.model.units import MS_NS, S_NS
from keepstep.ports import KV, Timer
from keepstep.sim.protocol.world.machine import Machine
from keepstep.sim.protocol.world.timers import SimTimer, SimTimers
from keepstep.sim.protocol.world.world import Process, World

LOOK_AGAIN_NS = 200 * MS_NS
MEET_WITHIN_NS = 60 * S_NS

T = TypeVar("T")
Told = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class KVPath:
    """How good the way to the memory is. `unanswered`: the part of all questions that are asked
    again after `again_ns`, because the answer got lost or the question is late by up to as much.
    `vanished_ns`: how long TCP tries to reach a machine that is no more."""

    latency_ns: int = MS_NS // 2
    jitter_ns: int = 2 * MS_NS
    unanswered: float = 0.02
    again_ns: int = 200 * MS_NS
    vanished_ns: int = 900 * S_NS


class KVPlace:
    """Where agents look for the memory. `host`: the machine whose first process that opens it has
    it; None: it is nobody's, and there from the beginning."""

    def __init__(self, world: World, path: KVPath, host: Machine | None = None) -> None:
        self.world, self.path, self.host = world, path, host
        self.random = world.stream("kv")
        self.away_until_ns = 0
        self.on_write: Callable[[str, str], None] = _nobody
        self.keys: SharedKeys | None = SharedKeys(self) if host is None else None

    def host_at(self, machine: Machine) -> None:
        """From now on the endpoint names this machine."""
        if self.host is None:
            self.keys = None
        self.host = machine

    def open(
        self, process: Process, opened: Callable[[KV], None], failed: Told, lost: Told
    ) -> Timer:
        """See `ports.OpenKV`."""
        process.touch("open kv")
        return SimOpening(self, process, opened, failed, lost)

    def go_away(self, for_ns: int) -> None:
        """Nothing is answered and nothing takes effect for so long."""
        self.away_until_ns = max(self.away_until_ns, self.world.now_ns + for_ns)

    def lose(self, why: str, after_ns: int = 0) -> None:
        """All keys, for good; who asks or waits hears of that after `after_ns`. Who opens it after
        that finds another life of it, if there is a host."""
        if self.keys is not None:
            self.keys.lose(why, after_ns)
        if self.host is not None:
            self.keys = None

    def delay_ns(self) -> int:
        return self.path.latency_ns + self.random.randrange(self.path.jitter_ns)


class SharedKeys:
    """One life of the memory. Every method is one instant of it."""

    def __init__(self, place: KVPlace) -> None:
        self.place = place
        self.written: dict[str, str] = {}
        self.why_lost = ""
        self.told_after_ns = 0
        self._been: set[tuple[str, str]] = set()  # every value that was there, in every key
        self._waits: dict[str, list[SimWait]] = {}  # by a key that is missing

    def swap(self, key: str, expected: str | None, value: str) -> str | None:
        there = self.written.get(key)
        if there != expected:
            return there
        assert (key, value) not in self._been, f"{value!r} was in {key} before"
        self._been.add((key, value))
        self.written[key] = value
        self.place.on_write(key, value)
        for wait in self._waits.pop(key, []):
            self.look(wait)
        return value

    def inject(self, key: str, value: str) -> None:
        """Somebody who is none of the agents has written that, where nothing was."""
        assert key not in self.written
        self.written[key] = value
        for wait in self._waits.pop(key, []):
            self.look(wait)

    def swap_while(
        self, guard: tuple[str, str], key: str, expected: str | None, value: str
    ) -> str | None:
        holds = self.written.get(guard[0]) == guard[1]
        return self.swap(key, expected, value) if holds else self.written.get(key)

    def read(self, keys: Sequence[str]) -> list[str | None]:
        return [self.written.get(key) for key in keys]

    def look(self, wait: SimWait) -> None:
        """Answer it now, or when what is missing has been written."""
        missing = next((key for key in wait.keys if key not in self.written), None)
        if missing is not None:
            self._waits.setdefault(missing, []).append(wait)
        else:
            wait.found(self.read(wait.keys))

    def lose(self, why: str, after_ns: int) -> None:
        self.why_lost, self.told_after_ns = why, after_ns
        waits, self._waits = self._waits, {}
        for each in waits.values():
            for wait in each:
                wait.lost()


class SimKV:
    """See `ports.KV`: one client, which asks one question after the other."""

    def __init__(self, keys: SharedKeys, process: Process, lost: Told, hosted: bool) -> None:
        self._keys, self._place, self._process = keys, keys.place, process
        self._tell_lost, self.hosted = lost, hosted
        self.timers = SimTimers(process)
        self._questions: deque[SimQuestion[Any]] = deque()
        self.is_closed = False

    # -- the port

    def swap(
        self, key: str, expected: str | None, value: str, then: Callable[[str | None], None]
    ) -> None:
        assert value and expected != value
        is_broken = self._process.touch("swap", key)
        self._ask(SimQuestion(lambda: self._keys.swap(key, expected, value), then, is_broken))

    def swap_while(
        self,
        guard: tuple[str, str],
        key: str,
        expected: str | None,
        value: str,
        then: Callable[[str | None], None],
    ) -> None:
        assert value and expected != value
        is_broken = self._process.touch("swap", key)
        question = partial(self._keys.swap_while, guard, key, expected, value)
        self._ask(SimQuestion(question, then, is_broken))

    def read(self, keys: Sequence[str], then: Callable[[list[str | None]], None]) -> None:
        asked = tuple(keys)
        is_broken = self._process.touch("read", *asked[:1])
        self._ask(SimQuestion(lambda: self._keys.read(asked), then, is_broken))

    def wait(
        self,
        keys: Sequence[str],
        within_ns: int | None,
        then: Callable[[list[str] | None], None],
    ) -> Timer:
        self._process.touch("wait", *keys[:1])
        wait = SimWait(self, tuple(keys), then)
        if not self.is_closed:
            self.arrive(lambda: self._keys.look(wait), self._place.delay_ns())
            if within_ns is not None:
                wait.deadline = self.timers.after(within_ns, lambda: self._look_late(wait))
        return wait

    def close(self) -> None:
        self.is_closed = True
        self._questions.clear()
        if self.hosted and self._place.keys is self._keys:
            self._place.lose("its host has closed it")

    # -- the way there and back

    def _ask(self, question: SimQuestion[Any]) -> None:
        if not self.is_closed:
            self._questions.append(question)
            if len(self._questions) == 1:
                self._send()

    def _send(self) -> None:
        """Of the questions the first; again, if that went without an answer."""
        if self.is_closed or not self._questions:
            return
        question, place = self._questions[0], self._place
        delay_ns = place.delay_ns()
        if not question.is_broken and place.random.random() >= place.path.unanswered:
            self.arrive(lambda: self._effect(question, True), delay_ns)
            return
        question.is_broken = False
        if place.random.random() < 0.5:
            delay_ns += place.random.randrange(2 * place.path.again_ns)
        self.arrive(lambda: self._effect(question, False), delay_ns)
        self._process.after(place.path.again_ns, self._send)

    def arrive(self, call: Callable[[], None], delay_ns: int = 0) -> None:
        """Have this happen where the memory is, once it is there; the process may have died by
        then."""
        self._place.world.after(delay_ns, None, self._arrived, call)

    def _arrived(self, call: Callable[[], None]) -> None:
        place = self._place
        if self._keys.why_lost:
            self.hear_of_loss()
        elif place.world.now_ns < place.away_until_ns:
            place.world.at(place.away_until_ns, None, self._arrived, call)
        else:
            place.world.carry_out(self._process, call)

    def _effect(self, question: SimQuestion[T], is_answered: bool) -> None:
        answer = question.effect()
        if is_answered:
            self.answer(lambda: self._answered(question, answer))

    def answer(self, call: Callable[[], None]) -> None:
        """Have this happen in the process, when the answer has come there."""
        self._process.after(self._place.delay_ns(), call)

    def _answered(self, question: SimQuestion[T], answer: T) -> None:
        if self.is_closed:
            return
        assert self._questions.popleft() is question
        self._send()
        question.then(answer)

    def hear_of_loss(self) -> None:
        """Where the memory was."""
        self._process.after(self._keys.told_after_ns + self._place.delay_ns(), self._lose)

    def _lose(self) -> None:
        if not self.is_closed:
            self.close()
            self._tell_lost(f"the memory is gone: {self._keys.why_lost}")

    def _look_late(self, wait: SimWait) -> None:
        """Its time is over, and perhaps its question is not even there yet."""
        if not self.is_closed:
            self.arrive(lambda: wait.found(self._keys.read(wait.keys)), self._place.delay_ns())


class SimQuestion(Generic[T]):
    """`is_broken`: the first answer to it gets lost, whatever chance says."""

    __slots__ = ("effect", "is_broken", "then")

    def __init__(self, effect: Callable[[], T], then: Callable[[T], None], is_broken: bool) -> None:
        self.effect, self.then, self.is_broken = effect, then, is_broken


class SimWait:
    """See `ports.Timer`."""

    __slots__ = ("_client", "_then", "deadline", "keys")

    def __init__(
        self,
        client: SimKV,
        keys: tuple[str, ...],
        then: Callable[[list[str] | None], None],
    ) -> None:
        self._client, self.keys = client, keys
        self._then: Callable[[list[str] | None], None] | None = then
        self.deadline: SimTimer | None = None

    def found(self, values: list[str | None]) -> None:
        """Where the memory is: this is there, and if not all is, the wait is over nevertheless."""
        there = [value for value in values if value is not None]
        self._client.answer(lambda: self._tell(there if len(there) == len(values) else None))

    def lost(self) -> None:
        """Where the memory was."""
        if self._then is not None:
            self._client.hear_of_loss()

    def _tell(self, answer: list[str] | None) -> None:
        then = self._then
        self.cancel()
        if then is not None and not self._client.is_closed:
            then(answer)

    def cancel(self) -> None:
        self._then = None
        if self.deadline is not None:
            self.deadline.cancel()


class SimOpening:
    """See `ports.Timer`: looks for the memory until it is there."""

    def __init__(
        self,
        place: KVPlace,
        process: Process,
        opened: Callable[[KV], None],
        failed: Told,
        lost: Told,
    ) -> None:
        self._place, self._process = place, process
        self._opened, self._failed, self._lost = opened, failed, lost
        self._until_ns = place.world.now_ns + MEET_WITHIN_NS
        self._is_over = False
        self._look_after(place.delay_ns())

    def _look_after(self, delay_ns: int) -> None:
        self._process.after(delay_ns, self._look)

    def cancel(self) -> None:
        self._is_over = True

    def _look(self) -> None:
        place, now_ns = self._place, self._place.world.now_ns
        if self._is_over:
            return
        if now_ns < place.away_until_ns:
            self._look_after(place.away_until_ns - now_ns)
            return
        hosts = place.keys is None and self._process.machine is place.host
        if hosts:
            self._host()
        keys = place.keys
        if keys is not None and not keys.why_lost:
            self._is_over = True
            self._opened(SimKV(keys, self._process, self._lost, hosts))
        elif now_ns < self._until_ns:
            self._look_after(LOOK_AGAIN_NS)
        else:
            self._is_over = True
            self._failed("found nobody at the meeting point")

    def _host(self) -> None:
        place = self._place
        keys = place.keys = SharedKeys(place)

        def ended() -> None:
            if place.keys is keys:
                has_vanished = not self._process.machine.alive
                place.lose("its host has died", place.path.vanished_ns if has_vanished else 0)

        self._process.on_end.append(ended)


def _nobody(key: str, value: str) -> None:
    """Nobody wants to know."""
