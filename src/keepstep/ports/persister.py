"""What a persister asks for: the store, and a format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from keepstep.model.checkpoint import CheckpointAttempt, CheckpointName, Timeline, Unfinished
from keepstep.model.removal import RemovalRecord

if TYPE_CHECKING:  # a format laid over a Memory, which these ports only hand on
    pass


class CheckpointDraft(Protocol):
    """A checkpoint that is being written; it does not exist yet."""

    def abandon(self) -> None:
        """Remove the attempt's files, unless there is a checkpoint. Only for who leads it."""


class StoredCheckpoint(Protocol):
    """A checkpoint, as the store describes it."""

    @property
    def job(self) -> str:
        """Whose it is."""

    @property
    def name(self) -> CheckpointName:
        """Which it is."""

    @property
    def timeline(self) -> Timeline | None:
        """In which it was written; None: nobody said."""

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

    def follow(self) -> object:
        """What follows is about the newest run in the store."""

    def claim(self) -> None:
        """The store is this job's. Raises IdentityError, too, when it is another's."""

    def draft(self, name: CheckpointName) -> D_co:
        """Begin a checkpoint, or write files of one that another node begins and publishes. Raises
        StoreError, too, when there is this very one."""

    def remove(self, name: CheckpointName) -> None:
        """Remove a checkpoint and its files. Nothing there is fine."""

    def incomplete(self, before: CheckpointName) -> Unfinished:
        """What was not published and begun before that one, and what cannot be looked at."""

    def remove_unpublished(self, name: CheckpointName) -> None:
        """Remove the files of an attempt, which from now on is never published. What was published
        meanwhile stays. Nothing there is fine."""

    def is_newest_run(self) -> bool:
        """Whether nobody has begun another run since `follow`."""

    def removal_record(self) -> RemovalRecord | None:
        """Who may remove, as the store says now."""

    def put_removal_record(self, record: RemovalRecord) -> bool:
        """Say who may; False where somebody else has said that one."""

    def published(self) -> Sequence[StoredCheckpoint]:
        """All that exist, newest first, those among them that count no more."""


class CheckpointFormat(Protocol[D_contra, V]):
    """How the slots of ranks become files of a checkpoint. `edge/torch/dcp/format.py` writes
    PyTorch's Distributed Checkpoint format. `V` is what it keeps of a node's slots between survey
    and part.

    Raises KeepstepError, OSError, LookupError, RuntimeError or ValueError.
    """

    def already_there(self, attempt: CheckpointAttempt) -> bool:
        """Whether the job has a checkpoint of this state, and every byte is as written."""

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
