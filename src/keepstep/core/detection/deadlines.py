"""Deadlines: how long anything may take, all derived from at most one number that a user sets.

Comes in: `hang_after_s` (None: learn it from the job's own steps) and `link_dead_s` of a job of
several nodes. Goes out: every limit, each with what it is for, and the relations among them. Never
measures: `core/detection/progress.py` fits the floors to the job's rhythm.

Invariant: in a `Deadlines` that was derived every relation of `RELATIONS` holds; what would break
one is a ConfigError naming both sides.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from keepstep.errors import ConfigError
from keepstep.model.units import S_NS

PROMISE_NS = 10 * S_NS  # a stopped rank is named within max(this, 5 median steps)
PROMISE = "a rank that was stopped or frozen is named within this"
LATE_MEDIANS = 5
ASLEEP_TAILS = 5  # times the 99.9th percentile
BUSY_TAILS = 10
SHORTEST_HANG_S = 4.0


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Floors; `core/detection/progress.py` raises late, asleep and busy with the job's own steps,
    unless the user has set `hang_after_s`."""

    tick_ns: int = S_NS // 2
    look_ns: int = 2 * S_NS
    stacks_ns: int = 5 * S_NS // 2
    stopped_ns: int = 6 * S_NS
    late_ns: int = 10 * S_NS
    asleep_ns: int = 120 * S_NS
    busy_ns: int = 600 * S_NS
    grace_asleep_ns: int = 600 * S_NS
    grace_busy_ns: int = 1800 * S_NS
    kill_ns: int = 30 * S_NS
    link_dead_ns: int = 0  # 0: one node
    lease_renew_ns: int = 2 * S_NS
    lease_ns: int = 10 * S_NS
    regroup_ns: int = 60 * S_NS
    group_ns: int = 1920 * S_NS
    rendezvous_ns: int = 1980 * S_NS
    learns: bool = True


MEANINGS = {
    "tick_ns": "how often every rank's page and process state are read",
    "look_ns": "how often a suspect is examined: its children, the bytes it moves, where it "
    "sleeps, and what the other nodes see",
    "stacks_ns": "for saving the stacks of all ranks, before anything is killed",
    "stopped_ns": "a rank stopped or frozen for this long is named",
    "late_ns": "without progress for this long, a rank is suspected; at least "
    f"{LATE_MEDIANS} median steps",
    "asleep_ns": "without progress, processor time or a byte moved for this long, a rank hangs; at "
    f"least {ASLEEP_TAILS} times the slowest steps (P99.9)",
    "busy_ns": "without progress for this long, a rank hangs even if something runs; at least "
    f"{BUSY_TAILS} times the slowest steps",
    "grace_asleep_ns": "like asleep, in the first step, evaluation, persist and restore, and for "
    "ranks that are stuck in the kernel or all alike",
    "grace_busy_ns": "like busy, at the same times (a compiler may run)",
    "kill_ns": "a process that outlives SIGKILL by this long is stuck in the kernel",
    "link_dead_ns": "a node whose link has been down for this long is lost (`link_dead_s`)",
    "lease_renew_ns": "how often a node reports that it is alive",
    "lease_ns": "a node that has not reported for this long is lost",
    "regroup_ns": "for the survivors and the replacement to form a new process group",
    "group_ns": "the process group's own timeout: longer than any verdict takes, since its errors "
    "name a rank that was only left behind",
    "rendezvous_ns": "for restarted ranks to find each other",
}

# (shorter, longer, why): sums are joined by `+`.
RELATIONS = (
    ("tick_ns", "look_ns", "an expensive look is rarer than a cheap one"),
    ("look_ns", "stopped_ns", "a stopped rank is examined more than once"),
    (
        "tick_ns+tick_ns+stopped_ns+stacks_ns",
        "promise_ns",
        "a stopped rank is named in time, after its stacks are saved",
    ),
    ("stopped_ns", "late_ns", "what the system reports is acted on before anything is guessed"),
    ("late_ns+look_ns+stacks_ns", "asleep_ns", "the evidence is complete before it counts"),
    ("asleep_ns", "busy_ns", "a rank that runs may still make progress"),
    ("asleep_ns", "grace_asleep_ns", "a first step takes longer than others"),
    ("grace_asleep_ns", "grace_busy_ns", "a rank that runs may still make progress"),
    ("busy_ns", "grace_busy_ns", "a first step takes longer than others"),
    (
        "link_dead_ns+look_ns",
        "asleep_ns",
        "a link that comes back in time must not look like a hang",
    ),
    ("lease_renew_ns+lease_renew_ns", "lease_ns", "one report may get lost"),
    ("link_dead_ns", "lease_ns", "a node is not replaced before its links are given up"),
    ("kill_ns", "regroup_ns", "the old process is gone before the new group is complete"),
    (
        "grace_busy_ns+stacks_ns+kill_ns+regroup_ns",
        "group_ns",
        "a verdict names the culprit before the group's own timeout names a survivor",
    ),
    ("group_ns", "rendezvous_ns", "ranks wait until the others have been judged"),
)
MAY_BE_EQUAL = {
    ("asleep_ns", "busy_ns"),
    ("link_dead_ns", "lease_ns"),
    ("busy_ns", "grace_busy_ns"),
    ("asleep_ns", "grace_asleep_ns"),
    ("tick_ns+tick_ns+stopped_ns+stacks_ns", "promise_ns"),
    ("grace_asleep_ns", "grace_busy_ns"),
}


def derive(hang_after_s: float | None = None, link_dead_s: float | None = None) -> Deadlines:
    """Every limit. Raises ConfigError when what was set leaves no room for what must come before or
    after it."""
    found = Deadlines()
    if link_dead_s is not None:
        dead_ns = int(link_dead_s * S_NS)
        # A link that comes back must not look like a hang: a patient link makes a patient detector.
        found = replace(found, link_dead_ns=dead_ns, lease_ns=max(found.lease_ns, dead_ns))
        found = _at_least(
            found,
            asleep_ns=2 * dead_ns,
            busy_ns=4 * dead_ns,
            grace_asleep_ns=4 * dead_ns,
            grace_busy_ns=8 * dead_ns,
        )
    if hang_after_s is not None:
        if not hang_after_s >= SHORTEST_HANG_S:
            raise ConfigError(
                f"hang_after_s: expected at least {SHORTEST_HANG_S:g} seconds, found "
                f"{hang_after_s:g}"
            )
        hang_ns = int(hang_after_s * S_NS)
        found = replace(
            found,
            learns=False,
            asleep_ns=hang_ns,
            busy_ns=hang_ns,
            look_ns=min(found.look_ns, hang_ns // 8),
            stacks_ns=min(found.stacks_ns, hang_ns // 4),
            stopped_ns=min(found.stopped_ns, hang_ns // 4),
            late_ns=min(found.late_ns, hang_ns // 3),
        )
        found = replace(found, tick_ns=min(found.tick_ns, found.look_ns // 2))
        found = _at_least(found, grace_asleep_ns=hang_ns, grace_busy_ns=hang_ns)
    group_ns = found.grace_busy_ns + found.stacks_ns + found.kill_ns + found.regroup_ns
    group_ns = -(-group_ns // (60 * S_NS)) * 60 * S_NS
    found = replace(found, group_ns=group_ns, rendezvous_ns=group_ns + found.regroup_ns)
    check(found)
    return found


def check(deadlines: Deadlines) -> None:
    """Raises ConfigError naming the first relation that does not hold, both sides in seconds."""
    for shorter, longer, why in RELATIONS:
        low, high = _value(deadlines, shorter), _value(deadlines, longer)
        if low > high or (low == high and (shorter, longer) not in MAY_BE_EQUAL):
            raise ConfigError(
                f"deadlines: expected {_name(shorter)} ({low / S_NS:g} s) below "
                f"{_name(longer)} ({high / S_NS:g} s): {why}; "
                "see `keepstep timeouts`, and change hang_after_s or link_dead_s"
            )


def table(deadlines: Deadlines) -> list[tuple[str, float, str]]:
    """(name, seconds, meaning) of every limit in use."""
    names = [f.name for f in fields(deadlines) if f.name.endswith("_ns")]
    rows = [
        (name.removesuffix("_ns"), getattr(deadlines, name) / S_NS, MEANINGS[name])
        for name in names
    ]
    rows.insert(names.index("late_ns"), ("promise", PROMISE_NS / S_NS, PROMISE))
    return [row for row in rows if row[1] > 0]


def relations(deadlines: Deadlines) -> list[tuple[str, float, str, float, str]]:
    """(shorter, its seconds, longer, its seconds, why) of every relation between limits in use."""
    return [
        (_name(s), _value(deadlines, s) / S_NS, _name(g), _value(deadlines, g) / S_NS, why)
        for s, g, why in RELATIONS
        if deadlines.link_dead_ns or "link_dead_ns" not in s
    ]


def _at_least(deadlines: Deadlines, **floors: int) -> Deadlines:
    return replace(
        deadlines, **{name: max(getattr(deadlines, name), floor) for name, floor in floors.items()}
    )


def _value(deadlines: Deadlines, names: str) -> int:
    return sum(
        PROMISE_NS if name == "promise_ns" else getattr(deadlines, name)
        for name in names.split("+")
    )


def _name(names: str) -> str:
    parts = [name.removesuffix("_ns") for name in names.split("+")]
    return " + ".join(
        f"{parts.count(p)} x {p}" if parts.count(p) > 1 else p for p in dict.fromkeys(parts)
    )
