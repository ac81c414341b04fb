"""Diagnosis: from what is seen of all ranks to who is at fault, with the evidence in one sentence.

Comes in: one `Evidence` a rank, of all nodes, or what is known of an exit. Goes out: `Diagnosis`s.
The same evidence gives the same verdict on every node, whoever computes it. Never acts, and never
believes survivors: what a rank says about its peers names nobody.

The rule. Who is stopped is at fault: the system says so. Else who is *behind*: without a page where
others have one, with fewer completed steps, with a lower collective number (a hung rank logs
nothing: MegaScale, NSDI 2024). Else, among equals, the odd one out: not waiting where others wait,
stuck in the kernel, quiet where others run (or the reverse), on another stack than the rest
(ByteRobust, SOSP 2025). Nobody odd: nobody in particular.

Invariant: a rank that computes or moves bytes is not called hung before its long limit, and nobody
is while the one waited for moves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from keepstep.core.detection.deadlines import Deadlines
from keepstep.core.detection.progress import HELD
from keepstep.model.diagnosis import Diagnosis, Evidence, Kind, Strength
from keepstep.model.failure import Cause
from keepstep.model.signals import FAULTS, SIGBUS, SIGHUP, SIGINT, SIGKILL, SIGTERM, signal_words
from keepstep.model.snapshot import Phase
from keepstep.model.units import S_NS, counted, first_line, human_ns

PREEMPTING = {SIGHUP, SIGINT, SIGTERM}
OUT_OF_MEMORY = ("out of memory", "MemoryError", "Cannot allocate memory")
# How CUDA and NVIDIA's driver say that a device is lost or broken; an illegal access may be the
# program's.
BROKEN_DEVICE = (
    "uncorrectable ECC",
    "fallen off the bus",
    "Unable to determine the device handle",
    "o CUDA-capable device is detected",  # with a capital letter at the head of a sentence
    "DeviceError: ",  # ours: it computes wrong
)
# Ours, at the head of a message: there is no state to resume from, or no way to it, which is not
# the program's doing.
NO_STATE = ("KeeperError:", "StoreError:", "MeetingError:")
# How gloo, NCCL and their stores say that somebody else has gone or does not answer.
CASCADE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "DistNetworkError",  # torch's, where ranks meet
    "Connect timeout",
    "ncclRemoteError",
    "PeerLost:",
)


def diagnose(
    evidence: Sequence[Evidence], world_size: int, deadlines: Deadlines
) -> list[Diagnosis]:
    """What is wrong now: nothing, a suspicion (`slow`), or who is at fault. `world_size`: how many
    ranks should have evidence."""
    found = sorted(evidence, key=lambda e: e.rank)
    living = [e for e in found if e.phase != Phase.DONE]
    if any(e.state == "gone" for e in living):
        return []  # an exit explains the stall, and has its own way
    held = [e for e in living if e.state in HELD]
    if held:  # whatever the others seem to do: they wait for it
        return [
            _stopped(e)
            for e in held
            if e.stopped_ns >= deadlines.stopped_ns and e.stalled_ns >= deadlines.stopped_ns
        ]
    if not any(e.has_page for e in living) or any(e.state == "traced" for e in living):
        return []  # not ours to judge; or a debugger holds it, and whoever sits there knows
    # The most patient phase that anybody is in counts for all: they may wait for that one.
    limits = _limits(living, deadlines)
    blame = _blame(living)
    if min(e.stalled_ns for e in blame.ranks) < limits.late_ns:
        return []  # who is waited for still moves
    unheard = world_size - len(found)
    if unheard > 0 or not blame.is_narrow:
        return [_nobody(blame.ranks, living, unheard, limits)]
    return [_judged(e, blame, limits) for e in blame.ranks]


@dataclass(frozen=True, slots=True)
class _Limits:
    """`blunt_ns`: of quiet, where a verdict helps little: nobody in particular, or the kernel is
    still writing. `judges_work`: the user has said when all ranks together count as hung though
    they compute."""

    late_ns: int
    asleep_ns: int
    blunt_ns: int
    busy_ns: int
    judges_work: bool


def _limits(living: list[Evidence], deadlines: Deadlines) -> _Limits:
    asleep_ns = max(e.asleep_ns for e in living)
    blunt_ns = max(asleep_ns, deadlines.grace_asleep_ns) if deadlines.learns else asleep_ns
    return _Limits(
        max(e.late_ns for e in living),
        asleep_ns,
        blunt_ns,
        max(e.busy_ns for e in living),
        not deadlines.learns,
    )


@dataclass(frozen=True, slots=True)
class _Blame:
    """Who is at fault, and how that shows. Not narrow: everybody alike."""

    ranks: list[Evidence]
    strength: Strength
    how: str
    is_narrow: bool = True


def _blame(living: list[Evidence]) -> _Blame:
    behind = [e for e in living if not e.has_page]
    if behind and len(behind) < len(living):
        return _Blame(
            behind, Strength.ABSENCE, f"has no status page, {len(living) - len(behind)} others do"
        )
    counts = _are_comparable(living)
    position = {e.rank: (e.completed_step, e.collective if counts else 0) for e in living}
    least = min(position.values())
    behind = [e for e in living if position[e.rank] == least]
    if len(behind) < len(living):
        others = [e for e in living if e not in behind]
        if all(e.completed_step > least[0] for e in others):
            how = (
                f"has completed step {least[0]}, the others step "
                f"{min(e.completed_step for e in others)} or later"
            )
        else:
            how = (
                f"has entered collective {least[1]}, the others {max(e.collective for e in others)}"
            )
        return _Blame(behind, Strength.ABSENCE, how)
    return _odd_one(living)


def _are_comparable(living: list[Evidence]) -> bool:
    """Whether all enter equally many collectives a step, as far as that shows: stages of a pipeline
    do not. Steps are seen at ticks, so a count may be off by what one step has."""
    known = [e for e in living if e.counted_steps > 0]
    most = max((e.counted / e.counted_steps for e in known), default=0.0)
    return all(
        abs(most - e.counted / e.counted_steps) <= 2 * most / min(k.counted_steps for k in known)
        for e in known
    )


# What sets one of several equals apart, the most telling first.
_SIGNS: tuple[tuple[Callable[[Evidence], Hashable], str], ...] = (
    (lambda e: e.waits, "is not where the others wait"),
    (lambda e: e.state == "uninterruptible", "is the only one stuck in the kernel"),
    (lambda e: e.quiet_ns < e.late_ns, "does something different from the others"),
    (lambda e: e.stack, "is on another stack than the others"),
)


def _odd_one(living: list[Evidence]) -> _Blame:
    for sign, how in _SIGNS:
        counts = Counter(sign(e) for e in living)
        odd = [e for e in living if counts[sign(e)] == 1]
        if len(counts) == 2 and len(odd) == 1 and len(living) > 2:
            return _Blame(odd, Strength.STATISTICS, f"{how}, {len(living) - 1} of {len(living)}")
    if len(living) == 2:
        one_waits = [e for e in living if e.waits is not True]
        if len(one_waits) == 1:
            return _Blame(
                one_waits, Strength.STATISTICS, "is not waiting for the other, which waits for it"
            )
        stuck = [e for e in living if e.state == "uninterruptible"]
        if len(stuck) == 1:
            return _Blame(stuck, Strength.STATISTICS, "is stuck in the kernel, the other is not")
    return _Blame(living, Strength.STATISTICS, "", is_narrow=False)


def _stopped(e: Evidence) -> Diagnosis:
    how = "frozen by its cgroup" if e.state == "frozen" else "stopped by a signal"
    why = (
        f"rank {e.rank} is {how} in step {e.step}: at every look for "
        f"{human_ns(e.stopped_ns)}, no progress for {human_ns(e.stalled_ns)}"
    )
    return Diagnosis("stopped", "rank", e.rank, e.node, e.state, Strength.FACT, why, e.stalled_ns)


def _judged(e: Evidence, blame: _Blame, limits: _Limits) -> Diagnosis:
    """One rank that keeps all others waiting."""
    where = f"in step {e.step}, {e.phase.name.lower()}: no progress for {human_ns(e.stalled_ns)}"
    doing = f"at {e.cpu_ratio:.0%} of a core"
    quiet = f"no processor time and no byte moved for {human_ns(e.quiet_ns)}"
    asleep = f"{e.state}{f' in {e.wchan}' if e.wchan else ''}"
    is_in_kernel = e.state == "uninterruptible"
    quiet_limit_ns = limits.blunt_ns if is_in_kernel else limits.asleep_ns
    if e.quiet_ns >= quiet_limit_ns:
        kind: Kind = "unkillable" if is_in_kernel else "deadlocked"
        why = (
            f"rank {e.rank} is stuck {where} (limit {_seconds(quiet_limit_ns)}), {quiet}, "
            f"{asleep}; it {blame.how}"
        )
        return Diagnosis(kind, "rank", e.rank, e.node, e.state, blame.strength, why, e.stalled_ns)
    is_quiet = e.quiet_ns >= limits.late_ns
    if e.stalled_ns >= limits.busy_ns:
        state = e.state if is_quiet else "spinning"
        why = (
            f"rank {e.rank} hangs {where} (limit {_seconds(limits.busy_ns)}), "
            f"{quiet if is_quiet else doing}, {asleep}; it {blame.how}"
        )
        return Diagnosis(
            "unkillable" if is_in_kernel else "hang",
            "rank",
            e.rank,
            e.node,
            state,
            blame.strength,
            why,
            e.stalled_ns,
        )
    limit_ns = quiet_limit_ns if is_quiet else limits.busy_ns
    why = (
        f"rank {e.rank} is late {where} (expected {_seconds(limits.late_ns)}), "
        f"{quiet if is_quiet else doing}, {asleep}; it {blame.how}; "
        f"called hung after {_seconds(limit_ns)}"
    )
    return Diagnosis("slow", "rank", e.rank, e.node, e.state, blame.strength, why, e.stalled_ns)


def _nobody(
    ranks: list[Evidence], living: list[Evidence], unheard: int, limits: _Limits
) -> Diagnosis:
    """Nobody in particular: all alike, or some that nobody has heard of.

    Restarting everybody is blunt, so it takes longer; and while all compute, an evaluation that
    nobody announced is likelier than a hang.
    """
    stalled_ns, quiet_ns = min(e.stalled_ns for e in ranks), min(e.quiet_ns for e in ranks)
    who = (
        f"{counted(unheard, 'rank')} {'is' if unheard == 1 else 'are'} not heard of"
        if unheard > 0
        else f"all {len(living)} ranks look alike"
    )
    if len(living) == 1 and unheard <= 0:
        who = "no other rank runs to compare with"
    why = (
        f"no progress for {human_ns(stalled_ns)} in step {min(e.step for e in ranks)}, "
        f"{human_ns(quiet_ns)} of it quiet, and {who}"
    )
    limit_ns = limits.busy_ns if limits.judges_work else limits.blunt_ns
    if (stalled_ns if limits.judges_work else quiet_ns) >= limit_ns:
        why = f"the job hangs: {why} (limit {_seconds(limit_ns)})"
        return Diagnosis("hang", "job", None, None, "unknown", Strength.STATISTICS, why, stalled_ns)
    why = (
        f"the job is late: {why}; called hung after "
        f"{_seconds(limit_ns)}{'' if limits.judges_work else ' of quiet'}"
    )
    return Diagnosis("slow", "job", None, None, "unknown", Strength.STATISTICS, why, stalled_ns)


# -- exits


@dataclass(frozen=True, slots=True)
class ExitFacts:
    """`code` as subprocess tells it. `oom_kills`: how many processes of its cgroup
    (`machine_oom_kills`: of the machine) were killed for want of memory since it began, None where
    nobody counts. `phase` and `step` are its page's last, None without one."""

    rank: int
    node: int
    code: int
    message: str = ""
    step: int | None = None
    phase: Phase | None = None
    oom_kills: int | None = None
    machine_oom_kills: int | None = None
    peers_running: int = 0


def explain_exit(facts: ExitFacts) -> Diagnosis:
    """Why a rank has ended, from what the system and the rank itself say."""
    signum = -facts.code if facts.code < 0 else facts.code - 128 if 128 < facts.code < 160 else 0
    if facts.code == 0:
        return _ended_well(facts)
    if signum:
        return _signalled(facts, signum)
    told = first_line(facts.message)
    says = f": {told}" if told else ", without a word why"
    if facts.message.startswith(NO_STATE):
        why = (
            f"rank {facts.rank} has nothing to resume from{_place(facts)} and exited with code "
            f"{facts.code}{says}"
        )
        return _of_rank("no-state", facts, f"code {facts.code}", Strength.TEXT, why)
    if any(text in facts.message for text in CASCADE):
        why = (
            f"rank {facts.rank} exited with code {facts.code} because of another rank{says}; "
            "that names nobody"
        )
        return Diagnosis("unknown", "job", None, None, f"code {facts.code}", Strength.TEXT, why)
    if any(text in facts.message for text in OUT_OF_MEMORY):
        why = (
            f"rank {facts.rank} ran out of memory{_place(facts)} and exited with code "
            f"{facts.code}{says}"
        )
        return _of_rank("oom", facts, f"code {facts.code}", Strength.TEXT, why)
    if any(text in facts.message for text in BROKEN_DEVICE):
        why = (
            f"rank {facts.rank} says that its device is lost or broken{_place(facts)} and exited "
            f"with code {facts.code}{says}"
        )
        return _of_rank("device", facts, f"code {facts.code}", Strength.TEXT, why)
    return _of_rank(
        "crash",
        facts,
        f"code {facts.code}",
        Strength.FACT,
        f"rank {facts.rank} exited with code {facts.code}{_place(facts)}{says}",
    )


def cause_of(verdict: Diagnosis) -> Cause:
    """Whose budget a rank's end is charged to. Killed and stopped is it from outside; that a
    program kills itself is its own affair."""
    if (
        verdict.kind == "crash"
        and not verdict.state.startswith("code")
        and verdict.state not in map(signal_words, FAULTS)
    ):
        return Cause.KILLED
    return _CAUSES.get(verdict.kind, Cause.UNKNOWN)


_CAUSES: dict[Kind, Cause] = {
    "crash": Cause.CRASH,
    "premature-exit": Cause.CRASH,
    "oom": Cause.OOM,
    "device": Cause.DEVICE,
    "no-state": Cause.STATE,
    "hang": Cause.HANG,
    "deadlocked": Cause.HANG,
    "unkillable": Cause.HANG,
    "stopped": Cause.KILLED,
    "preempted": Cause.KILLED,
}


def _ended_well(facts: ExitFacts) -> Diagnosis:
    if facts.phase in (None, Phase.DONE) or facts.peers_running == 0:
        return _of_rank(
            "ended", facts, "code 0", Strength.FACT, f"rank {facts.rank} ended well{_place(facts)}"
        )
    assert facts.phase is not None
    why = (
        f"rank {facts.rank} exited with code 0{_place(facts)} in phase "
        f"{facts.phase.name.lower()}, before it was done, "
        f"while {facts.peers_running} others run"
    )
    return _of_rank("premature-exit", facts, "code 0", Strength.FACT, why)


def premature_exit(ended: Diagnosis, waiting: int) -> Diagnosis:
    """Of a rank that ended well: another one, whose collective has failed, still needs it."""
    why = (
        f"rank {ended.culprit} ended with code 0, and rank {waiting} still waits for it in a "
        "collective"
    )
    return replace(ended, kind="premature-exit", why=why)


def _signalled(facts: ExitFacts, signum: int) -> Diagnosis:
    name, place = signal_words(signum), _place(facts)
    if signum == SIGKILL and facts.oom_kills:
        why = (
            f"rank {facts.rank} was killed by {name}{place}: its cgroup ran out of memory "
            f"({facts.oom_kills} killed there since it began)"
        )
        return _of_rank("oom", facts, name, Strength.FACT, why)
    if signum == SIGKILL and facts.machine_oom_kills:
        why = (
            f"rank {facts.rank} was killed by {name}{place} when the machine ran out of "
            f"memory ({facts.machine_oom_kills} killed there "
            "since it began)"
        )
        return _of_rank("oom", facts, name, Strength.STATISTICS, why)
    if signum in PREEMPTING:
        return _of_rank(
            "preempted",
            facts,
            name,
            Strength.FACT,
            f"rank {facts.rank} was ended by {name}{place}, from outside",
        )
    if signum == SIGKILL:
        counted = (
            "nothing ran out of memory"
            if facts.oom_kills == 0 or facts.machine_oom_kills == 0
            else "whether memory ran out is not known"
        )
        return _of_rank(
            "crash",
            facts,
            name,
            Strength.FACT,
            f"rank {facts.rank} was killed by {name}{place}, from outside; {counted}",
        )
    remark = "; full shared memory (/dev/shm) does that" if signum == SIGBUS else ""
    whose = "by its own fault" if signum in FAULTS else "by a signal"
    return _of_rank(
        "crash",
        facts,
        name,
        Strength.FACT,
        f"rank {facts.rank} died of {name}{place}, {whose}{remark}",
    )


def _place(facts: ExitFacts) -> str:
    return "" if facts.step is None or facts.step < 0 else f" in step {facts.step}"


def _of_rank(kind: Kind, facts: ExitFacts, state: str, strength: Strength, why: str) -> Diagnosis:
    return Diagnosis(kind, "rank", facts.rank, facts.node, state, strength, why)


def _seconds(duration_ns: int) -> str:
    return f"{duration_ns / S_NS:.0f} s"
