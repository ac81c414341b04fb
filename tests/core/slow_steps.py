"""Steps of ranks as they measure them, with noise, from a seed: clean, or one of them slow.

`python -m tests.core.slow_steps 200` counts false alarms and how soon who is slow is named.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from keepstep.core.detection.slow_words import SlowOver
from keepstep.core.detection.stragglers import BLOCK_STEPS, Stragglers
from keepstep.model.step_work import GroupEntries, Section, Slow, WorkBlock
from keepstep.model.units import MS_NS

USUAL_NS = {
    Section.DATA: MS_NS,
    Section.COMPUTE: 40 * MS_NS,
    Section.UPDATE: 4 * MS_NS,
    Section.HOOK: 2 * MS_NS,
}
SHARES = {Section.FORWARD: 0.3, Section.BACKWARD: 0.6}  # of the body
TOKENS = 4096


@dataclass(frozen=True)
class Steps:
    """noise: of each section of each step, as a share. lengths: least and most tokens of a batch,
    as shares of `TOKENS`. tells_tokens: whether the program tells them. rare: a share of steps
    takes 3 times as long. spread: by how much ranks differ for good.

    From `onset` on, until `until`, rank `slow` needs `factor` times as long for `section`; `uses`:
    of what comes on top, the share that is processor time, the delay that comes with it, and what
    its cgroup throttles. sees_passes: the forward and the backward pass are seen; how the body is
    divided varies by the noise, too. crowded: for so much of what a rank computes it waits for a
    processor that others have, more or less."""

    ranks: int
    seed: int
    noise: float = 0.03
    lengths: tuple[float, float] = (1.0, 1.0)
    tells_tokens: bool = False
    rare: float = 0.0
    spread: float = 0.0
    slow: int | None = None
    factor: float = 1.0
    section: Section = Section.COMPUTE
    onset: int = 300
    until: int = 1 << 30
    uses: tuple[float, float, float] = (1.0, 0.0, 0.0)
    all_slow: bool = False
    usual: dict[Section, int] | None = None
    sees_passes: bool = True
    crowded: float = 0.0

    def blocks(self, steps: int) -> Iterator[tuple[int, dict[int, WorkBlock]]]:
        """The last step of each block, and what each rank did in it."""
        rng, parts = random.Random(self.seed), random.Random(f"{self.seed}: passes")
        others = random.Random(f"{self.seed}: others")
        own_speed = [1 + rng.uniform(-self.spread, self.spread) for _ in range(self.ranks)]
        for first in range(0, steps, BLOCK_STEPS):
            yield (
                first + BLOCK_STEPS - 1,
                {
                    rank: self._among_others(
                        others, self._block(rng, parts, rank, own_speed[rank], first)
                    )
                    for rank in range(self.ranks)
                },
            )

    def _block(
        self, rng: random.Random, of_parts: random.Random, rank: int, speed: float, first: int
    ) -> WorkBlock:
        own, cpu = [0.0] * len(Section), [0.0] * len(Section)
        tokens = 0
        delay, throttled = [0.0] * len(Section), 0.0
        for step in range(first, first + BLOCK_STEPS):
            length = rng.uniform(*self.lengths)
            tokens += int(TOKENS * length)
            for section, usual_ns in (self.usual or USUAL_NS).items():
                took = usual_ns * speed * rng.lognormvariate(0, self.noise)
                if section is Section.COMPUTE:
                    took *= 0.1 + 0.9 * length
                if rng.random() < self.rare:
                    took *= 3
                parts = {section: took}
                if section is Section.COMPUTE and self.sees_passes:
                    parts |= self._divided(of_parts, took)
                is_slow = self.all_slow or rank == self.slow
                more: dict[Section, float] = {}
                if is_slow and self.section in parts and self.onset <= step < self.until:
                    more = self._more(section, parts)
                for part, part_ns in parts.items():
                    on_top = more.get(part, 0.0)
                    own[part] += part_ns + on_top
                    cpu[part] += part_ns + self.uses[0] * on_top
                    delay[part] += self.uses[1] * on_top
                throttled += self.uses[2] * more.get(section, 0.0)
        return WorkBlock(
            BLOCK_STEPS,
            tuple(map(int, own)),
            tuple(map(int, cpu)),
            0,
            tuple(map(int, delay)),
            3 * BLOCK_STEPS,
            tokens if self.tells_tokens else 0,
            throttled_ns=int(throttled),
            groups=(GroupEntries(1, 3 * BLOCK_STEPS),),
        )

    def _among_others(self, rng: random.Random, block: WorkBlock) -> WorkBlock:
        share = self.crowded * rng.lognormvariate(0, 0.3)
        waits = [int(ns * share) for ns in block.cpu_ns]
        return block._replace(
            own_ns=tuple(map(sum, zip(block.own_ns, waits, strict=True))),
            delay_ns=tuple(map(sum, zip(block.delay_ns, waits, strict=True))),
        )

    def _divided(self, rng: random.Random, took: float) -> dict[Section, float]:
        parts = {p: took * s * rng.lognormvariate(0, self.noise) for p, s in SHARES.items()}
        fits = min(1.0, took / sum(parts.values()))
        return {part: ns * fits for part, ns in parts.items()}

    def _more(self, section: Section, parts: dict[Section, float]) -> dict[Section, float]:
        """A pass that takes longer makes the body longer; a body that does, its passes."""
        if self.section is section:
            return {part: ns * (self.factor - 1) for part, ns in parts.items()}
        return dict.fromkeys((section, self.section), parts[self.section] * (self.factor - 1))


def told_of(
    steps: Steps, count: int, judge: Stragglers | None = None
) -> list[tuple[int, Slow | SlowOver]]:
    """What is said, each with the last step that was seen by then."""
    judge = judge or Stragglers()
    return [(end, told) for end, blocks in steps.blocks(count) for told in judge.add(blocks, end)]


def main(trials: int) -> None:
    for noise, lengths, tells in (
        (0.02, (1.0, 1.0), False),
        (0.1, (1.0, 1.0), False),
        (0.2, (1.0, 1.0), False),
        (0.05, (0.25, 1.0), True),
        (0.05, (0.25, 1.0), False),
    ):
        for ranks in (2, 4):
            what: dict[str, Any] = {
                "noise": noise,
                "lengths": lengths,
                "tells_tokens": tells,
                "rare": 0.005,
            }
            alarms = sum(bool(told_of(Steps(ranks, s, **what), 3000)) for s in range(trials))
            line = f"{ranks} ranks, noise {noise}, lengths {lengths}, told {tells}: "
            line += f"{alarms} of {trials} clean runs of 3000 steps alarm"
            for factor in (1.1, 1.5):
                late: list[int] = []
                wrong = 0
                for seed in range(trials):
                    run = Steps(ranks, seed, slow=seed % ranks, factor=factor, **what)
                    told = [t for t in told_of(run, 900) if isinstance(t[1], Slow)]
                    wrong += bool(told) and told[0][1].rank != seed % ranks
                    late += [told[0][0] - 300 + 1] if told else []
                median = statistics.median(late) if late else None
                line += f"; x{factor}: {len(late)} named, {wrong} wrong, after {median} steps"
                line += f" (at most {max(late, default=0)})"
            print(line, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
