"""What a test of real processes may lose, whose steps take no time."""

from __future__ import annotations

from keepstep.core.resume.cadence import at_most_lost_steps

# Where a capture takes two of such quick steps, as on a busy machine; else it is one.
FEW_STEPS = at_most_lost_steps(2)
