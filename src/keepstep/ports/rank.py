"""What a rank asks for: the state of the training, and the process groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from keepstep.model.layout import Layout
from keepstep.model.messages.agent_rank import RegroupAt
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
        number; of the others nothing is known."""

    @property
    def copy_ns(self) -> int:
        """How long `copy_still` took."""

    def copy_moving(self) -> None:
        """On the trainer's thread, before it goes on: whatever may change before the next
        update."""

    def copy_still(self) -> Acts[None]:
        """In the background: what stands still until the next update."""

    def settle(self) -> Acts[None]:
        """In the background, after `copy_still`: over when all that the trainer had begun by then
        is over, so that what it changed is known."""

    def fence(self) -> None:
        """On the trainer's thread, before an update: return when it may overwrite the state. The
        trainer has `passed` then."""

    def passed(self) -> None:
        """The trainer is between two operations, and what was to stand still until then still
        does. What `moved` later may: only the first time counts that finds the copy's bytes
        there."""

    def end(self) -> None:
        """Nobody is to wait for this copy any more, whatever became of it."""


class LiveState(Protocol):
    """The state of the training in this process. `edge/torch/live_state.py` is PyTorch's.

    Its methods are called on the trainer's thread, but for `copy_eagerly` and `pin`.
    """

    def gather(self) -> Gathered: ...

    def copy(self, gathered: Gathered, slot: Slot) -> StateCopy: ...

    def copy_eagerly(self, names: Sequence[str]) -> None:
        """From now on these tensors are among those that `copy_moving` copies."""

    def coming_bytes(self) -> tuple[int, int, str]:
        """Of the first snapshots: payload and manifest bytes, with what the first steps will add;
        and a remark when that is not known, else an empty text."""

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
