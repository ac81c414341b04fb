"""Ports: what the runtime asks of the world, as Protocols of few methods.

`edge/` has the world itself; `sim/` has one of virtual time, in which the same ranks, agents,
keepers and persisters run unchanged. What both must keep is tested once, for both, in
`tests/contracts/`. Slots and pages are formats laid over a `Memory`, the same in both.

Who runs an object written against these ports calls it from one loop at a time, and brings all
answers (`then`, `hear`, `gone`, timers) from that loop. No answer comes before the call that asked
for it has returned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from keepstep.errors import KeepstepError
from keepstep.model.checkpoint import CheckpointAttempt
from keepstep.model.diagnosis import GroupSample, ProcessSample, Stack
from keepstep.model.events import INFO
from keepstep.model.launch import RankAssignment, RankEnd
from keepstep.model.layout import Layout
from keepstep.model.lost import LostNode
from keepstep.model.messages.agent_rank import RegroupAt
from keepstep.model.messages.peers import MeshMessage
from keepstep.model.snapshot import SlotHeader
from keepstep.model.wire import Span

if TYPE_CHECKING:  # a format laid over a Memory, which these ports only hand on
    from keepstep.edge.shm.slot import Slot

T = TypeVar("T")
Acts = Generator[None, None, T]  # work in pieces, its result at the end


# -- time, memory, work


class Clock(Protocol):
    """What time it is here. Machines do not agree about it."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since some moment of this machine's life; never goes back."""

    def wall_ns(self) -> int:
        """Nanoseconds since 1970, as far as this machine knows: it may jump."""


class Timer(Protocol):
    """A call that is to come later and can be called off."""

    def cancel(self) -> None:
        """It does not come. Nothing happens when it has come already, is just being made, or was
        cancelled before."""


class Timers(Protocol):
    """The timers of a loop, for the calls that this loop makes."""

    def after(self, delay_ns: int, call: Callable[[], None]) -> Timer:
        """Have the loop make `call` once, when `delay_ns` nanoseconds have passed on this machine's
        clock, or a little later, but never before this method has returned; less than 0 is 0.
        Timers come in the order in which they are due, and those of one instant in the order of
        their asking."""


class Region(Protocol):
    """A file of a node's memory, mapped."""

    path: Path
    view: memoryview
    address: int  # of the first byte; 0 where there is none to give to native code

    def prefault(self) -> None:
        """Touch every page now: a first touch later costs twenty times the copy."""

    def lock(self, exclusive: bool) -> bool:
        """Try to lock the file for this mapping of it, shared or exclusively; False when others
        hold it. Ends with the process."""

    def unlock(self) -> None: ...

    def put(self, at: int, data: bytes) -> None:
        """Write a page. Who reads meanwhile may find a part of it, and so may everybody when the
        writer dies meanwhile."""

    def is_there(self) -> bool:
        """Whether `path` still leads to this file."""

    def close(self) -> None:
        """Give up the mapping, and with it the lock. Views that others still have stay readable."""


class Memory(Protocol):
    """A node's memory: files that outlive the processes which map them, and are lost with the
    node."""

    def open(self, path: Path) -> Region:
        """Raises OSError when there is none, ValueError when it is empty."""

    def create(self, path: Path, nbytes: int) -> Region:
        """A file of zeros with every page reserved, and the directories above it; replaces what has
        that name.

        Raises MemoryBudgetError when it does not fit; leaves nothing behind then.
        """

    def ensure(self, path: Path, nbytes: int) -> Region:
        """What is there; else as `create`. All who do this at once get the same file."""

    def names(self, directory: Path) -> list[str]:
        """What is in it, in order; nothing when it is not there."""

    def rename(self, path: Path, to: Path) -> None:
        """Of a file or a directory, in one instant; replaces a file of that name. Raises OSError
        when there is no `path`."""

    def remove(self, path: Path) -> None:
        """A file, or a directory with all that is in it; nothing happens when it is not there."""

    def size(self, path: Path) -> int:
        """Of a file, in bytes; 0 when it is not there."""

    def free_bytes(self, directory: Path) -> int:
        """What could still be created there."""


class Journal(Protocol):
    """Where decisions are written down. Nothing depends on it."""

    def record(self, kind: str, why: str, /, level: int = INFO, **data: Any) -> None:
        """One fact or decision: a stable word for tools, a sentence for people with its numbers,
        and these numbers again. `level`: how loud it is in the log (`model/events.py`)."""


class Executor(Protocol):
    """Runs work that takes long, off the loop: hashing, copying, reading a store. Pieces of work
    that were submitted to one executor may run at the same time, unless it says otherwise."""

    def submit(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Have `work` done elsewhere; the loop calls `then` with its result. What it raises ends
        the process."""

    def act(self, acts: Acts[T], then: Callable[[T], None]) -> None:
        """The same for work in pieces: wherever it yields, others may run in between, and the
        process may die."""


# -- connections within a node


class MessageCodec(Protocol):
    """What may be said at one end of a connection, and how that is written. Both raise NotAMessage,
    a ValueError."""

    def encode(self, message: Any, /) -> bytes:
        """A message that this end sends."""

    def decode(self, packet: bytes, /) -> Any:
        """A message that came."""


class Box(Protocol):
    """One end of a connection within a node. Messages are those of `model/messages/`."""

    @property
    def pid(self) -> int:
        """The process at the other end."""

    def send(self, message: Any, /) -> bool:
        """False when nobody will read it any more. Raises NotAMessage when it is none."""

    def poke(self, message: Any, /) -> None:
        """Send without ever waiting: who does not read misses it."""

    def hear_rest(self) -> None:
        """Hear what has come already, at once."""

    def close(self) -> None:
        """Hang up. The other end hears that behind everything that was sent."""

    def release(self) -> None:
        """In a forked child: let the parent alone hold the connection."""


class Hearer(Protocol):
    """Who is at this end of a connection. A message that does not decode is counted, told and
    answered by `NotUnderstood`, and never reaches it."""

    def hear(self, box: Box, message: Any, /) -> None: ...

    def gone(self, box: Box, /) -> None:
        """Nobody is at the other end any more. Comes once, last; not after `close`."""


class Keepers(Protocol):
    """How a process of a node finds the keeper of its job."""

    def find(
        self,
        hearer: Hearer,
        found: Callable[[Box], None],
        missing: Callable[[KeepstepError], None],
    ) -> None:
        """A connection to the keeper that lives, or that is started if none does; or, after some
        seconds, why there is none: a KeeperError, or an IdentityError when the job directory is
        another user's."""


class KeeperDoor(Protocol):
    """Where the keeper of a job answers, on one node."""

    def connect(self, hearer: Hearer) -> Box | None:
        """At once; None when none lives, or it does not answer yet."""

    def start(self, then: Callable[[KeepstepError | None], None]) -> None:
        """Start a keeper; `then` hears None, or why it cannot be: a KeeperError, or an
        IdentityError when the job directory is another user's."""

    def in_vain(self, within_ns: int) -> KeepstepError:
        """What to say when none answered in that time."""


class Agents(Protocol):
    """How a rank finds the agent of its node."""

    def find(self, hearer: Hearer) -> Box | None:
        """At once; None when there is none, or it has died."""


class BoxServer(Protocol):
    """Where processes of the node connect."""

    def close(self) -> None:
        """Nobody can connect any more; connections that there are stay."""


class ServeBoxes(Protocol):
    """Makes a `BoxServer`."""

    def __call__(self, path: Path, hearer: Hearer) -> BoxServer:
        """`hearer` is at this end of every connection that is made at `path`."""


# -- the rank's world


class Gathered(Protocol):
    """The live state at one moment: tensors by reference, everything else already serialized."""

    @property
    def layout(self) -> Layout:
        """Where each tensor goes in a snapshot's payload."""

    @property
    def payload_bytes(self) -> int: ...


class StateCopy(Protocol):
    """One snapshot on its way from the live state into a slot."""

    @property
    def moved(self) -> Sequence[str]:
        """Once `copy_still` is over: tensors that changed while they were copied. Such a copy is
        torn: it mixes two moments."""

    @property
    def copy_ns(self) -> int:
        """How long `copy_still` took."""

    def copy_moving(self) -> None:
        """On the trainer's thread, before it goes on: whatever may change before the next
        update."""

    def copy_still(self) -> Acts[None]:
        """In the background: what stands still until the next update."""

    def fence(self) -> None:
        """On the trainer's thread, before an update: return when it may overwrite the state."""

    def end(self) -> None:
        """Nobody is to wait for this copy any more, whatever became of it."""


class LiveState(Protocol):
    """The state of the training in this process. `edge/torch/live_state.py` is PyTorch's.

    Its methods are called on the trainer's thread, but for `copy_eagerly`.
    """

    def gather(self) -> Gathered: ...

    def copy(self, gathered: Gathered, slot: Slot) -> StateCopy: ...

    def copy_eagerly(self, names: Sequence[str]) -> None:
        """From now on these tensors are among those that `copy_moving` copies."""

    def coming_bytes(self) -> tuple[int, int, str]:
        """Of the first snapshots: payload and manifest bytes, with what the first steps will add;
        and a remark when that is not known, else an empty text."""

    def pin(self, slot: Slot) -> None:
        """Prepare a slot's memory for copies from a device."""

    def load(self, slot: Slot, header: SlotHeader, layout: Layout) -> list[str]:
        """Load a proven snapshot; remarks for the journal. Raises LayoutError when it does not fit
        what is live; nothing is changed then."""

    def differing(self, slot: Slot, layout: Layout) -> list[str]:
        """Names of live tensors whose bytes are not the snapshot's."""

    def load_checkpoint(self, step: int) -> list[str]:
        """Load a checkpoint from the store; remarks for the journal. Raises DamageError, StoreError
        or LayoutError; nothing is changed then."""

    def caveats(self) -> list[str]:
        """What will keep a resumed run from being bit-equal to an undisturbed one."""


class Groups(Protocol):
    """The process groups of this rank: its connections to its peers.

    When a peer is lost every collective ends, at once and with worthless results, until the groups
    are built anew.
    """

    @property
    def can_be_rebuilt(self) -> bool:
        """Whether this rank can do without every connection that it has."""

    @property
    def is_muted(self) -> bool:
        """Whether this process takes a lost rank's place: until it has joined its collectives
        reach nobody."""

    @property
    def is_worthless(self) -> bool:
        """Whether a collective of the present body of the loop ended because a peer was lost."""

    def begin_body(self) -> None:
        """Another body of the loop begins."""

    def lose(self, why: str) -> None:
        """A peer is lost: everything under way ends."""

    def listen(self, on_error: Callable[[str], None], on_enter: Callable[[int], None]) -> None:
        """`on_enter` hears the number of every collective that is called; `on_error` an error of
        the transport that waits for a notice. Both are called from any thread."""

    def expect_notice(self) -> None:
        """From now on somebody says who is lost: an error of the transport waits for that, instead
        of being raised in the program."""

    def rebuild(self, place: RegroupAt, then: Callable[[str | None], None]) -> None:
        """Build every group anew over the store at `place`; `then` hears None, or why that failed.
        It hears nothing any more when a peer is lost meanwhile."""

    def gather(self, mine: bytes, then: Callable[[list[bytes]], None]) -> None:
        """What every rank gives, in their order. All ranks call it."""

    def record_profile(self, path: Path) -> None:
        """Let the node's keeper see, at `path`, when collectives use the network. Does nothing
        where that cannot be known."""

    def profile_step(self, step: int) -> None:
        """This step begins; `NO_STEP`: none does."""

    def close(self) -> None:
        """Nobody says who is lost any more."""


# -- the keeper's world


class Receiver(Protocol):
    """Who takes what links bring. The real ones call it on their threads: quick, and safe for
    several of them."""

    def up(self, node: int) -> None:
        """The link to that node is open, for the first time or again with another life of its
        keeper."""

    def message(self, node: int, message: MeshMessage) -> None:
        """Arrives once, in the order in which it was sent."""

    def place(self, node: int, span: Span) -> memoryview | None:
        """Where these bytes go; None: nobody wants them."""

    def block(self, node: int, span: Span, checksum: int) -> None:
        """They are there, and that is their checksum."""

    def writable(self, node: int) -> None:
        """A `send_block` that was refused may be tried again."""

    def dead(self, node: int, why: str, is_loss: bool) -> None:
        """That link is over with all it carried, for good: another life of its keeper may open
        another one. No loss: it said goodbye."""


class Links(Protocol):
    """A keeper's links to others. Open when both ends want it; they outlive their connections
    (docs/protocol.md, "The wire").

    `be` comes first. A call that may end a link (`be`, `connect`, `close`) is not for the
    receiver's calls.
    """

    @property
    def address(self) -> tuple[str, int]:
        """Where others reach this keeper, from the beginning."""

    def be(self, node: int, secret: bytes) -> None:
        """The keeper of this node, among those who know the secret. Again, with another number or
        secret: without the links there were."""

    def connect(self, node: int, address: tuple[str, int], incarnation: int = 0) -> None:
        """Be linked with that node's keeper, in this life of it or a later one. At another address
        than before it is another machine's, of whatever age."""

    def send(self, node: int, message: MeshMessage) -> bool:
        """False when it could not be taken: no link, or its queue is full."""

    def send_block(
        self,
        node: int,
        span: Span,
        source: memoryview,
        done: Callable[[str | None], None],
        checksum: int | None = None,
    ) -> bool:
        """`done` hears None, or why it did not get there; False when it could not be taken now.

        `source` stays as it is until `done` was called."""

    def is_open(self, node: int) -> bool: ...

    def counts(self) -> dict[str, int]:
        """What has crossed and what was refused, by name: for people."""

    def close(self, reason: str = "closing") -> None:
        """Say goodbye to all."""


class OpenLinks(Protocol):
    """Makes a keeper's links."""

    def __call__(
        self,
        job_hash: bytes,
        incarnation: int,
        address: tuple[str, int],
        dead_ns: int,
        receiver: Receiver,
    ) -> Links:
        """`address`: port 0 is any that is free. `dead_ns`: how long a link may be without a
        connection before it is over.

        Raises KeeperError when the address is not this node's, or taken.
        """


class Persisters(Protocol):
    """How a keeper gets a persister, which may die at any moment."""

    def start(self, hearer: Hearer) -> Box:
        """Start one: a connection with it, over which it takes acts and answers each of them, in
        order (`model/messages/persister.py`). It ends when the connection is closed; when it ends
        by itself, `hearer` hears `gone`. One that says what is no message is ended. Raises OSError
        when the machine gives no more processes."""


class Checkpoints(Protocol):
    """The store, as far as a keeper looks into it."""

    def usable(self) -> tuple[list[int], dict[int, str]]:
        """Steps of whole checkpoints, and of damaged ones with what is wrong. Raises StoreError
        when it cannot be read."""


# -- the persister's world


class CheckpointDraft(Protocol):
    """A checkpoint that is being written; it does not exist yet."""

    def abandon(self) -> None:
        """Remove the attempt's files, unless there is a checkpoint. Only for who leads it."""


class StoredCheckpoint(Protocol):
    """A checkpoint, as the store describes it."""

    @property
    def step(self) -> int:
        """The last step completed in it."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """What is known of it, by name: the loss."""

    @property
    def total_bytes(self) -> int:
        """Of its files."""


D_co = TypeVar("D_co", bound=CheckpointDraft, covariant=True)
D_contra = TypeVar("D_contra", bound=CheckpointDraft, contravariant=True)
V = TypeVar("V")


class CheckpointStore(Protocol[D_co]):
    """The store, as far as a persister writes to it. Everything raises StoreError."""

    def draft(self, step: int, *, mine: Callable[[str], bool]) -> D_co:
        """Begin a checkpoint, in place of what earlier attempts left. `mine`: tells this attempt's
        files by their names. Raises StoreError, too, when the step has a checkpoint."""

    def join(self, step: int) -> D_co:
        """Write files of a checkpoint that another node begins and publishes."""

    def retract(self, step: int) -> None:
        """The checkpoint does not exist any more; its files stay."""

    def remove(self, step: int) -> None:
        """Remove a checkpoint and its files. Nothing there is fine."""

    def remove_incomplete(self, but: int | None = None) -> object:
        """Remove what was never published, `but` one step. Only for who leads."""

    def published(self) -> Sequence[StoredCheckpoint]:
        """All that exist, newest first."""


class CheckpointFormat(Protocol[D_contra, V]):
    """How the slots of ranks become files of a checkpoint. `edge/torch/dcp/format.py` writes
    PyTorch's Distributed Checkpoint format. `V` is what it keeps of a node's slots between survey
    and part.

    Raises KeepstepError, OSError, LookupError, RuntimeError or ValueError.
    """

    def already_there(self, attempt: CheckpointAttempt) -> bool:
        """Whether there is a checkpoint of this step, and every byte is as written. Raises
        IdentityError when it is another job's."""

    def survey(
        self, draft: D_contra, attempt: CheckpointAttempt, node: int, slots: Sequence[Any]
    ) -> V:
        """Verify the node's slots (`edge/shm/slot.py`), in the order of its ranks, and say in the
        store what they hold."""

    def write_part(self, draft: D_contra, attempt: CheckpointAttempt, node: int, values: V) -> int:
        """Write what all surveys leave to this node, read it back, and say in the store what it
        was. How many bytes that were."""

    def publish(self, draft: D_contra, attempt: CheckpointAttempt) -> StoredCheckpoint:
        """Put the parts together: the checkpoint exists."""


# -- the agent's world


class KV(Protocol):
    """A small memory that all nodes of a job share; its clients never block.

    `swap` is all that writes, and it writes at one instant for everybody: seats and verdicts are
    swapped against nothing, so that the first writer wins; who leads is swapped against what was
    read. No value is empty. Nobody writes a value, in one key, that was there before: a client that
    gets no answer asks again, so a swap may take effect late, also after its asker has died, and
    does no harm.

    What is asked by `swap` and `read` takes effect, and is answered, in the order in which it was
    asked. A `wait` stands beside that order, and so does its answer. What passes (a restart, an
    election) is waited out, and meanwhile nothing is answered.

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

    def end_orphans(self, agent_pid: int, then: Callable[[list[int]], None]) -> None:
        """SIGKILL to all processes that this agent of the job, which is dead, had started; `then`
        hears which those were, once they are gone."""

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

    def stacks(self, pids: Mapping[int, int], within_ns: int) -> dict[int, Stack]:
        """By rank. Takes long."""

    def save_stacks(self, stacks: Mapping[int, Stack]) -> str:
        """Where they are now. Raises OSError. Takes long."""


class BlockingKV(Protocol):
    """A small memory that all nodes of a job share. `edge/torch/tcp_store.py` is one agent's own,
    `edge/net/etcd.py` nobody's.

    `swap` is all that writes, and it writes at one instant for everybody: seats and verdicts are
    swapped against nothing, so that the first writer wins; who coordinates is swapped against what
    was read. Nobody writes a value, in one key, that was there before: a `swap` that was not
    answered may be asked again, and may take effect late, and does no harm. No value is empty.

    A client is for one thread. Everything raises MeetingError when the memory is gone; what passes
    (a restart, an election) is waited out.
    """

    def swap(self, key: str, expected: str | None, value: str) -> str | None:
        """What is there now: `value`, if `expected` was there (None: nothing)."""

    def read(self, keys: Sequence[str]) -> list[str | None]:
        """What is there, as of some instant after the question."""

    def wait(self, keys: Sequence[str], within_s: float | None) -> list[str] | None:
        """What is there once something is at all of these; None when that was not so in time."""

    def another(self) -> BlockingKV:
        """A client for another thread."""


class NodeProvider(Protocol):
    """Who can give a machine in place of a lost one. `edge/os/provider.py` asks the platform by a
    command."""

    def replace(self, lost: LostNode, then: Callable[[str], None]) -> None:
        """Ask for it, without waiting; `then` hears, from any thread, what became of that. The
        replacement joins the job by itself."""
