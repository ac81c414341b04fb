"""Numbers: what ranks see of a step whose numbers are wrong, and what is made of it.

A step may be run several times: as it was, again on the ranks that ran it, and with the ranks in
each other's places. `Sight` is one rank's evidence of one run, `StepRun` all ranks', `StepVerdict`
what follows from all runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from keepstep.model.rhythm import NO_STEP
from keepstep.model.snapshot import Stamp


class Sign(str, Enum):
    """Why a rank thinks that a step's numbers are wrong."""

    GRADIENT = "a gradient that is not finite"
    EXPLOSION = "a gradient far greater than those before"
    SPIKE = "loss and gradient far greater than those before"
    STATE = "a state that is not finite"
    PRODUCT = "a matrix product that does not fit its checksum"
    UPDATE = "an update that its gradients do not give again"


SKETCH_SUMS = 8  # of a `Sight`
OVERFLOW = 1.8e19  # the root of the greatest float32: no optimizer can square more
# What is finite may be right: the training says so when it comes again.
FINITE_SIGNS = frozenset((Sign.EXPLOSION, Sign.SPIKE, Sign.PRODUCT, Sign.UPDATE))


@dataclass(frozen=True, slots=True)
class NotFinite:
    """Tensors of a state that hold NaN or infinity, and did not before, by name. `may_be_meant`:
    infinity alone, and in no optimizer's state: a program may have put it there on purpose."""

    names: tuple[str, ...] = ()
    may_be_meant: bool = False

    def __bool__(self) -> bool:
        return bool(self.names)


@dataclass(frozen=True, slots=True)
class BatchPlace:
    """Which batch of which loader."""

    loader: str
    epoch: int
    number: int

    def __str__(self) -> str:
        return f"batch {self.number} of epoch {self.epoch} of loader {self.loader!r}"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a run of a step was first not finite, though all that went in was. `layer`: a module by
    its name; `operation`: what kind of module, or of function in it; `direction`: `forward` or
    `backward`."""

    layer: str
    operation: str
    direction: str

    def __str__(self) -> str:
        return f"{self.layer or 'the model'} ({self.operation}, {self.direction})"


@dataclass(frozen=True, slots=True)
class Device:
    """What a rank computes on. It stays the same when a rank is started again there, and is another
    one when another host takes its place."""

    host: str
    number: int  # of the host's

    def __str__(self) -> str:
        return f"device {self.number} of {self.host}"


@dataclass(frozen=True, slots=True)
class RangeCount:
    """What a layer gave in a type of few bits, `dtype`: so many values, of them `over` at the end
    of its range or not finite, and `under` below its least normal number, but not zero."""

    layer: str
    dtype: str
    values: int
    over: int
    under: int

    def __str__(self) -> str:
        return (
            f"of {self.values} values that {self.layer or 'the model'} gave as {self.dtype}, "
            f"{self.over} were at the end of its range or beyond, and {self.under} too small to "
            "have all their bits"
        )


@dataclass(frozen=True, slots=True)
class Sight:
    """One rank's evidence of one run of a step.

    rank: whose hardware ran it. role: whose state and batch that was.
    signs: none when it saw nothing wrong.
    first_step: the first step whose end is not to be trusted; the run's own, or one before.
    looked: whether all gradients were looked at in `first_step`; else a wrong one may have become
        state.
    gave: the norm of what this rank gave to sums over all ranks, before anything of its peers was
        added; None where that is not known. gave_bad_at: which of those sums, counted from 0, was
        the first that it gave what is not finite to.
    bad_batch, bad_weights, bad_moments, bad_gradients: where values are not finite, by name: in
        what the loaders gave, in parameters, in optimizer state, in the gradients that the update
        was to use.
    bad_update: parameters, by name, that an update has not made what the snapshot before it and its
        gradients make of them.
    origin: found in a run that is watched; None: there is none, or it was not watched.
    narrow: of the layer, in such a run, whose values had no place in their type; None: there was
        none.
    digest: of this rank's own gradients, bit for bit, in a run that is watched: those of before the
        first update, in which nothing is of a peer; else empty.
    sketch: sums of the same gradients with random signs, the same in each run: two runs' are as far
        apart as these are.
    device: where it ran; None: nobody said.
    holds: its own snapshots, to go back to.
    batches: how many batches of keepstep's loaders the step took. skips: how often this rank has
        left out a step's batches of late.
    means: its parameters hold infinities, and nothing else is wrong: a program may have put them
        there.
    differs_since: since the end of which step, before this one, the state of some replica has not
        been what the others' was; None: of no step is that known.
    """

    rank: int
    role: int
    signs: tuple[Sign, ...] = ()
    first_step: int = NO_STEP
    looked: bool = True
    gave: float | None = None
    gave_bad_at: int | None = None
    bad_batch: tuple[str, ...] = ()
    bad_weights: tuple[str, ...] = ()
    bad_moments: tuple[str, ...] = ()
    bad_gradients: tuple[str, ...] = ()
    bad_update: tuple[str, ...] = ()
    origin: Origin | None = None
    narrow: RangeCount | None = None
    digest: str = ""
    sketch: tuple[float, ...] = ()
    device: Device | None = None
    holds: tuple[Stamp, ...] = ()
    batches: int = 0
    skips: int = 0
    means: bool = False
    differs_since: int | None = None

    @property
    def is_origin(self) -> bool:
        """Whether this rank by itself held, or computed, what is wrong."""
        held = self.bad_batch or self.bad_weights or self.bad_moments or self.bad_update
        return bool(held) or self.origin is not None


class Way(str, Enum):
    """How a step is run."""

    FIRST = "as it was"
    AGAIN = "again"
    SWAPPED = "in each other's places"


@dataclass(frozen=True, slots=True)
class StepRun:
    """One run of a step; `seen` in the order of the ranks."""

    way: Way
    seen: tuple[Sight, ...]

    @property
    def is_clean(self) -> bool:
        return not any(seen.signs for seen in self.seen)

    @property
    def is_finite(self) -> bool:
        """Whether all that is wrong is a number."""
        return all(FINITE_SIGNS.issuperset(seen.signs) for seen in self.seen)


class Culprit(str, Enum):
    """What is at fault."""

    DATA = "data"
    MODEL = "model"  # weights or optimizer state
    HARDWARE = "hardware"
    CODE = "code"  # right inputs give it on every rank
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """What a step's runs say. `comes_again`: the run on the same ranks had it, too. `rank`: whose;
    None: all ranks', or not known. `where`: the layer, tensor or batch, by name. `since`: the first
    step in which it may have come, where nobody captured each step up to the one in doubt; None:
    in that one."""

    culprit: Culprit
    comes_again: bool
    rank: int | None
    where: str
    why: str
    since: int | None = None


class UpdatePiece(NamedTuple):
    """Elements of one of some tensors."""

    tensor: int
    begin: int
    end: int


class UpdateOutcome(str, Enum):
    """What making an update again says."""

    FITS = "fits"
    LEARNS = "is one of those that others are measured by"
    DIFFERS = "differs"
    ERRED = "was wrong, and is right when it is made once more"
    OFF = "says nothing: updates do not come to the same here"


class Lasting(str, Enum):
    """How long a device computes wrong."""

    TRANSIENT = "transient"
    PERMANENT = "permanent"
