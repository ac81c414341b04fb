"""What an agent asks for: a memory shared by all nodes, and the processes of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from keepstep.model.diagnosis import GroupSample, ProcessSample, Stack
from keepstep.model.launch import RankAssignment, RankEnd
from keepstep.model.lost import LostNode
from keepstep.model.step_work import FixedWork, Hindrance

if TYPE_CHECKING:  # a format laid over a Memory, which these ports only hand on
    pass
from keepstep.ports.machine import Timer


class KV(Protocol):
    """A small memory that all nodes of a job share; its clients never block.

    Swaps are all that writes, and they write at one instant for everybody: seats and verdicts are
    swapped against nothing, so that the first writer wins; who leads is swapped against what was
    read. No value is empty. A stranger's value that is no UTF-8 is read with surrogates for what is
    none, and can be swapped out. Nobody writes a value, in one key, that was there before: a client
    that gets no answer asks again, so a swap may take effect late, also after its asker has died,
    and does no harm.

    What is asked by `swap`, `swap_while` and `read` takes effect, and is answered, in the order in
    which it was asked. A `wait` stands beside that order, and so does its answer. What passes (a
    restart, an election) is waited out, and meanwhile nothing is answered.

    When the memory is gone for good, the client says so once, by the `lost` it was opened with, as
    soon as it asks or waits. After that, and after `close`, it answers nothing any more: questions
    may still be asked and waits cancelled, and what had no answer by then may have taken effect, or
    may yet.
    """

    @property
    def hosted(self) -> bool:
        """Whether the memory is in this process, and is lost for all when this client is closed or
        the process ends."""

    def swap(
        self, key: str, expected: str | None, value: str, then: Callable[[str | None], None]
    ) -> None:
        """Write `value` if `expected` is there (None: nothing is). `then` hears what is there now:
        `value` if that was so, else what was found (None: nothing)."""

    def swap_while(
        self,
        guard: tuple[str, str],
        key: str,
        expected: str | None,
        value: str,
        then: Callable[[str | None], None],
    ) -> None:
        """The same, if `guard` still holds: a key and what is there. An etcd looks at it in the
        very instant in which it writes `value`; a TCPStore, without transactions, just before."""

    def read(self, keys: Sequence[str], then: Callable[[list[str | None]], None]) -> None:
        """`then` hears what is there, in the order of `keys`, each as of some instant after the
        question; None where nothing is."""

    def wait(
        self,
        keys: Sequence[str],
        within_ns: int | None,
        then: Callable[[list[str] | None], None],
    ) -> Timer:
        """`then` hears what is there once something is at all of these. It hears None when
        something was still missing after `within_ns` nanoseconds; None for `within_ns` waits
        without end. Cancelled, it hears nothing."""

    def close(self) -> None:
        """Nothing is answered any more, not even what has been answered on the way here."""


class OpenKV(Protocol):
    """Finds the memory of a job, or makes it where that is this machine's part."""

    def __call__(
        self,
        opened: Callable[[KV], None],
        failed: Callable[[str], None],
        lost: Callable[[str], None],
    ) -> Timer:
        """Returns at once. The loop calls `opened` with a client, or `failed` with why there is
        none; neither when it is cancelled before. `lost` hears once why the memory is gone (see
        `KV`), only after `opened` and never after `close`."""


class MeetingPlaces(Protocol):
    """Where the ranks of an attempt meet: a store of this process, one at a time."""

    def open(self, host: str, port: int) -> int:
        """A fresh one in place of the one before; port 0: a free one. The port it has. Raises
        MeetingError."""

    def close(self) -> None: ...


class RankProcesses(Protocol):
    """The ranks of one node as processes, by their number on the node."""

    @property
    def may_stand_by(self) -> bool:
        """Whether a process can be started before it is known which rank it will be."""

    @property
    def living(self) -> Mapping[int, int]:
        """The process of each rank whose end has not been told."""

    @property
    def standby_pid(self) -> int | None:
        """The process that stands by, or is about to."""

    def listen(self, ended: Callable[[Sequence[RankEnd]], None]) -> None:
        """`ended` hears which ranks have ended, those together that were noticed together. A
        rank's whole process group is gone by then."""

    def start(
        self, place: RankAssignment, ranks: Collection[int], environ: Mapping[str, str]
    ) -> dict[int, int]:
        """Start these; their processes. Those of the attempt before must have ended."""

    def start_standby(self) -> None: ...

    def standby_becomes(self, rank: int) -> int:
        """The process that stood by is this rank now: which process that is."""

    def environ_of(self, rank: int, place: RankAssignment) -> dict[str, str]:
        """What makes a process this rank."""

    def signal(self, signum: int) -> None:
        """To every living rank and its children."""

    def kill(self, ranks: Collection[int]) -> None:
        """SIGKILL to these and their children; `ended` tells when they are gone."""

    def end_orphans(self, agent_pids: Sequence[int], then: Callable[[list[int]], None]) -> None:
        """SIGKILL to all processes that these dead agents of the job had started; `then` hears
        which those were, once they are gone."""

    def summary(self, ends: Sequence[tuple[int, int]]) -> str:
        """What a launcher prints when ranks failed: of (rank on this node, exit code), the first
        one the cause."""

    def close(self, keep_errors: bool) -> None:
        """Every rank has ended. Unless `keep_errors` what they left about their errors goes."""


class Probes(Protocol):
    """Processes of this node, looked at from outside. What takes long runs on an executor."""

    def process(self, pid: int) -> ProcessSample: ...

    def group_of(self, pid: int) -> int | None:
        """The process group; None when there is no such process."""

    def group(self, group: int) -> GroupSample:
        """All living members of a process group. Takes long."""

    def oom_counter(self, pid: int) -> Callable[[], int | None]:
        """Found while the process lives: how many processes the kernel has ended for want of memory
        where it lives, whenever that is asked; None when nobody counts."""

    def machine_oom_kills(self) -> int | None:
        """The same, of the whole machine."""

    def hindrance(self, pid: int) -> Callable[[], Hindrance]:
        """Found while the process lives: what has kept processes from running where it lives,
        whenever that is asked."""

    def fixed_work(self, pids: Mapping[int, int], within_ns: int) -> dict[int, FixedWork]:
        """The same work on each rank's processors; empty where it could not be measured. Takes
        long."""

    def stacks(self, pids: Mapping[int, int], within_ns: int) -> dict[int, Stack]:
        """By rank. Takes long."""

    def save_stacks(self, stacks: Mapping[int, Stack]) -> str:
        """Where they are now. Raises OSError. Takes long."""

    def recorder_dumps(self, pids: Mapping[int, int], newer_than_ns: int) -> dict[int, object]:
        """By rank, the values of what torch's flight recorder has dumped of it, no longer ago than
        that; nothing where there is none. Takes long."""


class PartProber(Protocol):
    """A process that runs this node's probes of parts, which may hang, die or be killed."""

    @property
    def pid(self) -> int | None:
        """None while there is none."""

    def start(
        self,
        heard: Callable[[bytes], None],
        ended: Callable[[str], None],
        cursors: Mapping[str, int],
    ) -> None:
        """Start one, in place of the one before: `heard` hears each line that it says
        (`model/parts.py`, `ProbeAnswer`), `ended` why it says no more, unless it was stopped.
        cursors: by probe, from where it reads on. Raises OSError."""

    def stop(self) -> int | None:
        """End it; nothing where there is none."""


class NodeProvider(Protocol):
    """Who can give a machine in place of a lost one. `edge/os/provider.py` asks the platform by a
    command, `edge/kubernetes/` its API."""

    def replace(self, lost: LostNode, then: Callable[[str], None]) -> None:
        """Ask for it, without waiting; `then` hears, from any thread, what became of that. The
        replacement joins the job by itself."""
