"""Persister: from pinned slots to a checkpoint in the store.

A child of the keeper, at low priority. One request a line on standard input ({"step", "slots": one path a rank}), one answer
a line on standard output ({"ok", "why"}). Reads the slots where they lie, verifies every block first, writes PyTorch's own
checkpoint format, reads it back, applies retention. Ends when its standard input ends, so it never outlives the keeper.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from keepstep.config import Settings, settings_from_text
from keepstep.core.retention import CheckpointInfo, parse_rules, to_keep
from keepstep.edge.arena import Slot
from keepstep.edge.manifest import Manifest
from keepstep.edge.store import Store
from keepstep.edge.torch.dcp.tree import RankState
from keepstep.edge.torch.dcp.write import write_checkpoint
from keepstep.edge.torch.state import rebuild
from keepstep.edge.torch.views import overlay
from keepstep.errors import KeepstepError
from keepstep.model.layout import Shard
from keepstep.model.units import human_bytes


def persist(settings: Settings, step: int, paths: list[Path]) -> str:
    """Write one checkpoint from the slots of all ranks. Returns what was done. Raises KeepstepError, OSError, LookupError."""
    assert settings.store is not None
    began = time.monotonic()
    store = Store(settings.store)
    with ExitStack() as stack:
        states, fingerprint, nbytes, losses = [], {}, 0, []
        for path in paths:
            slot = Slot(path)
            stack.callback(slot.close)
            state, about, loss, size = _rank_state(slot)
            states.append(state)
            fingerprint = about
            nbytes += size
            losses.append(loss)
        metrics = {} if math.isnan(losses[0]) else {"loss": losses[0]}
        write_checkpoint(store, step, settings.job, states, metrics, fingerprint)
        del states, state  # their tensors look into the slots
    decision = to_keep(parse_rules(settings.keep), [_info(m, step) for m in store.list_checkpoints().checkpoints])
    for old in decision.removed:
        store.remove(old)
    removed = list(decision.removed)
    store.remove_incomplete()
    words = f", removed steps {removed} ({decision.removed[removed[0]]})" if removed else ""
    return f"{human_bytes(nbytes)} written and read back in {time.monotonic() - began:.2f} s{words}"


def _rank_state(slot: Slot) -> tuple[RankState, dict[str, Any], float, int]:
    header, layout = slot.verify()
    tensors = [overlay(slot, s) for s in layout.segments]
    shards: dict[int, Shard] = {id(t): s.spec.shard for t, s in zip(tensors, layout.segments, strict=True) if s.spec.shard is not None}
    tree, about = rebuild(bytes(slot.payload[layout.objects_offset : header.payload_bytes]), tensors)
    return RankState(header.rank, tree, shards), about, header.loss, header.payload_bytes


def _info(manifest: Manifest, just_verified: int) -> CheckpointInfo:
    # A published manifest means that its bytes were read back once, when it was written.
    return CheckpointInfo(manifest.step, manifest.step <= just_verified, manifest.metrics)


def main() -> None:
    settings = settings_from_text(sys.argv[1])
    os.nice(10)
    import torch

    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            why, ok = persist(settings, int(request["step"]), [Path(p) for p in request["slots"]]), True
        except (KeepstepError, OSError, LookupError, RuntimeError, ValueError) as error:
            why, ok = f"{type(error).__name__}: {error}", False
        print(json.dumps({"ok": ok, "why": why}), flush=True)


if __name__ == "__main__":
    main()
