"""Partial sums: the mean gradient of the ranks that have come, for all ranks.

    who has come (sum_door.py) -> the one that closed the sum tells all who is within
    -> each of those sums its part of all gradients, in the order of ranks
    -> and sends it to everybody; who is late finds it waiting

Point to point: a rank that computes takes part in no collective. Of `n` ranks within, each sends
and receives twice the gradient's size times (n - 1) / n, as a ring does. The sum is made when the
backward pass is over, not beside it.

Moves gradients; `core/balance/partial.py` says whose turn it is. Invariant: what is in a gradient
afterwards follows from what has been given alone, not from when or in which order it came; where a
peer is lost meanwhile, nothing is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from keepstep.edge.torch.groups import TorchGroup
from keepstep.edge.torch.membership import Membership, membership
from keepstep.edge.torch.micro_batches import Gradients
from keepstep.edge.torch.sum_door import MOST_RANKS, SumDoor
from keepstep.edge.torch.works import told_in_short
from keepstep.errors import ConfigError, KeepstepError
from keepstep.model.partial import Given, PartialTurn

POLL_S = 0.0002  # by the one who closes, while it waits for others
STEPS, EPOCHS, FIRST_TAG = 1 << 20, 1 << 7, 1 << 29  # gloo's tags have 31 bits, ours bit 29
TELLING, SUMMING, SPREADING = range(3)
Packed = list[torch.Tensor]  # which gradients there are, and one tensor of each type with them all


class Exchanges(Protocol):
    """A group that all ranks are in (`TorchGroup`)."""

    store: Any

    def exchange(
        self,
        receives: Sequence[tuple[torch.Tensor, int | None]],
        sends: Sequence[tuple[torch.Tensor, int]],
        tag: int,
    ) -> Any: ...


class PartialSums:
    """Of one rank. `sum` comes once a step, in the order of steps."""

    def __init__(
        self, group: Exchanges, members: Membership, gradients: Gradients, rank: int, ranks: int
    ) -> None:
        self._group, self._members, self._gradients = group, members, gradients
        self._rank, self._ranks = rank, ranks
        self._kept: Packed | None = None  # of the step before, where it was late
        self._doors: list[tuple[SumDoor, bool]] = []  # and whether this rank closed it
        self._sent: list[Any] = []  # to those who are late

    def begin(self) -> None:
        """From here on nobody is late, and what was is forgotten."""
        self._kept, self._doors, self._sent = None, [], []

    def sum(
        self,
        at: tuple[int, int],
        turn: PartialTurn,
        known: Sequence[Given] | None = None,
    ) -> tuple[Given, ...] | None:
        """Put the mean in the place of this rank's gradients. at: epoch and step. known: what is
        given, where that is played back.

        Returns what all have given; None when a peer is lost, and gradients are worthless. Raises
        RuntimeError where the store or the transport fails and nobody will say why."""
        self._sent = [work for work in self._sent if not work.is_completed()]
        is_fresh = turn.computes(self._rank)
        mine = self._gradients.flat() if is_fresh else self._kept
        given = tuple(known) if known is not None else self._agreed(at, turn, is_fresh)
        if given is None:
            return None
        part = given[self._rank]
        within = [rank for rank, one in enumerate(given) if one is not Given.NOTHING]
        is_late = is_fresh and part is Given.NOTHING
        self._kept = mine if is_late and turn.rule.late == "add" else None
        if part is Given.NOTHING:
            mean = self._received(at, within)
        else:
            assert mine is not None
            mean = self._made(at, within, mine)
        if mean is None:
            return None
        self._gradients.set_aside()
        self._gradients.add(mean)
        return given

    def finish(self) -> None:
        """Wait until who was late has what it was sent. Raises RuntimeError as `sum` does."""
        sent, self._sent = self._sent, []
        for work in sent:
            work.wait()

    @property
    def _is_lost(self) -> bool:
        return self._members.is_lost or self._members.is_worthless

    # -- who is within

    def _agreed(
        self, at: tuple[int, int], turn: PartialTurn, is_fresh: bool
    ) -> tuple[Given, ...] | None:
        try:
            door = SumDoor(self._group.store, f"partial/{at[0]}/{at[1]}")
            place = door.come(self._rank, is_fresh)
            is_closer = place == turn.rule.need - 1
            given = self._closed(door, turn) if is_closer else None
        except RuntimeError as error:  # of the store
            if not self._members.broke(told_in_short(error)):
                raise
            return None
        if is_closer:
            if given is None:
                return None
            word = torch.tensor([*at, *given], dtype=torch.int64)
            others = [rank for rank in range(self._ranks) if rank != self._rank]
            self._sent.append(self._exchange(at, TELLING, [], [(word, rank) for rank in others]))
        else:
            given = self._heard(at)
        self._doors.append((door, is_closer))
        if given is not None and len(self._doors) > 1:  # all have come to the one before
            before, was_closer = self._doors.pop(0)
            before.forget(was_closer)
        return given

    def _closed(self, door: SumDoor, turn: PartialTurn) -> tuple[Given, ...] | None:
        """By this rank, as soon as all have come, or those for whom it has to wait."""
        waiting = _Waiting()
        if not self._members.begin(waiting):
            self._members.spoil()
            return None
        try:
            until_ns = time.monotonic_ns() + turn.rule.wait_ns
            while not waiting.is_over.wait(POLL_S if self._ranks > 1 else 0):
                fresh, sitting = door.look()
                is_late = time.monotonic_ns() >= until_ns
                if sitting == len(turn.late) and (is_late or fresh + sitting == self._ranks):
                    break
            within = door.close(waiting.is_over.is_set)
        finally:
            self._members.end(waiting)
        if waiting.is_over.is_set():
            return None
        sat_out = turn.rule.sat_out()
        return tuple(
            Given.FRESH if rank in within else sat_out if rank in turn.late else Given.NOTHING
            for rank in range(self._ranks)
        )

    def _heard(self, at: tuple[int, int]) -> tuple[Given, ...] | None:
        word = torch.zeros(2 + self._ranks, dtype=torch.int64)
        self._exchange(at, TELLING, [(word, None)], []).wait()
        if self._is_lost:
            return None
        told = word.tolist()
        if tuple(told[:2]) != at:
            raise KeepstepError(f"expected who came to {at}, found who came to {tuple(told[:2])}")
        return tuple(Given(one) for one in told[2:])

    # -- what they have given

    def _made(self, at: tuple[int, int], within: Sequence[int], mine: Packed) -> Packed | None:
        """This rank is within: it sums one part of all that are given."""
        place, others = within.index(self._rank), [r for r in within if r != self._rank]
        parts = [_parts(tensor, len(within)) for tensor in mine]
        sends = [(p[within.index(to)], to) for to in others for p in parts]
        given = {source: [torch.empty_like(p[place]) for p in parts] for source in others}
        receives = [(t, source) for source in others for t in given[source]]
        self._exchange(at, SUMMING, receives, sends).wait()
        if self._is_lost:
            return None
        given[self._rank] = [p[place] for p in parts]
        own = [_mean([given[rank][i] for rank in within]) for i in range(len(mine))]
        late = [rank for rank in range(self._ranks) if rank not in within]
        if late:
            to_late = [(tensor, to) for to in late for tensor in own]
            self._sent.append(self._exchange(at, SPREADING, [], to_late))
        sends = [(tensor, to) for to in others for tensor in own]
        return self._gathered(at, within, {place: own}, sends)

    def _received(self, at: tuple[int, int], within: Sequence[int]) -> Packed | None:
        """This rank is not: all parts come from the others."""
        return self._gathered(at, within, {}, [])

    def _gathered(
        self,
        at: tuple[int, int],
        within: Sequence[int],
        there: dict[int, Packed],
        sends: Sequence[tuple[torch.Tensor, int]],
    ) -> Packed | None:
        """All parts, of which `there` has this rank's own."""
        whole = self._gradients.blank()
        parts = [_parts(tensor, len(within)) for tensor in whole]
        receives = []
        for place, source in enumerate(within):
            if place in there:
                for part, own in zip(parts, there[place], strict=True):
                    part[place].copy_(own)
            else:
                receives += [(part[place], source) for part in parts]
        self._exchange(at, SPREADING, receives, sends).wait()
        return None if self._is_lost else whole

    def _exchange(
        self,
        at: tuple[int, int],
        phase: int,
        receives: Sequence[tuple[torch.Tensor, int | None]],
        sends: Sequence[tuple[torch.Tensor, int]],
    ) -> Any:
        """Nothing is sent where there is nothing: a model may have fewer numbers than ranks."""
        return self._group.exchange(
            [(tensor, peer) for tensor, peer in receives if tensor.numel()],
            [(tensor, peer) for tensor, peer in sends if tensor.numel()],
            _tag(at, phase),
        )


class _Waiting:
    """A wait that a lost peer ends."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def finish(self) -> None:
        self.is_over.set()


def _tag(at: tuple[int, int], phase: int) -> int:
    """What is left of an epoch that was given up is never taken for something else."""
    epoch, step = at
    return FIRST_TAG | (epoch % EPOCHS * STEPS + step % STEPS) << 2 | phase


def _parts(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Views of it, one for each rank within."""
    return list(tensor.tensor_split(count))


def _mean(given: Sequence[torch.Tensor]) -> torch.Tensor:
    """In their order. Of which ones there are: whether anybody has it."""
    found = given[0].clone()
    for tensor in given[1:]:
        if found.dtype is torch.uint8:
            found.bitwise_or_(tensor)
        else:
            found.add_(tensor)
    return found if found.dtype is torch.uint8 else found.div_(len(given))


def group_of_all(parameters: Sequence[torch.Tensor], ranks: int) -> tuple[TorchGroup, Membership]:
    """The process's default group, where it is ours. Raises ConfigError."""
    group = dist.distributed_c10d._get_default_group() if dist.is_initialized() else None
    if not isinstance(group, TorchGroup):
        raise ConfigError(
            "partial_sum(): expected keepstep.init_process_group(), found "
            f"{'no process group' if group is None else 'groups of torch'}"
        )
    device = next((p.device for p in parameters if p.device.type != "cpu"), None)
    if device is not None:
        raise ConfigError(f"partial_sum(): expected parameters on the CPU, found {device}")
    if ranks > MOST_RANKS:
        raise ConfigError(f"partial_sum(): expected {MOST_RANKS} ranks or fewer, found {ranks}")
    return group, membership
