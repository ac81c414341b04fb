"""Restarts: what happens to the ranks of a node, and what an agent does about it. Values only;
`core/recovery/restarts.py` decides."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.model.failure import Cause, Failure, Finding
from keepstep.model.parts import PartPolicy
from keepstep.model.signals import FAULTS, signal_words
from keepstep.model.units import S_NS, first_line

END_WITHIN_NS = 10 * S_NS


@dataclass(frozen=True, slots=True)
class Exit:
    """`code` as subprocess tells it: 0 ended well, n exit code, -n killed by signal n. `message`:
    from the rank's error file, or why it was killed. `failure`: what is known of it besides.
    `is_refusal`: keepstep refused it, until a person changes something; `is_stop`: the job is to
    end, for a person to decide. `is_early`: it ended well, and too soon; `message` says so."""

    rank: int
    code: int
    message: str = ""
    failure: Failure | None = None
    is_refusal: bool = False
    is_stop: bool = False
    is_early: bool = False

    @property
    def blamed(self) -> Failure:
        """What is known; if that is nothing, what the code says."""
        cause = Cause.CRASH if self.code > 0 or -self.code in FAULTS else Cause.KILLED
        return self.failure or Failure(cause, self.rank)

    def __str__(self) -> str:
        if self.code == 0:
            return f"rank {self.rank} ended well"
        if self.is_early:
            return self.message
        if self.code > 0:
            what = f"exited with code {self.code}"
        else:
            what = f"was killed by {signal_words(-self.code)}"
        told = first_line(self.message)
        return f"rank {self.rank} {what}" + (f" ({told})" if told else "")


# -- what happens


@dataclass(frozen=True, slots=True)
class RanksStarted:
    """The node's ranks, `first_rank` and those behind it. `hosts`: of all nodes."""

    at_ns: int
    first_rank: int = 0
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RanksExited:
    """Exits noticed together. `completed_step` is the newest step any rank has told of, None when
    none ever did. `able`: the node's ranks, these among them, have said that they can stay in their
    process when a peer is lost. `expendable`: memory can do without this node."""

    exits: tuple[Exit, ...]
    at_ns: int
    completed_step: int | None = None
    able: bool = False
    expendable: bool = False


@dataclass(frozen=True, slots=True)
class Progressed:
    """The newest step that all ranks of this node have completed in this life."""

    completed_step: int


@dataclass(frozen=True, slots=True)
class Reported:
    """What failed on all nodes in the life before: each has told the others by now."""

    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class RanksUndead:
    """These live on after SIGKILL: they hang in the kernel."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SignalReceived:
    signum: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class TimeUp:
    """The time that the last action was given is over."""


@dataclass(frozen=True, slots=True)
class AttemptWanted:
    """All ranks have to find together anew for something that is not this node's; `failure` when it
    is one. `wait_ns`: decided for all nodes, too, so long before they meet."""

    why: str
    at_ns: int
    failure: Failure | None = None
    completed_step: int | None = None
    able: bool = False
    decided: bool = False  # already, for all nodes: `able` is then what they decided
    wait_ns: int = 0


@dataclass(frozen=True, slots=True)
class LeaveWanted:
    """A spare is to take this node's place, although nothing has failed."""

    why: str
    at_ns: int
    completed_step: int | None


@dataclass(frozen=True, slots=True)
class RegroupLate:
    """These were to stay in their process, or to take a place among those who do, and have not in
    time; `within_ns` 0: and never will."""

    ranks: tuple[int, ...]
    within_ns: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class PartSick:
    """A part of this node's machine is, and that is worth more than a word. `expendable`: memory
    can do without this node. `completed_step`: the newest that its ranks have told of."""

    why: str
    at_ns: int
    policy: PartPolicy
    expendable: bool = False
    completed_step: int | None = None


@dataclass(frozen=True, slots=True)
class Stopped:
    """Another node has ended the job, by a signal (`signum`) or because it gave up (0)."""

    why: str
    code: int
    signum: int = 0


@dataclass(frozen=True, slots=True)
class AllEndedWell:
    """The ranks of all nodes."""

    why: str
    at_ns: int


@dataclass(frozen=True, slots=True)
class RestoreRefused:
    """There is nothing that the job may resume from, and a restart would not change that, but
    perhaps one with `least` nodes; 0: those are all there are."""

    why: str
    least: int = 0


@dataclass(frozen=True, slots=True)
class MeetingLost:
    """The nodes have no place to meet any more, or this one cannot meet the others
    (`is_refused`)."""

    why: str
    is_refused: bool = False


Event = (
    RanksStarted
    | RanksExited
    | Progressed
    | Reported
    | RanksUndead
    | SignalReceived
    | TimeUp
    | AttemptWanted
    | LeaveWanted
    | RegroupLate
    | Stopped
    | AllEndedWell
    | RestoreRefused
    | MeetingLost
    | PartSick
)


# -- what to do


@dataclass(frozen=True, slots=True)
class RestartAll:
    """Meet the other nodes, start what is missing. `keep`: ranks that can stay in their process do;
    else kill what is left first. `leave`: leave this node's place to a spare that waits, if one
    does. `fact`, `failure`, `leave`, `least` and `wait_ns` are for the others; `refused`: why
    `keep` is not. `finding`: what this failure shows together with others. `least`: with fewer
    nodes it would end as it did now; 0: not that anybody knows. `wait_ns`: so long the nodes wait
    before they meet."""

    why: str
    fact: str
    failure: Failure | None = None
    keep: bool = False
    refused: str = ""
    leave: bool = False
    finding: Finding | None = None
    least: int = 0
    wait_ns: int = 0


@dataclass(frozen=True, slots=True)
class Tell:
    """Nothing to do; but that has been found."""

    finding: Finding


@dataclass(frozen=True, slots=True)
class AwaitOthers:
    """This node's ranks have all ended well; whether the job has depends on the other nodes'
    ranks."""

    why: str


@dataclass(frozen=True, slots=True)
class SignalRanks:
    """The job ends with `exit_code` when they have gone, or when the time is up."""

    signum: int
    why: str
    within_ns: int
    exit_code: int


@dataclass(frozen=True, slots=True)
class End:
    """Kill what is left, give the keeper `within_ns` to clean up, leave with `exit_code`. `cause`:
    the failure that was too much. `finding`: what it shows together with others. `is_told`: why was
    told when the ranks were told to end."""

    ok: bool
    exit_code: int
    why: str
    within_ns: int = END_WITHIN_NS
    cause: Exit | None = None
    finding: Finding | None = None
    is_told: bool = False


Action = RestartAll | Tell | AwaitOthers | SignalRanks | End
