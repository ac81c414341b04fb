"""Retention: decides which checkpoints of a store stay and which may go.

Comes in: rules (a union: what one of them keeps, stays) and what is known of every checkpoint. Goes
out: every step with the sentence why it stays or goes. Never touches the store.

Invariant: the newest verified checkpoint stays whatever the rules say, and so does everything
newer, because it is about to be read back; the rules only ever choose among the newest verified one
and what is older. So a checkpoint makes room for a newer one after that one has been read back,
never before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from keepstep.errors import ConfigError

METRICS = ("loss",)  # what a training can report of a step


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What a rule may ask of a checkpoint. `verified`: read back whole against its checksums."""

    step: int
    verified: bool
    metrics: Mapping[str, float] = field(default_factory=dict)


class Rule(Protocol):
    """Chooses among checkpoints; `str(rule)` is the text `parse_rules` reads."""

    def chosen(self, checkpoints: Sequence[CheckpointInfo]) -> frozenset[int]: ...


@dataclass(frozen=True, slots=True)
class Latest:
    """The `n` newest."""

    n: int

    def chosen(self, checkpoints: Sequence[CheckpointInfo]) -> frozenset[int]:
        return frozenset(sorted((c.step for c in checkpoints), reverse=True)[: self.n])

    def __str__(self) -> str:
        return f"latest:{self.n}"


@dataclass(frozen=True, slots=True)
class EveryN:
    """One of every `n` steps: the first checkpoint of each stretch [k*n, (k+1)*n).

    Stretches rather than multiples, because a checkpoint carries the last step *completed* (999
    after a thousand steps) and one taken on SIGTERM falls anywhere. The first of a stretch stays
    the first.
    """

    n: int

    def chosen(self, checkpoints: Sequence[CheckpointInfo]) -> frozenset[int]:
        first: dict[int, int] = {}
        for step in sorted(c.step for c in checkpoints):
            first.setdefault(step // self.n, step)
        return frozenset(first.values())

    def __str__(self) -> str:
        return f"every:{self.n}"


@dataclass(frozen=True, slots=True)
class Best:
    """The `n` best by a metric, `mode` being `min` or `max`; of equals the newer. Without the
    metric, or NaN: never best."""

    metric: str
    mode: str
    n: int

    def chosen(self, checkpoints: Sequence[CheckpointInfo]) -> frozenset[int]:
        sign = 1.0 if self.mode == "min" else -1.0
        values = {c.step: c.metrics.get(self.metric, math.nan) for c in checkpoints}
        ranked = sorted(
            (sign * value, -step) for step, value in values.items() if not math.isnan(value)
        )
        return frozenset(-negative for _, negative in ranked[: self.n])

    def __str__(self) -> str:
        return f"best:{self.metric}:{self.mode}:{self.n}"


@dataclass(frozen=True, slots=True)
class Decision:
    """Every step and why it stays (`kept`) or goes (`removed`)."""

    kept: Mapping[int, str]
    removed: Mapping[int, str]


def asks_for(metric: str, rules: str) -> bool:
    """Whether one of the rules goes by that metric."""
    return any(isinstance(r, Best) and r.metric == metric for r in parse_rules(rules))


def to_keep(rules: Sequence[Rule], checkpoints: Sequence[CheckpointInfo]) -> Decision:
    """Which checkpoints stay. Nothing goes before one has been verified."""
    newest = max((c.step for c in checkpoints if c.verified), default=None)
    if newest is None:
        return Decision(
            {
                c.step: f"step {c.step} stays: no checkpoint has been read back yet"
                for c in checkpoints
            },
            {},
        )
    settled = [c for c in checkpoints if c.step <= newest]
    choices = [(rule, rule.chosen(settled)) for rule in rules]
    kept, removed = {}, {}
    for step in sorted(c.step for c in checkpoints):
        keepers = [str(rule) for rule, steps in choices if step in steps]
        if step > newest:
            kept[step] = (
                f"step {step} stays: it has not been read back yet, and step {newest} is the "
                "newest that has"
            )
        elif keepers:
            kept[step] = f"step {step} stays: kept by {', '.join(keepers)}"
        elif step == newest:
            kept[step] = f"step {step} stays: it is the newest that has been read back"
        else:
            asked = ", ".join(str(rule) for rule in rules)
            removed[step] = (
                f"step {step} goes: {asked} keep other steps, and the newer step {newest} "
                "has been read back"
            )
    return Decision(kept, removed)


def parse_rules(text: str) -> tuple[Rule, ...]:
    """Rules from `latest:2,every:1000,best:loss:min:1`. Raises ConfigError naming expected and
    found."""
    return tuple(_parse_rule(part.strip()) for part in text.split(","))


def check_rules(text: str) -> None:
    """Raises ConfigError when the rules cannot be read, or ask for a metric that nobody reports."""
    for rule in parse_rules(text):
        if isinstance(rule, Best) and rule.metric not in METRICS:
            raise ConfigError(
                f"keep: expected a metric that job.report() takes ({', '.join(METRICS)}), found "
                f"{rule.metric!r} in {str(rule)!r}"
            )


def _parse_rule(text: str) -> Rule:
    match text.split(":"):
        case ["latest", count]:
            return Latest(_count(text, count))
        case ["every", count]:
            return EveryN(_count(text, count))
        case ["best", *metric, ("min" | "max") as mode, count] if "".join(metric):
            return Best(":".join(metric), mode, _count(text, count))
    raise ConfigError(f"keep: expected latest:N, every:N or best:METRIC:min|max:N, found {text!r}")


def _count(rule: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ConfigError(
            f"keep: expected a whole number above 0 at the end of {rule!r}, found {text!r}"
        )
    return int(text)
