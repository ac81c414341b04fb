"""Who did not come: the ranks' places in the order of collectives, as torch's watchdogs tell them.

Comes in: lines of watchdogs. Goes out: the collective that some entered and others did not.

The rule is the wavefront: in a process group, whoever entered fewer collectives than another is who
the others wait for; and a rank that says nothing, where all its peers say that they wait, is behind
too (a hung rank logs nothing: MegaScale, NSDI 2024).
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

from keepstep.core.postmortem.line import LogLine

NEEDLES = (
    "Watchdog caught collective operation timeout",
    "ast enqueued",  # `Last enqueued NCCL work`, `last enqueued work`
    "join collective #",
    "failed to pass monitoredBarrier",
)
TIMED_OUT = re.compile(r"WorkNCCL\((?:SeqNum=(\d{1,18}), )?OpType=(\w{1,40})")
TOLD_BY = re.compile(r"\bRank (\d{1,6})\] ")
QUEUED = re.compile(r"ast enqueued (?:[A-Z]{1,8} )?work: (-?\d{1,18})")
DESYNC = re.compile(
    r"\[([\d, ]{1,400})\] finished collective #\d{1,18}, but didn't join collective #(\d{1,18})"
)
BARRIER = re.compile(r"[Rr]anks? ([\d, ]{1,400}) failed to pass monitoredBarrier")
WORLD_GROUPS = ("", "0")  # torch numbers the default group 0


@dataclass(frozen=True, slots=True)
class Missed:
    """A collective that `waiting` entered and `missing` did not. `seq` None: a barrier without a
    number. `how`: how that is known."""

    group: str
    seq: int | None
    op: str
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    how: str


@dataclass(slots=True)
class Collectives:
    """What was heard of each process group. `has_timeout`: some watchdog's time ran out."""

    has_timeout: bool = False
    _entered: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    _timed_out: dict[str, dict[int, tuple[int, str]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    _named: list[tuple[tuple[int, ...], int | None, str]] = field(default_factory=list)

    def hear(self, line: LogLine, rank: int | None) -> int | None:
        """Take what this line of a watchdog says, and return whose it is: a progress bar may stand
        before its head."""
        if rank is None and (found := TOLD_BY.search(line.text)):
            rank = int(found[1])
        if found := DESYNC.search(line.text):
            self._named.append(
                (_numbers(found[1]), int(found[2]), "torch's desync report names it")
            )
        if found := BARRIER.search(line.text):
            self.has_timeout = True
            self._named.append((_numbers(found[1]), None, "a monitored barrier names it"))
        if rank is None:
            return None
        group = _group(line.group)
        if found := TIMED_OUT.search(line.text):
            self.has_timeout = True
            seq = int(found[1] or 0)  # torch did not always tell
            self._timed_out[group].setdefault(rank, (seq, found[2]))
            self._enter(group, rank, seq)
        if found := QUEUED.search(line.text):
            self._enter(group, rank, int(found[1]))
        return rank

    def _enter(self, group: str, rank: int, seq: int) -> None:
        self._entered[group][rank] = max(seq, self._entered[group].get(rank, seq))

    def missed(self, known: set[int]) -> Missed | None:
        """The collective that somebody did not enter. known: all ranks of the job."""
        if self._named:
            missing, seq, how = self._named[0]
            others = tuple(sorted(known - set(missing)))
            return Missed("", seq, self._op(), others, missing, how)
        behind = [found for group in self._timed_out if (found := self._behind(group))]
        if behind:
            return min(behind, key=lambda m: (len(m.missing), m.group))
        waiting = {rank for ranks in self._timed_out.values() for rank in ranks}
        silent = known - waiting - {r for ranks in self._entered.values() for r in ranks}
        if waiting and silent and len(silent) < len(known) / 2:
            seq, op = min(t for group in self._timed_out.values() for t in group.values())
            how = "its peers' watchdogs timed out, and its own says nothing"
            return Missed("", seq or None, op, tuple(sorted(waiting)), tuple(sorted(silent)), how)
        return None

    def _behind(self, group: str) -> Missed | None:
        """Who of this group has entered fewer than the first collective that timed out. Where that
        is nobody: who is stuck in one may have timed out there, too, while its peers wait in the
        very next. Numbers further apart are those of groups that old torch does not tell apart."""
        entered = {**self._entered.get("", {}), **self._entered[group]}
        if group not in WORLD_GROUPS:
            entered = self._entered[group]
        else:
            for same in WORLD_GROUPS:
                for rank, reached in self._entered.get(same, {}).items():
                    entered[rank] = max(reached, entered.get(rank, reached))
        first, *later = sorted(set(self._timed_out[group].values()))
        following = [told for told in later if first[0] and told[0] == first[0] + 1]
        for seq, op in [first, *following]:
            missing = tuple(sorted(rank for rank, reached in entered.items() if reached < seq))
            if missing:
                waiting = tuple(sorted(self._timed_out[group].keys() - set(missing)))
                how = "it had entered fewer than its peers"
                return Missed(group, seq, op, waiting, missing, how)
        return None

    def _op(self) -> str:
        return next((op for ranks in self._timed_out.values() for _, op in ranks.values()), "")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d{1,6}", text))


def _group(text: str) -> str:
    """`PG ID 1 PG GUID 1(tp)` and `PG 1` are group 1."""
    found = re.search(r"PG (?:ID )?(\d{1,9})", text)
    return found[1] if found else ""
