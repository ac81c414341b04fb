"""News: what of the parts' health is worth telling, and what is done about a sick one.

Comes in: the health of all parts at one moment, after the other. Goes out: what has changed, once.
That nobody knows is told only when it lasts: a busy machine makes a probe late now and then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from keepstep.model.parts import PartHealth, PartPolicy, PartState
from keepstep.model.units import S_NS

UNKNOWN_FOR_NS = 20 * S_NS


@dataclass(frozen=True, slots=True)
class PartNews:
    """`part`: as it is now. `policy`: what is done, WARN where it is not sick."""

    why: str
    part: PartHealth
    policy: PartPolicy = PartPolicy.WARN


class PartsNews:
    """Of one node. `policies`: by kind of part."""

    def __init__(self, policies: Mapping[str, PartPolicy]) -> None:
        self._policies = policies
        self._told: dict[str, tuple[str, str]] = {}  # by part: health, and the kind of its sickness
        self._unknown_ns: dict[str, int] = {}  # since when

    def of(self, parts: Sequence[PartHealth], now_ns: int) -> Iterator[PartNews]:
        """What is new."""
        for part in parts:
            health = part.health
            told, policy = self._told.get(part.part, (PartState.OK.value, ""))
            if health == PartState.UNKNOWN.value:
                since_ns = self._unknown_ns.setdefault(part.part, now_ns)
                if health != told and now_ns - since_ns >= UNKNOWN_FOR_NS:
                    self._told[part.part] = (health, "")
                    yield PartNews(f"{part.part}: {part.why}", part)
                continue
            self._unknown_ns.pop(part.part, None)
            if health == PartState.BAD.value:
                done = policy_for(part, self._policies)
                if (told, policy) != (health, done.name):
                    self._told[part.part] = (health, done.name)
                    yield PartNews(sentence(part, done), part, done)
            elif told != health:
                self._told[part.part] = (health, "")
                before = "sick" if told == PartState.BAD.value else "unknown"
                yield PartNews(f"{part.part} is well, and was {before}", part)


def policy_for(part: PartHealth, policies: Mapping[str, PartPolicy]) -> PartPolicy:
    """The mildest of what was asked for and what this is worth."""
    return min(policies.get(part.part_kind, PartPolicy.WARN), PartPolicy(part.most))


_DONE = {
    PartPolicy.WARN: "",
    PartPolicy.AVOID: "; at its next restart this node leaves its place to a spare, if one waits",
    PartPolicy.LEAVE: "; this node leaves its place now, if the others' memory can do without it",
    PartPolicy.STOP: "; the job ends for that, as by SIGTERM",
}


def sentence(part: PartHealth, policy: PartPolicy) -> str:
    """What is wrong, what to do, and what is done."""
    return f"{part.part} is sick: {part.why}; cheapest: {part.fix}{_DONE[policy]}"
