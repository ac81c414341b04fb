"""Persister: from the slots of a node's ranks to that node's part of a checkpoint in the store.

A child of the keeper, at low priority. One request a line on standard input, one answer a line on
standard output:

    {"act": "survey" | "part" | "publish" | "drop", "node", "step", "epoch", "attempt",
     "ranks": how many each node has}
    {"ok", "why", "there": whether the whole checkpoint has been in the store all along}

Reads the slots where they lie, verifies every block first, writes PyTorch's own checkpoint format,
reads it back. The leading node's persister also clears the place, publishes, and applies retention.
It holds the slots by locks of its own from its survey to its part, so that what it writes is one
state even when the keeper dies. Ends when its standard input ends, so it never outlives the keeper
for long.

Invariant: an attempt's files are removed only by the leader of that attempt, and never when the
checkpoint exists.
"""

from __future__ import annotations

import json
import math
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from keepstep.config import Settings, settings_from_text
from keepstep.core.economics.retention import CheckpointInfo, parse_rules, to_keep
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot
from keepstep.edge.store.manifest import Manifest
from keepstep.edge.store.parts import Attempt
from keepstep.edge.store.store import Draft, Store
from keepstep.edge.torch.dcp.tree import RankState
from keepstep.edge.torch.dcp.write import NodeValues, already_there, publish, survey, write_part
from keepstep.edge.torch.state import rebuild
from keepstep.edge.torch.views import overlay
from keepstep.errors import KeepstepError
from keepstep.model.layout import Shard
from keepstep.model.mesh import LEADER
from keepstep.model.snapshot import Stamp
from keepstep.model.units import human_bytes
from keepstep.runtime.slot_locks import pin, unpin


@dataclass
class _Work:
    """What this process keeps of an attempt from one act to the next."""

    attempt: Attempt
    node: int
    draft: Draft
    slots: list[Slot]
    metrics: dict[str, float] = field(default_factory=dict)
    fingerprint: dict[str, Any] = field(default_factory=dict)
    values: NodeValues = field(default_factory=dict)

    def let_go(self) -> None:
        """Let the ranks have their slots back."""
        self.values.clear()
        unpin(self.slots)
        self.slots.clear()


class Persister:
    """One node's persister. At most one attempt at a time: a new one takes the place of the one
    before."""

    def __init__(self, settings: Settings) -> None:
        assert settings.store is not None
        self._settings, self._store = settings, Store(settings.store)
        self._work: _Work | None = None

    def act(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request."""
        attempt = Attempt(
            self._settings.job,
            Stamp(request["step"], request["epoch"]),
            int(request["attempt"]),
            tuple(map(int, request["ranks"])),
        )
        act, node = str(request["act"]), int(request["node"])
        try:
            if act == "survey":
                return self._survey(attempt, node)
            work = self._work
            if work is None or work.attempt != attempt:
                return _answer(
                    act == "drop",
                    f"node {node}: expected a survey of this attempt before its {act}, found none",
                )
            if act == "part":
                return self._part(work)
            if act == "publish":
                return self._publish(work)
            self.give_up()
            return _answer(True, f"attempt {attempt.number} is given up")
        except (KeepstepError, OSError, LookupError, RuntimeError, ValueError) as error:
            self.give_up()
            return _answer(False, f"{type(error).__name__}: {error}")

    def give_up(self) -> None:
        """Whatever is under way is over. A node that does not lead leaves its files to the leader:
        it may be publishing them."""
        work, self._work = self._work, None
        if work is not None:
            work.let_go()
            if work.node == LEADER:
                work.draft.abandon()

    def _survey(self, attempt: Attempt, node: int) -> dict[str, Any]:
        self.give_up()
        step = attempt.stamp.step
        slots = pin(MEMORY, self._settings.job_dir, attempt.stamp, attempt.ranks_of(node))
        if slots is None:
            return _answer(
                False,
                f"node {node}: expected its ranks to hold {attempt.stamp}, found that one "
                "does not any more",
            )
        try:
            if node == LEADER:
                present = already_there(self._store, attempt)
                if present is not None:
                    unpin(slots)
                    return _answer(
                        True, f"step {step} is in the store already, and intact", there=True
                    )
                self._store.remove_incomplete(but=step)
                self._store.retract(step)  # at most a damaged one
                draft = self._store.draft(step, mine=attempt.owns)
            else:
                draft = self._store.join(step)
        except BaseException:
            unpin(slots)
            raise
        self._work = work = _Work(attempt, node, draft, slots)
        states: list[RankState] = []
        for slot in slots:
            state, about, loss = _rank_state(slot)
            if not states:
                work.fingerprint, work.metrics = about, {} if math.isnan(loss) else {"loss": loss}
            states.append(state)
        work.values = survey(draft, attempt, node, states)
        return _answer(True, f"{len(states)} ranks surveyed")

    def _part(self, work: _Work) -> dict[str, Any]:
        part = write_part(
            work.draft, work.attempt, work.node, work.values, work.metrics, work.fingerprint
        )
        work.let_go()
        return _answer(
            True, f"{human_bytes(sum(f.bytes for f in part.files.values()))} written and read back"
        )

    def _publish(self, work: _Work) -> dict[str, Any]:
        manifest = publish(work.draft, work.attempt)
        self._work = None
        removed = self._retain(manifest.step)
        words = "".join(
            f", removed steps {list(removed)} ({why})" for why in list(removed.values())[:1]
        )
        return _answer(True, f"{human_bytes(manifest.total_bytes)} written and read back{words}")

    def _retain(self, step: int) -> dict[int, str]:
        infos = [_info(m, step) for m in self._store.list_checkpoints().checkpoints]
        removed = dict(to_keep(parse_rules(self._settings.keep), infos).removed)
        for old in removed:
            self._store.remove(old)
        return removed


def _answer(ok: bool, why: str, there: bool = False) -> dict[str, Any]:
    return {"ok": ok, "why": why, "there": there}


def _rank_state(slot: Slot) -> tuple[RankState, dict[str, Any], float]:
    header, layout = slot.verify()
    tensors = [overlay(slot, s) for s in layout.segments]
    shards: dict[int, Shard] = {
        id(t): s.spec.shard
        for t, s in zip(tensors, layout.segments, strict=True)
        if s.spec.shard is not None
    }
    tree, about = rebuild(
        bytes(slot.payload[layout.objects_offset : header.payload_bytes]), tensors
    )
    return RankState(header.rank, tree, shards), about, header.loss


def _info(manifest: Manifest, just_verified: int) -> CheckpointInfo:
    # A manifest means that its bytes were read back once, before it was written.
    return CheckpointInfo(manifest.step, manifest.step <= just_verified, manifest.metrics)


def main() -> None:
    settings = settings_from_text(sys.argv[1])
    os.nice(10)
    import torch

    torch.set_num_threads(1)
    persister = Persister(settings)
    with suppress(BrokenPipeError):  # the keeper died, and nobody hears the answer
        for line in sys.stdin:
            print(json.dumps(persister.act(json.loads(line))), flush=True)
    persister.give_up()


if __name__ == "__main__":
    main()
