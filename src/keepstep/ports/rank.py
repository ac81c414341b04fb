"""What a rank asks for: the state of the training, and the process groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from keepstep.model.device import DeviceAnswer
from keepstep.model.layout import Layout
from keepstep.model.messages.agent_rank import RegroupAt
from keepstep.model.numbers import BatchPlace, NotFinite, Sight, Sign
from keepstep.model.replicas import Replicas
from keepstep.model.snapshot import SlotHeader

if TYPE_CHECKING:  # a format laid over a Memory, which these ports only hand on
    from keepstep.edge.shm.slot import Slot
from keepstep.ports.machine import Acts


class Gathered(Protocol):
    """The live state at one moment: tensors by reference, everything else already serialized."""

    @property
    def layout(self) -> Layout:
        """Where each tensor goes in a snapshot's payload."""

    @property
    def payload_bytes(self) -> int: ...

    @property
    def remark(self) -> str:
        """What a person should know of it, for the journal; empty for nothing."""


class StateCopy(Protocol):
    """One snapshot on its way from the live state into a slot."""

    @property
    def moved(self) -> Sequence[str]:
        """Tensors that changed while they were copied, as far as is known; complete when `settle`
        is over. Such a copy is torn: it mixes two moments. `passed` may find more, by chance."""

    @property
    def sums(self) -> Mapping[int, int]:
        """Checksums of payload blocks that `copy_still` has taken as it wrote them, by their
        number, and of all that it was not to write; of the others nothing is known."""

    @property
    def digests(self) -> Mapping[int, int]:
        """Of shared blocks that lie on a device, by their number: what stands for their checksums
        where replicas compare them, since nobody has the checksum of what never leaves the device.
        Where such a block is left to others, `sums` has the digest. None before `copy_still` is
        over."""

    @property
    def copy_ns(self) -> int:
        """How long `copy_still` took, without the time in which a device had not come to the
        boundary."""

    def copy_moving(self) -> None:
        """On the trainer's thread, before it goes on: whatever may change before the next
        update."""

    def copy_still(self) -> Acts[None]:
        """In the background: what stands still until the next update."""

    def settle(self) -> Acts[None]:
        """In the background, after `copy_still`: over when all that the trainer had begun by then
        is over, so that what it changed is known."""

    def not_finite(self) -> NotFinite:
        """In the background, after `settle`: tensors of which the copy holds NaN or infinity, and
        is not known to be meant to."""

    def fence(self, update: object = None) -> bool:
        """On the trainer's thread, before an update: return when it may overwrite what it does.
        `update`: which optimizer's; None: any. Whether the trainer has `passed` then; False: other
        optimizers' updates have to wait as well."""

    @property
    def is_on_device(self) -> bool:
        """Whether a device waits for it, and not the trainer."""

    def waited_ns(self) -> int | None:
        """How long the device has waited for this copy; None while that is not known."""

    def passed(self) -> None:
        """The trainer is between two operations, and what was to stand still until then still
        does. What `moved` later may: only the first time counts that finds the copy's bytes
        there."""

    def end(self) -> None:
        """Nobody is to wait for this copy any more, whatever became of it."""


class DeviceMarks(Protocol):
    """Marks between what a thread orders on a device, and the time from one to the other. What is
    asked never waits for the device, and raises RuntimeError when that has failed."""

    def make(self) -> Any | None:
        """Behind all that this thread has ordered on its stream; None where nothing can be marked
        now."""

    def is_over(self, mark: Any) -> bool:
        """Whether the device has passed it."""

    def between_ns(self, earlier: Any, later: Any) -> int:
        """Both are over."""

    def take_back(self, mark: Any) -> None:
        """Nobody asks for it any more."""


class LiveState(Protocol):
    """The state of the training in this process. `edge/torch/live_state.py` is PyTorch's.

    Its methods are called on the trainer's thread, but for `copy_eagerly` and `pin`.
    """

    def gather(self) -> Gathered: ...

    def copy(
        self,
        gathered: Gathered,
        slot: Slot,
        lacking: frozenset[int] = frozenset(),
        shared: frozenset[int] = frozenset(),
    ) -> StateCopy:
        """`shared`: some of the `still_blocks`, which other ranks have, too; `lacking`: those of
        them that are not written, because others keep them: their checksums are taken where they
        lie, with zeros between the tensors."""

    def still_blocks(self, gathered: Gathered, block_bytes: int) -> frozenset[int]:
        """The numbers of whole blocks of the payload in which nothing has bytes but what
        `copy_still` copies, and can hash where it lies."""

    def replicas(self, gathered: Gathered) -> Replicas | None:
        """Which of these tensors other ranks have, too, or may have; None when none."""

    def copy_eagerly(self, names: Sequence[str]) -> None:
        """From now on these tensors are among those that `copy_moving` copies."""

    def coming_bytes(self) -> tuple[int, int, str]:
        """Of the first snapshots: payload and manifest bytes, with what the first steps will add;
        and a remark when that is not known, else an empty text."""

    def device_behind(self) -> Callable[[], bool] | None:
        """At a boundary: what says whether a device has still something to do of what the trainer
        has ordered until now. None where there is no device."""

    def restoring_bytes(self) -> int:
        """How much memory besides the slots a restore into this process takes, while it lasts: of
        what has no place in the live state to be written to."""

    def pin(self, slot: Slot) -> str | None:
        """Prepare a slot's memory for copies from a device, until the slot is closed. None when
        that is done, or there is no device; else one line that says why it is not. The slot can be
        used all the same."""

    def load(self, slot: Slot, header: SlotHeader, layout: Layout) -> list[str]:
        """Load a proven snapshot; remarks for the journal. Raises LayoutError when it does not fit
        what is live; nothing is changed then."""

    def differing(self, slot: Slot, header: SlotHeader, layout: Layout) -> list[str]:
        """Live tensors whose bytes are not those that were sealed, each by its name and in what it
        differs. Raises DamageError or LookupError when the slot is no more what was loaded."""

    def load_checkpoint(self, step: int) -> list[str]:
        """Load a checkpoint from the store; remarks for the journal. Raises DamageError, StoreError
        or LayoutError; nothing is changed then."""

    def caveats(self) -> list[str]:
        """What will keep a resumed run from being bit-equal to an undisturbed one, and which edits
        of the program the loaded state has undone."""


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
    def why_lost(self) -> str:
        """Why every collective ends; empty while all peers are there. A connection that breaks, and
        of which nobody says within a time what that meant, is a lost peer, too."""

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

    @property
    def has_device(self) -> bool:
        """Whether collectives are queued on a device: it has to be free of a lost peer's before
        anything else is ordered there."""

    def mark(self) -> object:
        """This moment, between two collectives: everything that was queued by now comes before
        what the trainer orders next."""

    def stands(self, mark: object) -> bool:
        """Whether what was computed by then counts: no peer was lost since the groups were built,
        or every collective that was queued by then had ended before. From any thread."""

    def abort(self, within_ns: int) -> list[str]:
        """Abort every communicator, all at once, after a peer was lost. Returns when that is over,
        or that time: which ones could not be aborted, in words. Takes long."""

    def look_at_device(self, within_ns: int) -> DeviceAnswer:
        """Wait until the device has nothing to do. Takes long."""

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


class StepNumbers(Protocol):
    """The numbers of this rank's steps. `edge/torch/numbers/guard.py` looks at PyTorch's. Called on
    the trainer's thread."""

    @property
    def can_agree(self) -> bool:
        """Whether all ranks of the job have a process group together."""

    def begin(self, is_watched: bool) -> None:
        """A step's body begins. `is_watched`: every module is looked at."""

    def drop(self) -> None:
        """Forget what was seen of the present body, and look no more."""

    def end(self, loss: object) -> tuple[Sign, ...]:
        """The body is over: why this rank thinks that something is wrong."""

    def accept(self) -> None:
        """The step that is over counts: its norm and loss are among those that others are measured
        by."""

    def sight(self, bad_in_snapshot: Sequence[str], has_spread: bool) -> Sight:
        """The evidence, without whose it is. `bad_in_snapshot`: tensors of the state that were
        copied and are not finite. `has_spread`: updates that nobody looked at have been made of
        them, and the live state says nothing."""

    def bad_state(self) -> NotFinite:
        """What of parameters and optimizer state is not finite now, and not known to be meant."""

    def learn(self) -> None:
        """The state as it is now is meant: what of it is not finite is no news from now on."""

    def hand_over_batches(self, role: int) -> None:
        """The next body here takes the batches that rank `role` took in this one. All ranks call
        it."""

    def places(self) -> tuple[BatchPlace, ...]:
        """Of the batches that the present body has taken."""

    def skip(self, places: Sequence[BatchPlace]) -> None:
        """Whatever is restored, these are left out from now on."""
