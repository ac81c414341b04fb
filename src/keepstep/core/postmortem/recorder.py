"""Who did not come, by torch's flight recorder: what each rank had entered and not left.

Comes in: the dumps of the recorder (torch.distributed writes one a rank when a collective times
out), as plain values. Goes out: the collective that some waited in and others did not enter, or
that ranks entered as two different ones.

The rule. A rank that is in a collective waits for those of its group that have not entered it, or
in a send or receive for the other one. They may wait in turn, in another group: whoever others wait
for, and who waits for nobody, is the culprit. So each process group is counted for itself, and the
stages of a pipeline are told apart, which one counter of all could not.

Invariant: whatever a dump holds, it is understood or refused with ValueError.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from keepstep.core.postmortem.collectives import Missed
from keepstep.model.units import first_names

MOST_ENTRIES = 1 << 20
MOST_RANKS = 1 << 20
DEFAULT_GROUP = "default_pg"  # as torch describes the one of all ranks
OPERATION = re.compile(r"(?:\w+:)?(\w+)")
PEERS = re.compile(r"(\d{1,7})\s*(?:->|<-)\s*(\d{1,7})")
TORCHS = ("torch/", "torch\\")  # frames that are not the program's


class RecordedCall(NamedTuple):
    """One call of a rank. `seq`: its place in its group, from 1; of a send or receive (`peer`, the
    other rank within the group) among those. `where`: the program's own line, or empty."""

    group: str
    seq: int
    op: str
    peer: int | None
    is_over: bool
    where: str


class RecorderDump(NamedTuple):
    """What one rank's recorder held, the oldest first. `members`: by group, where it is told."""

    rank: int
    calls: tuple[RecordedCall, ...]
    members: Mapping[str, tuple[int, ...]]


def parse_dump(rank: int, document: object) -> RecorderDump:
    """A dump as torch pickles it, or writes it as JSON. Raises ValueError."""
    if not isinstance(document, dict) or not isinstance(document.get("entries"), list):
        raise ValueError("expected a flight recorder's dump with entries")
    entries = document["entries"]
    if len(entries) > MOST_ENTRIES:
        raise ValueError(f"{len(entries)} entries: expected at most {MOST_ENTRIES}")
    return RecorderDump(rank, tuple(map(_call, entries)), _members(document.get("pg_config", {})))


def _call(entry: object) -> RecordedCall:
    if not isinstance(entry, dict):
        raise ValueError("expected an entry of a flight recorder")
    name = str(entry.get("profiling_name", ""))[:200]
    found = OPERATION.match(name)
    is_p2p = entry.get("is_p2p") is True
    peers = PEERS.search(name) if is_p2p else None
    seq = entry.get("p2p_seq_id" if is_p2p else "collective_seq_id")
    if not isinstance(seq, int) or isinstance(seq, bool) or not 0 <= seq < 1 << 62:
        raise ValueError(f"{name or 'an entry'}: expected its place in the order of its group")
    return RecordedCall(
        _group(entry.get("process_group")),
        seq,
        found[1] if found else "",
        _other(peers, name) if peers else None,
        bool(entry.get("retired")) or entry.get("state") == "completed",
        _where(entry.get("frames")),
    )


def _group(told: object) -> str:
    """By its description where it has one of its own, else by its name."""
    names = [str(part)[:100] for part in told] if isinstance(told, list | tuple) else []
    if DEFAULT_GROUP in names:
        return DEFAULT_GROUP
    return names[0] if names else ""


def _other(peers: re.Match[str], name: str) -> int:
    """`send 0->1` is for 1, `recv 1<-0` and `recv 0->1` are from 0."""
    first, second = int(peers[1]), int(peers[2])
    if "<-" in peers[0]:
        return second
    return first if "recv" in name else second


def _where(frames: object) -> str:
    if not isinstance(frames, list):
        return ""
    for frame in frames[:64]:
        if isinstance(frame, dict) and isinstance(frame.get("filename"), str):
            file = frame["filename"]
            if not any(part in file for part in TORCHS):
                return f"{file.rpartition('/')[2][:100]}:{frame.get('line')}"
    return ""


def _members(told: object) -> dict[str, tuple[int, ...]]:
    found = {}
    for name, group in told.items() if isinstance(told, dict) else ():
        if isinstance(group, dict):
            ranks = tuple(
                int(n) for n in re.findall(r"\d{1,7}", str(group.get("ranks", "")))[:MOST_RANKS]
            )
            if ranks:
                found[_group((str(name), str(group.get("desc", ""))))] = ranks
    return found


@dataclass(slots=True)
class Recorder:
    """The dumps of a run."""

    dumps: dict[int, RecorderDump] = field(default_factory=dict)

    def take(self, dump: RecorderDump) -> None:
        """The first of a rank counts: what it writes later it writes while all is ended."""
        self.dumps.setdefault(dump.rank, dump)

    def mismatch(self) -> tuple[tuple[int, ...], str] | None:
        """Ranks that entered something else than others at the same place of one group, and how
        that reads."""
        for (group, seq), calls in sorted(self._by_place().items()):
            kinds: dict[str, list[int]] = {}
            for rank, call in calls.items():
                kinds.setdefault(call.op, []).append(rank)
            if len(kinds) > 1:
                by_count = sorted(kinds.items(), key=lambda kind: (-len(kind[1]), kind[1]))
                said = ", ".join(f"{op} on rank {_some(ranks)}" for op, ranks in by_count)
                odd = sorted(rank for _, ranks in by_count[1:] for rank in ranks)
                is_tie = len(by_count[0][1]) <= len(odd)
                whose = () if is_tie else tuple(odd)
                return whose, f"call {seq} of group {group} is {said}"
        return None

    def missed(self, known: Iterable[int]) -> Missed | None:
        """The call in which ranks wait for somebody who waits for nobody. known: all ranks."""
        everybody, reached = {*known, *self.dumps}, self._reached()
        waiting: dict[int, tuple[RecordedCall, frozenset[int]]] = {}
        for rank, dump in sorted(self.dumps.items()):
            # the oldest: what comes behind it waits for it
            call = next((call for call in dump.calls if not call.is_over), None)
            if call is not None:
                waiting[rank] = call, self._absent(call, everybody, reached)
        found = [(call, absent - waiting.keys()) for call, absent in waiting.values()]
        if not any(missing for _, missing in found):  # they wait for each other
            found = [*waiting.values()]
        behind = [(call, tuple(sorted(missing))) for call, missing in found if missing]
        if not behind:
            return None
        call, missing = min(behind, key=lambda each: (len(each[1]), each[1]))
        there = [
            rank
            for rank, (its, _) in waiting.items()
            if (its.group, its.seq, its.peer is None) == (call.group, call.seq, call.peer is None)
        ]
        how = self._how(call, missing[0])
        return Missed(call.group, call.seq, call.op, tuple(there), missing, how)

    def _how(self, call: RecordedCall, culprit: int) -> str:
        how = f"by the flight recorder, in group {call.group or '?'}"
        last = self._last(culprit)
        if culprit not in self.dumps:
            how += f"; rank {culprit} left no dump"
        elif last is not None:
            at = f" at {last.where}" if last.where else ""
            how += f"; the last of rank {culprit} is {last.op} {last.seq}{at}"
        return how

    def _reached(self) -> dict[str, dict[int, int]]:
        """By group, of each rank that has called anything there: the newest collective that it has
        entered; -1: none, but sends and receives."""
        found: dict[str, dict[int, int]] = {}
        for rank, dump in self.dumps.items():
            for call in dump.calls:
                newest = found.setdefault(call.group, {})
                seq = call.seq if call.peer is None else -1
                newest[rank] = max(seq, newest.get(rank, -1))
        return found

    def _absent(
        self, call: RecordedCall, everybody: set[int], reached: Mapping[str, Mapping[int, int]]
    ) -> frozenset[int]:
        """Who has not entered the call that a rank is in."""
        newest = reached[call.group]
        members = self._members_of(call.group, everybody, newest)
        if call.peer is None:
            return frozenset(m for m in members if newest.get(m, -1) < call.seq)
        other = members[call.peer] if call.peer < len(members) else call.peer
        return frozenset() if self._meets(other, call) else frozenset([other])

    def _meets(self, other: int, call: RecordedCall) -> bool:
        """Whether the other one is in a send or receive of that group, too."""
        dump = self.dumps.get(other)
        return dump is not None and any(
            not its.is_over and its.peer is not None and its.group == call.group
            for its in dump.calls
        )

    def _members_of(self, group: str, everybody: set[int], here: Iterable[int]) -> tuple[int, ...]:
        """In their order. `here`: those that have called anything there, where nobody tells."""
        for dump in self.dumps.values():
            if group in dump.members:
                return dump.members[group]
        return tuple(sorted(everybody if group in (DEFAULT_GROUP, "") else here))

    def _last(self, rank: int) -> RecordedCall | None:
        dump = self.dumps.get(rank)
        return dump.calls[-1] if dump and dump.calls else None

    def _by_place(self) -> dict[tuple[str, int], dict[int, RecordedCall]]:
        found: dict[tuple[str, int], dict[int, RecordedCall]] = {}
        for rank, dump in self.dumps.items():
            for call in dump.calls:
                if call.peer is None and call.op and "coalesced" not in call.op:
                    found.setdefault((call.group, call.seq), {})[rank] = call
        return found


def _some(ranks: list[int]) -> str:
    return first_names([str(rank) for rank in sorted(ranks)], 8)


def rank_in(name: str) -> int | None:
    """Whose dump a file is by its name: torch puts the rank at its end (`nccl_trace_rank_3`)."""
    found = re.search(r"(\d{1,7})(?:\.(?:json|pkl|pickle))?$", name)
    return int(found[1]) if found else None
