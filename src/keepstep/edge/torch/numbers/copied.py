"""Copied: whether what a snapshot has copied is finite, looked at while it is cached.

Comes in: a copy as it proceeds. Goes out: the names of tensors that hold NaN or infinity, and are
not known to be meant to: since before the first step, or since all ranks agreed. Looks at all
parameters and at all that an optimizer keeps, in each copy, whenever they were copied; of frozen
ones at what is copied anew. Does not touch what lies with another rank: whoever keeps it looks.

Only sums of squares over spans are taken; where one is not finite, each tensor is asked. A span may
run over small gaps, which hold anything: that costs time then, and decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch.numbers.finite import KnownKinds, bad_kinds, can_be_bad, square_of
from keepstep.edge.torch.plan import CopyOrder, Pair
from keepstep.edge.torch.tree import StateItem
from keepstep.edge.torch.views import overlay
from keepstep.model.numbers import NotFinite

SMALL_GAP_BYTES = 4096  # from one tensor's end to the next one's place


class CopiedSpan:
    """Bytes of one dtype in the payload."""

    def __init__(self, dtype: torch.dtype, begin: int, end: int) -> None:
        self.dtype = dtype
        self.begin, self.end = begin, end

    def square(self, slot: Slot, begin: int, end: int) -> torch.Tensor | None:
        """Of what lies between these offsets; None when nothing does."""
        size = self.dtype.itemsize
        first = self.begin + (max(begin, self.begin) - self.begin) // size * size
        count = (min(end, self.end) - first) // size
        if count <= 0:
            return None
        values = torch.frombuffer(slot.payload, dtype=self.dtype, count=count, offset=first)
        return square_of(values)

    def kept(self, lacking: Collection[int], block_bytes: int) -> Iterator[CopiedSpan]:
        """What of it lies in no block of those."""
        begin = self.begin
        for block in range(self.begin // block_bytes, (self.end - 1) // block_bytes + 1):
            if block in lacking:
                if begin < block * block_bytes:
                    yield CopiedSpan(self.dtype, begin, block * block_bytes)
                begin = (block + 1) * block_bytes
        if begin < self.end:
            yield CopiedSpan(self.dtype, begin, self.end)


@dataclass(frozen=True, slots=True)
class CopyLook:
    """What of a copy is looked at. `pairs` in the order of their places; `spans` of those that
    have an address, `late` of those that go through torch, behind the others, by devices.
    `early`: of those that are there before the others, `frozen`: of those that no slot is given
    twice."""

    pairs: Sequence[Pair] = ()
    spans: Sequence[CopiedSpan] = ()
    late: Mapping[torch.device, Sequence[CopiedSpan]] = field(default_factory=dict)
    early: Sequence[CopiedSpan] = ()
    frozen: Sequence[CopiedSpan] = ()

    @classmethod
    def of(cls, copy: CopyOrder, is_looked_at: Callable[[StateItem], bool]) -> CopyLook:
        """`is_looked_at`: of what is not copied behind the trainer's back."""
        pairs = _can_be_bad(copy.lazy.pairs)
        early, frozen = (
            [pair for pair in _can_be_bad(share.pairs) if is_looked_at(pair[0])]
            for share in (copy.eager, copy.frozen)
        )
        late = [pair for pair in pairs if pair[0].address is None]
        return cls(
            pairs=[*pairs, *early, *frozen],
            spans=_spans([p for p in pairs if p[0].address is not None]),
            early=_spans(early),
            frozen=_spans(frozen),
            late={
                device: _spans([p for p in late if p[0].local.device == device])
                for device in {item.local.device for item, _ in late}
            },
        )

    def without(self, lacking: Collection[int], block_bytes: int) -> CopyLook:
        """Of a snapshot of which other ranks keep these blocks."""

        def kept(spans: Sequence[CopiedSpan]) -> list[CopiedSpan]:
            return [piece for span in spans for piece in span.kept(lacking, block_bytes)]

        return CopyLook(
            pairs=self.pairs,
            spans=kept(self.spans),
            late={device: kept(spans) for device, spans in self.late.items()},
            early=kept(self.early),
            frozen=kept(self.frozen),
        )

    def before(self, other: CopyLook) -> CopyLook:
        """Both, where all places of `other` lie behind all of these, and all of it is copied each
        time."""
        if not other.pairs:
            return self
        return CopyLook(
            pairs=[*self.pairs, *other.pairs],
            spans=[*self.spans, *other.spans],
            late={
                device: [*self.late.get(device, ()), *other.late.get(device, ())]
                for device in {**self.late, **other.late}
            },
            early=[*self.early, *other.early, *other.frozen],
            frozen=self.frozen,
        )


class KnownBad:
    """Of one training. `optimizers`: the paths of their states, and of whatever else updates are
    made with. `parameters`: where all of them begin in memory now. `numbers`: see
    `plain_numbers.py`. What was not finite before this life's first step (a mask, say), or is meant
    to be, is no news in its copies."""

    def __init__(
        self,
        optimizers: Sequence[str] = (),
        parameters: Callable[[], Collection[int]] = tuple,
        numbers: Callable[[], Mapping[str, bool]] = dict,
    ) -> None:
        self._states = tuple(f"{path}." for path in optimizers) or ("\0",)
        self._parameters, self.numbers = parameters, numbers
        self._addresses: frozenset[int] = frozenset()  # of the parameters, when the plan was made
        self._known = KnownKinds()
        # of what changes seldom, and has nearly all tensors: worked out once
        self._plan: tuple[CopyOrder, CopyLook] | None = None
        self._kept: tuple[CopyLook, frozenset[int], CopyLook] | None = None  # likewise

    def of(self, copies: Sequence[CopyOrder]) -> CopyLook:
        """What of a copy is looked at. `copies`: each lies behind the one before it; the first one
        is the same object for as long as the plan holds."""
        plan, *others = copies
        if self._plan is None or plan is not self._plan[0]:
            self._addresses = frozenset(self._parameters())
            self._plan = plan, CopyLook.of(plan, self._is_looked_at)
        found = self._plan[1]
        for copy in others:
            found = found.before(CopyLook.of(copy, self._is_looked_at))
        return found

    def _is_looked_at(self, item: StateItem) -> bool:
        """Parameters, and what an optimizer keeps: not buffers, nor a program's own tensors."""
        return self.is_state(item.spec.name) or item.local.data_ptr() in self._addresses

    def of_kept(
        self, copies: Sequence[CopyOrder], lacking: frozenset[int], block_bytes: int
    ) -> CopyLook:
        """The same without these blocks."""
        whole = self.of(copies)
        if not lacking:
            return whole
        known = self._kept
        if known is None or known[0] is not whole or known[1] != lacking:
            known = self._kept = whole, lacking, whole.without(lacking, block_bytes)
        return known[2]

    def is_state(self, name: str) -> bool:
        """Whether a tensor of that name is an optimizer's."""
        return name.startswith(self._states)

    def learn(self, items: Iterable[StateItem]) -> bool:
        """All of the state as it is meant to be: whether some of it is not finite."""
        kinds = {**bad_kinds((i.spec.name, i.local) for i in items), **self.numbers()}
        self._known = KnownKinds(kinds)
        return bool(kinds)

    def new_in(self, kinds: Mapping[str, bool]) -> NotFinite:
        """What of it was not so then. `kinds`: by name, whether there is NaN."""
        news = self._known.news(kinds)
        is_wrong = any(has_nan or self.is_state(name) for name, has_nan in news.items())
        return NotFinite(tuple(news), may_be_meant=bool(news) and not is_wrong)


class LookAtCopy:
    """Of one copy. Made at its boundary: then plain numbers are looked at."""

    def __init__(self, slot: Slot, looked: CopyLook, known: KnownBad) -> None:
        self._slot, self._looked, self._known = slot, looked, known
        self._numbers = known.numbers()
        self._next = 0  # the first span that is not done
        self._upto = 0
        self._squares: list[torch.Tensor] = []

    def there(self, stop: int) -> None:
        """The copies are there up to that offset."""
        spans = self._looked.spans
        while self._next < len(spans) and (span := spans[self._next]).begin < stop:
            square = span.square(self._slot, self._upto, stop)
            if square is not None:
                self._squares.append(square)
            if span.end > stop:
                break
            self._next += 1
        self._upto = stop

    def not_finite(
        self,
        looked_at: Collection[torch.device] = (),
        suspects: Sequence[Pair] = (),
        with_frozen: bool = True,
    ) -> NotFinite:
        """When all of it is there. `looked_at`: devices that have looked at theirs, and of which
        `suspects` is all that may be wrong. `with_frozen`: they were copied anew."""
        looked = self._looked
        if looked.spans:
            self.there(looked.spans[-1].end)
        rest = [span for d, spans in looked.late.items() if d not in looked_at for span in spans]
        rest += [*looked.early, *(looked.frozen if with_frozen else ())]
        late = [span.square(self._slot, span.begin, span.end) for span in rest]
        squares = [*self._squares, *(square for square in late if square is not None)]
        named = list(suspects)
        if not all(math.isfinite(float(square)) for square in squares):
            named += looked.pairs
        if not (named or self._numbers):
            return NotFinite()
        found = ((item.spec.name, overlay(self._slot, place)) for item, place in named)
        return self._known.new_in({**bad_kinds(found), **self._numbers})


def _can_be_bad(pairs: Iterable[Pair]) -> list[Pair]:
    return sorted((p for p in pairs if can_be_bad(p[0].local)), key=lambda pair: pair[1].offset)


def _spans(pairs: Sequence[Pair]) -> list[CopiedSpan]:
    spans: list[CopiedSpan] = []
    for _, segment in pairs:
        begin, end = segment.offset, segment.offset + segment.spec.nbytes
        dtype = getattr(torch, segment.spec.dtype)
        last = spans[-1] if spans else None
        if last is not None and last.dtype is dtype and begin - last.end <= SMALL_GAP_BYTES:
            last.end = end
        elif end > begin:
            spans.append(CopiedSpan(dtype, begin, end))
    return spans
