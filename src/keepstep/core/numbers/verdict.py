"""Verdict: what the runs of one step say is at fault.

Comes in: what every rank saw of each run. Goes out: a `StepVerdict`, with its reason in one
sentence. Never guesses: what the runs leave open is UNKNOWN.

    the second run is clean          it does not come again: what one rank alone held or computed
    the batch is not finite again    data
    it goes where the state goes     data; on all ranks alike, code
    it stays where the device is     hardware

Runs of one step from one snapshot differ in nothing but the hardware, so what differs in their
outcome is the hardware's (Megatron-LM's rerun state machine tells the same three apart by running
on the same GPU and on another one). That holds where a step repeats bit for bit. Watched runs tell:
ranks that saw nothing wrong in what they gave must have computed the same bits from the same state
and batch, on whichever device. Where they have not (kernels that add in any order, a program that
asks for its rank's number), no device is accused: UNKNOWN. Where clean steps at the start have
shown how far apart runs are here, only what is farther apart leaves it open.

Invariant: the same runs give the same verdict on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from keepstep.core.numbers.repeats import distance
from keepstep.model.numbers import Culprit, Sight, Sign, StepRun, StepVerdict, Way

FAR_MORE = 100.0  # times what any other rank gives


def judge(runs: Sequence[StepRun], within: float = 0.0) -> StepVerdict:
    """`runs`: the first one as it was, then those that were made of it, at least one. `within`: so
    far apart runs of one state and batch are on clean steps (`repeats.py`); 0: bit for bit, or not
    known."""
    runs = [_of_first_step(run) for run in runs]
    verdict, narrow = _unless_it_came_so(_judge(runs, within), runs), None
    for seen in (seen for run in runs[1:] for seen in run.seen if seen.origin is not None):
        if verdict.rank in (None, seen.rank, seen.role):
            narrow = narrow or seen.narrow
    return verdict if narrow is None else replace(verdict, why=f"{verdict.why}; {narrow}")


def _judge(runs: Sequence[StepRun], within: float) -> StepVerdict:
    others = runs[1:]
    last = others[-1]
    if last.is_clean and last.way is Way.AGAIN:
        passed = _passing([run for run in runs if not run.is_clean], len(others))
        is_of_runs = passed.culprit is Culprit.HARDWARE  # else it is of what was found in memory
        return _unless_unrepeated(passed, others, within) if is_of_runs else passed
    again = next(run for run in others if run.way is Way.AGAIN)
    held = _held(again)
    if held is not None:
        return held
    swapped = next((run for run in others if run.way is Way.SWAPPED), None)
    if swapped is None:
        return _open(again)
    return _unless_unrepeated(_compared(again, swapped), others, within)


def _unless_it_came_so(verdict: StepVerdict, runs: Sequence[StepRun]) -> StepVerdict:
    """Where replicas were not equal any more before the step was run, it was given a wrong state:
    neither its batch nor the code is at fault. A device that stays wrong is, all the same."""
    since = [s.differs_since for run in runs for s in run.seen if s.differs_since is not None]
    if not since or verdict.culprit in (Culprit.HARDWARE, Culprit.MODEL):
        return verdict
    why = (
        f"the state that the step was given had changed in some rank's memory: replicas have not "
        f"been equal since step {min(since)}. Without that it would be: {verdict.why}"
    )
    return replace(verdict, culprit=Culprit.MODEL, why=why)


def unrepeated(runs: Iterable[StepRun], within: float = 0.0) -> tuple[Sight, Sight] | None:
    """Two runs' sights of the same state and batch that differ in bits, and lie farther apart than
    `within`, though nothing was wrong with either; None where there are none. What nobody has a
    digest of says nothing."""
    known: dict[tuple[int, int], Sight] = {}
    for run in runs:
        wrong = origins(run)
        for seen in run.seen:
            if seen.digest and seen.rank not in wrong and _gave_right(seen):
                before = known.setdefault((seen.first_step, seen.role), seen)
                if distance(before, seen) > within:
                    return before, seen
    return None


def _gave_right(seen: Sight) -> bool:
    """Whether its own gradients were right, as far as it could see, and came of right inputs."""
    is_number = seen.gave is None or math.isfinite(seen.gave)
    return is_number and seen.gave_bad_at is None and not seen.is_origin


def _unless_unrepeated(
    verdict: StepVerdict, others: Sequence[StepRun], within: float
) -> StepVerdict:
    """`verdict`: what comparing runs says. `others`: those that were made of the first."""
    apart = None if verdict.culprit is Culprit.UNKNOWN else unrepeated(others, within)
    if apart is None:
        return verdict
    one, other = apart
    who = {one.rank, other.rank}
    whom = _ranks(who) if len(who) > 1 else f"{_ranks(who)} twice"
    how = "bit for bit here" if not within else f"as clean steps do, to {within:.1e}"
    why = (
        f"the step does not repeat {how}: with the state and batch of rank {one.role}, "
        f"right as far as could be seen, {whom} computed different bits, so neither a device nor "
        f"the data can be accused. Else it would be: {verdict.why}"
    )
    return replace(verdict, culprit=Culprit.UNKNOWN, why=why)


def origins(run: StepRun) -> frozenset[int]:
    """The ranks that were wrong by themselves in that run; their hardware's numbers."""
    found = {seen.rank for seen in run.seen if seen.is_origin}
    if not found and len(run.seen) == 1 and run.seen[0].signs:
        found = {run.seen[0].rank}
    return frozenset(found or _gave_first(run.seen) or _gave_far_more(run.seen))


def _gave_first(all_seen: Sequence[Sight]) -> set[int]:
    """Who gave what is not finite to the first sum that anybody did so to: what comes back from one
    is everybody's, and may be given to the next."""
    given = {seen.rank: seen.gave_bad_at for seen in all_seen if seen.gave_bad_at is not None}
    return {rank for rank, at in given.items() if at == min(given.values())}


def _gave_far_more(all_seen: Sequence[Sight]) -> set[int]:
    """Who gave gradients far beyond anybody else's."""
    gave = {seen.rank: seen.gave for seen in all_seen if seen.gave is not None}
    if len(gave) < max(2, len(all_seen)):
        return set()
    return {
        rank
        for rank, norm in gave.items()
        if norm > FAR_MORE * max(other for r, other in gave.items() if r != rank)
    }


def _passing(wrong_runs: Sequence[StepRun], runs: int) -> StepVerdict:
    """The same ranks have run it again, at last with nothing wrong."""
    first = wrong_runs[0]
    after = "run again" if runs == 1 else f"run {runs} times more"
    gone = f"{after} from the snapshot before it, the step has right numbers"
    earliest = _earliest(first)
    watched = [run for run in wrong_runs[1:] if run.way is Way.AGAIN]
    if earliest is None and watched:  # whose they were is known of the runs that came after
        wrong_runs, earliest = watched, watched[0]
    if earliest is None:
        why = (
            "the state was not finite after a step whose gradients nobody looked at "
            f"(look_every_steps), on all ranks or on which is not known; {gone}: whose they were "
            "is not known"
        )
        return StepVerdict(Culprit.UNKNOWN, False, None, "", why)
    first = earliest
    for culprit, name, words in (
        (Culprit.MODEL, "bad_moments", "optimizer state"),
        (Culprit.MODEL, "bad_weights", "weights"),
        (Culprit.DATA, "bad_batch", "a batch"),
    ):
        having = [seen for seen in first.seen if getattr(seen, name)]
        if having:
            where = getattr(having[0], name)[0]
            holders = _ranks(s.rank for s in having)
            held = f"{words} of {holders} held what is not finite ({where})"
            if culprit is Culprit.MODEL and not all(seen.looked for seen in having):
                culprit = Culprit.UNKNOWN
                why = (
                    f"{held} after a step whose gradients nobody looked at (look_every_steps); "
                    f"{gone}: whether it came into memory by itself, or from a wrong gradient of "
                    f"{holders}, is not known"
                )
            else:
                why = f"{held}; {gone}: it had come into memory by itself"
            found = StepVerdict(culprit, False, _only(s.rank for s in having), where, why)
            return found if culprit is Culprit.DATA else _dated(found, having)
    having = [seen for seen in first.seen if seen.bad_update]
    if having:
        where, holders = having[0].bad_update[0], _ranks(seen.rank for seen in having)
        why = (
            f"what an update of {holders} has made of {where} is not what it makes of the snapshot "
            f"before it and the same gradients; {gone}: the device computed wrong, or its memory "
            "changed, once"
        )
        return StepVerdict(Culprit.HARDWARE, False, _only(s.rank for s in having), where, why)
    in_place = [run for run in wrong_runs if run.way is not Way.SWAPPED]
    origin_of = [(origins(run) or _differs_alone(run), run) for run in in_place]
    wrong, run = next(((ranks, run) for ranks, run in origin_of if ranks), (frozenset(), first))
    where = _gradient(run, wrong)
    if wrong:
        lasted = "once" if runs == 1 else f"{len(in_place)} runs"
        why = (
            f"{_ranks(wrong)} alone computed a wrong gradient{_at(where)}; {gone}: the device "
            f"computed wrong for {lasted}"
        )
        return StepVerdict(Culprit.HARDWARE, False, _only(wrong), where, why)
    why = f"the gradients were wrong{_at(where)}, nobody could see on which rank; {gone}"
    return StepVerdict(Culprit.HARDWARE, False, None, where, why)


def _of_first_step(run: StepRun) -> StepRun:
    """Without what ranks tell of a later step than the first that anybody saw something wrong in:
    that is what came of it, and they have seen nothing wrong in the first."""
    first = _first_step(run)
    return StepRun(
        run.way, tuple(s if s.first_step <= first else _without_evidence(s) for s in run.seen)
    )


def _first_step(run: StepRun) -> int:
    return min(seen.first_step for seen in run.seen if seen.signs or run.is_clean)


def _without_evidence(seen: Sight) -> Sight:
    return replace(
        seen,
        gave=None,
        gave_bad_at=None,
        bad_batch=(),
        bad_weights=(),
        bad_moments=(),
        bad_gradients=(),
        bad_update=(),
        origin=None,
        narrow=None,
        digest="",
    )


def _earliest(first: StepRun) -> StepRun | None:
    """What those saw whose state was bad first; everything where something else was. None: as far
    as is known it was all ranks' in the same step, and so may have come from what they added up."""
    step = _first_step(first)
    earliest = tuple(s for s in first.seen if Sign.STATE in s.signs and s.first_step == step)
    if not earliest:
        return first
    others = [seen for seen in first.seen if seen not in earliest]
    were_right = all(any(stamp.step >= step for stamp in seen.holds) for seen in others)
    if not (others and were_right) and not all(seen.looked for seen in earliest):
        return None
    return StepRun(first.way, earliest)


def _dated(verdict: StepVerdict, having: Sequence[Sight]) -> StepVerdict:
    """With the first step in which the state of these may have changed: behind the newest snapshot,
    which was right."""
    found = []
    for seen in having:
        right = [stamp.step for stamp in seen.holds if stamp.step < seen.first_step]
        found.append(max(right, default=seen.first_step - 1) + 1)
    since = min(found)
    if since >= min(seen.first_step for seen in having):
        return verdict
    why = f"{verdict.why}. It came in step {since} or later: nobody captured those between"
    return replace(verdict, why=why, since=since)


def _differs_alone(run: StepRun) -> frozenset[int]:
    """Ranks whose gradients were wrong although others, who got the same sums, had right ones."""
    having = frozenset(seen.rank for seen in run.seen if seen.bad_gradients)
    return having if len(having) < len(run.seen) else frozenset()


def _held(again: StepRun) -> StepVerdict | None:
    """What was wrong before anything was computed, in the second run as well."""
    for culprit, name, words in (
        (Culprit.DATA, "bad_batch", "the batch"),
        (Culprit.MODEL, "bad_moments", "the optimizer state"),
        (Culprit.MODEL, "bad_weights", "the weights"),
    ):
        having = [seen for seen in again.seen if getattr(seen, name)]
        if having:
            where = _origin_of(having) or getattr(having[0], name)[0]
            why = (
                f"run again from the snapshot before it, {words} of "
                f"{_ranks(s.rank for s in having)} had values that are not finite once more "
                f"({getattr(having[0], name)[0]}{_first_seen(having)})"
            )
            return StepVerdict(culprit, True, _only(s.rank for s in having), where, why)
    return None


def _open(again: StepRun) -> StepVerdict:
    wrong = origins(again)
    where = _gradient(again, wrong)
    who = _ranks(wrong) if wrong else "all ranks"
    why = (
        f"run again on the same ranks, {who} had wrong numbers once more{_at(where)}; no other "
        "rank could run it, so device and code cannot be told apart"
    )
    return StepVerdict(Culprit.UNKNOWN, True, _only(wrong), where, why)


def _compared(again: StepRun, swapped: StepRun) -> StepVerdict:
    """`again`: each rank in its own place; `swapped`: in another's."""
    wrong = origins(again)
    devices = origins(swapped)
    roles = frozenset(seen.role for seen in swapped.seen if seen.rank in devices)
    where = _gradient(again, wrong)
    everybody = frozenset(seen.rank for seen in again.seen)
    if wrong == devices == everybody:
        why = f"every rank has wrong numbers from right inputs, in any place{_at(where)}"
        return StepVerdict(Culprit.CODE, True, None, where, why)
    if wrong and wrong == devices:
        why = (
            f"{_ranks(wrong)} computed wrong numbers{_at(where)}, in its own place and in "
            "another's, and others computed right ones in its place: it is that hardware"
        )
        return StepVerdict(Culprit.HARDWARE, True, _only(wrong), where, why)
    if wrong and wrong == roles:
        why = (
            f"with the state and batch of {_ranks(wrong)} any rank has wrong numbers"
            f"{_at(where)}: it is the data, or what the program makes of it"
        )
        return StepVerdict(Culprit.DATA, True, _only(wrong), where, why)
    if swapped.is_clean:
        who = _ranks(wrong) if wrong else "a rank"
        why = (
            f"{who} had wrong numbers twice{_at(where)}, and nobody in another's place: the "
            "device computed wrong for a while"
        )
        return StepVerdict(Culprit.HARDWARE, True, _only(wrong), where, why)
    why = (
        f"wrong numbers came from {_ranks(wrong) if wrong else 'nobody that could be seen'} in "
        f"its own place and from {_ranks(devices) if devices else 'nobody'} in another's: that "
        "says neither hardware nor data"
    )
    return StepVerdict(Culprit.UNKNOWN, True, None, where, why)


def _origin_of(having: Iterable[Sight]) -> str:
    return next((str(seen.origin) for seen in having if seen.origin is not None), "")


def _first_seen(having: Iterable[Sight]) -> str:
    origin = _origin_of(having)
    return f", first seen in {origin}" if origin else ""


def _gradient(run: StepRun, wrong: frozenset[int]) -> str:
    """Where that run was wrong, as exactly as the ranks `wrong` (none: any) can say."""
    among = [seen for seen in run.seen if not wrong or seen.rank in wrong]
    origin = _origin_of(among)
    if origin:
        return origin
    return next((s.bad_gradients[0] for s in (*among, *run.seen) if s.bad_gradients), "")


def _at(where: str) -> str:
    if where.startswith("behind "):
        return f" {where}"
    return f" at {where}" if where else ""


def _only(ranks: Iterable[int]) -> int | None:
    """The one rank; None when there are others, or none."""
    found = sorted(set(ranks))
    return found[0] if len(found) == 1 else None


def _ranks(ranks: Iterable[int]) -> str:
    found = sorted(set(ranks))
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found[:8]))}{more}"
