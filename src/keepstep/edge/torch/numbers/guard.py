"""Guard: one rank's eyes on the numbers of its steps.

    what is given to sums     the norm of each tensor, before anything of the peers is added
    in front of an update     the norm of all its gradients; one that is not finite is withheld, or
                              made all the same: then only what comes of it is wrong
    behind the body           whether norm and loss are out of all proportion

A loss that is not finite is no sign: with finite gradients it harms nothing (a batch in which all
labels are masked has no mean).

Comes in: optimizers that are about to update, collectives, the loss that was told. Goes out: signs
that something is wrong, and on demand the evidence. Decides nothing: what follows is
`core/numbers/`'s, done by `runtime/rank/doubt.py`.

An update is withheld by taking its gradients away: an optimizer leaves parameters without one, and
their state, as they are. All ranks do so alike where gradients are summed over them all: a sum with
what is not finite is not finite. A loss scaler does the same in its own way before it asks its
optimizer to update; what it skips is no fault, and never comes here.

Invariant: what is computed is bit for bit what is computed without, as long as all is finite; and
in any case where nothing is withheld.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from keepstep.edge.torch.membership import Membership
from keepstep.edge.torch.numbers.finite import (
    KnownKinds,
    bad_kinds,
    bad_names,
    can_be_bad,
    norm_of,
    plain,
    square_of,
    tensors_in,
)
from keepstep.edge.torch.numbers.plain_numbers import UPDATED_BY, bad_numbers
from keepstep.edge.torch.numbers.products import Products
from keepstep.edge.torch.numbers.update_replay import UpdateReplay
from keepstep.edge.torch.numbers.watched_run import WatchedRun
from keepstep.edge.torch.parts import bare, parameters_of
from keepstep.edge.torch.process_groups import gather_objects, process_group
from keepstep.edge.torch.state import Protected, tensor_names
from keepstep.model.numbers import OVERFLOW, BatchPlace, NotFinite, Sight, Sign

SHOWN_NAMES = 8  # of what is not finite; a whole model may be


class NormJudge(Protocol):
    """What is far beyond all before. `core/numbers/spikes.py`."""

    def may_be_far(self, norm: float) -> bool:
        """Whether `look` may need the parameters' norm."""

    def look(
        self, norm: float | None, loss: float | None, size: float, by: frozenset[int]
    ) -> Sign | None:
        """Judge one step: its gradients' norm, its loss, its parameters' norm (0: not known), and
        whose updates it made."""

    def accept(
        self, norm: float | None, loss: float | None, size: float, by: frozenset[int]
    ) -> None:
        """That step counts."""


class Guard:
    """Of one `protect`. `spikes`: of this training. `checks_products`: linear layers' products are
    compared with their checksums. `withholds`: updates whose gradients are not finite; else it is
    no sign while the state stays finite: an optimizer may know what to do with them.
    `updates`: some of them are made again."""

    def __init__(
        self,
        protected: Protected,
        members: Membership,
        world_size: int,
        spikes: NormJudge,
        checks_products: bool = False,
        withholds: bool = True,
        updates: UpdateReplay | None = None,
    ) -> None:
        self._protected = protected
        self._members = members
        self._world_size = world_size
        self._spikes = spikes
        self._meant: KnownKinds | None = None  # masks, say; None: no step has begun
        self._run: WatchedRun | None = None
        self._checks_products, self._withholds = checks_products, withholds
        self._products: Products | None = None
        self._updates = updates
        self._is_in_step = False
        self._is_on_device = False
        self._signs: list[Sign] = []
        self._norms: list[float] = []  # of the updates' gradients
        self._by: list[int] = []  # which optimizers' they were, by id
        self._sizes: list[float] = []  # norms of their parameters, where they matter
        self._has_unseen = False  # an update that has made its gradients by itself
        self._given: list[torch.Tensor] = []
        self._bad_gradients: list[str] = []
        self._bad_before: tuple[list[str], list[str]] | None = None  # in front of a bad update
        self.norm: float | None = None  # of the gradients of the step that was ended last
        self._ended: tuple[float | None, float | None, float, frozenset[int]] | None = None

    @property
    def _waits_to_look(self) -> bool:
        """Whether a device would have to be waited for at each update. Only snapshots are looked at
        then, and runs of what is in doubt."""
        return self._is_on_device and self._run is None

    @property
    def can_agree(self) -> bool:
        """Whether all ranks of the job have a process group together."""
        distributed = process_group()
        if distributed is None:
            return self._world_size == 1
        return bool(distributed.get_world_size() == self._world_size)

    # -- a step

    def begin(self, is_watched: bool) -> None:
        """A body begins. `is_watched`: every module is looked at."""
        self.drop()
        self.know_what_is_meant()
        self._is_in_step = True
        self._protected.loaders.forget_taken()
        self._members.on_give = self._gives
        if is_watched:
            self._run = WatchedRun(self._modules())
        if self._checks_products:
            self._products = Products(self._modules())
        if self._updates is not None:
            self._updates.begin(is_rerun=is_watched)

    def know_what_is_meant(self) -> None:
        """Before the first body of a life, also where nobody looks at that one: what was made or
        loaded is meant, and what that body makes of it is not."""
        if self._meant is None:
            self.learn()

    def drop(self) -> None:
        """Forget what was seen, and look no more."""
        self._is_in_step = False
        self._members.on_give = _nothing
        if self._run is not None:
            self._run.end()
            self._run = None
        if self._products is not None:
            self._products.end()
            self._products = None
        if self._updates is not None:
            self._updates.drop()
        self._signs, self._norms, self._given, self._bad_gradients = [], [], [], []
        self._by, self._sizes, self._has_unseen = [], [], False
        self._bad_before = None

    def learn(self) -> None:
        """See `StepNumbers`."""
        self._meant = KnownKinds()
        self._is_on_device = any(p.device.type == "cuda" for p in self._parameters())
        copies = self._protected.known_bad
        if copies is None or copies.learn(self._protected.gather().items):
            self._meant = KnownKinds({**self._bad_weights(), **self._bad_moments()})

    def _gives(self, tensors: Sequence[torch.Tensor]) -> None:
        """To a sum over ranks. On any thread."""
        if (run := self._run) is not None:
            run.gives()
        if not self._waits_to_look:
            self._given += [square_of(t.detach()) for t in tensors if can_be_bad(t) and t.numel()]

    def before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """In its pre-step hook, with what its `step` was given, itself among it, when nobody copies
        from its parameters any more."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # makes gradients, later
        if self._run is not None:
            self._run.updates()
        if not self._is_in_step or self._waits_to_look or _is_skipped(optimizer):
            return
        if closure is not None:
            self._has_unseen = True
            return
        having = [p for p in parameters_of(optimizer) if p.grad is not None]
        gradients = [_as_it_is(p.grad) for p in having if p.grad is not None]
        norm = norm_of(gradients) / _scale(optimizer)
        self._norms.append(norm)
        self._by.append(id(optimizer))
        if math.isfinite(norm):
            if norm > OVERFLOW and self._bad_before is None:
                self._bad_before = self._bad_now()  # what the update makes of it came of it
            if norm > 0 and self._spikes.may_be_far(norm):
                self._sizes.append(norm_of([_as_it_is(p) for p in having]))
            return
        self._signs.append(Sign.GRADIENT)
        if self._bad_before is None:
            self._bad_before = self._bad_now()
        names = tensor_names(self._protected.parts())
        self._bad_gradients += bad_names(
            (names.get(id(p), f"parameter {i}"), g)
            for i, (p, g) in enumerate(zip(having, gradients, strict=True))
        )
        if self._withholds:
            for parameter in having:
                parameter.grad = None

    def end(self, loss: object) -> tuple[Sign, ...]:
        """The body is over: what this rank thinks is wrong. `loss`: what the program has told of
        it."""
        self._is_in_step = False
        self._members.on_give = _nothing
        if self._run is not None:
            self._run.end()
        if self._products is not None:
            self._products.end()
            self._signs += [Sign.PRODUCT] if self._products.wrong else []
        if self._updates is not None and self._updates.wrong:
            self._signs.append(Sign.UPDATE)
        # Without an update a scaler may have skipped one: it knows what it does about its loss.
        self.norm = math.hypot(*self._norms) if self._norms else None
        size = math.hypot(*self._sizes)
        self._ended = self.norm, _value(loss) if self._norms else None, size, frozenset(self._by)
        if not self._signs and (sign := self._spikes.look(*self._ended)) is not None:
            self._signs.append(sign)
        if self._signs and not self._withholds and not self._is_wrong():
            self._signs = []
        return tuple(self._signs)

    def _is_wrong(self) -> bool:
        """Whether what was seen has done any harm, or is wrong whatever comes of it."""
        is_great = self.norm is not None and self.norm > OVERFLOW
        harmless = {Sign.GRADIENT, Sign.EXPLOSION} if is_great else {Sign.GRADIENT}
        return not harmless.issuperset(self._signs) or bool(self.bad_state())

    def accept(self) -> None:
        """See `StepNumbers`."""
        if self._ended is not None:
            self._spikes.accept(*self._ended)
        if self._updates is not None:
            self._updates.accept()

    # -- evidence, once somebody thinks that something is wrong

    def sight(self, bad_in_snapshot: Sequence[str], has_spread: bool) -> Sight:
        """See `StepNumbers`."""
        moments: list[str] = []
        weights: list[str] = []
        if not has_spread:
            moments, weights = map(list, self._bad_before or self._bad_now())
        for name in bad_in_snapshot:
            of_optimizer = name.partition(".")[0] in self._updating_paths()
            (moments if of_optimizer else weights).append(name)
        gave, gave_bad_at = self._what_was_given()
        run = self._run
        origin = None if run is None else run.origin
        if origin is None and self._products is not None:
            origin = next(iter(self._products.wrong), None)
        inputs = [] if run is None else run.bad_inputs
        taken = self._protected.loaders.taken()
        batches = [str(b.place) for b in taken if bad_names(tensors_in(b.value))]
        return Sight(
            rank=0,
            role=0,
            looked=not self._has_unseen,
            gave=gave,
            gave_bad_at=gave_bad_at,
            bad_batch=_few(batches or inputs),
            bad_weights=_few(weights),
            bad_moments=_few(moments),
            bad_gradients=_few(self._bad_gradients),
            bad_update=() if self._updates is None else _few(self._updates.wrong),
            origin=origin,
            narrow=None if run is None else run.narrow,
            digest="" if run is None else run.digest,
            sketch=() if run is None else run.sketch,
            batches=len(taken),
        )

    def bad_state(self) -> NotFinite:
        """See `StepNumbers`."""
        moments, weights = self._news(self._bad_moments()), self._news(self._bad_weights())
        has_nan = any(weights.values())
        return NotFinite(
            _few([*moments, *weights]),
            may_be_meant=bool(weights) and not has_nan and not moments,
        )

    def _bad_now(self) -> tuple[list[str], list[str]]:
        """Moments and weights."""
        return [*self._news(self._bad_moments())], [*self._news(self._bad_weights())]

    def _news(self, kinds: Mapping[str, bool]) -> dict[str, bool]:
        return (self._meant or KnownKinds()).news(kinds)

    def _what_was_given(self) -> tuple[float | None, int | None]:
        run = self._run
        if run is not None and run.norm is not None:
            return run.norm, 0 if run.gave_bad else None
        squares = [float(square) for square in self._given]
        bad = [index for index, square in enumerate(squares) if not math.isfinite(square)]
        return (math.sqrt(math.fsum(squares)) if squares else None), (bad[0] if bad else None)

    def _bad_weights(self) -> dict[str, bool]:
        return bad_kinds(
            (f"{path}.{name}", parameter)
            for path, module in self._modules().items()
            for name, parameter in bare(module).named_parameters()
        )

    def _bad_moments(self) -> dict[str, bool]:
        """And numbers that updates are made with."""
        parts = self._protected.parts()
        names = tensor_names(parts)
        moments = bad_kinds(
            (f"{key} of {names.get(id(parameter), 'a parameter')}", value)
            for optimizer in self._protected.optimizers
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        )
        return {**moments, **bad_numbers(parts)}

    def _modules(self) -> dict[str, torch.nn.Module]:
        parts = self._protected.parts()
        return {path: p for path, p in parts.items() if isinstance(p, torch.nn.Module)}

    def _parameters(self) -> list[torch.Tensor]:
        return [p for optimizer in self._protected.optimizers for p in parameters_of(optimizer)]

    def _updating_paths(self) -> set[str]:
        """Of optimizers, schedules and loss scalers."""
        parts = self._protected.parts()
        return {path for path, p in parts.items() if isinstance(p, UPDATED_BY)}

    def hand_over_batches(self, role: int) -> None:
        """The next step here takes the batches that rank `role` took in the one that is over."""
        mine = [(b.place.loader, b.value) for b in self._protected.loaders.taken()]
        self._protected.loaders.give(gather_objects(mine)[role])

    def places(self) -> tuple[BatchPlace, ...]:
        """Of the batches that the present body has taken."""
        return tuple(batch.place for batch in self._protected.loaders.taken())

    def skip(self, places: Sequence[BatchPlace]) -> None:
        """See `StepNumbers`."""
        self._protected.loaders.skip(places)


def _as_it_is(gradient: torch.Tensor) -> torch.Tensor:
    """What is dense and here needs no view of its own: this is asked of each, in each step."""
    is_usual = type(gradient) is torch.Tensor and gradient.layout is torch.strided
    return gradient if is_usual else plain(gradient)


def _is_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a loss scaler has told it to leave everything as it is: one that scales by itself is
    asked to update in any case."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, torch.Tensor) and bool(found)


def _scale(optimizer: torch.optim.Optimizer) -> float:
    """By which the gradients are too great: it divides by that itself."""
    scale = getattr(optimizer, "grad_scale", None)
    return float(scale) if isinstance(scale, torch.Tensor) else 1.0


def _value(loss: object) -> float | None:
    """A loss that can be read without waiting for a device."""
    if isinstance(loss, torch.Tensor):
        return float(loss) if loss.device.type == "cpu" and loss.numel() == 1 else None
    return float(loss) if isinstance(loss, (int, float)) else None


def _few(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))[:SHOWN_NAMES]


def _nothing(*_: object) -> None:
    """Nobody looks."""
