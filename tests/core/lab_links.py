"""A laboratory of links: rates of copies between nodes, with noise, of which some become slow.

    python -m tests.core.lab_links 30 [NODES]

prints, of each kind of fault and size, in how many of so many runs it was named, and how often
anybody else was. A run has its seed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from keepstep.core.detection.links import LinkSide, SlowLink, SlowLinkOver, SlowLinks
from keepstep.model.links import LinkSample
from keepstep.model.units import MS_NS, S_NS

Cells = Callable[[int, int], bool]
USUAL_BYTES_PER_S = 3_000_000_000
BEFORE = 60  # samples of each cell
AFTER = 30


def all_pairs(nodes: int) -> list[tuple[int, int]]:
    """As copies to everybody, and parities, go."""
    return [(a, b) for a in range(nodes) for b in range(nodes) if a != b]


def next_two(nodes: int) -> list[tuple[int, int]]:
    """As two copies each go, around a ring."""
    return [(a, (a + step) % nodes) for a in range(nodes) for step in (1, 2)]


@dataclass
class LinkLab:
    """`noise`: the deviation of a sample's logarithm; one in a hundred is three times slower by
    chance."""

    seed: int
    pairs: Sequence[tuple[int, int]]
    noise: float = 0.05
    racks: Sequence[str | None] = ()
    told: list[SlowLink | SlowLinkOver] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        nodes = 1 + max(max(pair) for pair in self.pairs)
        self.links = SlowLinks(self.racks or [None] * nodes)
        # no two links of a cluster are as fast
        self.usual = {pair: self.random.uniform(0.7, 1.3) for pair in self.pairs}

    def run(
        self,
        samples: int,
        is_slow: Cells = lambda a, b: False,
        factor: float = 1.0,
        resent: float = 0.0,
        reader: float = 0.0,
        others: float = 1.0,
    ) -> None:
        """So many samples of each cell; what is slow takes `factor` times as long, and what shares
        a node with it `others` times."""
        met = {node for pair in self.pairs if is_slow(*pair) for node in pair}
        for _ in range(samples):
            for sender, receiver in self.pairs:
                rate = USUAL_BYTES_PER_S * self.usual[sender, receiver]
                rate *= self.random.lognormvariate(0.0, self.noise)
                if self.random.random() < 0.01:
                    rate /= 3
                is_it = is_slow(sender, receiver)
                busy_ns = 100 * MS_NS
                slower = factor if is_it else others if met & {sender, receiver} else 1.0
                nbytes = round(rate / slower * busy_ns / S_NS)
                again = round(nbytes * resent) if is_it else 0
                waits_ns = round(busy_ns * reader) if is_it else 0
                sample = LinkSample(nbytes, busy_ns, nbytes + again, again, waits_ns)
                self.links.add(sender, receiver, sample)
            self.told += self.links.news()

    def named(self) -> list[tuple[LinkSide, tuple[int, ...]]]:
        """What was called slow, each once, in order."""
        return [(told.side, told.nodes) for told in self.told if isinstance(told, SlowLink)]


def faults(nodes: int) -> dict[str, tuple[Cells, tuple[LinkSide, tuple[int, ...]] | None]]:
    """What may be slow, and who is to be named."""
    return {
        "none": (lambda a, b: False, None),
        "sender": (lambda a, b: a == 1, (LinkSide.SENDER, (1,))),
        "receiver": (lambda a, b: b == 2, (LinkSide.RECEIVER, (2,))),
        "node": (lambda a, b: 1 in (a, b), (LinkSide.NODE, (1,))),
        "link, one way": (lambda a, b: (a, b) == (0, 2), (LinkSide.LINK, (0, 2))),
        "link, both ways": (lambda a, b: {a, b} == {0, 2}, (LinkSide.LINK, (0, 2))),
        "switch": (lambda a, b: True, (LinkSide.SWITCH, tuple(range(nodes)))),
    }


def main() -> None:
    runs, nodes = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4
    print(f"{nodes} nodes, all pairs; of {runs} runs: named right / anybody else named")
    for noise in (0.02, 0.05, 0.1):
        for factor in (1.1, 1.2, 1.5, 2.0, 4.0, 10.0):
            row = []
            for name, (is_slow, expected) in faults(nodes).items():
                right = wrong = 0
                for seed in range(runs):
                    lab = LinkLab(seed, all_pairs(nodes), noise)
                    lab.run(BEFORE)
                    lab.run(AFTER, is_slow, factor)
                    named = set(lab.named())
                    right += expected in named if expected else not named
                    wrong += bool(named - {expected})
                row.append(f"{name} {right}/{wrong}")
            print(f"noise {noise:.0%}, {factor:g} times: {'; '.join(row)}", flush=True)


if __name__ == "__main__":
    main()
