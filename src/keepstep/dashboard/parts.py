"""Parts: how the parts of this node's machine are, as far as its agent has told lately.

Comes in: `parts.json` of the job directory, the time. Goes out: rows. What has not been told lately
is unknown, and that is what is shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from keepstep.core.parts.judgement import as_of
from keepstep.dashboard.moment import Moment
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.parts_file import read_parts


@dataclass(frozen=True, slots=True)
class PartRow:
    """A part. `health`: ok, bad or unknown. `why` and `fix` are empty where nothing is wrong.
    `age_ns`: since a probe last answered about it, None: none ever did."""

    part: str
    health: str
    why: str
    fix: str
    age_ns: int | None


def part_rows(job_dir: Path, now: Moment) -> tuple[PartRow, ...]:
    """Nothing where nobody probes: the job has just begun, has no agent, or does not want it."""
    report = read_parts(MEMORY, job_dir)
    if report is None:
        return ()
    return tuple(
        PartRow(
            part.part,
            part.health,
            part.why,
            part.fix,
            max(0, now.mono_ns - part.seen_ns) if part.seen_ns else None,
        )
        for part in as_of(report, now.mono_ns, now.boot).parts
    )
