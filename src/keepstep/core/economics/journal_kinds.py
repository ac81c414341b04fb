"""Journal kinds: what one event of a journal says about the course of the job, whoever reads it.

Comes in: an event. Goes out: whether it is a failure, whether training ends there, what caused it,
how long it had been so. Knows no other event. A kind that is not named here says nothing about the
job's course; what each kind means stands in `model/events.py`: `KINDS`.
"""

from __future__ import annotations

from keepstep.model.events import Event
from keepstep.model.units import S_NS

# all ranks may train; the one is the leading keeper's word, the other what its peers hear of it
BACK = {"resumed", "go"}
OPENING = {"job-started", "keeper-started"}
CLOSING = {"job-ended", "job-over", "keeper-ended", "stopping"}
ON_THE_WAY = {"rank-joined", "ranks-restarted", "rank-respawned"}  # seen only before ranks train
# a rank has what it needs to train, or has done its first step
READY = {"slots-made", "regrouped", "next-step"}
# what was suspected before was not so
REFUTING = {"skipped", "torn", "persist-started", "next-step", "suspicion-over"}
GOES_ON = {"slow", "ended", "unknown"}  # kinds of diagnosis after which ranks train as before
SUSPECTED_WITHIN_NS = 10 * S_NS
CAUSES = {
    "rank-exited": "crash",
    "rank-left": "crash",
    "rank-bye": "crash",
    "node-lost": "unreachable",
    "lost-notice": "unreachable",
}


def is_failure(event: Event) -> bool:
    """Whether the event says that a rank or a node is gone, or going, without having ended well."""
    if event.kind == "node-lost":
        return True
    if event.kind == "rank-exited":
        return event.data.get("code") != 0
    if event.kind == "rank-left":
        return not event.data.get("expected", True)
    return event.kind == "rank-bye" and not event.data.get("ok", True)


def ends_training(event: Event) -> bool:
    """Whether the job cannot train from here on: a failure, a diagnosis of one, or a plan to come
    back from one."""
    if event.kind == "diagnosis":
        return event.data.get("kind") not in GOES_ON
    return event.kind in ("plan", "lost-notice") or is_failure(event)


def is_about(suspected_ns: int, event: Event, at_ns: int) -> bool:
    """Whether a suspicion that no step has refuted is the first sign of what `event` noticed. A
    diagnosis is made from suspicions; anything else had none that is much older."""
    return event.kind == "diagnosis" or at_ns - suspected_ns <= SUSPECTED_WITHIN_NS


def cause_of(event: Event) -> str:
    return (
        str(event.data.get("kind"))
        if event.kind == "diagnosis"
        else CAUSES.get(event.kind, "unknown")
    )


def silence_ns(event: Event) -> int:
    """How long before the event its cause lies, as far as the event says."""
    return max(0, number(event.data.get("stalled_ns")) or 0)


def loss_of(back: Event) -> tuple[int | None, int]:
    """Of a permission to train: completed steps that are done again, None where nobody knows; and
    how many for certain."""
    lost = number(back.data.get("lost_steps"))
    return lost, number(back.data.get("lost_at_least")) or 0 if lost is None else lost


def number(value: object) -> int | None:
    return value if isinstance(value, int) else None
