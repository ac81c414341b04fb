"""Failures: what went wrong, where and at which step, as all nodes of the job count it.

Values only, and the words in which a user says how much of each cause is borne.
`core/recovery/restart_budget.py` counts, `core/recovery/recurrence.py` compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Literal

from keepstep.errors import ConfigError
from keepstep.model.bounds import LongText, Rank, StepNumber


class Cause(str, Enum):
    CRASH = "crash"  # of the program: an exit code, a signal of its own making, an end too early
    HANG = "hang"  # deadlocked, spinning, stuck in the kernel
    OOM = "oom"
    DEVICE = "device"  # the program says that its device is lost or broken
    STATE = "state"  # where to resume could not be had: a store that does not answer, say
    NODE = "node"  # lost
    KILLED = "killed"  # from outside: killed, preempted, stopped
    UNKNOWN = "unknown"  # said for another's sake, or nobody knows

    @property
    def may_be_code(self) -> bool:
        """Whether the program can bring it upon itself."""
        return self in (Cause.CRASH, Cause.HANG, Cause.OOM)


@dataclass(frozen=True, slots=True)
class Failure:
    """`host` and `device` (empty where a rank has none of its own) are the hardware. `step`: the
    one it was in, None when it told of none.

    error: its type and message, without what differs from one time to the next. completed_step: the
        newest that anybody there had told of.
    place: where in the program. files: where more is, on that host.
    """

    cause: Cause
    rank: Rank | None = None
    host: LongText = ""
    device: LongText = ""
    step: StepNumber | None = None
    error: LongText = ""
    completed_step: StepNumber | None = None
    place: LongText = ""
    files: LongText = ""

    @property
    def hardware(self) -> tuple[str, str]:
        return self.host, self.device

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "cause": self.cause.value}

    def __str__(self) -> str:
        who = "" if self.rank is None else f"rank {self.rank} "
        on = f"on {self.host or 'this host'}{f', device {self.device}' if self.device else ''}"
        step = "" if self.step is None else f" in step {self.step}"
        return (
            f"{who}{on}{step}: "
            f"{self.error or self.cause.value}{f', {self.place}' if self.place else ''}"
        )


def failure_from_json(values: Mapping[str, Any]) -> Failure:
    """The inverse of `Failure.to_json`."""
    return Failure(**{**values, "cause": Cause(values["cause"])})


@dataclass(frozen=True, slots=True)
class Finding:
    """What several failures say together. `code`: the program is at fault. `suspect`: perhaps this
    hardware is. `hardware`: it was, and elsewhere the step went well. `passing`: neither, it did
    not happen again."""

    kind: Literal["code", "suspect", "hardware", "passing"]
    why: str
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class Budget:
    """How many restarts each cause may cost in a row, None: any number. `refill_steps` new steps
    after one, its budget is whole again."""

    limits: Mapping[Cause, int | None]
    refill_steps: int

    def to_text(self) -> str:
        said = [
            f"{cause.value}={'unlimited' if limit is None else limit}"
            for cause, limit in self.limits.items()
        ]
        return ",".join([*said, f"{REFILL}={self.refill_steps}"])


REFILL = "refill"
DEFAULT_BUDGET = Budget(
    {
        Cause.CRASH: 10,
        Cause.HANG: 5,
        Cause.OOM: 5,
        Cause.DEVICE: 3,
        Cause.STATE: 20,
        Cause.NODE: None,
        Cause.KILLED: None,
    },
    refill_steps=100,
)


def parse_budget(text: str) -> Budget:
    """`crash=3,node=unlimited,refill=50`; what is not named stays at its default. Raises
    ConfigError."""
    limits, refill_steps = dict(DEFAULT_BUDGET.limits), DEFAULT_BUDGET.refill_steps
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (word.strip() for word in part.partition("="))
        if name == REFILL and value.isdecimal() and int(value) > 0:
            refill_steps = int(value)
        elif name in {cause.value for cause in limits} and (
            value.isdecimal() or value == "unlimited"
        ):
            limits[Cause(name)] = None if value == "unlimited" else int(value)
        else:
            known = ", ".join(cause.value for cause in limits)
            form = (
                f"a cause ({known}) with a number or unlimited, or {REFILL} with a number of "
                "steps, such as crash=3,node=unlimited"
            )
            raise ConfigError(f"budget: expected {form}, found {part!r}")
    return Budget(limits, refill_steps)
