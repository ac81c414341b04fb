"""Demo: one recovery, shown: train, kill a rank in the middle of a step, and compare with a run
that nobody disturbed.

    keepstep demo                      # what `make demo` runs, about a minute

Runs `keepstep run --nproc-per-node 2 gpt.py` twice. In the first run one rank gets SIGKILL. Comes
in: how many steps and ranks. Goes out: what there is to see, and an exit code. Leaves nothing
behind.

Invariant: the exit code is 0 only if both runs end with the same hash over parameters, optimizer,
schedule and data position, after one recovery.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.table import Table

from keepstep.config import resolve
from keepstep.dashboard.screen import Screen
from keepstep.edge.os.journal import read_journal
from keepstep.edge.os.own_modules import module_words
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.status_page import StatusPage, status_path
from keepstep.errors import KeepstepError
from keepstep.model.events import Event

GPT = Path(__file__).with_name("gpt.py").resolve()  # in a checkout, examples/gpt.py
SHOWN = {
    "rank-exited",
    "lost-notice",
    "rank-respawned",
    "ranks-restarted",
    "restore-offered",
    "loaded",
    "resumed",
    "regrouped",
    "next-step",
}
console = Screen(highlight=False, width=110)


class DemoRun:
    """One `keepstep run` of the example, as a person would type it."""

    def __init__(self, name: str, directory: Path, steps: int, ranks: int) -> None:
        self.job, self.out = f"demo-{name}-{os.getpid()}", directory / f"{name}.json"
        self.journal_path = directory / "state" / self.job / "journal.jsonl"
        self.job_dir = resolve(None, os.environ, self.job).job_dir
        command = [
            "keepstep",
            "run",
            "--nproc-per-node",
            str(ranks),
            "--job",
            self.job,
            "--state-dir",
            str(directory / "state"),
        ]
        script = [str(GPT), "--steps", str(steps), "--out", str(self.out)]
        near = os.path.relpath(GPT)
        typed = " ".join([*command[:4], GPT.name if near.startswith("..") else near, *script[1:3]])
        console.print(f"\n$ {typed}   ({name})", style="bold")
        self.process = subprocess.Popen(
            [sys.executable, *module_words("keepstep.cli.main", *command[1:], *script)]
        )

    def kill_in_step(self, rank: int, step: int) -> None:
        """SIGKILL `rank` once it is in the middle of `step`."""
        while self.process.poll() is None:
            try:
                page = StatusPage(MEMORY, status_path(self.job_dir, rank))
            except (OSError, ValueError):
                time.sleep(0.05)
                continue
            status = page.read()
            page.close()
            if status and status.step >= step:
                time.sleep(status.step_ns_last / 2e9)
                os.kill(status.pid, signal.SIGKILL)
                console.print(
                    f">>> SIGKILL to rank {rank} (process {status.pid}) in the middle of step "
                    f"{status.step}",
                    style="red",
                )
                return
            time.sleep(0.002)

    def finish(self) -> dict[str, object]:
        """Wait for the end and read what rank 0 wrote."""
        if self.process.wait(timeout=600) != 0:
            raise KeepstepError(f"the demo's run ended with exit code {self.process.returncode}")
        result: dict[str, object] = json.loads(self.out.read_text())
        return result

    def stop(self) -> None:
        """End it, where it runs; nobody will go on from its memory."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(timeout=30)
            clean = [
                sys.executable,
                *module_words("keepstep.cli.main", "clean", "--force", "--yes"),
            ]
            subprocess.run([*clean, "--job", self.job], stdout=subprocess.DEVNULL, check=False)

    def events(self) -> list[Event]:
        return list(read_journal(self.journal_path))


def timeline(events: list[Event]) -> Table:
    """From the kill to the next finished step, in milliseconds."""
    table = Table(title="what happened, and why", title_justify="left")
    table.add_column("after", justify="right")
    table.add_column("who")
    table.add_column("what")
    start = next(e.mono_ns for e in events if e.kind == "rank-exited")
    end = next(e.mono_ns for e in reversed(events) if e.kind == "next-step")
    for event in events:
        if event.kind in SHOWN and start <= event.mono_ns <= end:
            table.add_row(f"{(event.mono_ns - start) / 1e6:.0f} ms", event.who, event.why)
    return table


def demonstrate(steps: int = 100, ranks: int = 2) -> int:
    """Both runs, and what there is to see of them. The exit code: 0 when the ends are equal."""
    directory = Path(tempfile.mkdtemp(prefix="keepstep-demo-"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends below
    runs: list[DemoRun] = []
    try:
        runs.append(struck := DemoRun("killed", directory, steps, ranks))
        struck.kill_in_step(rank=ranks - 1, step=steps // 2)
        with_kill = struck.finish()
        runs.append(calm := DemoRun("undisturbed", directory, steps, ranks))
        without = calm.finish()
        return compare(struck.events(), calm.events(), with_kill, without)
    finally:
        for run in runs:
            run.stop()
        shutil.rmtree(directory, ignore_errors=True)


def compare(
    events: list[Event],
    undisturbed: list[Event],
    with_kill: dict[str, object],
    without: dict[str, object],
) -> int:
    """What happened, what it cost, and whether the ends are equal."""
    console.print()
    console.print(timeline(events))
    lost = [
        e.data["lost_steps"] for e in events if e.kind == "resumed" and e.data["source"] != "fresh"
    ]
    stalls = [e.data["stall_ns_per_step"] / 1e6 for e in undisturbed if e.kind == "summary"]
    equal = with_kill["sha256"] == without["sha256"]
    console.print(f"lost steps: {lost}    stall a step: {max(stalls):.2f} ms")
    console.print(
        f"sha256 with the kill:  {with_kill['sha256']}\nsha256 undisturbed:    {without['sha256']}"
    )
    told, colour = ("equal, bit for bit", "green") if equal else ("DIFFERENT", "red")
    console.print(told, style=f"bold {colour}")
    return 0 if equal and len(lost) == 1 else 1
