"""Update replay: some of the updates that an optimizer has made are made again, in a scratch copy,
from the snapshot before the step and from the step's gradients, and compared.

    pre-step hook    the copy of the state before is in its slot: remembered, not read
    post-step hook   pieces of parameters, and of their optimizer state, out of the slot; their
                     gradients as they lie there; the optimizer's own `step` on these alone;
                     bytes compared with what the update has made
    end of the body  the same pieces, of which a snapshot follows: are they still what was made?

Only of state that no other rank is said to have: shards, stages, a single rank's all. Only of
torch's own optimizers that treat each element by itself, so that a piece of a tensor is updated as
the whole is; and only where torch's counters say that nothing but the update has changed anything.
What changes without them is wrong, or a program's `.data`, which comes again. In a step that
is run again nothing was copied: its source is the live state at the beginning of the body, which
was loaded and proven a moment ago.

Comes in: hooks, on the trainer's thread. Goes out: names whose update differs, to the guard.
Which pieces are due, and whether a difference accuses, is decided by a judge it is given.

Invariant: the live state, its gradients, its optimizers and random states are as they were. What it
takes at once is bounded: about five times the bytes that it may make again, for a moment.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from keepstep.edge.torch.capture import TensorCopy
from keepstep.edge.torch.replicas import ReplicaFinder
from keepstep.edge.torch.state import Protected
from keepstep.edge.torch.tree import by_address, local_part
from keepstep.model.layout import Layout, Segment
from keepstep.model.numbers import UpdateOutcome, UpdatePiece

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)
MORE_RUNS = 2  # of an update that did not come to the same
SHOWN_NAMES = 8


class JudgesUpdates(Protocol):
    """`core/numbers/updates.py`."""

    @property
    def is_off(self) -> bool:
        """Nothing is made again any more."""

    def due(self, elements: Sequence[int], most: int, turn: int) -> tuple[UpdatePiece, ...]:
        """Pieces of tensors with so many elements, about `most` in all."""

    def heard(self, apart: float, more: Sequence[float]) -> UpdateOutcome:
        """So far from what was made lies what was made again, and was when done once more."""

    def stayed(self, is_same: bool) -> bool:
        """Whether it accuses that what was made is, or is not, there at the end of the body."""

    def give_up(self, why: str) -> None:
        """What differs does so each time, and counts."""


Tensors = dict[str, torch.Tensor]  # "" is the parameter, others its optimizer state


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of one optimizer's update. `apart`: the greatest distance, as a part of the
    update's size; 0: the same bits. `names`: of what differs. `more`: where something does, how far
    it is when it is done once more."""

    apart: float
    names: tuple[str, ...]
    more: tuple[float, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Alone:
    """A parameter that no other rank is said to have, and where a snapshot has it."""

    name: str
    parameter: torch.Tensor
    segments: Mapping[str, Segment]


@dataclass(frozen=True, slots=True)
class _PieceMade:
    """A piece as the update has left it. `live`: the tensors it is of; `versions`: their counters
    then."""

    name: str
    live: list[torch.Tensor]
    versions: list[int]
    pieces: list[torch.Tensor]
    was: list[torch.Tensor]

    @property
    def is_there(self) -> bool:
        """Bit for bit."""
        pairs = zip(self.pieces, self.was, strict=True)
        return all(torch.equal(_bytes(now), _bytes(was)) for now, was in pairs)


@dataclass(frozen=True, slots=True)
class _OfOptimizer:
    optimizer: torch.optim.Optimizer
    alones: list[_Alone]


@dataclass
class ReplayCost:
    """Of what was made again. `alone_bytes`: of parameters that could be."""

    alone_bytes: int = 0
    nbytes: int = 0
    took_ns: int = 0
    updates: int = 0

    def add(self, nbytes: int, took_ns: int) -> None:
        self.nbytes += nbytes
        self.took_ns += took_ns
        self.updates += 1


@dataclass(frozen=True, slots=True)
class _PieceBefore:
    """A piece as it was before the update."""

    alone: _Alone
    piece: UpdatePiece
    tensors: Tensors


class UpdateReplay:
    """Of one rank. `most_bytes`: of parameters, in one step. `turn`: other pieces are due in each;
    whoever knows the step sets it."""

    def __init__(
        self,
        protected: Protected,
        rank: int,
        world_size: int,
        judge: JudgesUpdates,
        most_bytes: int,
    ) -> None:
        self._protected, self._judge, self._most_bytes = protected, judge, most_bytes
        self._replicas = ReplicaFinder(rank, world_size)
        self.turn = 0
        self.is_due = False
        self._copy: TensorCopy | None = None
        # of a step that is run again, by the optimizer's id
        self._taken: dict[int, list[_PieceBefore]] | None = None
        self._seen: set[int] = set()  # optimizers that have updated in this body
        self._known: tuple[Layout, dict[int, _OfOptimizer]] | None = None
        self.wrong: tuple[str, ...] = ()  # of the present body: what its update made of it differs
        self.erred: tuple[str, ...] = ()  # likewise: what was made again wrong, and right then
        self._made: list[_PieceMade] = []
        self.cost = ReplayCost()

    def begin(self, is_rerun: bool) -> None:
        """A body that is looked at begins. `is_rerun`: its state was just restored."""
        self.drop()
        self.is_due = not self._judge.is_off
        if is_rerun and self.is_due and self._known is not None:
            self._taken = {key: self._from_live(of) for key, of in self._known[1].items()}

    def drop(self) -> None:
        """Forget the body, and make nothing again."""
        self.is_due, self._copy, self._taken, self._seen = False, None, None, set()
        self._made = []
        self.wrong = self.erred = ()

    def end(self) -> None:
        """The body is over, and a snapshot of what is there now follows."""
        changed = [m.name for m in self._made if m.versions == _versions(m.live) and not m.is_there]
        if self._made and self._judge.stayed(is_same=not changed):
            self.wrong += tuple(dict.fromkeys(changed))[:SHOWN_NAMES]
        self._made = []

    def accept(self) -> None:
        """The body counts as it is."""
        if self.wrong:
            self._judge.give_up(
                f"the update of {', '.join(self.wrong)} comes to other bits each time the step is "
                "run, and counts as it is: none is made again any more"
            )

    def before_update(self, copy: object) -> None:
        """In an optimizer's pre-step hook. `copy`: of the state before this step, which has been
        waited for; None where that is over already, or there is none."""
        if self.is_due and isinstance(copy, TensorCopy) and not copy.is_on_device:
            self._copy = None if copy.counted_moves() else copy

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """In its post-step hook."""
        if self._made:  # one more update, which may not move counters (`fused`)
            its = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self._made = [made for made in self._made if id(made.live[0]) not in its]
        is_first = id(optimizer) not in self._seen
        self._seen.add(id(optimizer))
        if not (self.is_due and is_first and _is_made_again(optimizer)):
            return
        began_ns = time.perf_counter_ns()
        if self._taken is not None:
            sources = self._taken.get(id(optimizer), [])
        else:
            sources = self._from_slot(optimizer)
        sources = [s for s in sources if _gradient(s.alone.parameter) is not None]
        if not sources:
            return
        found = _replay(optimizer, sources)
        outcome = self._judge.heard(found.apart, found.more)
        if outcome is UpdateOutcome.DIFFERS:
            self.wrong += found.names
        elif outcome is UpdateOutcome.ERRED:
            self.erred += found.names
        self._made += [_made(optimizer, source) for source in sources]
        self.cost.add(found.nbytes, time.perf_counter_ns() - began_ns)

    # -- what is due

    def _due(self, alones: Sequence[_Alone]) -> list[tuple[_Alone, UpdatePiece]]:
        if not alones:
            return []
        size = max(alone.parameter.element_size() for alone in alones)
        elements = [local_part(alone.parameter).numel() for alone in alones]
        pieces = self._judge.due(elements, self._most_bytes // size, self.turn)
        return [(alones[piece.tensor], piece) for piece in pieces]

    def _from_slot(self, optimizer: torch.optim.Optimizer) -> list[_PieceBefore]:
        copy = self._copy
        if copy is None or not copy.done.is_set():
            return []
        due = self._due(self._alone(optimizer, copy))
        return [_slot_source(copy, alone, piece) for alone, piece in due]

    def _from_live(self, of: _OfOptimizer) -> list[_PieceBefore]:
        state = of.optimizer.state
        due = self._due(of.alones)
        sources = [(a, p, _live(a, state.get(a.parameter, {}), p)) for a, p in due]
        return [
            _PieceBefore(alone, piece, {key: tensor.clone() for key, tensor in tensors.items()})
            for alone, piece, tensors in sources
        ]

    def _alone(self, optimizer: torch.optim.Optimizer, copy: TensorCopy) -> list[_Alone]:
        layout = copy.state.layout
        if self._known is None or self._known[0] is not layout:
            self._known = layout, {}
        found = self._known[1].get(id(optimizer))
        if found is None:
            alones = list(self._find_alone(optimizer, copy))
            found = self._known[1][id(optimizer)] = _OfOptimizer(optimizer, alones)
            self.cost.alone_bytes = sum(
                local_part(alone.parameter).nbytes
                for of in self._known[1].values()
                for alone in of.alones
            )
        return found.alones

    def _find_alone(self, optimizer: torch.optim.Optimizer, copy: TensorCopy) -> Iterable[_Alone]:
        state = copy.state
        replicas = self._replicas.find(self._protected, state)
        shared = set() if replicas is None or not replicas.is_claimed else set(replicas.segments)
        # What the copy has in its slot and nothing but an update changes, by where it lies.
        places: dict[int, Segment] = {}
        lazy = {i.spec.name for copies in state.copies for i, _ in copies.lazy.pairs}
        for index, (item, segment) in enumerate(
            zip(state.items, state.layout.segments, strict=True)
        ):
            is_alone = index not in shared and _is_there(copy, segment)
            if is_alone and item.address is not None and item.spec.name in lazy:
                places[item.address] = segment
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            local, having = local_part(parameter), optimizer.state.get(parameter, {})
            tensors = {"": local} | {
                key: local_part(value)
                for key, value in having.items()
                if isinstance(value, torch.Tensor)
            }
            segments = {
                key: places[value.data_ptr()]
                for key, value in tensors.items()
                if by_address(value) and value.data_ptr() in places
            }
            is_cut = all(t.shape in (local.shape, ()) for t in tensors.values())
            is_cut = is_cut and all(
                value is None or isinstance(value, torch.Tensor) for value in having.values()
            )
            if len(segments) == len(tensors) and is_cut and local.is_floating_point():
                yield _Alone(segments[""].spec.name, parameter, segments)


def _is_there(copy: TensorCopy, segment: Segment) -> bool:
    """Whether its bytes are in this rank's slot, and not with another that has the same."""
    size = copy.slot.block_bytes
    end = max(segment.end, segment.offset + 1)
    blocks = range(segment.offset // size, (end - 1) // size + 1)
    return copy.lacking.isdisjoint(blocks)


def _is_made_again(optimizer: torch.optim.Optimizer) -> bool:
    """Not where a scaler had a say in the update: what it is given it divides."""
    is_scaled = any(
        getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")
    )
    is_differentiable = any(group.get("differentiable") for group in optimizer.param_groups)
    return type(optimizer) in ELEMENTWISE and not is_scaled and not is_differentiable


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    gradient = parameter.grad
    if gradient is None or gradient.layout is not torch.strided:
        return None
    return local_part(gradient)


# -- where a piece comes from, and what becomes of it


def _cut(tensor: torch.Tensor, piece: UpdatePiece) -> torch.Tensor:
    """One after the other; a single number stays what it is."""
    whole = tensor.detach()
    return whole if whole.dim() == 0 else whole.reshape(-1)[piece.begin : piece.end]


def _live(alone: _Alone, having: Mapping[str, Any], piece: UpdatePiece) -> Tensors:
    """As it is now, itself."""
    tensors = {"": _cut(local_part(alone.parameter), piece)}
    for key, value in having.items():
        if isinstance(value, torch.Tensor):
            tensors[key] = _cut(local_part(value), piece)
    return tensors


def _slot_source(copy: TensorCopy, alone: _Alone, piece: UpdatePiece) -> _PieceBefore:
    tensors: Tensors = {}
    for key, segment in alone.segments.items():
        dtype = getattr(torch, segment.spec.dtype)
        begin, end = (0, 1) if not segment.spec.shape else (piece.begin, piece.end)
        at = segment.offset + begin * dtype.itemsize
        held = torch.frombuffer(copy.slot.payload, dtype=dtype, count=end - begin, offset=at)
        tensors[key] = held.clone() if segment.spec.shape else held.clone().reshape(())
    return _PieceBefore(alone, piece, tensors)


def _again(optimizer: torch.optim.Optimizer, sources: Sequence[_PieceBefore]) -> list[Tensors]:
    """What its update makes of these pieces, and of nothing else."""
    made = [{key: tensor.clone() for key, tensor in s.tensors.items()} for s in sources]
    scratch: Any = object.__new__(type(optimizer))
    # Without what a scheduler has put in the place of its `step`; hooks are no part of `update`.
    scratch.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k != "step"})
    scratch.state, scratch.param_groups = defaultdict(dict), []
    update = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]
    for group in optimizer.param_groups:
        ids = {id(parameter) for parameter in group["params"]}
        parameters = []
        for source, tensors in zip(sources, made, strict=True):
            gradient = _gradient(source.alone.parameter)
            if id(source.alone.parameter) not in ids or gradient is None:
                continue
            piece = tensors[""].requires_grad_()
            piece.grad = _cut(gradient, source.piece).clone()
            scratch.state[piece] = {key: value for key, value in tensors.items() if key}
            parameters.append(piece)
        if parameters:
            scratch.param_groups.append({**group, "params": parameters})
    update(scratch)
    return [
        {
            "": tensors[""].detach(),
            **{
                key: value
                for key, value in scratch.state[tensors[""]].items()
                if isinstance(value, torch.Tensor)
            },
        }
        for tensors in made
    ]


def _made(optimizer: torch.optim.Optimizer, source: _PieceBefore) -> _PieceMade:
    alone, having = source.alone, optimizer.state.get(source.alone.parameter, {})
    live = [alone.parameter, *(v for v in having.values() if isinstance(v, torch.Tensor))]
    pieces = [*_live(alone, having, source.piece).values()]
    was = [piece.clone() for piece in pieces]
    return _PieceMade(alone.name, live, _versions(live), pieces, was)


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


def _replay(optimizer: torch.optim.Optimizer, sources: Sequence[_PieceBefore]) -> Replayed:
    made = [_live(s.alone, optimizer.state.get(s.alone.parameter, {}), s.piece) for s in sources]
    before = [s.tensors for s in sources]

    def apart_now() -> list[float]:
        again = _again(optimizer, sources)
        triples = zip(before, made, again, strict=True)
        return [max(_apart(*three, key) for key in three[1]) for three in triples]

    found = apart_now()
    differs = any(found)
    names = (s.alone.name for s, apart in zip(sources, found, strict=True) if apart)
    return Replayed(
        apart=max(found),
        names=tuple(dict.fromkeys(names))[:SHOWN_NAMES],
        more=tuple(max(apart_now()) for _ in range(MORE_RUNS)) if differs else (),
        nbytes=sum(tensors[""].nbytes for tensors in made),
    )


def _apart(before: Tensors, made: Tensors, again: Tensors, key: str) -> float:
    """How far one tensor lies from what it should be, as a part of what the update changed."""
    one, other = made[key], again.get(key)
    if other is None or other.shape != one.shape or other.dtype != one.dtype:
        return math.inf
    if torch.equal(_bytes(one), _bytes(other)):
        return 0.0
    was = before[key].to(torch.float64) if key in before else torch.zeros(1, dtype=torch.float64)
    size = float((other.double() - was).norm())
    apart = float((one.double() - other.double()).norm())
    if not math.isfinite(apart) or not math.isfinite(size) or size == 0.0:
        return math.inf
    return max(apart / size, 1e-12)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
