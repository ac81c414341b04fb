"""Missed call: what the dumps of torch's flight recorder say of a job that hangs, for its verdict.

Comes in: by rank of this node, the values of the dump that torch has written of it since the job
stood still. Goes out: a clause that names the collective, who waits in it and who has not entered
it; empty where nothing is known. `core/postmortem/recorder.py` has the rule. Blames nobody: who is
killed follows from what is seen from outside, and nodes see their own dumps alone.

Invariant: of a rank of another node nothing is said but that it is waited for, since whether it
left a dump there nobody here knows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from keepstep.core.postmortem.recorder import Recorder, parse_dump
from keepstep.model.units import first_names


def missed_call(documents: Mapping[int, object], here: Collection[int]) -> str:
    """here: the ranks of this node."""
    recorder = Recorder()
    for rank, document in sorted(documents.items()):
        try:
            recorder.take(parse_dump(rank, document))
        except ValueError:
            continue  # unknown, as one that is not there
    if (mismatch := recorder.mismatch()) is not None:
        return f"by torch's flight recorder, {mismatch[1]}"
    missed = recorder.missed(here) if recorder.dumps else None
    if missed is None:
        return ""
    call = f"{missed.op or 'collective'} {missed.seq}"
    waits = f"{_ranks(missed.waiting)} wait{'s' * (len(missed.waiting) == 1)} in {call}"
    mine = [rank for rank in missed.missing if rank in here]
    if len(mine) < len(missed.missing):
        others = f"{', '.join(filter(None, [_ranks(mine), 'ranks of other nodes']))}"
        return f"by torch's flight recorder, {waits} of group {missed.group or '?'} for {others}"
    return f"{waits}, which {_ranks(mine)} did not enter: {missed.how}"


def _ranks(ranks: Collection[int]) -> str:
    names = first_names([str(rank) for rank in sorted(ranks)])
    return f"rank{'s' * (len(ranks) > 1)} {names}" if ranks else ""
