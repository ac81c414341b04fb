"""Ports of the rank and of the agent for tests of their parts: time that passes when a test says
so, work that runs when a test lets it, and neighbours that keep what they are told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from keepstep.coding.checksum import checksum
from keepstep.core.detection.deadlines import derive
from keepstep.core.postmortem.table import parse_table
from keepstep.edge.os.own_tables import pattern_text
from keepstep.edge.os.threads import run_acts
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch.page_locks import PageLocks
from keepstep.errors import KeepstepError
from keepstep.model.device import DeviceAnswer
from keepstep.model.diagnosis import GroupSample, ProcessSample, Stack
from keepstep.model.events import INFO, Event
from keepstep.model.launch import ErrorReport, Launch, RankAssignment, RankEnd
from keepstep.model.layout import Layout, TensorSpec, lay_out
from keepstep.model.lost import LostNode
from keepstep.model.messages.agent_rank import RegroupAt
from keepstep.model.numbers import NotFinite
from keepstep.model.replicas import Replicas
from keepstep.model.snapshot import SlotHeader
from keepstep.model.step_work import FixedWork, Hindrance
from keepstep.model.units import GIB, KIB, S_NS
from keepstep.ports import Acts, Box
from keepstep.runtime.agent.world import AgentOptions, AgentWorld
from keepstep.runtime.rank.world import RankIdentity, RankOptions, RankWorld

PYTHON = "/usr/bin/python3"
PATTERNS = parse_table(pattern_text())


class FakeTimer:
    """See `ports.Timer`."""

    def __init__(self, due_ns: int, call: Callable[[], None]) -> None:
        self.due_ns = due_ns
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class FakeTime:
    """A clock and its timers. Nothing comes before the test lets time pass."""

    def __init__(self) -> None:
        self.now_ns = 1000 * S_NS
        self._timers: list[FakeTimer] = []

    def monotonic_ns(self) -> int:
        return self.now_ns

    def boot(self) -> str:
        return "b"

    def wall_ns(self) -> int:
        return 1_700_000_000 * S_NS + self.now_ns

    def after(self, delay_ns: int, call: Callable[[], None]) -> FakeTimer:
        timer = FakeTimer(self.now_ns + max(0, delay_ns), call)
        self._timers.append(timer)
        return timer

    def pass_ns(self, duration_ns: int = 0) -> None:
        """Everything that is due by then comes, in order."""
        until_ns = self.now_ns + duration_ns
        while due := [t for t in self._timers if t.call is not None and t.due_ns <= until_ns]:
            timer = min(due, key=lambda t: t.due_ns)
            self._timers.remove(timer)
            self.now_ns = max(self.now_ns, timer.due_ns)
            call, timer.call = timer.call, None
            assert call is not None
            call()
        self.now_ns = until_ns


class FakeJournal:
    """See `ports.Journal`."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.levels: list[int] = []  # of the events

    def record(self, kind: str, why: str, /, level: int = INFO, **data: Any) -> None:
        self.levels.append(level)
        self.events.append(Event(0, 0, "", kind, why, data))

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]


class FakeExecutor:
    """See `ports.Executor`. What is submitted runs at `run`."""

    def __init__(self) -> None:
        self._work: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = deque()

    def submit(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        self._work.append((work, then))

    def act(self, acts: Acts[Any], then: Callable[[Any], None]) -> None:
        self.submit(lambda: run_acts(acts), then)

    def run(self) -> bool:
        """Whether there was anything to do."""
        had_work = bool(self._work)
        while self._work:
            work, then = self._work.popleft()
            then(work())
        return had_work


class FakeBox:
    """See `ports.Box`. Keeps what is sent; `rest` is what has come and was not heard yet."""

    def __init__(self, pid: int = 4711, hearer: Any = None) -> None:
        self.pid = pid
        self.hearer = hearer
        self.sent: list[Any] = []
        self.poked: list[Any] = []
        self.rest: list[Any] = []
        self.is_open = True
        self.is_released = False

    def send(self, message: Any, /) -> bool:
        if self.is_open:
            self.sent.append(message)
        return self.is_open

    def poke(self, message: Any, /) -> None:
        self.poked.append(message)

    def hear_rest(self) -> None:
        rest, self.rest = self.rest, []
        for message in rest:
            self.hearer.hear(self, message)

    def close(self) -> None:
        self.is_open = False

    def release(self) -> None:
        self.is_released = True

    def says(self, message: Any) -> None:
        """The other end."""
        self.hearer.hear(self, message)

    def dies(self) -> None:
        """The other end."""
        self.is_open = False
        self.hearer.gone(self)

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


class FakeKeepers:
    """See `ports.Keepers`. `error`: there is none, and why; else each search finds another one,
    or those of `next_pids`. `ended`: whom somebody has killed."""

    def __init__(self) -> None:
        self.error: KeepstepError | None = None
        self.boxes: list[FakeBox] = []
        self.next_pids: deque[int] = deque()
        self.ended: list[Box] = []
        self.searches = 0

    def find(
        self,
        hearer: Any,
        found: Callable[[Box], None],
        missing: Callable[[KeepstepError], None],
    ) -> None:
        self.searches += 1
        if self.error is not None:
            missing(self.error)
            return
        pid = self.next_pids.popleft() if self.next_pids else 100 + self.searches
        self.boxes.append(FakeBox(pid, hearer))
        found(self.boxes[-1])

    def end(self, box: Any) -> None:
        self.ended.append(box)
        box.dies()

    @property
    def box(self) -> FakeBox:
        """The newest keeper's."""
        return self.boxes[-1]


class FakeAgents:
    """See `ports.Agents`."""

    def __init__(self, is_there: bool = True) -> None:
        self.is_there = is_there
        self.box = FakeBox(50)

    def find(self, hearer: Any) -> Box | None:
        self.box.hearer = hearer
        return self.box if self.is_there else None


# -- the rank's


@dataclass(frozen=True)
class FakeGathered:
    """See `ports.Gathered`."""

    layout: Layout
    remark: str = ""

    @property
    def payload_bytes(self) -> int:
        return self.layout.objects_offset + 1


class FakeCopy:
    """See `ports.StateCopy`."""

    copy_ns = 7

    def __init__(
        self,
        live: FakeLive,
        slot: Slot,
        nbytes: int,
        lacking: frozenset[int],
        shared: frozenset[int] = frozenset(),
    ) -> None:
        self._shared = shared
        self._live = live
        self._slot = slot
        self._nbytes = nbytes
        self._lacking = lacking
        self.moved: Sequence[str] = ()
        self.sums: Mapping[int, int] = {}
        self.digests: Mapping[int, int] = {}
        self.is_over = False

    def copy_moving(self) -> None:
        self._slot.payload[self._nbytes] = 1

    def copy_still(self) -> Acts[None]:
        yield
        if self._live.error is not None:
            raise self._live.error
        state, size = memoryview(self._live.state), self._slot.block_bytes
        for block, at in enumerate(range(0, self._nbytes, size)):
            part = state[at : at + size]
            if block in self._shared and self._live.is_on_device:
                digest = checksum(b"on a device" + part)  # nothing but equal for equal bytes
                self.digests = {**self.digests, block: digest}
            if block in self._lacking:
                self.sums = {**self.sums, block: self.digests.get(block, checksum(part))}
            else:
                self._slot.payload[at : at + len(part)] = part
        self.moved = self._live.moves

    def settle(self) -> Acts[None]:
        yield
        self.moved = self.moved or self._live.moves_late

    def passed(self) -> None:
        self.moved = self.moved or self._live.moves_unseen

    def not_finite(self) -> NotFinite:
        return NotFinite(tuple(self._live.bad), self._live.is_meant)

    def fence(self, update: object = None) -> bool:
        """Nobody waits here."""
        return True

    @property
    def is_on_device(self) -> bool:
        return self._live.is_on_device

    def waited_ns(self) -> int | None:
        return self._live.device_ns

    def end(self) -> None:
        self.is_over = True


class FakeLive:
    """See `ports.LiveState`: `state` is all there is. `moves`: what changes while it is copied;
    `moves_late`: what is seen of that behind the copy; `moves_unseen`: what nobody sees before the
    trainer looks; `bad`: what of the copy is not finite, and `is_meant`; `error`: what copying
    raises; `differs`: what is not as loaded; `locks`: of the device that the state is on."""

    def __init__(self, state: bytes = b"\0" * 64) -> None:
        self.state = state
        self.moves: Sequence[str] = ()
        self.moves_late: Sequence[str] = ()
        self.moves_unseen: Sequence[str] = ()
        self.bad: Sequence[str] = ()
        self.is_meant = False
        self.error: Exception | None = None
        self.differs: list[str] = []
        self.remark = ""
        self.eager: list[str] = []
        self.checkpoints: dict[int, bytes] = {}
        self.checkpoint_error: KeepstepError | None = None
        self.locks: PageLocks | None = None
        self.own_blocks: frozenset[int] = frozenset()  # that are never shared
        self.shared: Replicas | None = None
        self.is_on_device = False
        self.device_ns: int | None = None  # what a device has waited for each copy
        self.behind: Callable[[], bool] | None = None

    def gather(self) -> FakeGathered:
        size = len(self.state)
        return FakeGathered(lay_out([TensorSpec("state", "uint8", (size,), size)]), self.remark)

    def copy(
        self,
        gathered: Any,
        slot: Slot,
        lacking: frozenset[int] = frozenset(),
        shared: frozenset[int] = frozenset(),
    ) -> FakeCopy:
        return FakeCopy(self, slot, len(self.state), lacking, shared)

    def still_blocks(self, gathered: Any, block_bytes: int) -> frozenset[int]:
        return frozenset(range(len(self.state) // block_bytes)) - self.own_blocks

    def replicas(self, gathered: Any) -> Replicas | None:
        return self.shared

    def copy_eagerly(self, names: Sequence[str]) -> None:
        self.eager += names

    def coming_bytes(self) -> tuple[int, int, str]:
        return self.gather().payload_bytes, 4 * KIB, ""

    def device_behind(self) -> Callable[[], bool] | None:
        return self.behind

    def restoring_bytes(self) -> int:
        return 0

    def pin(self, slot: Slot) -> str | None:
        return None if self.locks is None else self.locks.lock(slot)

    def load(self, slot: Slot, header: SlotHeader, layout: Layout) -> list[str]:
        self.state = bytes(slot.payload[: len(self.state)])
        return []

    def differing(self, slot: Slot, header: SlotHeader, layout: Layout) -> list[str]:
        slot.verify()
        return self.differs

    def load_checkpoint(self, step: int) -> list[str]:
        if self.checkpoint_error is not None:
            raise self.checkpoint_error
        self.state = self.checkpoints[step]
        return ["the scheduler is another one"]

    def caveats(self) -> list[str]:
        return []


class FakeGroups:
    """See `ports.Groups`. `stood`: whether marks stand; `cannot_abort` and `answers`: what comes of
    aborting, and of each look at the device."""

    def __init__(self) -> None:
        self.can_be_rebuilt = True
        self.is_muted = False
        self.is_worthless = False
        self.why_lost = ""
        self.bodies = 0
        self.lost: list[str] = []
        self.expects_notice = False
        self.is_closed = False
        self.rebuilding: list[tuple[RegroupAt, Callable[[str | None], None]]] = []
        self.gathering: list[tuple[bytes, Callable[[list[bytes]], None]]] = []
        self.profiled: list[int] = []
        self.has_device = False
        self.stood = True
        self.aborts = 0
        self.cannot_abort: list[str] = []
        self.answers: deque[DeviceAnswer] = deque()

    def mark(self) -> object:
        return None

    def stands(self, mark: object) -> bool:
        return self.stood

    def abort(self, within_ns: int) -> list[str]:
        self.aborts += 1
        return self.cannot_abort

    def look_at_device(self, within_ns: int) -> DeviceAnswer:
        return self.answers.popleft() if self.answers else DeviceAnswer()

    def begin_body(self) -> None:
        self.bodies += 1
        self.is_worthless = False

    def lose(self, why: str) -> None:
        self.lost.append(why)

    def listen(self, on_error: Callable[[str], None], on_enter: Callable[[int], None]) -> None:
        self.on_error, self.on_enter = on_error, on_enter

    def expect_notice(self) -> None:
        self.expects_notice = True

    def rebuild(self, place: RegroupAt, then: Callable[[str | None], None]) -> None:
        self.rebuilding.append((place, then))

    def gather(self, mine: bytes, then: Callable[[list[bytes]], None]) -> None:
        self.gathering.append((mine, then))

    def record_profile(self, path: Path) -> None:
        """Nobody looks."""

    def profile_step(self, step: int) -> None:
        self.profiled.append(step)

    def close(self) -> None:
        self.is_closed = True


class RankRoom:
    """A rank's world, and everybody in it."""

    def __init__(
        self, home: Path, has_agent: bool = True, rank: int = 0, ranks: int = 1, nodes: int = 1
    ) -> None:
        self.time = FakeTime()
        self.journal = FakeJournal()
        self.keepers = FakeKeepers()
        self.agents = FakeAgents(has_agent)
        self.live = FakeLive()
        self.groups = FakeGroups()
        self.trainer = FakeExecutor()
        self.background = FakeExecutor()
        self.aside = FakeExecutor()
        self.who = RankIdentity("j", 1000, rank, ranks, ranks // nodes)
        self.options = RankOptions(
            job_dir=home / "keepstep-j",
            arena_dir=home,
            slots=3,
            redundancy="none",
            has_store=False,
            persist_every_steps=0,
            keeps_by_loss=False,
            shows_profile=False,
            grace_s=300.0,
            fresh_run=None,
            launch="",
        )
        (home / "keepstep-j").mkdir(exist_ok=True)
        self.world = RankWorld(
            clock=self.time,
            timers=self.time,
            memory=MEMORY,
            journal=self.journal,
            keepers=self.keepers,
            agents=self.agents,
            live=self.live,
            groups=self.groups,
            trainer=self.trainer,
            background=self.background,
            aside=self.aside,
            available_bytes=lambda: 8 * GIB,
            pid=77,
            has_agent=has_agent,
        )

    def settle(self) -> None:
        """Everything that can happen without time passing does."""
        self.time.pass_ns()
        while self.trainer.run() or self.background.run() or self.aside.run():
            self.time.pass_ns()


# -- the agent's


class Table:
    """What the clients of one memory share."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.waits: list[Callable[[], None]] = []


class FakeKV:
    """See `ports.KV`. Answers come when time passes. `delay_ns`: how long each takes."""

    def __init__(self, time: FakeTime, table: Table, hosted: bool = False) -> None:
        self._time = time
        self._table = table
        self.hosted = hosted
        self.is_closed = False

    def swap(
        self, key: str, expected: str | None, value: str, then: Callable[[str | None], None]
    ) -> None:
        self._time.after(0, lambda: self._swap(key, expected, value, then, True))

    def _swap(
        self,
        key: str,
        expected: str | None,
        value: str,
        then: Callable[[str | None], None],
        may: bool,
    ) -> None:
        found = self._table.values.get(key)
        if found == expected and may:
            found = self._table.values[key] = value
        if not self.is_closed:
            then(found)
        for look in list(self._table.waits):
            look()

    def swap_while(
        self,
        guard: tuple[str, str],
        key: str,
        expected: str | None,
        value: str,
        then: Callable[[str | None], None],
    ) -> None:
        def act() -> None:
            holds = self._table.values.get(guard[0]) == guard[1]
            self._swap(key, expected, value, then, holds)

        self._time.after(0, act)

    def read(self, keys: Sequence[str], then: Callable[[list[str | None]], None]) -> None:
        def act() -> None:
            if not self.is_closed:
                then([self._table.values.get(key) for key in keys])

        self._time.after(0, act)

    def wait(
        self,
        keys: Sequence[str],
        within_ns: int | None,
        then: Callable[[list[str] | None], None],
    ) -> FakeTimer:
        wanted = list(keys)

        def look() -> None:
            values = self._table.values
            if timer.call is not None and all(key in values for key in wanted):
                end([values[key] for key in wanted])

        def end(answer: list[str] | None) -> None:
            timer.cancel()
            if look in self._table.waits:
                self._table.waits.remove(look)
            if not self.is_closed:
                then(answer)

        forever_ns = 10**18 if within_ns is None else within_ns
        timer = self._time.after(forever_ns, lambda: end(None))
        self._table.waits.append(look)
        self._time.after(0, look)
        return timer

    def close(self) -> None:
        self.is_closed = True


class FakeProcesses:
    """See `ports.RankProcesses`. Whoever is killed ends when time passes, but for `undead`."""

    may_stand_by = True

    def __init__(self, time: FakeTime) -> None:
        self._time = time
        self._ended: Callable[[Sequence[RankEnd]], None] = lambda ends: None
        self.living: dict[int, int] = {}
        self.standby_pid: int | None = None
        self.started: list[tuple[RankAssignment, set[int], dict[str, str]]] = []
        self.killed: list[set[int]] = []
        self.signals: list[int] = []
        self.undead: set[int] = set()
        self.orphans: list[int] = []  # whose were to be ended
        self.closed: list[bool] = []
        self._next_pid = 1000

    def listen(self, ended: Callable[[Sequence[RankEnd]], None]) -> None:
        self._ended = ended

    def start(
        self, place: RankAssignment, ranks: Collection[int], environ: Mapping[str, str]
    ) -> dict[int, int]:
        self.started.append((place, set(ranks), dict(environ)))
        pids = {rank: self._pid() for rank in sorted(ranks)}
        self.living.update(pids)
        return pids

    def _pid(self) -> int:
        self._next_pid += 1
        return self._next_pid

    def start_standby(self) -> None:
        self.standby_pid = self._pid()

    def standby_becomes(self, rank: int) -> int:
        assert self.standby_pid is not None
        pid, self.standby_pid = self.standby_pid, None
        self.living[rank] = pid
        return pid

    def environ_of(self, rank: int, place: RankAssignment) -> dict[str, str]:
        return {"RANK": str(place.first_rank + rank)}

    def signal(self, signum: int) -> None:
        self.signals.append(signum)

    def kill(self, ranks: Collection[int]) -> None:
        self.killed.append(set(ranks))
        dying = [rank for rank in sorted(ranks) if rank not in self.undead]
        self._time.after(1, lambda: self.end(*((rank, -9) for rank in dying)))

    def end(self, *ends: tuple[int, int], message: str = "") -> None:
        """These end now, with that code each."""
        told = [
            RankEnd(rank, self.living.pop(rank), code, ErrorReport(message))
            for rank, code in ends
            if rank in self.living
        ]
        if told:
            self._ended(told)

    def end_orphans(self, agent_pids: Sequence[int], then: Callable[[list[int]], None]) -> None:
        self.orphans.extend(agent_pids)
        self._time.after(1, lambda: then([11, 12]))

    def summary(self, ends: Sequence[tuple[int, int]]) -> str:
        return f"failed: {ends}"

    def close(self, keep_errors: bool) -> None:
        self.closed.append(keep_errors)


class FakeProbes:
    """See `ports.Probes`. `states`: of processes; who is not in it is asleep."""

    def __init__(self) -> None:
        self.states: dict[int, Any] = {}
        self.save_error: OSError | None = None
        self.oom_kills: int | None = None
        self.works: dict[int, FixedWork] = {}

    def process(self, pid: int) -> ProcessSample:
        state = self.states.get(pid, "asleep")
        return ProcessSample(state, 0, 0 if state == "gone" else 1)

    def group_of(self, pid: int) -> int | None:
        return pid

    def group(self, group: int) -> GroupSample:
        return GroupSample(0, 0)

    def oom_counter(self, pid: int) -> Callable[[], int | None]:
        return lambda: self.oom_kills

    def machine_oom_kills(self) -> int | None:
        return self.oom_kills

    def hindrance(self, pid: int) -> Callable[[], Hindrance]:
        return Hindrance

    def fixed_work(self, pids: Mapping[int, int], within_ns: int) -> dict[int, FixedWork]:
        return self.works

    def stacks(self, pids: Mapping[int, int], within_ns: int) -> dict[int, Stack]:
        return {rank: Stack(f"stack of {rank}") for rank in pids}

    def save_stacks(self, stacks: Mapping[int, Stack]) -> str:
        if self.save_error is not None:
            raise self.save_error
        return "/stacks-1"

    def recorder_dumps(self, pids: Mapping[int, int], newer_than_ns: int) -> dict[int, object]:
        return {}


class FakeServer:
    """See `ports.BoxServer`: who listens, and whether it still does."""

    def __init__(self, path: Path, hearer: Any) -> None:
        self.path = path
        self.hearer = hearer
        self.is_open = True

    def close(self) -> None:
        self.is_open = False


class FakeMeetingPlaces:
    """See `ports.MeetingPlaces`."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, int]] = []
        self.error: KeepstepError | None = None
        self.is_closed = False

    def open(self, host: str, port: int) -> int:
        if self.error is not None:
            raise self.error
        self.opened.append((host, port))
        return port or 29000 + len(self.opened)

    def close(self) -> None:
        self.is_closed = True


class FakeProvider:
    """See `ports.NodeProvider`."""

    def __init__(self) -> None:
        self.asked: list[LostNode] = []

    def replace(self, lost: LostNode, then: Callable[[str], None]) -> None:
        self.asked.append(lost)
        then("one is on its way")


@dataclass
class Told:
    """What an agent has told the outside."""

    attempts: list[int] = field(default_factory=list)
    last_words: list[int] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)


class AgentRoom:
    """An agent's world, and everybody in it. Rooms of one job share `time` and `table`."""

    def __init__(
        self,
        home: Path,
        ranks: int = 2,
        nodes: int = 1,
        time: FakeTime | None = None,
        table: Table | None = None,
        number: int = 0,
    ) -> None:
        self.time = FakeTime() if time is None else time
        self.table = Table() if table is None else table
        self.journal = FakeJournal()
        self.keepers = FakeKeepers()
        self.processes = FakeProcesses(self.time)
        self.probes = FakeProbes()
        self.executor = FakeExecutor()
        self.places = FakeMeetingPlaces()
        self.provider = FakeProvider()
        self.servers: list[FakeServer] = []
        self.told = Told()
        self.kv_error: str | None = None
        self.lost: Callable[[str], None] = lambda why: None
        self._tokens = 0
        self._number = number
        job_dir = home / "keepstep-j"
        job_dir.mkdir(parents=True, exist_ok=True)
        self.launch = Launch(
            command=(PYTHON, "-u", "train.py"),
            argv=("train.py",),
            ranks=ranks,
            standby=0,
            nodes=nodes,
            min_nodes=nodes,
            endpoint=("h", 1) if nodes > 1 else None,
        )
        self.options = AgentOptions(
            job="j",
            job_dir=job_dir,
            has_store=False,
            budget="",
            secret=None,
            encrypt=False,
            rack=None,
            link_dead_s=10.0,
            shrink_after_s=30.0,
            deadlines=derive(),
            host=f"host{number}",
        )
        self.world = AgentWorld(
            clock=self.time,
            timers=self.time,
            memory=MEMORY,
            journal=self.journal,
            executor=self.executor,
            keepers=self.keepers,
            processes=self.processes,
            probes=self.probes,
            serve_boxes=self._serve,
            open_kv=self._open_kv,
            meeting_places=self.places,
            provider=self.provider,
            token=self._token,
            take_part=self.told.attempts.append,
            say_last_word=self.told.last_words.append,
            show=self.told.shown.append,
            pid=500 + number,
            interpreter=PYTHON,
            patterns=PATTERNS,
        )

    def change(self, **options: Any) -> None:
        self.options = replace(self.options, **options)

    def _serve(self, path: Path, hearer: Any) -> FakeServer:
        self.servers.append(FakeServer(path, hearer))
        return self.servers[-1]

    def _token(self) -> str:
        self._tokens += 1
        return f"token-{self._number}-{self._tokens}"

    def _open_kv(
        self,
        opened: Callable[[Any], None],
        failed: Callable[[str], None],
        lost: Callable[[str], None],
    ) -> FakeTimer:
        self.lost = lost
        if self.kv_error is not None:
            why = self.kv_error
            return self.time.after(0, lambda: failed(why))
        kv = FakeKV(self.time, self.table, hosted=self._number == 0)
        return self.time.after(0, lambda: opened(kv))

    def settle(self) -> None:
        """Everything that can happen without time passing does."""
        self.time.pass_ns()
        while self.executor.run():
            self.time.pass_ns()
