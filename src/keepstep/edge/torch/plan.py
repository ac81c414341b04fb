"""Plan: what a state is but for what each step changes, kept from one gather to the next.

In it are the tensors of modules and optimizers, their names and places, pickled once. It holds as
long as the watch (`watch.py`) finds everything as it was; then what is left to do at a boundary is
to read what does change: random states, options of parameter groups, schedulers, plain values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat
from operator import is_not
from typing import Any

import torch

from keepstep.edge.shm.copy_table import CopyTable, SlotCopy
from keepstep.edge.torch.beside import UsedGradients, learning, read_beside
from keepstep.edge.torch.ddp_buckets import Buckets, Grouping
from keepstep.edge.torch.looks import GRADIENT, VERSION
from keepstep.edge.torch.parts import state_of
from keepstep.edge.torch.tree import Kept, Numbers, StateItem, TreePickler, name_tensors, place_of
from keepstep.edge.torch.watch import OPTIMIZER_HOOKS, Watch, can_watch
from keepstep.model.layout import Segment

ABOUT = "<about>"
BESIDE = "<beside>"
STATE = "state"
GROUPS = "param_groups"

Pair = tuple[StateItem, Segment]
# which modules train, which parameters have a gradient, how often its buckets have changed
BesideFacts = tuple[list[bool], list[bool], int]


@dataclass(frozen=True, slots=True)
class CopyShare:
    """Some of the tensors with their places, and the ways there: `table` takes bytes from host
    memory, `through_torch` are those that have no address to copy from, by their devices.
    `device_bytes`: of all, likewise."""

    pairs: tuple[Pair, ...]
    table: CopyTable
    through_torch: Mapping[torch.device, tuple[Pair, ...]]
    device_bytes: Mapping[torch.device, int]

    @classmethod
    def of(cls, pairs: Iterable[Pair]) -> CopyShare:
        found = tuple(pairs)
        through_torch: dict[torch.device, tuple[Pair, ...]] = {}
        device_bytes: dict[torch.device, int] = {}
        for device in {item.local.device for item, _ in found}:
            there = [pair for pair in found if pair[0].local.device == device]
            through_torch[device] = tuple(pair for pair in there if pair[0].address is None)
            device_bytes[device] = sum(segment.spec.nbytes for _, segment in there)
        return cls(
            pairs=found,
            table=CopyTable(
                SlotCopy(s.offset, i.address, s.spec.nbytes)
                for i, s in found
                if i.address is not None
            ),
            through_torch=through_torch,
            device_bytes=device_bytes,
        )

    @property
    def nbytes(self) -> int:
        return sum(self.device_bytes.values())


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """Which of some tensors are copied at the boundary and which behind the trainer's back, and
    whose counters tell of the latter: `counted` may be more than `lazy`; `counted_for` are the
    items that each of them tells of. `frozen`: those that a slot may have already. `watched`:
    which of the tensors that are looked at anyway it begins with."""

    items: tuple[StateItem, ...]
    eager: CopyShare
    lazy: CopyShare
    frozen: CopyShare
    counted: tuple[torch.Tensor, ...]
    counted_for: tuple[StateItem, ...]
    devices: frozenset[torch.device]
    watched: tuple[bool, ...] = ()

    @classmethod
    def of(
        cls,
        items: Sequence[StateItem],
        segments: Sequence[Segment],
        watched: Sequence[torch.Tensor] = (),
    ) -> CopyOrder:
        """Of items and their places. `watched`: tensors that are looked at anyway; those that are
        the same bytes as an item have its counter, or one more of these bytes."""
        pairs = tuple(zip(items, segments, strict=True))
        lazy = tuple(pair for pair in pairs if pair[0].lazy)
        own_places = [place_of(i.local) if i.whole is None else None for i, _ in lazy]
        by_place = {place: i for place, (i, _) in zip(own_places, lazy, strict=True) if place}
        places = list(map(place_of, watched))
        found = [by_place.get(place) if place else None for place in places]
        seen = frozenset(filter(None, places))
        alone = [i for place, (i, _) in zip(own_places, lazy, strict=True) if place not in seen]
        wholes = [(i, i.whole) for i in alone if i.whole is not None]
        return cls(
            items=tuple(items),
            eager=CopyShare.of(p for p in pairs if not (p[0].lazy or p[0].frozen)),
            lazy=CopyShare.of(lazy),
            frozen=CopyShare.of(pair for pair in pairs if pair[0].frozen),
            # An operation on a DTensor leaves its local part's counter as it is (torch 2.13).
            counted=(
                *(tensor for tensor, item in zip(watched, found, strict=True) if item is not None),
                *(i.local for i in alone),
                *(whole for _, whole in wholes),
            ),
            counted_for=(
                *(item for item in found if item is not None),
                *alone,
                *(i for i, _ in wholes),
            ),
            devices=frozenset(i.local.device for i in items),
            watched=tuple(item is not None for item in found),
        )

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """All of them."""
        return (*self.eager.pairs, *self.lazy.pairs, *self.frozen.pairs)

    def versions(self) -> list[int]:
        """Of what is counted, now."""
        return list(map(VERSION, self.counted))

    def frozen_versions(self) -> list[int]:
        """Of the frozen ones, now."""
        return [item.local._version for item, _ in self.frozen.pairs]

    @property
    def segments_of_torch(self) -> Iterator[Segment]:
        """Where those go that have no address to copy from."""
        shares = (self.eager, self.lazy, self.frozen)
        return (s for share in shares for there in share.through_torch.values() for _, s in there)


@dataclass(frozen=True, slots=True)
class BesideSection:
    """What is in no state dict, pickled. `facts`: what it was made of, None when some of it has
    values."""

    objects: bytes
    kept: Kept
    facts: BesideFacts | None


@dataclass
class StatePlan:
    """Of parts by their paths. `about`: what the parts are, compared before a restore."""

    parts: Mapping[str, Any]
    about: Mapping[str, Any]
    kept: Kept
    objects: bytes = b""
    # by path: of each of the optimizer's groups the numbers of its parameters
    group_indices: dict[str, list[list[int] | Numbers]] = field(default_factory=dict)
    watch: Watch | None = None
    copies: CopyOrder | None = None  # of what is in it, once its place is known
    _known: frozenset[str] = frozenset()  # paths of the parts whose state is in it
    _learning: list[torch.Tensor] = field(default_factory=list)
    _beside: BesideSection | None = None

    @classmethod
    def make(cls, parts: Mapping[str, Any], about: Mapping[str, Any], kept: Kept) -> StatePlan:
        """Ask every part whose state seldom changes. `kept` has found nothing yet. Raises what
        pickling raises."""
        plan = cls(parts, about, kept)
        if all(can_watch(p) or not _must_be_watched(p) for p in parts.values()):
            plan.watch = Watch(parts)
        tree: dict[str, Any] = {ABOUT: about}
        for path, part in parts.items():
            if plan.watch is None or not can_watch(part):
                continue
            state = state_of(part)
            if isinstance(part, torch.optim.Optimizer):
                plan.group_indices[path] = [Numbers.of(group["params"]) for group in state[GROUPS]]
                state = {STATE: state[STATE]}
            tree[path] = state
        names: dict[int, str] = {}
        name_tensors(tree, "", names)
        plan.objects = TreePickler(kept, names, {}).states(tree)
        plan._known = frozenset(tree)
        learns = {name: t for name, t in learning(parts) if t.is_leaf}
        plan._learning = list(learns.values())
        return plan

    def holds(self, parts: Mapping[str, Any]) -> bool:
        """Whether a plan that is made of these parts now would be this one."""
        return self.watch is not None and self.watch.is_as_it_was(parts)

    def watches(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Whether the states of all of these are watched."""
        return self.watch is not None and all(map(self.watch.watches, optimizers))

    @property
    def asks_strangers(self) -> bool:
        """Whether anything but torch's own code tells what a part's state is."""
        return self.watch is None or any(
            not _is_torchs(part) for path, part in self.parts.items() if path not in self._known
        )

    def versions(self) -> list[int]:
        """Of what is counted in `copies`: those that are watched as they were when all was last
        found as it was, the others now."""
        assert self.copies is not None
        known = [] if self.watch is None else list(self.watch.versions())
        first = list(compress(known, self.copies.watched))
        return first + list(map(VERSION, self.copies.counted[len(first) :]))

    def moving_states(self) -> dict[str, Any]:
        """By their paths, the states that any step may change, or that parts of states."""
        states = {}
        for path, part in self.parts.items():
            if path in self.group_indices:
                states[path] = {GROUPS: _packed(part.param_groups, self.group_indices[path])}
            elif path not in self._known:
                states[path] = state_of(part)
        return states

    def beside(self, used: UsedGradients, buckets: Buckets | None) -> BesideSection:
        """Modes, what learns, gradients and their buckets, as they are now."""
        if buckets is not None:
            buckets.look()
        grouped = {} if buckets is None else buckets.known
        if self.watch is None:
            return self._read_beside(used, grouped, None)
        gradients = list(map(GRADIENT, self._learning))
        have = list(map(is_not, gradients, repeat(None)))
        facts = (self.watch.modes(), have, 0 if buckets is None else buckets.changes)
        known = self._beside
        there = [gradient for gradient in gradients if gradient is not None]
        is_known = known is not None and known.facts == facts
        if (
            known is None
            or not is_known
            or not used.are_all(list(compress(self._learning, have)), there)
        ):
            known = self._beside = self._read_beside(used, grouped, facts)
        return known

    def _read_beside(
        self, used: UsedGradients, grouped: Mapping[str, Grouping], facts: BesideFacts | None
    ) -> BesideSection:
        tree = {BESIDE: read_beside(self.parts, used, grouped)}
        kept = self.kept.after()
        names: dict[int, str] = {}
        name_tensors(tree, "", names)
        objects = TreePickler(kept, names, {}).states(tree)
        are_markers = all(isinstance(g, str) for g in tree[BESIDE]["gradients"].values())
        return BesideSection(objects, kept, facts if are_markers else None)


def _must_be_watched(part: Any) -> bool:
    """Modules and tensors: what lies beside their states is watched with them."""
    return isinstance(part, (torch.nn.Module, torch.Tensor))


def _is_torchs(part: Any) -> bool:
    told_by = getattr(type(part), "state_dict", None)
    return isinstance(part, torch.Generator) or (
        getattr(told_by, "__module__", "").startswith("torch.")
        and "state_dict" not in getattr(part, "__dict__", ())
        and not any(getattr(part, name, None) for name in OPTIMIZER_HOOKS)
    )


def _packed(
    groups: Sequence[Mapping[str, Any]], indices: Sequence[list[int] | Numbers]
) -> list[Any]:
    """The groups as torch's optimizers put them into their state dicts."""
    packed = []
    for group, numbers in zip(groups, indices, strict=True):
        options = {key: value for key, value in group.items() if key != "params"}
        packed.append({**options, "params": numbers})
    return packed
