"""One contender in a process of its own environment: does what it is told, line by line, and tells
what it took.

    python -m benchmarks.peers.contender torch_save ROOM             # the trainer
    python -m benchmarks.peers.contender torch_save ROOM --companion # what outlives the trainer

In come JSON lines, {"do": ..., ...}; out goes one JSON line for each, {"ok": true, ...} or {"ok":
false, "why": ...}. With "tell", a line {"saving": step} goes out before each call of `save`, so
that whoever reads can kill this process in the middle of one. Libraries that print would break
the lines: what they write to standard output goes to standard error.

Invariant: nothing is measured here but durations on this process's own monotonic clock.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from benchmarks.peers.saver import Contender, contender


class Trainer:
    def __init__(self, name: str, room: Path, out: TextIO) -> None:
        self._name, self._room, self._out = name, room, out
        self._saver: Contender | None = None
        self._step = 0

    def tell(self, **words: Any) -> None:
        self._out.write(json.dumps(words) + "\n")
        self._out.flush()

    @property
    def saver(self) -> Contender:
        assert self._saver is not None, "asked before prepare"
        return self._saver

    def prepare(self, kind: str) -> dict[str, Any]:
        """The model, as it is before anything is saved."""
        from benchmarks.peers.workload import Workload

        self._work = Workload(kind)
        self._work.stamp(0)
        tensors = list(self._work.tensors())
        return {"state_bytes": self._work.state_bytes, "tensors": len(tensors)}

    def begin(self) -> dict[str, Any]:
        """Sets the contender up and restores what there is."""
        began = time.perf_counter()
        self._saver = contender(self._name)(self._work, self._room)
        ready = time.perf_counter()
        found = self._saver.restore()
        took_s = time.perf_counter() - began
        self._step = self._work.stamped() or 0
        whole = self._work.stamped() is not None
        return {
            "setup_s": ready - began,
            "restore_s": took_s,
            "found": found,
            "whole": whole,
            "step": self._step,
        }

    def train(self, count: int, save: bool) -> dict[str, Any]:
        """A block of training steps, each saved or none. What is under way at the end is waited
        for, apart."""
        steps_s, calls_s = [], []
        skipped = self.saver.skipped()
        for _ in range(count):
            began = time.perf_counter()
            self._work.train()
            trained = time.perf_counter()
            if save:
                self._step += 1
                self.saver.save(self._step)
            ended = time.perf_counter()
            steps_s.append(ended - began)
            calls_s.append(ended - trained)
        began = time.perf_counter()
        self.saver.wait()
        return {
            "steps_s": steps_s,
            "calls_s": calls_s if save else [],
            "wait_s": time.perf_counter() - began,
            "skipped": self.saver.skipped() - skipped,
        }

    def stamp(self, count: int, pause_s: float, tell: bool = False) -> dict[str, Any]:
        """Steps that overwrite the whole state with their number; what a device would compute
        meanwhile is slept."""
        for _ in range(count):
            time.sleep(pause_s)
            self._step += 1
            self._work.stamp(self._step)
            if tell:
                self.tell(saving=self._step)
            self.saver.save(self._step)
        if not tell:
            self.saver.wait()
        return {"step": self._step}

    def end(self) -> dict[str, Any]:
        self.saver.close()
        return {}


def serve(trainer: Trainer) -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        what = asked.pop("do")
        assert what in ("prepare", "begin", "train", "stamp", "end"), what
        try:
            trainer.tell(ok=True, **getattr(trainer, what)(**asked))
        except Exception as error:  # noqa: BLE001 - any library may raise anything
            import traceback

            traceback.print_exc()
            why = str(error).strip().partition("\n")[0]
            trainer.tell(ok=False, why=f"{type(error).__name__}: {why}"[:200])
        if what == "end":
            break


def main() -> None:
    name, room = sys.argv[1], Path(sys.argv[2])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if "--companion" in sys.argv:
        import importlib

        module = importlib.import_module(f"benchmarks.peers.contenders.{name}")
        life = module.companion(room)
        next(life)
        for _ in sys.stdin:  # a line each time before the trainer is started again
            next(life)
        life.close()
    else:
        serve(Trainer(name, room, out))
    out.flush()
    sys.stderr.flush()
    os._exit(0)  # threads and atexit of many libraries would hang here, and are not measured


if __name__ == "__main__":
    main()
