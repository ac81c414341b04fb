"""Faults: what a drill does to a job, where and when; as text, as values, drawn from a seed.

Comes in: `kill:rank=1,step=20,phase=capture`. Goes out: `Fault`s in the order they are to happen. Decides nothing about how a fault
is done (injector.py, conductor.py) or proved (verdict.py). Pure: the generator of random faults takes its seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from keepstep.errors import ConfigError

KINDS = ("kill", "stop", "keeper-kill", "flip", "torn", "full")
PHASES = ("forward", "backward", "update", "capture", "seal", "persist", "restore")
PLACES = {"flip": ("arena", "store"), "full": ("store", "arena")}  # the first is the default
DRAWN = ("kill", "stop", "torn", "keeper-kill", "flip")  # what a campaign draws from; `full` needs a filesystem of its own
STRIDE_STEPS = 8  # mean distance of a campaign's faults


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: rank `rank` meets it on entering `phase` of `step`, or of the first later step that has such a phase.

    phase=restore: in the recovery from the fault before it in the list; `step` says in which step that one comes.
    after_ms: done from outside, that long after the rank began the step (phase=restore: began restoring).
    where: `arena` or `store`, for the kinds that can be in either.
    """

    kind: str
    rank: int
    step: int
    phase: str = "forward"
    where: str = ""
    after_ms: float | None = None

    @property
    def ends_a_rank(self) -> bool:
        """Whether a restart follows."""
        return self.kind in ("kill", "stop", "flip", "torn") or (self.kind, self.where) == ("full", "arena")

    @property
    def from_outside(self) -> bool:
        return self.after_ms is not None

    @property
    def needs_store(self) -> bool:
        return self.where == "store" or self.phase == "persist"

    def __str__(self) -> str:
        where = f",where={self.where}" if self.where else ""
        after = "" if self.after_ms is None else f",after={self.after_ms:g}"
        return f"{self.kind}:rank={self.rank},step={self.step},phase={self.phase}{where}{after}"


def parse(text: str) -> Fault:
    """`kind:rank=R,step=S,phase=P[,where=arena|store][,after=MS]`. Raises ConfigError naming expected and found."""
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise ConfigError(f"fault {text!r}: expected one of {', '.join(KINDS)}, found {kind!r}")
    values: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if key not in ("rank", "step", "phase", "where", "after") or not equals:
            raise ConfigError(f"fault {text!r}: expected rank=, step=, phase=, where= or after=, found {part!r}")
        if key in values:
            raise ConfigError(f"fault {text!r}: expected {key}= once, found it again as {part!r}")
        values[key] = value
    if "step" not in values:
        raise ConfigError(f"fault {text!r}: expected step=, found none")
    after = values.get("after")
    default_phase = {"torn": "seal", "full": "persist"}.get(kind, "forward")
    return _checked(
        text,
        Fault(
            kind,
            _number(text, "rank", values.get("rank", "0")),
            _number(text, "step", values["step"]),
            values.get("phase", default_phase),
            values.get("where", PLACES.get(kind, ("",))[0]),
            None if after is None else float(_number(text, "after", after)),
        ),
    )


def _number(text: str, key: str, value: str) -> int:
    if not value.isdecimal():
        raise ConfigError(f"fault {text!r}: expected {key}= a whole number, 0 or more, found {value!r}")
    return int(value)


def _checked(text: str, fault: Fault) -> Fault:
    if fault.phase not in PHASES:
        raise ConfigError(f"fault {text!r}: expected phase= one of {', '.join(PHASES)}, found {fault.phase!r}")
    places = PLACES.get(fault.kind, ("",))
    if fault.where not in places:
        expected = f"where= one of {', '.join(places)}" if places != ("",) else "no where="
        raise ConfigError(f"fault {text!r}: expected {expected}, found {fault.where!r}")
    if fault.from_outside and (fault.kind not in ("kill", "stop", "keeper-kill") or fault.phase not in ("forward", "restore")):
        raise ConfigError(f"fault {text!r}: expected after= with kill, stop or keeper-kill and phase=forward or restore, found {fault}")
    return fault


def check(faults: Iterable[Fault], nproc: int, steps: int) -> None:
    """Raises ConfigError when a fault cannot happen in a job of that size."""
    for fault in faults:
        if fault.rank >= nproc:
            raise ConfigError(f"fault {str(fault)!r}: expected rank= below {nproc} (--nproc), found {fault.rank}")
        if fault.step >= steps:
            raise ConfigError(f"fault {str(fault)!r}: expected step= below {steps} (--steps), found {fault.step}")


def with_triggers(faults: Sequence[Fault]) -> list[Fault]:
    """A restore has to be caused: put a plain kill before each `phase=restore` that does not follow a deadly fault of its step."""
    out: list[Fault] = []
    for fault in faults:
        caused = bool(out) and out[-1].ends_a_rank and out[-1].step == fault.step
        if fault.phase == "restore" and not caused:
            out.append(Fault("kill", fault.rank, fault.step))
        out.append(fault)
    return out


def draw(seed: int, count: int, nproc: int, kinds: Sequence[str] = DRAWN, first_step: int = 4) -> list[Fault]:
    """`count` faults, each a random moment after the one before. Half of the kills come from outside, at a random millisecond."""
    rng = random.Random(seed)
    faults: list[Fault] = []
    step = first_step
    while len(faults) < count:
        kind, rank = rng.choice(list(kinds)), rng.randrange(nproc)
        one = Fault(kind, rank, step, rng.choice(PHASES[:-1]))
        if kind == "torn":
            one = replace(one, phase="seal")
        elif kind == "flip":
            one = replace(one, where="arena")
        elif rng.random() < 0.5:
            one = replace(one, phase="forward", after_ms=round(rng.uniform(0, 40), 1))
        drawn = [one]
        if kind == "keeper-kill":  # alone it costs nothing: a rank goes too, while the new keeper adopts
            drawn.append(Fault("kill", rng.randrange(nproc), step, "forward", after_ms=round(rng.uniform(0, 60), 1)))
        if rng.random() < 0.15:  # and once more, while everybody is restoring
            delay_ms = None if rng.random() < 0.5 else round(rng.uniform(0, 40), 1)
            drawn.append(Fault("kill", rng.randrange(nproc), step, "restore", after_ms=delay_ms))
        faults += drawn
        step += rng.randint(2, 2 * STRIDE_STEPS - 2)
    return faults[:count]


def kinds_of(text: str) -> tuple[str, ...]:
    """`kill,stop`: kinds a campaign may draw. Raises ConfigError."""
    kinds = tuple(filter(None, text.split(",")))
    wrong = [k for k in kinds if k not in DRAWN]
    if wrong or not kinds:
        raise ConfigError(f"kinds: expected some of {', '.join(DRAWN)}, found {text!r}")
    return kinds


def to_plan(faults: Sequence[Fault]) -> list[dict[str, object]]:
    """As JSON, for the job."""
    return [{f.name: getattr(fault, f.name) for f in fields(Fault)} for fault in faults]
