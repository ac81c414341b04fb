"""Process groups: those of this process as `ports.Groups`.

The groups themselves are `groups.py`, who is believed to be alive `membership.py`. Building them
anew and gathering are collectives: they run on the trainer's thread, which waits for its peers.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from keepstep.edge.shm.collective_profile_page import CollectiveProfileWriter, QueuedProfileWriter
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.torch.at_once import LATE, all_within
from keepstep.edge.torch.ddp_rebuild import prepare_to_renew, renew
from keepstep.edge.torch.device_rhythm import DeviceRhythm, device_rhythm
from keepstep.edge.torch.membership import Mark, Membership
from keepstep.edge.torch.tcp_store import join_store
from keepstep.model.device import DeviceAnswer
from keepstep.model.messages.agent_rank import RegroupAt
from keepstep.ports import Executor

MEET_WITHIN_S = 60.0
MOST_ASKED = 16  # groups, some microseconds together


class TorchGroups:
    """Takes hold of the process's membership until `close`. `objects`: what is protected; after a
    regroup what is built upon the groups is made as new as in a process that has just begun."""

    def __init__(
        self,
        membership: Membership,
        trainer: Executor,
        objects: Iterable[Any],
        takes_a_lost_place: bool,
    ) -> None:
        self._membership = membership
        self._trainer = trainer
        self._objects = list(objects)
        self._takes_a_lost_place = takes_a_lost_place
        self._profile: CollectiveProfileWriter | DeviceRhythm | None = None
        self._given_up = threading.Event()
        has_time = not takes_a_lost_place  # else all others wait for this rank
        if has_time and process_group() is not None and self.can_be_rebuilt:
            prepare_to_renew()

    @property
    def can_be_rebuilt(self) -> bool:
        return all_groups_are_ours()

    @property
    def is_muted(self) -> bool:
        return self._takes_a_lost_place and self._membership.muted

    @property
    def why_lost(self) -> str:
        return self._membership.why if self._membership.is_lost else ""

    @property
    def is_worthless(self) -> bool:
        return self._membership.is_worthless

    def begin_body(self) -> None:
        self._membership.begin_body()

    def lose(self, why: str) -> None:
        self._given_up.set()
        self._membership.lose(why)

    @property
    def has_device(self) -> bool:
        return self._membership.device is not None

    def mark(self) -> Mark:
        return self._membership.mark()

    def stands(self, mark: object) -> bool:
        assert isinstance(mark, Mark)
        return self._membership.stands(mark)

    def abort(self, within_ns: int) -> list[str]:
        """Each on a thread of its own: NCCL's aborts wait for the device, and so for each other."""
        acts = {group.group_name: group.abort for group in self._membership.groups}
        return all_within(acts, within_ns)

    def look_at_device(self, within_ns: int) -> DeviceAnswer:
        device = self._membership.device
        why = all_within({"": lambda: torch.cuda.synchronize(device)}, within_ns)
        if not why:
            return DeviceAnswer()
        return DeviceAnswer(is_late=True) if LATE in why[0] else DeviceAnswer(error=why[0])

    def listen(self, on_error: Callable[[str], None], on_enter: Callable[[int], None]) -> None:
        self._membership.on_error = on_error
        self._membership.on_enter = on_enter

    def expect_notice(self) -> None:
        self._membership.watched = True

    # -- collectives

    def rebuild(self, place: RegroupAt, then: Callable[[str | None], None]) -> None:
        self._given_up = given_up = threading.Event()
        is_new = self._membership.muted  # nothing here is older than its groups

        def work() -> str | None:
            try:
                store = join_store((place.host, place.port), MEET_WITHIN_S)
                is_built = self._membership.regroup(store, place.attempt, given_up)
                if is_built and not is_new:
                    renew(self._objects)
            except RuntimeError as error:
                return str(error)
            return None

        def worked(why: str | None) -> None:
            if not given_up.is_set():
                then(why)

        self._trainer.submit(work, worked)

    def gather(self, mine: bytes, then: Callable[[list[bytes]], None]) -> None:
        self._trainer.submit(lambda: gather_objects(mine), then)

    # -- when the network is in use

    def record_profile(self, path: Path) -> None:
        named = os.environ.get("NCCL_SOCKET_IFNAME") or os.environ.get("GLOO_SOCKET_IFNAME", "")
        interface = "" if named.startswith("^") else named.lstrip("=").partition(",")[0]
        members = self._membership
        if members.device is None:
            page = CollectiveProfileWriter(MEMORY, path, time.monotonic_ns, interface)
            members.on_begin, members.on_end = page.began, page.ended
            self._profile = page
            return
        queued = QueuedProfileWriter(MEMORY, path, time.monotonic_ns, interface)
        rhythm = self._profile = device_rhythm(queued, members.device)
        if rhythm is None:
            path.unlink(missing_ok=True)
            return
        members.on_order, members.on_queued = rhythm.begins, rhythm.queued

    def profile_step(self, step: int) -> None:
        if self._profile is not None:
            self._profile.step(step)

    def close(self) -> None:
        membership = self._membership
        membership.watched = False
        membership.on_enter = _nothing
        membership.on_begin = _nothing
        membership.on_end = _nothing
        membership.on_order, membership.on_queued = _not_told, _nothing
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.close()


def process_group() -> Any:
    """`torch.distributed` when it has a process group, else None."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def all_groups_are_ours() -> bool:
    """Whether every collective of this process goes through a `Membership`."""
    distributed = process_group()
    if distributed is None:
        return True  # ranks that share nothing but their steps
    from keepstep.edge.torch.groups import TorchGroup

    groups = distributed.distributed_c10d._world.pg_map
    return all(isinstance(group, TorchGroup) for group in groups)


def entered_collectives() -> int | None:
    """How many this process has entered, all groups together, as torch counts them; messages from
    rank to rank are not among them. None: of some group nobody counts, or there are too many groups
    to ask."""
    distributed = process_group()
    groups = [] if distributed is None else list(distributed.distributed_c10d._world.pg_map)
    if len(groups) > MOST_ASKED:
        return None
    total = 0
    for group in groups:
        try:
            backends = {id(b): b for b in map(group._get_backend, group._device_types)}
            total += sum(one._get_sequence_number_for_group() for one in backends.values())
        except RuntimeError:
            return None
    return total


def uses_device() -> bool:
    """Whether what is computed may be ordered on a device and done later."""
    return torch.cuda.is_available()


def gather_objects(mine: Any) -> list[Any]:
    """What every rank gives, in their order. All ranks call it, and have a process group."""
    distributed = process_group()
    if importlib.util.find_spec("numpy") is None:
        return _gather_without_numpy(distributed, mine)
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, mine)
    return found


def _gather_without_numpy(distributed: Any, mine: Any) -> list[Any]:
    """torch's own way needs numpy, and torch does not bring it. Groups over NCCL alone have none of
    this: their users have numpy, or get torch's error."""
    given = bytearray(pickle.dumps(mine, protocol=5))
    world_size = distributed.get_world_size()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    distributed.all_gather(sizes, torch.tensor([len(given)]))
    most = max(int(size) for size in sizes)
    padded = torch.zeros(most, dtype=torch.uint8)
    padded[: len(given)] = torch.frombuffer(given, dtype=torch.uint8)
    found = [torch.empty_like(padded) for _ in range(world_size)]
    distributed.all_gather(found, padded)
    return [
        pickle.loads(ctypes.string_at(tensor.data_ptr(), int(size)))
        for tensor, size in zip(found, sizes, strict=True)
    ]


def _not_told() -> bool:
    return False


def _nothing(*_: Any) -> None:
    """Nobody wants to know any more."""
